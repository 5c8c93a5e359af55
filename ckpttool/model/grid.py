"""The grid of slices that a device matrix and a tensor map make: how many, and who holds which.

See `ckpttool.model.layout` for what these mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import product


@dataclass(frozen=True, slots=True)
class Grid:
    """The slices of a layout.

    Attributes
    ----------
    parts
        How many there are along each tensor axis.
    index
        For each rank of the stage, the lowest first, the position of its slice along each axis.
    owners
        The ranks that hold the slice at a position, ascending.
    """

    parts: tuple[int, ...]
    index: tuple[tuple[int, ...], ...]
    owners: dict[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=4096)  # a model has few distinct layouts and asks for them for every parameter
def make_grid(
    device_matrix: tuple[int, ...],
    tensor_map: tuple[tuple[int, ...], ...],
    optimizer_shard: int,
    first_rank: int,
) -> Grid:
    """The grid of a layout; its parameters are `Layout`'s, which has seen that they are possible.

    Examples
    --------
    >>> make_grid((2, 2), ((1,), ()), 2, 4).index
    ((0, 0), (1, 0), (2, 0), (3, 0))
    """
    count = len(device_matrix)
    axes = [[count - 1 - axis for axis in cut] for cut in tensor_map]
    free = [i for i in range(count) if all(i not in cut for cut in axes)]
    index: list[tuple[int, ...]] = []
    owners: dict[tuple[int, ...], list[int]] = {}
    for local, coords in enumerate(product(*(range(size) for size in device_matrix))):
        at = [_mixed_radix(cut, coords, device_matrix) for cut in axes]
        if optimizer_shard > 1:
            position = _mixed_radix(free, coords, device_matrix)  # in the replica group
            at[0] = at[0] * optimizer_shard + position % optimizer_shard
        index.append(tuple(at))
        owners.setdefault(tuple(at), []).append(first_rank + local)
    parts = [math.prod(device_matrix[i] for i in cut) for cut in axes]
    if optimizer_shard > 1:
        parts[0] *= optimizer_shard
    return Grid(tuple(parts), tuple(index), {at: tuple(held) for at, held in owners.items()})


def _mixed_radix(axes: list[int], coords: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    value = 0
    for i in axes:
        value = value * sizes[i] + coords[i]
    return value


def nearest_divisors(size: int, parts: int) -> tuple[int, ...]:
    """The divisors of ``size`` next to ``parts``: the largest below, the smallest above.

    Examples
    --------
    >>> nearest_divisors(64, 7), nearest_divisors(4, 6)
    ((4, 8), (4,))
    """
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    divisors = sorted({*small, *(size // n for n in small)})
    at = bisect_left(divisors, parts)
    return tuple(divisors[max(0, at - 1) : at + 1])
