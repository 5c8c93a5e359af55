"""Read and write regions of tensors, which every format stores as extents of a file.

A region of a C-order tensor is a set of byte runs.  Runs that are close together are read in one
call, with the bytes between them; runs that are far apart are read one by one.  Memory is the
caller's buffer and a scratch buffer of the same size.  Plans say which regions are read, and in
which order.  So one reader serves the copy, ``verify``, ``diff`` and samples.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import isqrt, prod
from operator import mul
from typing import NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.lib.stride_tricks import as_strided

from ckpttool.concurrency import check_cancelled
from ckpttool.formats.encryption import read_plain
from ckpttool.formats.local import note_read, open_descriptor
from ckpttool.model.plan import OutputTensor, Term, Transfer, is_copy
from ckpttool.model.region import Region, Steps, View, common
from ckpttool.model.slicing import FullTensor, RearrangedSlicing
from ckpttool.model.tensors import StoredFile, StoredTensor, TensorMeta
from ckpttool.problems import FormatError, SourceValueError
from ckpttool.storage.casting import SCRATCH_BYTES, Caster
from ckpttool.storage.checksums import RunningCrc, RunningHashes
from ckpttool.storage.means import SUM_BYTES, SUM_SIZE, WeightedSum, find_numbers
from ckpttool.storage.numbers import Bytes, Flags, copy_elements
from ckpttool.system import RWF_DONTCACHE, has_dontcache, read_at, start_writing, write_at

# The largest gap between two runs that is read rather than skipped.  Reading a run by itself takes
# 16 microseconds; in that time 256 KiB are copied from the page cache (measured, rows of 1 KiB).  A
# slow disk favours reading the gap even more.
GAP_BYTES = 128 * 1024
# Bytes written by one call.  For larger calls, Linux uses cache pages of 2 MiB.  A virtual machine
# that returns free memory to its host must request such pages again.  That takes ten times as long
# as the copy (measured: 1 GiB in 4.0 s, in calls of 1 MiB in 0.3 s).
WRITE_BYTES = 1 << 20
# Fewer bytes are one write, and stay in the cache.  Their incomplete pages at both ends would take
# calls of their own (measured for 10 KB: three calls of 8 microseconds, instead of one of 6).
SMALL_BYTES = 1 << 16
STAGE_BYTES = 1 << 20  # that are read before they are cast; they stay in a processor's cache
CAST_BUFFER_BYTES = STAGE_BYTES + SCRATCH_BYTES  # of a worker that casts
# That are read at once of a turned tensor which is cast; see `RearrangedSlicing.is_turned`.
TURNED_BYTES = 1 << 23
ROW_BYTES = 1 << 14  # that are read of scales at a time; those of 2 MiB of Float8 take 512 bytes
MAX_OPEN_FILES = 128  # of one worker; the usual limit of a process with several is 1024


def turned_bands(tensor: FullTensor) -> int:
    """Return how many bands of a tensor are read at once: a unit of one whose rows lie far apart.

    See `RearrangedSlicing.is_turned`: each band reads all rows of its parts, however few its own.
    """
    return 2 if tensor.is_turned else 1


def rounding_bytes(tensor: OutputTensor | Transfer) -> int:
    """Return the bytes of the buffers of a worker that casts or averages a tensor; 0 for none."""
    of_means = 0
    if isinstance(slicing := tensor.source.slicing, RearrangedSlicing) and slicing.padding:
        of_means = (slicing.padding == "mean") * (CAST_BUFFER_BYTES + 2 * SUM_BYTES + STAGE_BYTES)
    if not tensor.is_cast:
        return of_means
    of_means += TURNED_BYTES if tensor.source.is_turned else 0
    return of_means + CAST_BUFFER_BYTES + (0 if is_copy(tensor.terms) else SUM_BYTES)


class FlatFiles:
    """Open files by path; when there are too many, the one opened first is closed.

    Use as a context manager, in one thread.  ``caster`` casts what is read, and has the statistics
    of that; it is None before the first cast.
    """

    def __init__(
        self,
        scratch_bytes: int,
        written_crc: RunningCrc | None = None,
        read_hashes: RunningHashes | None = None,
    ) -> None:
        self._written_crc = written_crc
        self._read_hashes = read_hashes
        self._open: dict[tuple[str, int], int] = {}  # by path and flags
        self._scratch_bytes = scratch_bytes
        self._scratch: Bytes | None = None
        self.scratch_used = 0
        self._cached: dict[Hashable, _CachedBytes] = {}  # by stored tensor
        self._uses_dontcache = has_dontcache()
        self._stage: Bytes | None = None
        self._held: Bytes | None = None
        self._sum: WeightedSum | None = None
        self.caster: Caster | None = None
        self._means: tuple[OutputTensor, Bytes] | None = None

    def __enter__(self) -> FlatFiles:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:
            self._close_first()

    def _descriptor(self, file: StoredFile, flags: int) -> int:
        path = file.path
        fd = self._open.get((path, flags))
        while fd is None:
            if len(self._open) >= MAX_OPEN_FILES:
                self._close_first()
            try:
                fd = self._open[path, flags] = open_descriptor(file, flags)
            except OSError as error:  # the limit of macOS is 256 for the whole process
                if error.errno != errno.EMFILE or not self._open:
                    raise
                self._close_first()
        return fd

    def _close_first(self) -> None:
        os.close(self._open.pop(next(iter(self._open))))

    def read_bytes(self, tensor: StoredTensor, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the tensor's decrypted bytes from ``offset`` on, across its extents."""
        check_cancelled()
        file = tensor.file
        fd = self._descriptor(file, os.O_RDONLY)
        try:
            for at, part in split_at_extents(tensor, offset, out):
                if file.cipher is not None:
                    read_plain(fd, file.path, file.cipher, at, part)
                    continue
                while part:
                    got = read_at(fd, part, at)
                    if got == 0:
                        reason = f"{tensor.meta.name}: the file ends here"
                        raise FormatError(file.path, at, reason)
                    note_read(got)
                    at, part = at + got, part[got:]
        except OSError as error:  # names no file, because the call has a descriptor
            error.filename = error.filename or file.path
            raise

    def write_bytes(self, tensor: StoredTensor, offset: int, data: memoryview) -> None:
        """Write ``data`` over the tensor's bytes from ``offset`` on, across its extents.

        The tensor must not be read with the same files: the scratch buffer may have old bytes.
        """
        fd = self._descriptor(tensor.file, os.O_RDWR)
        for start, part in split_at_extents(tensor, offset, data):
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
            if not self._uses_dontcache and at - start >= SMALL_BYTES:
                start_writing(fd, start, at - start)

    def _write(self, fd: int, part: memoryview, at: int) -> int:
        """Write the first bytes of ``part`` at ``at``; return how many.

        An incomplete page stays in the cache, because another call writes the rest of it.
        Otherwise that call would read the page from disk again.
        """
        if not self._uses_dontcache or len(part) < SMALL_BYTES:
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

    def plan_moves(self, key: Hashable, meta: TensorMeta, runs: Runs, out: Bytes) -> Iterable[Move]:
        """Return the moves that read elements of a stored tensor, to be made in this order.

        They are a tuple, unless there may be many.

        Parameters
        ----------
        key
            Distinguishes the stored tensor from all others: what the scratch buffer has of it is
            not read again.
        runs
            The byte runs of the elements, at least one.
        out
            Array of their shape and one last axis of ``itemsize`` bytes.  Its strides are free,
            except that the last axis is contiguous.
        """
        if runs.count == 1 and out.flags.c_contiguous:
            return (Move(runs.first, out.reshape(-1).data, None, None),)
        if runs.are_close and runs.last - runs.first <= self._scratch_bytes:
            return (self._through_scratch(key, meta, runs, out),)
        return self._plan_many(key, meta, runs, out)

    def _plan_many(self, key: Hashable, meta: TensorMeta, runs: Runs, out: Bytes) -> Iterator[Move]:
        """Yield the moves of runs that are far apart, or too many for the scratch buffer."""
        view = runs.view
        if not runs.are_close and out[(0,) * runs.axis].flags.c_contiguous:
            for index in product(*map(range, view.shape[: runs.axis])):
                offset = runs.first + sum(map(mul, index, view.strides)) * meta.itemsize
                yield Move(offset, out[index].reshape(-1).data, None, None)
        else:
            for half, at in _split_in_half(view):
                yield from self.plan_moves(key, meta, find_runs(half, meta), out[at])

    def _through_scratch(self, key: Hashable, meta: TensorMeta, runs: Runs, out: Bytes) -> Move:
        """Return the move of runs through the scratch buffer, gaps included, if they are not there.

        Whole rows are read, because the next region often needs their rest.
        """
        cached, into = self._cached.get(key), None
        if cached is None or runs.first < cached.first or cached.last < runs.last:
            first, last = runs.rows
            last = min(last, meta.nbytes)
            if last - first > self._scratch_bytes:
                first, last = runs.first, runs.last
            scratch, at = self._take_scratch(last - first)
            into = scratch[at : at + last - first].data
            cached = self._cached[key] = _CachedBytes(first, last, scratch[at:])
        part = cached.data[runs.first - cached.first :]
        strides = (*(step * meta.itemsize for step in runs.view.strides), 1)
        shape = (*runs.view.shape, meta.itemsize)
        return Move(cached.first, into, out, np.ndarray(shape, np.uint8, part, 0, strides))

    def read_piece(self, read: PieceRead, term: Term) -> None:
        """Make the moves of a piece of a term; hash it if it is one run of bytes."""
        tensor: StoredTensor | None = None  # looking it up takes longer than to copy what was read
        first = None if self._read_hashes is None else read.first
        for offset, into, dst, src in read.moves:
            if into is not None:
                tensor = tensor or read.find(term)[1]
                self.read_bytes(tensor, offset, into)
            if dst is not None and src is not None:
                copy_elements(dst, src)
            if first is not None and self._read_hashes is not None:
                data = into if src is None else src.reshape(-1).data
                assert data is not None, "a move has bytes"
                self._read_hashes.add(tensor or read.find(term)[1], first, data)
                first += len(data)

    def clear(self, out: Bytes) -> None:
        """Make all elements zero."""
        out[...] = 0

    def pad(self, out: Bytes, rows: OutputTensor) -> None:
        """Make each row the mean of ``rows``."""
        out[...] = self.mean_of(rows)

    def mean_of(self, rows: OutputTensor) -> Bytes:
        """Return the mean of rows, which are read once for all bands of a tensor."""
        if self._means is None or self._means[0] != rows:
            self._means = rows, self.average(rows)
        return self._means[1]

    def average(self, tensor: OutputTensor) -> Bytes:
        """Return the mean of the rows of a tensor; they are added in their order, in Float64.

        It is rounded once.  Other buffers are used, since moves of this tensor are planned already.
        """
        meta, mean = tensor.meta, WeightedSum()
        with FlatFiles(STAGE_BYTES) as files:
            mean.start(prod(meta.shape[1:]))
            for rows in read_rows(files, tensor):
                for row in rows:
                    mean.add(row, meta.dtype, 1.0)
            total = mean.total / meta.shape[0]
            data = total.view(np.uint8)
            if meta.dtype != "Float64":
                data = np.empty(len(total) * meta.itemsize, np.uint8)
                files.cast(total.view(np.uint8), "Float64", data, meta.dtype)
        return data.reshape(*meta.shape[1:], meta.itemsize)

    def forget(self) -> None:
        """Clear the scratch buffer."""
        self._cached.clear()
        self.scratch_used = 0

    def stage(self, nbytes: int) -> Bytes:
        """Return a buffer for at most `STAGE_BYTES` that are cast; the next call overwrites it."""
        if self._stage is None:
            self._stage = np.empty(STAGE_BYTES, np.uint8)
        return self._stage[:nbytes]

    def hold(self, nbytes: int) -> Bytes:
        """Return a buffer for at most `TURNED_BYTES` of a turned tensor; see `stage`."""
        if self._held is None:
            self._held = np.empty(TURNED_BYTES, np.uint8)
        return self._held[:nbytes]

    def start_sum(self, size: int) -> None:
        """Begin a sum of ``size`` elements, at most `SUM_SIZE`."""
        if self._sum is None:
            self._sum = WeightedSum()
        self._sum.start(size)

    def add(self, data: Bytes, src: str, weight: float) -> None:
        """Add elements of one type, each multiplied by ``weight``, to the sum."""
        assert self._sum is not None, "the sum was begun"
        self._sum.add(data, src, weight)

    def multiply(self, data: Bytes, src: str) -> None:
        """Multiply the elements of the sum by scales of one type."""
        assert self._sum is not None, "the sum was begun"
        self._sum.multiply(data, src)

    def add_product(self, product: _AddProduct, terms: Sequence[Term]) -> None:
        """Add the product of the rows and the columns that were read to the sum."""
        assert self._sum is not None, "the sum was begun"
        dtypes = [term.source.meta.dtype for term in terms]
        rows, columns = map(find_numbers, product.data, dtypes)
        rank = terms[0].source.meta.shape[-1]
        shaped = rows.reshape(-1, rank), columns.reshape(rank, -1)
        at_once = 1 if "Float64" in dtypes else 2
        self._sum.add_product(*shaped, terms[1].weight, product.are_there, at_once)

    def take_sum(self, out: Bytes, dst: str, *, is_finite: bool) -> int | None:
        """Round the sum to an element type, once; ``out`` is as for `cast`.

        Return the first element that is not finite; None if all are, or need not be.
        """
        assert self._sum is not None, "the sum was begun"
        at = self._sum.find_not_finite() if is_finite else None
        total, single = self._sum.total, self._sum.single
        if at is None and dst == "Float64":
            out[...] = total.view(np.uint8).reshape(out.shape)
        elif at is None and single is not None and dst != "Float32":
            self.cast(single.view(np.uint8), "Float32", out, dst)  # in a third of the time
        elif at is None:
            self.cast(total.view(np.uint8), "Float64", out, dst)
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
            self.forget()
        at, self.scratch_used = self.scratch_used, self.scratch_used + nbytes
        return self._scratch, at


