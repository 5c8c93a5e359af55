"""Read and write regions of tensors, which every format stores as extents of a file.

A region of a C-order tensor is a set of byte runs.  Runs that are close together are read in one
call, with the bytes between them; runs that are far apart are read one by one.  Memory is the
caller's buffer and a scratch buffer of the same size.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator
from itertools import product
from math import prod
from operator import mul

import numpy as np

from ckpttool.concurrency import check_cancelled
from ckpttool.formats.encryption import read_plain
from ckpttool.formats.local import note_read, open_descriptor
from ckpttool.model.plan import OutputTensor, Term, Transfer, is_copy
from ckpttool.model.region import Region
from ckpttool.model.slicing import Piece
from ckpttool.model.tensors import StoredFile, StoredTensor
from ckpttool.problems import FormatError, SourceValueError
from ckpttool.records import record
from ckpttool.storage.casting import SCRATCH_BYTES, Caster
from ckpttool.storage.checksums import RunningCrc, RunningHashes
from ckpttool.storage.means import SUM_BYTES, SUM_SIZE, WeightedSum, first_number
from ckpttool.storage.numbers import Bytes
from ckpttool.system import RWF_DONTCACHE, has_dontcache, read_at, start_writing, write_at

# The largest gap between two runs that is read rather than skipped.  Reading a run by itself takes
# 16 microseconds; in that time 256 KiB are copied from the page cache (measured, rows of 1 KiB).  A
# slow disk favours reading the gap even more.
GAP_BYTES = 128 * 1024
# Bytes written by one call.  For larger calls, Linux uses cache pages of 2 MiB.  A virtual machine
# that returns free memory to its host must request such pages again.  That takes ten times as long
# as the copy (measured: 1 GiB in 4.0 s, in calls of 1 MiB in 0.3 s).
WRITE_BYTES = 1 << 20
STAGE_BYTES = 1 << 20  # that are read before they are cast; they stay in a processor's cache
CAST_BUFFER_BYTES = STAGE_BYTES + SCRATCH_BYTES  # of a worker that casts
MAX_OPEN_FILES = 128  # of one worker; the usual limit of a process with several is 1024


def rounding_bytes(tensor: OutputTensor | Transfer) -> int:
    """Return the bytes of the buffers of a worker that casts or averages a tensor; 0 for none."""
    if not tensor.is_cast:
        return 0
    return CAST_BUFFER_BYTES if is_copy(tensor.terms) else CAST_BUFFER_BYTES + SUM_BYTES


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


class FlatFiles:
    """Open files by path; when there are too many, the least recently used is closed.

    Use as a context manager, in one thread.

    Attributes
    ----------
    scratch_used
        Bytes of the scratch buffer that are in use.
    caster
        Casts what is read, and has the statistics of that; None before the first cast.
    """

    def __init__(
        self,
        scratch_bytes: int,
        written_crc: RunningCrc | None = None,
        read_hashes: RunningHashes | None = None,
    ) -> None:
        self._written_crc = written_crc
        self._read_hashes = read_hashes
        self._open: OrderedDict[tuple[str, int], int] = OrderedDict()  # by path and flags
        self._scratch_bytes = scratch_bytes
        self._scratch: Bytes | None = None
        self.scratch_used = 0
        self._cached: dict[tuple[str, int], _CachedBytes] = {}  # by `_first_byte`
        self._uses_dontcache = has_dontcache()
        self._stage: Bytes | None = None
        self._sum: WeightedSum | None = None
        self.caster: Caster | None = None

    def __enter__(self) -> FlatFiles:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, file: StoredFile, flags: int) -> int:
        path = file.path
        fd = self._open.get((path, flags))
        while fd is None:
            if len(self._open) >= MAX_OPEN_FILES:
                self._close_oldest()
            try:
                fd = self._open[path, flags] = open_descriptor(file, flags)
            except OSError as error:  # the limit of macOS is 256 for the whole process
                if error.errno != errno.EMFILE or not self._open:
                    raise
                self._close_oldest()
        self._open.move_to_end((path, flags))
        return fd

    def _close_oldest(self) -> None:
        os.close(self._open.popitem(last=False)[1])

    def read_bytes(self, tensor: StoredTensor, offset: int, out: Bytes) -> None:
        """Fill ``out`` with the tensor's decrypted bytes from ``offset`` on, across its extents."""
        check_cancelled()
        fd = self._descriptor(tensor.file, os.O_RDONLY)
        try:
            for at, part in split_at_extents(tensor, offset, out.data):
                if tensor.file.cipher is not None:
                    read_plain(fd, tensor.file.path, tensor.file.cipher, at, part)
                    continue
                while part:
                    got = read_at(fd, part, at)
                    if got == 0:
                        reason = f"{tensor.meta.name}: the file ends here"
                        raise FormatError(tensor.file.path, at, reason)
                    note_read(got)
                    at, part = at + got, part[got:]
        except OSError as error:  # names no file, because the call has a descriptor
            error.filename = error.filename or tensor.file.path
            raise

    def write_bytes(self, tensor: StoredTensor, offset: int, data: Bytes) -> None:
        """Write ``data`` over the tensor's bytes from ``offset`` on, across its extents."""
        self._cached.pop(_first_byte(tensor), None)
        fd = self._descriptor(tensor.file, os.O_RDWR)
        for start, part in split_at_extents(tensor, offset, data.data):
            if self._written_crc is not None:
                self._written_crc.add(tensor.file.path, tensor.meta.name, start, part)
            at = start
            try:
                while part:
                    done = self._write(fd, part, at)
                    at, part = at + done, part[done:]
            except OSError as error:
                error.filename = error.filename or tensor.file.path
                raise
            # The write to disk then runs while the next band is read, and leaves little for the
            # final sync.
            if not self._uses_dontcache:
                start_writing(fd, start, at - start)

    def _write(self, fd: int, part: memoryview, at: int) -> int:
        """Write the first bytes of ``part`` at ``at``; return how many.

        An incomplete page stays in the cache, because another call writes the rest of it.
        Otherwise that call would read the page from disk again.
        """
        if not self._uses_dontcache:
            return write_at(fd, part[:WRITE_BYTES], at)
        nbytes = min(len(part), -at % mmap.PAGESIZE or WRITE_BYTES)
        whole = 0 if at % mmap.PAGESIZE else nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            return write_at(fd, part[: whole or nbytes], at, RWF_DONTCACHE if whole else 0)
        except OSError as error:  # EOPNOTSUPP: the file system does not support the flag
            if not whole or error.errno != errno.EOPNOTSUPP:
                raise
        except NotImplementedError:  # a Python that was built for a Linux without pwritev2
            assert whole, "a call without flags does not need pwritev2"
        self._uses_dontcache = False
        return self._write(fd, part, at)

    def read_region(self, tensor: StoredTensor, region: Region, out: Bytes) -> None:
        """Copy a region of a stored tensor into an array.

        Parameters
        ----------
        tensor
            Where the tensor is stored.
        region
            Elements to read.
        out
            Array of ``region.shape`` and one last axis of ``itemsize`` bytes.  Its strides are
            free, except that the last axis is contiguous.
        """
        if not region.size:
            return
        shape, itemsize = tensor.meta.shape, tensor.meta.itemsize
        runs = find_runs(region, shape, itemsize)
        if runs.count == 1 and out.flags.c_contiguous:
            self.read_bytes(tensor, runs.first, out.reshape(-1))
        elif runs.are_close and runs.last - runs.first <= self._scratch_bytes:
            self._read_through(tensor, region, runs, out)
        elif not runs.are_close and out[(0,) * runs.axis].flags.c_contiguous:
            self._read_runs(tensor, region, runs, out)
        else:
            for half, at in _split_in_half(region):
                self.read_region(tensor, half, out[at])

    def read_piece(self, piece: Piece, out: Bytes, input: int = 0) -> None:
        """Copy a piece of an input as `read_region` does; hash it if it is one run of bytes."""
        tensor, region = piece.tensor, piece.src
        self.read_region(tensor, region, out)
        if self._read_hashes is None or not region.size:
            return
        runs = find_runs(region, tensor.meta.shape, tensor.meta.itemsize)
        if runs.count == 1:
            data = np.ascontiguousarray(out).reshape(-1).data
            self._read_hashes.add(tensor, runs.first, data)

    def _read_runs(self, tensor: StoredTensor, region: Region, runs: Runs, out: Bytes) -> None:
        """Read each run by itself."""
        strides = _strides(tensor.meta.shape, tensor.meta.itemsize)
        for index in product(*map(range, region.shape[: runs.axis])):
            offset = runs.first + sum(map(mul, index, strides))
            self.read_bytes(tensor, offset, out[index].reshape(-1))

    def _read_through(self, tensor: StoredTensor, region: Region, runs: Runs, out: Bytes) -> None:
        """Copy runs from the scratch buffer; first read them into it, gaps included, if needed."""
        key = _first_byte(tensor)
        cached = self._cached.get(key)
        if cached is None or runs.first < cached.first or cached.last < runs.last:
            first, last = runs.rows  # whole rows, because the next region often needs their rest
            if last - first > self._scratch_bytes:
                first, last = runs.first, runs.last
            scratch, at = self._take_scratch(last - first)
            self.read_bytes(tensor, first, scratch[at : at + last - first])
            cached = self._cached[key] = _CachedBytes(first, last, scratch[at:])
        part = cached.data[runs.first - cached.first :]
        self._copy(out, _as_view(part, region, tensor.meta.shape, tensor.meta.itemsize))

    def _copy(self, out: Bytes, read: Bytes) -> None:
        np.copyto(out, read)

    def stage(self, nbytes: int) -> Bytes:
        """Return a buffer for at most `STAGE_BYTES` that are cast; the next call overwrites it."""
        if self._stage is None:
            self._stage = np.empty(STAGE_BYTES, np.uint8)
        return self._stage[:nbytes]

    def start_sum(self, size: int) -> None:
        """Begin a sum of ``size`` elements, at most `SUM_SIZE`."""
        if self._sum is None:
            self._sum = WeightedSum()
        self._sum.start(size)

    def add(self, data: Bytes, src: str, weight: float) -> None:
        """Add elements of one type, each multiplied by ``weight``, to the sum."""
        assert self._sum is not None, "the sum was begun"
        self._sum.add(data, src, weight)

    def take_sum(self, out: Bytes, dst: str) -> int | None:
        """Round the sum to an element type, once; ``out`` is as for `cast`.

        Return the first element that is not finite, None if all are.
        """
        assert self._sum is not None, "the sum was begun"
        at, data = self._sum.find_not_finite(), self._sum.total.view(np.uint8)
        if at is None and dst == "Float64":
            out[...] = data.reshape(out.shape)
        elif at is None:
            self.cast(data, "Float64", out, dst)
        return at

    def cast(self, data: Bytes, src: str, out: Bytes, dst: str) -> None:
        """Cast elements; ``out`` has their shape and one last axis of bytes."""
        if self.caster is None:
            self.caster = Caster()
        flat = out.reshape(-1)  # a copy unless the elements are contiguous
        self.caster.cast(data, src, flat, dst)
        if not out.flags.c_contiguous:
            out[...] = flat.reshape(out.shape)

    def _take_scratch(self, nbytes: int) -> tuple[Bytes, int]:
        """Return the scratch buffer and its first free byte; clear it if it is too full."""
        if self._scratch is None:
            self._scratch = np.empty(self._scratch_bytes, np.uint8)
        if self.scratch_used + nbytes > self._scratch_bytes:
            self._cached.clear()
            self.scratch_used = 0
        at, self.scratch_used = self.scratch_used, self.scratch_used + nbytes
        return self._scratch, at


