"""Parameters that a strategy does not list: what is decided of them, and what is reported.

Running statistics of normalisation layers are among them.  A BatchNorm layer in training mode
updates a mean and a variance for each channel from the samples that its device sees.  Gradients are
averaged over the devices, statistics are not, so they differ between ranks that otherwise hold the
same.

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
    """Parameters without a layout that only some ranks of a stage have, all the same ranks.

    Attributes
    ----------
    names
        The parameters.
    ranks
        All ranks that have them, of whichever stage.
    missing
        The ranks with a file that lack them, in stages of which others have them.
    text
        What is said of them.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    text: str

    @property
    def is_alone(self) -> bool:
        """Whether one rank alone has them."""
        return len(self.ranks) == 1


def find_partly_held(
    catalog: Catalog, sharding: Sharding, is_deduplicated: bool
) -> tuple[PartlyHeld, ...]:
    """Parameters that no strategy lists, and that only some ranks of their stage have.

    The ranks of a stage run the same program and save the same names: one that is not everywhere
    was renamed, or lost, by damage.  Without redundancy each may be handed out to one rank; so it
    is if all that are not on every rank are on one.  Ranks that hold nothing, and map parameters,
    are judged elsewhere.
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
        of_stages = {rank // sharding.stage_ranks for rank in ranks}
        there = {rank for stage in of_stages for rank in stages[stage]}
        missing[ranks] = tuple(sorted(there.difference(ranks)))
    if not any(missing.values()):
        return ()
    owners = match_states_by_name(sharding.layouts, catalog.metas)
    found = []
    for ranks, lacking in missing.items():
        unlisted = tuple(
            name
            for name in (names[ranks] if lacking else ())
            if name not in sharding.layouts
            and map_of(name) is None
            and followed_parameter(catalog, sharding, name, ranks, owners) is None
        )
        if unlisted:
            text = _on_others(catalog, unlisted, lacking)
            if len(ranks) == 1:
                instead = chain(*(names[of] for of, gone in missing.items() if gone == ranks))
                text = _on_one(catalog, unlisted, ranks[0], list(instead))
            found.append(PartlyHeld(unlisted, ranks, lacking, text))
    if is_deduplicated and all(
        len(one.ranks) == len({rank // sharding.stage_ranks for rank in one.ranks}) for one in found
    ):
        return ()
    return tuple(found)


def _on_one(catalog: Catalog, names: Sequence[str], rank: int, instead: Sequence[str]) -> str:
    """What is said of names that one rank alone has, ``instead`` of those that all others have."""
    text = f"{shorten(names)}: not in the strategy, and on rank {rank} alone "
    text += f"({catalog.files[rank].path})"
    if instead:
        text += f", which lacks {shorten(instead)} that all others of its stage have"
    return text


def _on_others(catalog: Catalog, names: Sequence[str], missing: Sequence[int]) -> str:
    """What is said of names that some ranks lack, and others of their stage have."""
    text = f"{shorten(names)}: not in the strategy, and not on {format_ranks(missing)} "
    paths = shorten((catalog.files[rank].path for rank in missing), 1)
    return f"{text}({paths}), though others of the same stage have it; cut short, or renamed?"


PAIRS = {
    "moving_mean": "moving_variance",  # nn.BatchNorm
    "running_mean": "running_var",  # mint.nn.BatchNorm
    "mean": "variance",  # nn.InstanceNorm
}
WEIGHTS = ("gamma", "weight")  # of the same layers
FLOATS = ("Float16", "BFloat16", "Float32", "Float64")


def find_statistics(metas: Mapping[str, TensorMeta], sharding: Sharding) -> dict[str, float]:
    """Return the parameters that are running statistics by their names and shapes.

    A mean and a variance of one layer come in a pair, one number for each channel.  What the
    strategy lists is none, nor that of a layer whose weight it shards: then they may be slices.

    Returns
    -------
    dict
        Name to the least value that it may have.
    """
    found: dict[str, float] = {}
    for name, meta in metas.items():
        layer, _, last = name.rpartition(".")
        pair = metas.get(_in(layer, PAIRS.get(last, "")))
        if pair is None or (meta.dtype, meta.shape) != (pair.dtype, pair.shape):
            continue
        names = {name, pair.name}
        is_told = names & sharding.layouts.keys() or any(
            math.prod(layout.parts) > 1
            for weight in WEIGHTS
            for layout in sharding.layouts.get(_in(layer, weight), ())
        )
        if meta.dtype in FLOATS and len(meta.shape) == 1 and not is_told:
            found |= {name: -math.inf, pair.name: 0.0}
    return found


def _in(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


Unlisted = Literal["rank", "first", "drop"]
Groups = tuple[tuple[int, ...], ...]  # ranks that hold the same, group by group
Differing = Mapping[Groups, Sequence[str]]  # the parameters that differ in each way

# What each rank saves of itself, and means nothing elsewhere: its number, in emergency saves.
# Source: MindSpore 2.10 train/callback/_train_fault_tolerance.py (_save_checkpoint_on_failure).
OF_ONE_RANK = frozenset({"cur_rank"})

CHOICES = (
    "--unlisted rank (each target rank takes that of source rank modulo source ranks), first "
    "(the lowest rank's for all) or drop"
)


def split_by_meaning(
    differing: Differing, own_names: Collection[str] = OF_ONE_RANK
) -> tuple[Differing, Differing]:
    """What differs between ranks by its meaning, and all else."""
    own: dict[Groups, list[str]] = {}
    rest: dict[Groups, list[str]] = {}
    for groups, names in differing.items():
        for name in names:
            (own if name in own_names else rest).setdefault(groups, []).append(name)
    return own, rest


def questions(
    where: str | None,
    differing: Differing,
    total: int,
    alone: Mapping[str, PartlyHeld],
    may_add: bool = False,
    running: Collection[str] = (),
) -> list[str]:
    """What has to be asked: a problem for each way in which parameters differ.

    Parameters
    ----------
    where
        What does not list them; None if every rank should hold everything: then there is one
        problem.
    differing
        Names by the way they differ.
    total
        Number of parameters in all.
    alone
        Names that one rank alone has, and what is said of them.
    may_add
        Whether a strategy by hand may be given as well.
    running
        Those that are running statistics; all of these make one problem.
    """
    apart, differing = split_by_meaning(differing, running)
    found = [_on_running(apart)] if apart else []
    if not differing:
        return found
    ask = "Say how slices are cut in a strategy by hand, given as well (-s MORE.yaml), or decide"
    ask = ask if may_add else "Decide"
    if where is not None:
        found += [
            f"{what} {ask} with {CHOICES}"
            for groups, names in differing.items()
            for what in _differences(where, groups, names, alone)
        ]
        return found
    number = sum(len(names) for names in differing.values())
    ways = shorten((f"{names[0]}: {_show(groups)}" for groups, names in differing.items()), 3)
    question = (
        f"not every rank holds everything: {number} of {count(total, 'parameter')} "
        f"differ{'s' if number == 1 else ''} between ranks ({ways}); if they are slices, give the "
        "strategy (-s STRATEGY); if a file is damaged, move it away; if each rank has its own, as "
        f"a random state is, decide with {CHOICES}"
    )
    return [*found, question]


def _on_running(apart: Differing) -> str:
    """Return the question that running statistics raise if they differ between ranks."""
    ranks = sorted({rank for groups in apart for group in groups for rank in group})
    names = [name for found in apart.values() for name in found]
    return (
        f"{say_running(names, ranks)}; --unlisted first takes rank {ranks[0]}'s for all, "
        "--unlisted rank gives each target rank its own, --unlisted drop leaves them out"
    )


def say_running(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Return what running statistics are, and that ranks differ in them."""
    verb = "differs" if len(names) == 1 else "differ"
    return (
        f"{format_ranks(ranks)}: {count(len(names), 'running statistic')} {verb} "
        f"({shorten(names, 3)}), as each device keeps its own in data parallel (BatchNorm)"
    )


