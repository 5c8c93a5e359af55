"""What a run reads and writes, counted by walking its tasks; no file is opened.

The tasks are those of `schedule`, and `CountingFiles` decides on each read as a worker does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from ckpttool.execution.copy import CopyOptions, TensorUnit, read_tensor
from ckpttool.execution.schedule import Batch, schedule
from ckpttool.formats import header_of
from ckpttool.model.plan import OutputFile, Plan, Term
from ckpttool.model.tensors import FileIndex, Reads, StoredFile
from ckpttool.records import record, replace
from ckpttool.storage.counting import CountingFiles, Origin
from ckpttool.storage.files import PARTIAL
from ckpttool.storage.numbers import Bytes

MAX_KNOWN = 10_000  # tensors whose counts are kept


@record
class Supply:
    """What target ranks need of the source.

    Attributes
    ----------
    ranks
        The target ranks.
    nbytes
        Source rank to the bytes that each of them needs.  Of a merged checkpoint, the number of the
        file.
    """

    ranks: tuple[int, ...]
    nbytes: Mapping[Origin, int]

    @property
    def needs(self) -> tuple[Need, ...]:
        """The source ranks that each of them needs, those of an input with equal bytes together."""
        ranks_of: dict[tuple[int, int], list[int]] = {}
        for (number, rank), nbytes in sorted(self.nbytes.items()):
            ranks_of.setdefault((number, nbytes), []).append(rank)
        return tuple(Need(tuple(ranks), *key) for key, ranks in ranks_of.items())

    @property
    def ranks_of_inputs(self) -> Mapping[int, tuple[int, ...]]:
        """The source ranks that each of them needs, by input."""
        found: dict[int, list[int]] = {}
        for number, rank in sorted(self.nbytes):
            found.setdefault(number, []).append(rank)
        return {number: tuple(ranks) for number, ranks in found.items()}


@record
class Need:
    """Source ranks of an input, by its number, and the bytes that are needed of each of them."""

    ranks: tuple[int, ...]
    input: int
    nbytes: int


@record
class Work:
    """What the tasks of a run do.

    Attributes
    ----------
    tasks
        Their number.
    reads
        What they read.
    over_read
        Bytes among these that no output needs: gaps between what it does need.
    written
        Bytes of tensors that they write.
    buffer_bytes
        The largest buffers of a task.
    sizes
        Rank to the size of its output.
    supplies
        What the outputs need of the source.
    """

    tasks: int
    reads: Reads
    over_read: int
    written: int
    buffer_bytes: int
    sizes: Mapping[int, int]
    supplies: tuple[Supply, ...]


@record
class _Counts:
    """What the tasks of a batch do; ``used`` has the bytes of each source rank, by output."""

    tasks: int
    reads: Reads
    needed: int
    written: int
    buffer_bytes: int
    used: tuple[Mapping[Origin, int], ...]


class _TensorCounts(NamedTuple):
    """The reads of the units of one tensor, what they leave in the scratch buffer, and its peak.

    ``used`` has the bytes of each source rank, by unit.
    """

    reads: Reads
    scratch_used: int
    scratch_peak: int
    used: tuple[Mapping[Origin, int], ...]


def survey(plan: Plan, ranks: Collection[int], options: CopyOptions, *, by_file: bool) -> Work:
    """Return what writing the outputs of ``ranks`` takes; the arguments are those of `schedule`."""
    alike = plan.limited_to(ranks).alike
    kind_of = {rank: kind for kind, of_kind in enumerate(alike) for rank in of_kind}
    sizes: dict[int, int] = {}
    known: dict[tuple[int, ...], _Counts] = {}
    tasks = written = over_read = buffer_bytes = 0
    reads, used = Reads(), [Counter[Origin]() for _ in alike]
    survey = _Survey(plan)
    for batch in schedule(plan, ranks, options, by_file=by_file):
        kinds = tuple(kind_of[output.rank] for output in batch.outputs)
        counts = known.get(kinds)
        if counts is None:
            indexes = [*map(_place, batch.outputs)]
            counts = known[kinds] = survey.count(batch, indexes)
            sizes |= {kind: one.nbytes for kind, one in zip(kinds, indexes, strict=True)}
            for kind, of_output in zip(kinds, counts.used, strict=True):
                used[kind] = Counter(of_output)
        tasks += counts.tasks
        reads += counts.reads
        written += counts.written
        buffer_bytes = max(buffer_bytes, counts.buffer_bytes)
        over_read += max(0, counts.reads.nbytes - counts.needed)
    return Work(
        tasks,
        reads,
        over_read,
        written,
        buffer_bytes,
        {rank: sizes[kind] for rank, kind in kind_of.items()},
        _join_alike(chain.from_iterable(map(partial(_supplies, plan), alike, used))),
    )


def _supplies(plan: Plan, ranks: tuple[int, ...], used: Mapping[Origin, int]) -> Iterator[Supply]:
    """Yield what alike outputs need; ``used`` has the bytes of source ranks for the first one."""
    if not plan.is_own:
        yield Supply(ranks, used)
        return
    for rank in ranks:  # each needs as much of its own rank as the first of its own
        yield Supply((rank,), {Origin(0, rank): sum(used.values())})


def _join_alike(supplies: Iterable[Supply]) -> tuple[Supply, ...]:
    """Return what outputs need, those that need the same of the same source ranks together."""
    ranks_of: dict[tuple[Need, ...], list[int]] = {}
    joined: dict[tuple[Need, ...], Supply] = {}
    for one in supplies:
        ranks_of.setdefault(one.needs, []).extend(one.ranks)
        joined[one.needs] = one
    return tuple(
        replace(one, ranks=tuple(sorted(ranks_of[needs]))) for needs, one in joined.items()
    )


def _place(output: OutputFile) -> FileIndex:
    """Return the header that the file of an output will have, under its temporary name."""
    return header_of(output).of_file(StoredFile(output.path + PARTIAL))


class _Survey:
    """The reads of tasks.  Layers of a model are alike, so the reads of one are those of all."""

    def __init__(self, plan: Plan) -> None:
        self._kinds = {id(one.terms): _kind(one.terms) for one in plan.transfers}
        self._known: dict[Hashable, _TensorCounts] = {}

    def _kind(self, terms: tuple[Term, ...]) -> Hashable:
        """Return the `_kind` of terms; those that an output has for itself are in no transfer."""
        known = self._kinds.get(id(terms))
        return _kind(terms) if known is None else known

    def count(self, batch: Batch, indexes: list[FileIndex]) -> _Counts:
        """Return what the tasks of a batch do."""
        number = {index.path: i for i, index in enumerate(indexes)}
        used = [Counter[Origin]() for _ in indexes]
        tasks = needed = written = buffer_bytes = 0
        reads = Reads()
        for task in batch.tasks(indexes):
            tasks += 1
            needed += task.needed_bytes
            written += task.nbytes
            buffer = np.empty(task.buffer_bytes, np.uint8)
            with CountingFiles(task.band_bytes) as files:
                for units in task.by_tensor():
                    of_tensor, of_units = self._count_tensor(units, files, buffer, task.band_bytes)
                    reads += of_tensor
                    for unit, of_unit in zip(units, of_units, strict=True):
                        used[number[unit.tensor.file.path]].update(of_unit)
                most = len(buffer) + files.scratch_peak + task.cast_bytes
                buffer_bytes = max(buffer_bytes, most)
        return _Counts(tasks, reads, needed, written, buffer_bytes, tuple(used))

    def _count_tensor(
        self, units: Sequence[TensorUnit], files: CountingFiles, buffer: Bytes, band_bytes: int
    ) -> tuple[Reads, tuple[Mapping[Origin, int], ...]]:
        """Return the reads of the units of one tensor, and the bytes of source ranks by unit."""
        key = (
            files.scratch_used,
            *(
                (self._kind(one.output.terms), one.output.region, one.region, one.dtype)
                for one in units
            ),
        )
        if key not in self._known:
            used = {id(unit): Counter[Origin]() for unit in units}
            for unit, _, _ in read_tensor(units, files, buffer, band_bytes):
                used[id(unit)] += files.take_used()
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = _TensorCounts(
                files.take_reads(), files.scratch_used, files.scratch_peak, tuple(used.values())
            )
        known = self._known[key]
        files.scratch_used = known.scratch_used
        files.scratch_peak = max(files.scratch_peak, known.scratch_peak)
        return known.reads, known.used


def _kind(terms: tuple[Term, ...]) -> Hashable:
    """Return a value that is equal for tensors of which equal regions take equal reads."""
    # A slice that no rank has is one that the outputs do not need; nothing reads it.
    slices = [
        next(iter(held.items()), None) for one in terms for held in one.source.slicing.replicas()
    ]
    there = [one for one in slices if one is not None]
    if any(len(one.extents) > 1 or one.file.cipher is not None for _, one in there):
        return id(terms)
    owners = tuple(one and (one[0], bool(one[1].extents)) for one in slices)
    return owners, tuple(
        (one.source.slicing.key, one.source.meta.dtype, one.input) for one in terms
    )
