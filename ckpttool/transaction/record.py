"""The record of a run, line by line.  After a crash behind any line the state is known.

1. `look` (preflight) keeps no lock and writes nothing.
2. It returns COMPLETE, RUNNING, STOPPED or NONE.
3. `Transaction.open` makes the record and locks it until line 6.  If another run is writing, this
   one is refused; only parts of one plan write side by side.
4. What the run would replace is as preflight saw it, or the run is refused.
5. The plan is written, or replaces that of a run that stopped.
6. The run locks its log and appends that it begins, with the digest of its plan.
7. An output is kept if its stamp or its hashes are those in a log, in an entry of the same plan.
8. `PartialFile.seal`: an output is on disk under its temporary name, and its header is read back.
9. `Transaction.record_complete` appends its entry to the log and syncs it.
10. Before the first rename, the manifest, stamps and documents of an older set are removed.
11. `PartialFile.rename`; then `Transaction.record_placed` appends the stamp.
12. `Transaction.finish`: the sources are unchanged.  A part appends ``done`` and ends.
13. A whole run, or `ckpttool.finalize` for parts: the outputs are unchanged.  The stamps and
    documents are written, then the manifest: COMPLETE.
14. The logs and the plan are removed, with the record locked.
15. `Transaction.abandon`, when a run fails: STOPPED if there is something to resume, otherwise the
    record is removed.  After a crash line 2 decides.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ckpttool.model.manifest import OutputEntry, Provenance, hashed
from ckpttool.model.plan import Document, OutputFile, Plan
from ckpttool.model.tensors import FileStamp
from ckpttool.problems import (
    Diagnostic,
    ExecutionError,
    PlanError,
    VerifyError,
    join_alike,
    join_clauses,
)
from ckpttool.storage.files import PARTIAL, clean_up, remove_document, stamp_at, write_document
from ckpttool.transaction.claim import Claim, remove_leftovers
from ckpttool.transaction.log import LoggedOutput, LogWriter
from ckpttool.transaction.manifest import ManifestFile, digest_in, entry_text, sealed_text
from ckpttool.transaction.outputs import find_unchanged
from ckpttool.transaction.resume import Assignment
from ckpttool.transaction.sources import changed_sources
from ckpttool.transaction.states import FinishedStamps, Record, look
from ckpttool.wording import shorten

MIXTURE = "outputs may mix old and new data"


class Transaction:
    """A run that writes a set of outputs, or a part of it; ends with `finish` or `abandon`.

    Attributes
    ----------
    kept
        Ranks of the outputs that are not written again.
    writing
        Path of the document that `finish` writes or could not write; empty before.
    notes
        What is worth knowing of the destination, and only the lock has shown.
    CHANGED_HINT
        What to do if a source file has changed.
    """

    CHANGED_HINT = "the same command with --overwrite, when the source is complete"

    def __init__(self, plan: Plan, assignment: Assignment, claim: Claim | None) -> None:
        self._plan = plan
        self._claim = claim
        self._outputs = assignment.outputs
        self._record = self._outputs.record
        self._entries: dict[str, LoggedOutput] = {}
        self._stamps: dict[str, FileStamp] = dict(assignment.kept)
        self._has_replaced = False
        self.kept = frozenset(self._outputs.outputs[name] for name in assignment.kept)
        self.writing = ""
        self.notes = () if claim is None else claim.notes

    @classmethod
    def open(cls, plan: Plan, assignment: Assignment) -> Transaction:
        """Claim the destination of a plan.

        A set, or a part, of which all is there and kept is neither locked nor written.

        Raises
        ------
        PlanError
            A source file has changed.  Or another run is writing the set, or has written it since
            preflight.  Nothing was written.
        FormatError
            The record is damaged.
        OSError
            A file cannot be read or created.
        """
        if assignment.is_finished:
            ended = assignment.destination.plan if assignment.options.no_locks else None
            remove_leftovers(assignment.outputs.record, ended)
            return cls(plan, assignment, None)
        if changed := changed_sources(*plan.inputs):
            raise PlanError(changed)
        transaction = cls(plan, assignment, Claim(assignment))
        try:
            if assignment.replaces_itself:
                transaction._list_finished(assignment)
            if assignment.options.resume:
                transaction._find_kept()
        except BaseException as error:
            clean_up(error, transaction.abandon)
            raise
        return transaction

    def _list_finished(self, assignment: Assignment) -> None:
        """Append the entries of a finished set to the log: its manifest is about to go."""
        finished = assignment.destination.stamps
        stamps = finished.outputs if finished is not None else {}
        for entry in ManifestFile.read(self._record.manifest).outputs():
            self._log.add(entry_text(entry), is_durable=False)
            if stamp := self._stamps.get(entry.path, stamps.get(entry.path)):
                self._log.add_stamp(entry.path, stamp)
        self._log.sync()

    def _find_kept(self) -> None:
        """Find the entries of outputs that logs list."""
        logged = look(self._record).logged(self._outputs.provenance.digest)
        self._entries = {name: logged[name] for name in self._outputs.outputs if name in logged}
        if self._stamps.keys() - self._entries.keys():
            text = "another run has written here since this one began"
            where = str(self._record.home)
            raise PlanError([Diagnostic("destination", text, hint="the same command", where=where)])

    @property
    def _log(self) -> LogWriter:
        assert self._claim is not None, "what is complete is not written"
        return self._claim.log

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
        name = os.path.relpath(output.path, self._record.folder)
        tensors = tuple(hashed(meta, hashes.get(meta.name, {})) for meta in output.metas)
        line = entry_text(OutputEntry(output.rank, name, output.format, nbytes, tensors))
        before = self._entries.get(name)
        if before is not None and before.read_line() != line:
            text = "differs from what the same command wrote before: a source file has changed"
            raise VerifyError(output.path, [text], "--overwrite, without --resume")
        self._entries[name] = self._log.add(line)
        if not self._has_replaced:
            self._remove_older_set()
            self._has_replaced = True

    def _remove_older_set(self) -> None:
        """Remove what says that the set is complete, before the first output is replaced."""
        assert self._claim is not None, "what is complete is not written"
        self._claim.require_record()
        documents = (document.path for document in self._outputs.documents)
        for path in (self._record.manifest, self._record.stamps, *documents):
            remove_document(str(path))

    def record_placed(self, output: OutputFile) -> None:
        """Record that an output has its final name."""
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
            A document cannot be written; the error names it.
        """
        if self._claim is None:
            return
        record, outputs = self._record, self._outputs
        self.writing = str(record.manifest if outputs.part is None else record.log(outputs.part))
        self._claim.require_record()
        if changed := self._describe_source_changes():
            cause = "a source file has changed"
            raise ExecutionError(self.writing, cause, (), self.CHANGED_HINT, changed)
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
            if damaged := [str(record.folder / name) for name in entries if name not in stamps]:
                cause, hint = "another program has changed an output", "--resume --overwrite"
                raise ExecutionError(damaged[0], cause, (), hint, shorten(damaged, 3))
            try:
                finish_set(record, outputs.provenance, outputs.documents, entries.values(), stamps)
            except OSError as error:
                self.writing = str(error.filename or self.writing).removesuffix(PARTIAL)
                raise
        self._claim.release()
        if outputs.part is None:
            remove_leftovers(record, self._claim.plan)

    def _describe_source_changes(self) -> str:
        changed = join_alike(changed_sources(*self._plan.inputs))
        return join_clauses(*(one.fact for one in changed), MIXTURE) if changed else ""

    def describe_source_changes(self) -> str:
        """Return the changes of sources as facts of a failed run; "" if there are none."""
        try:
            return self._describe_source_changes()
        except OSError:  # the sources cannot be read, which the failure itself reports
            return ""

    def abandon(self) -> None:
        """End an incomplete run; the record stays if there is something to resume."""
        if self._claim is not None:
            self._claim.abandon()


def finish_set(
    record: Record,
    provenance: Provenance,
    documents: Iterable[Document],
    entries: Collection[LoggedOutput],
    stamps: Mapping[str, FileStamp],
) -> None:
    """Write what says that a set is complete.

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

    Raises
    ------
    OSError
        A document cannot be written.
    """

    def manifest_text() -> Iterator[str]:
        return sealed_text(provenance.head(), (entry.read_line() for entry in entries))

    *_, seal = manifest_text()
    finished = FinishedStamps(provenance, digest_in(seal), stamps)
    write_document(str(record.stamps), sealed_text(finished.head(), finished.lines()))
    for document in documents:
        write_document(document.path, document.data)
    write_document(str(record.manifest), manifest_text())
