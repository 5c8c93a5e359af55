"""Files spelled byte by byte: protobuf messages, checkpoint records, strategies.

The package has its own encoder; this one exists to judge it, and to write what it would never
write.
"""

from __future__ import annotations

import json
from pathlib import Path

from ckpttool.formats import get_format
from ckpttool.model.dtypes import DTYPES
from ckpttool.model.tensors import FileIndex, StoredTensor, TensorMeta


def varint(value: int) -> bytes:
    """Encode a varint; negative numbers have ten bytes."""
    value %= 1 << 64
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def number(field: int, *values: int) -> bytes:
    """Encode varint fields, one for each value."""
    return b"".join(varint(field << 3) + varint(value) for value in values)


def message(field: int, *parts: bytes) -> bytes:
    """Encode a length-delimited field."""
    body = b"".join(parts)
    return varint(field << 3 | 2) + varint(len(body)) + body


def packed(field: int, *values: int) -> bytes:
    """Encode a packed repeated field."""
    return message(field, *(varint(value) for value in values))


# ------------------------------------------------------------------------------------ .ckpt


def record(
    name: str = "w",
    dtype: str = "Float32",
    dims: tuple[int, ...] = (2,),
    content: bytes = bytes(range(8)),
) -> bytes:
    """Encode a record of a ``.ckpt``."""
    tensor = number(1, *dims) + message(2, dtype.encode()) + message(3, content)
    return message(1, message(1, name.encode()), message(2, tensor))


def map_record(
    name: str = "emb",
    keys: tuple[str, tuple[int, ...], bytes] = ("int32", (2,), bytes(range(8))),
    values: tuple[str, tuple[int, ...], bytes] = ("float32", (2, 3), bytes(range(24))),
    statuses: tuple[str, tuple[int, ...], bytes] = ("int32", (2,), bytes(8)),
) -> bytes:
    """Encode a map parameter: for each of its tensors type, dims and content."""
    tensors = [
        message(1, number(1, *dims) + message(2, dtype.encode()) + message(3, content))
        for dtype, dims, content in (keys, values, statuses)
    ]
    return message(1, message(1, name.encode()), message(3, *tensors))


def map_block(keys: list[int], seed: int = 0, name: str = "emb", width: int = 3) -> bytes:
    """Encode a record of a map parameter with these keys."""
    n = len(keys)
    return map_record(
        name,
        ("int64", (n,), b"".join(key.to_bytes(8, "little") for key in keys)),
        ("float32", (n, width), bytes((seed + i) % 251 for i in range(4 * n * width))),
        ("int32", (n,), b"\1\0\0\0" * n),
    )


# --------------------------------------------------------------------------------- strategies


def operator(stage: int, name: str = "MatMul_w") -> bytes:
    """Encode a parallel_strategy_item."""
    strategies = number(1, stage) + message(2, number(1, 2, 2))
    return message(2, message(1, name.encode()), message(2, strategies))


def layout(
    name: str,
    matrix: tuple[int, ...],
    *maps: tuple[int, ...],
    size: int | None = 0,
    step: int = 0,
    split: tuple[int, ...] = (),
    starts: tuple[int, ...] = (),
    field: int | None = 0,
    numbers=number,
) -> bytes:
    """Encode a parallel_layout_item; None leaves a field out, ``numbers=packed`` packs the dims."""
    parts = [message(1, numbers(1, *matrix))]
    parts += [message(2, numbers(1, *axes) if axes else b"") for axes in maps]
    parts += [message(3, number(1, *split)), message(4, number(1, *starts))]
    parts += [] if field is None else [number(5, field)]
    parts += [] if size is None else [number(6, step), number(7, size)]
    return message(3, message(1, name.encode()), message(2, *parts))


def strategy(*items: bytes) -> bytes:
    """Encode a strategy file."""
    return number(1, 2) + b"".join(items)


# ------------------------------------------------------------------------------- .safetensors


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """Encode a file with this header: an object for JSON, or its bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    """Return the header entry of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# ------------------------------------------------------------------- tensors for all formats

SHAPES = ((), (1,), (5,), (2, 3, 4, 5), (0,), (0, 3), (3, 0, 2))


def metas(format: str) -> list[TensorMeta]:
    """Return every element type of a format, in every kind of shape, and strings."""
    tensors = [
        TensorMeta(f"{dtype}.{len(shape)}-{shape}", dtype, shape)
        for dtype in DTYPES
        for shape in SHAPES
    ]
    tensors += [
        TensorMeta(f"text_{i}", "str", (), text)
        for i, text in enumerate(["", "a", "Größe 𝄞 重み\n", "x" * 10_000])
    ]
    refused = {
        meta.name for meta in tensors for _ in get_format(format).refusals([meta])
    }  # safetensors has no word for a few types; each format's own tests say for which
    return [meta for meta in tensors if meta.name not in refused]


def content(tensor: StoredTensor) -> bytes:
    """Return bytes for a tensor that tell it from others."""
    seed = sum(tensor.meta.name.encode())
    return bytes((seed + 7 * i) % 251 for i in range(tensor.meta.nbytes))


def write_contents(index: FileIndex, contents: dict[str, bytes]) -> None:
    """Write contents where a header says, without the package."""
    with Path(index.path).open("r+b") as file:
        for name, tensor in index.tensors.items():
            at = 0
            for extent in tensor.extents:
                file.seek(extent.offset)
                file.write(contents[name][at : at + extent.nbytes])
                at += extent.nbytes


def read_contents(index: FileIndex) -> dict[str, bytes]:
    """Read the bytes of every tensor, from where a header says."""
    data = Path(index.path).read_bytes()
    return {
        name: b"".join(data[e.offset : e.offset + e.nbytes] for e in tensor.extents)
        for name, tensor in index.tensors.items()
    }
