"""``.h5``: one dataset for each parameter, at the path that is the parameter's exact name.

libhdf5 reads and makes the headers; this module decides which of its files are read, and how a
tensor is laid out in a new one.  Contents are left to `ckpttool.storage`: a dataset is an extent of
the file.  Damaged files are left to `ckpttool.formats.sandbox`, because libhdf5 may crash on them.

Bytes
-----
An ordinary HDF5 file.  Every tensor is a dataset with contiguous layout: its bytes are one extent
of the file, C order, little endian.  `index` allocates them and writes none.  The file does not
depend on the time or the machine.  Groups record the order of their links.  So parameters are read
back in the order of writing, members of a group together.

The type of a dataset is a datatype message of its header:

* Integers and IEEE floats are HDF5's own (H5T_STD_I8LE to H5T_STD_U64LE, H5T_IEEE_F16LE to F64LE).
* ``Bool`` is an enumeration of 1 byte, FALSE = 0, TRUE = 1; complex types are compounds of the
  members r and i.  h5py reads both as numpy's.
* ``BFloat16``, ``Float8E4M3FN`` and ``Float8E5M2`` are floats whose sign, exponent and mantissa
  fill 2, 1 and 1 bytes from the top: (8, 7), (4, 3) and (5, 2) bits, bias 127, 7 and 15.  All float
  types of HDF5 have infinities.  So its readers show ``Float8E4M3FN`` values of 256 and more as Inf
  or NaN; the bytes are right.
* ``HiFloat8``, ``Int4`` and ``random_op``, which HDF5 lacks, are unsigned bytes with an attribute
  ``dtype``: the name of the type, a scalar string of fixed length.
* A string entry is a scalar UTF-8 string of fixed length, padded with NUL.

Attributes of the root group whose names begin with ``ckpttool.`` say how the file was made; see
`ckpttool.operations.plans`.  They are scalar UTF-8 strings of variable length, which h5py returns
as ``str``, written first and in the order of their names.  Strings of fixed length are read as
well.  No other attribute of a group is read.  libhdf5 can hang on a damaged heap of such strings.
So they are read only if the objects of all heaps (``GCOL``) in the first `_HEAP_BYTES` fill them.

A dataset that is read MUST be contiguous, allocated and little endian, of a type of the table, with
hard links only.  h5py makes such datasets without chunks and compression.  Groups are only paths.
libhdf5 reads the headers; only strings are read from the contents.

Source
------
The HDF5 file format specification (superblock, datatype message) and reference manual (H5P, H5T,
H5D); h5py's "Special types" for bool, complex and strings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from shlex import quote
from sys import intern
from typing import TYPE_CHECKING

import h5py
import numpy as np
from h5py import h5, h5a, h5d, h5f, h5g, h5i, h5l, h5o, h5p, h5s, h5t
from msgspec.structs import replace

from ckpttool.formats.base import (
    HDF5_SIGNATURE,
    MAX_TEXT_BYTES,
    PROVENANCE,
    UNNAMED,
    Format,
    Header,
    NewTensors,
    read_header,
    refusal,
)
from ckpttool.formats.local import demand_same, open_file
from ckpttool.model.dtypes import DTYPES, TEXT
from ckpttool.model.tensors import (
    Extent,
    FileIndex,
    PartlyReadError,
    Remains,
    StoredFile,
    StoredTensor,
    TensorMeta,
    VirtualFileError,
)
from ckpttool.problems import Diagnostic, FormatError, UnsupportedError, join_clauses
from ckpttool.system import open_scratch
from ckpttool.wording import shorten

if TYPE_CHECKING:
    from ckpttool.model.slicing import Box

MAX_AXES = 32  # of a dataspace (H5S_MAX_RANK)
MAX_PATH_COMPONENT_BYTES = 60_000  # an HDF5 link and its name share an object header of 64 KiB
_LEAST_HEADER_BYTES = 256  # of a dataset, name included; 330 to 400 were observed
# Of a file, of a dataset and of each group above it; the names count several times.  Files of 1 to
# 1,000 datasets, with names of 2 to 3,000 characters, stay below (measured with libhdf5 1.14).
_MOST_FILE_BYTES = 4096
_HEAP_FILE_BYTES = 4096  # of the heap of attributes, if there are any; it may be larger
_MOST_LINK_BYTES = 512
_MOST_NAMES = 3
_CACHED_BYTES = 6 << 10  # of a new dataset in the cache of libhdf5
_CACHE_BYTES = 40 << 20  # largest size of that cache
_READ_CACHE_BYTES = 2 << 20  # while a file is read, which takes each header once
_FLAGS_AT = 11  # consistency flags of a superblock of version 3, behind its three size bytes
_WRITE_FLAGS = 0b101  # opened for writing; for writing while others read (SWMR)
_HEAP_BYTES = 64 << 10  # where the heap of the attributes lies, which are written first
_HEAP_SIGNATURE, _HEAP_HEADER_BYTES, _HEAP_OBJECT_BYTES = b"GCOL", 16, 16
_DTYPE_ATTRIBUTE = "dtype"
_MOST_EXTENTS = 1000  # of one dataset; its header holds about 2,700
SHARDS = ".shards"  # the group of the datasets that virtual ones are made of
VIRTUAL = f"{PROVENANCE}files"  # the attribute of virtual files: the files with the bytes, in JSON
_REPACK = "h5repack -l CONTI FILE NEW.h5"
_WRITE_AGAIN = "write the dataset again"
_NEVER_WRITTEN = ("the dataset was never written", _WRITE_AGAIN, "no storage is allocated")
_FILTERS = range(1, 7)  # deflate, shuffle, fletcher32, szip, nbit, scaleoffset: h5repack has them
_H5PY = "`ckpttool help unsupported` has lines of h5py; compare the number of tensors"
_IN_ORDER = h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED


class Hdf5(Format):
    """The `Format` of HDF5 files; ``on_object`` is called before each dataset of a file is read."""

    name, word, is_loaded_by_mindspore = "hdf5", "HDF5", False

    def __init__(self, on_object: Callable[[], None] = lambda: None) -> None:
        self._on_object = on_object

    def refusals(
        self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}
    ) -> Iterator[Diagnostic]:
        """Yield a diagnostic for names, strings and shapes that HDF5 cannot hold."""
        names = {meta.name for meta in tensors}
        for meta in tensors:
            parts = meta.name.split("/")
            groups = ("/".join(parts[:i]) for i in range(1, len(parts)))
            clash = next((group for group in groups if group in names), None)
            if clash is not None:
                yield refusal(meta, f"HDF5 cannot hold it beside a tensor {clash}")
            elif (
                "\0" in meta.name
                or not {"", "."}.isdisjoint(parts)
                or max(len(part.encode()) for part in parts) > MAX_PATH_COMPONENT_BYTES
            ):
                yield refusal(meta, "HDF5 cannot keep this name exactly")
            if meta.text is not None and "\0" in meta.text:
                yield refusal(meta, "an HDF5 string cannot hold NUL")
            if len(meta.shape) > MAX_AXES:
                yield refusal(meta, f"{len(meta.shape)} axes; HDF5 has at most {MAX_AXES}")
        yield from super().refusals(tensors, attrs)

    def read_index(self, file: StoredFile) -> FileIndex:
        """Return the header of the file; only strings are read from the contents."""
        path, tensors, skipped = file.path, {}, list[str]()
        unread: dict[str, UnsupportedError] = {}
        with _as_format_error(path), h5py.File(path, "r", locking=False) as opened:
            cache = opened.id.get_mdc_config()
            cache.max_size = _READ_CACHE_BYTES
            opened.id.set_mdc_config(cache)
            root = h5g.open(opened.id, b"/")
            if h5a.exists(root, VIRTUAL.encode()):
                reason = "its bytes are in other files (merge --virtual)"
                raise VirtualFileError(path, None, reason, f"{quote(path)} alone as SRC")
            stamp = demand_same(file, opened.id.get_vfd_handle())
            base = opened.userblock_size
            contents = []
            places = {base: (base, base + len(HDF5_SIGNATURE), "the head of the file")}
            attrs = _read_provenance(root, os.pread(opened.id.get_vfd_handle(), _HEAP_BYTES, base))
            for name, dataset in _walk_file(path, root):
                self._on_object()
                try:
                    tensors[name] = tensor = _read_dataset(file, stamp.nbytes, name, dataset)
                except UnsupportedError as error:
                    if _is_dimension(dataset):
                        skipped.append(name)
                    else:
                        unread[name] = error
                    continue
                # A link has the address, too; but this call finds damage that no other does.
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
        _refuse_shared_bytes(path, [*places.values(), *contents])
        index = FileIndex((file,), self.name, stamp.nbytes, tensors, attrs, skipped=(*skipped,))
        if unread:
            first, *others = unread.values()
            more = shorten((error.reason for error in others), 2)
            facts = join_clauses(first.facts, more)
            remains = Remains(index, {**dict.fromkeys(unread)}, True)
            raise PartlyReadError(path, None, first.reason, first.hint, facts, remains)
        return index

    def file_bytes(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> int:
        """Return the least size of the file with the `index`, in bytes; libhdf5 need not run."""
        heap = _HEAP_FILE_BYTES if any(name.startswith(PROVENANCE) for name in attrs) else 0
        return heap + sum(meta.nbytes + _LEAST_HEADER_BYTES for meta in tensors)

    def header_bytes(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> int:
        """Return the most bytes that libhdf5 takes for superblock, groups and dataset headers."""
        texts = sum(len(name) + len(value.encode()) for name, value in attrs.items())
        links = sum(
            _MOST_LINK_BYTES * len(meta.name.split("/")) + _MOST_NAMES * len(meta.name.encode())
            for meta in tensors
        )
        return _MOST_FILE_BYTES + _HEAP_FILE_BYTES + 2 * texts + links

    def index(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> Header:
        """Return the header as libhdf5 writes it, with every dataset allocated.

        libhdf5 writes a file of holes in memory, which takes the memory of its header.
        """
        stored, groups = NewTensors(tensors), set[str]()
        with open_scratch() as (fd, path):
            # libhdf5 does not say that a file exceeds the limit on sizes (``ulimit -f``).
            most = sum(meta.nbytes for meta in tensors) + self.header_bytes(tensors, attrs)
            os.ftruncate(fd, most)
            with h5py.File(new_file(path)) as opened:
                root = h5g.open(opened.id, b"/")
                _write_attributes(root, attrs)
                for meta in tensors:
                    _create_groups(opened.id, meta.name, groups)
                    dataset = _create_dataset(opened.id, meta)
                    if meta.text is None and meta.nbytes > 0:
                        stored.add(meta.name, dataset.get_offset(), meta.nbytes)
            index = FileIndex((UNNAMED,), self.name, os.fstat(fd).st_size, stored)
            return read_header(index, lambda start, stop: os.pread(fd, stop - start, start))

    def memory_bytes(self, tensors: int) -> int:
        """Return the bytes of libhdf5's cache."""
        return min(tensors * _CACHED_BYTES, _CACHE_BYTES)


