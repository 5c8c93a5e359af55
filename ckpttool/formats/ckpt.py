"""MindSpore ``.ckpt``: a codec of the chain of records that is the file.

Headers are read, made and written here; contents are left to `ckpttool.storage`, and blocks of
ciphertext to `ckpttool.formats.encryption`.  Records with the usual header are read by a pattern,
because a model has thousands; all others field by field.

Bytes
-----
A file is a chain of records and nothing else: no magic number, no index, no end mark.  A record
is a field 1 of the protobuf message ``Checkpoint``::

    0a <varint length>                 Checkpoint.value, one for each record
       0a <length> <UTF-8>             1 tag: parameter name
       12 <length>                     2 tensor
          08 <varint> ...              1 dims, one field for each axis (packed is read, too)
          12 <length> <ASCII>          2 tensor_type, a name of `ckpttool.model.dtypes`
          1a <length> <bytes>          3 tensor_content: C order, little endian

or, instead of field 2, a field 3 ``maptensor``: see "Map parameters".

* Consecutive records with one tag hold one tensor: each repeats the complete dims, and the
  contents are joined.  MUST add up to ``product(dims) * itemsize``.  MindSpore splits at 512 MiB;
  records of any other size are read.
* A tag that comes again later is an error here.  MindSpore silently takes the last one.
* The dims of a scalar are empty.  MindSpore 1.x and 2.0 write dims ``[0]`` with one element of
  content; dims ``[0]`` without content is the empty vector.
* ``tensor_type`` ``str`` is a string of append_dict: dims ``[0]``, content UTF-32-LE without an
  end mark; the empty string is four zero bytes.
* Unknown fields are skipped, at every level.
* The last 17 bytes may be a trailer: ``crc_num`` and, in 10 bytes, big endian, the CRC-32 of all
  bytes before it.  MindSpore's saver leaves map parameters out of the CRC.  ``attrs["crc_num"]``
  reports it, and it is written on request.
* A file without a trailer may end inside its last record.  It was cut there if all lengths before
  that byte fit together: tag and tensor fill their record, and the dims fit the content.  Then the
  records before are whole (`CutShortError`).  With any other error nothing is known of the rest.
* A file of 0 bytes holds nothing.  A rank without parameters leaves it if MindSpore saves without
  redundancy.

Map parameters
--------------
A hash table is a record with field 3 in the place of field 2::

    0a <length>                        Checkpoint.value
       0a <length> <UTF-8>             1 tag
       1a <length>                     3 maptensor, exactly three tensors:
          0a <length> <tensor>         1 keys      dims [n]
          0a <length> <tensor>         1 values    dims [n, ...]
          0a <length> <tensor>         1 statuses  dims [n]

A tensor looks as in other records, but its ``tensor_type`` is NumPy's name (``int32``); MindSpore's
names are read, too.  The exporter writes blocks of some entries.  So consecutive records with one
tag are one parameter, joined along axis 0.  The three ``n`` of a record MUST be equal, and each
content MUST have all its bytes.  The number of records is not stored: a file that was cut between
two records looks complete.

MindSpore 2.10 reads keys, values and statuses of int32, float16, float32 and float64.  Its loader
takes the bytes of any other type for float64.

Written files
-------------
They equal, byte for byte, the files that ``save_checkpoint`` of MindSpore 2.10 writes for the same
parameters in the same order.  The one exception is tensors without elements: MindSpore leaves them
out, and here they are records with empty content, as its asynchronous path writes them.

An encrypted file consists of blocks of ciphertext, with plain map parameters before them: see
`ckpttool.formats.encryption`.

Source
------
MindSpore 2.10 ``utils/checkpoint.proto``, ``train/serialization.py`` (``_exec_save``,
``_write_parameter_bytes_data``, ``_write_mapparameter``, ``_parse_ckpt_proto``,
``_load_map_parameter``), and files of 1.0, 2.0 and 2.10.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.formats.base import (
    MAX_TEXT_BYTES,
    ChecksumInput,
    Format,
    Header,
    HeaderPart,
    lay_out,
)
from ckpttool.formats.encryption import DecryptedFile, explain_error, mode_of, read_ciphertext
from ckpttool.formats.header_cache import HeaderCache
from ckpttool.formats.wire import (
    LENGTH,
    Field,
    WireReader,
    decode_varint,
    encode_bytes,
    encode_key,
    encode_number,
    encode_varint,
)
from ckpttool.lazy import compile_late
from ckpttool.model.dtypes import DTYPES, TEXT, find_dtype, find_word
from ckpttool.model.names import map_component_names, map_of_component
from ckpttool.model.tensors import (
    MAX_AXES,
    Ciphertext,
    CutShortError,
    Extent,
    FileIndex,
    Remains,
    StoredFile,
    StoredTensor,
    TensorMeta,
)
from ckpttool.problems import Diagnostic, FormatError, UnsupportedError
from ckpttool.secret import Secret

MAX_RECORD_BYTES = 512 << 20  # contents of one record, as MindSpore (SLICE_SIZE); protobuf: < 2 GiB
_TRAILER = b"crc_num"
_TRAILER_BYTES = 17
_DTYPES_OF_NUMPY = {dtype.hdf5: dtype for dtype in DTYPES.values() if dtype.hdf5 != "bytes"}

# The header of a record as MindSpore writes it, with its name and what surrounds that.  Any other
# header is read field by field.
_USUAL_BYTES = 512
_VARINT = rb"[\x80-\xff]{0,8}[\x00-\x7f]"  # of 63 bits; with 64 it may be a negative number
_DIM = compile_late(rb"\x08(%b)" % _VARINT)
_USUAL_TENSOR = compile_late(rb"\x12%b((?:\x08%b)*)\x12[\x01-\x20](\w+)\x1a%b" % ((_VARINT,) * 3))
_USUAL_HEADER = compile_late(
    rb"(\x0a%b\x0a%b)([^\x00-\x1f]+)(\x12%b(?:\x08%b)*\x12[\x01-\x20]\w+\x1a%b)" % ((_VARINT,) * 5)
)
_CACHED_HEADERS = 1 << 14  # ranks have nearly equal headers; more take more memory than they save


class Ckpt(Format):
    """The `Format` of MindSpore's own checkpoints; ``cache`` has headers of earlier files."""

    name, word, has_checksum, is_loaded_in_order = "ckpt", ".ckpt", True, True

    def __init__(self, cache: HeaderCache | None = None) -> None:
        self._cache = cache

    def refusals(
        self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}
    ) -> Iterator[Diagnostic]:
        """Yield a diagnostic for incomplete map parameters, and for what MindSpore lacks."""
        yield from map_problems(tensors)
        yield from super().refusals(tensors, attrs)

    def read_index(self, file: StoredFile, key: Secret | None = None) -> FileIndex:
        """Return the header of the file from the headers of its records.

        ``key`` is the key of an encrypted file; plain files ignore it.
        """
        with WireReader(file) as reader:
            nbytes = reader.size
            end, attrs = _find_trailer(reader)
            tensors, stop = self._read_tensors(reader, end)
        if stop < end:
            cipher = read_ciphertext(file, stop, end, key)
            file = replace(file, cipher=cipher)
            hidden = _read_encrypted(file, cipher)
            if twice := [name for name in hidden if name in tensors]:
                raise FormatError(file.path, stop, f"{twice[0]}: stored twice, plain and encrypted")
            tensors = {**tensors, **hidden}
        return FileIndex((file,), self.name, nbytes, tensors, attrs)

    def _read_tensors(self, reader: WireReader, end: int) -> tuple[Mapping[str, StoredTensor], int]:
        known = None if self._cache is None else self._cache.lookup(self.name, reader, end)
        if known is not None:
            return known.tensors, end
        metas = {} if self._cache is None else self._cache.metas
        tensors, stop = _read_tensors(reader, end, reader.file, metas)
        if self._cache is not None and stop == end:
            self._cache.store(FileIndex((reader.file,), self.name, end, tensors), reader)
        return tensors, stop

    def file_bytes(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> int:
        """Return the bytes of all records and a trailer."""
        return sum(len(header) + nbytes for header, _, nbytes in _parts(tensors, attrs))

    def header_bytes(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> int:
        """Return the bytes of all records and a trailer, without the contents of tensors."""
        return sum(len(header) for header, _, _ in _parts(tensors, attrs))

    def index(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> Header:
        """Return the headers of all records, strings included, and the place of a trailer."""
        written = {"crc_num": "0"} if "crc_num" in attrs else {}
        return lay_out(self.name, tensors, written, _parts(tensors, attrs))

    def checksum_inputs(self, index: FileIndex, as_saved: bool = False) -> Iterator[ChecksumInput]:
        """Yield all bytes before the trailer.

        ``as_saved`` leaves map parameters out, as MindSpore's saver does.  Its loader does not, so
        MindSpore refuses files with map parameters that it saved itself.
        """
        end = index.nbytes - _TRAILER_BYTES
        start = at = 0
        with WireReader(index.file) as reader:
            for record in reader.fields(0, end if as_saved and index.cipher is None else 0):
                inner = reader.fields(record.start, record.stop) if record.number == 1 else ()
                if any(subfield.number == 3 for subfield in inner):
                    yield Extent(start, at - start)
                    start = record.stop
                at = record.stop
        yield Extent(start, end - start)

    def seal(self, fd: int, crc: int | None = None) -> None:
        """Write the checksum into the trailer, for which the header has room."""
        if crc is not None:
            with os.fdopen(fd, "r+b", closefd=False) as file:
                file.seek(-_TRAILER_BYTES, 2)
                file.write(_trailer(crc))


# -------------------------------------------------------------------- reading: the chain of records


def _find_trailer(reader: WireReader) -> tuple[int, dict[str, str]]:
    start = reader.size - _TRAILER_BYTES
    if start < 0 or reader.read(start, start + len(_TRAILER)) != _TRAILER:
        return reader.size, {}
    crc = reader.read(start + len(_TRAILER), reader.size)
    return start, {"crc_num": str(int.from_bytes(crc, "big"))}


def _read_encrypted(file: StoredFile, cipher: Ciphertext) -> dict[str, StoredTensor]:
    with WireReader(file, DecryptedFile(file, cipher)) as reader:
        try:
            tensors, _ = _read_tensors(reader, reader.size, file, {})
        except FormatError as error:
            if isinstance(error, CutShortError):
                error = FormatError(*error.args[:5])  # it may be the key that is wrong
            raise explain_error(error, file, cipher) from error
    return tensors


def _read_tensors(
    reader: WireReader, end: int, file: StoredFile, metas: dict[str, TensorMeta]
) -> tuple[dict[str, StoredTensor], int]:
    """Return the tensors of the records, and the byte where they stop.

    They stop at byte ``end``, or at the first encrypted block before it.  ``metas`` are those of
    other files, by name; equal ones are one object.
    """
    tensors: dict[str, StoredTensor] = {}
    starts: dict[str, int] = {}
    current = _Record("", [])  # empty if the last tensor is complete, and in `tensors`
    start = stop = 0
    while stop < end:
        start = stop
        usual = _read_usual(reader, start, end, metas)
        if usual is not None and usual[0].name not in starts:
            meta, extents, stop = usual
            if current.tensors:
                tensors |= _finish_all(reader, current, file)
                current = _Record("", [])
            tensors[meta.name] = StoredTensor(meta, file, extents)
            starts[meta.name] = start
            continue
        if tensors and not current.tensors:
            name, last = tensors.popitem()
            current = _whole_record(last.meta, starts[name], last.extents)
        if usual is not None:
            meta, extents, stop = usual
            record = _whole_record(meta, start, extents)
        else:
            if mode_of(reader.read(start, min(start + 4, end))) is not None:
                break
            cut = _find_cut(reader, start, end)
            if cut is not None and (cut.tag not in starts or cut.tag == current.tag):
                raise _cut_short(reader, file, tensors, current, cut)
            item = next(reader.fields(start, end))
            stop = item.stop
            if item.number != 1:
                continue
            record = _read_record(reader, item, start)
        are_alike = record.tag == current.tag and len(record.tensors) == len(current.tensors)
        if are_alike and record.tensors[0].dtype != TEXT:  # a string is never split
            current.join(reader.path, record)
            continue
        tensors |= _finish_all(reader, current, file)
        for name in dict.fromkeys((record.tag, *(tensor.name for tensor in record.tensors))):
            if name in starts:
                facts = f"first at byte {starts[name]}; nothing shows which one is valid"
                raise FormatError(reader.path, start, f"{name}: stored twice", facts=facts)
            starts[name] = start
        current = record
    if stop == reader.size and _is_unfinished(current):
        cut = _Cut(stop, tag=current.tag)
        raise _cut_short(reader, file, tensors, current, cut)
    tensors |= _finish_all(reader, current, file)
    return tensors, stop


def _finish_all(reader: WireReader, record: _Record, file: StoredFile) -> dict[str, StoredTensor]:
    return {tensor.name: _finish(reader, tensor, file) for tensor in record.tensors}


def _finish(reader: WireReader, tensor: _RecordTensor, file: StoredFile) -> StoredTensor:
    """Return the stored tensor; raise FormatError if its shape does not fit its bytes."""
    if tensor.meta is not None:
        return StoredTensor(tensor.meta, file, tensor.extents)
    nbytes = sum(extent.nbytes for extent in tensor.extents)
    if tensor.dtype == TEXT:
        value = _read_text(reader, tensor, nbytes)
        return StoredTensor(TensorMeta(tensor.name, TEXT, (), value), file, ())
    dtype = find_dtype(tensor.dtype)
    if dtype is None:
        raise tensor.of_unknown_type(reader.path)
    shape = tuple(tensor.dims)
    if nbytes == dtype.itemsize and shape == (0,):
        shape = ()  # as MindSpore 1.x and 2.0 write a scalar
    elif nbytes > 1 and shape in ((), (0,)) and dtype.name == "random_op":
        shape = (nbytes,)  # 2.0 does not say how long it is
    needed = math.prod(shape) * dtype.itemsize
    if nbytes != needed:
        if needed and nbytes and nbytes % needed == 0 and len(tensor.extents) == nbytes // needed:
            facts = f"{nbytes // needed} times in a row; nothing shows which one is valid"
            reason = "stored more than once"
        else:
            facts = f"dims {list(shape)} of {dtype.name} need {needed} bytes, found {nbytes}"
            reason = "its shape does not fit its bytes"
        raise tensor.wrong(reader.path, reason, facts)
    extents = tuple(extent for extent in tensor.extents if extent.nbytes)
    return StoredTensor(TensorMeta(tensor.name, dtype.name, shape), file, extents)


def _read_text(reader: WireReader, tensor: _RecordTensor, nbytes: int) -> str:
    if tensor.dims not in ([0], []) or nbytes < 4 or nbytes % 4:
        facts = "expected dims [0] and four bytes for each character, found "
        facts += f"dims {tensor.dims} and {nbytes} bytes"
        raise tensor.wrong(reader.path, "not a valid string", facts)
    if nbytes > MAX_TEXT_BYTES:
        facts = f"{nbytes} bytes; at most {MAX_TEXT_BYTES} are read"
        reason = f"{tensor.name}: the string is too long"
        raise UnsupportedError(reader.path, tensor.start, reason, facts=facts)
    data = b"".join(reader.read(e.offset, e.offset + e.nbytes) for e in tensor.extents)
    if data == bytes(4):
        return ""
    try:
        return data.decode("utf-32-le")
    except UnicodeDecodeError as error:
        raise tensor.wrong(reader.path, "the string is not UTF-32") from error


# ------------------------------------------------------------------------------ reading: one record


class _RecordTensor(Struct):
    """A tensor in consecutive records with one tag."""

    name: str
    start: int  # byte of the first record
    dtype: str
    dims: list[int]
    extents: tuple[Extent, ...] = ()
    meta: TensorMeta | None = None  # None if the header was unusual, or there are several records

    def wrong(self, path: str, reason: str, facts: str = "") -> FormatError:
        """Return the error of the tensor."""
        return FormatError(path, self.start, f"{self.name}: {reason}", facts=facts)

    def of_unknown_type(self, path: str) -> UnsupportedError:
        """Return the error for a type that is none of MindSpore's."""
        reason = f"{self.name}: unknown tensor_type {self.dtype!r}"
        return UnsupportedError(path, self.start, reason)


class _Record(Struct):
    """Consecutive records with one tag: one tensor, or the three tensors of a map parameter."""

    tag: str
    tensors: list[_RecordTensor]

    @property
    def is_map(self) -> bool:
        """Whether the record is a map parameter."""
        return len(self.tensors) > 1

    def join(self, path: str, other: _Record) -> None:
        """Append the next record's contents; a map parameter gets more entries along axis 0."""
        for mine, its in zip(self.tensors, other.tensors, strict=True):
            if (mine.dtype, mine.dims[self.is_map :]) != (its.dtype, its.dims[self.is_map :]):
                facts = f"{mine.dtype} {mine.dims}, then {its.dtype} {its.dims}"
                raise its.wrong(path, "consecutive records differ in type or shape", facts)
            mine.extents += its.extents
            mine.meta = None
            if self.is_map:
                mine.dims[0] += its.dims[0]


def _read_record(reader: WireReader, record: Field, start: int) -> _Record:
    """Return the record that begins at byte ``start``, from its headers alone."""
    if record.wire_type != LENGTH:
        facts = f"expected a record, found the number {record.value}"
        raise FormatError(reader.path, start, "not a .ckpt file", facts=facts)
    name: str | None = None
    body: Field | None = None
    for subfield in reader.fields(record.start, record.stop):
        if subfield.number == 1:
            name = intern(reader.text(subfield))
        elif subfield.number in (2, 3):
            body = subfield
    if name is None or body is None or body.wire_type != LENGTH:
        missing = "tag" if name is None else "tensor"
        raise FormatError(reader.path, start, f"a record has no {missing}")
    if body.number == 2:
        return _Record(name, [_read_tensor(reader, body, start, name)])
    names = map_component_names(name)
    fields = [field for field in reader.fields(body.start, body.stop) if field.number == 1]
    if len(fields) != len(names) or any(field.wire_type != LENGTH for field in fields):
        reason = f"{name}: expected keys, values and statuses, found {len(fields)} tensors"
        raise FormatError(reader.path, start, reason)
    components = zip(names, fields, strict=True)
    tensors = [_read_tensor(reader, field, start, intern(label)) for label, field in components]
    _check_map(reader, name, start, tensors)
    return _Record(name, tensors)


def _read_tensor(reader: WireReader, body: Field, start: int, name: str) -> _RecordTensor:
    """Return the tensor in a message ``body`` of the record at byte ``start``."""
    dims: list[int] = []
    dtype: str | None = None
    content: Field | None = None
    for subfield in reader.fields(body.start, body.stop):
        if subfield.number == 1:
            dims += reader.numbers(subfield)
        elif subfield.number == 2:
            dtype = _type_name(reader.text(subfield))
        elif subfield.number == 3:
            content = subfield
    if dtype is None:
        raise FormatError(reader.path, start, f"{name}: the record has no tensor_type")
    if len(dims) > MAX_AXES:
        reason = f"{name}: more than {MAX_AXES} axes"
        raise UnsupportedError(reader.path, start, reason, facts=f"{len(dims)} axes")
    if any(size < 0 for size in dims):
        raise FormatError(reader.path, start, f"{name}: a size in dims {dims} is negative")
    tensor = _RecordTensor(name, start, dtype, dims)
    if content is not None:
        if content.wire_type != LENGTH:
            raise FormatError(reader.path, start, f"{name}: tensor_content is not bytes")
        tensor.extents = (Extent(content.start, content.stop - content.start),)
    return tensor


def _type_name(word: str) -> str:
    is_other_spelling = re.fullmatch(r"(mindspore\.)?[a-z0-9_]+", word) is not None
    dtype = find_dtype(word) or (find_word(word) if is_other_spelling else None)
    return intern(word) if dtype is None else dtype.name


def _check_map(reader: WireReader, tag: str, start: int, tensors: list[_RecordTensor]) -> None:
    """Raise FormatError if tensors of a map parameter lack bytes or differ in length."""
    for tensor in tensors:
        dtype = _DTYPES_OF_NUMPY.get(tensor.dtype) or find_dtype(tensor.dtype)
        if dtype is None:
            raise tensor.of_unknown_type(reader.path)
        tensor.dtype = dtype.name
        nbytes = sum(extent.nbytes for extent in tensor.extents)
        needed = math.prod(tensor.dims) * dtype.itemsize
        if not tensor.dims or nbytes != needed:
            facts = f"dims {tensor.dims} need {needed} bytes, found {nbytes}"
            raise tensor.wrong(reader.path, "its shape does not fit its bytes", facts)
    if len({tensor.dims[0] for tensor in tensors}) > 1:
        counts = ", ".join(str(tensor.dims[0]) for tensor in tensors)
        reason = f"{tag}: keys, values and statuses differ in number"
        raise FormatError(reader.path, start, reason, facts=counts)


# -------------------------------------------------------- reading: one record with the usual header


def _read_usual(
    reader: WireReader, start: int, end: int, metas: dict[str, TensorMeta]
) -> tuple[TensorMeta, tuple[Extent, ...], int] | None:
    """Return a complete tensor with a usual header, its extents, and the byte behind its record.

    Return None for any other record, damaged ones included.
    """
    window, at = reader.window(start, _USUAL_BYTES)
    match = _USUAL_HEADER.match(window, at)
    if match is None:
        return None
    before, encoded, behind = match.groups()
    kind = _usual_kind(before, len(encoded), behind)
    if kind is None:
        return None
    dtype, shape, nbytes = kind
    first = start + match.end() - at
    if first + nbytes > end:
        return None
    try:
        name = encoded.decode()
    except UnicodeDecodeError:
        return None
    meta = metas.get(name)
    if meta is None or meta.dtype != dtype or meta.shape != shape:
        metas[name] = meta = TensorMeta(intern(name), dtype, shape)
    return meta, (Extent(first, nbytes),) if nbytes else (), first + nbytes


@lru_cache(maxsize=_CACHED_HEADERS)  # most tensors have the same few shapes
def _usual_kind(
    before: bytes, name_bytes: int, behind: bytes
) -> tuple[str, tuple[int, ...], int] | None:
    """Return the element type, the shape and the bytes of the tensor in a whole record.

    Return None unless these are the bytes before and behind a name of ``name_bytes`` bytes.
    """
    kind = _kind_in(behind)
    if kind is None:
        return None
    dtype, shape = kind
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    is_usual = _around_name(name_bytes, shape, dtype, nbytes) == (before, behind)
    return (dtype, shape, nbytes) if is_usual else None


def _kind_in(behind: bytes) -> tuple[str, tuple[int, ...]] | None:
    match = _USUAL_TENSOR.fullmatch(behind)
    assert match is not None, "it is part of a usual header"
    dtype = find_dtype(match[2].decode())
    shape = tuple(decode_varint(size) for size in _DIM.findall(match[1]))
    return None if dtype is None or len(shape) > MAX_AXES else (dtype.name, shape)


def _whole_record(meta: TensorMeta, start: int, extents: tuple[Extent, ...]) -> _Record:
    tensor = _RecordTensor(meta.name, start, meta.dtype, [*meta.shape], extents, meta)
    return _Record(meta.name, [tensor])


# --------------------------------------------------------------- reading: the record at the end


class _Cut(NamedTuple):
    """The record in which a file ends: its first byte, its size, its tag and its tensor."""

    start: int
    nbytes: int | None = None
    tag: str | None = None
    meta: TensorMeta | None = None
    is_map: bool = False
    is_trailer: bool = False


def _find_cut(reader: WireReader, start: int, end: int) -> _Cut | None:
    """Return the record at byte ``start`` if the file provably ends inside it, else None.

    The lengths of the record, its tag and its body confirm each other.  So one changed bit does not
    make a whole record look cut.
    """
    if end < reader.size:
        return None  # a trailer ends the file
    data = reader.read(start, min(start + _USUAL_BYTES, end))
    cut = _Cut(start)
    if start + len(data) == end and data.startswith(_TRAILER[: len(data)]):
        return cut._replace(nbytes=_TRAILER_BYTES, is_trailer=True)
    try:
        nbytes, at = _take_length(data, 0, b"\x0a")
        cut = cut._replace(nbytes=at + nbytes)
        if start + at + nbytes <= end:
            return None
        nbytes, at = _take_length(data, at, b"\x0a")
        tag = data[at : at + nbytes]
        if cut.nbytes is None or at + nbytes >= cut.nbytes or min(tag, default=32) < 32:
            return None
        at, key = at + nbytes, data[at + nbytes]
        cut = cut._replace(tag=intern(tag.decode()), is_map=key == 0x1A)
        nbytes, at = _take_length(data, at, b"\x12\x1a")
    except IndexError:  # the header ends here; so does the file, or the header is too long
        return cut if start + len(data) == end else None
    except ValueError:
        return None
    if at + nbytes != cut.nbytes:
        return None
    header = _USUAL_HEADER.match(data)
    return cut._replace(meta=header and _meta_of_part(header, cut.nbytes))


def _take_length(data: bytes, at: int, keys: bytes) -> tuple[int, int]:
    """Return the length behind a key at byte ``at``, one of ``keys``, and the byte behind it.

    Raise IndexError if the data end before that byte, ValueError if no such key or number is there.
    """
    if data[at] not in keys:
        raise ValueError
    value = 0
    for shift in range(0, 63, 7):
        at += 1
        value |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return value, at + 1
    raise ValueError


def _meta_of_part(header: re.Match[bytes], nbytes: int) -> TensorMeta | None:
    kind = _kind_in(header[3])
    if kind is None:
        return None
    meta = TensorMeta(intern(header[2].decode()), *kind)
    return meta if _record_header(meta, nbytes - header.end()) == header[0] else None


def _cut_short(
    reader: WireReader,
    file: StoredFile,
    tensors: Mapping[str, StoredTensor],
    last: _Record,
    cut: _Cut,
) -> CutShortError:
    """Return the error of a file that ends inside a record; ``last`` is the one before it."""
    names = map_component_names(cut.tag) if cut.tag and cut.is_map else filter(None, [cut.tag])
    lost: dict[str, TensorMeta | None] = dict.fromkeys(names, cut.meta)
    whole = dict(tensors)
    for tensor in last.tensors:
        try:
            stored = _finish(reader, tensor, file)
        except FormatError:  # more records of it would follow
            lost.setdefault(tensor.name, None)
        else:
            if cut.tag == last.tag or (last.is_map and cut.tag is None):
                lost.setdefault(tensor.name, stored.meta)
            else:
                whole[tensor.name] = stored
    remains = Remains(FileIndex((file,), Ckpt.name, reader.size, whole), lost, cut.is_trailer)
    there = reader.size - cut.start
    facts = f"expected {cut.nbytes or 'more'} bytes from there, found {there}"
    facts = f"{cut.tag}: {facts}" if cut.tag else facts
    return CutShortError(reader.path, cut.start, "the file is cut short", "", facts, remains)


def _is_unfinished(record: _Record) -> bool:
    # A tensor lacks records if it has only the largest ones, and too few bytes.
    (tensor, *rest) = record.tensors or [_RecordTensor("", 0, TEXT, [])]
    dtype = find_dtype(tensor.dtype)
    if rest or dtype is None or tensor.dtype == TEXT or tensor.meta is not None:
        return False
    sizes = [extent.nbytes for extent in tensor.extents]
    are_largest = bool(sizes) and {*sizes} == {MAX_RECORD_BYTES}
    return are_largest and sum(sizes) < math.prod(tensor.dims) * dtype.itemsize


# ------------------------------------------------------------------------------------------ writing


def find_maps(tensors: Sequence[TensorMeta]) -> Mapping[str, Mapping[str, TensorMeta]]:
    """Return the components of every map parameter among tensors, by its name and theirs."""
    maps: dict[str, dict[str, TensorMeta]] = {}
    for meta in tensors:
        tag = map_of_component(meta.name)
        if tag is not None:
            maps.setdefault(tag, {})[meta.name] = meta
    return maps


def map_problems(tensors: Sequence[TensorMeta]) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each map parameter whose components do not fit together."""
    for tag, components in find_maps(tensors).items():
        missing = [name for name in map_component_names(tag) if name not in components]
        counts = [meta.shape[:1] for meta in components.values()]
        if missing:
            message = f"the map parameter lacks {' and '.join(missing)}"
            yield Diagnostic("destination", message, tensor=tag)
        elif (
            () in counts
            or len(set(counts)) > 1
            or any(m.text is not None for m in components.values())
        ):
            shapes = ", ".join(
                f"{name} {components[name].shape}" for name in map_component_names(tag)
            )
            message = "keys, values and statuses differ in number"
            yield Diagnostic("destination", message, facts=shapes, tensor=tag)


def _parts(tensors: Sequence[TensorMeta], attrs: Mapping[str, str]) -> Iterator[HeaderPart]:
    maps = find_maps(tensors)
    tags = {name: tag for tag, components in maps.items() for name in components}
    for meta in tensors:
        tag = tags.get(meta.name)
        if tag is None:
            yield from _tensor_parts(meta)
        elif meta.name == next(iter(maps[tag])):
            yield from _map_parts(tag, maps[tag])
    if "crc_num" in attrs:
        yield _trailer(0), "", 0


def _tensor_parts(meta: TensorMeta) -> Iterator[HeaderPart]:
    """Yield the records of a tensor; one if it is empty or a string."""
    if meta.text is not None:
        data = meta.text.encode("utf-32-le") or bytes(4)
        yield _record_header(meta, len(data)) + data, meta.name, 0
        return
    for start in range(0, meta.nbytes or 1, MAX_RECORD_BYTES):
        nbytes = min(MAX_RECORD_BYTES, meta.nbytes - start)
        yield _record_header(meta, nbytes), meta.name, nbytes


def _map_parts(tag: str, components: Mapping[str, TensorMeta]) -> Iterator[HeaderPart]:
    """Yield the records of a complete map parameter; one if it is empty."""
    metas = [components[name] for name in map_component_names(tag)]
    count = metas[0].shape[0]
    row_nbytes = [math.prod(meta.shape[1:]) * meta.itemsize for meta in metas]
    dtypes = [DTYPES[meta.dtype] for meta in metas]
    words = [dtype.name if dtype.hdf5 == "bytes" else dtype.hdf5 for dtype in dtypes]
    rows = max(1, MAX_RECORD_BYTES // max(1, sum(row_nbytes)))
    for first in range(0, count or 1, rows):
        n = min(rows, count - first)
        sizes = [n * nbytes for nbytes in row_nbytes]
        inner = []
        for meta, word, size in zip(metas, words, sizes, strict=True):
            head = _tensor_header((n, *meta.shape[1:]), word, size)
            inner.append(encode_key(1, LENGTH) + encode_varint(len(head) + size) + head)
        body = sum(map(len, inner)) + sum(sizes)
        name = encode_bytes(1, tag.encode()) + encode_key(3, LENGTH) + encode_varint(body)
        lead = encode_key(1, LENGTH) + encode_varint(len(name) + body) + name
        for meta, head, size in zip(metas, inner, sizes, strict=True):
            yield lead + head, meta.name, size
            lead = b""


def _record_header(meta: TensorMeta, nbytes: int) -> bytes:
    dims = (0,) if meta.text is not None else meta.shape
    name = meta.name.encode()
    before, behind = _around_name(len(name), dims, meta.dtype, nbytes)
    return before + name + behind


@lru_cache(maxsize=_CACHED_HEADERS)  # most tensors have the same few shapes
def _around_name(
    name_bytes: int, dims: tuple[int, ...], word: str, nbytes: int
) -> tuple[bytes, bytes]:
    """Return the bytes of a record before and behind a name of ``name_bytes`` bytes.

    Its content of ``nbytes`` bytes follows; ``word`` is the ``tensor_type``.
    """
    before = encode_key(1, LENGTH) + encode_varint(name_bytes)
    tensor = _tensor_header(dims, word, nbytes)
    behind = encode_key(2, LENGTH) + encode_varint(len(tensor) + nbytes) + tensor
    value_bytes = len(before) + name_bytes + len(behind) + nbytes
    return encode_key(1, LENGTH) + encode_varint(value_bytes) + before, behind


def _tensor_header(dims: tuple[int, ...], word: str, nbytes: int) -> bytes:
    fields = b"".join(encode_number(1, size) for size in dims) + encode_bytes(2, word.encode())
    return fields + encode_key(3, LENGTH) + encode_varint(nbytes)


def _trailer(crc: int) -> bytes:
    return _TRAILER + crc.to_bytes(_TRAILER_BYTES - len(_TRAILER), "big")