def _differences(
    where: str, groups: Groups, names: Sequence[str], alone: Mapping[str, PartlyHeld]
) -> Iterator[str]:
    yield from (
        f"{one.text}: is the name damaged, or the file? Then move the file away."
        for one in dict.fromkeys(alone[name] for name in names if name in alone)
    )
    tensors = [name for name in names if map_of(name) is None and name not in alone]
    maps = dict.fromkeys(tag for name in names if (tag := map_of(name)) is not None)
    if tensors:
        yield (
            f"{shorten(tensors)}: not in {where}, and different between ranks "
            f"({_show(groups)}): slices that {where} omits, or does each rank have its own?"
        )
    if maps:
        held = f"on {_show(groups)} only"
        if len(groups) > 1:
            held = f"different between ranks ({_show(groups)})"
        yield (
            f"{shorten(maps)}: a map parameter (hash table), {held}: nothing says whose entries "
            "count, so they are not joined."
        )


def decision(
    names: Sequence[str], groups: Groups, unlisted: Unlisted, cycle: int, where: str
) -> Diagnostic:
    """What the user's decision makes of parameters that differ in one way.

    ``cycle`` is the number of source ranks for ``"rank"``.
    """
    lowest = min(rank for group in groups for rank in group)
    done = {
        "drop": "dropped",
        "first": f"taken from rank {lowest}",
        "rank": f"target rank r takes that of source rank r modulo {cycle}, and what no target "
        "rank takes is left out",
    }
    how = f"different between ranks ({_show(groups)})"
    how = f"on {_show(groups)} alone" if len(groups) == 1 else how
    text = f"{shorten(names)}: not in {where}, {how}: {done[unlisted]}"
    return Diagnostic("dropped" if unlisted == "drop" else "decided", text)


def _show(groups: Groups) -> str:
    shown = " | ".join(format_ranks(group) for group in groups[:8])
    return shown + (f" | and {len(groups) - 8} more" if len(groups) > 8 else "")


