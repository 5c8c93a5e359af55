"""The reads and writes of a run, counted by walking its tasks; no file is opened.

The tasks are those of a run, and `CountingFiles` decides on each read as a worker does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import sub
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpttool.execution.copy import CopyOptions, Place, TensorUnit, read_tensor
from ckpttool.execution.schedule import Batch, ranks_of_batches
from ckpttool.formats import header_of
from ckpttool.model.catalog import Catalog
from ckpttool.model.plan import OutputFile, OutputTensor, Plan, Term
from ckpttool.model.region import Region
from ckpttool.model.slicing import Piece, RearrangedSlicing, find_pieces
from ckpttool.model.tensors import Reads, StoredFile
from ckpttool.storage.counting import CountingFiles
from ckpttool.storage.files import PARTIAL
from ckpttool.storage.numbers import Bytes
from ckpttool.storage.region_io import Origin

MAX_KNOWN = 10_000  # tensors whose counts are kept


class Supply(Struct, frozen=True):
    """The bytes of each source rank, or of each merged file, that target ranks need."""

    ranks: tuple[int, ...]
    nbytes: Mapping[Origin, int]

    @property
    def needs(self) -> tuple[Need, ...]:
        """The source ranks that each of them needs, those of an input with equal bytes together."""
        ranks_of: dict[tuple[int, int], list[int]] = {}
        for (number, rank), nbytes in sorted(self.nbytes.items()):
            ranks_of.setdefault((number, nbytes), []).append(rank)
        return tuple(Need(tuple(ranks), *key) for key, ranks in ranks_of.items())


class Need(Struct, frozen=True):
    """Source ranks of an input, by its number, and the bytes that are needed of each of them."""

    ranks: tuple[int, ...]
    input: int
    nbytes: int


class Work(Struct, frozen=True):
    """The work of the tasks of a run.

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


class _Counts(Struct, frozen=True):
    """The work of the tasks of a batch; ``sizes`` are those of its outputs.

    ``used`` has the bytes of each source rank, by its number in the pattern, by output.
    """

    tasks: int
    reads: Reads
    needed: int
    written: int
    buffer_bytes: int
    sizes: tuple[int, ...]
    used: tuple[Mapping[int, int], ...]


class _TensorCounts(NamedTuple):
    """The reads of the units of one tensor, what they leave in the scratch buffer, and its peak.

    ``used`` has the bytes of each source rank, by unit.
    """

    reads: Reads
    scratch_used: int
    scratch_peak: int
    used: tuple[Mapping[Origin, int], ...]


def survey(
    plan: Plan,
    ranks: Collection[int],
    options: CopyOptions,
    *,
    by_file: bool,
    half_written: Mapping[int, frozenset[Place]] = {},
) -> Work:
    """Return what writing the outputs of ``ranks`` takes; the arguments are those of `schedule`.

    Units of ``half_written`` outputs, which an earlier run wrote, do not count.  The tasks of one
    batch stand for all batches with an equal pattern, since these do the same.
    """
    mine = plan.limited_to(ranks)
    alike = mine.alike
    kind_of = {rank: kind for kind, of_kind in enumerate(alike) for rank in of_kind}
    batches: dict[tuple[tuple[int, frozenset[Place]], ...], list[tuple[int, ...]]] = {}
    for batch in ranks_of_batches(plan, ranks, options, by_file=by_file):
        key = tuple((kind_of[rank], half_written.get(rank, frozenset())) for rank in batch)
        batches.setdefault(key, []).append(batch)
    sizes: dict[int, int] = {}
    used: dict[int, Mapping[Origin, int]] = {}
    known: dict[Hashable, _Counts] = {}
    tasks = written = over_read = buffer_bytes = 0
    reads = Reads()
    survey = _Survey(mine)
    outputs = mine.of_kinds.outputs(rank for batch, *_ in batches.values() for rank in batch)
    for keys, (batch, *more) in batches.items():
        kinds, left = zip(*keys, strict=True)
        pattern = find_pattern(mine, [next(outputs) for _ in batch])
        counts = known.get((pattern.key, left))
        if counts is None:
            whole = tuple(mine.limited_to(batch).outputs(batch))
            counts = survey.count(Batch(whole, options, bool(plan.listed)), pattern, left)
            known[pattern.key, left] = counts
        sizes |= zip(kinds, counts.sizes, strict=True)
        for kind, of_output in zip(kinds, counts.used, strict=True):
            used[kind] = {pattern.origins[number]: nbytes for number, nbytes in of_output.items()}
        times = 1 + len(more)
        tasks += times * counts.tasks
        reads += Reads(times * counts.reads.requests, times * counts.reads.nbytes)
        written += times * counts.written
        buffer_bytes = max(buffer_bytes, counts.buffer_bytes)
        over_read += times * max(0, counts.reads.nbytes - counts.needed)
    return Work(
        tasks,
        reads,
        over_read,
        written,
        buffer_bytes,
        {rank: sizes[kind] for rank, kind in kind_of.items()},
        _join_alike(_supplies(plan, alike, used)),
    )


class _Pattern(NamedTuple):
    """The reads of a batch without the source ranks; and these, in the order of the first pieces.

    ``key`` is equal for batches whose tasks read equal places of files with equal headers.
    """

    key: Hashable
    origins: tuple[Origin, ...]


