"""Parameters that a strategy does not list: checks, problems, decisions of the user and notes.

Running statistics of normalisation layers are an example.  A BatchNorm layer in training mode
updates a mean and a variance for each channel.  It computes them from the samples of its device.
Gradients are averaged over the devices, but statistics are not.  So statistics differ between ranks
whose other parameters are equal.

Source
------
MindSpore 2.10 ``nn/layer/normalization.py`` (``_BatchNorm``, ``_InstanceNorm``; ``SyncBatchNorm``
averages them over the devices), ``mint/nn/layer/normalization.py`` (``_NormBase``).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from ckpttool.model.catalog import Catalog
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Sharding, Strategy
from ckpttool.model.tensors import TensorMeta, map_of
from ckpttool.model.wording import count, format_ranks, shorten
from ckpttool.planning.optimizer_state import (
    ParameterOfState,
    find_mismatched_states,
    followed_parameter,
    match_states_by_name,
    parameter_by_prefix,
    shape_difference_message,
)


@dataclass(frozen=True, slots=True)
class PartlyHeld:
    """Parameters without a layout that some ranks of a stage hold and others do not.

    Attributes
    ----------
    names
        The parameters; the same ranks hold all of them.
    ranks
        All ranks that hold them, of any stage.
    missing
        Other ranks of these stages, which have a file without them.
    message
        Description of the problem.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    message: str

    @property
    def is_on_one_rank(self) -> bool:
        """Whether only one rank holds them."""
        return len(self.ranks) == 1


