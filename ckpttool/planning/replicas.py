"""Replicas held against each other, byte for byte: of every slice what each of its owners has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from ckpttool.model.catalog import Catalog, RankCatalog
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.plan import OutputTensor
from ckpttool.model.region import Region
from ckpttool.model.slicing import LayoutSlicing, Source
from ckpttool.model.strategy import Sharding, Strategy
from ckpttool.model.tensors import FileIndex, StoredTensor
from ckpttool.model.wording import count, format_ranks
from ckpttool.planning.sources import find_sources
from ckpttool.storage.compare import (
    CompareOptions,
    Index,
    TensorStats,
    compare_tensors,
)

REMEDY = "is one rank's file damaged? move it away, and its replicas are read"
MOST_PROBLEMS = 20  # of an error; a strategy that is not the right one makes as many as tensors


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of a source.

    Attributes
    ----------
    source
        The full tensor.
    ranks
        Those that have the slice, ascending.
    tensors
        What each of them has.
    """

    source: Source
    ranks: tuple[int, ...]
    tensors: tuple[StoredTensor, ...]

    @property
    def readings(self) -> tuple[OutputTensor, ...]:
        """The slice of each rank, as `compare_tensors` reads it; the lowest rank comes first."""
        return tuple(map(OutputTensor.copy_of, self.tensors))

    def place(self, element: Index | None) -> Index | None:
        """Index in the full tensor of an element of the slice."""
        if element is None:
            return None
        origin = (0,) * len(self.source.meta.shape)
        for tensor, in_slice, in_full in self.source.slicing.overlaps(self._surroundings, origin):
            if tensor == self.tensors[0] and in_slice.contains(element):
                shift = zip(in_full.start, element, in_slice.start, strict=True)
                return tuple(start + i - a for start, i, a in shift)
        return None

    @property
    def _surroundings(self) -> Region:
        """A region of the full tensor that contains the slice, as small as is known.

        Going through all slices for each of them would take too long where there are thousands.
        """
        return self.source.slicing.bounds(self.ranks[0])


def slices_of(source: Source, *, is_apart: bool = False) -> Iterator[Slice]:
    """Yield all slices of a source; none of a text.

    A parameter without a layout is one slice.  All ranks that have it in the same type and shape
    hold a replica of it, unless ``is_apart`` says that it is one rank's alone.
    """
    if source.meta.text is not None:
        return
    slicing = source.slicing
    held = slicing.replicas()
    if isinstance(slicing, LayoutSlicing) and not (source.has_layout or is_apart):
        ranks = slicing.tensors.items()
        held = iter([{rank: one for rank, one in ranks if one.meta == source.meta}])
    for replicas in held:
        yield Slice(source, tuple(replicas), tuple(replicas.values()))


def examine_slices(
    slices: Iterable[Slice],
    executor: Executor,
    options: CompareOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Slice, TensorStats]]:
    """Read every replica of every slice, once; see `compare_tensors`."""
    pairs = ((one, one.readings) for one in slices)
    yield from compare_tensors(pairs, executor, options, on_progress)


def replica_problems(
    catalog: Catalog, sharding: Sharding, sources: Sequence[Source], executor: Executor
) -> list[str]:
    """A message for every slice whose replicas differ, or for the first of very many.

    Parameters
    ----------
    catalog, sharding, sources
        What is on disk, how it is sharded, and what follows.
    executor
        Does the reading.
    """
    compared = (
        one
        for source in sources
        if source.has_layout
        for one in slices_of(source)
        if len(one.ranks) > 1
    )
    found = [
        finding.text
        for one, facts in examine_slices(compared, executor)
        if (finding := find_difference(one, facts)) is not None
    ]
    if found:
        found[0] += f"; {REMEDY}"
    found += [finding.text for finding in compare_stages(catalog, sharding, sources, executor)]
    if len(found) > MOST_PROBLEMS:
        more = len(found) - MOST_PROBLEMS
        found[MOST_PROBLEMS:] = [f"and {count(more, 'more slice')} whose replicas differ"]
    return found


