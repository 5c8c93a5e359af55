"""The record of a run, line by line.  After a crash behind any line the state is known.

1. `read_destination` (preflight) keeps no lock and writes nothing.
2. It returns COMPLETE, RUNNING, STOPPED or NONE.
3. `Transaction` makes the record and locks it until line 6.  If another run is writing, this
   one is refused; only runs with ``--part`` of one plan write side by side.
4. What the run would replace is as preflight saw it, or the run is refused.
5. The plan is written, or replaces that of a run that stopped.
6. The run locks its log and appends that it begins, with the digest of its plan.
7. An output is kept if its stamp or its hashes are those in a log, in an entry of the same plan.
8. `Transaction.record_units`: units are on disk in a file with its temporary name, which was
   synced.  The next run keeps those whose hashes are still those in the log.
9. `PartialFile.seal`: an output is on disk under its temporary name, with the planned header.
10. `Transaction.record_complete` appends its entry to the log and syncs it.
11. Before the first rename, the manifest of an older set goes to the record.  Its stamps and
    documents are removed unless all its outputs have other names.
12. `PartialFile.rename`; then `Transaction.record_placed` appends the stamp.
13. `Transaction.finish`: the sources are unchanged.  A run with ``--part`` appends which outputs
    are done, and ends.
14. Any other run, or `ckpttool.finalize`: the outputs are unchanged.  The stamps and documents are
    written, then the manifest: COMPLETE.
15. With the record locked, the outputs of the older set that the new one does not list are removed;
    then its manifest, the logs and the plan.
16. `Claim.abandon`, when a run fails: STOPPED if there is something to resume, otherwise the
    record is removed, and an older set has its manifest again.  After a crash line 2 decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from ckpttool.model.joining import join_alike
from ckpttool.model.manifest import CastStats, OutputEntry, Provenance, UnitHashes
from ckpttool.model.plan import Document, OutputFile, Plan
from ckpttool.problems import (
    BusyError,
    Diagnostic,
    ExecutionError,
    PlanError,
    VerifyError,
    join_clauses,
)
from ckpttool.storage.files import (
    PARTIAL,
    clean_up,
    is_there,
    remove_document,
    stamp_at,
    write_document,
)
from ckpttool.transaction.claim import Claim, remove_leftovers
from ckpttool.transaction.log import LoggedOutput
from ckpttool.transaction.outputs import find_intact
from ckpttool.transaction.resume import Assignment, overtaken_problem
from ckpttool.transaction.sealed_files import ManifestFile, digest_in, entry_text, sealed_text
from ckpttool.transaction.sources import changed_sources
from ckpttool.transaction.states import FinishedStamps, Record, read_destination
from ckpttool.wording import shorten

MIXTURE = "outputs may mix old and new data"


class Transaction(Claim):
    """A run that writes outputs of a set; it ends with `finish` or `Claim.abandon`.

    Attributes
    ----------
    kept
        Ranks of the outputs that are not written again.
    writing
        Path of the document that `finish` writes or could not write; empty before.
    CHANGED_HINT
        What to do if a source file has changed.

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

    CHANGED_HINT = "the same command with --overwrite, when the source is complete"

    def __init__(self, plan: Plan, run: Assignment) -> None:
        self._plan = plan
        self._entries: dict[str, LoggedOutput] = {}  # with the stamps of those that are in place
        self._has_replaced = False
        self._begun: set[str] = set()  # the half-written outputs in the log of this run
        self.kept = run.kept_ranks
        self.writing = ""
        if not run.is_finished and (changed := changed_sources(*plan.inputs)):
            raise PlanError(changed)
        super().__init__(run)
        if run.is_finished:
            ended = run.destination.plan if run.options.no_locks else None
            self.notes = remove_leftovers(run.record, ended)
        try:
            if run.replaces_itself and not run.is_finished:
                self._list_finished()
            if run.options.resume and not run.is_finished:
                self._find_kept()
        except BaseException as error:
            clean_up(error, self.abandon)
            raise

    def _list_finished(self) -> None:
        finished = self._run.destination.stamps
        stamps = {**(finished.outputs if finished is not None else {}), **self._run.kept}
        for entry, line in ManifestFile.read(self._record.manifest).texts():
            self.log.add([line], is_durable=False)
            if stamp := stamps.get(entry.path):
                self.log.add_stamp(entry.path, stamp)
        self.log.sync()

    def _find_kept(self) -> None:
        logged = read_destination(self._record).logged(self._run.provenance.digest)
        self._entries = {
            name: replace(logged[name], stamp=self._run.kept.get(name))
            for name in self._run.outputs
            if name in logged
        }
        if self._run.kept.keys() - self._entries.keys():
            raise BusyError([overtaken_problem(self._record, str(self._record.home))])

    def read_casts(self) -> Mapping[int, CastStats]:
        """Return what casts did in the outputs that are kept, by rank."""
        if not self.kept:
            return {}
        entries: Iterable[OutputEntry]
        if is_there(self._record.manifest):
            entries = ManifestFile.read(self._record.manifest).outputs()
        else:
            logged = read_destination(self._record).logged(self._run.provenance.digest)
            entries = (logged[name].read_entry() for name in self._run.kept)
        return {entry.rank: entry.cast for entry in entries if entry.cast is not None}

    def read_units(
        self, output: OutputFile
    ) -> tuple[Mapping[tuple[int, int], str], Mapping[str, CastStats]]:
        """Return the hashes of units that are on disk of a half-written output, and their casts."""
        hashes: dict[tuple[int, int], str] = {}
        casts: dict[str, CastStats] = {}
        for logged in self.half_written.get(self._record.name_of(output.path), ()):
            group = logged.read_units()
            hashes |= {(place, number): digest for place, number, digest in group.hashes}
            for tensor, stats in group.casts.items():
                casts[tensor] = casts.get(tensor, CastStats()).merged(stats)
        return hashes, casts

    def record_units(
        self,
        output: OutputFile,
        hashes: Iterable[tuple[int, int, bytes]],
        casts: Mapping[str, CastStats],
    ) -> None:
        """Record that units are in the synced file of an output; ``log.sync`` makes it durable."""
        name = self._record.name_of(output.path)
        in_hex = ((place, number, digest.hex()) for place, number, digest in hashes)
        self.log.add_units(name, name not in self._begun, in_hex, casts)
        self._begun.add(name)

    def record_complete(
        self,
        output: OutputFile,
        nbytes: int,
        hashes: UnitHashes,
        cast: CastStats | None = None,
    ) -> None:
        """Record that an output is on disk and about to be renamed.

        Raises
        ------
        VerifyError
            An earlier run completed the output with other contents.
        OSError
            The record cannot be written.
        """
        name = self._record.name_of(output.path)
        entry = OutputEntry(output.rank, name, output.format, nbytes, (), cast)
        before = self._entries.get(name)
        if before is not None:
            line = b"".join(entry_text(entry, hashes.entries()))
            if b"".join(before.read_line()) != line:
                raise self.source_differs(output)
        self._entries[name] = self.log.add(entry_text(entry, hashes.entries()))
        if not self._has_replaced:
            self._remove_older_set()
            self._has_replaced = True

    @staticmethod
    def source_differs(output: OutputFile) -> VerifyError:
        """Return the error of an output that an earlier run began with other contents."""
        message = "differs from what the same command wrote before: a source file has changed"
        return VerifyError(output.path, [message], "--overwrite, without --resume")

    def _remove_older_set(self) -> None:
        self.require_record()
        record, run = self._record, self._run
        if run.options.ranks is None:  # else the other ranks stay
            older = record.older_outputs()
            record.set_aside()
            if older and run.whole.keys().isdisjoint(older):
                return  # it stays whole with its documents
        documents = (document.path for document in run.documents)
        for path in (record.manifest, record.stamps, *documents):
            remove_document(str(path))

    def record_placed(self, output: OutputFile) -> None:
        """Record that an output has its final name."""
        name = self._record.name_of(output.path)
        stamp = stamp_at(Path(output.path))
        if stamp is not None:
            self._entries[name] = replace(self._entries[name], stamp=stamp)
            self.log.add_stamp(name, stamp)

    def finish(self) -> tuple[Diagnostic, ...]:
        """Write the documents of the set and its manifest; with ``--part`` what is done.

        Return what became of the outputs of an older set.

        Raises
        ------
        ExecutionError
            A source file has changed during the run, so outputs may be a mixture.  Or somebody has
            changed an output.
        OSError
            A document cannot be written; the error names it.
        """
        if self._run.is_finished:
            return ()
        record, run = self._record, self._run
        is_part = run.part is not None
        self.writing = str(run.log if is_part else record.manifest)
        self.require_record()
        if changed := self._describe_source_changes():
            cause = "a source file has changed"
            raise ExecutionError(self.writing, cause, (), self.CHANGED_HINT, changed)
        if is_part:
            self.log.end(run.outputs)
        else:
            entries = {name: self._entries[name] for name in run.outputs}
            intact = find_intact(record.folder, run.provenance, entries)
            if damaged := [str(record.folder / name) for name in entries if name not in intact]:
                cause, hint = "another program has changed an output", "--resume --overwrite"
                raise ExecutionError(damaged[0], cause, (), hint, shorten(damaged, 3))
            try:
                finish_set(record, run.provenance, run.documents, intact)
            except OSError as error:
                self.writing = str(error.filename or self.writing).removesuffix(PARTIAL)
                raise
        self.release()
        return () if is_part else remove_leftovers(record, self.plan)

    def _describe_source_changes(self) -> str:
        changed = join_alike(changed_sources(*self._plan.inputs))
        return join_clauses(*(change.fact for change in changed), MIXTURE) if changed else ""

    def describe_source_changes(self) -> str:
        """Return the changes of sources as facts of a failed run; "" if there are none."""
        try:
            return self._describe_source_changes()
        except OSError:  # the sources cannot be read, which the failure itself reports
            return ""


def finish_set(
    record: Record,
    provenance: Provenance,
    documents: Iterable[Document],
    entries: Mapping[str, LoggedOutput],
) -> None:
    """Write what says that a set is complete.

    Raises
    ------
    OSError
        A document cannot be written.
    """

    def manifest_text() -> Iterator[bytes]:
        return sealed_text(provenance.head(), (entry.read_line() for entry in entries.values()))

    (seal,) = deque(manifest_text(), maxlen=1)
    stamps = {name: entry.stamp for name, entry in entries.items() if entry.stamp is not None}
    of_run = replace(provenance, layouts=None, source_names=None)  # which the manifest has
    finished = FinishedStamps(of_run, digest_in(seal), stamps)
    write_document(str(record.stamps), finished.text())
    for document in documents:
        write_document(document.path, document.data)
    write_document(str(record.manifest), manifest_text())
