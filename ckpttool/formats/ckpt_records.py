"""The records that a ``.ckpt`` is a chain of: one tensor, or the three of a map parameter.

`ckpttool.formats.ckpt` tells the bytes of a record and what a chain of them means,
`ckpttool.formats.ckpt_maps` those of a map parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from sys import intern

from ckpttool.errors import FormatError
from ckpttool.formats.ckpt_maps import find_map_dtype, map_tensors
from ckpttool.formats.wire import LENGTH, Field, WireReader
from ckpttool.model.catalog import Extent
from ckpttool.model.maps import part_names

MAX_NAME_BYTES = 1 << 20  # a name is read into memory; none in the field comes near


@dataclass(slots=True)
class RecordTensor:
    """What consecutive records with one tag have said so far."""

    name: str
    start: int  # byte of the first record
    dtype: str
    dims: list[int]
    extents: list[Extent] = field(default_factory=list)


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
        """Take in the contents of the record behind it; a map gets more entries along axis 0."""
        for mine, its in zip(self.tensors, other.tensors, strict=True):
            if (mine.dtype, mine.dims[self.is_map :]) != (its.dtype, its.dims[self.is_map :]):
                raise FormatError(
                    path,
                    other.start,
                    f"{mine.name}: consecutive records say {mine.dtype} {mine.dims} and "
                    f"{its.dtype} {its.dims}",
                )
            mine.extents += its.extents
            if self.is_map:
                mine.dims[0] += its.dims[0]


def read_record(reader: WireReader, record: Field, start: int) -> Record:
    """What the record that begins at byte ``start`` says; contents are not read."""
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
    if any(size < 0 for size in dims):
        raise FormatError(reader.path, start, f"{name}: dims {dims} with a negative size")
    tensor = RecordTensor(name, start, dtype, dims)
    if content is not None:
        if content.wire_type != LENGTH:
            raise FormatError(reader.path, start, f"{name}: tensor_content is not bytes")
        tensor.extents.append(Extent(content.start, content.stop - content.start))
    return tensor


def _check_map(reader: WireReader, tag: str, start: int, tensors: list[RecordTensor]) -> None:
    """Each block of a map is complete, and its three tensors have as many entries."""
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
