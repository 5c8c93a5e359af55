"""The worker's part: a stretch of an output file is filled from its pieces, band by band.

`fill` is a plain function on picklable arguments, and idempotent: doing a task again writes the
same bytes to the same places.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from heapq import merge
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckpttool.formats.reading import is_there
from ckpttool.model.manifest import units
from ckpttool.model.plan import OutputFile, OutputTensor, Piece
from ckpttool.model.region import Region
from ckpttool.model.tensors import FileIndex, StoredTensor
from ckpttool.storage.checksums import Summed, Sums
from ckpttool.storage.region_io import Bytes, FlatFiles, find_runs, read_pieces

if TYPE_CHECKING:
    from hashlib import _Hash as HASH


TASK_PIECES = 1 << 16  # of a task, about


@dataclass(frozen=True, slots=True)
class Part:
    """A unit of an output tensor.

    Attributes
    ----------
    tensor
        Where it goes.
    region
        The elements of it.
    output
        Where they come from; the pieces are reckoned when they are read, however many there are.
    unit
        The number of the unit.
    """

    tensor: StoredTensor
    region: Region
    output: OutputTensor
    unit: int

    def __reduce__(self) -> tuple[type[Part], tuple[StoredTensor, Region, OutputTensor, int]]:
        """What another process is sent: not the catalog of all files."""
        return Part, (self.tensor, self.region, self.output.excerpt(self.region), self.unit)

    @property
    def origin(self) -> tuple[int, ...]:
        """Where the output tensor begins in the full tensor.

        Parts of one tensor in several outputs are filled side by side, in the order in which the
        source has what they want.
        """
        return self.output.region.start


class UnitHash(NamedTuple):
    """The SHA-256, in hexadecimal digits, of a unit of a tensor in the file at ``path``."""

    path: str
    name: str
    unit: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Filled:
    """What a task has written: bytes of tensors, hashes of all units, and CRC-32s if wanted."""

    nbytes: int
    hashes: tuple[UnitHash, ...]
    sums: tuple[Summed, ...] = ()


@dataclass(frozen=True, slots=True)
class FillTask:
    """Parts of one output file, or of several, to be done by one worker.

    Attributes
    ----------
    parts
        What to fill, in the file under its temporary name, header in place.  There are as many as
        units, however small the bands.
    band_bytes
        Bytes that are assembled at a time; a scratch buffer of the same size comes on top.
    is_summed
        Whether the CRC-32 of what is written is wanted.
    """

    parts: tuple[Part, ...]
    band_bytes: int
    is_summed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that will be written."""
        return sum(part.region.size * part.tensor.meta.itemsize for part in self.parts)


def cut_into_tasks(
    outputs: Sequence[tuple[OutputFile, FileIndex]],
    band_bytes: int,
    task_bytes: int,
    task_pieces: int = TASK_PIECES,
) -> Iterator[FillTask]:
    """The tasks that fill output files: large tensors are cut, small ones put together.

    Units are hashed while they are written, so a task holds whole ones.

    Parameters
    ----------
    outputs
        What is to be written, and where it goes: the header of the file under its temporary name.
        Of several, those parts come together that want the same rows of the source.
    band_bytes
        See `FillTask`.
    task_bytes
        Bytes of a task, about; more where outputs want the same rows, a unit of each at most.
    task_pieces
        A task that has as many takes no further part, though it may want the same rows.
    """
    tensors: dict[str, list[tuple[OutputTensor, StoredTensor]]] = {}
    is_summed = any("crc_num" in index.attrs for _, index in outputs)
    for output, index in outputs:
        for tensor in output.tensors:
            stored = index.tensors[tensor.meta.name]
            if stored.extents:
                tensors.setdefault(tensor.meta.name, []).append((tensor, stored))
    parts: list[Part] = []
    nbytes = pieces = 0
    for twins in tensors.values():
        reach: tuple[int, ...] | None = None  # the last element that this task has, of the tensor
        for part in _cut(twins):
            place = part.region.moved_by(part.origin)
            size = part.region.size * part.tensor.meta.itemsize
            is_apart = reach is None or place.start > reach  # else the units end in other rows
            most_bytes = task_bytes if is_apart else task_bytes + len(twins) * size
            if parts and (nbytes >= most_bytes or pieces >= task_pieces):
                yield FillTask(tuple(parts), band_bytes, is_summed)
                parts, nbytes, pieces, reach = [], 0, 0, None
            parts.append(part)
            nbytes += size
            pieces += part.output.count_pieces(part.region)
            last = tuple(stop - 1 for stop in place.stop)
            reach = last if reach is None else max(reach, last)
    if parts:
        yield FillTask(tuple(parts), band_bytes, is_summed)


