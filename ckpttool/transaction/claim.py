"""The claim of a run on a destination: its plan, and its log, which nobody else writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from ckpttool.formats.local import describe_os_error
from ckpttool.model.manifest import OutputEntry
from ckpttool.model.tensors import FileStamp
from ckpttool.problems import (
    BusyError,
    Diagnostic,
    ExecutionError,
    FormatError,
    join_first,
    refusal,
)
from ckpttool.storage.files import (
    PARTIAL,
    clean_up,
    is_open_as,
    is_there,
    is_within,
    new_folders,
    remove_empty,
    remove_stale,
    sync_folder,
    write_document,
)
from ckpttool.transaction.locks import CLAIM_SECONDS, FileLock, HeldError
from ckpttool.transaction.log import Log, LoggedOutput, LogWriter
from ckpttool.transaction.outputs import find_unchanged
from ckpttool.transaction.resume import (
    Assignment,
    beside_problem,
    busy_problem,
    destination_changes,
)
from ckpttool.transaction.sealed_files import ManifestFile
from ckpttool.transaction.states import (
    Destination,
    FinishedStamps,
    Record,
    RecordedPlan,
    State,
    find_writers,
    read_destination,
)
from ckpttool.wording import count, shorten

BEGINS = "it begins or ends, or a set is finalized"


class Claim:
    """The hold of a run on a destination; ends with `release` or `abandon`.

    A run that has nothing to do holds nothing.

    Attributes
    ----------
    log
        The log of the run, which it alone writes.
    half_written
        The units that an earlier run wrote of outputs, by path.
    plan
        The plan of the run, when it is written.
    notes
        What only shows when a run begins.

    Raises
    ------
    BusyError, PlanError
        Another run is writing there, or has written there since preflight.
    FormatError
        The record is damaged.
    OSError
        A file cannot be read or made.
    """

    def __init__(self, run: Assignment) -> None:
        self._run = run
        self._record = record = run.record
        self._log_lock: FileLock | None = None
        self.plan: RecordedPlan | None = None
        self.notes: tuple[Diagnostic, ...] = ()
        self.half_written: Mapping[str, list[LoggedOutput]] = {}
        if run.is_finished:
            return
        self._new_folders = new_folders({(record.folder / name).parent for name in run.outputs})
        try:
            lock = FileLock(record.lock, CLAIM_SECONDS)
        except HeldError as error:
            raise BusyError([busy_problem(record, BEGINS, record.lock)]) from error
        self._has_locks = lock.works
        try:
            with lock:
                destination = read_destination(record)
                self._settle_plan(destination)
                self._log_lock = FileLock(run.log)
            if run.options.resume:
                self.half_written = destination.half_written(run.provenance.digest)
            remove_half_written(record, (n for n in run.outputs if n not in self.half_written))
            self.log = self._open_log(self._log_lock)
        except BaseException as error:
            clean_up(error, self.abandon)
            if isinstance(error, HeldError):
                raise BusyError([busy_problem(record, BEGINS, Path(error.filename))]) from error
            raise

    def _settle_plan(self, destination: Destination) -> None:
        """Write the plan, unless another run writes there, or has written since preflight.

        The caller has locked the record, if the file system has locks.
        """
        run, record, overwrites = self._run, self._record, self._run.options.overwrite
        problems = list(run.busy_problems(destination))
        if not self._has_locks:
            hint = "let no other run write there before this one ends"
            self.notes = (self._no_locks("only its plan keeps other runs away", hint),)
            if run.part is not None:
                hint = "one run without --part, or another file system"
                problems.append(self._no_locks("runs of parts need them", hint))
        problems = problems or list(destination_changes(run))
        if problems:
            raise refusal(problems)
        recorded = destination.plan
        if not overwrites and (error := destination.damaged.get(record.plan)):
            raise error
        is_same = recorded is not None and recorded.provenance.digest == run.provenance.digest
        if recorded is not None and not is_same:
            if recorded != run.destination.plan and not overwrites:
                raise BusyError([beside_problem(destination, run.provenance, recorded.provenance)])
            remove_half_written(record, recorded.files)
        self.plan = run.plan()
        if not (is_same and self._has_locks):
            write_document(str(record.plan), self.plan.text())
        if overwrites and run.part is None:
            for path in destination.damaged.keys() & {*record.logs()}:
                path.unlink(missing_ok=True)

    def _no_locks(self, facts: str, hint: str) -> Diagnostic:
        message, where = "this file system has no locks", str(self._record.home)
        return Diagnostic("no_locks", message, hint=hint, facts=facts, where=where)

    def _open_log(self, lock: FileLock) -> LogWriter:
        """Open the log of this run behind its last whole line."""
        try:
            kept = Log.read(lock.path).nbytes
        except FormatError:
            if not self._run.options.overwrite:
                raise
            kept = 0
        run = self._run.provenance
        log = LogWriter(lock.path, lock.fd, kept, run.digest, run.command)
        sync_folder(self._record.home)
        return log

    def require_record(self) -> None:
        """Raise `ExecutionError` if somebody has removed the record, or replaced the plan in it.

        Locks prevent that another run replaces the plan.
        """
        if self._has_log() and (self._has_locks or _read_plan(self._record.plan) == self.plan):
            return
        cause, facts = "its record was removed or replaced", "nothing proves the outputs"
        raise ExecutionError(str(self._record.output), cause, (), "--overwrite", facts)

    def _has_log(self) -> bool:
        return self._log_lock is not None and is_open_as(self._log_lock.path, self._log_lock.fd)

    def release(self) -> None:
        """Release the log."""
        if self._log_lock is not None:
            self._log_lock.release()

    def abandon(self) -> None:
        """Release the log; if nothing can be resumed, remove records, and new folders."""
        record = self._record
        if self._run.is_finished:
            return
        try:
            # Without the lock another run begins, or parts are finalized.
            with suppress(HeldError), FileLock(record.lock, CLAIM_SECONDS):
                destination = read_destination(record)
                for log in destination.logs:
                    is_empty = not any((*log.plans.values(), *log.units.values()))
                    if log.path == self._run.log and is_empty and self._has_log():
                        log.path.unlink()
                self.release()
                if not (self._is_of_others(destination) or _has_something_to_resume(destination)):
                    forget_run(record)
                    remove_empty(self._new_folders)
        finally:
            self.release()

    def _is_of_others(self, destination: Destination) -> bool:
        if self._has_locks:
            return bool(find_writers(self._record))
        return destination.plan is not None and destination.plan != self.plan


def _read_plan(path: Path) -> RecordedPlan | None:
    with suppress(FileNotFoundError, FormatError):
        return RecordedPlan.read(path)
    return None


def _has_something_to_resume(destination: Destination) -> bool:
    folder = destination.record.folder
    names = destination.plan.outputs if destination.plan is not None else {}
    if any(is_there(f"{folder / name}{PARTIAL}") for name in names):
        return True  # it could not be removed; the next run does that
    if destination.state is State.COMPLETE:
        return False  # no output was replaced
    is_of_use = bool(destination.finished or destination.damaged)
    return is_of_use or any(is_there(folder / name) for name in destination.logged())


def remove_leftovers(record: Record, ended: RecordedPlan | None) -> tuple[Diagnostic, ...]:
    """Remove what a run left beside a finished set, unless another run is there; return notes.

    These are its logs and plan, and the outputs of the sets and killed runs that it replaced.
    Without locks, only the plan of a run that has ``ended`` is removed.  If that fails, it stays:
    the set is complete all the same.
    """
    if not (is_there(record.manifest) and (record.leftovers() or record.replaced())):
        return ()
    with suppress(OSError, FormatError), FileLock(record.lock, CLAIM_SECONDS) as lock:
        plan = _read_plan(record.plan)
        is_free = not find_writers(record) if lock.works else plan in (None, ended)
        if is_there(record.manifest) and is_free:
            notes = tuple(_remove_replaced(record))
            remove_half_written(record, () if plan is None else plan.files)
            forget_run(record)
            return notes
    return ()


def _remove_replaced(record: Record) -> Iterator[Diagnostic]:
    """Remove older outputs that are as a record lists them; yield what became of all.

    Manifests of replaced sets go after the outputs, so the next run continues after a crash.
    """
    removed, left = list[str](), list[str]()
    manifest = ManifestFile.read(record.manifest)
    names = {output.path for output in manifest.planned()}

    def is_as_listed(name: str, stamp: FileStamp | None, read: Callable[[], OutputEntry]) -> bool:
        known = manifest.provenance()
        return bool(find_unchanged(record.folder, known, {name: stamp}, lambda _: [read()]))

    for name, entries in _older_entries(record, names).items():
        path = record.folder / name
        try:
            if path.is_symlink() or not is_within(record.folder, name):
                left.append(f"{path}: a link")
            elif not any(is_as_listed(name, *entry) for entry in entries):
                left.append(f"{path}: changed since it was written")
            else:
                path.unlink()
                removed.append(str(path))
        except OSError as error:
            left.append(f"{path}: {describe_os_error(error)}")
        remove_empty([path.parent])
    for older in record.replaced():
        Record.stamps_of(older).unlink(missing_ok=True)
        older.unlink()
    if removed:
        message = f"{count(len(removed), 'output')} of the older set removed"
        yield record.diagnostic("resumed", message, facts=shorten(removed, 3))
    if left:
        message = f"{count(len(left), 'output')} of the older set left"
        yield record.diagnostic("stale", message, "move what is left away", join_first(left))


_Entry: TypeAlias = tuple[FileStamp | None, Callable[[], OutputEntry]]


def _older_entries(record: Record, names: Collection[str]) -> dict[str, list[_Entry]]:
    """Return the entries of older outputs that exist and are not among the ``names`` of the set.

    They are from manifests of replaced sets, and from logs of runs that did not end.  Outputs in
    these logs count only in the folders of the set: with ``--rank`` others may be meant to stay.
    """
    older: dict[str, list[_Entry]] = defaultdict(list)
    for path in record.replaced():
        manifest, stamps = ManifestFile.read(path), dict[str, FileStamp]()
        if all(output.path in names for output in manifest.planned()):
            continue  # entries list all tensors
        with suppress(FileNotFoundError, FormatError):  # then the contents decide
            finished = FinishedStamps.read(Record.stamps_of(path))
            stamps |= finished.outputs if finished.manifest == manifest.digest else {}
        for output in manifest.outputs():
            if output.path not in names:
                entry = stamps.get(output.path), lambda output=output: output
                older[output.path].append(entry)
    folders = {Path(name).parent for name in names}
    for name, logged in read_destination(record).logged().items():
        if name not in names and Path(name).parent in folders:
            older[name].append((logged.stamp, logged.read_entry))
    return {name: entries for name, entries in older.items() if is_there(record.folder / name)}


def remove_half_written(record: Record, names: Iterable[str]) -> None:
    """Remove temporary files that runs left, by the names of their files; some may stay."""
    for name in names:
        with suppress(OSError):  # the run that writes this output reports what is in its way
            remove_stale(record.folder, name + PARTIAL)


def forget_run(record: Record) -> None:
    """Remove the logs and the plan; of a set that is not finished, the whole record.

    If the run has replaced nothing of an older set, that is complete again.
    """
    for path in record.leftovers():
        path.unlink(missing_ok=True)
    if not is_there(record.manifest):
        for older in record.replaced()[:1]:
            with suppress(FileNotFoundError):
                Record.stamps_of(older).replace(record.stamps)
            older.replace(record.manifest)
            sync_folder(record.folder)
    if is_there(record.manifest):
        sync_folder(record.home)
        return
    record.stamps.unlink(missing_ok=True)
    record.lock.unlink(missing_ok=True)
    remove_empty([record.home])  # unless somebody has put other files there
    sync_folder(record.folder)
