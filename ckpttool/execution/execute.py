"""Carry out a plan: create, fill and commit every output file, on any executor.

A bounded number of tasks is submitted at a time, and the plan is iterated as they complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ckpttool.concurrency import InlineExecutor
from ckpttool.errors import (
    WORKER_DIED,
    CkptToolError,
    ExecutionError,
    VerifyError,
    describe_os_error,
    notes_of,
)
from ckpttool.execution.cluster import (
    CHECK_SECONDS,
    Attempt,
    Cluster,
    RemoteFile,
    check_workers,
    write_file,
)
from ckpttool.execution.copy import TASK_PIECES, Filled, cut_into_tasks, fill
from ckpttool.execution.executors import Abortable
from ckpttool.execution.grouping import group_outputs
from ckpttool.model.plan import OutputFile, Plan
from ckpttool.model.tensors import FileIndex
from ckpttool.storage.checksums import CrcExtent, compute_checksum
from ckpttool.storage.files import PARTIAL, PartialFile, TakenError, clean_up
from ckpttool.transaction.manifest import Written
from ckpttool.transaction.record import Transaction
from ckpttool.transaction.resume import Destination


def cause_of(error: CkptToolError | OSError | BrokenExecutor) -> str:
    """Return the cause of an error; the system's message if there is one, which libhdf5 hides."""
    if isinstance(error, TakenError):
        return f"another run is writing this output ({error.filename} is in use): wait for its end"
    if isinstance(error, OSError) and error.errno:
        what = describe_os_error(OSError(error.errno, os.strerror(error.errno)))
        has_name = isinstance(error.filename, str) and not error.filename.endswith(PARTIAL)
        return f"{error.filename}: {what}" if has_name else what
    if isinstance(error, BrokenExecutor):
        return WORKER_DIED
    return str(error)


def next_step(done: Collection[object]) -> str:
    """Return what to do after a failure that left no complete output."""
    return "" if done else "; nothing is complete yet: run it again when that is mended"


Done: TypeAlias = int | Filled | Attempt  # of a call: a checksum, stretches, a whole file


@dataclass(slots=True, eq=False)
class Job:
    """An output that is being written."""

    output: OutputFile
    file: PartialFile | RemoteFile
    open_tasks: int = 0
    is_submitted: bool = False
    checksum: Future[Done] | None = None  # on its way, once all tasks are done
    hashes: dict[str, dict[int, str]] = field(default_factory=dict)  # by tensor and unit
    crcs: list[CrcExtent] = field(default_factory=list)

    def accept(self, done: Filled | Attempt) -> None:
        """Add the results of a call that belong to this output."""
        if isinstance(done, Attempt):
            assert isinstance(self.file, RemoteFile), "only workers of a cluster make attempts"
            self.file.attempt = done
            path, done = done.path, done.filled
        else:
            assert isinstance(self.file, PartialFile), "those that fill are on this host"
            path = self.file.index.path
        for one in done.hashes:
            if one.path == path:
                self.hashes.setdefault(one.name, {})[one.unit] = one.sha256
        self.crcs += (one for one in done.crcs if one.path == path)