def _cut(twins: Sequence[tuple[OutputTensor, StoredTensor]]) -> Iterator[Part]:
    """The units of a tensor in one output, or in several, by their place in the full tensor."""

    def placed(number: int) -> Iterator[tuple[tuple[int, ...], int, int, Region]]:
        tensor = twins[number][0]
        for unit, region in enumerate(units(tensor.meta)):
            yield region.moved_by(tensor.region.start).start, number, unit, region

    for _, number, unit, region in merge(*map(placed, range(len(twins)))):
        tensor, stored = twins[number]
        yield Part(stored, region, tensor, unit)


class _Step(NamedTuple):
    """A band that is next; in the order of places, then of parts."""

    place: tuple[int, ...]
    number: int
    band: Region


def _steps(number: int, part: Part, band_bytes: int) -> Iterator[_Step]:
    """The bands of a part, each when it is asked for."""
    nbytes = _band_bytes(part.output.pieces(part.region), band_bytes)
    for band in _bands(part.region, nbytes, part.tensor.meta.itemsize):
        yield _Step(band.moved_by(part.origin).start, number, band)


def fill(task: FillTask) -> Filled:
    """Fill the parts of a task, and hash what is written while it is in memory.

    Raises
    ------
    OSError
        A file cannot be read or written.
    FormatError
        A source file has become shorter since its header was read.
    """
    largest = max(part.region.size * part.tensor.meta.itemsize for part in task.parts)
    widest = max(part.tensor.meta.itemsize for part in task.parts)  # a band holds one element
    buffer = np.empty(max(widest, min(task.band_bytes, largest)), np.uint8)
    hashes: list[UnitHash] = []
    sums = Sums() if task.is_summed else None
    with FlatFiles(task.band_bytes, sums) as files:
        for _, parts in groupby(task.parts, lambda part: part.tensor.meta.name):
            hashes += _fill_side_by_side(files, tuple(parts), buffer, task.band_bytes)
    return Filled(task.nbytes, tuple(hashes), () if sums is None else tuple(sums.found()))


def _fill_side_by_side(
    files: FlatFiles, parts: Sequence[Part], buffer: Bytes, band_bytes: int
) -> Iterator[UnitHash]:
    """Fill parts of one tensor, their bands in the order of the full tensor."""
    states: dict[int, HASH] = {}
    for step in merge(*(_steps(i, part, band_bytes) for i, part in enumerate(parts))):
        part, band = parts[step.number], step.band
        path, itemsize = part.tensor.file.path, part.tensor.meta.itemsize
        data = buffer[: band.size * itemsize]
        read_pieces(files, part.output.pieces(band), band, data.reshape(*band.shape, itemsize))
        if not is_there(path):  # taken away: the run has ended
            raise FileNotFoundError(errno.ENOENT, "it is gone", path)
        files.write_bytes(part.tensor, _offset(band, part.tensor.meta.shape) * itemsize, data)
        states.setdefault(step.number, sha256()).update(data.data)
        if band.stop == part.region.stop:  # the last in C order
            name, sha = part.tensor.meta.name, states.pop(step.number).hexdigest()
            yield UnitHash(path, name, part.unit, sha)
    assert not states, f"units without their end: {[*states]}"


def _bands(region: Region, nbytes: int, itemsize: int) -> Iterator[Region]:
    return region.bands(max(1, nbytes // itemsize))


def _band_bytes(pieces: Iterable[Piece], most: int) -> int:
    """Bytes of a band such that all that is read for it, with what lies between, is not more."""
    return int(most / max(read_amplification(piece) for piece in pieces))


def read_amplification(piece: Piece) -> float:
    """Bytes that are read for each byte of a piece that is wanted."""
    meta = piece.tensor.meta
    runs = find_runs(piece.src, meta.shape, meta.itemsize)
    first, last = runs.rows
    return (last - first) / runs.nbytes if runs.are_close else 1.0


def _offset(band: Region, shape: tuple[int, ...]) -> int:
    """Elements of the tensor before the first of the band."""
    at = 0
    for start, size in zip(band.start, shape, strict=True):
        at = at * size + start
    return at