# -------------------------------------------------------------------------------------------- types


def _hdf5_types() -> dict[str, h5t.TypeID]:
    """Return the HDF5 type of each name in the ``hdf5`` column of `DTYPES`."""
    types = {
        name: h5t.py_create(np.dtype(name).newbyteorder("<"), logical=True)
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    }
    types["bfloat16"] = _float_type(nbytes=2, exponent_bits=8, mantissa_bits=7, bias=127)
    types["float8_e4m3"] = _float_type(nbytes=1, exponent_bits=4, mantissa_bits=3, bias=7)
    types["float8_e5m2"] = _float_type(nbytes=1, exponent_bits=5, mantissa_bits=2, bias=15)
    types["bytes"] = types["uint8"]
    return types


def _float_type(nbytes: int, exponent_bits: int, mantissa_bits: int, bias: int) -> h5t.TypeID:
    kind = h5t.IEEE_F32LE.copy()
    kind.set_fields(exponent_bits + mantissa_bits, mantissa_bits, exponent_bits, 0, mantissa_bits)
    kind.set_ebias(bias)
    kind.set_precision(8 * nbytes)
    kind.set_size(nbytes)
    return kind


def _fixed_string(nbytes: int) -> h5t.TypeID:
    kind = h5t.C_S1.copy()
    kind.set_size(nbytes)
    kind.set_strpad(h5t.STR_NULLPAD)
    kind.set_cset(h5t.CSET_UTF8)
    return kind