class Move(NamedTuple):
    """A read of a stored tensor's bytes from ``offset`` on, and a copy of what was read.

    ``into`` is filled, unless it is None.  Then ``src`` is copied to ``dst``, unless they are None.
    """

    offset: int
    into: memoryview | None
    dst: Bytes | None
    src: Bytes | None


class Origin(NamedTuple):
    """A rank of a source, and the number of this source in ``Plan.inputs``."""

    input: int
    rank: int


class PieceRead(Struct, frozen=True):
    """The reads of a piece of a term; the same for all tensors of a kind."""

    term: int  # the number of the term
    place: Hashable  # the slice; see `LayoutSlicing.find`
    nbytes: int  # bytes of the piece
    moves: Iterable[Move]  # the moves that read it
    first: int | None  # the byte of the stored tensor where it begins, if it is one run of bytes

    def run(self, files: FlatFiles, tensor: OutputTensor) -> None:
        """Read the piece of a tensor."""
        files.read_piece(self, tensor.terms[self.term])

    def find(self, term: Term) -> tuple[int, StoredTensor]:
        """Return the rank that has the piece of a term, and its stored tensor."""
        return term.source.slicing.find(self.place)


class _Clear(Struct, frozen=True):
    """Elements that are zero unless a piece has them."""

    out: Bytes

    def run(self, files: FlatFiles, tensor: OutputTensor) -> None:
        files.clear(self.out)


