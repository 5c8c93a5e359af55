"""The records that a ``.ckpt`` is a chain of: one tensor, or the three of a map parameter.

`ckpttool.formats.ckpt` specifies the bytes of a record and what a chain of them means,
`ckpttool.formats.ckpt` those of a map parameter.

Map parameters (hash tables) in a ``.ckpt``.

Bytes
-----
A record with field 3 in the place of field 2::

    0a <length>                        Checkpoint.value
       0a <length> <UTF-8>             1 tag
       1a <length>                     3 maptensor, exactly three tensors:
          0a <length> <tensor>         1 keys      dims [n]
          0a <length> <tensor>         1 values    dims [n, ...]
          0a <length> <tensor>         1 statuses  dims [n]

A tensor is spelled as in other records, but for its ``tensor_type``, which is NumPy's name
(``int32``); MindSpore's names are read, too.  The exporter writes blocks of some entries, so
consecutive records with one tag are one parameter, joined along axis 0.  Each record's three ``n``
MUST be equal, and each content MUST have all its bytes.  Nothing says how many records there are: a
file that was cut between two looks whole.

MindSpore 2.10 reads keys, values and statuses of int32, float16, float32 and float64; of any other
type its loader makes float64 out of the same bytes.

Source
------
MindSpore 2.10 ``train/serialization.py`` (``_write_mapparameter``, ``_load_map_parameter``).

MindSpore ``.ckpt``.

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

or, instead of field 2, a field 3 ``maptensor``: see `ckpttool.formats.ckpt`.

* Consecutive records with one tag hold one tensor: each repeats the complete dims, and the
  contents are joined.  MUST add up to ``product(dims) * itemsize``.  MindSpore cuts at 512 MiB;
  any other cut is read.
* A tag that comes again later is an error here.  MindSpore takes the last one without a word.
* A scalar has no dims.  MindSpore 1.x and 2.0 write dims ``[0]`` with one element of content;
  dims ``[0]`` without content is the empty vector.
* ``tensor_type`` ``str`` is a string of append_dict: dims ``[0]``, content UTF-32-LE without an
  end mark; the empty string is four zero bytes.
* Unknown fields are skipped, at every level.
* The last 17 bytes may be a trailer: ``crc_num`` and, in 10 bytes, big endian, the CRC-32 of all
  before it, or, as MindSpore saves it, of all but map parameters.  It is reported in
  ``attrs["crc_num"]``, and written if asked.
* A file of 0 bytes holds nothing: what a rank without parameters leaves when MindSpore saves with
  redundancy removed.

What is written is byte for byte what ``save_checkpoint`` of MindSpore 2.10 writes for the same
parameters in the same order, but for tensors without elements: MindSpore leaves them out, here
they are records with empty content, which is how its asynchronous path writes them.

An encrypted file is blocks of ciphertext, with map parameters in clear before them: see
`ckpttool.formats.encryption`.

Source
------
MindSpore 2.10 ``utils/checkpoint.proto``, ``train/serialization.py`` (``_exec_save``,
``_write_parameter_bytes_data``, ``_parse_ckpt_proto``), and files of 1.0, 2.0 and 2.10.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from sys import intern
from typing import NamedTuple

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.base import ChecksumPart
from ckpttool.formats.encryption import DecryptedFile, explain, mode_of, read_ciphertext
from ckpttool.formats.header_cache import HeaderCache
from ckpttool.formats.wire import (
    LENGTH,
    Field,
    WireReader,
    encode_bytes,
    encode_key,
    encode_number,
    encode_varint,
)
from ckpttool.model.dtypes import DTYPES, TEXT, DType, find_dtype
from ckpttool.model.tensors import (
    MAX_AXES,
    Ciphertext,
    Extent,
    FileIndex,
    Secret,
    SourceStamp,
    StoredFile,
    StoredTensor,
    TensorMeta,
    find_maps,
    map_of,
    map_problems,
    part_names,
)

MAX_NAME_BYTES = 1 << 20  # a name is read into memory; none in the field comes near

# The header of a record as MindSpore writes it; one of unusual length is walked field by field.
MAX_USUAL_BYTES = 512
VARINT = rb"[\x80-\xff]{0,8}[\x00-\x7f]"  # of 63 bits: one of 64 may be a negative number
DIM = re.compile(rb"\x08(%b)" % VARINT)
KEPT = 1 << 14  # headers, for ranks that are nearly alike; more take more memory than they spare
USUAL_HEADER = re.compile(
    rb"\x0a(%b)\x0a(%b)([^\x00-\x1f]+)\x12(%b)((?:\x08%b)*)\x12([\x01-\x20])(\w+)\x1a(%b)"
    % ((VARINT,) * 5)
)


@dataclass(slots=True)
class RecordTensor:
    """The contents of consecutive records with one tag so far."""

    name: str
    start: int  # byte of the first record
    dtype: str
    dims: list[int]
    extents: tuple[Extent, ...] = ()
    meta: TensorMeta | None = None  # if one record has said it all


@dataclass(slots=True)
class Record:
    """One record, joined with those of the same tag before it: one tensor, or a map's three."""

    tag: str
    start: int
    tensors: list[RecordTensor]

    @property
    def is_map(self) -> bool:
        """Whether it is a map parameter."""
        return len(self.tensors) > 1

    def join(self, path: str, other: Record) -> None:
        """Append the contents of the next record; a map gets more entries along axis 0."""
        for mine, its in zip(self.tensors, other.tensors, strict=True):
            if (mine.dtype, mine.dims[self.is_map :]) != (its.dtype, its.dims[self.is_map :]):
                raise FormatError(
                    path,
                    other.start,
                    f"{mine.name}: consecutive records say {mine.dtype} {mine.dims} and "
                    f"{its.dtype} {its.dims}",
                )
            mine.extents += its.extents
            mine.meta = None
            if self.is_map:
                mine.dims[0] += its.dims[0]


