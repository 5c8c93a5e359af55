"""The worker's part: a stretch of an output file is filled from its pieces, band by band.

`fill` is a plain function on picklable arguments, and idempotent: doing a task again writes the
same bytes to the same places.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckpttool.model.catalog import FileIndex, StoredTensor
from ckpttool.model.manifest import units
from ckpttool.model.plan import OutputFile, OutputTensor, Piece
from ckpttool.model.region import Region
from ckpttool.storage.flatfile import Bytes, FlatFiles, find_runs

if TYPE_CHECKING:
    from hashlib import _Hash as HASH


@dataclass(frozen=True, slots=True)
class Part:
    """A C-contiguous region of one output tensor, and the pieces that fill it.

    Attributes
    ----------
    unit
        The number of the unit that it is, or is in.
    is_last
        Whether the unit ends with it.
    """

    tensor: StoredTensor
    region: Region
    pieces: tuple[Piece, ...]
    unit: int
    is_last: bool


class UnitHash(NamedTuple):
    """The SHA-256, in hexadecimal digits, of a unit of a tensor in the file at ``path``."""

    path: str
    name: str
    unit: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Filled:
    """What a task has written: bytes of tensors, and the hashes of all units."""

    nbytes: int
    hashes: tuple[UnitHash, ...]


@dataclass(frozen=True, slots=True)
class FillTask:
    """Parts of one output file, to be done by one worker.

    Attributes
    ----------
    parts
        What to fill, in the file under its temporary name, header in place.
    band_bytes
        Bytes that are assembled at a time; a scratch buffer of the same size comes on top.
    """

    parts: tuple[Part, ...]
    band_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that will be written."""
        return sum(part.region.size * part.tensor.meta.itemsize for part in self.parts)


def cut_into_tasks(
    outputs: Sequence[tuple[OutputFile, FileIndex]], band_bytes: int, task_bytes: int
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
        Bytes of a task, about.
    """
    tensors: dict[str, list[tuple[OutputTensor, StoredTensor]]] = {}
    for output, index in outputs:
        for tensor in output.tensors:
            stored = index.tensors[tensor.meta.name]
            if stored.extents:
                tensors.setdefault(tensor.meta.name, []).append((tensor, stored))
    parts: list[Part] = []
    begun: set[str] = set()  # files of which a unit has begun that does not end yet
    nbytes = 0
    for name in tensors:
        for part in _cut(tensors[name], band_bytes):
            parts.append(part)
            nbytes += part.region.size * part.tensor.meta.itemsize
            (begun.discard if part.is_last else begun.add)(part.tensor.path)
            if nbytes >= task_bytes and not begun:
                yield FillTask(tuple(parts), band_bytes)
                parts, nbytes = [], 0
    if parts:
        yield FillTask(tuple(parts), band_bytes)


def _cut(twins: Sequence[tuple[OutputTensor, StoredTensor]], band_bytes: int) -> Iterator[Part]:
    """Parts of a tensor in one output, or in several, by their place in the full tensor."""
    if len(twins) == 1:
        ((tensor, stored),) = twins
        for unit, region in enumerate(units(tensor.meta)):
            yield Part(stored, region, tuple(tensor.pieces(region)), unit, is_last=True)
        return
    placed: list[tuple[tuple[int, ...], int, Region, int, bool]] = []
    for number, (tensor, _) in enumerate(twins):
        nbytes = _band_bytes(tensor.pieces(Region.whole(tensor.meta.shape)), band_bytes)
        for unit, whole in enumerate(units(tensor.meta)):
            regions = list(_bands(whole, nbytes, tensor.meta.itemsize))
            placed += [
                (region.moved_by(tensor.region.start).start, number, region, unit, is_last)
                for region, is_last in zip(regions, _only_last(len(regions)), strict=True)
            ]
    for _, number, region, unit, is_last in sorted(placed, key=lambda item: item[:2]):
        tensor, stored = twins[number]
        yield Part(stored, region, tuple(tensor.pieces(region)), unit, is_last)


def _only_last(count: int) -> Iterator[bool]:
    return (number == count - 1 for number in range(count))


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
    states: dict[tuple[str, str], HASH] = {}
    hashes: list[UnitHash] = []
    with FlatFiles(task.band_bytes) as files:
        for part in task.parts:
            name, itemsize = part.tensor.meta.name, part.tensor.meta.itemsize
            state = states.setdefault((part.tensor.path, name), sha256())
            for band in _bands(part.region, _band_bytes(part.pieces, task.band_bytes), itemsize):
                data = buffer[: band.size * itemsize]
                read_pieces(files, part.pieces, band, data.reshape(*band.shape, itemsize))
                offset = _offset(band, part.tensor.meta.shape) * itemsize
                if not os.path.lexists(part.tensor.path):  # taken away: the run has ended
                    raise FileNotFoundError(errno.ENOENT, "it is gone", part.tensor.path)
                files.write_bytes(part.tensor, offset, data)
                state.update(data.data)
            if part.is_last:
                path = part.tensor.path
                hashes.append(UnitHash(path, name, part.unit, states.pop((path, name)).hexdigest()))
    assert not states, f"units without their end: {[*states]}"
    return Filled(task.nbytes, tuple(hashes))


def read_pieces(files: FlatFiles, pieces: Sequence[Piece], band: Region, out: Bytes) -> None:
    """Read a region of a tensor that is spread over pieces.

    Parameters
    ----------
    files
        Opens the files.
    pieces
        They fill ``band``, and perhaps more; ``dst`` counts in the same tensor as ``band``.
    band
        The elements that are wanted.
    out
        ``band.shape`` and one last axis of ``itemsize`` bytes.
    """
    filled = 0
    for piece in pieces:
        overlap = piece.dst.intersect(band)
        if overlap is None:
            continue
        src = overlap.relative_to(piece.dst.start).moved_by(piece.src.start)
        inside = overlap.relative_to(band.start)
        at = tuple(slice(a, b) for a, b in zip(inside.start, inside.stop, strict=True))
        files.read_region(piece.tensor, src, out[at])
        filled += overlap.size
    assert filled == band.size, f"{pieces}: {filled} of {band.size} elements"


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