def find_partly_held(
    catalog: Catalog, sharding: Sharding, is_deduplicated: bool
) -> tuple[PartlyHeld, ...]:
    """Find the unlisted parameters that only some ranks of their stage hold.

    The ranks of a stage run the same program and save the same names.  If a rank lacks a name, its
    file is damaged or the parameter was renamed.  A checkpoint without redundancy may store each
    parameter on one rank of a stage.  Nothing is found if it does so for all of them.  Ranks that
    hold nothing and map parameters are checked elsewhere.
    """
    if not isinstance(sharding, Strategy):
        return ()
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, ranks in catalog.holders.items():
        names[ranks].append(name)
    stages: dict[int, set[int]] = defaultdict(set)
    for rank in (rank for rank, file in catalog.files.items() if file.tensors):
        stages[rank // sharding.stage_ranks].add(rank)
    missing: dict[tuple[int, ...], tuple[int, ...]] = {}
    for ranks in names:
        numbers = {rank // sharding.stage_ranks for rank in ranks}
        members = {rank for stage in numbers for rank in stages[stage]}
        missing[ranks] = tuple(sorted(members.difference(ranks)))
    if not any(missing.values()):
        return ()
    parameter_of_state = match_states_by_name(sharding.layouts, catalog.metas)
    found = []
    for ranks, others in missing.items():
        unlisted = tuple(
            name
            for name in (names[ranks] if others else ())
            if name not in sharding.layouts
            and map_of(name) is None
            and followed_parameter(catalog, sharding, name, ranks, parameter_of_state) is None
        )
        if unlisted:
            message = _missing_ranks_message(catalog, unlisted, others)
            if len(ranks) == 1:
                instead = chain(
                    *(names[holding] for holding, without in missing.items() if without == ranks)
                )
                message = _one_rank_message(catalog, unlisted, ranks[0], list(instead))
            found.append(PartlyHeld(unlisted, ranks, others, message))
    if is_deduplicated and all(
        len(one.ranks) == len({rank // sharding.stage_ranks for rank in one.ranks}) for one in found
    ):
        return ()
    return tuple(found)


def _one_rank_message(
    catalog: Catalog, names: Sequence[str], rank: int, instead: Sequence[str]
) -> str:
    """Describe names that one rank holds ``instead`` of the names that all others hold."""
    text = f"{shorten(names)}: not in the strategy, and on rank {rank} alone "
    text += f"({catalog.files[rank].path})"
    if instead:
        text += f", which lacks {shorten(instead)} that all others of its stage have"
    return text


def _missing_ranks_message(catalog: Catalog, names: Sequence[str], missing: Sequence[int]) -> str:
    """Describe names that ``missing`` do not hold, and other ranks of their stage do."""
    text = f"{shorten(names)}: not in the strategy, and not on {format_ranks(missing)} "
    paths = shorten((catalog.files[rank].path for rank in missing), 1)
    return f"{text}({paths}), though others of the same stage have it; cut short, or renamed?"


_VARIANCE_OF_MEAN = {
    "moving_mean": "moving_variance",  # nn.BatchNorm
    "running_mean": "running_var",  # mint.nn.BatchNorm
    "mean": "variance",  # nn.InstanceNorm
}
_WEIGHT_NAMES = ("gamma", "weight")  # of the same layers
_FLOAT_DTYPES = ("Float16", "BFloat16", "Float32", "Float64")


def find_statistic_candidates(
    metas: Mapping[str, TensorMeta], sharding: Sharding
) -> dict[str, float]:
    """Find the parameters whose names and shapes are those of running statistics.

    The mean and the variance of a layer are a pair, with one number for each channel.  Statistics
    that the strategy lists are left out, and those of layers whose weight it shards: they may be
    slices.

    Returns
    -------
    dict
        Name to the least value that the statistic may have.
    """
    found: dict[str, float] = {}
    for name, meta in metas.items():
        layer, _, last_name = name.rpartition(".")
        pair = metas.get(_join_name(layer, _VARIANCE_OF_MEAN.get(last_name, "")))
        if pair is None or (meta.dtype, meta.shape) != (pair.dtype, pair.shape):
            continue
        names = {name, pair.name}
        may_be_sliced = names & sharding.layouts.keys() or any(
            math.prod(layout.slice_counts) > 1
            for weight in _WEIGHT_NAMES
            for layout in sharding.layouts.get(_join_name(layer, weight), ())
        )
        if meta.dtype in _FLOAT_DTYPES and len(meta.shape) == 1 and not may_be_sliced:
            found |= {name: -math.inf, pair.name: 0.0}
    return found


def _join_name(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


UnlistedChoice = Literal["rank", "first", "drop"]
RankGroups = tuple[tuple[int, ...], ...]  # each group of ranks holds equal tensors
DifferingNames = Mapping[RankGroups, Sequence[str]]  # parameters that differ between these groups

# Each rank stores its own number in an emergency save.  It means nothing to other ranks.
# Source: MindSpore 2.10 train/callback/_train_fault_tolerance.py (_save_checkpoint_on_failure).
RANK_SPECIFIC_NAMES = frozenset({"cur_rank"})

_CHOICES = (
    "--unlisted rank (each target rank takes that of source rank modulo source ranks), first "
    "(the lowest rank's for all) or drop"
)

STATE_HINT = "take it as it is with --unlisted first, or leave it out with --unlisted drop"


def split_names(
    differing: DifferingNames, chosen: Collection[str]
) -> tuple[DifferingNames, DifferingNames]:
    """Split what differs between ranks into the parameters in ``chosen`` and the others."""
    selected: dict[RankGroups, list[str]] = {}
    others: dict[RankGroups, list[str]] = {}
    for groups, names in differing.items():
        for name in names:
            (selected if name in chosen else others).setdefault(groups, []).append(name)
    return selected, others


def unlisted_problems(
    listing: str | None,
    differing: DifferingNames,
    total: int,
    on_one_rank: Mapping[str, PartlyHeld],
    may_add_strategy: bool,
    running_statistics: Collection[str],
) -> Iterator[Diagnostic]:
    """Yield the problems of parameters that differ between ranks.

    Parameters
    ----------
    listing
        What should list them, for messages: the strategy or the description.  It is None if every
        rank should hold everything; then one problem is yielded for all of them.
    differing
        The parameters, by the way they differ.
    total
        Number of parameters in the checkpoint.
    on_one_rank
        Names that only one rank holds.
    may_add_strategy
        Whether the user may add a hand-written strategy.
    running_statistics
        Names of running statistics, which make one problem.
    """
    statistics, differing = split_names(differing, running_statistics)
    if statistics:
        yield _differing_statistics_problem(statistics)
    if not differing:
        return
    instruction = (
        "Say how slices are cut in a strategy by hand, given as well (-s MORE.yaml), or decide"
    )
    instruction = instruction if may_add_strategy else "Decide"
    if listing is not None:
        for groups, names in differing.items():
            for difference in _difference_messages(listing, groups, names, on_one_rank):
                hint = f"{instruction} with {_CHOICES}"
                yield Diagnostic("unlisted", difference, hint, ("--unlisted",))
        return
    number = sum(len(names) for names in differing.values())
    groups_of_names = (f"{each[0]}: {_format_groups(groups)}" for groups, each in differing.items())
    ways = shorten(groups_of_names, 3)
    yield Diagnostic(
        "unlisted",
        f"not every rank holds everything: {number} of {count(total, 'parameter')} "
        f"differ{'s' if number == 1 else ''} between ranks ({ways}); if they are slices, give the "
        "strategy (-s STRATEGY); if a file is damaged, move it away",
        f"if each rank has its own, as a random state is, decide with {_CHOICES}",
        ("--unlisted",),
    )


def _differing_statistics_problem(statistics: DifferingNames) -> Diagnostic:
    """Return the problem of running statistics that differ between ranks, with the choices."""
    ranks = sorted({rank for groups in statistics for group in groups for rank in group})
    names = [name for group in statistics.values() for name in group]
    hint = f"--unlisted first takes rank {ranks[0]}'s for all, --unlisted rank gives each target "
    hint += "rank its own, --unlisted drop leaves them out"
    text = running_statistics_message(names, ranks)
    return Diagnostic("unlisted", text, hint, ("--unlisted",))


def running_statistics_message(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Describe running statistics that differ between ranks, and the cause."""
    verb = "differs" if len(names) == 1 else "differ"
    return (
        f"{format_ranks(ranks)}: {count(len(names), 'running statistic')} {verb} "
        f"({shorten(names, 3)}), as each device keeps its own in data parallel (BatchNorm)"
    )


def _difference_messages(
    listing: str, groups: RankGroups, names: Sequence[str], on_one_rank: Mapping[str, PartlyHeld]
) -> Iterator[str]:
    yield from (
        f"{one.message}: is the name damaged, or the file? Then move the file away."
        for one in dict.fromkeys(on_one_rank[name] for name in names if name in on_one_rank)
    )
    tensors = [name for name in names if map_of(name) is None and name not in on_one_rank]
    maps = dict.fromkeys(tag for name in names if (tag := map_of(name)) is not None)
    if tensors:
        yield (
            f"{shorten(tensors)}: not in {listing}, and different between ranks "
            f"({_format_groups(groups)}): slices that {listing} omits, or does each rank have its "
            "own?"
        )
    if maps:
        difference = f"on {_format_groups(groups)} only"
        if len(groups) > 1:
            difference = f"different between ranks ({_format_groups(groups)})"
        yield (
            f"{shorten(maps)}: a map parameter (hash table), {difference}: nothing says whose "
            "entries count, so they are not joined."
        )


def decision_note(
    names: Sequence[str], groups: RankGroups, unlisted: UnlistedChoice, cycle: int, listing: str
) -> Diagnostic:
    """Return the note on the user's choice for parameters that differ in one way.

    ``cycle`` is the number of source ranks for ``"rank"``.
    """
    lowest = min(rank for group in groups for rank in group)
    results = {
        "drop": "dropped",
        "first": f"taken from rank {lowest}",
        "rank": f"target rank r takes that of source rank r modulo {cycle}, and what no target "
        "rank takes is left out",
    }
    difference = f"different between ranks ({_format_groups(groups)})"
    difference = f"on {_format_groups(groups)} alone" if len(groups) == 1 else difference
    text = f"{shorten(names)}: not in {listing}, {difference}: {results[unlisted]}"
    return Diagnostic("dropped" if unlisted == "drop" else "decided", text)


def _format_groups(groups: RankGroups) -> str:
    shown = " | ".join(format_ranks(group) for group in groups[:8])
    return shown + (f" | and {len(groups) - 8} more" if len(groups) > 8 else "")


def layout_notes(
    found: Sequence[Source], corrected: Sequence[str], listing: str
) -> Iterator[Diagnostic]:
    """Yield notes on sources whose layout ``listing``, the strategy, omits or lists wrongly.

    ``corrected`` are the names whose layouts in it were corrected.
    """
    following = [source for source in found if source.parameter is not None]
    if following:
        names = shorten(f"{source.meta.name} (as {source.parameter})" for source in following)
        states = count(len(following), "optimizer state")
        text = f"not in {listing}, cut like the parameter: {states}"
        yield Diagnostic("follows", f"{text}: {names}")
    if corrected:
        number = count(len(corrected), "parameter")
        text = f"not cut as the strategy says, but as slices and shapes tell: {number}"
        yield Diagnostic("corrected", f"{text}: {shorten(corrected)}")
    shapes = {source.meta.name: source.meta.shape for source in found}
    differences = [
        difference
        for source in found
        if (difference := shape_difference_message(source.meta, shapes))
    ]
    if differences:
        text = "states of other shapes than their parameters have; are they slices?"
        yield Diagnostic("doubt", f"{text}: {shorten(differences)}")


def guessed_state_notes(
    found: Sequence[Source], listed: Collection[str], parameter_of_state: ParameterOfState
) -> Iterator[Diagnostic]:
    """Yield a warning about states that only their names and shapes identify.

    An optimizer stores states of most parameters.  So a prefix may belong to a module if less than
    half of the listed parameters have it.  This does not apply to prefixes of MindSpore's
    optimizers.
    """
    counts = Counter(name.removesuffix(parameter) for name, parameter in parameter_of_state.items())
    parameters = sum(name not in parameter_of_state for name in listed)
    names = [
        f"{source.meta.name} (as {source.parameter})"
        for source in found
        if source.parameter is not None
        and parameter_by_prefix(source.meta.name) is None
        and 2 * counts[source.meta.name.removesuffix(parameter_of_state[source.meta.name])]
        < parameters
    ]
    if names:
        text = f"taken for optimizer state by name and shape: {count(len(names), 'tensor')}"
        hint = (
            "if it is none, say how it is cut in a strategy by hand, given as well (-s MORE.yaml)"
        )
        yield Diagnostic("guessed", f"{text}: {shorten(names)}", hint)


def handwritten_shape_problems(sharding: Sharding, found: Sequence[Source]) -> Iterator[Diagnostic]:
    """Yield the hand-written layouts of states whose full shapes contradict their parameters."""
    handwritten = sharding.handwritten
    shapes = {source.meta.name: source.meta.shape for source in found}
    for meta in (source.meta for source in found):
        parameter = parameter_by_prefix(meta.name) or ""
        if (
            meta.name in handwritten
            and parameter in handwritten
            and shape_difference_message(meta, shapes) is not None
        ):
            text = (
                f"{meta.name}: {handwritten[meta.name]} makes it {meta.shape}, and "
                f"{handwritten[parameter]} makes {parameter} {shapes[parameter]}, of which it is "
                "state"
            )
            yield Diagnostic("shape", text, "correct one of them", tensor=meta.name)


def find_contradictions(catalog: Catalog, sharding: Sharding) -> Iterator[Diagnostic]:
    """Yield the contradictions between headers and the layouts that a strategy lists."""
    if isinstance(sharding, Strategy):
        yield from find_mismatched_states(catalog, sharding)
        yield from _find_misplaced_stages(catalog, sharding)


def _find_misplaced_stages(catalog: Catalog, strategy: Strategy) -> Iterator[Diagnostic]:
    """Yield the stages whose ranks hold more slices of other stages than of their own.

    Stages share only a few parameters.  With a strategy of two stages, half of the files would not
    be read if all ranks hold every layer.
    """
    if strategy.stages == 1:
        return
    holders = catalog.holders
    for stage in range(strategy.stages):
        first = stage * strategy.stage_ranks
        ranks = range(first, first + strategy.stage_ranks)
        header = next((catalog.files[rank].header for rank in ranks if rank in catalog.files), {})
        listed = sum(stage in strategy.stages_of(name) for name in header)
        others = [
            name
            for name, tensor in header.items()
            if stage not in (stages := strategy.stages_of(name))
            and any(
                catalog.files[rank].header[name].meta.shape == tensor.meta.shape
                for rank in holders[name]
                if rank // strategy.stage_ranks in stages
            )
        ]
        if len(others) > listed:
            yield Diagnostic(
                "contradicted",
                f"{format_ranks(ranks)} hold {count(len(others), 'parameter')} that the strategy "
                f"lists for other stages only, and {listed} that it lists for theirs: "
                f"{shorten(others, 3)}; is it the strategy of this run?",
                "--trust-strategy skips this check",
                ("--trust-strategy",),
                ranks=tuple(ranks),
            )


def misplaced_notes(
    sharding: Sharding, holders: Mapping[str, Sequence[int]]
) -> Iterator[Diagnostic]:
    """Yield a note on parameters in stages for which the strategy does not list them."""
    if not isinstance(sharding, Strategy) or sharding.stages == 1:
        return
    misplaced = [
        name
        for name, ranks in holders.items()
        if name in sharding.layouts
        if {rank // sharding.stage_ranks for rank in ranks if rank in sharding.ranks}
        - set(sharding.stages_of(name))
    ]
    if misplaced:
        text = "held by ranks of stages, too, that the strategy does not list them for, and not "
        text += f"read there: {count(len(misplaced), 'parameter')}: {shorten(misplaced)}"
        yield Diagnostic("skipped", text)