def read_usual(reader: WireReader, start: int, end: int) -> tuple[Record, int] | None:
    """Return a record that MindSpore's header and a whole tensor make up, and where it stops.

    Return None if it is spelled in another way, or is damaged.  Ranks have the same headers, so
    understood ones are cached: a file takes a third of the time.
    """
    window, at = reader.window(start, MAX_USUAL_BYTES)
    match = USUAL_HEADER.match(window, at)
    meta = match and _understand(match[0])
    if not match or not meta:
        return None
    first = start + match.end() - at
    stop = first + meta.nbytes
    if stop > end:
        return None
    extents = _one_extent(first, meta.nbytes) if meta.nbytes else ()
    tensor = RecordTensor(meta.name, start, meta.dtype, [*meta.shape], extents, meta)
    return Record(meta.name, start, [tensor]), stop


@lru_cache(maxsize=KEPT)
def _understand(header: bytes) -> TensorMeta | None:
    """Return the tensor of a usual header, if the record holds all of it and nothing else."""
    match = USUAL_HEADER.fullmatch(header)
    assert match is not None, "only what matched is asked for"
    record, tag, body, kind, content = (_varint(match[i]) for i in (1, 2, 4, 6, 8))
    dtype = find_dtype(match[7].decode())
    try:
        name = intern(match[3].decode())
    except UnicodeDecodeError:
        return None
    lengths = (
        len(header) - match.end(1) + content,
        len(match[3]),
        len(header) - match.end(4) + content,
        len(match[7]),
    )
    if dtype is None or dtype.name != match[7].decode() or (record, tag, body, kind) != lengths:
        return None
    shape = _shape(match[5])
    if len(shape) > MAX_AXES:
        return None
    meta = TensorMeta(name, dtype.name, shape)
    return meta if meta.nbytes == content else None


@lru_cache(maxsize=KEPT)  # tensors of equal shapes lie at the same place on many ranks
def _one_extent(offset: int, nbytes: int) -> tuple[Extent, ...]:
    return (Extent(offset, nbytes),)


@lru_cache(maxsize=KEPT)  # most tensors are of the same few shapes
def _shape(dims: bytes) -> tuple[int, ...]:
    return tuple(_varint(size) for size in DIM.findall(dims))


def _varint(data: bytes) -> int:
    return sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data))