def _create_attribute(
    owner: h5d.DatasetID | h5g.GroupID, name: str, kind: h5t.TypeID
) -> h5a.AttrID:
    return h5a.create(owner, name.encode(), kind, h5s.create(h5s.SCALAR))


def _has_whole_heaps(data: bytes) -> bool:
    """Return whether the objects of each heap of strings fill it, as libhdf5 assumes."""
    for signature in re.finditer(_HEAP_SIGNATURE, data):
        size = int.from_bytes(data[signature.end() + 4 : signature.end() + 12], "little")
        at, end = signature.start() + _HEAP_HEADER_BYTES, signature.start() + size
        while at + _HEAP_OBJECT_BYTES <= end <= len(data):
            number = int.from_bytes(data[at : at + 2], "little")
            nbytes = int.from_bytes(data[at + 8 : at + 16], "little")
            # The free space, object 0, counts its own header.
            at += -(-nbytes // 8) * 8 + (_HEAP_OBJECT_BYTES if number else 0)
            if number == 0:
                break
        if at != end:
            return False
    return True


def _read_attribute(
    owner: h5d.DatasetID | h5g.GroupID, name: bytes, *, may_vary: bool = False
) -> str | None:
    """Return the text of an existing attribute; None if it is not a scalar string.

    A string of variable length is read only if ``may_vary``: its heap may be damaged.
    """
    attribute = h5a.open(owner, name)
    kind = attribute.get_type()
    if not isinstance(kind, h5t.TypeStringID) or attribute.shape != ():
        return None
    if not kind.is_variable_str():
        data = np.empty((), f"S{kind.get_size()}")
        attribute.read(data, kind)
    elif may_vary:
        data = np.empty((), h5py.string_dtype())
        attribute.read(data)
    else:
        return None
    return str(data.item().decode(errors="replace"))


_TYPES = _hdf5_types()
_DTYPES_BY_SIZE = {  # a comparison of types takes a microsecond
    size: [
        (_TYPES[dtype.hdf5], dtype.name)
        for dtype in DTYPES.values()
        if dtype.itemsize == size and dtype.hdf5 != "bytes"
    ]
    for size in {dtype.itemsize for dtype in DTYPES.values()}
}


_COMPLEX = 11  # H5T_COMPLEX of HDF5 2.0
for _name, _word in (("Complex64", "COMPLEX_IEEE_F32LE"), ("Complex128", "COMPLEX_IEEE_F64LE")):
    if hasattr(h5t, _word):  # else libhdf5 does not read such a file
        _DTYPES_BY_SIZE[DTYPES[_name].itemsize].append((getattr(h5t, _word), _name))


def _find_dtype(kind: h5t.TypeID, dataset: h5d.DatasetID) -> str | None:
    """Return MindSpore's name of a dataset's type; None if MindSpore lacks the type."""
    known_types = _DTYPES_BY_SIZE.get(kind.get_size(), ())
    known, name = next((pair for pair in known_types if kind == pair[0]), (None, None))
    if known is _TYPES["bytes"] and h5a.exists(dataset, _DTYPE_ATTRIBUTE.encode()):
        word = _read_attribute(dataset, _DTYPE_ATTRIBUTE.encode())
        return word if word in DTYPES and DTYPES[word].hdf5 == "bytes" else name
    return name


def _read_provenance(root: h5g.GroupID, head: bytes) -> dict[str, str]:
    """Return name and text of the attributes of the root group that say how the file was made.

    ``head`` is the start of the file.
    """
    names: list[bytes] = []
    h5a.iterate(root, names.append)
    ours = [name for name in names if name.startswith(PROVENANCE.encode())]
    if not ours or not _has_whole_heaps(head):
        return {}
    texts = {name: _read_attribute(root, name, may_vary=True) for name in ours}
    return {
        name.decode(errors="replace"): value for name, value in texts.items() if value is not None
    }


def _is_dimension(dataset: h5d.DatasetID) -> bool:
    """Return whether a dataset only stands for an axis of others, as netCDF writes it."""
    text = _read_attribute(dataset, b"NAME") if h5a.exists(dataset, b"NAME") else None
    return (text or "").startswith("This is a netCDF dimension but not a netCDF variable")


def _unsupported_type(path: str, name: str, kind: h5t.TypeID) -> UnsupportedError:
    if isinstance(kind, h5t.TypeAtomicID) and kind.get_order() == h5t.ORDER_BE:
        hint = "write the dataset again in little-endian order"
        return _unread(path, name, "stored big-endian", hint)
    word = {
        h5t.INTEGER: "integer",
        h5t.FLOAT: "float",
        h5t.COMPOUND: "compound",
        h5t.ENUM: "enumeration",
        h5t.OPAQUE: "opaque type",  # such as bfloat16 of ml_dtypes
        h5t.BITFIELD: "bit field",  # such as bool of PyTables
        h5t.REFERENCE: "reference",
        h5t.VLEN: "array of variable length",
        h5t.ARRAY: "array",
        _COMPLEX: "complex type",
    }.get(kind.get_class(), "other type")
    facts = f"HDF5 {word} of {kind.get_size()} bytes"
    return _unread(path, name, "MindSpore has no such element type", _WRITE_AGAIN, facts)


# ------------------------------------------------------------------------------------------ reading


def _refuse_shared_bytes(path: str, places: Iterable[tuple[int, int, str]]) -> None:
    end, last = 0, ""
    for start, stop, what in sorted(places):
        if start < end:
            raise FormatError(path, start, "two tensors overlap", facts=f"{last} and {what}")
        end, last = stop, what


def _walk_file(path: str, root: h5g.GroupID) -> Iterator[tuple[str, h5d.DatasetID]]:
    """Yield name and dataset of every dataset in the file, depth first, without recursion."""
    seen: set[int] = set()
    walks = [_walk_group(path, "", root, seen)]
    while walks:
        item = next(walks[-1], None)
        if item is None:
            walks.pop()
        elif isinstance(item[1], h5d.DatasetID):
            yield item
        else:
            walks.append(_walk_group(path, item[0] + "/", item[1], seen))


def _walk_group(
    path: str, prefix: str, group: h5g.GroupID, seen: set[int]
) -> Iterator[tuple[str, h5d.DatasetID | h5g.GroupID]]:
    """Yield name and object of each dataset and group in one group."""
    address = h5o.get_info(group).addr
    if address in seen:
        raise _unread(path, prefix, "the same group has two names", _WRITE_AGAIN)
    seen.add(address)
    for link, kind in _links(group):
        try:
            name = prefix + link.decode()
        except UnicodeDecodeError as error:
            raise FormatError(path, None, f"{link!r}: the name is not UTF-8") from error
        if kind != h5l.TYPE_HARD:
            hint = "h5repack --merge FILE NEW.h5"
            raise _unread(path, name, "a soft or external link", hint)
        item = h5o.open(group, link)
        if isinstance(item, h5d.DatasetID | h5g.GroupID):
            yield name, item


def _links(group: h5g.GroupID) -> list[tuple[bytes, int]]:
    """Return names and types of a group's links: in order of creation if recorded, else by name."""
    links: list[tuple[bytes, int]] = []
    is_ordered = group.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_INDEXED
    group.links.iterate(
        lambda name, info: links.append((name, info.type)),
        info=True,
        idx_type=h5.INDEX_CRT_ORDER if is_ordered else h5.INDEX_NAME,
    )
    return links


def _read_dataset(file: StoredFile, size: int, name: str, dataset: h5d.DatasetID) -> StoredTensor:
    """Return the stored tensor of a dataset; ``size`` is the file's, in bytes."""
    path = file.path
    offset = dataset.get_offset()  # None unless contiguous, allocated and in this file
    if offset is None and dataset.get_space().get_simple_extent_type() == h5s.NULL:
        raise _unread(path, name, "the dataset has no dataspace (H5S_NULL)", _WRITE_AGAIN)
    if offset is None and dataset.get_create_plist().get_external_count():
        raise _repack(path, name, dataset, "its data are in an external file")
    meta = _read_meta(path, name, dataset)
    nbytes = meta.nbytes
    if meta.text is not None or not nbytes:
        return StoredTensor(meta, file, ())
    if offset is None:
        if dataset.get_create_plist().get_layout() == h5d.CONTIGUOUS:
            raise _unread(path, name, *_NEVER_WRITTEN)
        facts = "chunked, compressed, compact or virtual"
        raise _repack(path, name, dataset, "the dataset is not contiguous", facts)
    if offset + nbytes > size:
        reason = f"{name}: the file ends before its last byte"
        facts = f"{offset + nbytes} bytes expected, the file has {size}"
        raise FormatError(path, offset, reason, facts=facts)
    return StoredTensor(meta, file, (Extent(offset, nbytes),))


def _read_meta(path: str, name: str, dataset: h5d.DatasetID) -> TensorMeta:
    kind = dataset.get_type()
    if isinstance(kind, h5t.TypeStringID):
        return TensorMeta(name, TEXT, (), _read_text(path, name, dataset))
    if (dtype := _find_dtype(kind, dataset)) is None:
        raise _unsupported_type(path, name, kind)
    return TensorMeta(intern(name), dtype, tuple(int(n) for n in dataset.shape))


def _unread(path: str, name: str, reason: str, hint: str, facts: str = "") -> UnsupportedError:
    return UnsupportedError(path, None, f"{name}: {reason}", hint, facts)


def _repack(
    path: str, name: str, dataset: h5d.DatasetID, reason: str, facts: str = ""
) -> UnsupportedError:
    """Return the error of a dataset that has to be written again.

    h5repack leaves out datasets whose filter it lacks, and fills virtual ones without their source
    with zeros.  Its exit code is then 0.
    """
    hint, files = _REPACK, set[str]()
    for other, dataset_there in _walk_file(path, h5g.open(h5i.get_file_id(dataset), b"/")):
        options = dataset_there.get_create_plist()
        for code, _, _, word in map(options.get_filter, range(options.get_nfilters())):
            if code not in _FILTERS:
                called = word.decode(errors="replace").partition(";")[0]
                facts = f"{other} has the filter {called} ({code}), which h5repack may lack"
                return _unread(path, name, reason, _H5PY, facts)
        if options.get_layout() == h5d.VIRTUAL:
            files |= {options.get_virtual_filename(i) for i in range(options.get_virtual_count())}
            hint, facts = f"{_REPACK}, if these files are there", shorten(sorted(files), 3)
    return _unread(path, name, reason, hint, facts)


def _read_text(path: str, name: str, dataset: h5d.DatasetID) -> str:
    if dataset.shape != ():
        raise _unread(path, name, "an array of strings", "write each string as its own dataset")
    if dataset.get_space_status() == h5d.SPACE_STATUS_NOT_ALLOCATED:
        raise _unread(path, name, *_NEVER_WRITTEN)
    if dataset.get_type().get_size() > MAX_TEXT_BYTES:
        facts = f"at most {MAX_TEXT_BYTES} bytes are read"
        raise _unread(path, name, "the string is too long", _WRITE_AGAIN, facts)
    value = h5py.Dataset(dataset).asstr()[()]
    return str(value).rstrip("\0")


# ------------------------------------------------------------------------------------------ writing


def new_file(path: str) -> h5f.FileID:
    """Begin an HDF5 file as `h5py.File` does, but without a time in its root group.

    The driver of h5py for open files places datasets differently, so libhdf5 opens the path.  It
    may be a link; the driver ``stdio``, which places datasets as the usual one does, does not ask
    where it leads.
    """
    options = h5p.create(h5p.FILE_CREATE)
    options.set_link_creation_order(_IN_ORDER)
    options.set_obj_track_times(False)
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5f.LIBVER_EARLIEST, h5f.LIBVER_LATEST)
    access.set_fapl_stdio()
    access.set_file_locking(False, True)  # nobody else has the file, and some systems have no locks
    return h5f.create(os.fsencode(path), h5f.ACC_TRUNC, options, access)


