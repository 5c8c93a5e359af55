"""Finds optimizer shards that the strategy hides, from replicas that are none.

Saved with ``optimizer_weight_shard_aggregated_save`` the slices are cut by the optimizer shard, and
the strategy says 0.  Of the ranks that should hold equal slices, those at positions ``p`` and
``p + s`` of the replica group do if the shard is ``s``, and all others differ.  A tensor whose
elements are all the same tells nothing, but it has as many rows as its parameter or its states,
which may tell.

Two ranks that differ may as well be replicas of which one is stale.  That is no guess to be made:
only three slices that all differ, or a shard whose slices come again, are proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from ckpttool.model.layout import Layout
from ckpttool.model.notes import Note
from ckpttool.model.reduced import reduced_from
from ckpttool.model.source import Source
from ckpttool.model.strategy import Strategy, count, parameter_of, shorten
from ckpttool.storage.digest import Sample, digest

BUFFER_BYTES = 4 << 20  # held by each worker


@dataclass(frozen=True, slots=True)
class Shards:
    """What the contents say: the corrected strategy, a note, and what they do not tell."""

    strategy: Strategy
    notes: tuple[Note, ...]
    problems: tuple[str, ...]


def find_shards(
    strategy: Strategy, sources: Iterable[Source], executor: Executor, default: int | None
) -> Shards | None:
    """The strategy, with the optimizer shards that replicas show; None if that explains nothing.

    Parameters
    ----------
    strategy
        Of the source.
    sources
        As the strategy has them; every replica of those without an optimizer shard is read, once.
        What a person wrote by hand is not corrected.
    executor
        Does the reading.
    default
        The shard of tensors of which nothing tells; None makes them a problem.  It also says that
        there is a shard, where the contents are no proof.
    """
    listed = [
        source
        for source in sources
        if _can_be_cut(source) and source.meta.name not in strategy.by_hand
    ]
    contents = _read(listed, executor)
    found = [
        smallest_shard(source.layout, held) for source, held in zip(listed, contents, strict=True)
    ]
    is_proven = default is not None or any(
        shard is not None and shard > 1 and (shard > 2 or source.layout.replicas > shard)
        for source, shard in zip(listed, found, strict=True)
    )
    if 0 in found or not is_proven:
        return None
    shards = {
        source.meta.name: shard
        for source, shard in zip(listed, found, strict=True)
        if shard is not None
    }
    unclear = _settle_constants(listed, shards, default)
    if _contradictions(listed, shards):
        return None
    cut = {name: shard for name, shard in shards.items() if shard > 1}
    layouts = {
        name: tuple(replace(layout, optimizer_shard=cut.get(name, 1)) for layout in of_stages)
        if name in cut
        else of_stages
        for name, of_stages in strategy.layouts.items()
    }
    return Shards(replace(strategy, layouts=layouts), _notes(cut), _problems(unclear))


def smallest_shard(layout: Layout, contents: Mapping[int, Sample]) -> int | None:
    """The optimizer shard that these contents of ranks show.

    None if any may be, all elements being the same; 0 if there is none that explains them: some
    slices are equal that would have to differ.
    """
    for shard in range(1, layout.replicas + 1):
        if layout.replicas % shard:
            continue
        cut = replace(layout, optimizer_shard=shard)
        slices: dict[tuple[int, ...], list[Sample]] = {}  # by the slice that the shard cuts
        is_consistent = True
        for index in cut.slice_indices():
            held = {contents[rank] for rank in cut.owners(index) if rank in contents}
            is_consistent = is_consistent and len(held) <= 1
            slices.setdefault((index[0] // shard, *index[1:]), []).extend(held)
        if is_consistent:
            break
    if shard == 1 and all(sample.is_constant for sample in contents.values()):
        return None
    telling = [[one for one in samples if not one.is_constant] for samples in slices.values()]
    return shard if all(len(set(samples)) == len(samples) for samples in telling) else 0


def _settle_constants(
    listed: Sequence[Source], shards: dict[str, int], default: int | None
) -> list[Source]:
    """Add the shards of tensors that tell nothing themselves; the sources that stay unclear."""
    rows = _rows(listed, shards)
    unclear = []
    for source in listed:
        name = source.meta.name
        if name in shards:
            continue
        known = _rows_of_relatives(name, rows)
        shard = default if known is None else known // source.meta.shape[0]
        if shard is None or shard < 1 or source.layout.replicas % shard:
            unclear.append(source)
        else:
            shards[name] = shard
    return unclear


def _contradictions(listed: Sequence[Source], shards: Mapping[str, int]) -> list[str]:
    """States that would have other rows than their parameter."""
    rows = _rows(listed, shards)
    return [
        name for name, n in rows.items() if rows.get(parameter_of(name) or name) not in (n, None)
    ]


def _rows(listed: Sequence[Source], shards: Mapping[str, int]) -> dict[str, int]:
    return {
        source.meta.name: source.meta.shape[0] * shards[source.meta.name]
        for source in listed
        if source.meta.name in shards
    }


def _can_be_cut(source: Source) -> bool:
    layout, shape = source.layout, source.meta.shape
    is_cut = layout.optimizer_shard > 1 or layout.rows or layout.fields > 1
    if reduced_from(source.meta.name) is not None:
        return False  # it is cut like its parameter
    return (
        source.is_listed and not is_cut and layout.replicas > 1 and bool(shape) and 0 not in shape
    )


def _read(sources: Sequence[Source], executor: Executor) -> list[dict[int, Sample]]:
    """What each rank holds of each source."""
    futures = [
        {
            rank: executor.submit(digest, file.tensors[name], BUFFER_BYTES)
            for rank, file in source.catalog.files.items()
            if rank in source.layout.ranks and (name := source.meta.name) in file.tensors
        }
        for source in sources
    ]
    return [{rank: future.result() for rank, future in of.items()} for of in futures]


def _rows_of_relatives(name: str, rows: Mapping[str, int]) -> int | None:
    """Rows of the parameter that ``name`` is state of, or of other states of the same parameter."""
    base = parameter_of(name) or name
    if base in rows:
        return rows[base]
    return next((rows[other] for other in rows if parameter_of(other) == base), None)


def _notes(cut: Mapping[str, int]) -> tuple[Note, ...]:
    if not cut:
        return ()
    ways = ", ".join(str(shard) for shard in sorted(set(cut.values())))
    text = f"cut by an optimizer shard ({ways}) that the strategy does not list, as replicas that "
    text += f"differ tell: {count(len(cut), 'parameter')}: {shorten(cut)}"
    return (Note("corrected", text),)


def _problems(unclear: Sequence[Source]) -> tuple[str, ...]:
    if not unclear:
        return ()
    first = unclear[0]
    ways = [n for n in range(1, first.layout.replicas + 1) if first.layout.replicas % n == 0]
    named = shorten(source.meta.name for source in unclear)
    return (
        f"{named}: the other parameters are cut by an optimizer shard that the strategy does not "
        f"list, and all elements of these are equal, which fits several ways ({first.meta.name}: "
        f"full shape "
        + " or ".join(str((first.meta.shape[0] * n, *first.meta.shape[1:])) for n in ways)
        + "); decide with --optimizer-shard N, 1 for whole",
    )