def read_record(reader: WireReader, record: Field, start: int) -> Record:
    """Return the record that begins at byte ``start``; contents are not read."""
    if record.wire_type != LENGTH:
        raise FormatError(
            reader.path,
            start,
            f"no .ckpt: expected a record, found the number {record.value}; is it a strategy "
            "file? Then give the checkpoint as SRC, and this with -s or -d",
        )
    name: str | None = None
    body: Field | None = None
    for part in reader.fields(record.start, record.stop):
        if part.number == 1:
            name = intern(reader.text(part, MAX_NAME_BYTES))
        elif part.number in (2, 3):
            body = part
    if name is None or body is None or body.wire_type != LENGTH:
        missing = "tag" if name is None else "tensor"
        raise FormatError(reader.path, start, f"a record without a {missing}")
    if body.number == 2:
        return Record(name, start, [_read_tensor(reader, body, start, name)])
    parts = zip(part_names(name), map_tensors(reader, body, start, name), strict=True)
    tensors = [_read_tensor(reader, part, start, intern(label)) for label, part in parts]
    _check_map(reader, name, start, tensors)
    return Record(name, start, tensors)


def _read_tensor(reader: WireReader, body: Field, start: int, name: str) -> RecordTensor:
    dims: list[int] = []
    dtype: str | None = None
    content: Field | None = None
    for part in reader.fields(body.start, body.stop):
        if part.number == 1:
            dims += reader.numbers(part)
        elif part.number == 2:
            dtype = intern(reader.text(part, MAX_NAME_BYTES))
        elif part.number == 3:
            content = part
    if dtype is None:
        raise FormatError(reader.path, start, f"{name}: a record without a tensor_type")
    if len(dims) > MAX_AXES:
        reason = f"{name}: {len(dims)} axes; {MAX_AXES} are the most"
        raise FormatError(reader.path, start, reason)
    if any(size < 0 for size in dims):
        raise FormatError(reader.path, start, f"{name}: dims {dims} with a negative size")
    tensor = RecordTensor(name, start, dtype, dims)
    if content is not None:
        if content.wire_type != LENGTH:
            raise FormatError(reader.path, start, f"{name}: tensor_content is not bytes")
        tensor.extents = (Extent(content.start, content.stop - content.start),)
    return tensor


def _check_map(reader: WireReader, tag: str, start: int, tensors: list[RecordTensor]) -> None:
    """Raise if a block of a map is incomplete, or its three tensors differ in their entries."""
    for tensor in tensors:
        dtype = find_map_dtype(tensor.dtype)
        if dtype is None:
            reason = f"{tensor.name}: unknown tensor_type {tensor.dtype!r}"
            raise FormatError(reader.path, start, reason)
        tensor.dtype = dtype.name
        held = sum(extent.nbytes for extent in tensor.extents)
        need = math.prod(tensor.dims) * dtype.itemsize
        if not tensor.dims or held != need:
            reason = f"{tensor.name}: dims {tensor.dims} need {need} bytes, content has {held}"
            raise FormatError(reader.path, start, reason)
    if len({tensor.dims[0] for tensor in tensors}) > 1:
        counts = ", ".join(str(tensor.dims[0]) for tensor in tensors)
        raise FormatError(reader.path, start, f"{tag}: keys, values and statuses are {counts}")


BLOCK_BYTES = 512 * 1024 * 1024  # of one record; a message must stay below 2 GiB
_OF_NUMPY = {dtype.hdf5: dtype for dtype in DTYPES.values() if dtype.hdf5 != "bytes"}


class Step(NamedTuple):
    """A stretch of a file: header bytes, and ``nbytes`` of the content of a tensor behind them."""

    header: bytes
    name: str
    nbytes: int
    text: bytes = b""  # the content itself, of a string


def find_map_dtype(name: str) -> DType | None:
    """Return the type that a map parameter's ``tensor_type`` names."""
    return _OF_NUMPY.get(name) or find_dtype(name)


def map_tensors(reader: WireReader, body: Field, start: int, tag: str) -> list[Field]:
    """Return the three tensors of a ``maptensor``."""
    tensors = [part for part in reader.fields(body.start, body.stop) if part.number == 1]
    if len(tensors) != len(part_names(tag)) or any(t.wire_type != LENGTH for t in tensors):
        reason = f"{tag}: a map parameter has keys, values and statuses, found {len(tensors)}"
        raise FormatError(reader.path, start, reason)
    return tensors


