"""Strategies: the layouts of tensors, which say how these are spread over files.

A strategy file holds for each parameter its layouts, one per pipeline stage.  A hand-written
strategy lists patterns of names (rules).  `Strategy.resolve` turns its rules into layouts with the
names of a checkpoint.  `ckpttool.model.layout` says what a single layout means, and
`ckpttool.strategy_files` reads the files: every form of file becomes this one record.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import cached_property
from itertools import chain
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.layout import Layout, fold_layout
from ckpttool.model.names import ParameterOfState, match_states
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import Diagnostic, StrategyError
from ckpttool.wording import Brief, count, format_ranks, shorten

T = TypeVar("T")


class Strategy(Brief, Struct, frozen=True, dict=True):
    """The layouts of parameters, as a strategy file lists them.

    Without any layout each file holds full tensors, or the checkpoint describes its slices.

    Attributes
    ----------
    layouts
        Name to layouts, one for each stage that has the parameter, lowest stage first.
    rules
        The rules of a hand-written file, until `resolve` turns them into layouts.
    handwritten
        Name to file and line, for parameters with hand-written layouts.
    replicates_rest
        Whether a hand-written file says that all other parameters are replicated.
    is_of_group
        Whether the layouts are of one group of ranks in data parallel, and of the sharded axes
        only.  `for_ranks` repeats the group; the tensors show the other axes.
    is_recorded
        Whether a manifest says that the files were written with these layouts.
    is_as_written
        Whether the manifest has the layouts themselves, of each tensor as it was written.  Then
        nothing about them is inferred.
    """

    layouts: Mapping[str, tuple[Layout, ...]]
    stages: int
    stage_ranks: int
    files: tuple[str, ...] = ()  # the files that were read; empty for a strategy made in memory
    notes: tuple[Diagnostic, ...] = ()  # notes of reading and resolving it
    rules: Rules | None = None
    handwritten: Mapping[str, str] = {}
    replicates_rest: bool = False
    is_of_group: bool = False
    is_recorded: bool = False
    is_as_written: bool = False

    @classmethod
    def without_layouts(
        cls, ranks: int = 1, files: tuple[str, ...] = (), stages: int = 1
    ) -> Strategy:
        """Return the strategy of files that need none, which ``files`` say, or an option."""
        return cls({}, stages, ranks // stages, files, replicates_rest=True)

    def _texts(self) -> Iterator[str]:
        files = f"{shorten(self.files, 1)}: " if self.files else ""
        yield f"{files}{count(len(self.layouts), 'layout')}"
        yield count(len(self.ranks), "rank")
        yield count(self.stages, "stage") if self.stages > 1 else ""

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("parameter", "device matrix", "tensor map", "first rank")
        for name, layouts in self.layouts.items():
            for layout in layouts:
                facts = (layout.device_matrix, layout.tensor_map, layout.first_rank)
                yield (name, *map(str, facts))

    @property
    def origin(self) -> str:
        """The files that were read, for messages."""
        return shorten(self.files, 2) or "the strategy"

    @property
    def covers_rest(self) -> bool:
        """Whether all other parameters are replicated, by a rule or by `replicates_rest`."""
        return self.rules.replicates_rest if self.rules else self.replicates_rest

    @property
    def origin_is(self) -> str:
        """The files that were read and the verb, for messages."""
        return f"{self.origin} {'are' if len(self.files) > 1 else 'is'}"

    @property
    def ranks(self) -> range:
        """All ranks of all stages."""
        return range(self.stages * self.stage_ranks)

    def ranks_of(self, stage: int) -> range:
        """Return the ranks of a stage."""
        return range(stage * self.stage_ranks, (stage + 1) * self.stage_ranks)

    def is_covered_by(self, ranks: Collection[int], stage: int | None = None) -> bool:
        """Return whether some ranks hold all slices of all layouts, or of those of a stage.

        >>> strategy = Strategy({"w": (Layout((2, 2), ((0,),)),)}, 1, 4)
        >>> strategy.is_covered_by({2, 3}), strategy.is_covered_by({0, 2})
        (True, False)
        """
        rules = self.rules.rules if self.rules else ()
        of_rules = (rule.layouts(len(rule.layout.tensor_map)) for rule in rules)
        layouts = {*chain(*self.layouts.values(), *of_rules)}

        def is_covered(of_stage: range) -> bool:
            present = tuple(sorted({*of_stage}.intersection(ranks)))
            of_layouts = (layout for layout in layouts if layout.first_rank == of_stage[0])
            return bool(present) and not any(layout.gaps(present) for layout in of_layouts)

        stages = range(self.stages) if stage is None else [stage]
        return all(is_covered(self.ranks_of(number)) for number in stages)

    def with_only(self, names: Collection[str]) -> Strategy:
        """Return the strategy with only the layouts of these names."""
        layouts = {name: layouts for name, layouts in self.layouts.items() if name in names}
        return replace(self, layouts=layouts)

    def has_entry(self, name: str) -> bool:
        """Return whether a layout or a rule is for ``name``."""
        return name in self.layouts or (
            self.rules is not None and self.rules.find(name) is not None
        )

    def new_names_in(self, renamed: Mapping[str, str]) -> Mapping[str, str]:
        """Return old to new name of the tensors that the strategy lists by the new name.

        A name may be old for one tensor and new for another, as after a shift of numbered layers.
        Names that are listed both ways count if the strategy lists more new than old names.
        """
        has_old = {name for name in renamed if self.has_entry(name)}
        has_new = {name for name, new in renamed.items() if self.has_entry(new)}
        chosen = has_new if len(has_new) > len(has_old) else has_new - has_old
        return {name: renamed[name] for name in chosen}

    def with_names(self, called: Mapping[str, str]) -> Strategy:
        """Return the strategy with the names of the keys in place of those of the values.

        Several keys may have one value; other names stay.  Rules match the values, too.
        """
        keys: dict[str, list[str]] = {}
        for name, old in called.items():
            keys.setdefault(old, []).append(name)

        def renamed(entries: Mapping[str, T]) -> dict[str, T]:
            new: dict[str, T] = {}
            for old, entry in entries.items():
                for name in keys.get(old, () if old in called else (old,)):
                    new[name] = entry
            return new

        layouts, handwritten = renamed(self.layouts), renamed(self.handwritten)
        rules = self.rules
        if rules is not None:
            before = rules.called
            both = {name: before.get(old, old) for name, old in called.items()}
            rules = replace(rules, called={**before, **both})
        return replace(self, layouts=layouts, handwritten=handwritten, rules=rules)

    def for_ranks(self, ranks: Iterable[int]) -> Strategy:
        """Return the strategy with as many groups as ``ranks`` need, if it is of a group.

        A hand-written strategy beside it gives the number of ranks.

        >>> group = Strategy({"w": (Layout((2,), ((0,),)),)}, 1, 2, is_of_group=True)
        >>> group.for_ranks(range(6)).layouts["w"][0].device_matrix
        (3, 2)
        """
        groups = max(ranks, default=0) // self.stage_ranks + 1
        if not self.is_of_group or self.rules is not None or groups == 1:
            return self
        repeated = {
            name: tuple(replace(way, device_matrix=(groups, *way.device_matrix)) for way in of_name)
            for name, of_name in self.layouts.items()
        }
        return replace(self, layouts=repeated, stage_ranks=groups * self.stage_ranks)

    @cached_property
    def listed_states(self) -> ParameterOfState:
        """The optimizer states among the listed names, and their parameters."""
        return match_states(self.layouts, {})

    @cached_property
    def lists_states(self) -> bool:
        """Whether the files of MindSpore list optimizer state, as those of training do."""
        names = [name for name in self.layouts if name not in self.handwritten]
        return bool(match_states(names, {}))

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that list ``name``."""
        layouts = self.layouts.get(name, ())
        return tuple(layout.first_rank // self.stage_ranks for layout in layouts)

    def decide_split_shapes(
        self, settle: Callable[[str, Layout], Layout | None]
    ) -> tuple[Strategy, Mapping[str, Layout]]:
        """Return the strategy with every ``split_shape`` decided, and the layouts that do not fit.

        Parameters
        ----------
        settle
            Returns the decided layout of a parameter in a stage; None if it does not fit.
        """
        decided: dict[str, tuple[Layout, ...]] = {}
        unfit: dict[str, Layout] = {}
        for name, layouts in self.layouts.items():
            if any(layout.split_shape for layout in layouts):
                settled = [(layout, settle(name, layout)) for layout in layouts]
                refused = [layout for layout, decided in settled if decided is None]
                if refused:
                    unfit[name] = refused[0]
                decided[name] = tuple(
                    decided or replace(layout, split_shape=()) for layout, decided in settled
                )
        return (replace(self, layouts={**self.layouts, **decided}) if decided else self), unfit

    def expand_rules(self) -> tuple[Strategy, tuple[Diagnostic, ...]]:
        """Return the strategy with layouts in place of its rules, and the problems.

        It is unchanged if only a checkpoint gives the layouts: a pattern may match several names,
        a rule holds for any number of axes, or ``otherwise`` for all other names.
        """
        rules = self.rules.rules if self.rules else ()
        if self.rules is not None and self.rules.replicates_rest:
            return self, ()
        if any(rule.only_name is None or rule.allows_more_axes for rule in rules):
            return self, ()
        names = {str(rule.only_name): len(rule.layout.tensor_map) for rule in rules}
        metas = {name: TensorMeta(name, "Float32", (1,) * ndim) for name, ndim in names.items()}
        return self.resolve(metas)

    def resolve(
        self, metas: Mapping[str, TensorMeta], is_rest_decided: bool = False
    ) -> tuple[Strategy, tuple[Diagnostic, ...]]:
        """Return the strategy with layouts in place of its rules, and the problems.

        Problems are names without a rule and a layout, and rules that contradict shapes or listed
        layouts.  Listed layouts stay unchanged.  A single value needs no rule: it is copied if all
        ranks hold the same.  Optimizer state needs none beside the rule of its parameter.

        Parameters
        ----------
        metas
            Name to tensor, full or a slice, for all names of the checkpoint.
        is_rest_decided
            Whether an option decides how names without a rule are written.
        """
        rules = self.rules
        if rules is None:
            return self, ()
        matched = {name: rule for name in metas if (rule := rules.find(name)) is not None}
        problems: list[Diagnostic] = []
        notes = rules.unused_notes(matched)
        is_decided = is_rest_decided or rules.replicates_rest or self.layouts
        unmatched = [name for name in metas if name not in matched]
        states = match_states(matched, metas)
        undecided = [
            name
            for name in unmatched
            if not metas[name].is_single and states.get(name) not in matched
        ]
        if undecided and not is_decided:
            hint = "a pattern for them, or `otherwise: replicated` if all ranks hold the same"
            problems.append(
                Diagnostic(
                    "strategy",
                    f"no pattern matches {count(len(undecided), 'parameter')}",
                    hint=hint,
                    facts="; ".join([shorten(undecided, 3), *(note.message for note in notes)]),
                    where=rules.path,
                )
            )
        layouts, handwritten = dict(self.layouts), dict(self.handwritten)
        contradicted: dict[Rule, list[str]] = defaultdict(list)
        for name, rule in matched.items():
            meta = metas[name]
            if (problem := rule.axis_problem(meta)) is not None:
                problems.append(problem)
                continue
            written = rule.layouts(len(meta.shape))
            listed_layouts = self.layouts.get(name)
            if listed_layouts is not None and not shard_equally(listed_layouts, written):
                listed_layouts = fold_like(listed_layouts, written)
            if listed_layouts is not None and not shard_equally(listed_layouts, written):
                contradicted[rule].append(name)
            elif meta.text is None:  # a string is never sharded
                layouts[name] = listed_layouts or written
                handwritten[name] = rule.place
        origin = shorten([path for path in self.files if path != rules.path], 2)
        for rule, names in contradicted.items():
            message = (
                f"pattern {rule.pattern} shards {count(len(names), 'parameter')} not as {origin}"
            )
            facts = f"{shorten(names, 3)}; a hand-written strategy adds layouts and corrects none"
            hint, where = "patterns that do not match these parameters", rule.place
            problems.append(Diagnostic("strategy", message, hint=hint, facts=facts, where=where))
        single = [name for name in unmatched if metas[name].is_single]
        if single and not is_decided:
            message = f"no pattern matches {count(len(single), 'single value')}, which must be the "
            message += f"same on all ranks: {shorten(single, 3)}"
            notes = (*notes, Diagnostic("no_pattern", message, where=rules.path))
        resolved = replace(
            self,
            layouts=layouts,
            rules=None,
            handwritten=handwritten,
            notes=(*self.notes, *notes),
            replicates_rest=rules.replicates_rest,
        )
        return resolved, tuple(problems)


def join_stages(
    stages: Mapping[int, Mapping[str, Layout]], files: tuple[str, ...] = ()
) -> Strategy:
    """Return one strategy from the layouts of every stage.

    ``stages`` has for each stage the layouts by name; their ``first_rank`` is ignored.

    Raises
    ------
    StrategyError
        Layouts or a stage are missing, or device matrices have different numbers of ranks.
    """
    origin = shorten(files, 2) or "the strategy"
    if not any(stages.values()):
        raise StrategyError(origin, "no parameter layouts in it")
    missing = sorted(set(range(max(stages) + 1)) - set(stages))
    if missing:
        message = f"layouts of {format_ranks([*stages], 'stage')} but not of "
        hint = "the strategy files of all pipeline stages, or the merged one"
        raise StrategyError(origin, f"{message}{format_ranks(missing, 'stage')}", hint)
    stage_ranks = _common_ranks(stages, origin)
    layouts: dict[str, tuple[Layout, ...]] = {}
    joined: dict[tuple[int, int], tuple[Layout, ...]] = {}  # few layouts are those of all names
    for stage in sorted(stages):
        # Equal layouts share one object, so that caches by layout find it faster.
        placed: dict[tuple[Layout, tuple[int, ...] | None], Layout] = {}
        for name, layout in stages[stage].items():
            key = layout, layout.full_shape
            if key not in placed:
                placed[key] = replace(layout, first_rank=stage * stage_ranks)
            before, last = layouts.get(name, ()), placed[key]
            both = id(before), id(last)
            if both not in joined:
                joined[both] = (*before, last)
            layouts[name] = joined[both]
    return Strategy(layouts, len(stages), stage_ranks, files)


def shard_equally(layouts: Iterable[Layout], written: Iterable[Layout]) -> bool:
    """Return whether ``written`` shards like ``layouts`` in each stage of these."""
    by_stage = {layout.first_rank: layout for layout in written}
    return all(
        layout.first_rank in by_stage and layout.has_same_slices(by_stage[layout.first_rank])
        for layout in layouts
    )


def fold_like(layouts: Iterable[Layout], written: Collection[Layout]) -> tuple[Layout, ...]:
    """Return the layouts, expanded ones folded like ``written`` where possible."""
    ndim = max((len(layout.tensor_map) for layout in written), default=0)
    return tuple(
        next(iter(fold_layout(layout, ndim, lambda way: shard_equally([way], written))), layout)
        for layout in layouts
    )


def _common_ranks(stages: Mapping[int, Mapping[str, Layout]], origin: str) -> int:
    labels: dict[int, list[str]] = {}
    for stage in sorted(stages):
        for name, layout in stages[stage].items():
            label = name if len(stages) == 1 else f"stage {stage} {name}"
            labels.setdefault(math.prod(layout.device_matrix), []).append(label)
    if len(labels) > 1:
        raise StrategyError(
            origin,
            "the device matrices are for different numbers of ranks",
            facts="; ".join(
                f"{n} ranks: {shorten(names, 3)}" for n, names in sorted(labels.items())
            ),
        )
    return next(iter(labels))


def escape_pattern(name: str) -> str:
    """Return the pattern that matches one name only.

    >>> escape_pattern("w[0].*")
    'w[[]0].[*]'
    """
    return re.sub(r"[*?[]", r"[\g<0>]", name)


class Rule(Struct, frozen=True, dict=True):
    """A pattern of names, and the layout of the parameters that match it.

    The pattern may contain ``*`` (any characters), ``?`` (any one character) or ``[abc]``.  With
    ``allows_more_axes`` a tensor may have more axes than the layout; these are not sharded.
    """

    pattern: str
    layout: Layout  # the layout of the first stage
    allows_more_axes: bool
    stages: tuple[int, ...]  # the stages that hold the parameters
    place: str  # file and line of the rule, for messages

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(translate(self.pattern))

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the parameter ``name``.

        >>> rule = Rule("*.weight", Layout((4,), ((0,),)), True, (0,), "")
        >>> rule.matches("moments.weight"), rule.matches("weight")
        (True, False)
        """
        return name == self.pattern or self._regex.match(name) is not None

    @property
    def only_name(self) -> str | None:
        """The one name that the pattern matches; None if it matches several."""
        name = re.sub(r"\[([*?[])\]", r"\1", self.pattern)
        return name if escape_pattern(name) == self.pattern else None

    def axis_problem(self, meta: TensorMeta) -> Diagnostic | None:
        """Return the problem of a slice with too few axes for the rule; None for other slices."""
        has_all = len(self.layout.tensor_map) <= len(meta.shape)
        if has_all or meta.text is not None or not self.allows_more_axes:
            return None
        above = " above this pattern" if meta.name != self.pattern else ""
        return Diagnostic(
            "strategy",
            f"no axis {len(self.layout.tensor_map) - 1}, which pattern {self.pattern} shards",
            hint=f'`"NAME": replicated`{above}',
            facts=f"its shape is {meta.shape}; axes count from 0",
            tensor=meta.name,
            where=self.place,
        )

    def layouts(self, ndim: int) -> tuple[Layout, ...]:
        """Return the layouts of a tensor of ``ndim`` axes, one for each stage that holds it."""
        size = len(self.layout.ranks)
        more = ndim - len(self.layout.tensor_map) if self.allows_more_axes else 0
        tensor_map = (*self.layout.tensor_map, *((),) * more)
        return tuple(
            replace(self.layout, tensor_map=tensor_map, first_rank=stage * size)
            for stage in self.stages
        )


class Rules(Struct, frozen=True):
    """The rules of a hand-written strategy, in order; the first rule that matches a name decides.

    Unless ``replicates_rest``, parameters without a rule are an error if no other strategy lists
    any.
    """

    path: str
    rules: tuple[Rule, ...]
    replicates_rest: bool = False
    called: Mapping[str, str] = {}  # the names that patterns match in place of others

    def find(self, name: str) -> Rule | None:
        """Return the first rule that matches ``name``, or None."""
        name = self.called.get(name, name)
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def unused_notes(self, matched: Mapping[str, Rule]) -> tuple[Diagnostic, ...]:
        """Return a note on the rules that are not among ``matched``, if there are any."""
        used = {rule.pattern for rule in matched.values()}
        unused = [rule.pattern for rule in self.rules if rule.pattern not in used]
        if not unused:
            return ()
        message = "no parameter matches, or only ones of earlier patterns"
        return (Diagnostic("absent", f"{', '.join(unused)}: {message}", where=self.path),)