def find_pattern(plan: Plan, outputs: Sequence[OutputFile]) -> _Pattern:
    """Return the pattern of a batch, from the outputs of `Plan.of_kinds`."""
    numbers: dict[Origin, int] = {}
    files: dict[str, int] = {}
    pattern: list[Hashable] = []
    firsts: dict[str, tuple[int, ...]] = {}
    is_plain = True
    for output in outputs:
        pattern.append(len(output.tensors))
        for tensor in output.tensors:
            start = tensor.region.start
            shift = tuple(map(sub, start, firsts.setdefault(tensor.meta.name, start)))
            pattern += (tensor.meta.name, tensor.meta.shape, shift)
            for term in tensor.terms:
                for piece in _pieces_read(tensor, term):
                    origin = Origin(term.input, piece.rank)
                    number = numbers.get(origin)
                    index = plan.inputs[term.input].files[piece.rank]
                    if number is None:
                        number = numbers[origin] = len(numbers)
                        pattern += (id(index.header), files.setdefault(index.path, len(files)))
                    is_plain = is_plain and index.files == (piece.tensor.file,)
                    pattern += (number, piece.src, piece.dst)
    return _Pattern(tuple(pattern) if is_plain else object(), tuple(numbers))


def _pieces_read(tensor: OutputTensor, term: Term) -> Iterator[Piece]:
    """Yield the pieces of a term that a tensor has, and then those that its rows are means of."""
    yield from term.pieces(Region.whole(tensor.meta.shape), tensor.region.start)
    slicing = term.source.slicing
    rows = slicing.averaged(tensor.region) if isinstance(slicing, RearrangedSlicing) else None
    if rows is not None:
        yield from find_pieces(slicing, rows, (0,) * rows.ndim)


def _supplies(
    plan: Plan, alike: Iterable[tuple[int, ...]], used: Mapping[int, Mapping[Origin, int]]
) -> Iterator[Supply]:
    is_own = plan.is_own
    for kind, ranks in enumerate(alike):
        if not is_own:
            yield Supply(ranks, used[kind])
            continue
        for rank in ranks:  # each needs as much of its own rank as the first of its own
            yield Supply((rank,), {Origin(0, rank): sum(used[kind].values())})


def _join_alike(supplies: Iterable[Supply]) -> tuple[Supply, ...]:
    ranks_of: dict[tuple[Need, ...], list[int]] = {}
    joined: dict[tuple[Need, ...], Supply] = {}
    for supply in supplies:
        ranks_of.setdefault(supply.needs, []).extend(supply.ranks)
        joined[supply.needs] = supply
    return tuple(
        replace(one, ranks=tuple(sorted(ranks_of[needs]))) for needs, one in joined.items()
    )


class _Survey:
    """The reads of tasks.  Layers of a model are alike, so the reads of one are those of all."""

    def __init__(self, plan: Plan) -> None:
        self._kinds: dict[int, Hashable] = {}  # by id of the terms
        for name, transfers in plan.kinds.items():
            for transfer in transfers:
                terms = transfer.terms
                is_usual = all(_is_usual(plan.inputs[it.input], it.source.name) for it in terms)
                self._kinds[id(terms)] = name if is_usual else (name, transfer.name)
        self._known: dict[Hashable, _TensorCounts] = {}

    def count(self, batch: Batch, pattern: _Pattern, left: Sequence[frozenset[Place]]) -> _Counts:
        """Return what the tasks of a batch do."""
        indexes = [
            header_of(output).of_file(StoredFile(output.path + PARTIAL)) for output in batch.outputs
        ]
        number = {id(index.tensors): i for i, index in enumerate(indexes)}
        numbers = {origin: i for i, origin in enumerate(pattern.origins)}
        used = [Counter[int]() for _ in indexes]
        tasks = needed = written = buffer_bytes = 0
        reads = Reads()
        for task in batch.tasks(indexes, left):
            tasks += 1
            needed += task.needed_bytes
            written += task.nbytes
            buffer = np.empty(task.buffer_bytes, np.uint8)
            with CountingFiles(task.band_bytes) as files:
                for units in task.by_tensor():
                    of_tensor, of_units = self._count_tensor(units, files, buffer, task.band_bytes)
                    reads += of_tensor
                    for unit, of_unit in zip(units, of_units, strict=True):
                        of_output = used[number[id(unit.header)]]
                        for origin, nbytes in of_unit.items():
                            of_output[numbers[origin]] += nbytes
                most = len(buffer) + files.scratch_peak + task.cast_bytes
                buffer_bytes = max(buffer_bytes, most)
        sizes = tuple(index.nbytes for index in indexes)
        return _Counts(tasks, reads, needed, written, buffer_bytes, sizes, tuple(used))

    def _count_tensor(
        self, units: Sequence[TensorUnit], files: CountingFiles, buffer: Bytes, band_bytes: int
    ) -> tuple[Reads, tuple[Mapping[Origin, int], ...]]:
        """Return the reads of the units of one tensor, and the bytes of source ranks by unit."""
        kinds = [self._kinds.get(id(unit.output.terms)) for unit in units]
        key = (
            files.scratch_used,
            *(
                (kind, unit.output.region, unit.region, unit.dtype)
                for kind, unit in zip(kinds, units, strict=True)
            ),
        )
        known = None if None in kinds else self._known.get(key)
        if known is None:
            used = {id(unit): Counter[Origin]() for unit in units}
            for unit, _ in read_tensor(units, files, buffer, band_bytes):
                used[id(unit)] += files.take_used()
            known = _TensorCounts(
                files.take_reads(), files.scratch_used, files.scratch_peak, tuple(used.values())
            )
            if None not in kinds:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = known
        files.scratch_used = known.scratch_used
        files.scratch_peak = max(files.scratch_peak, known.scratch_peak)
        return known.reads, known.used


def _is_usual(catalog: Catalog, name: str) -> bool:
    tensors = (header[name] for header in catalog.headers.values() if name in header)
    return all(len(tensor.extents) <= 1 and tensor.file.cipher is None for tensor in tensors)
