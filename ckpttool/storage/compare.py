"""Compare tensors band by band, for `verify`, `diff` and the check of replicas.

A reading is an `OutputTensor`: one way to read a tensor.  It reads slices of any layout in files of
any format, or one stored slice.  A worker compares the readings of one region and returns
statistics that can be merged.  `compare_tensors` submits a bounded number of tasks and yields the
statistics in the order of its input.  The caller says what is compared with what, and what a
difference means.  So three commands share one reader.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpttool.concurrency import map_in_order
from ckpttool.model.manifest import units
from ckpttool.model.plan import OutputTensor
from ckpttool.model.region import Region
from ckpttool.problems import Diagnostic, PlanError
from ckpttool.storage.numbers import (
    Bytes,
    Flags,
    Float64s,
    count_nonfinite,
    decode,
    find_differing,
    find_distances,
    find_magnitudes,
    find_same_numbers,
    scale_down,
    take,
)
from ckpttool.storage.region_io import FlatFiles, read_band
from ckpttool.storage.statistics import BLOCK_ELEMENTS, UNIT_ELEMENTS, Statistics, measure

if TYPE_CHECKING:
    import numpy.typing as npt

Index = tuple[int, ...]


class Tolerance(Struct, frozen=True):
    """Numbers count as equal if ``|a - b| <= atol + rtol * |b|``; NaN equals NaN, 0 equals -0.

    Attributes
    ----------
    atol, rtol
        The bounds, finite and from 0 on.
    """

    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        """Raise PlanError if a bound is negative, infinite or NaN."""
        for name, bound in (("atol", self.atol), ("rtol", self.rtol)):
            if not 0 <= bound < math.inf:
                message = f"{name}: expected a finite number from 0 on, found {bound}"
                raise PlanError([Diagnostic("options", message)])


class TensorDelta(Struct, frozen=True):
    """The differences of one reading of a tensor from the first.

    Attributes
    ----------
    count
        Number of elements that differ by more than the tolerance; without a tolerance, in any byte.
    same_number
        How many of them are the same number in different bytes (0 and -0, two kinds of NaN).
    max_abs, max_rel
        Largest ``|a - b|``, and ``|a - b| / |b|`` where ``b`` is not 0, among all elements whose
        bytes differ; None if there are none.  Inf if ``a`` or ``b`` is Inf, or if a Float64 cannot
        hold the result.  Pairs without a distance (NaN and a number) or without a ratio (a number
        and Inf) do not count.
    content
        Equal for two readings that differ from the first in the same way; empty if none differs.
    distances
        Statistics of ``|a - b|``, of the elements whose bytes differ; None unless requested, and
        for types that are not numbers.
    """

    count: int = 0
    same_number: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    first: Index | None = None  # index of the first of the ``count`` elements
    differs: bool = False  # whether any byte differs
    content: bytes = b""
    nans: int = 0  # number of elements that are NaN on one side only
    distances: Statistics | None = None

    def merged(self, later: TensorDelta) -> TensorDelta:
        """Return the difference in this region and another one together."""
        content = self.content or later.content
        if self.content and later.content:
            content = hashlib.sha256(self.content + later.content).digest()
        return TensorDelta(
            self.count + later.count,
            self.same_number + later.same_number,
            _largest(self.max_abs, later.max_abs),
            _largest(self.max_rel, later.max_rel),
            min((it for it in (self.first, later.first) if it is not None), default=None),
            self.differs or later.differs,
            content,
            self.nans + later.nans,
            _join(self.distances, later.distances),
        )


class TensorStats(Struct, frozen=True):
    """Statistics of a tensor, or of a region of it.

    Attributes
    ----------
    nans, infinities
        How many of them are NaN, and Inf.
    first_nan, first_infinity
        Index in the tensor of the first NaN, and the first Inf.
    hashes
        For each reading the hashes of its units as in a manifest; empty unless requested.
    numbers
        Statistics of the first reading; None unless requested, and for types that are not numbers.
    """

    elements: int = 0  # number of elements counted, in the first reading
    nans: int = 0
    infinities: int = 0
    first_nan: Index | None = None
    first_infinity: Index | None = None
    is_zero: bool = True  # whether all elements are zero; true for no elements
    differences: tuple[TensorDelta, ...] = ()  # how each other reading differs from the first
    hashes: tuple[tuple[str, ...], ...] = ()
    numbers: Statistics | None = None

    def merged(self, later: TensorStats) -> TensorStats:
        """Return the statistics of this region and the following one together."""
        return TensorStats(
            self.elements + later.elements,
            self.nans + later.nans,
            self.infinities + later.infinities,
            later.first_nan if self.first_nan is None else self.first_nan,
            later.first_infinity if self.first_infinity is None else self.first_infinity,
            self.is_zero and later.is_zero,
            tuple(a.merged(b) for a, b in zip(self.differences, later.differences, strict=True)),
            tuple(a + b for a, b in zip(self.hashes, later.hashes, strict=True)),
            _join(self.numbers, later.numbers),
        )


def _largest(a: float | None, b: float | None) -> float | None:
    return max((x for x in (a, b) if x is not None), default=None)


def _join(a: Statistics | None, b: Statistics | None) -> Statistics | None:
    return a.merged(b) if a is not None and b is not None else a or b


K = TypeVar("K")


class CompareUnit(Struct, frozen=True):
    """A C-contiguous region of a tensor, and the readings of the tensor to compare there."""

    region: Region
    readings: tuple[OutputTensor, ...]

    def __reduce__(self) -> tuple[type[CompareUnit], tuple[Region, tuple[OutputTensor, ...]]]:
        """Pickle without the slices that the unit does not need."""
        readings = tuple(reading.excerpt(self.region) for reading in self.readings)
        return CompareUnit, (self.region, readings)

    @property
    def nbytes(self) -> int:
        """Bytes that all readings together read."""
        return self.region.size * sum(reading.stored_itemsize for reading in self.readings)


class CompareOptions(Struct, frozen=True):
    """Options of a comparison: what to compute, and how much at a time.

    Statistics are those of the first reading, and of the distances to it.  A worker reads
    ``band_bytes`` at a time, from each of two readings.  Memory is about workers x 3 x
    ``band_bytes`` and a few MiB, for tensors of any size.
    """

    tolerance: Tolerance | None = None  # which numbers count as equal; None compares bytes
    wants_counts: bool = False  # whether to count NaN, Inf and zeros in the first reading
    wants_hashes: bool = False  # whether to hash each unit of each reading
    wants_statistics: bool = False
    band_bytes: int = 4 << 20
    task_bytes: int = 64 << 20  # approximate number of bytes that one task reads
    max_in_flight: int = 64  # largest number of tasks that exist at a time


def compare_tensors(
    tensors: Iterable[tuple[K, Sequence[OutputTensor]]],
    executor: Executor,
    options: CompareOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[K, TensorStats]]:
    """Compare the readings of each tensor, and yield its key and statistics in order.

    Parameters
    ----------
    tensors
        For each tensor a key and its readings, which have the same element type and shape.  The
        first is compared with all others.  The iterable advances as tasks complete.
    on_progress
        Called in the caller's thread with the number of bytes that were read since the last call.

    Raises
    ------
    OSError
        A file cannot be read.
    FormatError
        A file has become shorter since its header was read.
    """
    options = options or CompareOptions()
    batches = _batches(tensors, options)
    tasks = ((batch, [unit for *_, unit in batch]) for batch in batches)
    compare = partial(compare_units, options)
    stats: TensorStats | None = None
    for batch, batch_stats in map_in_order(executor, compare, tasks, options.max_in_flight):
        for (key, is_last, _), more in zip(batch, batch_stats, strict=True):
            stats = more if stats is None else stats.merged(more)
            if is_last:
                yield key, stats
                stats = None
        if on_progress is not None:
            on_progress(sum(unit.nbytes for *_, unit in batch))


def _batches(
    tensors: Iterable[tuple[K, Sequence[OutputTensor]]], options: CompareOptions
) -> Iterator[list[tuple[K, bool, CompareUnit]]]:
    """Yield the units of each task: key, whether it is the last of its tensor, and unit."""
    batch: list[tuple[K, bool, CompareUnit]] = []
    nbytes, task_bytes = 0, options.task_bytes
    for key, readings in tensors:
        meta = readings[0].meta
        whole = Region.whole(meta.shape)
        most = max(1, task_bytes // meta.itemsize // len(readings))
        most = UNIT_ELEMENTS if options.wants_statistics else most
        bands = units(meta) if options.wants_hashes else whole.bands(most)
        regions = list(bands) or [whole]  # an empty tensor has statistics but no bands
        for i, region in enumerate(regions, 1):
            unit = CompareUnit(region, tuple(readings))
            batch.append((key, i == len(regions), unit))
            nbytes += unit.nbytes
            if nbytes >= task_bytes:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def compare_units(options: CompareOptions, batch: Sequence[CompareUnit]) -> tuple[TensorStats, ...]:
    """Return the statistics of each unit of a task; runs on a worker."""
    largest = max(unit.region.size * _itemsize(unit) for unit in batch)
    widest = max(map(_itemsize, batch))  # a band holds at least one element
    buffers = np.empty((2, max(widest, min(options.band_bytes, largest))), np.uint8)
    with (
        FlatFiles(options.band_bytes) as files,
        np.errstate(all="ignore"),  # a signalling NaN would cause a warning
    ):
        return tuple(_compare_unit(files, unit, options, buffers) for unit in batch)


def _itemsize(unit: CompareUnit) -> int:
    return unit.readings[0].meta.itemsize


def _compare_unit(
    files: FlatFiles, unit: CompareUnit, options: CompareOptions, buffers: Bytes
) -> TensorStats:
    meta = unit.readings[0].meta
    dtype, itemsize = meta.dtype, meta.itemsize
    is_measured = options.wants_statistics and decode(buffers[0, :0], dtype) is not None
    stats = TensorStats(
        differences=(TensorDelta(),) * (len(unit.readings) - 1),
        numbers=Statistics() if is_measured else None,
    )
    states = [hashlib.sha256() for _ in unit.readings if options.wants_hashes]
    for band in unit.region.bands(max(1, options.band_bytes // itemsize)):
        mine, other = buffers[:, : band.size * itemsize]
        differences = []
        for number, reading in enumerate(unit.readings):
            data = other if number else mine
            read_band(files, reading, band, data.reshape(*band.shape, itemsize))
            if options.wants_hashes:
                states[number].update(data.data)
            if number:
                difference = _compare(mine, other, dtype, band, options)
                # Marks group three or more readings; with two there is nothing to group.
                is_marked = len(unit.readings) > 2
                differences.append(_mark(difference, band, other) if is_marked else difference)
        band_stats = _count(mine, dtype, band) if options.wants_counts else TensorStats()
        band_stats = replace(band_stats, differences=tuple(differences))
        if is_measured and (numbers := decode(mine, dtype)) is not None:
            band_stats = replace(band_stats, numbers=measure(numbers))
        stats = stats.merged(band_stats)
    is_unit = unit.region.size > 0  # an empty tensor lacks units
    return replace(stats, hashes=tuple((s.hexdigest(),) if is_unit else () for s in states))


def _count(data: Bytes, dtype: str, band: Region) -> TensorStats:
    stats = TensorStats()
    itemsize = len(data) // band.size
    for at in range(0, band.size, BLOCK_ELEMENTS):
        block = data[at * itemsize : (at + BLOCK_ELEMENTS) * itemsize]
        numbers = decode(block, dtype)
        is_zero = stats.is_zero and not bool(np.any(block if numbers is None else numbers))
        if numbers is None:
            stats = stats.merged(TensorStats(len(block) // itemsize, is_zero=is_zero))
            continue
        nans, infinities, *firsts = count_nonfinite(numbers)
        nan, infinity = (None if first is None else _index(band, at + first) for first in firsts)
        counted = TensorStats(len(numbers), nans, infinities, nan, infinity, is_zero)
        stats = stats.merged(counted)
    return stats


def _compare(a: Bytes, b: Bytes, dtype: str, band: Region, options: CompareOptions) -> TensorDelta:
    delta = TensorDelta()
    itemsize = len(a) // band.size
    for at in range(0, band.size, BLOCK_ELEMENTS):
        block = slice(at * itemsize, (at + BLOCK_ELEMENTS) * itemsize)
        differing = np.flatnonzero(find_differing(a[block], b[block], itemsize))
        if len(differing):
            x, y = (take(data[block], differing, itemsize) for data in (a, b))
            delta = delta.merged(_measure(x, y, dtype, band, at + differing, options))
    return delta


def _mark(difference: TensorDelta, band: Region, data: Bytes) -> TensorDelta:
    if not difference.differs:
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
    options: CompareOptions,
) -> TensorDelta:
    """Measure the elements whose bytes differ, at the positions ``at`` of the band."""
    tolerance = options.tolerance
    x, y = decode(a, dtype), decode(b, dtype)
    if x is None or y is None:
        return TensorDelta(len(at), first=_index(band, int(at[0])), differs=True)
    same = find_same_numbers(x, y)
    distances, magnitudes = find_distances(x, y), find_magnitudes(y)
    ratios, near = _apply_tolerance(distances, magnitudes, tolerance)
    # Elements too large for a Float64 are scaled down; Inf and NaN stay the same.
    large = ~(np.isfinite(distances) & np.isfinite(magnitudes))
    if large.any():
        u, v = scale_down(x[large]), scale_down(y[large])
        ratios[large], near[large] = _apply_tolerance(
            find_distances(u, v), find_magnitudes(v), tolerance, 1 / 16
        )
    counted = np.ones(len(at), np.bool_) if tolerance is None else ~(same | near)
    has_distance, has_ratio = ~np.isnan(distances), ~np.isnan(ratios)
    return TensorDelta(
        int(np.count_nonzero(counted)),
        0 if tolerance is not None else int(np.count_nonzero(same)),
        float(distances[has_distance].max()) if has_distance.any() else None,
        float(ratios[has_ratio].max()) if has_ratio.any() else None,
        _index(band, int(at[counted.argmax()])) if counted.any() else None,
        differs=True,
        nans=int(np.count_nonzero(~has_distance)),
        distances=measure(distances) if options.wants_statistics else None,
    )


def _apply_tolerance(
    distances: Float64s, magnitudes: Float64s, tolerance: Tolerance | None, scale: float = 1.0
) -> tuple[Float64s, Flags]:
    """Return relative distances (NaN if undefined), and which distances are tolerated."""
    ratios = np.where(magnitudes > 0, distances / magnitudes, np.nan)
    if tolerance is None:
        return ratios, np.zeros(len(distances), np.bool_)
    allowed = tolerance.atol * scale + tolerance.rtol * magnitudes
    return ratios, np.isfinite(distances) & (distances <= allowed)


def _index(band: Region, position: int) -> tuple[int, ...]:
    inside = np.unravel_index(position, band.shape)
    return tuple(int(i) + start for i, start in zip(inside, band.start, strict=True))