class _Pad(Struct, frozen=True):
    """Rows of a band that are means; ``rows`` are the elements of the full tensor that they are of.

    They come last: what they are the means of are rows as they are written.
    """

    out: Bytes
    rows: Region

    def run(self, files: FlatFiles, tensor: OutputTensor) -> None:
        meta = tensor.meta.of_shape(self.rows.shape)
        files.pad(self.out, OutputTensor(meta, self.rows, tensor.terms))


class _Take(Struct, frozen=True):
    """Elements that were read with others, which are copied."""

    src: Bytes
    out: Bytes

    def run(self, files: FlatFiles, tensor: OutputTensor) -> None:
        self.out.reshape(self.src.shape)[...] = self.src


class _Cast(Struct, frozen=True):
    """A cast of elements that were read."""

    data: Bytes
    src: str
    out: Bytes
    dst: str

    def run(self, files: FlatFiles, tensor: OutputTensor) -> None:
        files.cast(self.data, self.src, self.out, self.dst)


class _StartSum(Struct, frozen=True):
    """The beginning of a sum of so many elements."""

    size: int

    def run(self, files: FlatFiles, tensor: OutputTensor) -> None:
        files.start_sum(self.size)


class _Add(Struct, frozen=True):
    """Elements of a term that were read and belong to the sum."""

    data: Bytes
    term: int

    def run(self, files: FlatFiles, tensor: OutputTensor) -> None:
        term = tensor.terms[self.term]
        files.add(self.data, term.source.meta.dtype, term.weight)


