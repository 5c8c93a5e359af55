"""The bytes of an output tensor in the files of the source, for a virtual output.

A virtual output shows bytes and moves none, so each slice must be a range of a file as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckpttool.model.region import Region, Steps, View
from ckpttool.model.slicing import Box
from ckpttool.model.tensors import Extent, FileStamp, StoredFile, StoredTensor, TensorMeta

if TYPE_CHECKING:
    from ckpttool.model.plan import OutputTensor


def is_of_rows(region: Region, shape: tuple[int, ...]) -> bool:
    """Return whether a region has all elements of each index along the first axis.

    Examples
    --------
    >>> is_of_rows(Region((2, 0), (4, 3)), (4, 3)), is_of_rows(Region((0, 0), (4, 2)), (4, 3))
    (True, False)
    """
    return (region.start[1:], region.stop[1:]) == ((0,) * (region.ndim - 1), shape[1:])


def find_boxes(tensor: OutputTensor) -> tuple[Sequence[Box], str]:
    """Return the boxes of a tensor and their bytes, in C order; and why they lie nowhere, or "".

    A string and a tensor without elements have no boxes.
    """
    if tensor.is_cast or tensor.is_scaled:
        return (), "other values than in the files"
    boxes: list[Box] = []
    whole = Region.whole(tensor.meta.shape)
    for rank, stored, src, dst in tensor.pieces(whole) if tensor.meta.nbytes else ():
        if (
            isinstance(src, View)
            or isinstance(dst, Steps)
            or not is_of_rows(src, stored.meta.shape)
        ):
            return (), "other axes than in the files"
        if stored.file.cipher is not None:
            return (), "in an encrypted file"
        start = math.prod(stored.meta.shape[1:]) * sum(src.start[:1]) * stored.meta.itemsize
        extents = _cut(stored.extents, start, start + src.size * stored.meta.itemsize)
        meta = stored.meta.of_shape(dst.shape)
        boxes.append(Box(dst, rank, StoredTensor(meta, stored.file, tuple(extents))))
    if sum(box.region.size for box in boxes) < whole.size and tensor.meta.text is None:
        return (), "elements that no file holds"
    return sorted(boxes, key=lambda box: box.region.start), ""


def _cut(extents: Iterable[Extent], start: int, stop: int) -> Iterator[Extent]:
    """Yield the extents of the bytes from ``start`` to ``stop`` of a stored tensor."""
    at = 0
    for extent in extents:
        first, last = max(start - at, 0), min(stop - at, extent.nbytes)
        if first < last:
            yield Extent(extent.offset + first, last - first)
        at += extent.nbytes


def join_extents(meta: TensorMeta, extents: Iterable[tuple[str, Extent]]) -> Iterator[Box]:
    """Yield the boxes of a tensor whose bytes are ``extents`` of files, each of rows of one file.

    Raises
    ------
    ValueError
        A file has a part of a row, or the rows are not those of the tensor.
    """
    row_nbytes = math.prod(meta.shape[1:]) * meta.itemsize
    row = nbytes = 0
    run: list[Extent] = []
    begun = ""
    for path, extent in extents:
        begun = path if not run else begun
        run.append(extent)
        nbytes += extent.nbytes
        rows, rest = divmod(nbytes, row_nbytes)
        if begun != path or row + rows > (*meta.shape, 1)[0]:
            raise ValueError(f"{meta.name}: rows in parts")
        if not rest:
            region = Region.whole((rows, *meta.shape[1:]) if meta.shape else ())
            stored = StoredTensor(meta.of_shape(region.shape), StoredFile(path), tuple(run))
            yield Box(region.moved_by((row, *region.start[1:])[: region.ndim]), 0, stored)
            row, nbytes, run = row + rows, 0, []
    if run:
        raise ValueError(f"{meta.name}: rows in parts")


def as_recorded(stamp: FileStamp | None) -> list[int] | None:
    """Return what is recorded of a file: its size, and the time of its modification."""
    return None if stamp is None else [stamp.nbytes, stamp.mtime_ns]
