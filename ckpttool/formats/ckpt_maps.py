"""Map parameters (hash tables) in a ``.ckpt``.

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
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats.wire import LENGTH, Field, WireReader, encode_bytes, encode_key, encode_varint
from ckpttool.model.catalog import TensorMeta
from ckpttool.model.dtypes import DTYPES, DType, find_dtype
from ckpttool.model.maps import part_names

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

    ``parts`` are as `ckpttool.model.maps.map_problems` wants them.
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
