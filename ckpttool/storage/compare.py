"""Tensors compared side by side, band by band: the one pass of `verify` and `diff`.

A reading is one way to read a tensor: from slices of any layout, in files of any format, or from
replicas of one slice.  A worker compares readings of a stretch of elements and returns statistics
that add up.  `compare_tensors` submits a bounded number of tasks and yields the statistics in the
order of the comparisons.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ckpttool.concurrency import wait_result
from ckpttool.errors import PlanError
from ckpttool.model.manifest import units
from ckpttool.model.plan import Piece
from ckpttool.model.region import Region
from ckpttool.model.tensors import StoredTensor, TensorMeta
from ckpttool.storage.numbers import (
    Flags,
    Float64s,
    count_nonfinite,
    decode,
    find_differing,
    find_distances,
    find_magnitudes,
    find_same_numbers,
    scaled,
    take,
)
from ckpttool.storage.region_io import FlatFiles, read_pieces

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Numbers are equal if ``|a - b| <= atol + rtol * |b|``; NaN equals NaN, and 0 equals -0."""

    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no difference can be held against.

        Raises
        ------
        PlanError
            A bound is negative, infinite or NaN.
        """
        for name, bound in (("atol", self.atol), ("rtol", self.rtol)):
            if not 0 <= bound < math.inf:
                raise PlanError([f"{name}: expected a finite number from 0 on, found {bound}"])


@dataclass(frozen=True, slots=True)
class TensorDelta:
    """How one reading of a tensor differs from the first.

    Attributes
    ----------
    count
        Elements that differ: in their bytes, or by more than the tolerance if there is one.
    same_number
        Of these, those that are the same number in other bytes (0 and -0, two kinds of NaN).
    max_abs, max_rel
        Largest ``|a - b|``, and ``|a - b| / |b|`` where ``b`` is not 0, among all elements whose
        bytes differ; None if there is none.  Inf if one of the two is, or no Float64 is as large;
        what has no distance (NaN and a number) or no ratio (a number and Inf) is left out.
    first
        Index of the first of the ``count`` elements.
    is_other
        Whether any bytes differ.
    content
        Equal for two readings that differ from the first in the same way; empty if none does.
    nans
        Elements that are NaN on one side alone.
    """

    count: int = 0
    same_number: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    first: Index | None = None
    is_other: bool = False
    content: bytes = b""
    nans: int = 0

    def merged(self, later: TensorDelta) -> TensorDelta:
        """Of this stretch and the one behind it."""
        if not later.is_other:
            return self
        if not self.is_other:
            return later
        content = self.content or later.content
        if self.content and later.content:
            content = hashlib.sha256(self.content + later.content).digest()
        return TensorDelta(
            self.count + later.count,
            self.same_number + later.same_number,
            _largest(self.max_abs, later.max_abs),
            _largest(self.max_rel, later.max_rel),
            later.first if self.first is None else self.first,
            True,
            content,
            self.nans + later.nans,
        )


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What was found out about a tensor.

    Attributes
    ----------
    elements
        How many were counted, in the first reading.
    nans, infinities
        Of these, NaN and Inf.
    first_nan, first_infinity
        Their indices in the tensor.
    is_zero
        Whether all of the elements are zero, if there are any.
    differences
        Of every other reading from the first.
    hashes
        Of every reading those of its units, as a manifest lists them, if they are wanted.
    """

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    first_nan: Index | None = None
    first_infinity: Index | None = None
    is_zero: bool = True
    differences: tuple[TensorDelta, ...] = ()
    hashes: tuple[tuple[str, ...], ...] = ()

    def merged(self, later: TensorStats) -> TensorStats:
        """Of this stretch and the one behind it."""
        return TensorStats(
            self.elements + later.elements,
            self.nans + later.nans,
            self.infinities + later.infinities,
            later.first_nan if self.first_nan is None else self.first_nan,
            later.first_infinity if self.first_infinity is None else self.first_infinity,
            self.is_zero and later.is_zero,
            tuple(a.merged(b) for a, b in zip(self.differences, later.differences, strict=True)),
            tuple(a + b for a, b in zip(self.hashes, later.hashes, strict=True)),
        )


def _largest(a: float | None, b: float | None) -> float | None:
    return max((x for x in (a, b) if x is not None), default=None)


BLOCK_ELEMENTS = 1 << 16  # looked at together, so that what is computed stays in the cache

K = TypeVar("K")
Bytes = npt.NDArray[np.uint8]


class Reading(Protocol):
    """A way to read a tensor: an `OutputTensor`, or a `Stored` one."""

    def pieces(self, within: Region) -> Iterator[Piece]:
        """The pieces that fill ``within``, a region of the tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor, read as it is."""

    tensor: StoredTensor

    def pieces(self, within: Region) -> Iterator[Piece]:
        """The one piece that is ``within`` itself."""
        yield Piece(self.tensor, within, within)


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """A tensor, and ways to read it that should all give the same; the first is the yardstick."""

    meta: TensorMeta
    readings: Sequence[Reading]


