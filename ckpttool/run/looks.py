"""Which tensors are looked at, and how closely, to see whether the strategy belongs to the files.

Of each kind of layout the largest tensors, some pages of every rank's slice; of every other tensor
that has replicas those of the first and the last owner of one slice, which differ whatever hides
there: six reads of a page for each tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from ckpttool.formats.stopping import result_of
from ckpttool.model.catalog import StoredTensor
from ckpttool.model.slices import group_ranks
from ckpttool.model.source import Source
from ckpttool.model.strategy import GRADIENTS, parameter_of
from ckpttool.storage.digest import Sample, take_samples

TENSORS_PER_LAYOUT = 3

Held = Sequence[Mapping[int, StoredTensor]]  # of each slice, what each rank has


@dataclass(frozen=True, slots=True)
class Looked:
    """A source with the samples of its slices, by slice and rank; one slice of it if a probe."""

    source: Source
    held: Held
    samples: Sequence[Mapping[int, Sample]]
    is_probe: bool

    @property
    def differing(self) -> tuple[int, ...]:
        """Ranks that should hold the same slice and do not; none if all agree."""
        return next((tuple(slice_) for slice_, _ in self._differing()), ())

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Of the ranks of `differing` that were looked at those that hold the same."""
        samples = next(samples for _, samples in self._differing())
        return tuple(group_ranks(tuple(samples), samples.__getitem__).values())

    def _differing(self) -> Iterator[tuple[Mapping[int, StoredTensor], Mapping[int, Sample]]]:
        for slice_, samples in zip(self.held, self.samples, strict=True):
            if len(set(samples.values())) > 1:
                yield slice_, samples


def look(sources: Iterable[Source], by_hand: Mapping[str, str], executor: Executor) -> list[Looked]:
    """Samples of all tensors that may tell something; every file is opened once."""
    chosen, others = _choose(sources, by_hand)
    held: list[Held] = [list(source.slicing.replicas()) for source in chosen]
    wanted: list[Held] = [*held]
    for source in others:
        slices = list(source.slicing.replicas())
        best = max(slices, key=len)  # the first of the largest
        held.append([best])
        wanted.append([_first_and_last(source, best)])
    samples = _sample((one for of in wanted for ranks in of for one in ranks.values()), executor)
    return [
        Looked(
            source,
            slices,
            [{rank: samples[one] for rank, one in ranks.items()} for ranks in seen],
            is_probe=i >= len(chosen),
        )
        for i, (source, slices, seen) in enumerate(
            zip([*chosen, *others], held, wanted, strict=True)
        )
    ]


def _choose(
    sources: Iterable[Source], by_hand: Mapping[str, str]
) -> tuple[list[Source], list[Source]]:
    """The tensors to be looked at closely, and the others that have replicas.

    Closely: of each layout the tensors with the largest slices; small ones are often cut otherwise.
    And all of those by hand: a pattern matches more than one thinks.
    """
    by_layout: dict[Hashable, list[Source]] = defaultdict(list)
    chosen = []
    for source in sources:
        if not source.meta.nbytes:
            continue
        if source.meta.name in by_hand:
            chosen.append(source)
        elif source.has_layout:
            by_layout[source.slicing.distribution_key].append(source)
    others: list[Source] = []
    for group in by_layout.values():
        group.sort(key=_suitability)
        chosen += group[:TENSORS_PER_LAYOUT]
        others += [
            source
            for source in group[TENSORS_PER_LAYOUT:]
            if not source.meta.name.startswith(GRADIENTS) and _has_replicas(source)
        ]
    return chosen, others


def _suitability(source: Source) -> tuple[bool, int]:
    """Parameters before states, some of which are each rank's own sums; large before small."""
    return parameter_of(source.meta.name) is not None, -source.meta.nbytes


def _has_replicas(source: Source) -> bool:
    return any(len(ranks) > 1 for ranks in source.slicing.owners())


def _first_and_last(source: Source, ranks: Mapping[int, StoredTensor]) -> dict[int, StoredTensor]:
    """The first and the last owner of a slice; all, if some are missing: what is left may agree.

    Of the replicas at positions 0 to ``n - 1`` the first and the last hold different slices of any
    optimizer shard, since what divides ``n`` does not divide ``n - 1``.
    """
    if len(ranks) < max(map(len, source.slicing.owners())):
        return dict(ranks)
    return {rank: ranks[rank] for rank in (min(ranks), max(ranks))}


def _sample(tensors: Iterable[StoredTensor], executor: Executor) -> Mapping[StoredTensor, Sample]:
    """A sample of each tensor; every file is opened once."""
    by_path: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in dict.fromkeys(tensors):
        by_path[tensor.file.path].append(tensor)
    futures = [(wanted, executor.submit(take_samples, wanted)) for wanted in by_path.values()]
    taken: dict[StoredTensor, Sample] = {}
    for wanted, future in futures:
        samples = result_of(future)
        taken.update(zip(wanted, samples, strict=True))
    return taken
