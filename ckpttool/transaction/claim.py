"""The claim of a run on a destination: its locks, and a plan that nobody else has."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import random

from ckpttool.errors import ExecutionError, FormatError, PlanError
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.manifest import differences
from ckpttool.storage.files import (
    PARTIAL,
    clean_up,
    create_document,
    is_open_as,
    is_there,
    name_attempt,
    remove_stale,
    sync_folder,
    write_document,
)
from ckpttool.transaction.locks import PAUSE_SECONDS, FileLock, HeldError
from ckpttool.transaction.log import Log, LogWriter
from ckpttool.transaction.manifest import sealed_text
from ckpttool.transaction.resume import (
    Assignment,
    beside_problems,
    busy_problem,
    destination_changes,
)
from ckpttool.transaction.states import PREVIOUS, Record, RecordedPlan, State, find_writers, look

PLAN_TRIES = 40  # to hold the lock alone, while other parts begin, too


class Claim:
    """The hold of a run on a destination; ends with `release` or `abandon`.

    Parameters
    ----------
    assignment
        What the run writes, and what preflight saw there.

    Attributes
    ----------
    log
        The log of the run, which it alone writes.
    notes
        What only shows when a run begins.

    Raises
    ------
    PlanError
        Another run holds the destination, or has written there since preflight.
    FormatError
        The record is damaged.
    OSError
        A file cannot be read or made.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._outputs = outputs = assignment.outputs
        self._record = record = outputs.record
        self._lock: FileLock | None = None
        self._log_lock: FileLock | None = None
        self._plan: RecordedPlan | None = None
        self._is_settled = False
        self.notes: tuple[Diagnostic, ...] = ()
        try:
            if outputs.part is None:
                self._lock = FileLock(record.lock)
                self._begin()
                self._settle_plan()
            else:
                self._settle_among_parts()
            self._is_settled = True
            self._log_lock = FileLock(record.log(outputs.part))
            for name in outputs.outputs if outputs.part is not None else outputs.whole:
                remove_stale(record.folder, name + PARTIAL)
            self.log = self._open_log(self._log_lock)
        except HeldError as error:
            clean_up(error, self.abandon)
            raise self._busy(Path(error.filename)) from error
        except BaseException as error:
            clean_up(error, self.abandon)
            raise

    def _begin(self) -> None:
        """Refuse to begin where another run has written since preflight, or may be writing."""
        assert self._lock is not None, "it is held"
        if not self._lock.works:
            self._check_without_locks()
        if problems := list(destination_changes(self._outputs, self._assignment.seen)):
            raise PlanError(problems)

    def _settle_among_parts(self) -> None:
        """Share the lock with other parts of an equal plan; write the plan if nobody has.

        Only who holds the lock alone writes the plan.  Parts that begin together try in turn.
        """
        for _ in range(PLAN_TRIES):
            self._lock = FileLock(self._record.lock, is_shared=True)
            self._begin()
            found = self._read_plan()
            if found is not None and not self._changes_since(found):
                return
            self._lock.release()
            try:
                self._lock = FileLock(self._record.lock, tries=1)
            except HeldError:
                time.sleep(random() * PAUSE_SECONDS)
                continue
            self._settle_plan()
            self._lock.release()
        found = self._read_plan()
        changes = [] if found is None else self._changes_since(found)
        if changes:
            raise PlanError(tuple(beside_problems(look(self._record), changes)))
        raise HeldError(errno.EWOULDBLOCK, "other parts begin", str(self._record.lock))

    def _changes_since(self, found: RecordedPlan) -> list[str]:
        return list(differences(self._outputs.provenance, found.provenance))

    def _busy(self, path: Path) -> PlanError:
        """Return the error that another run holds a lock."""
        running = look(self._record).running
        by = next(iter(running.values()), "it has just ended")
        return PlanError([busy_problem(self._record, running.get(path, by))])

    def _check_without_locks(self) -> None:
        """Refuse a part, and a run beside one that may be writing; warn otherwise."""
        home = self._record.home
        if self._outputs.part is not None:
            text = f"{home}: this file system has no locks, which runs with --part need"
            raise PlanError([Diagnostic("no_locks", text, "write all in one run, or elsewhere")])
        writers = find_writers(self._record, self._read_plan(), ())
        if writers and not self._assignment.overwrites:
            raise PlanError([busy_problem(self._record, next(iter(writers.values())))])
        text = f"{home}: this file system has no locks, so only the plan there keeps others away"
        hint = "see to it that no other run writes there before this one ends"
        self.notes = (Diagnostic("no_locks", text, hint),)

    def _read_plan(self, path: Path | None = None) -> RecordedPlan | None:
        """Return the plan that is there, unless it is damaged and may be replaced."""
        try:
            return RecordedPlan.read(path or self._record.find_plan())
        except FileNotFoundError:
            return None
        except FormatError:
            if not self._assignment.overwrites:
                raise
            return None

    def _settle_plan(self) -> None:
        """Write the plan unless it is there; set the logs of another plan aside."""
        assert self._lock is not None, "it is held alone"
        record, found = self._record, self._read_plan()
        changes = [] if found is None else self._changes_since(found)
        if (
            changes
            and found != self._assignment.destination.plan
            and not self._assignment.overwrites
        ):
            raise PlanError(tuple(beside_problems(look(record, is_locked=True), changes)))
        is_new = found is None or bool(changes)
        self._plan = plan = self._outputs.plan()
        text = sealed_text(plan.head(), plan.lines())
        if not self._lock.works:
            self._write_without_locks(found, text, is_new)
        elif is_new:
            self._set_logs_aside(found)
            write_document(str(record.plan), text)

    def _write_without_locks(
        self, found: RecordedPlan | None, text: Iterator[str], is_new: bool
    ) -> None:
        """Write the plan; raise `HeldError` if another run has done so meanwhile.

        Only one run can rename the plan that was found, and only one can make a new one.
        """
        path = self._record.find_plan()
        try:
            if is_there(path):
                aside = path.rename(name_attempt(str(self._record.plan)))
                if self._read_plan(aside) != found:
                    aside.rename(path)
                    raise FileExistsError
                if is_new:
                    self._set_logs_aside(found)
                create_document(self._record.plan, text)
            else:
                create_document(path, text)
                self._set_logs_aside(None)
        except (FileExistsError, FileNotFoundError) as error:
            raise HeldError(errno.EEXIST, "another run was faster", str(path)) from error

    def _set_logs_aside(self, found: RecordedPlan | None) -> None:
        """Set the logs of another plan aside, and remove the files that it left half-written."""
        for path in self._record.logs():
            self._set_aside(path)
        if found is not None:
            remove_half_written(self._record, found)

    def _set_aside(self, path: Path) -> None:
        """Rename a log of another plan; remove it if none of its outputs is there."""
        record = self._record
        if not any(is_there(record.folder / name) for name in self._read_log(path).outputs):
            path.unlink()
            return
        taken = {one.name for one in record.previous_logs()}
        numbers = (f"{PREVIOUS}{number}.log" for number in count(1))
        path.rename(path.with_name(next(name for name in numbers if name not in taken)))

    def _read_log(self, path: Path) -> Log:
        """Return a log; an empty one if it is damaged and may be replaced."""
        try:
            return Log.read(path)
        except FormatError:
            if not self._assignment.overwrites:
                raise
            return Log(path)

    def _open_log(self, lock: FileLock) -> LogWriter:
        """Open the log of this run behind its last whole line."""
        kept = self._read_log(lock.path).nbytes
        log = LogWriter(lock.path, lock.fd, kept)
        sync_folder(self._record.home)
        return log

    def require_record(self) -> None:
        """Raise `ExecutionError` if somebody has removed the record, or replaced the plan in it.

        Locks prevent that another run replaces the plan.
        """
        assert self._lock is not None, "it is held"
        if self._has_record() and (self._lock.works or self._read_plan() == self._plan):
            return
        text = "removed or replaced while this run wrote, so nothing proves the outputs"
        raise ExecutionError(str(self._record.home), f"{text}; write all anew (--overwrite)")

    def _has_record(self) -> bool:
        """Return whether the log of this run is still in the record."""
        return self._log_lock is not None and is_open_as(self._log_lock.path, self._log_lock.fd)

    def release(self) -> None:
        """Release the locks."""
        for lock in (self._log_lock, self._lock):
            if lock is not None:
                lock.release()

    def abandon(self) -> None:
        """Release the locks, and remove what the run has recorded if it is of no use."""
        record, part = self._record, self._outputs.part
        try:
            if self._lock is None or not (self._is_settled or not is_there(record.plan)):
                return  # the record is of another run
            if part is not None and self._has_record() and not Log.read(self.log.path).outputs:
                self.log.path.unlink()
            if part is not None:
                self.release()
                self._lock = FileLock(record.lock, tries=1)
            if not _has_something_to_resume(record):
                forget_run(record)
        except HeldError:
            pass  # other parts go on
        finally:
            self.release()


