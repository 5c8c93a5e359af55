"""The records that a ``.ckpt`` is a chain of: one tensor, or the three of a map parameter.

`ckpttool.formats.ckpt` specifies the bytes of a record and what a chain of them means,
`ckpttool.formats.ckpt_maps` those of a map parameter.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from sys import intern

from ckpttool.errors import FormatError
from ckpttool.formats.ckpt_maps import find_map_dtype, map_tensors
from ckpttool.formats.wire import LENGTH, Field, WireReader
from ckpttool.model.catalog import MAX_AXES, Extent, TensorMeta
from ckpttool.model.dtypes import find_dtype
from ckpttool.model.maps import part_names

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
