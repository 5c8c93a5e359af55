"""The record of a run, line by line.  After a crash behind any line the state is known.

1. `look` (preflight) takes no lock and writes nothing.
2. It returns COMPLETE, RUNNING, STOPPED or NONE.
3. `Transaction.open` makes the record and locks it: a whole run alone, a part with other parts, and
   its log alone.  If another run is in the way, this one is refused.
4. What the run would replace is as preflight saw it, or the run is refused.
5. The plan is written.  If it is there already, the two are compared.
6. Equal: the logs stay; without ``--resume`` the own one begins anew.  Not equal: if nobody else
   holds the lock, the old logs are set aside and the plan is replaced.
7. An output is kept if its stamp or its hashes are those in a log, whichever run wrote it.
8. `PartialFile.seal`: an output is on disk under its temporary name, and its header is read back.
9. `Transaction.record_complete` appends its entry to the log and syncs it.
10. Before the first rename, the manifest, stamps and documents of an older set are removed.
11. `PartialFile.rename`; then `Transaction.record_placed` appends the stamp.
12. `Transaction.finish`: the sources are unchanged.  A part appends ``done`` and unlocks its log.
13. A whole run, or `ckpttool.finalize` for parts: the outputs are unchanged.  The stamps and
    documents are written, then the manifest: COMPLETE.
14. The logs and the plan are removed.
15. `Transaction.abandon`, when a run fails: STOPPED if there is something to resume, otherwise the
    record is removed.  After a crash line 2 decides.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from ckpttool.errors import ExecutionError, FormatError, PlanError, VerifyError
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.manifest import OutputEntry, Provenance, differences, hashed
from ckpttool.model.plan import Document, OutputFile, Plan
from ckpttool.model.tensors import FileStamp
from ckpttool.model.wording import shorten
from ckpttool.storage.files import (
    PARTIAL,
    clean_up,
    create_document,
    is_there,
    is_within,
    name_attempt,
    remove_document,
    remove_stale,
    stamp_at,
    sync_folder,
    write_document,
)
from ckpttool.transaction.locks import FileLock, HeldError
from ckpttool.transaction.log import Log, LoggedOutput, LogWriter, Writer
from ckpttool.transaction.manifest import (
    ManifestFile,
    changed_inputs,
    entry_text,
    sealed_text,
)
from ckpttool.transaction.resume import (
    Assignment,
    RunOutputs,
    beside_problems,
    busy_problem,
    destination_changes,
    find_unchanged,
    other_plan_problems,
    resume_problems,
)
from ckpttool.transaction.states import (
    FinishedStamps,
    Record,
    RecordedPlan,
    State,
    find_writers,
    look,
)

MIXTURE = "what was made of it may be a mixture, so write all of it anew"
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
PLAN_TRIES = 100  # to hold the lock alone, while other parts begin, too


class Transaction:
    """A run that writes a set of outputs, or a part of it; ends with `finish` or `abandon`.

    Attributes
    ----------
    kept
        Ranks of the outputs that are not written again.
    writing
        Path of the document that `finish` is writing, for errors; empty before.
    notes
        What is worth knowing of the destination, and only the lock has shown.
    """

    def __init__(self, plan: Plan, assignment: Assignment) -> None:
        self._plan = plan
        self._outputs = RunOutputs.of(plan, assignment)
        self._assignment = assignment
        self._record = self._outputs.record
        self._lock: FileLock | None = None
        self._log_lock: FileLock | None = None
        self._log: LogWriter | None = None
        self._entries: dict[str, LoggedOutput] = {}
        self._stamps: dict[str, FileStamp] = dict(assignment.kept)
        self._is_settled = self._has_replaced = False
        self.kept = frozenset(self._outputs.outputs[name] for name in assignment.kept)
        self.writing = ""
        self.notes: tuple[Diagnostic, ...] = ()

    @classmethod
    def open(cls, plan: Plan, assignment: Assignment) -> Transaction:
        """Lock the destination of a plan, and record what is to be written.

        A set, or a part, of which all is there and kept is neither locked nor written.

        Raises
        ------
        PlanError
            A source file has changed, or the run to resume has another plan.  Or another run is
            writing the set, or has written it since preflight.  Nothing was written.
        FormatError
            The record is damaged.
        OSError
            A file cannot be read or created.
        """
        transaction = cls(plan, assignment)
        if assignment.is_finished:
            remove_leftovers(transaction._record)
            return transaction
        changed = [Diagnostic("changed", text, "run again") for text in changed_inputs(plan)]
        if changed:
            raise PlanError(changed)
        try:
            transaction._begin()
        except HeldError as error:
            raise transaction._busy(transaction._record.lock) from error
        except BaseException as error:
            clean_up(error, transaction.abandon)
            raise
        return transaction

    def _begin(self) -> None:
        """Do lines 3 to 7."""
        outputs, record, assignment = self._outputs, self._record, self._assignment
        self._lock = self._acquire(record.lock, is_shared=outputs.part is not None)
        if not self._lock.works:
            self._begin_without_locks()
        if problems := list(destination_changes(outputs, assignment.seen)):
            raise PlanError(problems)
        self._settle_plan()
        self._is_settled = True
        self._log_lock = self._acquire(record.log(outputs.part))
        for name in outputs.outputs if outputs.part is not None else outputs.whole:
            remove_stale(record.folder, name + PARTIAL)
        path, kept_bytes = self._log_lock.path, 0
        try:
            kept_bytes = Log.read(path).nbytes
        except FormatError:
            if not assignment.overwrites:
                raise
        is_resumed = assignment.is_resumed
        self._log = LogWriter(path, self._log_lock.fd, kept_bytes, is_resumed=is_resumed)
        if is_resumed:
            self._list_kept()
        sync_folder(record.home)

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

    def _begin_without_locks(self) -> None:
        """Check that no other run may be writing, on a file system without locks."""
        record, plan = self._record, self._read_plan()
        if self._outputs.part is not None:
            text = f"{record.home}: this file system has no locks, which runs with --part need"
            raise PlanError([Diagnostic("no_locks", text, "write all in one run, or elsewhere")])
        writers = find_writers(record, plan, ())
        if writers and not self._assignment.overwrites:
            raise PlanError([busy_problem(record, next(iter(writers.values())))])
        text = f"{record.home}: this file system has no locks, so only the plan there keeps other "
        text += "runs away"
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
        """Write the plan, or find an equal one; see lines 5 and 6."""
        outputs, record, lock = self._outputs, self._record, self._lock
        assert lock is not None, "it is held"
        inside = (
            replace(one, path=os.path.relpath(one.path, record.folder)) for one in outputs.documents
        )
        documents = tuple(one for one in inside if is_within(record.folder, one.path))
        new = RecordedPlan(Writer.this(), outputs.provenance, outputs.whole, documents)
        for _ in range(PLAN_TRIES):
            found = self._read_plan()
            if found is None and outputs.part is not None and not is_there(record.plan):
                if self._link_plan(new):
                    return
                continue
            changes = [] if found is None else list(differences(new.provenance, found.provenance))
            if found is not None and not changes and lock.works:
                return
            self._refuse_to_replace(changes)
            if outputs.part is None:
                self._replace_plan(found, new)
                return
            if lock.make_exclusive() and self._read_plan() == found:
                self._replace_plan(found, new)
            lock.share()
        by = list(look(record).running.values())
        raise PlanError(tuple(beside_problems(record, changes, by)))

    def _refuse_to_replace(self, changes: Sequence[str]) -> None:
        """Raise `PlanError` if the plan that is there must not be replaced by this run."""
        if changes and not self._assignment.overwrites:
            if self._assignment.is_resumed:
                raise PlanError(tuple(resume_problems(self._record.plan, changes)))
            there = look(self._record, is_locked=True)
            if there.finished_parts:
                raise PlanError(tuple(other_plan_problems(there, changes)))

    def _link_plan(self, plan: RecordedPlan) -> bool:
        """Write the plan unless it is there; return whether it was not."""
        path = Path(name_attempt(str(self._record.plan)))
        write_document(str(path), sealed_text(plan.head(), plan.lines()))
        try:
            os.link(path, self._record.plan)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            text = f"{self._record.home}: this file system has no hard links, which runs with "
            hint = "write all in one run, or elsewhere"
            raise PlanError([Diagnostic("no_locks", f"{text}--part need", hint)]) from error
        finally:
            path.unlink()
        sync_folder(path.parent)
        return True

    def _replace_plan(self, found: RecordedPlan | None, new: RecordedPlan) -> None:
        """Set the logs of another plan aside, remove its temporary files, and replace it."""
        record = self._record
        is_other = found is None or bool(list(differences(new.provenance, found.provenance)))
        for path in record.logs() if is_other else ():
            self._set_aside(path)
        if found is not None:
            remove_half_written(record, found)
        text = sealed_text(new.head(), new.lines())
        assert self._lock is not None, "it is held"
        if self._lock.works:
            write_document(str(record.plan), text)
        else:
            record.plan.unlink(missing_ok=True)
            create_document(record.plan, text)

    def _set_aside(self, path: Path) -> None:
        """Rename a log of another plan; remove it if none of its outputs is there."""
        try:
            names = Log.read(path).outputs
        except FormatError:
            if not self._assignment.overwrites:
                raise
            names = {}
        if any(is_there(self._record.folder / name) for name in names):
            taken = {one.name for one in self._record.previous_logs()}
            numbers = (f"previous-{n}.log" for n in count(1))
            path.rename(path.with_name(next(name for name in numbers if name not in taken)))
        else:
            path.unlink()

    def _list_kept(self) -> None:
        """Find the entries of outputs that a log lists; list those of a finished set."""
        assert self._log is not None, "it is open"
        record, mine = self._record, self._outputs.outputs
        if self._assignment.state is State.COMPLETE and self._stamps:
            for entry in ManifestFile.read(record.manifest).outputs():
                if entry.path in mine:
                    line = self._log.add(entry_text(entry), is_durable=False)
                    self._entries[entry.path] = line
                    if stamp := self._stamps.get(entry.path):
                        self._log.add_stamp(entry.path, stamp)
            self._log.sync()
        else:
            logged = look(record, is_locked=True).logged()
            self._entries |= {name: logged[name] for name in mine if name in logged}
        if self._stamps.keys() - self._entries.keys():
            text = f"{record.home}: written by another run since this one began"
            raise PlanError([Diagnostic("destination", text, "run again")])

    def record_complete(
        self, output: OutputFile, nbytes: int, hashes: Mapping[str, Mapping[int, str]]
    ) -> None:
        """Record that an output is on disk and about to be renamed.

        Parameters
        ----------
        output, nbytes
            The output, and the size of its file.
        hashes
            SHA-256 of each unit, by tensor and number of the unit.

        Raises
        ------
        VerifyError
            An earlier run completed the output with other contents.
        OSError
            The record cannot be written.
        """
        assert self._log is not None, "what is complete is not written"
        name = os.path.relpath(output.path, self._record.folder)
        tensors = tuple(hashed(meta, hashes.get(meta.name, {})) for meta in output.metas)
        line = entry_text(OutputEntry(output.rank, name, output.format, nbytes, tensors))
        before = self._entries.get(name)
        if before is not None and before.read_line() != line:
            text = "is not what the same run wrote there before; has a source file been changed? "
            text += "Without --resume (--overwrite) all is written anew"
            raise VerifyError(output.path, [text])
        self._entries[name] = self._log.add(line)
        if not self._has_replaced:
            self._remove_older_set()
            self._has_replaced = True

    def _remove_older_set(self) -> None:
        """Remove what says that the set is complete, before the first output is replaced."""
        documents = (document.path for document in self._outputs.documents)
        for path in (self._record.manifest, self._record.stamps, *documents):
            remove_document(str(path))

    def record_placed(self, output: OutputFile) -> None:
        """Record that an output has its final name."""
        assert self._log is not None, "what is complete is not written"
        name = os.path.relpath(output.path, self._record.folder)
        stamp = stamp_at(Path(output.path))
        if stamp is not None:
            self._stamps[name] = stamp
            self._log.add_stamp(name, stamp)

    def finish(self) -> None:
        """Write the documents of the set and its manifest; a part only says that it is done.

        Raises
        ------
        ExecutionError
            A source file has changed during the run, so outputs may be a mixture.  Or somebody has
            changed an output.
        OSError
            A document cannot be written; `writing` names it.
        """
        if self._log is None:
            return
        record, outputs = self._record, self._outputs
        self.writing = str(record.manifest if outputs.part is None else record.log(outputs.part))
        changed = list(changed_inputs(self._plan))
        if changed:
            raise ExecutionError(self.writing, f"{shorten(changed, 3)}; {MIXTURE}")
        if outputs.part is not None:
            self._log.end()
        else:
            entries = {name: self._entries[name] for name in outputs.outputs}
            stamps = find_unchanged(
                record.folder,
                outputs.provenance,
                {name: self._stamps.get(name) for name in entries},
                lambda names: (entries[name].read_entry() for name in names),
            )
            if damaged := [name for name in entries if name not in stamps]:
                path = str(record.folder / damaged[0])
                names = shorten(damaged[1:], 3)
                text = (
                    f"changed by somebody else since it was written{', as ' * bool(names)}{names}"
                )
                hint = "--resume --overwrite writes it again, and keeps the others"
                raise ExecutionError(path, f"{text}; {hint}")
            finish_set(
                record,
                outputs.provenance,
                outputs.documents,
                entries.values(),
                stamps,
                self._name_document,
            )
        self._release()

    def _name_document(self, path: Path) -> None:
        self.writing = str(path)

    def describe_source_changes(self) -> str:
        """Return text for the message of a failed run: the changes of its sources, if any."""
        try:
            changed = list(changed_inputs(self._plan))
        except OSError:  # the sources cannot be read, which the failure itself reports
            return ""
        return f"; {shorten(changed, 3)}; {MIXTURE}" if changed else ""

    def abandon(self) -> None:
        """End an incomplete run; the record stays if there is something to resume."""
        if self._lock is None:
            return
        record, outputs = self._record, self._outputs
        try:
            if not self._is_settled and is_there(record.plan):
                return  # it is of another run
            own = record.log(outputs.part)
            if outputs.part is not None and self._log is not None and not Log.read(own).outputs:
                own.unlink()
            is_alone = outputs.part is None or self._lock.make_exclusive()
            if is_alone and not has_something_to_resume(record, outputs.whole):
                forget_run(record)
        finally:
            self._release()

    def _release(self) -> None:
        """Release the locks."""
        for lock in (self._log_lock, self._lock):
            if lock is not None:
                lock.release()
        self._lock = self._log_lock = self._log = None


def finish_set(
    record: Record,
    provenance: Provenance,
    documents: Iterable[Document],
    entries: Iterable[LoggedOutput],
    stamps: Mapping[str, FileStamp],
    on_document: Callable[[Path], None] = lambda path: None,
) -> None:
    """Write what says that a set is complete, and remove its logs and plan.

    Parameters
    ----------
    record, provenance
        The record of the set, and its provenance with the stamps of its sources.
    documents
        Documents of the set.
    entries
        Its outputs in the order of their ranks.
    stamps
        Stamps of the outputs, from `find_unchanged`.
    on_document
        Called with the path of each document before it is written.

    Raises
    ------
    OSError
        A document cannot be written.
    """
    finished = FinishedStamps(provenance, stamps)
    on_document(record.stamps)
    write_document(str(record.stamps), sealed_text(finished.head(), finished.lines()))
    for document in documents:
        on_document(Path(document.path))
        write_document(document.path, document.data)
    on_document(record.manifest)
    lines = (entry.read_line() for entry in entries)
    write_document(str(record.manifest), sealed_text(provenance.head(), lines))
    forget_run(record)


def has_something_to_resume(record: Record, outputs: Iterable[str]) -> bool:
    """Return whether a run that ends left something that only the record tells of."""
    if any(is_there(f"{record.folder / name}{PARTIAL}") for name in outputs):
        return True  # it could not be removed; the next run does that
    if is_there(record.manifest):
        return False  # no output was replaced
    destination = look(record, is_locked=True)
    names = {name for log in (*destination.logs, *destination.previous) for name in log.outputs}
    is_of_use = bool(destination.finished_parts or destination.damaged)
    return is_of_use or any(is_there(record.folder / name) for name in names)


def remove_leftovers(record: Record) -> None:
    """Remove the logs and plan that a crash left beside a finished set."""
    if not record.leftovers():
        return
    try:
        lock = FileLock(record.lock)
    except HeldError:
        return  # a run is about to replace the set
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
    if not is_there(record.manifest):
        record.stamps.unlink(missing_ok=True)
        record.lock.unlink(missing_ok=True)
        with suppress(OSError):  # somebody has put other files there
            record.home.rmdir()
        sync_folder(record.folder)
    else:
        sync_folder(record.home)
