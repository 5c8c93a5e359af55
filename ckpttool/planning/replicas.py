"""Compare the replicas of every slice, and the copies of a tensor in several files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from shlex import quote

from ckpttool.concurrency import OnProgress, wait_result
from ckpttool.model.catalog import Catalog
from ckpttool.model.names import parse_name
from ckpttool.model.plan import OutputTensor
from ckpttool.model.slicing import BoxSlicing, LayoutSlicing, Source
from ckpttool.model.strategy import Sharding, Strategy
from ckpttool.model.tensors import FileIndex, StoredTensor
from ckpttool.planning.sources import find_sources
from ckpttool.problems import Command, Diagnostic
from ckpttool.storage.compare import (
    CompareOptions,
    Index,
    TensorStats,
    compare_tensors,
)
from ckpttool.storage.sampling import Sample, digest, sample
from ckpttool.wording import count, format_difference, shorten

REMEDY = "move the file of the damaged rank away; `ckpttool help replica` explains"
_ONE_RUN = "files of one step, and the strategy of their run; `ckpttool help replica` explains"

# Parameters of MindFormers' MoE and attention in PyNative that every rank changes for itself, by
# the last component of their names.  ``expert_bias`` and ``tid2eid`` are saved in the same way, and
# are equal on all ranks.
_OWN_STATISTICS = frozenset(
    {"tokens_per_expert", "global_tokens_per_expert", "ga_steps", "max_logits_val"}
)
REPLICA_CODES = frozenset({"replica", "own_values"})  # of replicas that differ


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of a source, with all of its replicas.

    Attributes
    ----------
    source
        The full tensor.
    ranks
        The ranks that have the slice, ascending.
    tensors
        The stored tensor of each rank.
    """

    source: Source
    ranks: tuple[int, ...]
    tensors: tuple[StoredTensor, ...]

    @property
    def replicas(self) -> tuple[OutputTensor, ...]:
        """The replica of each rank, as `compare_tensors` reads it."""
        return tuple(map(OutputTensor.copy_of, self.tensors))

    def index_in_full(self, element: Index | None) -> Index | None:
        """Return the index of an element of the slice in the full tensor; None for None."""
        if element is None:
            return None
        slicing, origin = self.source.slicing, (0,) * len(self.source.meta.shape)
        bounds = slicing.bounds(self.ranks[0])  # a tensor may have thousands of other slices
        for _, tensor, in_slice, in_full in slicing.overlaps(bounds, origin):
            if tensor == self.tensors[0] and in_slice.contains(element):
                shift = zip(in_full.start, element, in_slice.start, strict=True)
                return tuple(start + i - a for start, i, a in shift)
        return None


def own_values_note(source: Source, facts: str, ranks: tuple[int, ...]) -> Diagnostic | None:
    """Return the diagnostic of replicas that differ by design; None if they must not differ."""
    if not isinstance(source.slicing, BoxSlicing):
        return None
    if parse_name(source.meta.name).last not in _OWN_STATISTICS:
        return None
    text = "every rank has values of its own, and those of the lowest rank are read"
    return Diagnostic("own_values", text, facts=facts, tensor=source.meta.name, ranks=ranks)


def slices_of(source: Source, *, is_of_one_rank: bool = False) -> Iterator[Slice]:
    """Yield all slices of a source; none of a text.

    A parameter without a layout is one slice.  Its replicas are the tensors of equal type and shape
    on all ranks, or only its own if ``is_of_one_rank``.
    """
    if source.meta.text is not None:
        return
    slicing = source.slicing
    slices = slicing.replicas()
    if isinstance(slicing, LayoutSlicing) and not (source.has_layout or is_of_one_rank):
        tensors = slicing.tensors.items()
        slices = iter([{rank: one for rank, one in tensors if one.meta == source.meta}])
    for replicas in slices:
        yield Slice(source, tuple(replicas), tuple(replicas.values()))