@dataclass(frozen=True, slots=True)
class CompareUnit:
    """A C-contiguous region of a tensor, and for each reading the pieces that fill it."""

    dtype: str
    itemsize: int
    region: Region
    readings: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is looked for, and how much is done at a time.

    Attributes
    ----------
    tolerance
        What still counts as equal; None compares bytes.
    wants_counts
        Whether NaN, Inf and zeros are counted in the first reading.
    wants_hashes
        Whether each unit of each reading is hashed.
    band_bytes
        Bytes that a worker reads at a time, from each of two readings.  Memory is about workers x
        3 x ``band_bytes`` and a few MiB, whatever the size of a tensor.
    task_bytes
        Bytes that one task reads, about.
    max_in_flight
        Tasks that exist at a time.
    """

    tolerance: Tolerance | None = None
    wants_counts: bool = False
    wants_hashes: bool = False
    band_bytes: int = 4 << 20
    task_bytes: int = 64 << 20
    max_in_flight: int = 64


@dataclass(frozen=True, slots=True)
class CompareTask:
    """Stretches, of one or several tensors, to be looked at by one worker."""

    stretches: tuple[CompareUnit, ...]
    options: CompareOptions

    @property
    def nbytes(self) -> int:
        """Bytes that will be read."""
        return sum(s.region.size * s.itemsize * len(s.readings) for s in self.stretches)


def compare_tensors(
    subjects: Iterable[tuple[K, TensorComparison]],
    executor: Executor,
    options: CompareOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[K, TensorStats]]:
    """The facts of every subject, in order, each with the key it came with.

    Parameters
    ----------
    subjects
        Drawn as fast as they are done.
    executor
        Does the reading.
    options
        What is looked for, and how much is done at a time.
    on_progress
        Called in the caller's thread with the number of bytes read since the last call.

    Raises
    ------
    OSError
        A file cannot be read.
    FormatError
        A file has become shorter since its header was read.
    """
    pending: deque[tuple[Future[tuple[TensorStats, ...]], CompareTask, list[tuple[K, bool]]]] = (
        deque()
    )
    facts: TensorStats | None = None
    options = options or CompareOptions()

    def collect() -> Iterator[tuple[K, TensorStats]]:
        nonlocal facts
        future, task, keys = pending.popleft()
        found = wait_result(future)
        for (key, is_last), more in zip(keys, found, strict=True):
            facts = more if facts is None else facts.merged(more)
            if is_last:
                yield key, facts
                facts = None
        if on_progress is not None:
            on_progress(task.nbytes)

    try:
        for batch in _batches(subjects, options):
            task = CompareTask(tuple(stretch for _, _, stretch in batch), options)
            keys = [(key, is_last) for key, is_last, _ in batch]
            pending.append((executor.submit(compare_units, task), task, keys))
            while len(pending) >= options.max_in_flight:
                yield from collect()
        while pending:
            yield from collect()
    finally:
        for future, _, _ in pending:
            future.cancel()


def _batches(
    subjects: Iterable[tuple[K, TensorComparison]], options: CompareOptions
) -> Iterator[list[tuple[K, bool, CompareUnit]]]:
    """Stretches of subjects for one task after the other, and whether each is a subject's last."""
    batch: list[tuple[K, bool, CompareUnit]] = []
    nbytes, task_bytes = 0, options.task_bytes
    for key, subject in subjects:
        whole = Region.whole(subject.meta.shape)
        itemsize = subject.meta.itemsize
        most = max(1, task_bytes // itemsize // len(subject.readings))
        cuts = units(subject.meta) if options.wants_hashes else whole.bands(most)
        regions = list(cuts) or [whole]  # of an empty tensor there is a fact, too
        for i, region in enumerate(regions, 1):
            pieces = tuple(tuple(reading.pieces(region)) for reading in subject.readings)
            stretch = CompareUnit(subject.meta.dtype, itemsize, region, pieces)
            batch.append((key, i == len(regions), stretch))
            nbytes += region.size * itemsize * len(pieces)
            if nbytes >= task_bytes:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def compare_units(task: CompareTask) -> tuple[TensorStats, ...]:
    """The facts of each stretch of a task, in order."""
    largest = max(s.region.size * s.itemsize for s in task.stretches)
    widest = max(s.itemsize for s in task.stretches)
    buffers = np.empty((2, max(widest, min(task.options.band_bytes, largest))), np.uint8)
    with (
        FlatFiles(task.options.band_bytes) as files,
        np.errstate(all="ignore"),
    ):  # of NaN that signal
        return tuple(_compare_unit(files, one, task.options, buffers) for one in task.stretches)


def _compare_unit(
    files: FlatFiles, stretch: CompareUnit, options: CompareOptions, buffers: Bytes
) -> TensorStats:
    itemsize = stretch.itemsize
    are_many = len(stretch.readings) > 2  # else it is clear who differs from whom
    facts = TensorStats(differences=(TensorDelta(),) * (len(stretch.readings) - 1))
    states = [hashlib.sha256() for _ in stretch.readings if options.wants_hashes]
    for band in stretch.region.bands(max(1, options.band_bytes // itemsize)):
        mine, other = buffers[:, : band.size * itemsize]
        read_pieces(files, stretch.readings[0], band, mine.reshape(*band.shape, itemsize))
        found = _count(mine, stretch.dtype, band) if options.wants_counts else TensorStats()
        differences = []
        for state in states[:1]:
            state.update(mine.data)
        for number, reading in enumerate(stretch.readings[1:], 1):
            read_pieces(files, reading, band, other.reshape(*band.shape, itemsize))
            for state in states[number : number + 1]:
                state.update(other.data)
            difference = _compare(mine, other, stretch.dtype, band, options.tolerance)
            differences.append(_mark(difference, band, other) if are_many else difference)
        facts = facts.merged(replace(found, differences=tuple(differences)))
    is_unit = stretch.region.size > 0  # an empty tensor has none
    return replace(facts, hashes=tuple((s.hexdigest(),) if is_unit else () for s in states))


def _count(data: Bytes, dtype: str, band: Region) -> TensorStats:
    """NaN, Inf and zeros of a band."""
    facts = TensorStats()
    itemsize = len(data) // band.size
    for at in range(0, band.size, BLOCK_ELEMENTS):
        block = data[at * itemsize : (at + BLOCK_ELEMENTS) * itemsize]
        numbers = decode(block, dtype)
        is_zero = facts.is_zero and not bool(np.any(block if numbers is None else numbers))
        if numbers is None:
            facts = facts.merged(TensorStats(len(block) // itemsize, is_zero=is_zero))
            continue
        counts = count_nonfinite(numbers)
        nan, infinity = (
            None if first is None else _index(band, at + first)
            for first in (counts.first_nan, counts.first_infinity)
        )
        counted = TensorStats(len(numbers), counts.nans, counts.infinities, nan, infinity, is_zero)
        facts = facts.merged(counted)
    return facts


def _compare(
    a: Bytes, b: Bytes, dtype: str, band: Region, tolerance: Tolerance | None
) -> TensorDelta:
    """How one band differs from another of the same region."""
    found = TensorDelta()
    itemsize = len(a) // band.size
    for at in range(0, band.size, BLOCK_ELEMENTS):
        block = slice(at * itemsize, (at + BLOCK_ELEMENTS) * itemsize)
        differing = np.flatnonzero(find_differing(a[block], b[block], itemsize))
        if len(differing):
            x, y = (take(data[block], differing, itemsize) for data in (a, b))
            found = found.merged(_measure(x, y, dtype, band, at + differing, tolerance))
    return found


def _mark(difference: TensorDelta, band: Region, data: Bytes) -> TensorDelta:
    """The difference of a band, marked with what the bytes are instead."""
    if not difference.is_other:
        return difference
    content = hashlib.sha256(repr(band.start).encode())
    content.update(data.data)
    return replace(difference, content=content.digest())


def _measure(
    a: Bytes,
    b: Bytes,
    dtype: str,
    band: Region,
    at: npt.NDArray[np.intp],
    tolerance: Tolerance | None,
) -> TensorDelta:
    """What there is to say of elements that differ, which lie ``at`` these places in the band."""
    x, y = decode(a, dtype), decode(b, dtype)
    if x is None or y is None:
        return TensorDelta(len(at), first=_index(band, int(at[0])), is_other=True)
    same = find_same_numbers(x, y)
    distances, magnitudes = find_distances(x, y), find_magnitudes(y)
    ratios, near = _hold(distances, magnitudes, tolerance)
    large = ~(np.isfinite(distances) & np.isfinite(magnitudes))  # or Inf and NaN, which stay so
    if large.any():
        u, v = scaled(x[large]), scaled(y[large])
        ratios[large], near[large] = _hold(
            find_distances(u, v), find_magnitudes(v), tolerance, 1 / 16
        )
    counted = np.ones(len(at), np.bool_) if tolerance is None else ~(same | near)
    known, telling = ~np.isnan(distances), ~np.isnan(ratios)
    return TensorDelta(
        int(np.count_nonzero(counted)),
        0 if tolerance is not None else int(np.count_nonzero(same)),
        float(distances[known].max()) if known.any() else None,
        float(ratios[telling].max()) if telling.any() else None,
        _index(band, int(at[counted.argmax()])) if counted.any() else None,
        is_other=True,
        nans=int(np.count_nonzero(~known)),
    )


def _hold(
    distances: Float64s, magnitudes: Float64s, tolerance: Tolerance | None, scale: float = 1.0
) -> tuple[Float64s, Flags]:
    """Relative distances, NaN where there is none, and which distances a tolerance allows."""
    ratios = np.where(magnitudes > 0, distances / magnitudes, np.nan)
    if tolerance is None:
        return ratios, np.zeros(len(distances), np.bool_)
    allowed = tolerance.atol * scale + tolerance.rtol * magnitudes
    return ratios, np.isfinite(distances) & (distances <= allowed)


def _index(band: Region, position: int) -> tuple[int, ...]:
    """Index in the tensor of the element at a position of the band."""
    inside = np.unravel_index(position, band.shape)
    return tuple(int(i) + start for i, start in zip(inside, band.start, strict=True))