def _write_attributes(root: h5g.GroupID, attrs: Mapping[str, str]) -> None:
    for name, value in sorted(attrs.items()):
        if name.startswith(PROVENANCE):
            kind = h5t.py_create(h5py.string_dtype(), logical=True)
            attribute = _create_attribute(root, name, kind)
            attribute.write(np.array(value, h5py.string_dtype()))


def _create_groups(file: h5g.GroupID, name: str, groups: set[str]) -> None:
    """Create the groups above a dataset that are not in ``groups``, and add them to it."""
    at = name.find("/")
    while at > 0:
        if name[:at] not in groups:
            options = h5p.create(h5p.GROUP_CREATE)
            options.set_link_creation_order(_IN_ORDER)
            options.set_obj_track_times(False)
            h5g.create(file, name[:at].encode(), _utf8_links(), options)
            groups.add(name[:at])
        at = name.find("/", at + 1)


def _create_dataset(
    file: h5g.GroupID, meta: TensorMeta, options: h5p.PropDCID | None = None
) -> h5d.DatasetID:
    space = _space(meta.shape)
    nbytes = max(1, meta.nbytes)  # of a string
    kind = _fixed_string(nbytes) if meta.text is not None else _TYPES[DTYPES[meta.dtype].hdf5]
    name, links = meta.name.encode(), _utf8_links()
    dataset = h5d.create(file, name, kind, space, options or _contiguous(), lcpl=links)
    if meta.text is not None:
        data = np.array(meta.text.encode(), dtype=f"S{nbytes}")
        dataset.write(h5s.ALL, h5s.ALL, data, kind)
    elif DTYPES[meta.dtype].hdf5 == "bytes":
        word = np.array(meta.dtype.encode())
        kind = _fixed_string(word.itemsize)
        _create_attribute(dataset, _DTYPE_ATTRIBUTE, kind).write(word, kind)
    return dataset


