"""The worker's part: a stretch of an output file is filled from its pieces, band by band.

`fill` is a plain function on picklable arguments, and idempotent: doing a task again writes the
same bytes to the same places.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckpttool.model.catalog import FileIndex, StoredTensor
from ckpttool.model.manifest import units
from ckpttool.model.plan import OutputFile, Piece
from ckpttool.model.region import Region
from ckpttool.storage.flatfile import FlatFiles


@dataclass(frozen=True, slots=True)
class Part:
    """A unit of one output tensor, by its number, and the pieces that fill it."""

    tensor: StoredTensor
    unit: int
    region: Region
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """What a task has written.

    Attributes
    ----------
    nbytes
        Bytes of tensors.
    sha256
        Of every unit: name of the tensor, number of the unit, hash in hexadecimal digits.
    """

    nbytes: int
    sha256: tuple[tuple[str, int, str], ...]


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
    output: OutputFile, index: FileIndex, band_bytes: int, task_bytes: int
) -> Iterator[FillTask]:
    """The tasks that fill an output file: large tensors are cut, small ones put together.

    Tensors are cut into the units that are hashed, whatever the options are.

    Parameters
    ----------
    output
        What is to be written.
    index
        Where it goes: the header of the file under its temporary name.
    band_bytes
        See `FillTask`.
    task_bytes
        Bytes of a task, about, if a unit is not larger.
    """
    parts: list[Part] = []
    nbytes = 0
    for tensor in output.tensors:
        stored = index.tensors[tensor.meta.name]
        if not stored.extents:
            continue
        itemsize = tensor.meta.itemsize
        for number, region in enumerate(units(tensor.meta)):
            parts.append(Part(stored, number, region, tuple(tensor.pieces(region))))
            nbytes += region.size * itemsize
            if nbytes >= task_bytes:
                yield FillTask(tuple(parts), band_bytes)
                parts, nbytes = [], 0
    if parts:
        yield FillTask(tuple(parts), band_bytes)


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
    hashes: list[tuple[str, int, str]] = []
    with FlatFiles(task.band_bytes) as files:
        for part in task.parts:
            itemsize = part.tensor.meta.itemsize
            state = hashlib.sha256()
            for band in part.region.bands(max(1, task.band_bytes // itemsize)):
                data = buffer[: band.size * itemsize]
                read_pieces(files, part.pieces, band, data.reshape(*band.shape, itemsize))
                offset = _offset(band, part.tensor.meta.shape) * itemsize
                if not os.path.lexists(part.tensor.path):  # taken away: the run has ended
                    raise FileNotFoundError(errno.ENOENT, "it is gone", part.tensor.path)
                files.write_bytes(part.tensor, offset, data)
                state.update(data.data)
            hashes.append((part.tensor.meta.name, part.unit, state.hexdigest()))
    return Filled(task.nbytes, tuple(hashes))


def read_pieces(
    files: FlatFiles,
    pieces: Sequence[Piece],
    band: Region,
    out: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
) -> None:
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


def _offset(band: Region, shape: tuple[int, ...]) -> int:
    """Elements of the tensor before the first of the band."""
    at = 0
    for start, size in zip(band.start, shape, strict=True):
        at = at * size + start
    return at
