"""The line of a hand-written strategy that fits the ranks with equal slices.

A hand-written layout that contents contradict has the wrong groups of ranks.  The contents show the
right groups.  They do not show which tensor axis is sharded: that is taken from the layout, or all
axes are possible if it shards none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from ckpttool.model.layout import Layout

RankGroups = tuple[tuple[int, ...], ...]  # ranks with equal slices, group by group


def fitting_lines(layout: Layout, groups: RankGroups, stages: Sequence[int] = ()) -> list[str]:
    """Return the layouts that give equal slices to the ranks of each group, as they are written.

    Parameters
    ----------
    layout
        The hand-written layout, which has other groups.
    groups
        The ranks of the stage that have a file, in groups that hold equal slices.
    stages
        The pipeline stages that hold the parameter; empty for all of them.

    Examples
    --------
    >>> fitting_lines(Layout((8,), ((), (0,))), ((0, 4), (1, 5), (2, 6), (3, 7)))
    ['{device_matrix: [2, 4], tensor_map: [-1, 0]}']
    >>> fitting_lines(Layout((4,), ((), (0,))), ((0, 1, 2, 3),))
    ['replicated']
    """
    if not layout.is_even:
        return []
    if len(groups) == 1 and not stages:
        return ["replicated"]
    present = {rank for group in groups for rank in group}
    fitting: list[Layout] = []
    for candidate in _candidates(layout, len(groups)):
        owners = (present.intersection(ranks) for ranks in candidate.slice_owners())
        if sorted(tuple(sorted(ranks)) for ranks in owners) == sorted(groups):
            known = any(candidate.cuts_like(one) for one in fitting)
            fitting += [] if known else [candidate]
    return [_write(candidate, stages) for candidate in fitting]


def _candidates(layout: Layout, slices: int) -> Iterator[Layout]:
    """Yield the layout with fewer device axes in use, then those with one sharded tensor axis."""
    tensor_map = layout.tensor_map
    used = [axis for axes in tensor_map for axis in axes]
    for number in reversed(range(len(used) + 1)):
        for kept in combinations(used, number):
            axes = tuple(tuple(axis for axis in cut if axis in kept) for cut in tensor_map)
            yield replace(layout, tensor_map=axes, optimizer_shard=1)
    ranks = math.prod(layout.device_matrix)
    sharded = [axis for axis, axes in enumerate(tensor_map) if axes] or [*range(len(tensor_map))]
    if len(sharded) > 1 and used:
        return  # contents do not show how many slices each of the axes has
    replicas = ranks // slices if ranks % slices == 0 else 0
    for axis in sharded:
        for inner in (n for n in range(1, replicas + 1) if replicas % n == 0):
            outer = replicas // inner
            matrix = (*(outer,) * (outer > 1), slices, *(inner,) * (inner > 1))
            cut = int(inner > 1)  # device axes are counted from the right
            axes = tuple((cut,) if one == axis else () for one in range(len(tensor_map)))
            yield replace(layout, device_matrix=matrix, tensor_map=axes, optimizer_shard=1)


def _write(layout: Layout, stages: Sequence[int]) -> str:
    """Return a layout as a hand-written strategy has it."""
    axes = ", ".join(
        str(list(cut)) if len(cut) > 1 else str(cut[0] if cut else -1) for cut in layout.tensor_map
    )
    rest = f", stages: {list(stages)}" if stages else ""
    return f"{{device_matrix: {list(layout.device_matrix)}, tensor_map: [{axes}]{rest}}}"
