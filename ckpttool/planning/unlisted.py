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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from ckpttool.model.catalog import Catalog
from ckpttool.model.names import ParameterOfState, parse_name
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Replicated, Sharding, Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.planning.optimizer_state import (
    contradiction,
    find_mismatched_states,
    followed_parameter,
    shape_difference,
)
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, format_difference, format_ranks, shorten


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
    facts
        A file without them, or what the one rank that holds them lacks.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    facts: str

    @property
    def is_on_one_rank(self) -> bool:
        """Whether only one rank holds them."""
        return len(self.ranks) == 1

    def diagnostics(
        self, code: str, hint: str = "", options: tuple[str, ...] = (), *, more_facts: str = ""
    ) -> Iterator[Diagnostic]:
        """Yield for each that only one rank holds it, or that some ranks do not."""
        ranks = self.ranks if self.is_on_one_rank else self.missing
        where = f"only on {format_ranks(ranks)}"
        where = where if self.is_on_one_rank else f"not on {format_ranks(ranks)}"
        one = Diagnostic(
            code,
            f"not in the strategy, and {where}",
            hint=hint
            or f"copy the file again if it was cut short; `ckpttool help {code}` explains",
            options=options,
            facts=self.facts + more_facts,
            ranks=ranks,
        )
        return (replace(one, tensor=name) for name in self.names)


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
    parameter_of_state = catalog.match_states(sharding.layouts)
    found = []
    for ranks, others in missing.items():
        unlisted = tuple(
            name
            for name in (names[ranks] if others else ())
            if name not in sharding.layouts
            and parse_name(name).map is None
            and followed_parameter(catalog, sharding, name, ranks, parameter_of_state) is None
        )
        if unlisted:
            paths = shorten((catalog.files[rank].path for rank in others), 1)
            facts = f"{paths}: other ranks of the stage hold it"
            if len(ranks) == 1:
                instead = list(
                    chain(*(names[held] for held, without in missing.items() if without == ranks))
                )
                facts = catalog.files[ranks[0]].path
                facts += f": {shorten(instead, 3)}, on all other ranks, is missing" * bool(instead)
            found.append(PartlyHeld(unlisted, ranks, others, facts))
    if is_deduplicated and all(
        len(one.ranks) == len({rank // sharding.stage_ranks for rank in one.ranks}) for one in found
    ):
        return ()
    return tuple(found)


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
        layer, last = parse_name(name).layer, parse_name(name).last
        pair = metas.get(_join_name(layer, _VARIANCE_OF_MEAN.get(last, "")))
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

_CHOICES = "--unlisted first (the lowest rank's), rank (each its own) or drop"
_EXPLAINED = "`ckpttool help unlisted` explains"
_DECIDE = f"--unlisted first, rank or drop; {_EXPLAINED}"


def odd_state_problems(shapes: Mapping[str, str], listing: str) -> Iterator[Diagnostic]:
    """Yield the problem of each state without a layout that is neither a slice nor a full tensor.

    ``shapes`` describes each of them; ``listing``, the strategy, should list them.
    """
    text = f"not in {listing}, and neither a slice nor a full tensor"
    hint = f"--unlisted first takes it in full, --unlisted drop leaves it out; {_EXPLAINED}"
    for name, shape in shapes.items():
        yield Diagnostic(
            "unlisted",
            text,
            hint=hint,
            options=("--unlisted",),
            facts=f"shapes: {shape}",
            tensor=name,
        )


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
    catalog: Catalog,
    sharding: Sharding,
    differing: DifferingNames,
    on_one_rank: Mapping[str, PartlyHeld],
    running_statistics: Collection[str],
) -> Iterator[Diagnostic]:
    """Yield the problems of parameters that differ between ranks.

    Parameters
    ----------
    catalog, sharding
        The checkpoint and its sharding.  If every rank should hold all tensors in full, one problem
        is yielded for all parameters.
    differing
        The parameters, by the way they differ.
    on_one_rank
        Names that only one rank holds.
    running_statistics
        Names of running statistics, which make one problem.
    """
    statistics, differing = split_names(differing, running_statistics)
    if statistics:
        ranks = {rank for groups in statistics for group in groups for rank in group}
        yield running_statistics_problem([*chain(*statistics.values())], sorted(ranks))
    if isinstance(sharding, Replicated):
        if differing:
            yield _unequal_ranks_problem(catalog, differing)
        return
    listing = "the strategy" if isinstance(sharding, Strategy) else "the description"
    choices = f"{_CHOICES}; {_EXPLAINED}"
    if isinstance(sharding, Strategy):
        choices = f"-s MORE.yaml if they are slices, or {_DECIDE}"
    for groups, names in differing.items():
        for one in dict.fromkeys(on_one_rank[name] for name in names if name in on_one_rank):
            hint = f"move the file away if it is damaged, or {_DECIDE}"
            yield from one.diagnostics("unlisted", hint, ("--unlisted",))
        maps = dict.fromkeys(tag for name in names if (tag := parse_name(name).map) is not None)
        if maps:
            what = "map parameters that cannot be joined"
            yield from _differing_problems(maps, what, groups, f"{_CHOICES}; {_EXPLAINED}")
        tensors = [
            name for name in names if parse_name(name).map is None and name not in on_one_rank
        ]
        if tensors:
            yield from _differing_problems(tensors, f"not in {listing}", groups, choices)


def _unequal_ranks_problem(catalog: Catalog, differing: DifferingNames) -> Diagnostic:
    """Return the problem of ranks that should all hold the full model, and differ."""
    number = count(sum(map(len, differing.values())), "parameter", "differ")
    ways = (f"{names[0]}: {format_difference(groups)}" for groups, names in differing.items())
    return Diagnostic(
        "unlisted",
        f"not every rank holds the full model: {number} between ranks",
        hint=f"-s STRATEGY if they are slices; {_EXPLAINED}",
        facts="; ".join([*ways][:3]),
        where=catalog.root,
    )


def _differing_problems(
    names: Iterable[str], what: str, groups: RankGroups, hint: str
) -> Iterator[Diagnostic]:
    """Yield the problem of each parameter that differs between ranks in one way."""
    is_split = len(groups) > 1
    difference = "different between ranks" if is_split else f"only on {format_ranks(groups[0])}"
    one = Diagnostic(
        "unlisted",
        f"{what}, and {difference}",
        hint=hint,
        options=("--unlisted",),
        facts=format_difference(groups) if is_split else "",
        ranks=tuple(sorted(chain(*groups))),
    )
    return (replace(one, tensor=name) for name in names)


def running_statistics_problem(names: Sequence[str], ranks: Sequence[int]) -> Diagnostic:
    """Return the problem of running statistics that differ between ranks, with the choices."""
    statistics = count(len(names), "running statistic", "differ")
    return Diagnostic(
        "unlisted",
        f"{statistics} between {format_ranks(ranks)}",
        hint=f"{_CHOICES}; {_EXPLAINED}",
        options=("--unlisted",),
        facts=f"{shorten(names, 3)}; each device has its own in data parallel (BatchNorm)",
        ranks=tuple(ranks),
    )


def decision_notes(
    names: Iterable[str], groups: RankGroups, unlisted: UnlistedChoice, cycle: int, listing: str
) -> Iterator[Diagnostic]:
    """Yield a note on the user's choice for each parameter that differs in one way.

    ``cycle`` is the number of source ranks for ``"rank"``.
    """
    lowest = min(rank for group in groups for rank in group)
    results = {
        "drop": "dropped",
        "first": f"taken from rank {lowest}",
        "rank": f"target rank r takes that of source rank r modulo {cycle}",
    }
    code = "dropped" if unlisted == "drop" else "decided"
    facts = f"not in {listing}; {'only on ' * (len(groups) == 1)}{format_difference(groups)}"
    return (Diagnostic(code, results[unlisted], facts=facts, tensor=name) for name in names)


def layout_notes(
    found: Sequence[Source], corrected: Sequence[str], listing: str
) -> Iterator[Diagnostic]:
    """Yield notes on sources whose layout ``listing``, the strategy, omits or lists wrongly.

    ``corrected`` are the names whose layouts in it were corrected.
    """
    following = [source for source in found if source.parameter is not None]
    if following:
        names = shorten((f"{one.meta.name} (as {one.parameter})" for one in following), 3)
        text = f"{count(len(following), 'optimizer state', 'are')} sharded like the parameter"
        yield Diagnostic("follows", text, facts=f"not in {listing}: {names}")
    if corrected:
        text = f"{count(len(corrected), 'parameter', 'are')} sharded as shapes show, "
        text += f"not as in {listing}"
        yield Diagnostic("corrected", text, facts=shorten(corrected, 3))
    shapes = {source.meta.name: source.meta.shape for source in found}
    differences = [
        difference for source in found if (difference := shape_difference(source.meta, shapes))
    ]
    if differences:
        states = count(len(differences), "optimizer state", "have")
        text = f"{states} another shape than the parameter"
        yield Diagnostic("doubt", text, facts=f"{shorten(differences, 3)}; perhaps slices")


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
        and parse_name(source.meta.name).parameter is None
        and 2 * counts[source.meta.name.removesuffix(parameter_of_state[source.meta.name])]
        < parameters
    ]
    if names:
        tensors = count(len(names), "tensor", "are")
        text = f"{tensors} taken for optimizer state by name and shape"
        hint = "-s MORE.yaml with the layout if it is not; `ckpttool help guessed` explains"
        yield Diagnostic("guessed", text, hint=hint, facts=shorten(names, 3))


