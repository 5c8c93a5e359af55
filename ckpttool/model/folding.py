"""Folds the expanded layouts of JSON strategies back.

Where several device axes cut one tensor axis, MindSpore's JSON form speaks of an expanded tensor:
an axis of ``d`` elements that device axes of sizes ``n1, ..., nk`` cut becomes ``k`` axes of
``n1, ..., n(k-1)`` and ``d / (n1 * ... * n(k-1))`` elements, each cut by one of them.  Folding back
joins neighbours of which all but the last have just the size of the device axis that cuts them.
That can be possible in several ways; then the slices alone do not tell which is meant.  Ways that
differ only in where a device axis of size 1 goes are the same: it cuts nothing.

``Layout(...)(("a", "None"), "b")`` has "None" beside a device axis.  It stands for an axis of the
expanded tensor that nothing shards, of size 1 unless it is the last of its tensor axis.  Nearly
every tensor with an unsharded axis could be meant so, and next to none is.  So such ways count only
where there is no other.

Source
------
MindSpore 2.10 ``ccsrc/frontend/parallel/strategy_checkpoint`` (the JSON writer), and files of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise

from ckpttool.model.layout import Layout

MAX_WAYS = 10_000  # to try; ten device axes can be joined in 252, a damaged file in 10**17


def fold_layout(
    layout: Layout, ndim: int, fits: Callable[[Layout], bool] = lambda _: True
) -> tuple[Layout, ...]:
    """All layouts of ``ndim`` axes whose expanded form is ``layout``.

    Parameters
    ----------
    layout
        With its ``full_shape``, that of the expanded tensor.
    ndim
        Axes of the tensor as it is stored.
    fits
        Whether a folded layout, with its ``full_shape``, agrees with what else is known.

    Examples
    --------
    >>> expanded = Layout((2, 2, 4), ((2,), (1,), (0,), ()), full_shape=(2, 2, 8, 8))
    >>> [(way.tensor_map, way.full_shape) for way in fold_layout(expanded, 2)]
    [(((2, 1, 0), ()), (32, 8))]
    """
    shape = layout.full_shape
    if shape is None or len(shape) != len(layout.tensor_map) or not 0 < ndim < len(shape):
        return ()
    usual, joins = _seams(layout, shape), len(shape) - ndim
    ways: dict[object, Layout] = {}
    for seams in (usual, sorted(usual + _seams_at_none(layout, shape))):
        if ways or math.comb(len(seams), joins) > MAX_WAYS:
            break
        for joined in combinations(seams, joins):
            way = _join_axes(layout, shape, joined)
            if fits(way):
                ways.setdefault((way.full_shape, _cutting(way)), way)
    return tuple(ways.values())


def ambiguity(layout: Layout, ways: tuple[Layout, ...]) -> str:
    """What to tell of an expanded layout that can be folded in several ways."""
    shown = " or ".join(
        f"shape {way.full_shape} with tensor map {[list(axes) for axes in way.tensor_map]}"
        for way in ways[:4]
    )
    shown += f" or {len(ways) - 4} more" if len(ways) > 4 else ""
    return (
        f"the JSON strategy describes an expanded tensor of shape {layout.full_shape}, which may "
        f"stand for {shown}; give the protobuf form of the strategy (as well), which tells, or say "
        "by hand which it is (-s MORE.yaml)"
    )


def _seams(layout: Layout, shape: tuple[int, ...]) -> list[int]:
    """Every axis that may be part of the same folded axis as the one before it."""
    sizes = tuple(reversed(layout.device_matrix))
    return [
        i
        for i in range(_first_seam(layout), len(shape))
        if len(layout.tensor_map[i - 1]) == len(layout.tensor_map[i]) == 1
        and shape[i - 1] == sizes[layout.tensor_map[i - 1][0]]
    ]


def _seams_at_none(layout: Layout, shape: tuple[int, ...]) -> list[int]:
    """The same where "None" stands beside device axes."""
    sizes = tuple(reversed(layout.device_matrix))
    return [
        i
        for i in range(_first_seam(layout), len(shape))
        if sum(map(len, layout.tensor_map[i - 1 : i + 1])) < 2
        and shape[i - 1] == math.prod(sizes[axis] for axis in layout.tensor_map[i - 1])
    ]


def _first_seam(layout: Layout) -> int:
    """The parts of axis 0 of a table are not to be cut again."""
    return 1 if layout.is_even else 2


def _join_axes(layout: Layout, shape: tuple[int, ...], joined: tuple[int, ...]) -> Layout:
    """The layout with each of these axes joined to the one before it."""
    cuts = [i for i in range(len(shape) + 1) if i not in joined]
    return replace(
        layout,
        tensor_map=tuple(
            tuple(axis for axes in layout.tensor_map[a:b] for axis in axes)
            for a, b in pairwise(cuts)
        ),
        full_shape=tuple(math.prod(shape[a:b]) for a, b in pairwise(cuts)),
    )


def _cutting(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The tensor map without the device axes of size 1."""
    sizes = tuple(reversed(layout.device_matrix))
    return tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in layout.tensor_map)
