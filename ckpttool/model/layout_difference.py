"""Differences between the layouts that two strategies give to a name.

Two layouts are equal if every rank holds the same slice, whatever their device matrices are.  The
kinds of difference are those that ``strategy diff`` shows; folding equal ones is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Rule, Strategy, fold_like, shard_equally

Kind = Literal["only in A", "only in B", "stages", "slices", "optimizer shard", "shape", "order"]
KINDS: tuple[Kind, ...] = (
    *("only in A", "only in B", "stages", "slices", "optimizer shard", "shape", "order"),
)
Layouts = tuple[Layout, ...]


class LayoutDifference(Struct, frozen=True):
    """A difference in the layouts of parameters; equal for parameters that differ alike.

    ``a`` and ``b`` are the layouts of each stage; () if the side does not list the parameter.
    """

    kind: Kind
    a: Layouts
    b: Layouts


def layouts_of_name(name: str, a: Strategy, b: Strategy) -> tuple[Layouts, Layouts]:
    """Return the layouts of a name in two strategies; () where one has none."""
    rules = [strategy.rules.find(name) if strategy.rules else None for strategy in (a, b)]
    written = [rule.layout for rule in rules if rule is not None]
    known = [*a.layouts.get(name, ()), *b.layouts.get(name, ()), *written]
    ndim = max(len(layout.tensor_map) for layout in known)

    def layouts(strategy: Strategy, rule: Rule | None) -> Layouts:
        if rule is None or name in strategy.layouts:
            return strategy.layouts.get(name) or layouts_of_rest(strategy, ndim)
        return rule.layouts(ndim)

    return layouts(a, rules[0]), layouts(b, rules[1])


def layouts_of_rest(strategy: Strategy, ndim: int) -> Layouts:
    """Return the layouts that ``otherwise`` gives; () without it."""
    if not strategy.covers_rest:
        return ()
    return tuple(
        Layout.unsharded(ndim, strategy.stage_ranks, strategy.ranks_of(stage)[0])
        for stage in range(strategy.stages)
    )


def kind_of_difference(a: Layouts, b: Layouts) -> Kind | None:
    """Return what differs first between the layouts of a name; None if every rank is alike."""
    if not a or not b:
        return "only in A" if a else "only in B"
    if [layout.stage for layout in a] != [layout.stage for layout in b]:
        return "stages"
    if not _hold_the_same(a, b):
        without = [[replace(layout, optimizer_shard=1) for layout in side] for side in (a, b)]
        return "optimizer shard" if _hold_the_same(*without) else "slices"
    shapes = ((layout.full_shape, other.full_shape) for layout, other in zip(a, b, strict=True))
    differ = any(None not in pair and pair[0] != pair[1] for pair in shapes)
    return "shape" if differ else None


def _hold_the_same(a: Sequence[Layout], b: Sequence[Layout]) -> bool:
    # the axes of one side may be expanded
    # The axes of one side may be expanded.
    return any(
        shard_equally(*pair) for pair in ((a, b), (fold_like(a, b), b), (a, fold_like(b, a)))
    )
