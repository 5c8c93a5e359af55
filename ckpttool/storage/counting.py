"""Reads that are counted: those of a task before it runs, and those of calls on workers.

A dry run decides on each read as the copy does, with the same class, so the arithmetic exists once.
`ckpttool.operations` says what the counts mean for memory and time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

import numpy as np

from ckpttool.formats.encryption import plan_reads
from ckpttool.formats.local import counting_reads
from ckpttool.model.plan import OutputTensor, Term
from ckpttool.model.tensors import Reads, StoredTensor
from ckpttool.storage.numbers import Bytes
from ckpttool.storage.region_io import (
    STAGE_BYTES,
    FlatFiles,
    Origin,
    PieceRead,
    read_rows,
    split_at_extents,
)

P = ParamSpec("P")
T = TypeVar("T")
_NOTHING = np.empty(0, np.uint8)


class CountingFiles(FlatFiles):
    """Files that are not opened: each read is decided as `FlatFiles` does, and counted.

    No buffer is touched, so buffers take no memory.  ``scratch_peak`` is the most bytes of the
    scratch buffer that were in use at a time.
    """

    def __init__(self, scratch_bytes: int) -> None:
        super().__init__(scratch_bytes)
        self.scratch_peak = 0
        self._requests = self._nbytes = 0
        self._used: Counter[Origin] = Counter()

    def __enter__(self) -> CountingFiles:
        return self

    def take_reads(self) -> Reads:
        """Return the reads since the last call."""
        reads = Reads(self._requests, self._nbytes)
        self._requests = self._nbytes = 0
        return reads

    def take_used(self) -> Counter[Origin]:
        """Return the bytes of pieces from each rank of an input, since the last call."""
        used, self._used = self._used, Counter()
        return used

    def read_piece(self, read: PieceRead, term: Term) -> None:
        """Count the reads of a piece."""
        rank, tensor = read.find(term)
        self._used[Origin(term.input, rank)] += read.nbytes
        for move in read.moves:
            if move.into is not None:
                self.read_bytes(tensor, move.offset, move.into)

    def read_bytes(self, tensor: StoredTensor, offset: int, out: memoryview) -> None:
        """Count the reads of a tensor's bytes."""
        cipher = tensor.file.cipher
        for at, part in split_at_extents(tensor, offset, out):
            sizes = [len(part)] if cipher is None else [*plan_reads(cipher, at, part)]
            self._requests += len(sizes)
            self._nbytes += sum(sizes)

    def _take_scratch(self, nbytes: int) -> tuple[Bytes, int]:
        taken = super()._take_scratch(nbytes)
        self.scratch_peak = max(self.scratch_peak, self.scratch_used)
        return taken

    def pad(self, out: Bytes, rows: OutputTensor) -> None:
        """Count the reads of rows whose mean is wanted."""
        self.mean_of(rows)

    def average(self, tensor: OutputTensor) -> Bytes:
        """Count the reads of the rows of a tensor, which take other buffers."""
        with CountingFiles(STAGE_BYTES) as files:
            for _ in read_rows(files, tensor):
                pass
        self._requests += files._requests
        self._nbytes += files._nbytes
        self._used += files._used
        return _NOTHING

    def _compute_nothing(self, *args: object, **kwargs: object) -> None: ...

    clear = cast = start_sum = add = multiply = add_product = take_sum = _compute_nothing


class CountingExecutor(Executor):
    """An executor that counts what its calls read."""

    def __init__(self, executor: Executor) -> None:
        self._counts: list[Reads] = []  # threads append to it
        self._executor = executor

    @property
    def reads(self) -> Reads:
        """The reads of all calls that are done."""
        return sum(self._counts, Reads())

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a call to the executor."""
        outer: Future[T] = Future()

        def settle(inner: Future[tuple[T, Reads]]) -> None:
            if not outer.set_running_or_notify_cancel():
                return
            error = inner.exception()
            if error is not None:
                outer.set_exception(error)
                return
            result, reads = inner.result()
            self._counts.append(reads)
            outer.set_result(result)

        inner = self._executor.submit(_count, fn, *args, **kwargs)
        inner.add_done_callback(settle)
        outer.add_done_callback(lambda _: inner.cancel() if outer.cancelled() else None)
        return outer


def _count(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> tuple[T, Reads]:
    """Return the result of a call, and what it has read; runs on a worker."""
    with counting_reads() as count:
        result = fn(*args, **kwargs)
    return result, count()