class _Multiply(Struct, frozen=True):
    """Scales that were read, each of an element of the sum."""

    data: Bytes
    term: int

    def run(self, files: FlatFiles, tensor: OutputTensor) -> None:
        files.multiply(self.data, tensor.terms[self.term].source.meta.dtype)


class _AddProduct(Struct, frozen=True):
    """Rows and columns that were read, whose product belongs to the sum; see `WeightedSum`."""

    data: tuple[Bytes, Bytes]
    term: int  # that of the rows
    are_there: tuple[Flags, Flags]

    def run(self, files: FlatFiles, tensor: OutputTensor) -> None:
        files.add_product(self, tensor.terms[self.term : self.term + 2])


class _TakeSum(Struct, frozen=True):
    """The end of a sum, which is rounded; ``part`` are its elements."""

    part: Region
    out: Bytes

    def run(self, files: FlatFiles, tensor: OutputTensor) -> None:
        at = files.take_sum(self.out, tensor.meta.dtype, is_finite=not tensor.is_scaled)
        if at is not None:
            raise _value_error(files, tensor, self.part, at)


_OfSum: TypeAlias = _StartSum | _Add | _Multiply | _AddProduct | _TakeSum
BandStep: TypeAlias = PieceRead | _Clear | _Pad | _Take | _Cast | _OfSum


