"""Carries out a plan: create, fill, commit, for every output file, on any executor.

At most so many tasks are on their way at a time; the plan is drawn as fast as they are done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field

from ckpttool.errors import CkptToolError, ExecutionError, VerifyError
from ckpttool.model.plan import Document, OutputFile, Plan
from ckpttool.run.engines import InlineExecutor
from ckpttool.run.fill import cut_into_tasks, fill
from ckpttool.run.partial import PartialFile, remove_document, write_document
from ckpttool.storage.checksum import compute_checksum

CHECK_SECONDS = 0.2  # how long a request to end the run may go unnoticed


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How much is done at a time.

    Attributes
    ----------
    band_bytes
        Bytes that a worker assembles at a time.  Memory is about workers x 2 x ``band_bytes``,
        whatever the size of the model.
    task_bytes
        Bytes of an output that one task fills, about.
    max_in_flight
        Tasks that exist at a time; the plan is drawn as fast as they are done.
    """

    band_bytes: int = 8 << 20
    task_bytes: int = 64 << 20
    max_in_flight: int = 32


@dataclass(frozen=True, slots=True)
class Written:
    """An output that is complete under its final name."""

    rank: int
    path: str
    format: str
    nbytes: int
    tensors: int


@dataclass(slots=True, eq=False)
class _Job:
    """An output on its way."""

    output: OutputFile
    file: PartialFile
    open_tasks: int = 0
    is_submitted: bool = False
    checksum: Future[int] | None = None  # on its way, once all tasks are done


def execute(
    plan: Plan,
    executor: Executor | None = None,
    *,
    options: CopyOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Written, ...]:
    """Write all outputs of a plan.

    Parameters
    ----------
    plan
        From `plan_merge`, `plan_split` or `plan_reshard`.
    executor
        Does the copying; by default the caller's own thread.  The outputs are the same bytes
        whichever it is.
    options
        How much is done at a time.
    on_progress
        Called in the caller's thread with the number of bytes that were written since the last
        call.
    check
        Called several times a second at moments when it may raise, to end the run.

    Raises
    ------
    VerifyError
        An output could be read back, and was not what it should be.
    ExecutionError
        An output could not be written.  Outputs that were complete before stay and are named;
        nothing is left of the others.
    """
    run = _Run(executor or InlineExecutor(), options or CopyOptions(), on_progress, check)
    try:
        run.remove_documents(plan.documents)
        for output in plan:
            run.collect_done()
            run.start(output)
        while run.pending:
            run.collect()
        run.write_documents(plan.documents)
    except BaseException as error:
        run.abandon()
        if isinstance(error, CkptToolError | OSError) and not isinstance(error, VerifyError):
            done = [written.path for written in run.written]
            raise ExecutionError(run.current, _cause(error), done) from error
        raise
    return tuple(sorted(run.written, key=lambda written: written.rank))


def _cause(error: CkptToolError | OSError) -> str:
    """What happened, in the system's words if it was the system; libhdf5 buries them."""
    if isinstance(error, BlockingIOError | FileExistsError):
        return f"another run is writing this output ({error.filename} is in use)"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error)


@dataclass(slots=True)
class _Run:
    executor: Executor
    options: CopyOptions
    on_progress: Callable[[int], None] | None
    check: Callable[[], None]
    current: str = ""  # the output that is worked on, for the error
    pending: dict[Future[int], _Job] = field(default_factory=dict)
    jobs: list[_Job] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)

    def start(self, output: OutputFile) -> None:
        """Create an output and hand out its tasks; waits while too many are on their way."""
        self.current = output.path
        job = _Job(output, PartialFile(output))
        self.jobs.append(job)
        options = self.options
        for task in cut_into_tasks(output, job.file.index, options.band_bytes, options.task_bytes):
            while len(self.pending) >= options.max_in_flight:
                self.collect()
            job.open_tasks += 1
            self.pending[self.executor.submit(fill, task)] = job
        job.is_submitted = True
        self._commit_if_done(job)

    def collect(self) -> None:
        """Wait for a task to end, and commit the outputs that are complete."""
        while not wait(self.pending, CHECK_SECONDS, FIRST_COMPLETED).done:
            self.check()
        self.collect_done()

    def collect_done(self) -> None:
        """Commit the outputs that are complete; in the order of submission, without waiting."""
        self.check()
        for future in [future for future in self.pending if future.done()]:
            job = self.pending.pop(future)
            self.current = job.output.path
            if future is job.checksum:
                self._commit(job, future.result())
                continue
            nbytes = future.result()
            if self.on_progress is not None:
                self.on_progress(nbytes)
            job.open_tasks -= 1
            self._commit_if_done(job)

    def _commit_if_done(self, job: _Job) -> None:
        if not job.is_submitted or job.open_tasks:
            return
        if "crc_num" in job.file.index.attrs:
            job.checksum = self.executor.submit(compute_checksum, job.file.index)
            self.pending[job.checksum] = job
        else:
            self._commit(job, None)

    def _commit(self, job: _Job, crc: int | None) -> None:
        output = self.current = job.output.path
        self.jobs.remove(job)
        nbytes = job.file.commit(crc)
        rank, format = job.output.rank, job.output.format
        self.written.append(Written(rank, output, format, nbytes, len(job.output.tensors)))

    def remove_documents(self, documents: Sequence[Document]) -> None:
        """Remove the old ones: while outputs are replaced they would speak of a mixture."""
        for document in documents:
            self.current = document.path
            remove_document(document.path)

    def write_documents(self, documents: Sequence[Document]) -> None:
        """Write what says that the outputs are complete."""
        for document in documents:
            self.current = document.path
            write_document(document.path, document.text)

    def abandon(self) -> None:
        """Stop what has not begun, wait for the rest, and remove the outputs that are not done."""
        for future in self.pending:
            future.cancel()
        wait(self.pending)
        for job in self.jobs:
            job.file.discard()
