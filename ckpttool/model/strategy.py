"""What strategy files hold: for each parameter its layouts, one per pipeline stage.

A strategy by hand speaks of patterns of names, and nothing is known of a parameter until it is
resolved with the names that a checkpoint has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckpttool.errors import StrategyError
from ckpttool.model.catalog import TensorMeta
from ckpttool.model.layout import Layout, fold_layout
from ckpttool.model.notes import Note
from ckpttool.model.reduced import reduced_from
from ckpttool.model.rules import Rules

GRADIENTS = "accu_grads."  # summed up over micro batches by each rank, or each stage, for itself

# Prefixes of optimizer state in MindSpore 2.10 (nn, mint and experimental.optim) and MindFormers.
# Names and shapes show what is state (`ckpttool.model.states.find_owners`).  The list is for what
# they cannot show: that a tensor of another shape than its parameter's slices is odd, that a
# statistic has an axis less, that gradients have rules of their own.  Prefixes that modules have as
# well are not in it (``linear.`` of FTRL, ``prev.`` of Rprop).
STATE_PREFIXES = (
    "moments.",  # Momentum, FTRL, THOR
    "moment1.",  # Adam, LazyAdam, AdaMax
    "moment2.",
    "vhat.",  # Adam with use_amsgrad
    "adam_m.",  # AdamWeightDecay
    "adam_v.",
    "lamb_m.",  # Lamb
    "lamb_v.",
    "accum.",  # SGD, Adagrad, ProximalAdagrad, Adadelta
    "stat.",  # SGD
    "momentum_buf.",  # SGD of mint
    "accum_update.",  # Adadelta
    "mean_square.",  # RMSProp
    "mean_grad.",
    "moment.",
    "step_size.",  # Rprop
    "ax_.",  # ASGD
    "ax.",  # ASGD of experimental
    "exp_avg.",  # Adam, AdamW of mint and experimental; AdaMax, NAdam, RAdam there; AdaFactor
    "exp_avg_sq.",  # Adam, AdamW of mint and experimental; NAdam, RAdam there
    "max_exp_avg_sq.",  # AdamW, Adam with amsgrad
    "exp_inf.",  # AdaMax of experimental
    "exp_avg_sq_",  # AdaFactor; for its statistics of rows and columns see `reduced`
    "muon_m.",  # Muon of MindFormers
    GRADIENTS,
)
_WORDS = frozenset(prefix for prefix in STATE_PREFIXES if prefix.endswith("."))
_OTHERS = tuple(prefix for prefix in STATE_PREFIXES if not prefix.endswith("."))


def parameter_of(name: str) -> str | None:
    """The parameter whose optimizer state ``name`` would be, or None if it has no such prefix.

    Examples
    --------
    >>> parameter_of("adam_m.layer.weight")
    'layer.weight'
    """
    if reduced_from(name) is not None:
        return None  # it has not the parameter's shape
    end = name.find(".") + 1
    if name[:end] in _WORDS:
        return name[end:] or None
    prefix = next((prefix for prefix in _OTHERS if name.startswith(prefix)), name)
    return name[len(prefix) :] or None


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
        What was written by hand, until `resolve` turns it into layouts.
    by_hand
        Names whose layouts were written by hand, and where.
    replicates_rest
        Whether a person wrote that ranks hold the same of all other names.
    """

    layouts: Mapping[str, tuple[Layout, ...]]
    stages: int
    stage_ranks: int
    files: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
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
        """The stages that list ``name``; none if no stage does."""
        layouts = self.layouts.get(name, ())
        return tuple(layout.first_rank // self.stage_ranks for layout in layouts)

    def resolve(
        self, metas: Mapping[str, TensorMeta], is_rest_decided: bool = False
    ) -> tuple[Strategy, tuple[str, ...]]:
        """The strategy with its rules turned into layouts, itself if it has none; and problems.

        Problems are names that no rule matches and that nothing else is said of, and rules that
        contradict the listed layouts, which stay as they are.  A single value needs no rule: it is
        copied if all ranks hold the same.

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
            idle = (*idle, Note("unlisted", text))
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


def join_stages(
    stages: Mapping[int, Mapping[str, Layout]], files: tuple[str, ...] = ()
) -> Strategy:
    """One strategy from the layouts of every stage.

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
    """Whether ``said`` cuts like ``listed`` in each stage that is listed."""
    by_stage = {layout.first_rank: layout for layout in said}
    return all(
        layout.first_rank in by_stage and layout.cuts_like(by_stage[layout.first_rank])
        for layout in listed
    )


def _folded_like(listed: tuple[Layout, ...], said: Iterable[Layout]) -> tuple[Layout, ...]:
    """The listed layouts, of expanded ones the way to fold them that ``said`` has, if it is one."""
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


def count(number: int, noun: str) -> str:
    """A number and its noun.

    Examples
    --------
    >>> count(1, "parameter"), count(2, "parameter")
    ('1 parameter', '2 parameters')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shorten(names: Iterable[str], most: int = 5) -> str:
    """Names for a message: the first ``most``, and how many more there are.

    Examples
    --------
    >>> shorten("abcdefg")
    'a, b, c, d, e and 2 more'
    """
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