def map_steps(tag: str, parts: Mapping[str, TensorMeta]) -> Iterator[Step]:
    """Yield the records of a map parameter, at most `BLOCK_BYTES` each; one if it has no entries.

    ``parts`` are as `ckpttool.model.tensors.map_problems` wants them.
    """
    metas = [parts[name] for name in part_names(tag)]
    count = metas[0].shape[0]
    row_nbytes = [math.prod(meta.shape[1:]) * meta.itemsize for meta in metas]
    rows = max(1, BLOCK_BYTES // max(1, sum(row_nbytes)))
    for first in range(0, count or 1, rows):
        n = min(rows, count - first)
        heads = [_head(meta, n) for meta in metas]
        sizes = [n * nbytes for nbytes in row_nbytes]
        inner = [
            encode_key(1, LENGTH) + encode_varint(len(head) + size) + head
            for head, size in zip(heads, sizes, strict=True)
        ]
        body = sum(map(len, inner)) + sum(sizes)
        name = encode_bytes(1, tag.encode()) + encode_key(3, LENGTH) + encode_varint(body)
        lead = encode_key(1, LENGTH) + encode_varint(len(name) + body) + name
        for meta, head, size in zip(metas, inner, sizes, strict=True):
            yield Step(lead + head, meta.name, size)
            lead = b""


def _head(meta: TensorMeta, count: int) -> bytes:
    """Return a tensor of ``count`` entries up to its content."""
    dtype = DTYPES[meta.dtype]
    word = meta.dtype if dtype.hdf5 == "bytes" else dtype.hdf5
    dims = b"".join(encode_key(1, 0) + encode_varint(n) for n in (count, *meta.shape[1:]))
    nbytes = count * math.prod(meta.shape[1:]) * dtype.itemsize
    content = encode_key(3, LENGTH) + encode_varint(nbytes)
    return dims + encode_bytes(2, word.encode()) + content


SLICE_BYTES = 512 * 1024 * 1024  # MindSpore starts a new record at this size (SLICE_SIZE, in KiB)
TRAILER = b"crc_num"
TRAILER_BYTES = 17
MAX_TEXT_BYTES = 64 << 20  # a string is read into memory, too; larger ones are refused by name


class Ckpt:
    """The `Format` of MindSpore's own checkpoints.

    Parameters
    ----------
    twins
        Headers of files that were read before, to recognise equal ones.
    """

    name = "ckpt"

    def __init__(self, cache: HeaderCache | None = None) -> None:
        self._cache = cache

    def refusals(self, tensors: Sequence[TensorMeta], attrs: Collection[str] = ()) -> Iterator[str]:
        """Yield a message for each map parameter that lacks a part; the format holds all else."""
        yield from map_problems(tensors)

    def read_index(self, path: str, key: Secret | None = None) -> FileIndex:
        """Return the header of the file: walk the records with seeks, read no contents.

        ``key`` is that of an encrypted file; another has no use for it.
        """
        with WireReader(path) as reader:
            end, attrs = _find_trailer(reader)
            is_encrypted = mode_of(reader.read(0, min(4, end))) is not None
            tensors, stop = ({}, 0) if is_encrypted else self._read_tensors(reader, end)
            stamp = reader.stamp
        cipher = None
        if stop < end:
            cipher = read_ciphertext(path, stop, end, key, stamp)
            hidden = _read_encrypted(StoredFile(path, stamp, cipher), cipher, stamp)
            for name in hidden.keys() & tensors.keys():
                raise FormatError(path, stop, f"{name}: stored twice, in clear and encrypted")
            tensors = {**tensors, **hidden}
        stamps = {path: stamp}
        return FileIndex(path, self.name, stamp.nbytes, tensors, attrs, cipher, stamps=stamps)

    def _read_tensors(self, reader: WireReader, end: int) -> tuple[Mapping[str, StoredTensor], int]:
        known = None if self._cache is None else self._cache.lookup(self.name, reader, end)
        if known is not None:
            return known, end
        tensors, stop = _read_tensors(reader, end, StoredFile(reader.path, reader.stamp))
        if self._cache is not None and stop == end:
            self._cache.store(self.name, reader, end, tensors, {})
        return tensors, stop

    def file_bytes(self, tensors: Sequence[TensorMeta], attrs: Collection[str] = ()) -> int:
        """Return the size of the file that `create` makes of these tensors."""
        records = sum(len(step.header) + step.nbytes for step in _steps(tensors))
        return records + (TRAILER_BYTES if "crc_num" in attrs else 0)

    def create(
        self, path: str, tensors: Sequence[TensorMeta], attrs: Mapping[str, str]
    ) -> FileIndex:
        """Write a file with every record's header in place, its contents still to be filled in."""
        extents: dict[str, list[Extent]] = {meta.name: [] for meta in tensors}
        offset = 0
        with Path(path).open("wb") as file:
            for step in _steps(tensors):
                file.seek(offset)
                file.write(step.header)
                offset += len(step.header)
                if step.text:
                    file.write(step.text)
                elif step.nbytes:
                    extents[step.name].append(Extent(offset, step.nbytes))
                offset += step.nbytes
            file.truncate(offset)
            if "crc_num" in attrs:
                file.seek(offset)
                offset += file.write(_trailer(0))
        whole = StoredFile(path)
        stored = {m.name: StoredTensor(m, whole, tuple(extents[m.name])) for m in tensors}
        kept = {"crc_num": "0"} if "crc_num" in attrs else {}
        return FileIndex(path, self.name, offset, stored, kept)

    def checksum_parts(self, index: FileIndex, as_saved: bool = False) -> Iterator[ChecksumPart]:
        """Yield all before the trailer; MindSpore's saver leaves out map parameters.

        Its loader does not, so MindSpore refuses such a file of its own.
        """
        end = index.nbytes - TRAILER_BYTES
        start = at = 0
        with WireReader(index.path, stamp=index.stamps.get(index.path)) as reader:
            for record in reader.fields(0, end if as_saved and index.cipher is None else 0):
                if _is_map(reader, record):
                    yield Extent(start, at - start)
                    start = record.stop
                at = record.stop
        yield Extent(start, end - start)

    def seal(self, path: str, crc: int | None = None) -> None:
        """Write the checksum into the trailer that `create` has left for it."""
        if crc is not None:
            with Path(path).open("r+b") as file:
                file.seek(-TRAILER_BYTES, 2)
                file.write(_trailer(crc))


def _trailer(crc: int) -> bytes:
    return TRAILER + crc.to_bytes(TRAILER_BYTES - len(TRAILER), "big")


def _is_map(reader: WireReader, record: Field) -> bool:
    return record.number == 1 and any(
        part.number == 3 for part in reader.fields(record.start, record.stop)
    )


def _find_trailer(reader: WireReader) -> tuple[int, dict[str, str]]:
    """Return where the records end, and the checksum behind them, if there is one."""
    start = reader.size - TRAILER_BYTES
    if start < 0 or reader.read(start, start + len(TRAILER)) != TRAILER:
        return reader.size, {}
    crc = reader.read(start + len(TRAILER), reader.size)
    return start, {"crc_num": str(int.from_bytes(crc, "big"))}


def _read_tensors(
    reader: WireReader, end: int, file: StoredFile
) -> tuple[dict[str, StoredTensor], int]:
    """Return the tensors of the records up to ``end`` or encrypted blocks, and where they stop."""
    tensors: dict[str, StoredTensor] = {}
    starts: dict[str, int] = {}
    current: Record | None = None
    start = stop = 0
    while stop < end:
        start = stop
        usual = read_usual(reader, start, end)
        if usual is not None:
            record, stop = usual
        else:
            item = next(reader.fields(start, end))
            if item.number != 1 and mode_of(reader.read(start, min(start + 4, end))) is not None:
                break
            stop = item.stop
            if item.number != 1:
                continue
            record = read_record(reader, item, start)
        if current is not None and _continues(record, current):
            current.join(reader.path, record)
            continue
        if current is not None:
            tensors |= _finish_all(reader, current, file)
        for name in dict.fromkeys((record.tag, *(tensor.name for tensor in record.tensors))):
            if name in starts:
                raise FormatError(
                    reader.path,
                    start,
                    f"{name}: stored twice, the first time at byte {starts[name]}; "
                    "which one counts cannot be known",
                )
            starts[name] = start
        current = record
    if current is not None:
        tensors |= _finish_all(reader, current, file)
    return tensors, stop


def _read_encrypted(
    file: StoredFile, cipher: Ciphertext, stamp: SourceStamp
) -> dict[str, StoredTensor]:
    with WireReader(file.path, DecryptedFile(file.path, cipher, stamp)) as reader:
        try:
            tensors, _ = _read_tensors(reader, reader.size, file)
        except FormatError as error:
            raise explain(error, cipher, stamp) from error
    return tensors


def _continues(record: Record, before: Record) -> bool:
    is_text = record.tensors[0].dtype == TEXT
    return record.tag == before.tag and record.is_map == before.is_map and not is_text


def _finish_all(reader: WireReader, record: Record, file: StoredFile) -> dict[str, StoredTensor]:
    return {tensor.name: _finish(reader, tensor, file) for tensor in record.tensors}


def _finish(reader: WireReader, tensor: RecordTensor, file: StoredFile) -> StoredTensor:
    """Return the stored tensor, its shape understood and its bytes counted."""
    if tensor.meta is not None:
        return StoredTensor(tensor.meta, file, tensor.extents)
    held = sum(extent.nbytes for extent in tensor.extents)
    if tensor.dtype == TEXT:
        text = _read_text(reader, tensor, held)
        return StoredTensor(TensorMeta(tensor.name, TEXT, (), text), file, ())
    dtype = find_dtype(tensor.dtype)
    if dtype is None:
        raise FormatError(
            reader.path, tensor.start, f"{tensor.name}: unknown tensor_type {tensor.dtype!r}"
        )
    shape = tuple(tensor.dims)
    if held == dtype.itemsize and shape == (0,):
        shape = ()  # as MindSpore 1.x and 2.0 write a scalar
    elif held > 1 and shape in ((), (0,)) and dtype.name == "random_op":
        shape = (held,)  # 2.0 does not say how long it is
    need = math.prod(shape) * dtype.itemsize
    if held != need:
        if need and held and held % need == 0 and len(tensor.extents) == held // need:
            reason = f"stored {held // need} times in a row; which one counts cannot be known"
        else:
            reason = (
                f"dims {list(shape)} of {dtype.name} need {need} bytes, tensor_content has {held}"
            )
        raise FormatError(reader.path, tensor.start, f"{tensor.name}: {reason}")
    extents = tuple(extent for extent in tensor.extents if extent.nbytes)
    return StoredTensor(TensorMeta(tensor.name, dtype.name, shape), file, extents)


def _read_text(reader: WireReader, tensor: RecordTensor, held: int) -> str:
    if tensor.dims not in ([0], []) or held < 4 or held % 4:
        raise FormatError(
            reader.path,
            tensor.start,
            f"{tensor.name}: a string has dims [0] and four bytes a character, "
            f"found dims {tensor.dims} and {held} bytes",
        )
    if held > MAX_TEXT_BYTES:
        raise UnsupportedError(
            reader.path,
            tensor.start,
            f"{tensor.name}: a string of {held} bytes; {MAX_TEXT_BYTES} are the most that is read",
        )
    data = b"".join(reader.read(e.offset, e.offset + e.nbytes) for e in tensor.extents)
    if data == bytes(4):
        return ""
    try:
        return data.decode("utf-32-le")
    except UnicodeDecodeError as error:
        raise FormatError(
            reader.path, tensor.start, f"{tensor.name}: a string that is not UTF-32: {error}"
        ) from error


def _steps(tensors: Sequence[TensorMeta]) -> Iterator[Step]:
    """Yield the file from its first byte to its last, record by record."""
    maps = find_maps(tensors)
    for meta in tensors:
        tag = map_of(meta.name)
        if tag is None:
            for content in _contents(meta):
                header = _record_header(meta, content.nbytes)
                yield Step(header, meta.name, content.nbytes, content.text)
        elif meta.name == next(iter(maps[tag])):
            yield from map_steps(tag, maps[tag])


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of one record: its length, and the bytes if they are a string's."""

    nbytes: int
    text: bytes = b""


def _contents(meta: TensorMeta) -> Iterator[_Content]:
    if meta.text is not None:
        data = meta.text.encode("utf-32-le") or bytes(4)
        yield _Content(len(data), data)
        return
    for start in range(0, meta.nbytes, SLICE_BYTES):
        yield _Content(min(SLICE_BYTES, meta.nbytes - start))
    if not meta.nbytes:
        yield _Content(0)


def _record_header(meta: TensorMeta, nbytes: int) -> bytes:
    """Return everything of a record before its content of ``nbytes`` bytes."""
    dims = (0,) if meta.text is not None else meta.shape
    tensor = b"".join(encode_number(1, size) for size in dims)
    tensor += encode_bytes(2, meta.dtype.encode())
    tensor += encode_key(3, LENGTH) + encode_varint(nbytes)
    tag = encode_bytes(1, meta.name.encode())
    value = tag + encode_key(2, LENGTH) + encode_varint(len(tensor) + nbytes) + tensor
    return encode_key(1, LENGTH) + encode_varint(len(value) + nbytes) + value