# libhdf5 copies these objects, and takes a third of the time of a dataset to make them.
@lru_cache(maxsize=1)
def _contiguous() -> h5p.PropDCID:
    options = h5p.create(h5p.DATASET_CREATE)
    options.set_layout(h5d.CONTIGUOUS)
    options.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    options.set_fill_time(h5d.FILL_TIME_NEVER)
    options.set_obj_track_times(False)
    return options


@lru_cache(maxsize=1024)  # most tensors have the same few shapes
def _space(shape: tuple[int, ...]) -> h5s.SpaceID:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


@lru_cache(maxsize=1)
def _utf8_links() -> h5p.PropLCID:
    links = h5p.create(h5p.LINK_CREATE)
    links.set_char_encoding(h5t.CSET_UTF8)
    return links


# ------------------------------------------------------------------------------------ virtual files


def write_virtual(
    path: str, tensors: Iterable[tuple[TensorMeta, Sequence[Box]]], attrs: Mapping[str, str]
) -> None:
    """Write a file whose tensors lie in other files.

    Rows that follow each other are external storage of the tensor.  Any other tensor is virtual,
    and each of its shards is external storage of a dataset below `SHARDS`.  Its source is this
    file: libhdf5 fills a virtual dataset with zeros where the file of a source is gone, and raises
    where external storage is gone.  Nothing of a file is written when it is opened later, as no
    dataset has a fill value.
    """
    from ckpttool.model.shown_extents import is_of_rows  # few files are virtual

    groups: set[str] = set()
    with h5py.File(new_file(path)) as opened:
        root = h5g.open(opened.id, b"/")
        _write_attributes(root, attrs)
        for meta, shards in tensors:
            _create_groups(opened.id, meta.name, groups)
            is_external = all(is_of_rows(shard.region, meta.shape) for shard in shards)
            if is_external and sum(len(it.tensor.extents) for it in shards) <= _MOST_EXTENTS:
                _create_dataset(opened.id, meta, _external(shards) if shards else None)
                continue
            virtual = h5p.create(h5p.DATASET_CREATE)
            virtual.set_obj_track_times(False)
            for number, shard in enumerate(shards):
                name, shape = f"{SHARDS}/{meta.name}/{number}", shard.region.shape
                _create_groups(opened.id, name, groups)
                part = replace(meta, name=name, shape=shape)
                _create_dataset(opened.id, part, _external([shard]))
                place = h5s.create_simple(meta.shape)
                place.select_hyperslab(shard.region.start, shape)
                virtual.set_virtual(place, b".", name.encode(), h5s.create_simple(shape))
            _create_dataset(opened.id, meta, virtual)


