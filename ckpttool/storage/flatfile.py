"""Reads and writes regions of tensors, for every format, since each is extents of a file.

A region of a C-order tensor is a set of byte runs.  Runs that lie close together are read at once
with the bytes between them; runs that lie far apart are read one by one.  Nothing larger than the
caller's buffer and a scratch buffer of the same size is held.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ckpttool.errors import FormatError
from ckpttool.formats.decryption import read_plain
from ckpttool.model.catalog import StoredTensor
from ckpttool.model.region import Region

# Bytes between two runs that are read rather than skipped.  A run read by itself takes 16
# microseconds, in which 256 KiB are copied from the page cache (measured, rows of 1 KiB); a disk
# that has to be waited for moves the balance further towards reading through.
GAP_BYTES = 128 * 1024
MAX_OPEN_FILES = 128  # well below the usual limit of 1024 file descriptors, several workers counted

Bytes = npt.NDArray[np.uint8]


def _first_contiguous_axis(region: Region, shape: tuple[int, ...]) -> int:
    """The axis from which on a run goes: all axes behind it are whole."""
    axis = len(shape)
    while axis > 0:
        axis -= 1
        if region.stop[axis] - region.start[axis] != shape[axis]:
            break
    return axis


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


class FlatFiles:
    """Open files by path, the least recently used closed when there are too many.

    Use as a context manager, in one thread.
    """

    def __init__(self, scratch_bytes: int) -> None:
        self._open: OrderedDict[tuple[str, int], int] = OrderedDict()  # by path and flags
        self._scratch_bytes = scratch_bytes
        self._scratch: Bytes | None = None

    def __enter__(self) -> FlatFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: str, flags: int) -> int:
        fd = self._open.get((path, flags))
        if fd is None:
            if len(self._open) >= MAX_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            fd = self._open[path, flags] = os.open(path, flags | os.O_CLOEXEC)
        self._open.move_to_end((path, flags))
        return fd

    def read_bytes(self, tensor: StoredTensor, offset: int, out: Bytes) -> None:
        """Fill ``out`` with the tensor's bytes from ``offset`` on, across extents, decrypted."""
        fd = self._descriptor(tensor.path, os.O_RDONLY)
        try:
            for at, part in _split(tensor, offset, out.data):
                if tensor.cipher is not None:
                    read_plain(fd, tensor.path, tensor.cipher, at, part)
                    continue
                while part:
                    got = os.preadv(fd, [part], at)
                    if got == 0:
                        reason = (
                            f"{tensor.meta.name}: the file ends here; it has changed while read"
                        )
                        raise FormatError(tensor.path, at, reason)
                    at, part = at + got, part[got:]
        except OSError as error:  # of a descriptor, so the system does not say of which file
            error.filename = error.filename or tensor.path
            raise

    def write_bytes(self, tensor: StoredTensor, offset: int, data: Bytes) -> None:
        """Write ``data`` over the tensor's bytes from ``offset`` on, across its extents."""
        fd = self._descriptor(tensor.path, os.O_RDWR)
        try:
            for at, part in _split(tensor, offset, data.data):
                while part:
                    done = os.pwrite(fd, part, at)
                    at, part = at + done, part[done:]
        except OSError as error:
            error.filename = error.filename or tensor.path
            raise

    def read_region(self, tensor: StoredTensor, region: Region, out: Bytes) -> None:
        """Copy a region of a stored tensor into an array.

        Parameters
        ----------
        tensor
            Where it is stored.
        region
            Elements of it.
        out
            ``region.shape`` and one last axis of ``itemsize`` bytes, any strides but for that
            last axis.
        """
        shape, itemsize = tensor.meta.shape, tensor.meta.itemsize
        if not region.size:
            return
        first, last = _span(region, shape, itemsize)
        held = last - first
        wanted = region.size * itemsize
        if held == wanted and out.flags.c_contiguous:
            self.read_bytes(tensor, first, out.reshape(-1))
            return
        cut = _first_contiguous_axis(region, shape)
        count = int(np.prod(region.shape[:cut], dtype=np.int64))
        if held <= self._scratch_bytes and held - wanted <= (count - 1) * GAP_BYTES:
            scratch = self._scratch_of(held)
            self.read_bytes(tensor, first, scratch)
            np.copyto(out, _as_view(scratch, region, shape, itemsize))
            return
        axis = next(i for i, n in enumerate(region.shape) if n > 1)
        middle = (region.start[axis] + region.stop[axis]) // 2
        for start, stop in ((region.start[axis], middle), (middle, region.stop[axis])):
            half = Region(
                (*region.start[:axis], start, *region.start[axis + 1 :]),
                (*region.stop[:axis], stop, *region.stop[axis + 1 :]),
            )
            at = (slice(None),) * axis
            at += (slice(start - region.start[axis], stop - region.start[axis]),)
            self.read_region(tensor, half, out[at])

    def _scratch_of(self, nbytes: int) -> Bytes:
        if self._scratch is None:
            self._scratch = np.empty(self._scratch_bytes, np.uint8)
        return self._scratch[:nbytes]


def _split(tensor: StoredTensor, offset: int, view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """File offset and part of ``view`` for each extent that it falls on."""
    for extent in tensor.extents:
        if not view:
            return
        if offset < extent.nbytes:
            part = view[: extent.nbytes - offset]
            yield extent.offset + offset, part
            view, offset = view[len(part) :], 0
        else:
            offset -= extent.nbytes
    if view:
        raise ValueError(f"{tensor.meta.name}: {len(view)} bytes beyond its last extent")


def _span(region: Region, shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """First byte of a region in its tensor, and the byte behind its last."""
    strides = _strides(shape, itemsize)
    first = sum(a * s for a, s in zip(region.start, strides, strict=True))
    last = sum((b - 1) * s for b, s in zip(region.stop, strides, strict=True))
    return first, last + itemsize


def _as_view(scratch: Bytes, region: Region, shape: tuple[int, ...], itemsize: int) -> Bytes:
    """The region, seen in a buffer that begins at its first byte."""
    return np.lib.stride_tricks.as_strided(
        scratch, (*region.shape, itemsize), (*_strides(shape, itemsize), 1), writeable=False
    )