FAILURES = (CkptToolError, OSError, BrokenExecutor)
MAX_CLAIMS = 512  # outputs that a cluster works on at a time; each is a file descriptor here


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How much is done at a time.

    Attributes
    ----------
    band_bytes
        Bytes that a worker assembles at a time.  Memory is about workers x 2 x ``band_bytes``,
        whatever the size of the model.  Of a unit of 8 MiB it takes half and a row more, so that
        the rest is one band; more gain nothing, these fit into a processor's cache.
    task_bytes
        Bytes of an output that one task fills, about.
    max_in_flight
        Tasks that exist at a time; the plan is drawn as fast as they are done.
    task_pieces
        A task that has as many pieces takes no further unit.
    group_tensors
        Tensors of outputs that are written side by side, as they want the same rows: what is
        known of each is in memory, about 600 bytes.
    """

    band_bytes: int = 17 << 18
    task_bytes: int = 64 << 20
    max_in_flight: int = 32
    task_pieces: int = TASK_PIECES
    group_tensors: int = 1 << 16


def _calls(
    jobs: Sequence[Job], options: CopyOptions
) -> Iterator[tuple[Callable[[], Done], tuple[Job, ...]]]:
    """Yield the calls for workers, units on this host and whole files on others, and their jobs."""
    sizes = options.band_bytes, options.task_bytes, options.task_pieces
    here: dict[str, tuple[Job, FileIndex]] = {}
    for job in jobs:
        if isinstance(job.file, RemoteFile):
            yield partial(write_file, job.file.task(*sizes)), (job,)
        else:
            here[job.file.index.path] = job, job.file.index
    for task in cut_into_tasks([(job.output, index) for job, index in here.values()], *sizes):
        paths = sorted({unit.tensor.file.path for unit in task.units})
        served = tuple(here[path][0] for path in paths)
        yield partial(fill, task), served


def execute(
    plan: Plan,
    destination: Destination,
    executor: Executor | None = None,
    *,
    options: CopyOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Written, ...]:
    """Write the outputs of a plan and its manifest; of a part, its record for `finalize`.

    A run that is resumed does not write the outputs again that an earlier run completed.

    Parameters
    ----------
    plan, destination
        From `plan_merge`, `plan_split` or `plan_reshard`.
    executor
        Does the copying; by default the caller's own thread.  The outputs are the same bytes
        whichever it is.  The workers of a cluster are asked first whether they see the files;
        all paths have to be absolute then.
    options
        How much is done at a time.
    on_progress
        Called in the caller's thread with the number of bytes that were written since the last
        call.
    check
        Called several times a second at moments when it may raise, to end the run.

    Raises
    ------
    PlanError
        A source file was changed after the plan was made, a worker of a cluster cannot do its
        part, another run is writing the same set or has written it since the plan was made, or
        what is to be resumed is of another plan; nothing was written.
    EngineError
        The workers of a cluster do not answer; nothing was written.
    VerifyError
        An output could be read back, and was not what it should be.
    ExecutionError
        An output could not be written, or a source file was changed meanwhile.  Outputs that
        were complete before stay and are named, for a run that is resumed, unless the source was
        changed; nothing is left of the others.
    """
    run = _Run(executor or InlineExecutor(), options or CopyOptions(), on_progress, check)
    mine = plan.limited_to(destination.ranks)
    if isinstance(executor, Cluster) and destination.ranks:
        check_workers(executor, mine, check)
    try:
        transaction = run.transaction = Transaction.open(plan, destination)
    except OSError as error:
        cause = cause_of(error) + next_step(())
        raise ExecutionError(str(Path(plan.target.manifest_path)), cause) from error
    try:
        run.keep(mine.outputs(rank for rank in destination.ranks if rank in transaction.kept))
        rest = plan.limited_to(set(destination.ranks) - transaction.kept)
        for outputs in group_outputs(rest, run.options.group_tensors):
            run.collect_done()
            run.start(outputs)
        while run.pending:
            run.collect()
        transaction.finish()
    except BaseException as error:
        try:
            run.abandon(error)
        finally:
            clean_up(error, transaction.abandon)
        if isinstance(error, FAILURES) and not isinstance(error, VerifyError | ExecutionError):
            changes = transaction.describe_source_changes()
            done = [] if changes else [written.path for written in run.in_order()]
            then = changes or next_step(run.written)
            cause = "; ".join((cause_of(error) + then, *notes_of(error)))
            raise ExecutionError(transaction.writing or run.current, cause, done) from error
        raise
    return run.in_order()


@dataclass(slots=True)
class _Run:
    executor: Executor
    options: CopyOptions
    on_progress: Callable[[int], None] | None
    check: Callable[[], None]
    current: str = ""  # the output that is worked on, for the error
    pending: dict[Future[Done], tuple[Job, ...]] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    transaction: Transaction | None = None

    def keep(self, outputs: Iterable[OutputFile]) -> None:
        """Count outputs as written that an earlier run completed."""
        for output in outputs:
            self._note_written(output, Path(output.path).stat().st_size, is_kept=True)
            if self.on_progress is not None:
                self.on_progress(sum(meta.nbytes for meta in output.metas))

    def _note_written(self, output: OutputFile, nbytes: int, is_kept: bool = False) -> None:
        tensors = len(output.tensors)
        entry = Written(output.rank, output.path, output.format, nbytes, tensors, is_kept)
        self.written.append(entry)

    def _transaction(self) -> Transaction:
        assert self.transaction is not None, "it is opened before the first output"
        return self.transaction

    def in_order(self) -> tuple[Written, ...]:
        """Return the written outputs by rank, whichever was faster."""
        return tuple(sorted(self.written, key=lambda written: written.rank))

    def start(self, outputs: Sequence[OutputFile]) -> None:
        """Create outputs and hand out their tasks; waits while too many are on their way."""
        is_remote = isinstance(self.executor, Cluster)
        jobs: list[Job] = []
        self.current = outputs[0].path
        self._transaction().begin(outputs)
        for output in outputs:
            self.current = output.path
            job = Job(output, RemoteFile(output) if is_remote else PartialFile(output))
            self.jobs.append(job)
            jobs.append(job)
        for call, served in _calls(jobs, self.options):
            while len(self.pending) >= self._max_in_flight():
                self.collect()
            for job in served:
                job.open_tasks += 1
            self.pending[self.executor.submit(call)] = served
        for job in jobs:
            job.is_submitted = True
            self._commit_if_done(job)

    def collect(self) -> None:
        """Wait for a task to end, and commit the outputs that are complete."""
        while not wait(self.pending, CHECK_SECONDS, FIRST_COMPLETED).done:
            self.check()
            if isinstance(self.executor, Cluster):
                self.current = next(iter(self.pending.values()))[0].output.path
                self.executor.watch()
        self.collect_done()

    def collect_done(self) -> None:
        """Commit the outputs that are complete; in the order of submission, without waiting."""
        self.check()
        for future in [future for future in self.pending if future.done()]:
            jobs = self.pending.pop(future)
            self.current = jobs[0].output.path
            done = future.result()
            if future is jobs[0].checksum:
                assert isinstance(done, int), "checksums are no attempts"
                self._commit(jobs[0], done)
                continue
            assert not isinstance(done, int), "calls that fill say what they wrote"
            if self.on_progress is not None:
                self.on_progress(done.nbytes)
            for job in jobs:
                job.accept(done)
                job.open_tasks -= 1
                self._commit_if_done(job)

    def _max_in_flight(self) -> int:
        """Enough for every worker to find its next task at once."""
        if isinstance(self.executor, Cluster):
            return min(MAX_CLAIMS, max(self.options.max_in_flight, 2 * self.executor.width))
        return self.options.max_in_flight

    def _commit_if_done(self, job: Job) -> None:
        if not job.is_submitted or job.open_tasks:
            return
        if isinstance(job.file, PartialFile) and "crc_num" in job.file.index.attrs:
            call = partial(compute_checksum, job.file.index, known=job.crcs)
            job.checksum = self.executor.submit(call)
            self.pending[job.checksum] = (job,)
        else:
            self._commit(job, None)

    def _commit(self, job: Job, crc: int | None) -> None:
        self.current = job.output.path
        self.jobs.remove(job)

        def rename(record: Callable[[int], None]) -> None:
            self._note_written(job.output, job.file.commit(record, crc))

        self._transaction().commit(job.output, job.hashes, rename)

    def abandon(self, error: BaseException) -> None:
        """Stop what has not begun, wait for the rest, and remove the unfinished outputs.

        Workers of a cluster are not waited for: they may be lost, and they write to files with
        names of their own.
        """
        clean_up(error, *(job.file.withdraw for job in self.jobs))
        if isinstance(self.executor, Abortable):
            self.executor.stop()  # a call that is cancelled meanwhile would never be done
        else:
            for future in self.pending:
                future.cancel()
        if not isinstance(self.executor, Cluster):
            wait(self.pending)
        clean_up(error, *(job.file.discard for job in self.jobs))