def absolute(path: str) -> str:
    """Return the absolute path of a file whose bytes are shown; a link keeps its name."""
    return os.path.abspath(path)  # noqa: PTH100


def _external(shards: Iterable[Box]) -> h5p.PropDCID:
    options = h5p.create(h5p.DATASET_CREATE)
    options.set_fill_time(h5d.FILL_TIME_NEVER)
    options.set_obj_track_times(False)
    for shard in shards:
        path = os.fsencode(absolute(shard.tensor.file.path))
        for extent in shard.tensor.extents:
            options.set_external(path, extent.offset, extent.nbytes)
    return options


def read_virtual(
    file: StoredFile, on_object: Callable[[], None] = lambda: None
) -> tuple[Mapping[str, str], list[tuple[TensorMeta, list[Box]]]]:
    """Return attributes and tensors of a file of `write_virtual`; no box says which rank it is of.

    ``on_object`` is called before each dataset is read.

    Raises
    ------
    FormatError
        The file is damaged.
    """
    from ckpttool.model.region import Region
    from ckpttool.model.shown_extents import join_extents
    from ckpttool.model.slicing import Box

    path, tensors = file.path, list[tuple[TensorMeta, list[Box]]]()
    with _as_format_error(path), h5py.File(path, "r", locking=False) as opened:
        root = h5g.open(opened.id, b"/")
        fd = opened.id.get_vfd_handle()
        attrs = _read_provenance(root, os.pread(fd, os.fstat(fd).st_size, 0))
        for name, dataset in _walk_file(path, root):
            on_object()
            if name.startswith(f"{SHARDS}/"):
                continue
            options, meta = dataset.get_create_plist(), _read_meta(path, name, dataset)
            shards = [*join_extents(meta, _extents(options))] if meta.nbytes else []
            is_virtual = options.get_layout() == h5d.VIRTUAL
            for number in range(options.get_virtual_count() if is_virtual else 0):
                start, last = options.get_virtual_vspace(number).get_select_bounds()
                region = Region(tuple(map(int, start)), tuple(int(index) + 1 for index in last))
                shard = h5d.open(opened.id, options.get_virtual_dsetname(number).encode())
                files, extents = zip(*_extents(shard.get_create_plist()), strict=True)
                (name,) = {*files}
                stored = StoredTensor(meta.of_shape(region.shape), StoredFile(name), extents)
                shards.append(Box(region, 0, stored))
            tensors.append((meta, shards))
    return attrs, tensors


