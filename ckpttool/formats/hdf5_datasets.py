"""What an HDF5 file holds: its datasets, walked depth first, each as a stored tensor.

Bytes
-----
See `ckpttool.formats.hdf5`.  libhdf5 reads the headers; of contents only strings are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from sys import intern

import h5py
from h5py import h5, h5d, h5g, h5l, h5o, h5p, h5s, h5t

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.hdf5_types import find_dtype, why_not
from ckpttool.formats.reading import stamp_of
from ckpttool.model.catalog import (
    Extent,
    SourceStamp,
    StoredFile,
    StoredTensor,
    TensorMeta,
    refuse_shared_bytes,
)
from ckpttool.model.dtypes import TEXT

SIGNATURE_BYTES = 8
MAX_TEXT_BYTES = 64 << 20  # a string is read into memory; larger ones are refused by name
NEVER_WRITTEN = "never written (no storage is allocated); write its values or leave it out"
CHUNKED = "chunked, compressed, compact or virtual; rewrite the file with `h5repack -l CONTI`"


def read_datasets(
    path: str, on_object: Callable[[], None]
) -> tuple[dict[str, StoredTensor], SourceStamp]:
    """Return the datasets of a file, by name, and the stamp of the file.

    Parameters
    ----------
    path
        The file.
    on_object
        Called before each dataset is read, as a sign of progress.

    Raises
    ------
    FormatError
        It is damaged, or shorter than its header says, or a dataset lies upon another, or upon the
        header of one.
    UnsupportedError
        A dataset cannot be read as one extent of the file.
    """
    with _as_format_error(path), h5py.File(path, "r", locking=False) as file:
        stamp = stamp_of(file.id.get_vfd_handle())
        tensors, stored = {}, StoredFile(path, stamp)
        base = file.userblock_size
        contents = []
        places = {base: (base, base + SIGNATURE_BYTES, "the head of the file")}
        for name, dataset in _datasets(path, h5g.open(file.id, b"/")):
            on_object()
            tensors[name] = tensor = _read_dataset(stored, stamp.nbytes, name, dataset)
            header = base + h5o.get_info(dataset).addr
            if header in places:  # another link to it
                continue
            places[header] = (header, header + 1, f"the header of {name}")
            nbytes = tensor.meta.nbytes
            if tensor.meta.text is not None:
                nbytes = dataset.get_type().get_size()
            offset = dataset.get_offset()
            if offset is not None and nbytes:
                contents.append((offset, offset + nbytes, name))
    refuse_shared_bytes(path, [*places.values(), *contents])
    return tensors, stamp


@contextmanager
def _as_format_error(path: str) -> Iterator[None]:
    """Turn what libhdf5 reports of a broken file into a `FormatError`.

    h5py reports damage as OSError without an errno, RuntimeError, KeyError or ValueError.  An error
    with an errno is the system's, and becomes an OSError.
    """
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
        number = find_errno(error)
        if number is not None:
            raise OSError(number, os.strerror(number), path) from error
        raise FormatError(path, None, f"not readable as HDF5: {error}") from error


def find_errno(error: Exception) -> int | None:
    """Return the errno of an error of h5py, perhaps only in its text; None without one."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"errno = ([1-9]\d{0,3})\b", str(error))
    return int(found[1]) if found else None


def _links(group: h5g.GroupID) -> list[tuple[bytes, int]]:
    """Return name and type of a group's links: in order of creation if recorded, else by name."""
    found: list[tuple[bytes, int]] = []
    tells = group.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_INDEXED
    group.links.iterate(
        lambda name, info: found.append((name, info.type)),
        info=True,
        idx_type=h5.INDEX_CRT_ORDER if tells else h5.INDEX_NAME,
    )
    return found


