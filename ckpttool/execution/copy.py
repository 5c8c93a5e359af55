"""Copy slices of the sources into output files, band by band; runs on the workers.

`fill` is a plain function on picklable arguments.  It is idempotent: filling a task again writes
the same bytes to the same places.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from heapq import merge
from itertools import chain, count, groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpttool.concurrency import take_turns
from ckpttool.model.manifest import CastStats
from ckpttool.model.manifest import units as units_of
from ckpttool.model.plan import OutputFile, OutputTensor
from ckpttool.model.region import Region
from ckpttool.model.slicing import Piece
from ckpttool.model.tensors import FileIndex, StoredTensor
from ckpttool.storage.checksums import CrcExtent, ReadUnit, RunningCrc, RunningHashes
from ckpttool.storage.files import is_there
from ckpttool.storage.numbers import Bytes
from ckpttool.storage.region_io import (
    BandStep,
    FlatFiles,
    PieceRead,
    find_runs,
    plan_band,
    rounding_bytes,
    turned_bands,
)

if TYPE_CHECKING:
    from hashlib import _Hash as HASH


# Size of the largest tensors that are planned once for all tensors of their kind, in bands.
KNOWN_BANDS = 16
PIECES_PER_MOVE = 4  # pieces of a task for each move that is kept, which takes about 1 KiB


class CopyOptions(Struct, frozen=True):
    """Limits on the work that is done at a time.

    Attributes
    ----------
    band_bytes
        Bytes that a worker assembles at a time; twice as many of transposed tensors.  Memory is
        about workers x 2 x ``band_bytes`` (x 3), for models of any size.  The default is slightly
        more than half of a unit of 8 MiB, which then has two bands.  These fit into a processor's
        cache, so fewer bands gain nothing.
    task_bytes
        Approximate number of bytes of an output that one task fills.
    max_in_flight
        Largest number of tasks that exist at a time; the plan advances as they complete.
    task_pieces
        A task with this many pieces gets no further unit.
    group_tensors
        Largest number of tensors in a group of outputs that are written together, because they
        read the same rows.  Each takes about 600 bytes of memory.
    """

    band_bytes: int = 17 << 18
    task_bytes: int = 64 << 20
    max_in_flight: int = 32
    task_pieces: int = 1 << 16
    group_tensors: int = 1 << 16


class Cut(NamedTuple):
    """A unit of a tensor in one of several outputs; cuts sort by their start in the full tensor.

    Tensors of a kind share their cuts.

    Attributes
    ----------
    start, end
        Its first and its last element in the full tensor, by their indices.
    output
        The number of the output.
    number
        The number of the unit in its tensor, from 0.
    region
        The elements of the unit.
    nbytes
        Bytes of the unit.
    pieces
        How many pieces fill it.
    kind
        Equal for units of a batch that are read in the same way; None if nobody has compared them.
    """

    start: tuple[int, ...]
    output: int
    number: int
    region: Region
    nbytes: int
    pieces: int
    end: tuple[int, ...]
    kind: int | None


class TensorUnit(Struct, frozen=True, gc=False):
    """One hash unit of an output tensor: what one task fills and hashes.

    Attributes
    ----------
    output
        The sources of the elements.  Pieces are computed when they are read: there may be many.
    place
        The number of the tensor in its output.
    header
        Where the tensors of the output are stored, in the file with the temporary name.
    cut
        Which elements they are.
    """

    output: OutputTensor
    place: int
    header: Mapping[str, StoredTensor]
    cut: Cut

    def __reduce__(self) -> tuple[type[TensorUnit], tuple[object, ...]]:
        """Pickle without the slices and the tensors that the unit does not need."""
        output = self.output.excerpt(self.region)
        return TensorUnit, (output, self.place, {output.meta.name: self.tensor}, self.cut)

    @property
    def tensor(self) -> StoredTensor:
        """The stored output tensor; made for each call, as a task has many units."""
        return self.header[self.output.meta.name]

    @property
    def region(self) -> Region:
        """The elements of the unit."""
        return self.cut.region

    @property
    def nbytes(self) -> int:
        """Bytes of the unit."""
        return self.cut.nbytes

    @property
    def dtype(self) -> str:
        """The element type of the output."""
        return self.output.meta.dtype

    @property
    def origin(self) -> tuple[int, ...]:
        """Index in the full tensor of the output tensor's first element.

        It puts the units of one tensor in several outputs into the order of the source.
        """
        return self.output.region.start


Place: TypeAlias = tuple[int, int]  # of a unit: that of its tensor in the output, and its number


class UnitHash(NamedTuple):
    """The SHA-256 of a unit of a tensor, by its place in the output whose file is at ``path``."""

    path: str
    place: int
    unit: int
    sha256: bytes


class TensorCast(NamedTuple):
    """The statistics of a cast of elements of a tensor in the file at ``path``."""

    path: str
    name: str
    stats: CastStats


class Filled(Struct, frozen=True):
    """The output of a task: the number of bytes, a hash for each unit, and CRC-32s if requested.

    ``casts`` has the statistics of tensors that it cast.  ``read`` has the hashes of source units
    that it read as a whole, if these are requested.
    ``attempt`` is the temporary name of a file that a worker of a cluster wrote by itself.
    """

    nbytes: int
    hashes: tuple[UnitHash, ...]
    crcs: tuple[CrcExtent, ...] = ()
    casts: tuple[TensorCast, ...] = ()
    read: tuple[ReadUnit, ...] = ()
    attempt: str = ""


class FillTask(Struct, frozen=True):
    """Units of one or several output files that one worker fills.

    Attributes
    ----------
    units
        The units to fill, in files that have their temporary names and their headers.
    band_bytes
        Bytes that are assembled at a time; a scratch buffer has the same size.
    wants_crc
        Whether to compute the CRC-32 of the written bytes.
    wants_read
        Whether to hash the units of sources that are read as a whole.
    max_moves
        Moves that are kept for other tensors of a kind, at most.
    """

    units: tuple[TensorUnit, ...]
    band_bytes: int
    wants_crc: bool = False
    wants_read: bool = False
    max_moves: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the task writes."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def needed_bytes(self) -> int:
        """Bytes of sources that the task needs."""
        return sum(unit.region.size * unit.output.stored_itemsize for unit in self.units)

    @property
    def cast_bytes(self) -> int:
        """Bytes of the buffers for casts and means; 0 without any."""
        return max(rounding_bytes(unit.output) for unit in self.units)

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer for a band, which has at least one element."""
        widest = max(unit.output.meta.itemsize for unit in self.units)
        most = max(self.band_bytes * turned_bands(unit.output.source) for unit in self.units)
        return max(widest, min(most, max(unit.nbytes for unit in self.units)))

    def by_tensor(self) -> Iterator[tuple[TensorUnit, ...]]:
        """Yield the units of each tensor."""
        for _, units in groupby(self.units, lambda unit: unit.output.meta.name):
            yield tuple(units)


