"""Where the bytes of an output tensor lie in the files of the source, for a virtual output.

A virtual output shows bytes and moves none, so each slice must be a range of a file as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.model.region import Region, Steps, View
from ckpttool.model.tensors import FileStamp, StoredTensor, TensorMeta

if TYPE_CHECKING:
    from ckpttool.model.plan import OutputTensor


class Segment(NamedTuple):
    """Bytes of a file: where they start, and how many there are."""

    path: str
    offset: int
    nbytes: int


class Shard(NamedTuple):
    """Elements of a full tensor, and the segments that hold them in C order."""

    region: Region
    segments: tuple[Segment, ...]


def is_of_rows(region: Region, shape: tuple[int, ...]) -> bool:
    """Return whether a region has all elements of each index along the first axis.

    Examples
    --------
    >>> is_of_rows(Region((2, 0), (4, 3)), (4, 3)), is_of_rows(Region((0, 0), (4, 2)), (4, 3))
    (True, False)
    """
    return (region.start[1:], region.stop[1:]) == ((0,) * (region.ndim - 1), shape[1:])


def find_shards(tensor: OutputTensor) -> list[Shard] | str:
    """Return where the elements of a tensor lie, in C order; or why they lie nowhere.

    A string and a tensor without elements have no shards.
    """
    if tensor.is_cast or tensor.is_scaled:
        return "other values than in the files"
    shards: list[Shard] = []
    whole = Region.whole(tensor.meta.shape)
    for _, stored, src, dst in tensor.pieces(whole) if tensor.meta.nbytes else ():
        if (
            isinstance(src, View)
            or isinstance(dst, Steps)
            or not is_of_rows(src, stored.meta.shape)
        ):
            return "other axes than in the files"
        if stored.file.cipher is not None:
            return "in an encrypted file"
        start = math.prod(stored.meta.shape[1:]) * sum(src.start[:1]) * stored.meta.itemsize
        segments = _cut(stored, start, start + src.size * stored.meta.itemsize)
        shards.append(Shard(dst, tuple(segments)))
    if sum(shard.region.size for shard in shards) < whole.size and tensor.meta.text is None:
        return "elements that no file holds"
    return sorted(shards, key=lambda shard: shard.region.start)


def _cut(stored: StoredTensor, start: int, stop: int) -> Iterator[Segment]:
    """Yield the segments of the bytes from ``start`` to ``stop`` of a stored tensor."""
    at = 0
    for extent in stored.extents:
        first, last = max(start - at, 0), min(stop - at, extent.nbytes)
        if first < last:
            yield Segment(stored.file.path, extent.offset + first, last - first)
        at += extent.nbytes


def join_segments(meta: TensorMeta, segments: Iterable[Segment]) -> Iterator[Shard]:
    """Yield the shards of a tensor whose bytes are ``segments``, each of rows of one file.

    Raises
    ------
    ValueError
        A file has a part of a row, or the rows are not those of the tensor.
    """
    row_nbytes = math.prod(meta.shape[1:]) * meta.itemsize
    row = nbytes = 0
    run: list[Segment] = []
    for segment in segments:
        run.append(segment)
        nbytes += segment.nbytes
        rows, rest = divmod(nbytes, row_nbytes)
        if run[0].path != segment.path or row + rows > (*meta.shape, 1)[0]:
            raise ValueError(f"{meta.name}: rows in parts")
        if not rest:
            whole = Region.whole(meta.shape)
            start, stop = (row, *whole.start[1:]), (row + rows, *whole.stop[1:])
            yield Shard(Region(start, stop) if meta.shape else whole, tuple(run))
            row, nbytes, run = row + rows, 0, []
    if run:
        raise ValueError(f"{meta.name}: rows in parts")


def as_recorded(stamp: FileStamp | None) -> list[int] | None:
    """Return what is recorded of a file: its size, and the time of its modification."""
    return None if stamp is None else [stamp.nbytes, stamp.mtime_ns]