def _has_something_to_resume(record: Record) -> bool:
    """Return whether runs left something that only the record tells of."""
    found = look(record, is_locked=True)
    names = found.plan.outputs if found.plan is not None else {}
    if any(is_there(f"{record.folder / name}{PARTIAL}") for name in names):
        return True  # it could not be removed; the next run does that
    if found.state is State.COMPLETE:
        return False  # no output was replaced
    logged = {name for log in (*found.logs, *found.previous) for name in log.outputs}
    is_of_use = bool(found.finished_parts or found.damaged)
    return is_of_use or any(is_there(record.folder / name) for name in logged)


def remove_leftovers(record: Record) -> None:
    """Remove the logs and plan that a crash left beside a finished set, unless a run is there.

    If that fails, they stay: the set is complete all the same.
    """
    if not record.leftovers():
        return
    with suppress(OSError):
        lock = FileLock(record.lock)
        try:
            if is_there(record.manifest):
                with suppress(FileNotFoundError, FormatError):
                    remove_half_written(record, RecordedPlan.read(record.plan))
                forget_run(record)
        finally:
            lock.release()


def remove_half_written(record: Record, plan: RecordedPlan) -> None:
    """Remove the temporary files that a run of a plan left."""
    for name in (*plan.outputs, *(document.path for document in plan.documents)):
        remove_stale(record.folder, name + PARTIAL)


def forget_run(record: Record) -> None:
    """Remove the logs and then the plan; of a set that is not finished, the whole record."""
    for path in (*record.logs(), *record.leftovers()):
        path.unlink(missing_ok=True)
    if is_there(record.manifest):
        sync_folder(record.home)
        return
    record.stamps.unlink(missing_ok=True)
    record.lock.unlink(missing_ok=True)
    with suppress(OSError):  # somebody has put other files there
        record.home.rmdir()
    sync_folder(record.folder)