def cut_into_tasks(
    outputs: Sequence[tuple[OutputFile, FileIndex]],
    options: CopyOptions,
    wants_read: bool = False,
    selects: Sequence[Callable[[Place], bool] | None] = (),
) -> Iterator[FillTask]:
    """Split the filling of output files into tasks: large tensors are divided, small ones grouped.

    Units are hashed while they are written, so a task holds whole units.

    Parameters
    ----------
    outputs
        Each output file, and the header of its file under the temporary name.  A task contains
        units of several files if they read the same source rows.
    options
        How much is done at a time.  A task may exceed ``task_bytes`` by one unit of each output
        that reads the same rows, but not ``task_pieces``.
    wants_read
        See `FillTask`.
    selects
        For each output, which of its units to take; all where it is None, or if there are none.
    """
    task_bytes = options.task_bytes
    wants_crc = any("crc_num" in index.attrs for _, index in outputs)
    how = options.band_bytes, wants_crc, wants_read, options.task_pieces // PIECES_PER_MOVE
    batch: list[TensorUnit] = []
    nbytes = pieces = 0
    known: dict[Hashable, Sequence[Cut]] = {}
    numbers = count()
    known_bytes = KNOWN_BANDS * options.band_bytes
    selects = selects or [None] * len(outputs)
    for slices in _align([_slices(*one, to) for one, to in zip(outputs, selects, strict=True)]):
        last: tuple[int, ...] | None = None  # furthest element of the full tensor
        for cut in _cuts_of_kind(slices, known_bytes, known, numbers):
            of = slices[cut.output]
            if of.select is not None and not of.select((of.place, cut.number)):
                continue
            shares_rows = last is not None and cut.start <= last
            most_bytes = task_bytes + len(slices) * cut.nbytes if shares_rows else task_bytes
            if batch and (nbytes >= most_bytes or pieces >= options.task_pieces):
                yield FillTask(tuple(batch), *how)
                batch, nbytes, pieces, last = [], 0, 0, None
            batch.append(TensorUnit(of.output, of.place, of.header, cut))
            nbytes += cut.nbytes
            pieces += cut.pieces
            last = cut.end if last is None else max(last, cut.end)
    if batch:
        yield FillTask(tuple(batch), *how)


