"""The record of a run: after it, a set of outputs is complete, or can be resumed.

A run has these steps.  After a crash in any of them, `look` returns the state.

1. `look` returns COMPLETE, RUNNING, STOPPED or NONE.  It has no lock, so step 2 checks again.
2. `Transaction.open` locks the set and its journal.  It refuses a set that another run is writing,
   or has written since preflight.
3. An output is kept if its stamp is the recorded one, or if preflight verified its hashes.
4. `Transaction.begin` records an output and syncs the record.  Then its temporary file is created.
5. `Transaction.record_complete` records a complete output and syncs the record.  Before the first
   output of the set is renamed, the manifest and documents of an older set are removed.
6. The output is renamed.  `Transaction.record_placed` records its stamp.
7. `Transaction.finish` checks the sources again and writes the documents, then the manifest:
   COMPLETE.  A part writes its record instead; `ckpttool.transaction.parts.finalize` does the rest.
8. `Transaction.abandon` keeps the journal if there is something to resume: STOPPED.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ckpttool.errors import ExecutionError, PlanError
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.manifest import OutputEntry, hashed
from ckpttool.model.plan import OutputFile, Plan
from ckpttool.model.wording import shorten
from ckpttool.storage.files import write_document
from ckpttool.transaction.journal import Journal, OutputSet
from ckpttool.transaction.manifest import changed_inputs
from ckpttool.transaction.resume import Destination, destination_changes, is_complete

MIXTURE = "what was made of it may be a mixture, so write all of it anew"


class Transaction:
    """A run that writes a set of outputs, or a part of it; ends with `finish` or `abandon`.

    Attributes
    ----------
    kept
        Ranks of the outputs that are not written again.
    writing
        Path of the document that `finish` is writing, for errors; empty before.
    """

    def __init__(
        self, plan: Plan, output_set: OutputSet, journal: Journal | None, kept: frozenset[int]
    ) -> None:
        self._plan = plan
        self._set = output_set
        self._journal = journal
        self.kept = kept
        self.writing = ""

    @classmethod
    def open(cls, plan: Plan, destination: Destination) -> Transaction:
        """Lock the destination of a plan, and decide which outputs are kept.

        A resumed set that is complete is neither locked nor written.

        Raises
        ------
        PlanError
            A source file has changed, or the run to resume has another plan.  Or another run is
            writing the set, or has written it since preflight.  Nothing was written.
        FormatError
            The journal of the set is damaged, or another file has its name.
        OSError
            A file cannot be read or created.
        """
        output_set = OutputSet.of(plan, destination.ranks, destination.part)
        ranks = dict(zip(output_set.outputs, destination.ranks, strict=True))
        if destination.is_resumed and is_complete(output_set, destination.kept):
            return cls(plan, output_set, None, frozenset(destination.ranks))
        changed = [Diagnostic("changed", text, "run again") for text in changed_inputs(plan)]
        if changed:
            raise PlanError(changed)
        journal = Journal(output_set, destination.is_resumed, destination.kept)
        # Checked under the lock: before, another run could still have written the set.
        problems = list(destination_changes(output_set, destination.seen))
        if problems:
            journal.leave()
            raise PlanError(problems)
        kept = frozenset(ranks[name] for name in journal.kept if name in ranks)
        return cls(plan, output_set, journal, kept)

    def begin(self, outputs: Iterable[OutputFile]) -> None:
        """Record that outputs are begun, so that temporary files can be found after a crash."""
        self._open_journal.begin(*(output.path for output in outputs))

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
        path = os.path.relpath(output.path, self._set.folder)
        tensors = tuple(hashed(meta, hashes.get(meta.name, {})) for meta in output.metas)
        entry = OutputEntry(output.rank, path, output.format, nbytes, tensors)
        self._open_journal.add(entry)

    def record_placed(self, output: OutputFile) -> None:
        """Record that an output has its final name."""
        self._open_journal.place(output.path)

    def finish(self) -> None:
        """Write the documents of the set and its manifest; for a part, its record.

        Raises
        ------
        ExecutionError
            A source file has changed during the run, so outputs may be a mixture.
        OSError
            A document cannot be written; `writing` names it.
        """
        if self._journal is None:
            return
        self.writing = str(self._set.manifest)
        changed = list(changed_inputs(self._plan))
        if changed:
            raise ExecutionError(str(self._set.record), f"{shorten(changed, 3)}; {MIXTURE}")
        for document in self._set.own_documents:
            self.writing = document.path
            write_document(document.path, document.data)
        self.writing = str(self._set.manifest)
        self._journal.finish()

    def describe_source_changes(self) -> str:
        """Return text for the message of a failed run: the changes of its sources, if any."""
        try:
            changed = list(changed_inputs(self._plan))
        except OSError:  # the sources cannot be read, which the failure itself reports
            return ""
        return f"; {shorten(changed, 3)}; {MIXTURE}" if changed else ""

    def abandon(self) -> None:
        """End an incomplete run; keep its journal if there is something to resume."""
        if self._journal is not None:
            self._journal.leave()

    @property
    def _open_journal(self) -> Journal:
        assert self._journal is not None, "a complete set has no journal"
        return self._journal
