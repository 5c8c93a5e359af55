"""Compare two strategies, parameter by parameter.

Two layouts are equal if every rank holds the same slice, whatever their device matrices are.  A
hand-written strategy is compared by the names of the other one: the first rule that matches a name
decides, then ``otherwise``.  If both are hand-written, the ordered patterns and ``otherwise``
count, too.  The names of a checkpoint could show that other patterns mean the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ckpttool.model.layout import Layout
from ckpttool.model.names import match_states
from ckpttool.model.strategy import Rule, Rules, Strategy, fold_like, shard_equally
from ckpttool.operations.summary import fold_names
from ckpttool.records import record, replace
from ckpttool.strategy_files.reader import Paths, as_strategy
from ckpttool.wording import Brief, count

Kind = Literal["only in A", "only in B", "stages", "slices", "optimizer shard", "shape", "order"]
KINDS: tuple[Kind, ...] = (
    *("only in A", "only in B", "stages", "slices", "optimizer shard", "shape", "order"),
)
Layouts = tuple[Layout, ...]


@record
class LayoutDifference:
    """What differs in the layouts of parameters; equal for parameters that differ alike.

    ``a`` and ``b`` are the layouts of each stage; () if the side does not list the parameter.
    """

    kind: Kind
    a: Layouts
    b: Layouts


@record
class DifferenceRow:
    """Tensors that differ alike: parameters of equal layers, with their states.

    ``prefixes`` stand before the name in the names of the tensors, as in a row of inspect.
    """

    pattern: str
    prefixes: tuple[str, ...]
    difference: LayoutDifference


@dataclass(frozen=True, repr=False)  # no slots, for cached_property
class StrategyComparison(Brief):
    """Two strategies, and what differs between them.

    Attributes
    ----------
    a, b
        The strategies.
    tensors
        Number of names in either.
    differences
        Name to what differs, sorted by kind and name.
    by_patterns
        Whether both are hand-written, so that patterns were compared.
    respelled
        Names with other device matrices or tensor maps, and the same slices on every rank.
    """

    a: Strategy
    b: Strategy
    tensors: int
    differences: Mapping[str, LayoutDifference]
    by_patterns: bool
    respelled: tuple[str, ...]

    def _texts(self) -> Iterator[str]:
        yield f"{self.a.origin} and {self.b.origin}"
        yield "equal" if self.is_equal else count(len(self.differences), "difference")

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


def diff_strategies(a: Strategy | Paths, b: Strategy | Paths) -> StrategyComparison:
    """Compare two strategies; each is one that was read, or its files."""
    a, b = as_strategy(a), as_strategy(b)
    found: dict[str, LayoutDifference] = {}
    respelled = []
    names = sorted({*_listed_names(a), *_listed_names(b)})
    for name in names:
        pair = _layouts_of_name(name, a, b)
        kind = _kind_of(*pair)
        if kind is not None:
            found[name] = LayoutDifference(kind, *pair)
        elif pair[0] != pair[1]:
            respelled.append(name)
    patterns: Mapping[str, tuple[Layouts, Layouts]] = {}
    if a.rules is not None and b.rules is not None:
        patterns = _patterns(a, b, a.rules, b.rules)
        found |= _compare_patterns(patterns, a.rules, b.rules)
    ordered = sorted(found.items(), key=lambda item: KINDS.index(item[1].kind))
    tensors = len(names) + len(patterns)
    return StrategyComparison(a, b, tensors, dict(ordered), bool(patterns), tuple(respelled))


def _listed_names(one: Strategy) -> Iterator[str]:
    """Yield the names that a strategy lists: not those that only patterns match."""
    yield from one.layouts
    rules = one.rules.rules if one.rules else ()
    yield from (rule.only_name for rule in rules if rule.only_name is not None)


def _layouts_of_name(name: str, a: Strategy, b: Strategy) -> tuple[Layouts, Layouts]:
    """Return the layouts of a name in two strategies; () where one has none."""
    rules = [one.rules.find(name) if one.rules else None for one in (a, b)]
    written = [rule.layout for rule in rules if rule is not None]
    known = [*a.layouts.get(name, ()), *b.layouts.get(name, ()), *written]
    ndim = max(len(one.tensor_map) for one in known)

    def layouts(one: Strategy, rule: Rule | None) -> Layouts:
        if rule is None or name in one.layouts:
            return one.layouts.get(name) or _rest(one, ndim)
        return rule.layouts(ndim)

    return layouts(a, rules[0]), layouts(b, rules[1])


def _rest(one: Strategy, ndim: int) -> Layouts:
    """Return the layouts that ``otherwise`` gives; () without it."""
    if one.rules is None or not one.rules.replicates_rest:
        return ()
    return tuple(
        Layout.unsharded(ndim, one.stage_ranks, one.ranks_of(stage)[0])
        for stage in range(one.stages)
    )


def _patterns(
    a: Strategy, b: Strategy, ours: Rules, theirs: Rules
) -> dict[str, tuple[Layouts, Layouts]]:
    """Return each pattern of several names, and ``otherwise``, with its layouts on both sides."""
    sides = [
        {rule.pattern: rule for rule in reversed(one.rules) if rule.only_name is None}
        for one in (ours, theirs)
    ]
    found = {}
    for pattern in (*sides[0], *sides[1].keys() - sides[0].keys()):
        both = [side.get(pattern) for side in sides]
        ndim = max(len(rule.layout.tensor_map) for rule in both if rule is not None)
        first, second = (() if rule is None else rule.layouts(ndim) for rule in both)
        found[pattern] = (first, second)
    if ours.replicates_rest or theirs.replicates_rest:
        found["otherwise"] = (_rest(a, 0), _rest(b, 0))
    return found


def _compare_patterns(
    patterns: Mapping[str, tuple[Layouts, Layouts]], ours: Rules, theirs: Rules
) -> dict[str, LayoutDifference]:
    """Return the patterns that differ, or that follow others than on the other side."""
    found = {}
    for pattern, pair in patterns.items():
        if (kind := _kind_of(*pair)) is not None:
            found[pattern] = LayoutDifference(kind, *pair)
    orders = [
        [
            one
            for one in dict.fromkeys(rule.pattern for rule in rules)
            if all(patterns.get(one, ((),)))
        ]
        for rules in (ours.rules, theirs.rules)
    ]
    for one, other in zip(*orders, strict=True):
        if one != other and one not in found:
            found[one] = LayoutDifference("order", *patterns[one])
    return found


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