def compare_replicas(
    slices: Iterable[Slice],
    executor: Executor,
    options: CompareOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Slice, TensorStats]]:
    """Read every replica of every slice once, and compare them; see `compare_tensors`."""
    subjects = ((one, one.replicas) for one in slices)
    yield from compare_tensors(subjects, executor, options, on_progress)


def replica_problems(
    catalog: Catalog,
    sharding: Sharding,
    sources: Sequence[Source],
    executor: Executor,
    on_progress: OnProgress = lambda nbytes: None,
) -> list[Diagnostic]:
    """Return a problem for each slice whose replicas differ, and for each stage that differs.

    Parameters
    ----------
    catalog, sharding, sources
        The checkpoint, its sharding, and the full tensors to check.
    executor, on_progress
        Reads the slices, and is called with the bytes that were read since the last call.
    """
    replicated = (
        one
        for source in sources
        if source.has_layout
        for one in slices_of(source)
        if len(one.ranks) > 1
    )
    found = [
        problem
        for one, stats in compare_replicas(replicated, executor, None, on_progress)
        if (problem := find_difference(one, stats)) is not None
    ]
    found += compare_stages(catalog, sharding, sources, executor, on_progress)
    return found


def compare_copies(
    catalog: Catalog, executor: Executor, command: Command, by_samples: bool
) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each file with copies of tensors that the index names elsewhere.

    Parameters
    ----------
    catalog
        The checkpoint.
    executor
        Reads the copies, and the tensors that the index names.
    command
        The command; a conversion itself writes one copy of each.
    by_samples
        Whether to read some pages of each tensor; all bytes otherwise.
    """

    def hashed(tensor: StoredTensor) -> Future[Sample]:
        is_small = by_samples or tensor.meta.text is not None
        return executor.submit(sample if is_small else digest, tensor)

    named = {
        name: (tensor, hashed(tensor))
        for file in catalog.files.values()
        for name, tensor in file.tensors.items()
        if name in catalog.copies
    }
    equal: dict[str, list[StoredTensor]] = {}
    differing: dict[str, list[StoredTensor]] = {}
    for name, copies in catalog.copies.items():
        tensor, found = named[name]
        for copy in copies:
            is_equal = copy.meta == tensor.meta and wait_result(hashed(copy)) == wait_result(found)
            (equal if is_equal else differing).setdefault(copy.file.path, []).append(tensor)
    hint = f"ckpttool merge {quote(catalog.root)} -o NEW --max-shard-size 10GB"
    for path, tensors in differing.items():
        text = "other copies of tensors that the index names in another file: ignored"
        facts = _format_copies(tensors)
        shown = "" if command == "convert" else hint
        yield Diagnostic("overlay", text, hint=shown, facts=facts, path=path, where=path)
    for path, tensors in equal.items():
        text = "equal copies of tensors that the index names in another file: ignored"
        yield Diagnostic("skipped", text, facts=_format_copies(tensors), where=path)


def _format_copies(tensors: Sequence[StoredTensor]) -> str:
    """Return how many tensors there are, and the names of some and of the files that are read."""
    names = shorten((one.meta.name for one in tensors), 3)
    files = shorten(sorted({one.file.path for one in tensors}), 3)
    return f"{count(len(tensors), 'tensor')} ({names}), read from {files}"


def compare_stages(
    catalog: Catalog,
    sharding: Sharding,
    sources: Iterable[Source],
    executor: Executor,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[Diagnostic]:
    """Yield a problem for each parameter that differs between stages."""
    pairs = (
        ((source, other), (OutputTensor.full(source), OutputTensor.full(other)))
        for source, other in stage_pairs(catalog, sharding, sources)
        if source.meta == other.meta
    )
    for (source, other), stats in compare_tensors(pairs, executor, None, on_progress):
        (difference,) = stats.differences
        if difference.count:
            name, total = source.meta.name, math.prod(source.meta.shape)
            ranks = source.layout.ranks, other.layout.ranks
            elements = f"{difference.count} of {count(total, 'element')}"
            yield Diagnostic(
                "replica",
                "stages differ",
                hint=REMEDY,
                facts=f"{elements}; {format_difference(ranks)}; first at {difference.first}",
                tensor=name,
                ranks=(*ranks[0], *ranks[1]),
                count=difference.count,
                first=difference.first,
            )


def stage_pairs(
    catalog: Catalog, sharding: Sharding, sources: Iterable[Source]
) -> Iterator[tuple[Source, Source]]:
    """Yield a source with that of each other stage, for parameters that several stages hold."""
    if not isinstance(sharding, Strategy):
        return
    by_name = {source.meta.name: source for source in sources if source.is_listed}
    most = max((len(layouts) for layouts in sharding.layouts.values()), default=0)
    for k in range(most):
        layouts = {
            name: (of_stages[k],)
            for name, of_stages in sharding.layouts.items()
            if k < len(of_stages) > 1
            and name in by_name
            and of_stages[k].ranks != by_name[name].layout.ranks
        }
        if layouts:
            ranks = {rank for (layout,) in layouts.values() for rank in layout.ranks}
            files = {
                rank: _select_tensors(file, layouts)
                for rank, file in catalog.files.items()
                if rank in ranks
            }
            stage = Catalog(catalog.root, files)
            of_stage = find_sources(stage, replace(sharding, layouts=layouts), {}, "first")
            for source in of_stage.found:
                yield by_name[source.meta.name], source


def _select_tensors(file: FileIndex, names: Iterable[str]) -> FileIndex:
    """Return a file with only the tensors ``names``, as far as it has them."""
    return replace(
        file, tensors={name: file.tensors[name] for name in names if name in file.tensors}
    )


def find_difference(
    one: Slice, stats: TensorStats, code: str = "replica", claim: str = "replicas differ"
) -> Diagnostic | None:
    """Return a problem with the groups of ranks that hold equal bytes; None for a single group.

    The facts name all groups, since contents do not show which is right; for `Diagnostic.ranks`
    see `odd_ranks`.  Where no group is the largest and most elements differ, no rank is damaged:
    the groups hold different slices, or replicas of different steps.  Values that every rank has
    for itself are no problem, and have another code.
    """
    groups: dict[bytes, list[int]] = {b"": [one.ranks[0]]}
    others = list(zip(one.ranks[1:], stats.differences, strict=True))
    for rank, difference in others:
        groups.setdefault(difference.content or bytes(difference.differs), []).append(rank)
    if len(groups) == 1:
        return None
    number = max(difference.count for _, difference in others)
    first = one.index_in_full(min(d.first for _, d in others if d.first is not None))
    name, full, shape = one.source.meta.name, one.source.meta.shape, one.tensors[0].meta.shape
    in_full = f" of {full}" if shape != full else ""
    elements = f"{'up to ' if len(groups) > 2 else ''}{number} of "
    elements += count(math.prod(shape), "element") + (" of the slice" if shape != full else "")
    facts = f"{elements}; {format_difference(tuple(groups.values()))}; first at {first}{in_full}"
    ranks = odd_ranks(tuple(groups.values()))
    if (by_design := own_values_note(one.source, facts, ranks)) is not None:
        return replace(by_design, count=number, first=first)
    hint = REMEDY if code == "replica" else f"`ckpttool help {code}`"
    if code == "replica" and ranks == one.ranks and 2 * number > math.prod(shape):
        hint = _ONE_RUN
    return Diagnostic(
        code, claim, hint=hint, facts=facts, tensor=name, ranks=ranks, count=number, first=first
    )


def odd_ranks(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the largest group, or all ranks if several groups are largest."""
    by_size = sorted(groups, key=len)
    others = by_size[:-1] if len(by_size[-2]) < len(by_size[-1]) else by_size
    return tuple(sorted(rank for group in others for rank in group))
