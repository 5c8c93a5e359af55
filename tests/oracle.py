"""The oracle: which part of a full tensor a rank holds, in slow and plain NumPy.

Written down from MindSpore's definition of a layout; shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class OracleLayout(NamedTuple):
    """Device matrix, device axes per tensor axis, optimizer shard, first rank of the stage."""

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    opt_size: int = 0  # optimizer-shard size: 0 none, -1 the whole replica group
    first_rank: int = 0
    rows: tuple[int, ...] = ()  # rows of every slice, where axis 0 is cut unevenly
    fields: int = 1  # of a field-sliced embedding: every slice has its share of each field

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + int(np.prod(self.device_matrix)))


def take(full: np.ndarray, layout: OracleLayout, rank: int) -> np.ndarray:
    """Return the slice of ``full`` that ``rank`` holds."""
    devices = np.arange(np.prod(layout.device_matrix)).reshape(layout.device_matrix)
    here = np.argwhere(devices == rank - layout.first_rank)[0][::-1]  # axis 0 is the innermost
    sizes = layout.device_matrix[::-1]
    for axis, device_axes in enumerate(layout.tensor_map):
        parts, index = 1, 0
        for device_axis in device_axes:  # the first one listed cuts outermost
            parts *= sizes[device_axis]
            index = index * sizes[device_axis] + here[device_axis]
        if axis == 0 and layout.rows:
            full = np.split(full, np.cumsum(layout.rows)[:-1])[index]
        elif axis == 0 and layout.fields > 1:
            table = full.reshape(layout.fields, len(full) // layout.fields, *full.shape[1:])
            full = np.concatenate(np.split(table, parts, 1)[index])
        else:
            full = np.split(full, parts, axis)[index]  # raises where it does not divide
    if layout.opt_size:
        cut = {device_axis for device_axes in layout.tensor_map for device_axis in device_axes}
        group = [
            device
            for device in devices.flat
            if all(np.argwhere(devices == device)[0][::-1][axis] == here[axis] for axis in cut)
        ]
        shards = len(group) if layout.opt_size == -1 else layout.opt_size
        full = np.split(full, shards)[group.index(rank - layout.first_rank) % shards]
    return full


def join(slices: Mapping[int, np.ndarray], layout: OracleLayout) -> np.ndarray:
    """Return the full tensor, from the slices that are there (replicas may be missing)."""
    shape = full_shape(next(iter(slices.values())).shape, layout)
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    flat = np.empty(numbers.size, next(iter(slices.values())).dtype)
    missing = np.ones(numbers.size, bool)
    for rank, part in slices.items():
        where = take(numbers, layout, rank)
        flat[where] = part
        missing[where] = False
    if missing.any():
        raise ValueError(f"no rank holds element {int(np.flatnonzero(missing)[0])}")
    return flat.reshape(shape)


def full_shape(slice_shape: Sequence[int], layout: OracleLayout) -> tuple[int, ...]:
    """Return the full shape, from the shape of a slice."""
    sizes = layout.device_matrix[::-1]
    shape = [
        size * int(np.prod([sizes[axis] for axis in axes]))
        for size, axes in zip(slice_shape, layout.tensor_map, strict=True)
    ]
    if layout.opt_size:
        used = {axis for axes in layout.tensor_map for axis in axes}
        group = int(np.prod([size for axis, size in enumerate(sizes) if axis not in used]))
        shape[0] *= group if layout.opt_size == -1 else layout.opt_size
    if layout.rows:
        shape[0] = sum(layout.rows)
    return tuple(shape)