class _Slice(Struct, frozen=True):
    """A tensor in one of several outputs; see `TensorUnit` and `cut_into_tasks`."""

    output: OutputTensor
    place: int
    header: Mapping[str, StoredTensor]
    select: Callable[[Place], bool] | None


def _slices(
    output: OutputFile, index: FileIndex, select: Callable[[Place], bool] | None
) -> Iterator[_Slice]:
    for place, one in enumerate(output.tensors):
        if one.meta.text is None and one.meta.nbytes:
            yield _Slice(one, place, index.tensors, select)


def _align(outputs: Sequence[Iterable[_Slice]]) -> Iterator[Sequence[_Slice]]:
    while outputs:
        first, *others = outputs
        rest = [{one.output.meta.name: one for one in other} for other in others]
        for one in first:
            name = one.output.meta.name
            yield [one, *(of_name.pop(name) for of_name in rest if name in of_name)]
        outputs = [of_name.values() for of_name in rest]


def _cuts_of_kind(
    slices: Sequence[_Slice],
    max_bytes: int,
    known: dict[Hashable, Sequence[Cut]],
    numbers: Iterator[int],
) -> Iterable[Cut]:
    """Return the cuts of a tensor; tensors of a kind have the same, which are ``known``."""
    outputs = [one.output for one in slices]
    small = sum(one.meta.nbytes for one in outputs) <= max_bytes
    if not small or any(one.kind is None for one in outputs):
        return _cut(outputs)
    key = tuple([(one.kind, one.region) for one in outputs])
    found = known.get(key)
    if found is None:
        known[key] = found = [one._replace(kind=next(numbers)) for one in _cut(outputs)]
    return found


def _cut(outputs: Sequence[OutputTensor]) -> Iterator[Cut]:
    """Yield the units of one tensor in all outputs, in the order of the full tensor."""

    def cuts(index: int) -> Iterator[Cut]:
        output = outputs[index]
        meta = output.meta
        for number, region in enumerate(units_of(meta)):
            within = region.moved_by(output.region.start)
            yield Cut(
                start=within.start,
                output=index,
                number=number,
                region=region,
                nbytes=region.size * meta.itemsize,
                pieces=output.count_pieces(region),
                end=tuple(stop - 1 for stop in within.stop),
                kind=None,
            )

    return merge(*map(cuts, range(len(outputs))))


class _Step(NamedTuple):
    """A band to copy; steps sort by their start in the full tensor, then by unit."""

    start: tuple[int, ...]
    unit: int
    band: Region


