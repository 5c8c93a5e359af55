"""Execute a plan: create, fill and commit every output file, on any executor.

A bounded number of tasks is submitted at a time, and the plan advances as they complete.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from ckpttool.concurrency import InlineExecutor, map_in_order
from ckpttool.execution.cluster import (
    CHECK_SECONDS,
    Cluster,
    RemoteFile,
    check_workers,
    write_file,
)
from ckpttool.execution.copy import CopyOptions, Filled, Place, check, cut_into_tasks, fill
from ckpttool.execution.executors import FEWER, WHY_DEAD, WORKER_DIED, Abortable
from ckpttool.execution.schedule import Batch, schedule
from ckpttool.formats import forget_header
from ckpttool.formats.header_cache import HeaderCache
from ckpttool.formats.local import describe_os_error, more_files_hint
from ckpttool.model.manifest import CastStats, UnitHashes
from ckpttool.model.names import forget_names
from ckpttool.model.plan import OutputFile, Plan
from ckpttool.model.tensors import FileIndex
from ckpttool.problems import (
    CkptToolError,
    Diagnostic,
    ExecutionError,
    PlanError,
    SourceHashError,
    SourceValueError,
    VerifyError,
    add_note,
    join_clauses,
    join_first,
    notes_of,
)
from ckpttool.storage.checksums import CrcExtent, compute_checksum
from ckpttool.storage.files import PARTIAL, PartialFile, TakenError, clean_up, remove_document
from ckpttool.transaction.record import Transaction
from ckpttool.transaction.resume import Assignment
from ckpttool.transaction.sealed_files import Written
from ckpttool.wording import count


def _failure(
    path: str,
    error: CkptToolError | OSError | BrokenExecutor,
    done: Sequence[str] = (),
    changes: str = "",
    resume: str = "",
) -> ExecutionError:
    """Return the error of a run that could not write ``path``.

    Outputs that are ``done`` are of no use if there are ``changes`` of source files.  The message
    of libhdf5 would hide that of the system.
    """
    again = resume if done else "the same command"
    notes = notes_of(error)
    cause, details, hint = WORKER_DIED, WHY_DEAD, FEWER
    if isinstance(error, TakenError):
        cause, details = "another run is writing this output", f"{error.filename} is in use"
        hint = "wait until it ends"
    elif isinstance(error, OSError):
        name = str(error.filename or path).removesuffix(PARTIAL)
        if error.errno:
            error = OSError(error.errno, os.strerror(error.errno), error.filename)
        cause = describe_os_error(error)
        details = "" if name == path else f"the file is {name}"
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        first = "free some space" if is_full else more_files_hint(error)
        hint = f"{first}, then {again}" if first else again
    elif isinstance(error, CkptToolError):
        one, *others = error.diagnostics
        cause, hint = one.fact, one.hint or again
        details = join_first([one.facts, *(join_clauses(o.fact, o.facts) for o in others)])
    if changes:
        done, hint = (), Transaction.CHANGED_HINT
        if isinstance(error, PlanError):  # a worker noticed the same
            cause, details = "a source file has changed", ""
    details = join_clauses(details, changes, *notes)
    return ExecutionError(path, cause, done, hint, details)


CallResult: TypeAlias = int | Filled  # a checksum, or what was written


class OutputJob(Struct, eq=False):
    """An output that is being written."""

    output: OutputFile
    file: PartialFile | RemoteFile
    open_tasks: int = 1  # and one until all are submitted
    crcs: list[CrcExtent] = []
    casts: dict[str, CastStats] = {}  # by tensor
    written: frozenset[Place] = frozenset()  # the units that an earlier run wrote
    is_logged: bool = False  # whether a resumed run can go on in the file
    # Units that are not in the log yet.
    unlogged: list[tuple[int, int, bytes]] = []
    unlogged_casts: dict[str, CastStats] = {}
    _hashes: UnitHashes | None = None  # until the first tensor is written

    @property
    def hashes(self) -> UnitHashes:
        """The hashes of what was written."""
        if self._hashes is None:
            self._hashes = UnitHashes(self.output.metas)
        return self._hashes

    def add_unit(self, place: int, number: int, digest: bytes) -> None:
        """Add the hash of a unit that was written."""
        self.hashes.add(place, number, digest)
        self.unlogged.append((place, number, digest))

    def add_cast(self, name: str, stats: CastStats) -> None:
        """Add what a cast did to elements of a tensor."""
        for casts in (self.casts, self.unlogged_casts):
            casts[name] = casts.get(name, CastStats()).merged(stats)


def _accept(filled: Filled, jobs: Sequence[OutputJob]) -> None:
    """Add the result of a call to its jobs."""
    by_path: dict[str, OutputJob] = {}
    for job in jobs:
        if isinstance(job.file, RemoteFile):
            job.file.attempt = filled.attempt
            by_path[filled.attempt] = job
        else:
            by_path[job.file.index.path] = job
    for path, place, unit, digest in filled.hashes:
        by_path[path].add_unit(place, unit, digest)
    for path, name, stats in filled.casts:
        by_path[path].add_cast(name, stats)
    for crc_extent in filled.crcs:
        by_path[crc_extent.path].crcs.append(crc_extent)


FAILURES = (CkptToolError, OSError, BrokenExecutor)
# A group of units enters the log when so many bytes were written: a share of all that a run writes.
# So little is lost of a small run, and a large one does not sync often.
GROUPS, MIN_GROUP_BYTES, MAX_GROUP_BYTES = 64, 32 << 20, 4 << 30
MAX_CLAIMS = 512  # outputs that a cluster works on at a time; each is a file descriptor here


def _calls(
    batch: Batch, jobs: Sequence[OutputJob]
) -> Iterator[tuple[Callable[[], CallResult], tuple[OutputJob, ...]]]:
    """Yield the calls for workers, each with its jobs; ``jobs`` are those of the batch.

    A call fills units on this host, or writes a whole file on another host.
    """
    local: dict[str, OutputJob] = {}
    paths: dict[int, str] = {}  # by id of the header
    indexes: list[FileIndex] = []
    for job in jobs:
        if isinstance(job.file, RemoteFile):
            yield partial(write_file, job.file.task(batch)), (job,)
            return  # a batch of one
        index = job.file.index
        local[index.path], paths[id(index.tensors)] = job, index.path
        indexes.append(index)
    for task in batch.tasks(indexes, [job.written for job in local.values()]):
        written = {paths[id(unit.header)] for unit in task.units}
        yield partial(fill, task), tuple(local[path] for path in sorted(written))


def execute(
    plan: Plan,
    assignment: Assignment,
    executor: Executor | None = None,
    *,
    options: CopyOptions | None = None,
    on_progress: Callable[[int], None] = lambda nbytes: None,
    on_note: Callable[[Diagnostic], None] = lambda note: None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Written, ...]:
    """Write the outputs of a plan and its manifest; for a part, its log for `finalize`.

    A resumed run keeps the outputs that an earlier run completed, and the units that it wrote of
    others.

    Parameters
    ----------
    plan, assignment
        The fields ``planned`` and ``assignment`` of a dry run, as of `ckpttool.merge`.
    executor
        Does the copying; by default the caller's own thread.  Every executor writes the same
        bytes.  With a cluster all paths have to be absolute, and `check_workers` checks first
        whether its workers see the files.
    options
        How much is done at a time.
    on_progress
        Called in the caller's thread with the number of bytes that were written since the last
        call.
    on_note
        Called with what only shows when the run begins or ends, such as a file system without
        locks.
    check
        Called several times a second, when it is safe to end the run; raises to end it.

    Raises
    ------
    PlanError
        A source file has changed since the plan was made, or a worker of a cluster cannot do its
        part.  Or another run is writing this set, or has written it since the plan was made.  Or
        the run to resume has another plan.  Nothing was written.
    EngineError
        The workers of a cluster do not answer; nothing was written.
    VerifyError
        The header of an output does not describe its tensors, or a tensor of the source lacks the
        hash in its manifest.  Or a number that is to be averaged is NaN or infinite; then all
        outputs of this run are removed.
    ExecutionError
        An output could not be written, or a source file has changed since.  Unless the source has
        changed, the error names the complete outputs, which a resumed run keeps.  Unfinished
        outputs are removed.  Or numbers are too large for the type to which they are cast; then all
        outputs of this run are removed.
    """
    if plan.target.is_virtual:
        from ckpttool.execution.virtual import write_virtual_output

        return write_virtual_output(plan)
    forget_names()
    options = options or CopyOptions()
    mine = plan.limited_to(assignment.ranks)
    if isinstance(executor, Cluster) and assignment.ranks:
        check_workers(executor, mine, check)
    try:
        transaction = Transaction(plan, assignment)
    except OSError as error:
        path = str(Path(plan.target.manifest_path))
        raise _failure(path, error) from error
    for note in transaction.notes:
        on_note(note)
    executor = executor or InlineExecutor()
    run = _Run(executor, options, on_progress, check, plan, transaction)
    rest = [rank for rank in assignment.ranks if rank not in transaction.kept]
    nbytes = sum(plan.sizes[rank] for rank in rest)
    run.group_bytes = min(max(nbytes // GROUPS, MIN_GROUP_BYTES), MAX_GROUP_BYTES)
    try:
        if transaction.kept:
            run.keep(mine.outputs(rank for rank in assignment.ranks if rank in transaction.kept))
        for batch in schedule(plan, rest, options, by_file=isinstance(executor, Cluster)):
            run.collect_done()
            run.start(batch)
        while run.pending:
            run.collect()
        run.refuse_overflow()
        for note in transaction.finish():
            on_note(note)
    except BaseException as error:
        try:
            run.abandon(error)
            if isinstance(error, SourceValueError):
                run.remove_written()
        finally:
            clean_up(error, transaction.abandon)
        if isinstance(error, FAILURES) and not isinstance(error, VerifyError | ExecutionError):
            done = [written.path for written in run.written_by_rank()]
            changes = transaction.describe_source_changes()
            path, again = transaction.writing or run.current, assignment.resume_hint
            raise _failure(path, error, done, changes, again) from error
        raise
    return run.written_by_rank()


class _Run(Struct, dict=True):
    """The outputs that a call of `execute` writes, and the tasks of their workers."""

    executor: Executor
    options: CopyOptions
    on_progress: Callable[[int], None]
    check: Callable[[], None]
    plan: Plan
    transaction: Transaction
    group_bytes: int = MIN_GROUP_BYTES  # of units that enter the log together
    unlogged_bytes: int = 0
    current: str = ""  # path of the output in work, for the error
    pending: dict[Future[CallResult], tuple[OutputJob, ...]] = {}
    jobs: list[OutputJob] = []
    written: list[Written] = []
    # What casts did to tensors with numbers that are too large; of replicas, if the run does not
    # write the output of a lower rank.
    overflows: dict[str, CastStats] = {}
    of_replicas: dict[str, CastStats] = {}

    @cached_property
    def _holders(self) -> Mapping[int, frozenset[str]]:
        return self.plan.holders()

    @cached_property
    def _headers(self) -> HeaderCache:
        return HeaderCache(sum(len(ranks) > 1 for ranks in self.plan.headers))

    @cached_property
    def _last(self) -> frozenset[int]:  # the last rank of each header
        return frozenset(ranks[-1] for ranks in self.plan.headers)

    def keep(self, outputs: Iterable[OutputFile]) -> None:
        casts = self.transaction.read_casts() if any(self._holders.values()) else {}
        for output in outputs:
            nbytes = Path(output.path).stat().st_size
            self._note_written(output, nbytes, is_kept=True, cast=casts.get(output.rank))
            self.on_progress(sum(meta.nbytes for meta in output.metas))

    def _note_written(
        self, output: OutputFile, nbytes: int, *, is_kept: bool = False, cast: CastStats | None
    ) -> None:
        entry = Written(
            *(output.rank, output.path, output.format, nbytes),
            *(len(output.tensors), is_kept, cast),
        )
        self.written.append(entry)

    def written_by_rank(self) -> tuple[Written, ...]:
        return tuple(sorted(self.written, key=lambda written: written.rank))

    def start(self, batch: Batch) -> None:
        """Create outputs and submit their tasks; wait while too many tasks are pending."""
        jobs: list[OutputJob] = []
        for output in batch.outputs:
            self.current = output.path
            jobs.append(self._begin(output))
            if output.rank in self._last:
                forget_header()
        for call, jobs_of_call in _calls(batch, jobs):
            while len(self.pending) >= self._max_in_flight():
                self.collect()
            for job in jobs_of_call:
                job.open_tasks += 1
            self.pending[self.executor.submit(call)] = jobs_of_call
            self.collect_done()
        for job in jobs:
            self._commit_if_done(job)

    def _begin(self, output: OutputFile) -> OutputJob:
        """Create an output, or go on with the file of it that a killed run has left."""
        if isinstance(self.executor, Cluster):
            self.jobs.append(OutputJob(output, RemoteFile(output)))
            return self.jobs[-1]
        hashes, casts = self.transaction.read_units(output)
        file = PartialFile(output, goes_on=bool(hashes))
        self.jobs.append(OutputJob(output, file))
        if file.is_left and not self._go_on(self.jobs[-1], file, hashes, casts):
            self.jobs.pop().file.discard()
            self.jobs.append(OutputJob(output, PartialFile(output)))
        return self.jobs[-1]

    def _go_on(
        self,
        job: OutputJob,
        file: PartialFile,
        digests: Mapping[Place, str],
        casts: Mapping[str, CastStats],
    ) -> bool:
        """Take what a killed run wrote of an output; return whether the file still has all of it.

        Raises
        ------
        VerifyError
            The source has other contents now.
        """
        places = [(job.output, file.index)]
        tasks = cut_into_tasks(places, self.options, selects=[digests.__contains__])
        calls = ((task.nbytes, task) for task in tasks)
        written: dict[Place, bytes] = {}
        total = 0
        for nbytes, checked in map_in_order(self.executor, check, calls, self._max_in_flight()):
            self.check()
            for _, place, number, digest in checked.stored:
                if digest.hex() != digests[place, number]:
                    return False
                written[place, number] = digest
            if any(digest.hex() != digests[place, n] for _, place, n, digest in checked.sampled):
                raise self.transaction.source_differs(job.output)
            total += nbytes
        self.on_progress(total)
        job.written, job.is_logged = frozenset(written), True
        for (place, number), digest in written.items():
            job.add_unit(place, number, digest)
        for name, stats in casts.items():
            job.add_cast(name, stats)
        return written.keys() == digests.keys()

    def _log_units(self) -> None:
        for job in self.jobs:
            if isinstance(job.file, PartialFile) and job.unlogged:
                job.file.sync()
                self.transaction.record_units(job.output, job.unlogged, job.unlogged_casts)
                job.unlogged, job.unlogged_casts, job.is_logged = [], {}, True
        self.transaction.log.sync()
        self.unlogged_bytes = 0

    def collect(self) -> None:
        while not wait(self.pending, CHECK_SECONDS, FIRST_COMPLETED).done:
            self.check()
            if isinstance(self.executor, Cluster):
                self.current = next(iter(self.pending.values()))[0].output.path
                self.executor.watch()
        self.collect_done()

    def collect_done(self) -> None:
        """Commit the complete outputs, in the order of submission and without waiting."""
        self.check()
        for future in [future for future in self.pending if future.done()]:
            jobs = self.pending.pop(future)
            self.current = jobs[0].output.path
            result = future.result()
            if isinstance(result, int):
                self._commit(jobs[0], result)
                continue
            self._check_read(result)
            self.on_progress(result.nbytes)
            _accept(result, jobs)
            for job in jobs:
                self._commit_if_done(job)
            self.unlogged_bytes += result.nbytes
        if self.unlogged_bytes >= self.group_bytes:
            self._log_units()

    def refuse_overflow(self) -> None:
        """Raise `ExecutionError` if casts made Inf of numbers; remove the outputs of this run.

        The run reads all of its source before that, so the error names every such tensor.
        """
        overflows = {**self.of_replicas, **self.overflows}
        if not overflows:
            return
        self.remove_written()
        dtypes = {transfer.name: transfer.dtype for transfer in self.plan.transfers}
        lost = [
            f"{name}: {stats.infinities} beyond {dtypes[name]}, the largest {stats.largest:.6g}"
            for name, stats in overflows.items()
        ]
        number = sum(stats.infinities for stats in overflows.values())
        cause = f"{count(number, 'number')} too large for the new type"
        hint = "--on-overflow inf, or --dtype with another type for them"
        raise ExecutionError(self.current, cause, (), hint, join_first(lost))

    def remove_written(self) -> None:
        for output in self.written:
            if not output.is_kept:
                remove_document(output.path)
        self.written = [output for output in self.written if output.is_kept]

    def _check_read(self, filled: Filled) -> None:
        """Raise `SourceHashError` if a unit that was read has not the hash that is listed."""
        for path, name, number, digest in filled.read:
            entry, unit = self.plan.listed.get(path), (name, number)
            if entry is None or entry.digest(unit) == digest:
                continue
            message = f"{name}: changed since the file was written"
            facts = f"expected SHA-256 {entry.digest(unit).hex()}, found {digest.hex()}"
            if holder := next(entry.alike.find_holders({unit: digest}), None):
                facts += f", which is that of {holder.entry.path}"
            hint = "put the file back, or --ignore-manifest to read it as it is"
            raise SourceHashError(path, [f"{message}; {facts}"], hint)

    def _max_in_flight(self) -> int:
        if isinstance(self.executor, Cluster):
            return min(MAX_CLAIMS, max(self.options.max_in_flight, 2 * self.executor.width))
        return self.options.max_in_flight

    def _commit_if_done(self, job: OutputJob) -> None:
        job.open_tasks -= 1
        if job.open_tasks:
            return
        if isinstance(job.file, PartialFile) and "crc_num" in job.file.index.attrs:
            call = partial(compute_checksum, job.file.index, known=job.crcs)
            self.pending[self.executor.submit(call)] = (job,)
        else:
            self._commit(job, None)

    def _commit(self, job: OutputJob, crc: int | None) -> None:
        self.current = job.output.path
        names = self._holders[job.output.rank]
        first = {name: stats for name, stats in job.casts.items() if name in names}
        if self.plan.tensors.on_overflow == "error":
            for name, stats in job.casts.items():
                if stats.infinities:
                    infinite = self.overflows if name in names else self.of_replicas
                    infinite[name] = infinite.get(name, CastStats()).merged(stats)
            if self.overflows or self.of_replicas:
                job.file.discard()
                self.jobs.remove(job)
                return
        cast = CastStats.sum(first.values()) or (CastStats() if job.casts else None)
        nbytes = job.file.seal(self._headers, crc)
        self.transaction.record_complete(job.output, nbytes, job.hashes, cast)
        job.file.rename()
        self.jobs.remove(job)
        self._note_written(job.output, nbytes, cast=cast)
        self.transaction.record_placed(job.output)

    def abandon(self, error: BaseException) -> None:
        """Remove unfinished outputs, cancel the waiting tasks, and wait for the running ones.

        A stop leaves the files in which a resumed run goes on, as a kill would.

        The outputs stay open until no task can write to them: their inodes could otherwise be given
        to files of the next run.  Do not wait for the workers of a cluster: they may be lost, and
        their attempts have names of their own.
        """
        is_stopped = not isinstance(error, Exception)
        left = [job.file for job in self.jobs if is_stopped and job.is_logged]
        removed = [job.file for job in self.jobs if job.file not in left]
        clean_up(error, *(file.remove for file in removed))
        if isinstance(self.executor, Abortable):
            self.executor.stop()  # a future that is cancelled meanwhile never completes
        else:
            for future in self.pending:
                future.cancel()
        if not isinstance(self.executor, Cluster):
            wait(self.pending)
        clean_up(error, *(file.discard for file in removed), *(file.close for file in left))
        if left:
            add_note(error, f"--resume goes on in {count(len(left), 'half-written file')}")