def _extents(options: h5p.PropDCID) -> Iterator[tuple[str, Extent]]:
    for number in range(options.get_external_count()):
        path, offset, nbytes = options.get_external(number)
        yield os.fsdecode(path), Extent(int(offset), int(nbytes))


# -------------------------------------------------------------------------------- errors of libhdf5


@contextmanager
def _as_format_error(path: str) -> Iterator[None]:
    """Turn the errors of libhdf5 on a damaged file into `FormatError`.

    h5py reports damage as OSError without an errno, RuntimeError, KeyError or ValueError.  An error
    with an errno is the system's, and becomes an OSError.
    """
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (match := re.search(r"errno = ([1-9]\d{0,3})\b", str(error))):
            number = int(match[1])
        if number is not None:
            raise OSError(number, os.strerror(number), path) from error
        if _is_open_for_write(path):
            reason = "a program writes this HDF5 file, or ended without closing it"
            hint = f"cp {quote(path)} COPY.h5 && h5clear -s COPY.h5"
            raise UnsupportedError(path, _FLAGS_AT, reason, hint, f"libhdf5: {error}") from error
        facts = f"libhdf5: {error}"
        raise FormatError(path, None, "not a readable HDF5 file", facts=facts) from error


def _is_open_for_write(path: str) -> bool:
    # The flags are those of a writer, and of a writer that readers may follow.
    with open_file(path) as file:
        head = file.read(_FLAGS_AT + 1)
    is_new = head.startswith(HDF5_SIGNATURE + b"\x03")
    return is_new and any(byte & _WRITE_FLAGS for byte in head[_FLAGS_AT:])