def _steps(index: int, unit: TensorUnit, band_bytes: int) -> Iterator[_Step]:
    """Yield the bands of a unit lazily; it is one band if its tensor fits into the buffers."""
    stored = sum(it.source.meta.nbytes for it in unit.output.terms if not it.is_factor)
    if max(unit.nbytes, stored) <= band_bytes:
        bands: Iterable[Region] = (unit.region,)
    else:
        nbytes = band_bytes * turned_bands(unit.output.source)
        itemsize = unit.output.meta.itemsize
        if not unit.output.source.is_turned:
            nbytes = _fit_band(unit.output.pieces(unit.region), nbytes)
            itemsize = max(unit.output.stored_itemsize, itemsize)
        bands = unit.region.bands(max(1, nbytes // itemsize))
    for band in bands:
        yield _Step(band.moved_by(unit.origin).start, index, band)


class Band(NamedTuple):
    """A band of a unit and how it is read; the same for all tensors of a kind.

    Attributes
    ----------
    unit
        The number of the unit among those that are read together.
    offset
        The first byte in the output tensor.
    is_last
        Whether it is the last one of its unit, in C order.
    data
        The bytes, in a buffer that the next band overwrites.
    steps
        What fills ``data``.
    """

    unit: int
    offset: int
    is_last: bool
    data: memoryview
    steps: Iterable[BandStep]


class _Reader:
    """Reads the units of tensors into one buffer; what units of a kind take is planned once."""

    def __init__(
        self, files: FlatFiles, buffer: Bytes, band_bytes: int, max_moves: int = 0
    ) -> None:
        self._files, self._buffer, self._band_bytes = files, buffer, band_bytes
        self._max_moves = max_moves
        self._known: dict[tuple[int | None, ...], list[Band]] = {}  # by the kinds of units
        self._moves = 0  # of those that are known

    def read(self, units: Sequence[TensorUnit]) -> Iterator[tuple[TensorUnit, Band]]:
        files = self._files
        files.forget()
        for band in self._bands(units):
            unit = units[band.unit]
            for step in band.steps:
                step.run(files, unit.output)
            yield unit, band

    def _bands(self, units: Sequence[TensorUnit]) -> Iterable[Band]:
        """Return the bands of units, from those of a kind that are known if there are some."""
        key = tuple([one.cut.kind for one in units])
        if None in key:
            return self._plan(units)
        known = self._known.get(key)
        if known is not None:
            return known
        known, plan, moves = [], self._plan(units), 0
        for band in plan:
            kept, more = _keep(band)
            known.append(kept)
            moves += more
            if moves > self._max_moves:
                return chain(known, plan)
        if self._moves + moves > self._max_moves:
            self._known.clear()
            self._moves = 0
        self._moves += moves
        self._known[key] = known
        return known

    def _plan(self, units: Sequence[TensorUnit]) -> Iterator[Band]:
        for step in merge(*(_steps(i, unit, self._band_bytes) for i, unit in enumerate(units))):
            unit, band = units[step.unit], step.band
            meta = unit.output.meta
            data = self._buffer[: band.size * meta.itemsize]
            out = data.reshape(*band.shape, meta.itemsize)
            steps = plan_band(self._files, unit.output, band, out)
            offset = _offset(band, meta.shape) * meta.itemsize
            yield Band(step.unit, offset, band.stop == unit.region.stop, data.data, steps)


def _keep(band: Band) -> tuple[Band, int]:
    steps, moves = list[BandStep](), 0
    for step in band.steps:  # the moves of one are planned before those of the next, as they run
        if isinstance(step, PieceRead):
            kept = tuple(step.moves)
            moves += len(kept)
            steps.append(step if kept is step.moves else replace(step, moves=kept))
        else:
            steps.append(step)
    return band._replace(steps=steps), moves


def fill(task: FillTask) -> Filled:
    """Fill the units of a task, and hash the bytes while they are in memory.

    Raises
    ------
    OSError
        A file cannot be read or written.
    FormatError
        A source file has become shorter since its header was read.
    """
    with take_turns(task.nbytes, len(task.units)):
        return _fill(task)


def _fill(task: FillTask) -> Filled:
    hashes: list[UnitHash] = []
    states: dict[int, HASH] = {}  # by the id of the unit
    met = set[str]()
    casts: dict[tuple[str, str], CastStats] = {}
    crc = RunningCrc() if task.wants_crc else None
    read = RunningHashes() if task.wants_read else None
    with FlatFiles(task.band_bytes, crc, read) as files:
        for unit, band in read_bands(task, files):
            tensor = unit.tensor
            path, name = tensor.file.path, tensor.meta.name
            if path not in met and not is_there(path):
                raise FileNotFoundError(errno.ENOENT, "it is gone: the run has ended", path)
            met.add(path)
            if files.caster is not None and unit.output.is_cast:
                before = casts.get((path, name), CastStats())
                casts[path, name] = before.merged(files.caster.take_stats())
            files.write_bytes(tensor, band.offset, band.data)
            state = states.pop(id(unit), None) or sha256()
            state.update(band.data)
            if band.is_last:
                hashes.append(UnitHash(path, unit.place, unit.cut.number, state.digest()))
            else:
                states[id(unit)] = state
    assert not states, f"{len(states)} units without their last band"
    return Filled(
        task.nbytes,
        tuple(hashes),
        () if crc is None else tuple(crc.extents()),
        tuple(TensorCast(*key, stats) for key, stats in casts.items()),
        () if read is None else tuple(read.found()),
    )


class Checked(Struct, frozen=True):
    """The hashes of units in a file, and of some of them as the source has them now."""

    stored: tuple[UnitHash, ...]
    sampled: tuple[UnitHash, ...]


def check(task: FillTask) -> Checked:
    """Hash the units of a task in their file, and the first one once more from the source.

    An earlier run wrote them.
    """
    sample, state = replace(task, units=task.units[:1]), sha256()
    with take_turns(task.nbytes, len(task.units)), FlatFiles(task.band_bytes) as files:
        stored = [_hash_stored(files, unit, task.band_bytes) for unit in task.units]
        for _, band in read_bands(sample, files):
            state.update(band.data)
    return Checked(tuple(stored), (stored[0]._replace(sha256=state.digest()),))


def _hash_stored(files: FlatFiles, unit: TensorUnit, buffer_bytes: int) -> UnitHash:
    meta, state = unit.output.meta, sha256()
    buffer = np.empty(min(buffer_bytes, unit.nbytes), np.uint8)
    first = _offset(unit.region, meta.shape) * meta.itemsize
    for at in range(first, first + unit.nbytes, len(buffer)):
        data = buffer[: first + unit.nbytes - at].data
        files.read_bytes(unit.tensor, at, data)
        state.update(data)
    return UnitHash(unit.tensor.file.path, unit.place, unit.cut.number, state.digest())


def read_bands(task: FillTask, files: FlatFiles) -> Iterator[tuple[TensorUnit, Band]]:
    """Read what a task writes, band by band in the order of the full tensors."""
    buffer = np.empty(task.buffer_bytes, np.uint8)
    reader = _Reader(files, buffer, task.band_bytes, task.max_moves)
    for units in task.by_tensor():
        yield from reader.read(units)


def read_tensor(
    units: Sequence[TensorUnit], files: FlatFiles, buffer: Bytes, band_bytes: int
) -> Iterator[tuple[TensorUnit, Band]]:
    """Read the units of one tensor of a task, as `read_bands` does."""
    return _Reader(files, buffer, band_bytes).read(units)


def _fit_band(pieces: Iterable[Piece], max_bytes: int) -> int:
    return int(max_bytes / max((read_amplification(piece) for piece in pieces), default=1.0))


def read_amplification(piece: Piece) -> float:
    """Return the bytes read for each byte of a piece; more than 1 if gaps are read."""
    runs = find_runs(piece.src, piece.tensor.meta)
    first, last = runs.rows
    return (last - first) / runs.nbytes if runs.are_close else 1.0


def _offset(band: Region, shape: tuple[int, ...]) -> int:
    at = 0
    for start, size in zip(band.start, shape, strict=True):
        at = at * size + start
    return at