def handwritten_shape_problems(sharding: Sharding, found: Sequence[Source]) -> Iterator[Diagnostic]:
    """Yield the hand-written layouts of states whose full shapes contradict their parameters."""
    handwritten = sharding.handwritten
    shapes = {source.meta.name: source.meta.shape for source in found}
    for meta in (source.meta for source in found):
        parameter = parse_name(meta.name).parameter or ""
        if (
            meta.name in handwritten
            and parameter in handwritten
            and shape_difference(meta, shapes) is not None
        ):
            text = "its hand-written layout gives another shape than its parameter's"
            facts = f"{handwritten[meta.name]}: {meta.shape}; "
            facts += f"{handwritten[parameter]}: {parameter} {shapes[parameter]}"
            hint = "correct one of the two layouts"
            yield Diagnostic("shape", text, hint=hint, facts=facts, tensor=meta.name)


def find_contradictions(catalog: Catalog, sharding: Sharding) -> Iterator[Diagnostic]:
    """Yield the contradictions between headers and the layouts that a strategy lists."""
    if isinstance(sharding, Strategy):
        yield from find_mismatched_states(catalog, sharding)
        yield from _find_misplaced_stages(catalog, sharding)


def _find_misplaced_stages(catalog: Catalog, strategy: Strategy) -> Iterator[Diagnostic]:
    """Yield a problem if ranks of stages hold more slices of other stages than of their own.

    Stages share only a few parameters.  With a strategy of two stages, half of the files would not
    be read if all ranks hold every layer.
    """
    if strategy.stages == 1:
        return
    ranks_of: list[int] = []
    misplaced: dict[str, None] = {}
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
            ranks_of += ranks
            misplaced |= dict.fromkeys(others)
    if misplaced:
        parameters = count(len(misplaced), "parameter")
        text = (
            f"{format_ranks(ranks_of)} hold {parameters} that the strategy lists for other stages"
        )
        yield contradiction(strategy, text, shorten(misplaced, 3), ranks_of)


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
        parameters = count(len(misplaced), "parameter", "are")
        text = f"{parameters} also on ranks of other stages, and not read there"
        yield Diagnostic("skipped", text, facts=shorten(misplaced, 3))
