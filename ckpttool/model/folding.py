"""Folds the expanded layouts of JSON strategies back.

Where several device axes cut one tensor axis, MindSpore's JSON form speaks of an expanded tensor:
an axis of ``d`` elements that device axes of sizes ``n1, ..., nk`` cut becomes ``k`` axes of
``n1, ..., n(k-1)`` and ``d / (n1 * ... * n(k-1))`` elements, each cut by one of them.  Folding back
joins neighbours of which all but the last have just the size of the device axis that cuts them.
That can be possible in several ways; then the slices alone do not tell which is meant.

Source
------
MindSpore 2.10 ``ccsrc/frontend/parallel/strategy_checkpoint`` (the JSON writer), and files of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from ckpttool.model.layout import Layout


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
    ways = (
        replace(
            layout,
            tensor_map=tuple(
                tuple(axis for axes in layout.tensor_map[a:b] for axis in axes) for a, b in groups
            ),
            full_shape=tuple(math.prod(shape[a:b]) for a, b in groups),
        )
        for groups in _groupings(len(shape), ndim)
        if all(_is_expansion(layout, shape, a, b) for a, b in groups)
    )
    return tuple(way for way in ways if fits(way))


def ambiguity(layout: Layout, ways: tuple[Layout, ...]) -> str:
    """What to tell of an expanded layout that can be folded in several ways."""
    shown = " or ".join(
        f"shape {way.full_shape} with tensor map {[list(axes) for axes in way.tensor_map]}"
        for way in ways
    )
    return (
        f"the JSON strategy describes an expanded tensor of shape {layout.full_shape}, which may "
        f"stand for {shown}; give the protobuf form of the strategy (as well), which tells"
    )


def _groupings(count: int, groups: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways to cut ``count`` axes into ``groups`` runs, as first and end of each."""
    for cuts in combinations(range(1, count), groups - 1):
        yield tuple(pairwise((0, *cuts, count)))


def _is_expansion(layout: Layout, shape: tuple[int, ...], start: int, stop: int) -> bool:
    """Whether these axes can be one axis, expanded."""
    if stop - start == 1:
        return True
    if any(len(axes) != 1 for axes in layout.tensor_map[start:stop]):
        return False
    sizes = tuple(reversed(layout.device_matrix))
    return all(shape[i] == sizes[layout.tensor_map[i][0]] for i in range(start, stop - 1))