def read_band(files: FlatFiles, tensor: OutputTensor, band: Region, out: Bytes) -> None:
    """Read a band of an output tensor from its terms.

    Parameters
    ----------
    files
        Opens the source files.
    tensor
        One term is copied, and cast if its element type is another one.  Of several terms the
        weighted sum is computed in Float64, in their order, and rounded once.
    band
        Elements of the output slice.
    out
        Array of ``band.shape`` and one last axis of ``itemsize`` bytes.

    Raises
    ------
    OSError
        A file cannot be read.
    FormatError
        A file has become shorter since its header was read.
    SourceValueError
        A number of a sum is NaN or infinite.
    """
    stored, wanted = tensor.terms[0].source.meta, tensor.meta
    if not is_copy(tensor.terms):
        for part in band.bands(SUM_SIZE):
            _read_sum(files, tensor, part, out[_within(part, band)])
        return
    if stored.dtype == wanted.dtype:
        _read_pieces(files, tensor, tensor.terms[0], band, out)
        return
    for part in band.bands(STAGE_BYTES // stored.itemsize):
        data = _read_staged(files, tensor, tensor.terms[0], part)
        files.cast(data, stored.dtype, out[_within(part, band)], wanted.dtype)


def _read_sum(files: FlatFiles, tensor: OutputTensor, part: Region, out: Bytes) -> None:
    """Read the weighted sum of the terms, of at most `SUM_SIZE` elements."""
    files.start_sum(part.size)
    for term in tensor.terms:
        data = _read_staged(files, tensor, term, part)
        files.add(data, term.source.meta.dtype, term.weight)
    at = files.take_sum(out, tensor.meta.dtype)
    if at is not None:
        raise _value_error(files, tensor, part, at)


def _value_error(files: FlatFiles, tensor: OutputTensor, part: Region, at: int) -> SourceValueError:
    """Return the error of the element ``at`` of a part, whose sum is not finite."""
    index = np.unravel_index(at, part.shape)
    start = tuple(a + int(i) for a, i in zip(part.start, index, strict=True))
    one = Region(start, tuple(i + 1 for i in start))
    for term in tensor.terms:
        number = first_number(_read_staged(files, tensor, term, one), term.source.meta.dtype)
        if not np.isfinite(number):
            (piece,) = term.pieces(one, tensor.region.start)
            where = [*one.moved_by(tensor.region.start).start]
            what = "NaN" if np.isnan(number) else "Inf"
            text = f"{piece.tensor.meta.name}: {what} at {where}, in the file of rank {piece.rank}"
            hint = "an input without it, or --exclude with this tensor"
            return SourceValueError(piece.tensor.file.path, [text], hint)
    path = next(tensor.terms[-1].pieces(one, tensor.region.start)).tensor.file.path
    text = f"{tensor.meta.name}: the mean is beyond the numbers of Float64"
    return SourceValueError(path, [text], "--exclude with this tensor")


def _read_staged(files: FlatFiles, tensor: OutputTensor, term: Term, part: Region) -> Bytes:
    """Return the stored bytes of a part of a band; the next call overwrites them."""
    itemsize = term.source.meta.itemsize
    data = files.stage(part.size * itemsize)
    _read_pieces(files, tensor, term, part, data.reshape(*part.shape, itemsize))
    return data


def _read_pieces(
    files: FlatFiles, tensor: OutputTensor, term: Term, band: Region, out: Bytes
) -> None:
    """Read a band from the pieces of a term, in the stored element type."""
    filled = 0
    for piece in term.pieces(band, tensor.region.start):
        files.read_piece(piece, out[_within(piece.dst, band)], term.input)
        filled += piece.dst.size
    assert filled == band.size, f"{band}: {filled} of {band.size} elements"


def _within(region: Region, band: Region) -> tuple[slice, ...]:
    """Return the slices of an array of ``band`` that are those of a region in it."""
    inside = region.relative_to(band.start)
    return tuple(slice(a, b) for a, b in zip(inside.start, inside.stop, strict=True))


def _first_byte(tensor: StoredTensor) -> tuple[str, int]:
    """Return the path and offset of a tensor's bytes; its name may occur twice in a file."""
    return tensor.file.path, tensor.extents[0].offset if tensor.extents else 0


@record
class _CachedBytes:
    """Bytes ``first`` to ``last`` of a tensor, at the start of ``data``."""

    first: int
    last: int
    data: Bytes


@record
class Runs:
    """The byte runs of a region in a tensor.

    Attributes
    ----------
    first, last
        Byte of the tensor where the first run begins, and where the last run ends.
    count, nbytes
        Number of runs, and bytes in all runs together.
    axis
        First axis along which one run holds several positions.  Each index of the axes before it
        has a run of its own.
    stride
        Bytes between two positions on the first of those axes where the region has several.
    """

    first: int
    last: int
    count: int
    nbytes: int
    axis: int
    stride: int

    @property
    def are_close(self) -> bool:
        """Whether reading the gaps is faster than skipping them."""
        return self.last - self.first - self.nbytes <= (self.count - 1) * GAP_BYTES

    @property
    def rows(self) -> tuple[int, int]:
        """First and last byte of the rows, one stride long, that contain the runs."""
        if self.count == 1:
            return self.first, self.last
        return self.first // self.stride * self.stride, -(-self.last // self.stride) * self.stride


def find_runs(region: Region, shape: tuple[int, ...], itemsize: int) -> Runs:
    """Return the runs of a non-empty region in a tensor of ``shape``."""
    wanted = region.shape
    strides = _strides(shape, itemsize)
    axis = len(shape)
    while axis > 0 and (axis == len(shape) or wanted[axis] == shape[axis]):
        axis -= 1
    first = sum(map(mul, region.start, strides))
    last = first + itemsize + sum(map(mul, wanted, strides)) - sum(strides)
    count = prod(wanted[:axis])
    outer = next((strides[i] for i in range(axis) if wanted[i] > 1), 0)
    return Runs(first, last, count, prod(wanted) * itemsize, axis, outer)


def _split_in_half(region: Region) -> Iterator[tuple[Region, tuple[slice, ...]]]:
    """Yield both halves of a region along its first divisible axis, and their slices of it."""
    shape = region.shape
    axis = next(i for i, n in enumerate(shape) if n > 1)
    middle = shape[axis] // 2
    for start, stop in ((0, middle), (middle, shape[axis])):
        inside = Region(
            (*(0,) * axis, start, *(0,) * (len(shape) - axis - 1)),
            (*shape[:axis], stop, *shape[axis + 1 :]),
        )
        at = tuple(slice(a, b) for a, b in zip(inside.start, inside.stop, strict=True))
        yield inside.moved_by(region.start), at


def split_at_extents(
    tensor: StoredTensor, offset: int, view: memoryview
) -> Iterator[tuple[int, memoryview]]:
    """Yield the file offset and the part of ``view`` for each extent that it overlaps."""
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


def _as_view(scratch: Bytes, region: Region, shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return a view of a region in a buffer that begins with the region's first byte."""
    strides = (*_strides(shape, itemsize), 1)
    return np.ndarray((*region.shape, itemsize), np.uint8, scratch, 0, strides)