def layout_notes(
    found: Sequence[Source], corrected: Sequence[str], where: str
) -> Iterator[Diagnostic]:
    """Notes on sources whose layout is not as ``where``, the strategy, says.

    ``corrected`` are the names of those that are cut otherwise than it says.
    """
    following = [source for source in found if source.parameter is not None]
    if following:
        names = shorten(f"{source.meta.name} (as {source.parameter})" for source in following)
        states = count(len(following), "optimizer state")
        text = f"not in {where}, cut like the parameter: {states}"
        yield Diagnostic("follows", f"{text}: {names}")
    if corrected:
        cut = count(len(corrected), "parameter")
        text = f"not cut as the strategy says, but as slices and shapes tell: {cut}"
        yield Diagnostic("corrected", f"{text}: {shorten(corrected)}")
    shapes = {source.meta.name: source.meta.shape for source in found}
    odd = [words for source in found if (words := shape_difference_message(source.meta, shapes))]
    if odd:
        text = "states of other shapes than their parameters have; are they slices?"
        yield Diagnostic("doubt", f"{text}: {shorten(odd)}")


def on_guesses(
    found: Sequence[Source], listed: Collection[str], owners: ParameterOfState
) -> Iterator[Diagnostic]:
    """A warning of states that may be parameters: names and shapes alone speak for them.

    An optimizer keeps states of most parameters.  A prefix that is none of MindSpore's, and that
    less than half of the listed parameters have, may be that of a module.
    """
    most = Counter(name.removesuffix(base) for name, base in owners.items())
    parameters = sum(name not in owners for name in listed)
    names = [
        f"{source.meta.name} (as {source.parameter})"
        for source in found
        if source.parameter is not None
        and parameter_by_prefix(source.meta.name) is None
        and 2 * most[source.meta.name.removesuffix(owners[source.meta.name])] < parameters
    ]
    if names:
        text = f"taken for optimizer state by name and shape: {count(len(names), 'tensor')}"
        text += (
            f": {shorten(names)}; if it is none, say how it is cut in a strategy by hand, given "
        )
        text += "as well (-s MORE.yaml)"
        yield Diagnostic("guessed", text)


def on_contradictions(sharding: Sharding, found: Sequence[Source]) -> Iterator[Diagnostic]:
    """Problems of states that a person cut otherwise than the parameter, so that shapes differ."""
    by_hand = sharding.handwritten
    shapes = {source.meta.name: source.meta.shape for source in found}
    for meta in (source.meta for source in found):
        base = parameter_by_prefix(meta.name) or ""
        if (
            meta.name in by_hand
            and base in by_hand
            and shape_difference_message(meta, shapes) is not None
        ):
            text = (
                f"{meta.name}: {by_hand[meta.name]} makes it {meta.shape}, and {by_hand[base]} "
                f"makes {base} {shapes[base]}, of which it is state; correct one of them"
            )
            yield Diagnostic("shape", text, tensor=meta.name)


def find_contradictions(catalog: Catalog, sharding: Sharding) -> Iterator[Diagnostic]:
    """Yield what headers show to be wrong with the layouts that a strategy lists."""
    if isinstance(sharding, Strategy):
        yield from find_mismatched_states(catalog, sharding)
        yield from _find_other_stages(catalog, sharding)


def _find_other_stages(catalog: Catalog, strategy: Strategy) -> Iterator[Diagnostic]:
    """Yield the stages whose ranks hold more slices of other stages than of their own.

    Stages share a few parameters at most.  A strategy of two stages for ranks that all hold every
    layer would leave half of the files unread.
    """
    if strategy.stages == 1:
        return
    holders = catalog.holders
    for stage in range(strategy.stages):
        first = stage * strategy.stage_ranks
        ranks = range(first, first + strategy.stage_ranks)
        header = next((catalog.files[rank].header for rank in ranks if rank in catalog.files), {})
        own = sum(stage in strategy.stages_of(name) for name in header)
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
        if len(others) > own:
            yield Diagnostic(
                "contradicted",
                f"{format_ranks(ranks)} hold {count(len(others), 'parameter')} that the strategy "
                f"lists for other stages only, and {own} that it lists for theirs: "
                f"{shorten(others, 3)}; is it the strategy of this run?",
                "--trust-strategy skips this check",
                ("--trust-strategy",),
                ranks=tuple(ranks),
            )


def stray_notes(sharding: Sharding, holders: Mapping[str, Sequence[int]]) -> Iterator[Diagnostic]:
    """A note if ranks of a stage hold what the strategy lists for other stages only."""
    if not isinstance(sharding, Strategy) or sharding.stages == 1:
        return
    strays = [
        name
        for name, ranks in holders.items()
        if name in sharding.layouts
        if {rank // sharding.stage_ranks for rank in ranks if rank in sharding.ranks}
        - set(sharding.stages_of(name))
    ]
    if strays:
        text = "held by ranks of stages, too, that the strategy does not list them for, and not "
        text += f"read there: {count(len(strays), 'parameter')}: {shorten(strays)}"
        yield Diagnostic("skipped", text)
