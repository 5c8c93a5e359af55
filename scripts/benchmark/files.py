"""Writes the files of a checkpoint and of its strategy."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmark.model import MOMENTS, Mesh, Model, Tensor
from ckpttool.formats import get_format
from ckpttool.formats.wire import encode_bytes, encode_number
from ckpttool.model.tensors import StoredTensor, TensorMeta
from ckpttool.storage.files import write_header

POOL_BYTES = 64 << 20

Bytes = npt.NDArray[np.uint8]


def write_checkpoint(
    folder: Path,
    model: Model,
    mesh: Mesh,
    *,
    sparse: bool = False,
    seed: int = 0,
    format: str = "ckpt",
) -> None:
    """A file for every rank below ``folder``, and ``folder.strategy.ckpt`` beside it.

    Every slice is a stretch of a pool of random numbers that its name and its place in the tensor
    choose with ``seed``: replicas are equal, all else differs.  Weights and moments of Adam are as
    large as those of a trained model, since a cast is faster or slower for others.  Sparse ones
    have headers and holes.
    """
    write_strategy(strategy_path(folder), model, mesh)
    kinds = set() if sparse else {_kind(tensor) for tensor in model.tensors}
    pools = {kind: _pool(*kind) for kind in kinds}
    per_stage = mesh.tensor * mesh.data
    for stage in range(mesh.pipeline):
        mine = [one for one in model.tensors if mesh.stage_of(one, model.layers) == stage]
        header = get_format(format).index([_slice(one, mesh) for one in mine])
        for local_rank in range(per_stage):
            rank = stage * per_stage + local_rank
            path = folder / f"rank_{rank}" / f"bench-1_1.{format}"
            path.parent.mkdir(parents=True)
            with path.open("w+b") as file:
                write_header(file.fileno(), header)
                for tensor in () if sparse else mine:
                    place = mesh.layout(tensor).slice_index(local_rank)
                    text = f"{tensor.name}{place}{seed or ''}"
                    start = zlib.crc32(text.encode()) % POOL_BYTES // 16 * 16
                    stored = header.index.tensors[tensor.name]
                    _write(file.fileno(), stored, pools[_kind(tensor)], start)


def strategy_path(folder: Path) -> Path:
    """Where the strategy of the checkpoint in ``folder`` is."""
    return folder.with_name(f"{folder.name}.strategy.ckpt")


def write_strategy(path: Path, model: Model, mesh: Mesh) -> None:
    """The strategy file of all stages, as MindSpore merges them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(encode_number(1, 1))
        for stage in range(mesh.pipeline):
            strategies = encode_number(1, stage)
            name = f"{stage}-MatMul".encode()
            file.write(encode_bytes(2, encode_bytes(1, name) + encode_bytes(2, strategies)))
        for tensor in model.tensors:
            stage = mesh.stage_of(tensor, model.layers)
            file.write(_layout_item(f"{stage}-{tensor.name}", tensor, mesh))


def _layout_item(name: str, tensor: Tensor, mesh: Mesh) -> bytes:
    layout = mesh.layout(tensor)
    matrix = b"".join(encode_number(1, size) for size in layout.device_matrix)
    cuts = b"".join(encode_number(1, axes[0] if axes else -1) for axes in layout.tensor_map)
    shard = -1 if layout.optimizer_shard > 1 else 0
    parts = encode_bytes(1, matrix) + encode_bytes(2, cuts) + encode_bytes(3, b"")
    parts += encode_bytes(4, b"") + encode_number(5, 0) + encode_number(6, 0)
    parts += encode_number(7, shard)
    return encode_bytes(3, encode_bytes(1, name.encode()) + encode_bytes(2, parts))


def _slice(tensor: Tensor, mesh: Mesh) -> TensorMeta:
    """What each rank of a stage has of a tensor: equal shapes, as every cut is even."""
    shape = mesh.layout(tensor).slice_shape(0, tensor.shape)
    return TensorMeta(tensor.name, tensor.dtype, shape)


def _kind(tensor: Tensor) -> tuple[str, str]:
    """The type of a tensor, and which moment of Adam it is, if any."""
    return tensor.dtype, next((one for one in MOMENTS if tensor.name.startswith(one)), "")


def _pool(dtype: str, moment: str) -> Bytes:
    """Numbers as weights or moments are; for bfloat16 the upper halves of float32."""
    generator = np.random.default_rng(1)
    itemsize = 4 if dtype == "Float32" else 2
    numbers = generator.standard_normal(POOL_BYTES // itemsize, np.float32)
    if moment == "adam_v.":  # from 1e-16 to 1e-8 for the most part
        numbers = np.square(numbers * np.float32(1e-6)) * np.exp(numbers * 4)
    else:
        numbers *= np.float32(1e-5 if moment else 0.02)
    if itemsize == 2:
        return numbers.view(np.uint16)[1::2].copy().view(np.uint8)
    return numbers.view(np.uint8)


def _write(fd: int, tensor: StoredTensor, pool: Bytes, start: int) -> None:
    for extent in tensor.extents:
        os.lseek(fd, extent.offset, os.SEEK_SET)
        left = extent.nbytes
        while left:
            left -= os.write(fd, pool.data[start : start + left])
            start = 0
