"""The claim of a run on a destination: its locks, and a plan that nobody else has."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import random

from ckpttool.errors import FormatError, PlanError
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.manifest import differences
from ckpttool.storage.files import (
    PARTIAL,
    clean_up,
    create_document,
    is_there,
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
from ckpttool.transaction.states import PREVIOUS, Record, RecordedPlan, find_writers, look

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
        self._outputs = outputs = assignment.run_outputs
        self._record = record = outputs.record
        self._log_lock: FileLock | None = None
        self._is_settled = self._is_open = False
        self.notes: tuple[Diagnostic, ...] = ()
        self._lock = self._acquire(record.lock, is_shared=outputs.part is not None)
        try:
            if not self._lock.works:
                self._check_without_locks()
            if problems := list(destination_changes(outputs, assignment.seen)):
                raise PlanError(problems)
            self._settle_plan()
            self._is_settled = True
            self._log_lock = self._acquire(record.log(outputs.part))
            for name in outputs.outputs if outputs.part is not None else outputs.whole:
                remove_stale(record.folder, name + PARTIAL)
            self.log = self._open_log(self._log_lock)
            self._is_open = True
        except HeldError as error:
            self.abandon()
            raise self._busy(record.lock) from error
        except BaseException as error:
            clean_up(error, self.abandon)
            raise

    def _acquire(self, path: Path, *, is_shared: bool = False) -> FileLock:
        try:
            return FileLock(path, is_shared=is_shared)
        except HeldError as error:
            raise self._busy(path) from error

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

    def _read_plan(self) -> RecordedPlan | None:
        """Return the plan that is there, unless it is damaged and may be replaced."""
        try:
            return RecordedPlan.read(self._record.plan)
        except FileNotFoundError:
            return None
        except FormatError:
            if not self._assignment.overwrites:
                raise
            return None

    def _settle_plan(self) -> None:
        """Write the plan, or find an equal one.

        Only who holds the lock alone writes it.  Parts that begin at the same time try in turn.
        """
        new, lock, changes = self._outputs.plan(), self._lock, [""]
        for _ in range(PLAN_TRIES):
            found = self._read_plan()
            changes = [] if found is None else list(differences(new.provenance, found.provenance))
            if found is not None and not changes and lock.works:
                return
            if changes and found != self._assignment.seen_plan and not self._assignment.overwrites:
                break
            if self._outputs.part is None:
                self._replace_plan(found, new)
                return
            if not lock.make_exclusive():
                time.sleep(random() * PAUSE_SECONDS)
            elif self._read_plan() == found:
                self._replace_plan(found, new)
            lock.share()
        raise PlanError(tuple(beside_problems(look(self._record), changes)))

    def _replace_plan(self, found: RecordedPlan | None, new: RecordedPlan) -> None:
        """Set the logs of another plan aside, remove its temporary files, and replace it."""
        record = self._record
        if found is None or list(differences(new.provenance, found.provenance)):
            for path in record.logs():
                self._set_aside(path)
        if found is not None:
            remove_half_written(record, found)
        text = sealed_text(new.head(), new.lines())
        if self._lock.works:
            write_document(str(record.plan), text)
        else:
            record.plan.unlink(missing_ok=True)
            try:
                create_document(record.plan, text)
            except FileExistsError as error:
                raise HeldError(error.errno, "another run was faster", str(record.plan)) from error

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
        log = LogWriter(lock.path, lock.fd, kept, is_resumed=self._assignment.is_resumed)
        sync_folder(self._record.home)
        return log

    def release(self) -> None:
        """Release the locks."""
        for lock in (self._log_lock, self._lock):
            if lock is not None:
                lock.release()

    def abandon(self) -> None:
        """Release the locks, and remove what the run has recorded if it is of no use."""
        record, outputs = self._record, self._outputs
        try:
            if not self._is_settled and is_there(record.plan):
                return  # it is of another run
            if outputs.part is not None and self._is_open and not Log.read(self.log.path).outputs:
                self.log.path.unlink()
            is_alone = outputs.part is None or self._lock.make_exclusive()
            if is_alone and not _has_something_to_resume(record, outputs.whole):
                forget_run(record)
        finally:
            self.release()


def _has_something_to_resume(record: Record, outputs: Iterable[str]) -> bool:
    """Return whether a run that ends left something that only the record tells of."""
    if any(is_there(f"{record.folder / name}{PARTIAL}") for name in outputs):
        return True  # it could not be removed; the next run does that
    if is_there(record.manifest):
        return False  # no output was replaced
    found = look(record, is_locked=True)
    names = {name for log in (*found.logs, *found.previous) for name in log.outputs}
    is_of_use = bool(found.finished_parts or found.damaged)
    return is_of_use or any(is_there(record.folder / name) for name in names)


def remove_leftovers(record: Record) -> None:
    """Remove the logs and plan that a crash left beside a finished set, unless a run is there."""
    if not (os.access(record.home, os.W_OK) and record.leftovers()):
        return
    try:
        lock = FileLock(record.lock)
    except HeldError:
        return
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
    """Remove the logs and the plan; of a set that is not finished, the whole record."""
    for path in record.leftovers():
        path.unlink(missing_ok=True)
    if is_there(record.manifest):
        sync_folder(record.home)
        return
    record.stamps.unlink(missing_ok=True)
    record.lock.unlink(missing_ok=True)
    with suppress(OSError):  # somebody has put other files there
        record.home.rmdir()
    sync_folder(record.folder)
