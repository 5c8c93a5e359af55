"""``.h5``: one dataset for each parameter, at the path that is the parameter's exact name.

Bytes
-----
An ordinary HDF5 file.  Every tensor is a dataset with contiguous layout, so that its bytes are
one extent of the file, C order, little endian; `create` allocates them and writes none.  Nothing
in the file depends on the time or the machine.  Groups keep the order in which links were made, so
that parameters come back in the order in which they were given, members of a group together.

* ``Bool`` is the enumeration that h5py reads as bool.  Complex types are h5py's compound (r, i).
* ``BFloat16``, ``Float8E4M3FN`` and ``Float8E5M2`` are HDF5 floating-point types of 2, 1 and 1
  bytes.  HDF5 knows no type without infinities: its readers show ``Float8E4M3FN`` values of 256
  and more as Inf or NaN.  The bytes are right.
* What HDF5 has no type for (``HiFloat8``, ``Int4``, ``random_op``) is unsigned bytes with an
  attribute ``dtype`` that names the type.
* A string entry is a scalar UTF-8 string of fixed length, padded with NUL.

MUST for reading: contiguous layout, allocated, little endian, a type of the table, hard links
only.  A dataset that h5py made without chunks or compression is like that.  Groups are only paths.

Source
------
The HDF5 reference manual (H5P, H5T, H5D); h5py's "Special types" for bool, complex and strings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import h5py
import numpy as np
from h5py import h5d, h5f, h5g, h5p, h5s, h5t

from ckpttool.formats.hdf5_datasets import find_errno, read_datasets
from ckpttool.formats.hdf5_types import TYPES, fixed_string, name_dtype
from ckpttool.model.catalog import Extent, FileIndex, StoredFile, StoredTensor, TensorMeta
from ckpttool.model.dtypes import DTYPES

LEAST_HEADER_BYTES = 256  # of a dataset, name included; 330 to 400 were seen
MAX_AXES = 32  # of a dataspace (H5S_MAX_RANK)
MAX_PATH_COMPONENT_BYTES = 60_000  # an HDF5 link and its name share an object header of 64 KiB


class Hdf5:
    """The `Format` of HDF5 files.

    Parameters
    ----------
    on_object
        Called before each dataset of a file is read, as a sign of progress.
    """

    name = "hdf5"

    def __init__(self, on_object: Callable[[], None] = lambda: None) -> None:
        self._on_object = on_object

    def refusals(self, tensors: Sequence[TensorMeta], attrs: Collection[str] = ()) -> Iterator[str]:
        """Yield a message for each name, string and shape that HDF5 cannot hold."""
        if "crc_num" in attrs:
            yield "HDF5 has no place for MindSpore's checksum; write --format ckpt or safetensors"
        names = {meta.name for meta in tensors}
        for meta in tensors:
            parts = meta.name.split("/")
            groups = ("/".join(parts[:i]) for i in range(1, len(parts)))
            clash = next((group for group in groups if group in names), None)
            if clash is not None:
                yield (
                    f"{meta.name}: HDF5 cannot hold it beside {clash}, which would have to be "
                    "dataset and group at once; write --format ckpt or safetensors instead"
                )
            elif (
                any(
                    part in ("", ".") or len(part.encode()) > MAX_PATH_COMPONENT_BYTES
                    for part in parts
                )
                or "\0" in meta.name
            ):
                yield (
                    f"{meta.name!r}: no exact path in HDF5; "
                    "write --format ckpt or safetensors instead"
                )
            if meta.text is not None and "\0" in meta.text:
                yield f"{meta.name}: an HDF5 string cannot hold NUL; write --format ckpt instead"
            if len(meta.shape) > MAX_AXES:
                yield (
                    f"{meta.name}: {len(meta.shape)} axes, HDF5 can have {MAX_AXES}; "
                    "write --format ckpt or safetensors instead"
                )

    def read_index(self, path: str) -> FileIndex:
        """Return the datasets of the file; contents are not read, but for strings."""
        tensors, stamp = read_datasets(path, self._on_object)
        return FileIndex(path, self.name, stamp.nbytes, tensors, stamps={path: stamp})

    def file_bytes(self, tensors: Sequence[TensorMeta], attrs: Collection[str] = ()) -> int:
        """Return somewhat less than the size of the file that `create` makes of these tensors."""
        return sum(meta.nbytes + LEAST_HEADER_BYTES for meta in tensors)

    def create(
        self, path: str, tensors: Sequence[TensorMeta], attrs: Mapping[str, str]
    ) -> FileIndex:
        """Write a file with every dataset allocated and none written, but for strings."""
        stored: dict[str, StoredTensor] = {}
        whole = StoredFile(path)
        groups: set[str] = set()
        with _as_os_error(path), h5py.File(_new_file(path)) as file:
            for meta in tensors:
                _create_groups(file.id, meta.name, groups)
                dataset = _create_dataset(file.id, meta)
                has_bytes = meta.text is None and meta.nbytes > 0
                extents = [Extent(dataset.get_offset(), meta.nbytes)] if has_bytes else []
                stored[meta.name] = StoredTensor(meta, whole, tuple(extents))
        return FileIndex(path, self.name, os.stat(path).st_size, stored)  # noqa: PTH116 - a string from end to end

    def seal(self, path: str, crc: int | None = None) -> None:
        """Do nothing: the file is complete when its contents are."""


IN_ORDER = h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED


def _new_file(path: str) -> h5f.FileID:
    """Create a file as `h5py.File` does, without the time that old versions keep in the root."""
    options = h5p.create(h5p.FILE_CREATE)
    options.set_link_creation_order(IN_ORDER)
    options.set_obj_track_times(False)
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5f.LIBVER_EARLIEST, h5f.LIBVER_LATEST)
    access.set_file_locking(False, ignore_when_disabled=True)
    return h5f.create(os.fsencode(path), h5f.ACC_TRUNC, options, access)


def _utf8_links() -> h5p.PropLCID:
    links = h5p.create(h5p.LINK_CREATE)
    links.set_char_encoding(h5t.CSET_UTF8)
    return links


def _create_groups(file: h5g.GroupID, name: str, groups: set[str]) -> None:
    """Create the groups above a dataset that are not in ``groups``, and add them to it."""
    at = name.find("/")
    while at > 0:
        if name[:at] not in groups:
            options = h5p.create(h5p.GROUP_CREATE)
            options.set_link_creation_order(IN_ORDER)
            options.set_obj_track_times(False)
            h5g.create(file, name[:at].encode(), _utf8_links(), options)
            groups.add(name[:at])
        at = name.find("/", at + 1)


def _create_dataset(file: h5g.GroupID, meta: TensorMeta) -> h5d.DatasetID:
    links = _utf8_links()
    options = h5p.create(h5p.DATASET_CREATE)
    options.set_layout(h5d.CONTIGUOUS)
    options.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    options.set_fill_time(h5d.FILL_TIME_NEVER)
    options.set_obj_track_times(False)
    if meta.text is not None:
        data = np.array(meta.text.encode(), dtype=f"S{max(1, meta.nbytes)}")
        kind = fixed_string(max(1, meta.nbytes))
        dataset = h5d.create(
            file, meta.name.encode(), kind, h5s.create(h5s.SCALAR), options, lcpl=links
        )
        dataset.write(h5s.ALL, h5s.ALL, data, kind)
        return dataset
    space = h5s.create_simple(meta.shape) if meta.shape else h5s.create(h5s.SCALAR)
    hdf5 = DTYPES[meta.dtype].hdf5
    dataset = h5d.create(file, meta.name.encode(), TYPES[hdf5], space, options, lcpl=links)
    if hdf5 == "bytes":
        name_dtype(dataset, meta.dtype)
    return dataset


@contextmanager
def _as_os_error(path: str) -> Iterator[None]:
    """Turn what libhdf5 reports of a full disk into the OSError that it was."""
    try:
        yield
    except RuntimeError as error:
        number = find_errno(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), path) from error
