"""The lines of a hand-written strategy that fit the ranks with equal slices.

A hand-written layout that contents contradict has the wrong groups of ranks.  The contents show the
right groups.  They do not show which tensor axes are sharded, so that each axis is possible, and so
are two if the number of slices factors.  Each line comes with the full shape that it gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, product

from msgspec.structs import replace

from ckpttool.model.layout import Layout
from ckpttool.model.slicing import RankGroups


def fitting_lines(
    layout: Layout, groups: RankGroups, slice_shape: tuple[int, ...], stages: Sequence[int] = ()
) -> list[str]:
    """Return the layouts that give equal slices to the ranks of each group, as they are written.

    Those that shard the same tensor axes as ``layout`` come first.

    Parameters
    ----------
    layout
        The hand-written layout, which has other groups.
    groups
        The ranks of the stage that have a file, in groups that hold equal slices.
    slice_shape
        The shape of every slice.
    stages
        The pipeline stages that hold the parameter; empty for all of them.

    Examples
    --------
    >>> for line in fitting_lines(Layout((4,), ((), (0,))), ((0, 2), (1, 3)), (4, 3)):
    ...     print(line)
    {device_matrix: [2, 2], tensor_map: [-1, 0]} makes (4, 6)
    {device_matrix: [2, 2], tensor_map: [0, -1]} makes (8, 3)
    >>> fitting_lines(Layout((4,), ((), (0,))), ((0, 1, 2, 3),), (4, 3))
    ['replicated']
    """
    if not layout.is_even or len(layout.tensor_map) != len(slice_shape):
        return []
    if len(groups) == 1 and not stages:
        return ["replicated"]
    fitting = sorted(_fitting(layout, groups), key=lambda one: _sharded(one) != _sharded(layout))
    return [f"{_write(one, stages)} makes {one.implied_shape(slice_shape)}" for one in fitting]


@lru_cache(maxsize=256)
def _fitting(layout: Layout, groups: RankGroups) -> tuple[Layout, ...]:
    """Return the layouts for `fitting_lines`, which many layers of a model have in common."""
    present = {rank for group in groups for rank in group}
    fitting: list[Layout] = []
    for candidate in _candidates(layout, len(groups)):
        owners = (present.intersection(ranks) for ranks in candidate.slice_owners())
        if sorted(tuple(sorted(ranks)) for ranks in owners) == sorted(groups):
            known = any(candidate.cuts_like(one) for one in fitting)
            fitting += [] if known else [candidate]
    return tuple(fitting)


def _sharded(layout: Layout) -> list[bool]:
    """Return whether each tensor axis is sharded."""
    return [bool(axes) for axes in layout.tensor_map]


def _candidates(layout: Layout, slices: int) -> Iterator[Layout]:
    """Yield the layout with fewer device axes in use, then those with one or two sharded axes."""
    tensor_map = layout.tensor_map
    used = [axis for axes in tensor_map for axis in axes]
    for number in reversed(range(len(used) + 1)):
        for kept in combinations(used, number):
            axes = tuple(tuple(axis for axis in cut if axis in kept) for cut in tensor_map)
            yield replace(layout, tensor_map=axes, optimizer_shard=1)
    ranks = math.prod(layout.device_matrix)
    replicas, numbers = ranks // slices, range(len(tensor_map))
    if ranks % slices:
        return
    for outer in _divisors(replicas):
        for axis in numbers:
            yield _shard(layout, (outer, slices, replicas // outer), {axis: 1})
    for first, outer in product(_divisors(slices)[1:-1], _divisors(replicas)):
        for between in _divisors(replicas // outer):
            sizes = (outer, first, between, slices // first, replicas // outer // between)
            for axis, other in product(numbers, numbers):
                if axis != other:
                    yield _shard(layout, sizes, {axis: 1, other: 3})


def _shard(layout: Layout, sizes: Sequence[int], cut: dict[int, int]) -> Layout:
    """Return a layout of other device axes; ``cut`` maps tensor axes to positions in ``sizes``."""
    positions = [at for at, size in enumerate(sizes) if size > 1]
    device_axis = {at: len(positions) - 1 - i for i, at in enumerate(positions)}  # from the right
    axes = tuple(
        (device_axis[cut[axis]],) if axis in cut else () for axis in range(len(layout.tensor_map))
    )
    matrix = tuple(sizes[at] for at in positions)
    return replace(layout, device_matrix=matrix, tensor_map=axes, optimizer_shard=1)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _write(layout: Layout, stages: Sequence[int]) -> str:
    """Return a layout as a hand-written strategy has it."""
    axes = ", ".join(
        str(list(cut)) if len(cut) > 1 else str(cut[0] if cut else -1) for cut in layout.tensor_map
    )
    rest = f", stages: {list(stages)}" if stages else ""
    return f"{{device_matrix: {list(layout.device_matrix)}, tensor_map: [{axes}]{rest}}}"
