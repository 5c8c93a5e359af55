"""How tensors are spread over files: by the layouts of a strategy, or in one of three other ways.

A strategy file holds for each parameter its layouts, one per pipeline stage.  A hand-written one
lists patterns of names (rules).  It has no layouts until it is resolved with the names of a
checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import translate

from ckpttool.errors import StrategyError
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.layout import Layout, fold_layout
from ckpttool.model.tensors import TensorMeta
from ckpttool.model.wording import count, shorten


@dataclass(frozen=True, slots=True)
class Strategy:
    """Name to layouts, one for each stage that has the parameter, lowest stage first.

    Attributes
    ----------
    layouts
        Only the parameters that the file lists.
    stages
        Number of pipeline stages.
    stage_ranks
        Ranks of each stage.
    files
        The files it was read from; empty if it was made in memory.
    notes
        What was noticed when it was read or resolved.
    rules
        The rules of a hand-written file, until `resolve` turns them into layouts.
    by_hand
        Names with hand-written layouts, and the place of each.
    replicates_rest
        Whether a person wrote that ranks hold the same of all other names.
    """

    layouts: Mapping[str, tuple[Layout, ...]]
    stages: int
    stage_ranks: int
    files: tuple[str, ...] = ()
    notes: tuple[Diagnostic, ...] = ()
    rules: Rules | None = None
    by_hand: Mapping[str, str] = field(default_factory=dict)
    replicates_rest: bool = False

    @property
    def origin(self) -> str:
        """Where it comes from, for messages."""
        return shorten(self.files, 2) or "the strategy"

    @property
    def ranks(self) -> range:
        """All ranks of all stages."""
        return range(self.stages * self.stage_ranks)

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that list ``name``."""
        layouts = self.layouts.get(name, ())
        return tuple(layout.first_rank // self.stage_ranks for layout in layouts)

    def resolve(
        self, metas: Mapping[str, TensorMeta], is_rest_decided: bool = False
    ) -> tuple[Strategy, tuple[str, ...]]:
        """Return the strategy with layouts in place of its rules, and the problems.

        Problems are names that neither a rule nor a layout is for, and rules that contradict listed
        layouts, which stay as they are.  A single value needs no rule: it is copied if all ranks
        hold the same.

        Parameters
        ----------
        metas
            Name to tensor, a slice or all of it: all names of the checkpoint.
        is_rest_decided
            Whether an option says what becomes of names that no rule matches.
        """
        rules = self.rules
        if rules is None:
            return self, ()
        found = {name: rule for name in metas if (rule := rules.find(name)) is not None}
        problems = []
        idle = rules.notes(found)
        is_decided = is_rest_decided or rules.replicates_rest or self.layouts
        unmatched = [name for name in metas if name not in found]
        silent = [name for name in unmatched if not metas[name].is_single]
        if silent and not is_decided:
            problems.append(
                f"{rules.path}: nothing is said of {count(len(silent), 'parameter')}: "
                f"{shorten(silent, 20)}; add a pattern for each, or `otherwise: replicated` if all "
                "ranks hold the same of them" + "".join(f"; {note.text}" for note in idle)
            )
        layouts, by_hand = dict(self.layouts), dict(self.by_hand)
        for name, rule in found.items():
            meta = metas[name]
            reason = rule.why_not(meta)
            if reason is not None:
                problems.append(reason)
                continue
            said = rule.layouts(len(meta.shape))
            listed = self.layouts.get(name)
            if listed is not None and not _agree(listed, said):
                listed = _folded_like(listed, said)
            if listed is not None and not _agree(listed, said):
                others = shorten([path for path in self.files if path != rules.path], 2)
                problems.append(
                    f"{name}: {rule.place} cuts it otherwise than {others}; a strategy by hand "
                    "adds to another, it corrects nothing"
                )
            elif meta.text is None:  # a string is never cut
                layouts[name], by_hand[name] = listed or said, rule.place
        single = [name for name in unmatched if metas[name].is_single]
        if single and not is_decided:
            text = f"{rules.path}: no pattern for {count(len(single), 'single value')}, which "
            text += f"must be the same on all ranks: {shorten(single)}"
            idle = (*idle, Diagnostic("no_pattern", text))
        notes = (*self.notes, *idle)
        resolved = replace(
            self,
            layouts=layouts,
            rules=None,
            by_hand=by_hand,
            notes=notes,
            replicates_rest=rules.replicates_rest,
        )
        return resolved, tuple(problems)


@dataclass(frozen=True, slots=True)
class _WithoutLayouts:
    """What the ways of sharding have in common that need no strategy.

    Attributes
    ----------
    ranks
        The ranks that have a file.
    files
        The files that say so; empty if the user or the catalog does.
    notes
        What was noticed when they were read.
    """

    ranks: range = range(1)
    files: tuple[str, ...] = ()
    notes: tuple[Diagnostic, ...] = ()

    @property
    def layouts(self) -> Mapping[str, tuple[Layout, ...]]:
        """Name to layouts: none."""
        return {}

    @property
    def by_hand(self) -> Mapping[str, str]:
        """Names with hand-written layouts: none."""
        return {}

    @property
    def origin(self) -> str:
        """Where it comes from, for messages."""
        return shorten(self.files, 2)


@dataclass(frozen=True, slots=True)
class Replicated(_WithoutLayouts):
    """Every rank holds full tensors, and all ranks the same."""


@dataclass(frozen=True, slots=True)
class SelfDescribed(_WithoutLayouts):
    """The checkpoint says itself which box of each tensor a rank holds."""


@dataclass(frozen=True, slots=True)
class Merged(_WithoutLayouts):
    """Each file holds full tensors, or is taken by itself since nothing says how files join."""


Sharding = Strategy | Replicated | SelfDescribed | Merged


def join_stages(
    stages: Mapping[int, Mapping[str, Layout]], files: tuple[str, ...] = ()
) -> Strategy:
    """Return one strategy from the layouts of every stage.

    Parameters
    ----------
    stages
        Stage number to name to layout; the layouts need no ``first_rank`` yet.
    files
        The files they were read from.

    Raises
    ------
    StrategyError
        No layouts at all, a stage is missing, or the layouts are for different numbers of ranks.
    """
    origin = shorten(files, 2) or "the strategy"
    if not any(stages.values()):
        raise StrategyError(origin, "no parameter layouts in it")
    missing = sorted(set(range(max(stages) + 1)) - set(stages))
    if missing:
        named = ", ".join(str(stage) for stage in missing)
        raise StrategyError(
            origin,
            f"layouts of stage {', '.join(str(s) for s in sorted(stages))} but none of stage "
            f"{named}; give the strategy files of all pipeline stages, or the merged one",
        )
    stage_ranks = _common_ranks(stages, origin)
    layouts: dict[str, tuple[Layout, ...]] = {}
    known: dict[tuple[Layout, tuple[int, ...] | None], Layout] = {}
    for stage in sorted(stages):
        for name, layout in stages[stage].items():
            placed = replace(layout, first_rank=stage * stage_ranks)
            # A model has few layouts; one object for each is found faster in what is known of it.
            placed = known.setdefault((placed, placed.full_shape), placed)
            layouts[name] = (*layouts.get(name, ()), placed)
    return Strategy(layouts, len(stages), stage_ranks, files)


def _agree(listed: Iterable[Layout], said: Iterable[Layout]) -> bool:
    """Return whether ``said`` shards like ``listed`` in each listed stage."""
    by_stage = {layout.first_rank: layout for layout in said}
    return all(
        layout.first_rank in by_stage and layout.cuts_like(by_stage[layout.first_rank])
        for layout in listed
    )


def _folded_like(listed: tuple[Layout, ...], said: Iterable[Layout]) -> tuple[Layout, ...]:
    """Return the listed layouts; expanded ones folded like ``said``, if that is possible."""
    by_stage = {layout.first_rank: layout for layout in said}
    ndim = max((len(layout.tensor_map) for layout in by_stage.values()), default=0)

    def fits(way: Layout) -> bool:
        return way.first_rank in by_stage and way.cuts_like(by_stage[way.first_rank])

    return tuple(next(iter(fold_layout(layout, ndim, fits)), layout) for layout in listed)


def _common_ranks(stages: Mapping[int, Mapping[str, Layout]], origin: str) -> int:
    named: dict[int, list[str]] = {}
    for stage in sorted(stages):
        for name, layout in stages[stage].items():
            label = name if len(stages) == 1 else f"stage {stage} {name}"
            named.setdefault(math.prod(layout.device_matrix), []).append(label)
    if len(named) > 1:
        raise StrategyError(
            origin,
            "every device matrix of a strategy is for the same number of ranks, but "
            + "; ".join(f"{n} ranks: {shorten(names)}" for n, names in sorted(named.items())),
        )
    return next(iter(named))


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern of names and one way to cut.

    Attributes
    ----------
    pattern
        A name, or one with ``*`` (any characters), ``?`` (any one) or ``[abc]`` in it.
    layout
        Of the first stage.
    is_open
        True if the tensor may have more axes than the layout, which are not sharded.
    stages
        The stages that hold it.
    place
        File and line, for messages.
    """

    pattern: str
    layout: Layout
    is_open: bool
    stages: tuple[int, ...]
    place: str
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_regex", re.compile(translate(self.pattern)))

    def matches(self, name: str) -> bool:
        """Return whether the rule is for the parameter ``name``.

        Examples
        --------
        >>> rule = Rule("*.weight", Layout((4,), ((0,),)), True, (0,), "")
        >>> rule.matches("moments.weight"), rule.matches("weight")
        (True, False)
        """
        return name == self.pattern or self._regex.match(name) is not None

    def why_not(self, meta: TensorMeta) -> str | None:
        """Return why the rule cannot be for the tensor with the slice ``meta``, or None."""
        axis = len(self.layout.tensor_map) - 1
        if not self.is_open or axis < len(meta.shape) or meta.text is not None:
            return None
        counted = "axes count from 0"
        return f"{meta.name}: {self.place} cuts axis {axis} ({counted}), its shape is {meta.shape}"

    def layouts(self, ndim: int) -> tuple[Layout, ...]:
        """Return the layouts of a tensor of ``ndim`` axes, one for each stage that holds it."""
        size = len(self.layout.ranks)
        more = ndim - len(self.layout.tensor_map) if self.is_open else 0
        tensor_map = (*self.layout.tensor_map, *((),) * more)
        return tuple(
            replace(self.layout, tensor_map=tensor_map, first_rank=stage * size)
            for stage in self.stages
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a hand-written strategy: the first that matches a name decides.

    Attributes
    ----------
    path
        The file it was read from.
    rules
        In the order of the file.
    replicates_rest
        True if all ranks hold the same of what no rule matches; else such names are an error,
        unless another strategy lists parameters, too.
    """

    path: str
    rules: tuple[Rule, ...]
    replicates_rest: bool = False

    def find(self, name: str) -> Rule | None:
        """Return the first rule for ``name``, or None."""
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def notes(self, found: Mapping[str, Rule]) -> tuple[Diagnostic, ...]:
        """Return the notes on rules that are for none of the names ``found``."""
        used = {rule.pattern for rule in found.values()}
        idle = [f"{rule.pattern} ({rule.place})" for rule in self.rules if rule.pattern not in used]
        if not idle:
            return ()
        text = "patterns that match no parameter, or none that an earlier one leaves"
        return (Diagnostic("absent", f"{text}: {', '.join(idle)}"),)