def _datasets(path: str, root: h5g.GroupID) -> Iterator[tuple[str, h5d.DatasetID]]:
    """Yield name and dataset of everything in the file, depth first, without recursion."""
    seen: set[int] = set()
    walks = [_walk(path, "", root, seen)]
    while walks:
        found = next(walks[-1], None)
        if found is None:
            walks.pop()
        elif isinstance(found[1], h5d.DatasetID):
            yield found
        else:
            walks.append(_walk(path, found[0] + "/", found[1], seen))


def _walk(
    path: str, prefix: str, group: h5g.GroupID, seen: set[int]
) -> Iterator[tuple[str, h5d.DatasetID | h5g.GroupID]]:
    """Yield name and object of each dataset and group in one group."""
    address = h5o.get_info(group).addr
    if address in seen:
        raise UnsupportedError(path, None, f"{prefix}: the same group under two names")
    seen.add(address)
    for link, kind in _links(group):
        try:
            name = prefix + link.decode()
        except UnicodeDecodeError as error:
            raise FormatError(path, None, f"{link!r}: a name that is not UTF-8") from error
        if kind != h5l.TYPE_HARD:
            reason = "a soft or external link; `h5repack --merge` puts the data in place"
            raise UnsupportedError(path, None, f"{name}: {reason}")
        item = h5o.open(group, link)
        if isinstance(item, h5d.DatasetID | h5g.GroupID):
            yield name, item


def _read_dataset(file: StoredFile, size: int, name: str, dataset: h5d.DatasetID) -> StoredTensor:
    path = file.path
    offset = dataset.get_offset()  # none but those of contiguous, allocated, internal ones
    if offset is None:
        reason = _why_unplaced(dataset)
        if reason is not None:
            raise UnsupportedError(path, None, f"{name}: {reason}")
    kind = dataset.get_type()
    if isinstance(kind, h5t.TypeStringID):
        return StoredTensor(TensorMeta(name, TEXT, (), _read_text(path, name, dataset)), file, ())
    dtype = find_dtype(kind, dataset)
    if dtype is None:
        raise UnsupportedError(path, None, f"{name}: {why_not(kind)}")
    meta = TensorMeta(intern(name), dtype, tuple(int(n) for n in dataset.shape))
    nbytes = meta.nbytes
    if not nbytes:
        return StoredTensor(meta, file, ())
    if offset is None:
        is_contiguous = dataset.get_create_plist().get_layout() == h5d.CONTIGUOUS
        raise UnsupportedError(path, None, f"{name}: {NEVER_WRITTEN if is_contiguous else CHUNKED}")
    if offset + nbytes > size:
        raise FormatError(
            path,
            offset,
            f"{name}: {nbytes} bytes from here on, the file has {size} (file cut short?)",
        )
    return StoredTensor(meta, file, (Extent(offset, nbytes),))


def _why_unplaced(dataset: h5d.DatasetID) -> str | None:
    """Return why a dataset has no bytes in the file; None if it is empty, a string or unwritten."""
    if dataset.get_space().get_simple_extent_type() == h5s.NULL:
        return "a dataset without a dataspace (H5S_NULL); write a value or leave it out"
    if dataset.get_create_plist().get_external_count():
        return "its data lie in an external file; `h5repack -l CONTI` brings them in"
    return None


def _read_text(path: str, name: str, dataset: h5d.DatasetID) -> str:
    if dataset.shape != ():
        reason = "an array of strings; write every string as a dataset of its own"
        raise UnsupportedError(path, None, f"{name}: {reason}")
    if dataset.get_space_status() == h5d.SPACE_STATUS_NOT_ALLOCATED:
        raise UnsupportedError(path, None, f"{name}: {NEVER_WRITTEN}")
    if dataset.get_type().get_size() > MAX_TEXT_BYTES:
        raise UnsupportedError(path, None, f"{name}: a string of more than {MAX_TEXT_BYTES} bytes")
    text = h5py.Dataset(dataset).asstr()[()]
    return str(text).rstrip("\0")
