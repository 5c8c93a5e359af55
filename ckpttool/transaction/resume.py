"""What an earlier run left at a destination, and which of its outputs can be kept."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from ckpttool.concurrency import OnProgress, OpenProgress, no_progress, wait_result
from ckpttool.errors import CkptToolError, FormatError
from ckpttool.formats import read_index
from ckpttool.formats.local import read_file
from ckpttool.model.diagnostics import Diagnostic, Diagnostics
from ckpttool.model.manifest import JOURNAL, OutputEntry, Provenance, differences
from ckpttool.model.plan import Document, Plan
from ckpttool.model.tensors import FileStamp
from ckpttool.model.wording import count, shorten
from ckpttool.storage.checksums import verify_checksum
from ckpttool.storage.files import PARTIAL, access_problem, is_there, lock_holder, stamp_at
from ckpttool.storage.sampling import hash_units
from ckpttool.transaction.journal import (
    JournalState,
    OutputSet,
    Part,
    busy_problem,
    find_part_records,
    journal_path,
    journal_that_began,
    read_entries,
    read_journal,
    resume_problems,
)
from ckpttool.transaction.manifest import ManifestFile, options_of_outputs, output_problems
from ckpttool.transaction.parts import ranks_of_part


class State(Enum):
    """What lies at a destination.

    A manifest is removed before the first output is replaced and written last.  A run that is under
    way holds a lock; a run that ended early leaves a journal.
    """

    NONE = "none"
    STOPPED = "stopped"
    RUNNING = "running"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Destination:
    """What lies where a plan is to write, and which of its outputs this run writes.

    Attributes
    ----------
    ranks
        Ranks of the outputs that this run writes.
    part
        Which of several runs this is; None if one run writes them all.
    is_resumed
        Whether outputs that an earlier run of the same plan completed are kept.
    state
        What an earlier run left: a complete set, a run under way or a stopped run, of this part or
        of the whole set.
    kept
        Outputs that hold what an earlier run recorded, by path relative to the manifest, and the
        stamp that each had then.
    seen
        Stamps of all files that this run would replace; None if it may replace whatever is there.
    replaceable
        Files that this run may replace without ``--overwrite``: nobody has touched them since an
        earlier run wrote them.
    notes
        What is worth knowing of all that.
    """

    ranks: tuple[int, ...]
    part: Part | None = None
    is_resumed: bool = False
    state: State = State.NONE
    kept: Mapping[str, FileStamp] = field(default_factory=dict)
    seen: Mapping[str, FileStamp] | None = None
    replaceable: frozenset[str] = frozenset()
    notes: tuple[Diagnostic, ...] = ()

    @classmethod
    def of(cls, plan: Plan, policy: DestinationPolicy) -> Destination:
        """Return which outputs a run writes, before anything is known of what lies there."""
        if policy.part is None:
            return cls(tuple(plan.target.paths), is_resumed=policy.resume)
        part = Part(*policy.part)
        ranks = ranks_of_part(plan, part)
        text = f"part {part.number}/{part.count} has nothing to write: "
        text += f"{count(len(plan.target.paths), 'output file')} among {part.count} parts"
        notes = () if ranks else (Diagnostic("part", text),)
        return cls(ranks, part, policy.resume, notes=notes)

    def count_kept(self, plan: Plan) -> int:
        """Return how many outputs ``--resume`` keeps, after a run was stopped."""
        output_set = OutputSet.of(plan, self.ranks, self.part)
        before = read_journal(journal_path(output_set.record))
        return 0 if before is None else len(before.kept(output_set.folder, {}))


class DestinationPolicy(NamedTuple):
    """What becomes of files at the destination, and which outputs a run writes.

    Attributes
    ----------
    overwrite
        Whether files of other runs may be replaced.
    resume
        Whether outputs that an earlier run of the same plan completed are kept.
    part
        ``(k, n)``: which of how many runs that write one set; None if one run writes it.
    open_progress
        Called with the bytes that are to be read, to prove what an earlier run left.
    """

    overwrite: bool = False
    resume: bool = False
    part: tuple[int, int] | None = None
    open_progress: OpenProgress = no_progress


def look(output_set: OutputSet) -> State:
    """Look what lies at a destination, without a lock and without a write."""
    journal = journal_path(output_set.record)
    if lock_holder(journal) is not None:
        return State.RUNNING
    if journal.exists():
        return State.STOPPED
    has_listing = output_set.record.exists() or output_set.manifest.exists()
    return State.COMPLETE if has_listing else State.NONE


def inspect_previous_run(
    plan: Plan,
    destination: Destination,
    policy: DestinationPolicy,
    executor: Executor,
    diagnostics: Diagnostics,
) -> Destination:
    """Find what an earlier run left where a plan is to write, and which outputs can be kept.

    Parameters
    ----------
    plan
        What is to be written.
    destination
        Which outputs this run writes.
    policy
        What becomes of files that are there.
    executor
        Reads outputs whose stamps have changed, to prove them by their contents.
    diagnostics
        Gets everything that stands in the way, and what is worth knowing.
    """
    output_set = OutputSet.of(plan, destination.ranks, destination.part)
    folder, own = output_set.folder, journal_path(output_set.record)
    seen = None if policy.overwrite else snapshot_destination(output_set)
    if not folder.is_dir():
        return replace(destination, seen=seen)
    replaceable: set[str] = set()
    begun: set[str] = set()
    kept: dict[str, FileStamp] = {}
    for path, state in _journals(output_set, diagnostics):
        begun |= state.begun | state.complete.keys()
        if (policy.resume or not policy.overwrite) and lock_holder(path) is None:
            unclear = set(output_set.outputs) & state.complete.keys()
            unclear -= state.untouched(folder, {}).keys()
            attrs = plan.target.attrs
            kept |= _prove(folder, path, state, sorted(unclear), attrs, executor, policy)
        replaceable |= {str(folder / name) for name in state.untouched(folder, kept)}
        if path == own:
            mine = state.kept(folder, kept)
            written = filter(is_written, output_set.own_documents)
            replaceable |= {str(Path(document.path)) for document in written}
            report_resume_state(output_set, state, len(mine), policy.resume, diagnostics)
            kept |= mine
    unknown = [
        Path(f"{folder / name}{PARTIAL}") for name in output_set.outputs if name not in begun
    ]
    diagnostics.add(*_partial_file_problems(sorted(unknown), policy.overwrite))
    if not policy.overwrite:
        existing = existing_set_problems(output_set, destination.part, policy.resume, kept)
        if found := list(existing):  # which say more than that each of its files exists
            diagnostics.add(*found)
            replaceable |= _files_of(output_set)
    if policy.resume:
        attrs = plan.target.attrs
        files, intact = inspect_finished_set(output_set, attrs, executor, policy, diagnostics)
        kept |= intact
        replaceable |= files
    if describes_nothing(output_set.manifest):
        replaceable.add(str(output_set.manifest))
    return replace(
        destination,
        state=destination.state if diagnostics.errors else look(output_set),
        kept=kept,
        seen=seen,
        replaceable=frozenset(replaceable),
    )


def _files_of(output_set: OutputSet) -> set[str]:
    """All files that a run writes."""
    documents = (str(Path(document.path)) for document in output_set.own_documents)
    outputs = (str(output_set.folder / name) for name in output_set.outputs)
    return {str(output_set.manifest), *outputs, *documents}


def is_complete(output_set: OutputSet, kept: Mapping[str, FileStamp]) -> bool:
    """Return whether all that a run is to write is there, as its manifest or record says."""
    return look(output_set) is State.COMPLETE and complete_manifest(output_set, kept) is not None


def complete_manifest(output_set: OutputSet, kept: Mapping[str, FileStamp]) -> ManifestFile | None:
    """Return the manifest or record by which all that a run is to write is there."""
    finished = _finished_set(output_set) if all(map(is_written, output_set.own_documents)) else None
    is_so = finished is not None and all(
        stamp is not None
        and (finished.is_unmodified(output, stamp) or kept.get(output.path) == stamp)
        for output, stamp in _outputs(output_set, finished)
    )
    return finished if is_so else None


def inspect_finished_set(
    output_set: OutputSet,
    attrs: Collection[str],
    executor: Executor,
    policy: DestinationPolicy,
    diagnostics: Diagnostics,
) -> tuple[set[str], dict[str, FileStamp]]:
    """Find the files of a finished set of this run, and the stamps of outputs that are kept.

    Outputs that are gone are written again, as a note says.  Outputs that were changed are a
    problem, unless they may be replaced.  Both are empty if there is no such set.
    """
    finished, folder = _finished_set(output_set), output_set.folder
    if finished is None:
        return set(), {}
    gone: list[str] = []
    kept: dict[str, FileStamp] = {}
    unclear: dict[str, FileStamp] = {}
    for output, stamp in _outputs(output_set, finished):
        if stamp is None:
            gone.append(str(folder / output.path))
        elif finished.is_unmodified(output, stamp):
            kept[output.path] = stamp
        else:  # written to, or moved here, after it was listed
            unclear[output.path] = stamp
    if unclear:
        outputs = (one for one, _ in _outputs(output_set, finished) if one.path in unclear)
        with policy.open_progress(sum(stamp.nbytes for stamp in unclear.values())) as on_progress:
            kept |= find_intact(folder, outputs, attrs, executor, on_progress)
    changed = [str(folder / name) for name in unclear if name not in kept]
    for path in (one.path for one in output_set.own_documents if not is_written(one)):
        (changed if is_there(path) else gone).append(path)
    if gone and finished.path != output_set.record:
        text = f"{finished.path}: {_are_gone(gone)}"
        hint = "the same command without --part writes what is gone of a set that is finalized"
        diagnostics.add(Diagnostic("destination", text, hint))
        return set(), {}
    if changed and not policy.overwrite:
        text = f"not what {finished.path} says was written; has it been changed?"
        diagnostics.add(Diagnostic("destination", f"{shorten(changed, 3)}: {text}"))
        return set(), {}
    if gone and kept:
        text = f"{finished.path}: {_are_gone(gone)}, written again; the others are kept"
        diagnostics.add(Diagnostic("resumed", text))
    documents = (str(Path(document.path)) for document in output_set.own_documents)
    outputs_kept = (str(folder / name) for name in kept)
    return {*outputs_kept, *documents, str(output_set.manifest)}, kept


def _are_gone(paths: Sequence[str]) -> str:
    is_one = len(paths) == 1
    return f"{count(len(paths), 'output')} {'is' if is_one else 'are'} gone ({shorten(paths, 3)})"


def _finished_set(output_set: OutputSet) -> ManifestFile | None:
    """Return the manifest or record that lists all outputs of a run, there or not."""
    wanted = set(output_set.outputs)
    for path in dict.fromkeys((output_set.record, output_set.manifest)):
        finished = output_set.find_finished(path)
        if finished is None:
            continue
        try:
            outputs = finished.manifest().outputs
        except (FileNotFoundError, FormatError):
            continue  # cut short
        if wanted <= {output.path for output in outputs}:
            return finished
    return None


def _outputs(
    output_set: OutputSet, finished: ManifestFile
) -> Iterator[tuple[OutputEntry, FileStamp | None]]:
    """Yield the entry of each output of a run, and its stamp; None if it is gone."""
    wanted = set(output_set.outputs)
    for output in finished.outputs():
        if output.path in wanted:
            yield output, stamp_at(output_set.folder / output.path)


def is_written(document: Document) -> bool:
    """Return whether a document is there as it is to be written."""
    try:
        return read_file(document.path) == document.data
    except OSError:
        return False


def describes_nothing(manifest: Path) -> bool:
    """Return whether a manifest lists outputs that have all been removed."""
    try:
        outputs = ManifestFile.read(manifest).manifest().outputs
    except (FileNotFoundError, CkptToolError):
        return False
    return not any(is_there(manifest.parent / output.path) for output in outputs)


def _journals(
    output_set: OutputSet, diagnostics: Diagnostics
) -> Iterator[tuple[Path, JournalState]]:
    """Yield the journals that runs left; an own one that cannot be read is a problem."""
    own = journal_path(output_set.record)
    held = {own, journal_path(output_set.manifest)}
    for path in sorted(held.union(find_part_records(output_set.manifest, JOURNAL))):
        if closed := access_problem(path, os.R_OK | os.W_OK):
            if path in held or not output_set.is_part:
                diagnostics.add(Diagnostic("destination", closed))
            continue
        try:
            before = read_journal(path)
        except FormatError as error:
            if path == own:
                diagnostics.add(Diagnostic("destination", str(error)))
            continue
        if before is not None:
            yield path, before


def _prove(
    folder: Path,
    journal: Path,
    before: JournalState,
    names: Sequence[str],
    attrs: Collection[str],
    executor: Executor,
    policy: DestinationPolicy,
) -> dict[str, FileStamp]:
    """Return the outputs that hold what a journal says, though they were touched since."""
    lines = (before.lines[before.complete[name]] for name in names)
    nbytes = sum(stamp.nbytes for name in names if (stamp := stamp_at(folder / name)))
    with policy.open_progress(nbytes) if nbytes else no_progress(0) as on_progress:
        return find_intact(folder, read_entries(journal, lines), attrs, executor, on_progress)


def snapshot_destination(output_set: OutputSet) -> dict[str, FileStamp]:
    """Return the stamps of all files that a run would replace."""
    documents = (document.path for document in output_set.own_documents)
    outputs = (str(output_set.folder / name) for name in output_set.outputs)
    paths = (*outputs, *documents, str(output_set.manifest))
    return {path: stamp for path in paths if (stamp := stamp_at(Path(path))) is not None}


def destination_changes(
    output_set: OutputSet, seen: Mapping[str, FileStamp] | None
) -> Iterator[Diagnostic]:
    """Yield the problem that another run has written here since `snapshot_destination`."""
    if seen is None:
        return
    new = [
        path for path, stamp in snapshot_destination(output_set).items() if seen.get(path) != stamp
    ]
    if new:
        text = f"{shorten(new, 3)}: written by another run since this one began"
        yield Diagnostic("destination", text, "--overwrite replaces what is there")


def _partial_file_problems(partials: Iterable[Path], may_replace: bool) -> Iterator[Diagnostic]:
    """Yield the problems of temporary files that no journal of this set names."""
    left: dict[Path | None, list[str]] = {}
    for path in filter(_is_file, partials):
        journal = journal_that_began(path)
        if lock_holder(path) is not None:
            yield busy_problem(
                path, "a run of another set" if journal is None else f"see {journal}"
            )
        elif not may_replace:
            left.setdefault(journal, []).append(str(path))
    for journal, paths in left.items():
        text = "the name of a temporary file, and no run of ckpttool that did not end tells of it"
        remedy = "move it away, or --overwrite replaces it"
        if journal is not None:
            text = f"left half-written by a run that did not end, of which {journal} tells"
            remedy = "finish that with its own command and --resume, or --overwrite replaces it"
        yield Diagnostic("destination", f"{shorten(paths, 3)}: {text}", remedy)


def existing_set_problems(
    output_set: OutputSet, part: Part | None, is_resumed: bool, kept: Mapping[str, FileStamp]
) -> Iterator[Diagnostic]:
    """Yield the problems of a set that is there, besides that its files are."""
    if part is not None:
        ending = f"-of-{part.count}.json"
        records = find_part_records(output_set.manifest)
        others = [str(one) for one in records if not one.name.endswith(ending)]
        if others:
            text = f"another number of parts than --part {part.number}/{part.count}"
            text += " says"
            hint = "take that for all of them, or remove the records that are not wanted"
            yield Diagnostic("parts", f"{shorten(others, 3)}: {text}", hint)
            return
    if describes_nothing(output_set.record):
        return  # all of it was removed, so nothing stands in the way
    if not is_resumed:
        finished = complete_manifest(output_set, kept) if output_set.outputs else None
        if finished is not None:
            text = f"{finished.path} says that this very command has written all of it "
            text += f"({count(len(output_set.outputs), 'output')})"
            yield Diagnostic("destination", text, "--resume keeps it, --overwrite writes it anew")
        return
    for path in dict.fromkeys((output_set.record, output_set.manifest)):
        with suppress(FileNotFoundError):
            try:
                finished = ManifestFile.read(path)
                provenance = _provenance_in(finished)
            except FormatError as error:
                hint = "--resume cannot do without it, --overwrite writes all anew"
                yield Diagnostic("destination", str(error), hint)
                continue
            mine = (
                output_set.provenance
                if output_set.is_part
                else output_set.provenance.as_told_at(finished.mtime_ns)
            )
            for change in differences(mine, provenance) if path == output_set.record else ():
                text = f"{path}: --resume: what is there is of another run: {change}"
                hint = "write to another place, or --overwrite writes all anew"
                yield Diagnostic("resume", text, hint)


def _provenance_in(finished: ManifestFile) -> Provenance:
    """Return the provenance in a manifest, with the options that its outputs show."""
    provenance, outputs = finished.head.provenance(), finished.manifest().outputs
    if provenance.options or not outputs:
        return provenance
    paths = [(output.rank, output.path) for output in outputs]
    return replace(provenance, options=tuple(options_of_outputs(outputs[0].format, paths)))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def report_resume_state(
    output_set: OutputSet,
    before: JournalState,
    kept: int,
    is_resumed: bool,
    diagnostics: Diagnostics,
) -> None:
    """Report what stands in the way of resuming from a journal, or how much is kept of it."""
    path = journal_path(output_set.record)
    by = lock_holder(path)
    if by is not None:
        diagnostics.add(busy_problem(path, by))
        return
    if is_resumed:
        changes = list(differences(output_set.provenance, before.provenance))
        diagnostics.add(*resume_problems(path, changes))
        if not changes and not kept:
            text = f"{output_set.record}: a run did not end, and nothing of it could be kept; "
            diagnostics.add(Diagnostic("resumed", f"{text}this one begins anew"))
    if kept:
        what = f"{kept} of {count(len(output_set.outputs), 'output')}"
        then = "are kept" if is_resumed else "are written anew (--resume keeps them)"
        text = f"{output_set.record}: a run did not end, {what} that it left complete {then}"
        diagnostics.add(Diagnostic("resumed", text))


def find_intact(
    folder: Path,
    outputs: Iterable[OutputEntry],
    attrs: Collection[str],
    executor: Executor,
    on_progress: OnProgress,
) -> dict[str, FileStamp]:
    """Return the outputs that match their entries and have these attributes; reads every byte.

    A manifest does not list checksums, so those are verified.  Each comes with its stamp.
    """
    found = {}
    for output in outputs:
        name, stamp = str(folder / output.path), stamp_at(folder / output.path)
        if stamp is None or any(output_problems(folder, output)):
            continue
        index = read_index(name)
        stored = index.tensors
        looks = [(one, executor.submit(hash_units, stored[one.name])) for one in output.tensors]
        is_equal = True
        for one, hashes in looks:
            is_equal &= wait_result(hashes) == one.sha256
            on_progress(stored[one.name].meta.nbytes)
        is_equal &= index.attrs.keys() >= set(attrs)
        if is_equal and "crc_num" in index.attrs:
            is_equal = wait_result(executor.submit(verify_checksum, index)) is None
        if is_equal and stamp_at(folder / output.path) == stamp:
            found[output.path] = stamp
    return found