def read_band(files: FlatFiles, tensor: OutputTensor, band: Region, out: Bytes) -> None:
    """Read a band, which are elements of the output slice, from the terms of an output tensor.

    One term is copied, and cast if its element type is another one.  The weighted sum of several
    terms is computed in Float64, in their order, and rounded once; a scale multiplies.  ``out`` is
    an array of ``band.shape`` and one last axis of ``itemsize`` bytes.

    Raises
    ------
    OSError
        A file cannot be read.
    FormatError
        A file has become shorter since its header was read.
    SourceValueError
        A number of a sum is NaN or infinite.
    """
    for step in plan_band(files, tensor, band, out):
        step.run(files, tensor)


def plan_band(
    files: FlatFiles, tensor: OutputTensor, band: Region, out: Bytes
) -> Iterator[BandStep]:
    """Yield the steps of `read_band`, which are to be run in this order.

    They are the same for all tensors of a kind (`OutputTensor.kind`), if `FlatFiles.forget` was
    called and the buffer is the same.
    """
    if not tensor.is_cast:
        yield from _plan_pieces(files, tensor, 0, band, out)
    elif not tensor.source.is_turned:
        yield from _plan_rounding(files, tensor, band, out, {})
    else:
        for whole in band.bands(TURNED_BYTES // tensor.stored_itemsize):
            held, left = {}, files.hold(whole.size * tensor.stored_itemsize)
            for number, term in enumerate(tensor.terms):
                if not term.role:
                    itemsize = term.source.meta.itemsize
                    data, left = left[: whole.size * itemsize], left[whole.size * itemsize :]
                    held[number] = data.reshape(*whole.shape, itemsize)
                    yield from _plan_pieces(files, tensor, number, whole, held[number])
            yield from _plan_rounding(files, tensor, whole, out[_within(whole, band)], held)
    slicing = tensor.source.slicing
    if isinstance(slicing, RearrangedSlicing) and slicing.padding == "mean":
        for part in band.bands(SUM_SIZE):
            region = part.moved_by(tensor.region.start)
            if (rows := slicing.averaged(region)) is not None:
                kept = max(0, rows.stop[0] - region.start[0])
                yield _Pad(out[_within(part, band)][kept:], rows)


def _plan_rounding(
    files: FlatFiles, tensor: OutputTensor, band: Region, out: Bytes, held: Mapping[int, Bytes]
) -> Iterator[BandStep]:
    """Yield how a band is cast or summed, part by part; ``held`` are terms that were read."""
    stored, is_sum = tensor.terms[0].source.meta, not is_copy(tensor.terms)
    parts = _parts(tensor, band) if is_sum else band.bands(STAGE_BYTES // stored.itemsize)
    for part in parts:
        at = _within(part, band)
        if is_sum:
            yield _StartSum(part.size)
        for number, term in enumerate(tensor.terms):
            if term.is_factor:
                continue
            data = files.stage(part.size * term.source.meta.itemsize)
            if number in held:
                yield _Take(held[number][at], data)
            else:
                yield from _plan_pieces(files, tensor, number, part, data)
            if is_sum:
                yield _Multiply(data, number) if term.role else _Add(data, number)
            else:
                yield _Cast(data, stored.dtype, out[at], tensor.meta.dtype)
        for number in _find_products(tensor, part.moved_by(tensor.region.start)):
            yield from _plan_product(files, tensor, number, part)
        if is_sum:
            yield _TakeSum(part, out[at])


def read_rows(files: FlatFiles, tensor: OutputTensor) -> Iterator[Bytes]:
    """Yield the rows of a tensor, a few at a time; a row has `SUM_SIZE` elements at most."""
    meta = tensor.meta
    buffer = np.empty(SUM_SIZE * meta.itemsize, np.uint8)
    for band in Region.whole(meta.shape).bands(SUM_SIZE):
        data = buffer[: band.size * meta.itemsize]
        read_band(files, tensor, band, data.reshape(*band.shape, meta.itemsize))
        yield data.reshape(band.shape[0], -1)


def _parts(tensor: OutputTensor, band: Region) -> Iterator[Region]:
    """Return the parts of a band that are summed at a time; of a product those near a square."""
    ranks = [term.source.meta.shape[-1] for term in tensor.terms if term.role == "rows"]
    if not ranks:
        return band.bands(SUM_SIZE)
    lines = STAGE_BYTES // 8 // max(ranks) - 1  # rows and columns, which are read together
    rows = min(band.shape[-2], lines // 2, isqrt(SUM_SIZE))
    return band.tiles(rows, min(lines - rows, SUM_SIZE // rows))


def _find_products(tensor: OutputTensor, region: Region) -> Iterator[int]:
    """Yield the number of the rows of each product that may have elements in a region."""
    for number, term in enumerate(tensor.terms):
        if (
            term.role == "rows"
            and term.within is not None
            and common(term.within, region) is not None
        ):
            yield number


def _plan_product(
    files: FlatFiles, tensor: OutputTensor, number: int, part: Region
) -> Iterator[BandStep]:
    """Yield how the product of two terms is added to a part; nothing where it is empty."""
    at, data, are_there = 0, [], []
    for axis, term in zip((-1, -2), tensor.terms[number : number + 2], strict=True):
        wanted, origin = term.locate(part, tensor.region.start)
        stop = at + wanted.size * term.source.meta.itemsize
        data.append(files.stage(stop)[at:])
        at = -(-stop // 8) * 8  # where any type may lie
        filled = np.zeros((*wanted.shape, 1), np.uint8)
        for _, _, dst in term.source.slicing.stretches(wanted, origin):
            assert isinstance(dst, Steps), "rows and columns are rearranged"
            _step_through(filled, dst, wanted)[...] = 1
        are_there.append(filled[..., 0].any(axis=axis).reshape(-1))
    if all(flags.any() for flags in are_there):
        for place, into in enumerate(data):
            yield from _plan_pieces(files, tensor, number + place, part, into)
        yield _AddProduct((data[0], data[1]), number, (are_there[0], are_there[1]))


def _value_error(files: FlatFiles, tensor: OutputTensor, part: Region, at: int) -> SourceValueError:
    """Return the error of the element ``at`` of a part, whose sum is not finite."""
    index = np.unravel_index(at, part.shape)
    start = tuple(a + int(i) for a, i in zip(part.start, index, strict=True))
    element = Region(start, tuple(i + 1 for i in start))
    for i, term in enumerate(tensor.terms):
        size = term.locate(element, tensor.region.start)[0].size
        data = files.stage(size * term.source.meta.itemsize)
        for read in _plan_pieces(files, tensor, i, element, data):
            read.run(files, tensor)
        numbers = find_numbers(data, term.source.meta.dtype)
        if not np.isfinite(numbers).all():
            piece, *_ = term.pieces(element, tensor.region.start)
            where = [*element.moved_by(tensor.region.start).start]
            what = "NaN" if np.isnan(numbers).any() else "Inf"
            message = f"{piece.tensor.meta.name}: {what} at {where}"
            hint = "an adapter without it"
            if not term.is_factor:
                message += f", in the file of rank {piece.rank}"
                hint = "an input without it, or --exclude with this tensor"
            return SourceValueError(piece.tensor.file.path, [message], hint)
    (*_, piece) = tensor.pieces(element)
    path = piece.tensor.file.path
    message = f"{tensor.meta.name}: the mean is beyond the numbers of Float64"
    return SourceValueError(path, [message], "--exclude with this tensor")


def _plan_pieces(
    files: FlatFiles, tensor: OutputTensor, number: int, band: Region, out: Bytes
) -> Iterator[PieceRead | _Clear]:
    """Yield how a band is read from the pieces of a term, in the stored element type."""
    term = tensor.terms[number]
    meta, slicing = term.source.meta, term.source.slicing
    band, origin = term.locate(band, tensor.region.start)
    out = out.reshape(*band.shape, meta.itemsize)
    filled, is_padded = 0, isinstance(slicing, RearrangedSlicing) and slicing.padding != ""
    if is_padded:
        yield _Clear(out)
    for place, src, dst in slicing.stretches(band, origin):
        _, holder = slicing.find(place)
        stored = holder.meta
        at = out[_within(dst, band)] if isinstance(dst, Region) else _step_through(out, dst, band)
        runs = find_runs(src, stored)
        moves = files.plan_moves(_first_byte(holder), stored, runs, at)
        first = runs.first if runs.count == 1 else None
        yield PieceRead(number, place, runs.nbytes, moves, first)
        filled += runs.nbytes
    assert filled == out.nbytes or is_padded, f"{band}: {filled} of {out.nbytes} bytes"


def _within(region: Region, band: Region) -> tuple[slice, ...]:
    ends = zip(region.start, region.stop, band.start, strict=True)
    return tuple(slice(start - first, stop - first) for start, stop, first in ends)


def _step_through(out: Bytes, steps: Steps, band: Region) -> Bytes:
    """Return the elements of an array in steps; see `Steps`."""
    index = tuple(at - first for at, first in zip(steps.start, band.start, strict=True))
    strides = (*(step * out.strides[axis] for axis, step in steps.along), 1)
    base = out[tuple(slice(at, None) for at in index)]
    return as_strided(base, (*steps.shape, out.shape[-1]), strides)


def _first_byte(tensor: StoredTensor) -> tuple[str, int]:
    """Return the path and offset of a tensor's bytes; its name may occur twice in a file."""
    return tensor.file.path, tensor.extents[0].offset if tensor.extents else 0


class _CachedBytes(Struct, frozen=True):
    """Bytes ``first`` to ``last`` of a tensor, at the start of ``data``."""

    first: int
    last: int
    data: Bytes


class Runs(Struct, frozen=True):
    """The byte runs of elements of a tensor.

    Attributes
    ----------
    view
        The elements.
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

    view: View
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
        if not self.stride:  # one element for all: others near it are wanted next
            last = -(-self.last // ROW_BYTES) * ROW_BYTES
            return self.first // ROW_BYTES * ROW_BYTES, last
        return self.first // self.stride * self.stride, -(-self.last // self.stride) * self.stride


def find_runs(elements: Region | View, meta: TensorMeta) -> Runs:
    """Return the runs of elements of a stored tensor; at least one element is wanted."""
    return _find_runs(elements, meta.shape, meta.itemsize)


@lru_cache(maxsize=4096)  # the pieces of most tensors are those of another
def _find_runs(elements: Region | View, shape: tuple[int, ...], itemsize: int) -> Runs:
    view = View.of(elements, shape) if isinstance(elements, Region) else elements
    wanted, strides = view.shape, view.strides
    axis, run = len(wanted), 1
    while axis > 0 and (wanted[axis - 1] == 1 or strides[axis - 1] == run):
        axis -= 1
        run *= wanted[axis]
    first = view.first * itemsize
    span = sum(map(mul, wanted, strides)) - sum(strides) + 1
    count = prod(wanted[:axis])
    outer = next((strides[i] for i in range(axis) if wanted[i] > 1), 0)
    nbytes = prod(wanted) * itemsize
    return Runs(view, first, first + span * itemsize, count, nbytes, axis, outer * itemsize)


def _split_in_half(view: View) -> Iterator[tuple[View, tuple[slice, ...]]]:
    """Yield both halves of elements along their first divisible axis, and their slices of it."""
    axis = next(i for i, n in enumerate(view.shape) if n > 1)
    size = view.shape[axis]
    for start, stop in ((0, size // 2), (size // 2, size)):
        shape = (*view.shape[:axis], stop - start, *view.shape[axis + 1 :])
        half = View(view.first + start * view.strides[axis], shape, view.strides)
        yield half, (*(slice(None),) * axis, slice(start, stop))


def split_at_extents(
    tensor: StoredTensor, offset: int, view: memoryview
) -> Sequence[tuple[int, memoryview]]:
    """Return the file offset and the part of ``view`` for each extent that it overlaps."""
    if tensor.extents and offset + len(view) <= tensor.extents[0].nbytes:  # as most tensors
        return ((tensor.extents[0].offset + offset, view),)
    parts: list[tuple[int, memoryview]] = []
    for extent in tensor.extents:
        if not view:
            break
        if offset < extent.nbytes:
            part = view[: extent.nbytes - offset]
            parts.append((extent.offset + offset, part))
            view, offset = view[len(part) :], 0
        else:
            offset -= extent.nbytes
    if view:
        raise ValueError(f"{tensor.meta.name}: {len(view)} bytes beyond its last extent")
    return parts
