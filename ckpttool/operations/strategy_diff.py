"""Compare two strategies, parameter by parameter.

Two layouts are equal if every rank holds the same slice, whatever their device matrices are.  A
hand-written strategy is compared by the names of the other one: the first rule that matches a name
decides, then ``otherwise``.  If both are hand-written, the ordered patterns and ``otherwise``
count, too.  The names of a checkpoint could show that other patterns mean the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ckpttool.model.layout_difference import (
    KINDS,
    Kind,
    LayoutDifference,
    Layouts,
    kind_of_difference,
    layouts_of_name,
    layouts_of_rest,
)
from ckpttool.model.names import match_states
from ckpttool.model.strategy import Rules, Strategy
from ckpttool.operations.answer import (
    Answer,
    Count,
    Document,
    Reported,
    Some,
    StageLayout,
    StrategySize,
    describe_layouts,
)
from ckpttool.operations.summary import Named
from ckpttool.problems import severities
from ckpttool.strategy_files import reader
from ckpttool.wording import count, fold_names, shorten


class DifferenceRow(Named, frozen=True):
    """Tensors that differ alike: parameters of equal layers, with their states."""

    difference: LayoutDifference


class NameDifference(Answer, frozen=True):
    """A difference in the layouts of a name.

    Attributes
    ----------
    name
        The parameter.
    kind
        What differs first.
    a, b
        Its layout in each stage of the side that has it.
    """

    name: str
    kind: Kind
    a: tuple[StageLayout, ...]
    b: tuple[StageLayout, ...]


class StrategyComparison(Document, frozen=True):
    """The JSON document of strategy diff.

    Attributes
    ----------
    a, b
        The strategies.
    equal
        Whether every rank holds the same slices.
    tensors
        Number of names in either; of patterns, if both have patterns.
    counts
        Number of differences of each kind that there is.
    differences
        The differences by kind and name; with --limit N the first N.
    respelled
        Names with other device matrices or tensor maps, and the same slices.
    notes
        Facts that do not stop the command: notes and warnings.
    layouts
        Name to what differs, for `rows`.
    by_patterns
        Whether both are hand-written, so that patterns were compared.
    """

    aside = frozenset({"layouts", "by_patterns"})

    a: StrategySize
    b: StrategySize
    equal: bool
    tensors: Count
    counts: dict[Kind, Some]
    differences: tuple[NameDifference, ...]
    respelled: tuple[str, ...]
    notes: Reported
    layouts: Mapping[str, LayoutDifference]
    by_patterns: bool

    def _texts(self) -> Iterator[str]:
        yield " and ".join(shorten(side.files, 2) or "the strategy" for side in (self.a, self.b))
        yield "equal" if self.equal else count(len(self.differences), "difference")

    @property
    def rows(self) -> tuple[DifferenceRow, ...]:
        """The differences, folded."""
        states = match_states(self.layouts, {})
        alike: dict[LayoutDifference, dict[str, list[str]]] = {}
        for name, difference in self.layouts.items():
            parameter = states.get(name, name)
            base = parameter if name.endswith(parameter) else name
            alike.setdefault(difference, {}).setdefault(base, []).append(name.removesuffix(base))
        return tuple(
            DifferenceRow(pattern, prefixes, difference)
            for difference, of_base in alike.items()
            for pattern, prefixes in fold_names(
                {base: tuple(sorted(prefixes)) for base, prefixes in of_base.items()}
            )
        )


def diff_strategies(a: reader.Layouts, b: reader.Layouts) -> StrategyComparison:
    """Compare two strategies; each is one that was read, or its files."""
    a, b = reader.read_strategy(a), reader.read_strategy(b)
    differing: dict[str, LayoutDifference] = {}
    respelled = []
    names = sorted({*_listed_names(a), *_listed_names(b)})
    for name in names:
        pair = layouts_of_name(name, a, b)
        kind = kind_of_difference(*pair)
        if kind is not None:
            differing[name] = LayoutDifference(kind, *pair)
        elif pair[0] != pair[1]:
            respelled.append(name)
    patterns: Mapping[str, tuple[Layouts, Layouts]] = {}
    if a.rules is not None and b.rules is not None:
        patterns = _patterns(a, b, a.rules, b.rules)
        differing |= _compare_patterns(patterns, a.rules, b.rules)
    layouts = dict(sorted(differing.items(), key=lambda item: KINDS.index(item[1].kind)))
    return StrategyComparison(
        *(StrategySize.of(a), StrategySize.of(b)),
        not layouts and a.ranks == b.ranks,
        len(names) + len(patterns),
        dict(Counter(difference.kind for difference in layouts.values())),
        tuple(
            NameDifference(
                name,
                difference.kind,
                describe_layouts(difference.a),
                describe_layouts(difference.b),
            )
            for name, difference in layouts.items()
        ),
        tuple(respelled),
        Reported((*a.notes, *b.notes), severities("diff")),
        layouts,
        bool(patterns),
    )


def _listed_names(strategy: Strategy) -> Iterator[str]:
    yield from strategy.layouts
    rules = strategy.rules.rules if strategy.rules else ()
    yield from (rule.only_name for rule in rules if rule.only_name is not None)


def _patterns(
    a: Strategy, b: Strategy, ours: Rules, theirs: Rules
) -> dict[str, tuple[Layouts, Layouts]]:
    """Return each pattern of several names, and ``otherwise``, with its layouts on both sides."""
    sides = [
        {rule.pattern: rule for rule in reversed(rules.rules) if rule.only_name is None}
        for rules in (ours, theirs)
    ]
    layouts = {}
    for pattern in (*sides[0], *sides[1].keys() - sides[0].keys()):
        both = [side.get(pattern) for side in sides]
        ndim = max(len(rule.layout.tensor_map) for rule in both if rule is not None)
        first, second = (() if rule is None else rule.layouts(ndim) for rule in both)
        layouts[pattern] = (first, second)
    if ours.replicates_rest or theirs.replicates_rest:
        layouts["otherwise"] = (layouts_of_rest(a, 0), layouts_of_rest(b, 0))
    return layouts


def _compare_patterns(
    patterns: Mapping[str, tuple[Layouts, Layouts]], ours: Rules, theirs: Rules
) -> dict[str, LayoutDifference]:
    """Return the patterns that differ, or that follow others than on the other side."""
    differing = {}
    for pattern, pair in patterns.items():
        if (kind := kind_of_difference(*pair)) is not None:
            differing[pattern] = LayoutDifference(kind, *pair)
    orders = [
        [
            pattern
            for pattern in dict.fromkeys(rule.pattern for rule in rules)
            if all(patterns.get(pattern, ((),)))
        ]
        for rules in (ours.rules, theirs.rules)
    ]
    for one, other in zip(*orders, strict=True):
        if one != other and one not in differing:
            differing[one] = LayoutDifference("order", *patterns[one])
    return differing