def compare_stages(
    catalog: Catalog,
    sharding: Sharding,
    found: Iterable[Source],
    executor: Executor,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[Diagnostic]:
    """Parameters that several stages hold, and do not agree on."""
    pairs = (
        ((mine, other), (OutputTensor.full(mine), OutputTensor.full(other)))
        for mine, other in other_stages(catalog, sharding, found)
        if mine.meta == other.meta
    )
    for (mine, other), facts in compare_tensors(pairs, executor, None, on_progress):
        (difference,) = facts.differences
        if difference.count:
            name, total = mine.meta.name, math.prod(mine.meta.shape)
            ranks = mine.layout.ranks, other.layout.ranks
            text = (
                f"{name}: the stages of {format_ranks(ranks[0])} and {format_ranks(ranks[1])} "
                f"differ in {difference.count} of {count(total, 'element')}, "
                f"first at {difference.first}"
            )
            yield Diagnostic(
                "replica",
                text,
                tensor=name,
                ranks=(*ranks[0], *ranks[1]),
                count=difference.count,
                first=difference.first,
            )


def other_stages(
    catalog: Catalog, sharding: Sharding, found: Iterable[Source]
) -> Iterator[tuple[Source, Source]]:
    """Of parameters that several stages hold, the source, and that of each other stage."""
    if not isinstance(sharding, Strategy):
        return
    sources = {source.meta.name: source for source in found if source.is_listed}
    most = max((len(layouts) for layouts in sharding.layouts.values()), default=0)
    for k in range(most):
        layouts = {
            name: (of_stages[k],)
            for name, of_stages in sharding.layouts.items()
            if k < len(of_stages) > 1
            and name in sources
            and of_stages[k].ranks != sources[name].layout.ranks
        }
        if layouts:
            ranks = {rank for (layout,) in layouts.values() for rank in layout.ranks}
            files = {
                rank: _only(file, layouts) for rank, file in catalog.files.items() if rank in ranks
            }
            stage = RankCatalog(catalog.root, files)
            of_stage = find_sources(stage, replace(sharding, layouts=layouts), {}, "first")
            for source in of_stage.found:
                yield sources[source.meta.name], source


def _only(file: FileIndex, names: Iterable[str]) -> FileIndex:
    return replace(
        file, tensors={name: file.tensors[name] for name in names if name in file.tensors}
    )


def find_difference(
    one: Slice, facts: TensorStats, what: str = "replicas differ"
) -> Diagnostic | None:
    """Which ranks hold other bytes than the rest, or None if all hold the same.

    Which of them is right no value tells, so all sides are shown; the few are ``Diagnostic.ranks``.
    """
    groups: dict[bytes, list[int]] = {b"": [one.ranks[0]]}
    others = list(zip(one.ranks[1:], facts.differences, strict=True))
    for rank, difference in others:
        groups.setdefault(difference.content or bytes(difference.differs), []).append(rank)
    if len(groups) == 1:
        return None
    largest = max(len(ranks) for ranks in groups.values())
    few = sorted(rank for ranks in groups.values() if len(ranks) < largest for rank in ranks)
    number = max(difference.count for _, difference in others)
    first = one.place(min(d.first for _, d in others if d.first is not None))
    name, full, shape = one.source.meta.name, one.source.meta.shape, one.tensors[0].meta.shape
    of_slice, in_full = (
        (" of the slice", f" of the full tensor {full}") if shape != full else ("", "")
    )
    text = (
        f"{name}: {what} ({' | '.join(map(format_ranks, groups.values()))}) in "
        f"{'up to ' if len(groups) > 2 else ''}{number} of {count(math.prod(shape), 'element')}"
        f"{of_slice}, first at {first}{in_full}"
    )
    ranks = tuple(few if sum(len(r) == largest for r in groups.values()) == 1 else one.ranks)
    return Diagnostic("replica", text, tensor=name, ranks=ranks, count=number, first=first)
