"""The layouts that give equal slices to the ranks that hold equal slices.

This is evidence, not advice.  Contents show which ranks hold the same; they do not show which
tensor axes are sharded.  So each axis is possible, and two are if the number of slices factors.
What a person should write is left to the person: the message says whether any layout fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, product

from msgspec.structs import replace

from ckpttool.model.layout import Layout, divisors
from ckpttool.model.slicing import RankGroups


@lru_cache(maxsize=256)  # many layers of a model have the same layout and groups
def fitting_layouts(layout: Layout, groups: RankGroups) -> tuple[Layout, ...]:
    """Return the layouts that give equal slices to the ranks of each group, and to no others.

    ``layout`` has other groups.  The ranks of its stage that have a file are in ``groups``.

    Examples
    --------
    >>> fitting = fitting_layouts(Layout((4,), ((), (0,))), ((0, 2), (1, 3)))
    >>> [(layout.device_matrix, layout.tensor_map) for layout in fitting]
    [((2, 2), ((0,), ())), ((2, 2), ((), (0,)))]
    """
    present = {rank for group in groups for rank in group}
    fitting: list[Layout] = []
    for candidate in _candidates(layout, len(groups)):
        owners = (present.intersection(ranks) for ranks in candidate.slice_owners())
        if sorted(tuple(sorted(ranks)) for ranks in owners) == sorted(groups):
            known = any(candidate.has_same_slices(other) for other in fitting)
            fitting += [] if known else [candidate]
    return tuple(fitting)


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
    for outer in divisors(replicas):
        for axis in numbers:
            yield _shard(layout, (outer, slices, replicas // outer), {axis: 1})
    for first, outer in product(divisors(slices)[1:-1], divisors(replicas)):
        for between in divisors(replicas // outer):
            sizes = (outer, first, between, slices // first, replicas // outer // between)
            for axis, other in product(numbers, numbers):
                if axis != other:
                    yield _shard(layout, sizes, {axis: 1, other: 3})


def _shard(layout: Layout, sizes: Sequence[int], cut: dict[int, int]) -> Layout:
    positions = [at for at, size in enumerate(sizes) if size > 1]
    device_axis = {at: len(positions) - 1 - i for i, at in enumerate(positions)}  # from the right
    axes = tuple(
        (device_axis[cut[axis]],) if axis in cut else () for axis in range(len(layout.tensor_map))
    )
    matrix = tuple(sizes[at] for at in positions)
    return replace(layout, device_matrix=matrix, tensor_map=axes, optimizer_shard=1)
