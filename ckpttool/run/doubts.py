"""Does the strategy belong to these files?  A few samples of what it says tell.

A strategy file holds no shapes, and MindSpore's is not always true: saved with
``optimizer_weight_shard_aggregated_save`` the slices are smaller than it says, and headers alone
cannot show it.  But then ranks that should hold equal slices hold different ones.  So of each kind
of layout the largest tensors are looked at, some pages of every rank's slice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace

from ckpttool.model.catalog import Catalog, StoredTensor, format_ranks
from ckpttool.model.layout import Layout
from ckpttool.model.notes import Note
from ckpttool.model.source import Source
from ckpttool.model.strategy import parameter_of, shorten
from ckpttool.storage.digest import Sample, take_samples

TENSORS_PER_LAYOUT = 3


def find_doubts(
    catalog: Catalog, sources: Iterable[Source], executor: Executor, by_hand: Mapping[str, str]
) -> tuple[list[str], list[Note]]:
    """Problems and notes about layouts that the contents contradict.

    Replicas that differ are a problem: one of them would be taken, and nobody knows which.  So are
    slices of an optimizer shard that are replicas: the full tensor would be too large.  Slices of
    all ranks that should differ and are all the same are a note: that may be by chance.

    ``by_hand`` has the names whose layouts a person wrote, and where.  All of them are looked at.
    """
    chosen = _choose(sources, by_hand)
    held = [list(source.replicas()) for source in chosen]
    samples = _sample(
        (one for slices in held for ranks in slices for one in ranks.values()), executor
    )
    differing: dict[tuple[str | None, tuple[int, ...]], list[str]] = defaultdict(list)
    alike: list[str] = []
    distinct = 0
    whole: list[str] = []
    for source, slices in zip(chosen, held, strict=True):
        name = source.meta.name
        for ranks in slices:
            if len({samples[tensor] for tensor in ranks.values()}) > 1:
                place = by_hand.get(name) or by_hand.get(source.follows or "")
                differing[place, tuple(ranks)].append(name)
                break
        by_rank = {rank: samples[one] for ranks in slices for rank, one in ranks.items()}
        if _is_whole(source.layout, by_rank):
            whole.append(name)
        if len(slices) > 1:
            mine = set(by_rank.values())
            if len(mine) == 1 and (name in by_hand or not next(iter(mine)).is_constant):
                alike.append(name)
            distinct += len(mine) > 1
    problems = [
        f"{shorten(names)}: {place or _told_by(catalog)} says that {format_ranks(owners)} hold the "
        f"same, and they differ: {_remedy(catalog, place)}"
        for (place, owners), names in differing.items()
    ]
    if catalog.description is not None:
        return problems, []
    if whole:
        problems.append(
            f"{shorten(whole)}: the strategy says that an optimizer shard cuts them, and the ranks "
            "that should hold different slices hold the same: is it the strategy of this run? "
            "--trust-strategy believes it all the same"
        )
    return problems, _notes(alike, distinct, by_hand)


def _is_whole(layout: Layout, held: Mapping[int, Sample]) -> bool:
    """Whether an optimizer shard is claimed, and all that it should tell apart is the same.

    Tensors whose elements are all equal tell nothing, nor do slices of which others are missing.
    """
    if layout.optimizer_shard == 1 or len(held) < len(layout.ranks):
        return False
    bare = replace(layout, optimizer_shard=1)
    groups = [{held[rank] for rank in bare.owners(index)} for index in bare.slice_indices()]
    return all(len(samples) == 1 for samples in groups) and not any(
        sample.is_constant for samples in groups for sample in samples
    )


def _notes(alike: list[str], distinct: int, by_hand: Mapping[str, str]) -> list[Note]:
    """What is said of tensors of which all ranks hold the same where they are cut."""
    notes = []
    said = [name for name in alike if name in by_hand]
    if said:
        named = shorten(f"{name} ({by_hand[name]})" for name in said)
        text = f"cut by hand, and all ranks hold the same; are they replicated?: {named}"
        notes.append(Note("doubt", text))
    elif len(alike) > distinct:
        text = "all ranks hold the same where the strategy cuts; if they hold everything "
        text += f"(integrated_save=True) use --replicated: {shorten(alike)}"
        notes.append(Note("doubt", text))
    return notes


def _told_by(catalog: Catalog) -> str:
    description = catalog.description
    return "the strategy" if description is None else shorten(description.files, 2)


def _remedy(catalog: Catalog, place: str | None) -> str:
    if place is not None:
        return "correct it, or take the lowest rank's with --trust-strategy"
    if catalog.description is not None:
        return (
            "are they of one step? merge and reshard take the lowest rank's with --trust-strategy"
        )
    return (
        "is it the strategy of this run, are they of one step, or does each rank have its own? "
        "--trust-strategy takes the lowest rank's; if they are slices, saved with "
        "optimizer_weight_shard_aggregated_save, say so with --optimizer-shard N"
    )


def _choose(sources: Iterable[Source], by_hand: Mapping[str, str]) -> list[Source]:
    """Of each layout the tensors with the largest slices; small ones are often cut otherwise.

    All of those by hand: a pattern matches more than one thinks.
    """
    by_layout: dict[Hashable, list[Source]] = defaultdict(list)
    chosen = []
    for source in sources:
        if not source.meta.nbytes:
            continue
        if source.meta.name in by_hand:
            chosen.append(source)
        elif source.is_listed or source.follows is not None:
            by_layout[source.sharing].append(source)
    for group in by_layout.values():
        chosen += sorted(group, key=_suitability)[:TENSORS_PER_LAYOUT]
    return chosen


def _suitability(source: Source) -> tuple[bool, int]:
    """Parameters before states, some of which are each rank's own sums; large before small."""
    return parameter_of(source.meta.name) is not None, -source.meta.nbytes


def _sample(tensors: Iterable[StoredTensor], executor: Executor) -> Mapping[StoredTensor, Sample]:
    """A sample of each tensor; every file is opened once."""
    by_path: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in dict.fromkeys(tensors):
        by_path[tensor.path].append(tensor)
    futures = [(wanted, executor.submit(take_samples, wanted)) for wanted in by_path.values()]
    return {
        tensor: sample
        for wanted, future in futures
        for tensor, sample in zip(wanted, future.result(), strict=True)
    }
