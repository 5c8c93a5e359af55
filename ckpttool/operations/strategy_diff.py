"""Compare two strategies, parameter by parameter.

Two layouts are equal if every rank holds the same slice, whatever their device matrices are.  A
hand-written strategy with patterns is compared by the names of the other one.  If both have
patterns, these are compared as names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ckpttool.model.layout import Layout
from ckpttool.model.names import match_states
from ckpttool.model.strategy import Strategy, fold_like, shard_equally
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations.summary import fold_names, layouts_of_rules

Kind = Literal["only in A", "only in B", "stages", "slices", "optimizer shard", "shape"]
KINDS: tuple[Kind, ...] = (
    *("only in A", "only in B", "stages", "slices", "optimizer shard", "shape"),
)
Layouts = tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class LayoutDifference:
    """What differs in the layouts of parameters; equal for parameters that differ alike.

    ``a`` and ``b`` are the layouts of each stage; () if the side does not list the parameter.
    """

    kind: Kind
    a: Layouts
    b: Layouts


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """Tensors that differ alike: parameters of equal layers, with their states.

    ``prefixes`` stand before the name in the names of the tensors, as in a row of inspect.
    """

    pattern: str
    prefixes: tuple[str, ...]
    difference: LayoutDifference


@dataclass(frozen=True)  # no slots, for cached_property
class StrategyComparison:
    """Two strategies, and what differs between them.

    Attributes
    ----------
    a, b
        The strategies.
    tensors
        Number of names in either.
    differences
        Name to what differs, sorted by kind and name.
    respelled
        Names with other device matrices or tensor maps, and the same slices on every rank.
    """

    a: Strategy
    b: Strategy
    tensors: int
    differences: Mapping[str, LayoutDifference]
    respelled: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every rank holds the same slices."""
        return not self.differences and self.a.ranks == self.b.ranks

    def count_kinds(self) -> dict[Kind, int]:
        """Return the number of differences of each kind."""
        counts = Counter(one.kind for one in self.differences.values())
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    @cached_property
    def rows(self) -> tuple[DifferenceRow, ...]:
        """The differences, folded."""
        states = match_states(self.differences, {})
        alike: dict[LayoutDifference, dict[str, list[str]]] = {}
        for name, found in self.differences.items():
            parameter = states.get(name, name)
            base = parameter if name.endswith(parameter) else name
            alike.setdefault(found, {}).setdefault(base, []).append(name.removesuffix(base))
        return tuple(
            DifferenceRow(pattern, prefixes, found)
            for found, of_base in alike.items()
            for pattern, prefixes in fold_names(
                {base: tuple(sorted(prefixes)) for base, prefixes in of_base.items()}
            )
        )


def diff_strategies(a: Strategy, b: Strategy) -> StrategyComparison:
    """Compare two strategies."""
    ours, theirs = _layouts_beside(a, b), _layouts_beside(b, a)
    found: dict[str, LayoutDifference] = {}
    respelled = []
    names = sorted(ours.keys() | theirs.keys())
    for name in names:
        pair = ours.get(name, ()), theirs.get(name, ())
        kind = _kind_of(*pair)
        if kind is not None:
            found[name] = LayoutDifference(kind, *pair)
        elif pair[0] != pair[1]:
            respelled.append(name)
    ordered = sorted(found.items(), key=lambda item: KINDS.index(item[1].kind))
    return StrategyComparison(a, b, len(names), dict(ordered), tuple(respelled))


def _layouts_beside(one: Strategy, other: Strategy) -> Mapping[str, Layouts]:
    """Return the layouts of a strategy; patterns take the names of another strategy."""
    spelled, _ = one.spell_out()
    if spelled.rules is None:
        return spelled.layouts
    beside, _ = other.spell_out()
    if beside.rules is not None:
        return {**spelled.layouts, **layouts_of_rules(spelled)}
    axes = {name: len(of_name[0].tensor_map) for name, of_name in beside.layouts.items()}
    metas = {name: TensorMeta(name, "Float32", (1,) * ndim) for name, ndim in axes.items()}
    resolved, _ = spelled.resolve(metas, is_rest_decided=True)
    layouts = dict(resolved.layouts)
    if resolved.replicates_rest:
        for name in axes.keys() - layouts.keys():
            layouts[name] = tuple(
                Layout.unsharded(axes[name], one.stage_ranks, one.ranks_of(stage)[0])
                for stage in range(one.stages)
            )
    return layouts


def _kind_of(a: Layouts, b: Layouts) -> Kind | None:
    """Return what differs first between the layouts of a name; None if every rank is alike."""
    if not a or not b:
        return "only in A" if a else "only in B"
    if [one.stage for one in a] != [one.stage for one in b]:
        return "stages"
    if not _hold_the_same(a, b):
        without = [[replace(one, optimizer_shard=1) for one in side] for side in (a, b)]
        return "optimizer shard" if _hold_the_same(*without) else "slices"
    shapes = ((one.full_shape, other.full_shape) for one, other in zip(a, b, strict=True))
    differ = any(None not in pair and pair[0] != pair[1] for pair in shapes)
    return "shape" if differ else None


def _hold_the_same(a: Sequence[Layout], b: Sequence[Layout]) -> bool:
    """Return whether every rank has the same slice; the axes of one side may be expanded."""
    return any(
        shard_equally(*pair) for pair in ((a, b), (fold_like(a, b), b), (a, fold_like(b, a)))
    )
