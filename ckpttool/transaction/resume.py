"""What a run writes, keeps and may replace, by the state of its destination.

========  ==========================================================================================
NONE      everything is written
STOPPED   ``--resume`` keeps the outputs that a log of the same plan lists.  Without it they are
          written again.  Outputs of writers that are not done may be replaced.
RUNNING   refused; only parts of one plan run side by side
COMPLETE  ``--resume`` keeps the outputs if the stamps of the sources are those of the set
========  ==========================================================================================

An output is kept if its stamp is the recorded one, otherwise if its contents have the recorded
hashes.  ``--overwrite`` may replace everything.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import get_args

from ckpttool.concurrency import OpenProgress
from ckpttool.formats import FORMATS
from ckpttool.formats.local import list_folder, read_file
from ckpttool.model.manifest import Provenance, read_otherwise
from ckpttool.model.plan import Document, NotInTarget, Plan
from ckpttool.model.tensors import FileStamp
from ckpttool.problems import Diagnostic, Diagnostics, FormatError, join_clauses
from ckpttool.storage.files import ELSEWHERE, PARTIAL, access_problem, is_there, is_within, stamp_at
from ckpttool.transaction.locks import is_held
from ckpttool.transaction.log import Writer
from ckpttool.transaction.manifest import ManifestFile
from ckpttool.transaction.outputs import FindUnchanged, KnownStamps, find_unchanged
from ckpttool.transaction.parts import Part, ranks_of_part
from ckpttool.transaction.sources import provenance_of
from ckpttool.transaction.states import (
    NO_LOCKS,
    Destination,
    Record,
    RecordedPlan,
    State,
    choose_entries,
    look,
    records_around,
)
from ckpttool.wording import count, shorten

WITHOUT_RESUME = "the same command without --resume"


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options of the outputs, and of existing files.

    Attributes
    ----------
    format
        Format of the outputs; None to take it from the suffix, else HDF5.
    prefix
        Start of the names of rank files: ``rank_R/{prefix}R`` with the suffix of the format.
    ranks
        Write only these ranks of the strategy.
    not_in_target
        How to write parameters that the target strategy does not list.  ``"follow"`` shards
        optimizer state like its parameter and writes the rest in full to every rank.  ``"full"``
        writes everything in full.  ``"drop"`` writes nothing.  Single values go to every rank.
    strategy_path
        Write the strategy of the outputs to this file, which MindSpore's own tools can read; see
        `ckpttool.planning.targets`.
    max_shard_bytes
        Write a merged checkpoint as a folder of numbered files with at most this many bytes of
        tensors each.  The default format is then safetensors.  The folder also gets the index files
        of MindSpore and of Hugging Face.
    crc
        Verify the checksums of the source, and store one in every output.
    part
        ``(k, n)``: write only the outputs of run ``k``, from 1, of ``n`` runs of the same plan; see
        `ckpttool.finalize`.
    overwrite
        Replace existing outputs; an input is never replaced.
    resume
        Keep the outputs that an interrupted run of the same plan completed.  Other files of that
        run are replaced with and without this option.
    no_locks
        On a file system without locks, go on where a plan is left: its run has ended.
    command
        The command line, which the record of the run tells to users.

    Examples
    --------
    >>> OutputOptions("ckpt", overwrite=True).prefix
    'checkpoint_'
    """

    format: str | None = None
    prefix: str = "checkpoint_"
    ranks: Collection[int] | None = None
    not_in_target: NotInTarget = "follow"
    strategy_path: str | None = None
    max_shard_bytes: int | None = None
    crc: bool = False
    part: tuple[int, int] | None = None
    overwrite: bool = False
    resume: bool = False
    no_locks: bool = False
    command: str = "python"

    def __post_init__(self) -> None:
        for name, choices in (("format", tuple(FORMATS)), ("not_in_target", get_args(NotInTarget))):
            given = getattr(self, name)
            if given not in (None, *choices):
                raise ValueError(f"{name}={given!r}, expected one of {choices}")
        if "/" in self.prefix:
            raise ValueError(f"prefix={self.prefix!r}, expected the beginning of a file name")
        if self.part is not None and not 1 <= self.part[0] <= self.part[1]:
            raise ValueError(f"part={self.part}, expected (k, n) with k from 1 to n")

    def refuse(self, *names: str) -> None:
        """Raise `ValueError` if one of the options ``names`` is set, which do not apply here."""
        given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        unused = sorted({*given} & {*names})
        if unused:
            raise ValueError(f"{', '.join(unused)}: not an option of these outputs")


@dataclass(frozen=True, slots=True)
class Assignment:
    """The outputs that one run has to write, and what it keeps and may replace.

    Attributes
    ----------
    outputs
        Where the outputs lie.
    destination
        What lies there, as seen without a lock.
    options
        What the user wants.
    ranks
        Ranks of the outputs.
    kept
        Outputs that hold what an earlier run recorded, by path relative to the manifest, with the
        stamp that each had then.
    seen
        Stamps of all files that this run would replace; None if it may replace whatever is there.
    replaceable
        Files that this run may replace without ``--overwrite``.
    replaces_itself
        Whether a finished set of the same plan and sources is there, which this run takes apart.
    is_finished
        Whether all is there and kept, so that nothing is to be done.
    refusals
        Why the run may not begin; they say more than that files of it exist.
    notes
        What is worth knowing of all that.
    """

    outputs: RunOutputs
    destination: Destination
    options: OutputOptions
    ranks: tuple[int, ...]
    kept: Mapping[str, FileStamp] = field(default_factory=dict)
    seen: Mapping[str, FileStamp] | None = None
    replaceable: frozenset[str] = frozenset()
    replaces_itself: bool = False
    is_finished: bool = False
    refusals: tuple[Diagnostic, ...] = ()
    notes: tuple[Diagnostic, ...] = ()

    @classmethod
    def of(cls, plan: Plan, options: OutputOptions) -> Assignment:
        """Return which outputs a run writes, before anything is known of what lies there."""
        notes: list[Diagnostic] = []
        part = None if options.part is None else Part(*options.part)
        ranks = tuple(plan.target.paths) if part is None else ranks_of_part(plan, part)
        if part is not None and not ranks:
            facts = f"{count(len(plan.target.paths), 'output file')} for {part.count} parts"
            notes.append(Diagnostic("part", f"part {part} has nothing to write", facts=facts))
        outputs = RunOutputs.of(plan, ranks, part, options.command)
        nothing = Destination(outputs.record, State.NONE)
        return cls(outputs, nothing, options, ranks, notes=tuple(notes))

    @property
    def part(self) -> Part | None:
        """Which of several runs this is; None if one run writes all outputs."""
        return self.outputs.part

    def busy_problems(self) -> Iterator[Diagnostic]:
        """Yield why the run cannot begin beside those that are writing now."""
        return busy_problems(self, look(self.outputs.record))

    @property
    def resume_hint(self) -> str:
        """How to go on after this run has ended early; its plan is there."""
        more = f" {NO_LOCKS}" if is_held(self.outputs.record.lock) is None else ""
        return f"the same command with --resume{more}"

    def count_complete(self) -> int:
        """Return how many outputs ``--resume`` keeps, after a run was stopped."""
        outputs = self.outputs
        logged = look(outputs.record).logged(outputs.provenance.digest)
        stamps = {name: logged[name].stamp for name in outputs.outputs if name in logged}
        return len(find_unchanged(outputs.folder, outputs.provenance, stamps, lambda names: ()))


@dataclass(frozen=True, slots=True)
class RunOutputs:
    """Where the outputs of a run and their record lie.

    Attributes
    ----------
    record
        The record of the set.
    provenance
        What the run reads and does.
    outputs
        Path of each output of this run, relative to the manifest, and its rank.
    whole
        The same for the outputs of all parts.
    part
        Which of several runs this is; None if one run writes all outputs.
    documents
        Documents of the set.
    """

    record: Record
    provenance: Provenance
    outputs: Mapping[str, int]
    whole: Mapping[str, int]
    part: Part | None
    documents: tuple[Document, ...]

    @classmethod
    def of(cls, plan: Plan, ranks: Iterable[int], part: Part | None, command: str) -> RunOutputs:
        """Return those of a plan; raises `OSError` if a source or strategy file is gone."""
        record = Record(Path(plan.target.manifest_path))
        paths = plan.target.paths
        whole = {os.path.relpath(path, record.folder): rank for rank, path in paths.items()}
        own = set(ranks)
        outputs = {path: rank for path, rank in whole.items() if rank in own}
        provenance = provenance_of(plan, command)
        return cls(record, provenance, outputs, whole, part, plan.documents)

    @property
    def folder(self) -> Path:
        """The folder that paths of outputs are relative to."""
        return self.record.folder

    @property
    def written_documents(self) -> frozenset[str]:
        """The documents that are there as they are to be written, so that nothing is lost."""
        return frozenset(str(Path(one.path)) for one in self.documents if is_written(one))

    def plan(self) -> RecordedPlan:
        """Return what the record says that this run writes.

        `finalize` writes documents below the folder only, so others are not recorded.
        """
        documents = tuple(
            replace(document, path=path)
            for document in self.documents
            if is_within(self.folder, path := os.path.relpath(document.path, self.folder))
        )
        return RecordedPlan(Writer.this(), self.provenance, self.whole, documents)

    def stamps(self) -> dict[str, FileStamp]:
        """Return the stamps of all files that the run would replace or remove, by path.

        A part removes the documents of an older set, which `finalize` writes again.
        """
        documents = (document.path for document in self.documents)
        outputs = (str(self.folder / name) for name in self.outputs)
        paths = (*outputs, *documents, str(self.record.manifest))
        return {path: stamp for path in paths if (stamp := stamp_at(Path(path))) is not None}


def inspect_previous_run(
    assignment: Assignment,
    executor: Executor,
    open_progress: OpenProgress,
    diagnostics: Diagnostics,
) -> Assignment:
    """Find what an earlier run left where a plan is to write, and which outputs can be kept.

    Parameters
    ----------
    assignment
        Which outputs this run writes.
    executor, open_progress
        Read outputs whose stamps have changed, to prove them by their contents.
    diagnostics
        Gets everything that stands in the way, and what is worth knowing.
    """
    outputs = assignment.outputs
    overwrites = assignment.options.overwrite
    record, seen = outputs.record, None if overwrites else outputs.stamps()
    assignment = replace(assignment, seen=seen)
    if not outputs.folder.is_dir():
        return assignment
    if closed := tuple(access_problems(record, [record.log(outputs.part)])):
        return replace(assignment, refusals=closed)
    destination = look(record)
    assignment = replace(assignment, destination=destination)
    diagnostics.add(*_foreign_partials(outputs, destination, overwrites))
    find = partial(
        find_unchanged,
        outputs.folder,
        outputs.provenance,
        executor=executor,
        open_progress=open_progress,
    )
    problems = list(busy_problems(assignment, destination))
    if destination.state is State.COMPLETE and not problems:
        return _inspect_finished(outputs, destination, assignment, find, diagnostics)
    problems += () if overwrites else _damage(outputs, destination)
    if problems:
        return replace(assignment, refusals=tuple(problems))
    return _inspect_stopped(outputs, destination, assignment, find, diagnostics)


def _inspect_stopped(
    outputs: RunOutputs,
    destination: Destination,
    assignment: Assignment,
    find: FindUnchanged,
    diagnostics: Diagnostics,
) -> Assignment:
    """Return what a run keeps and may replace where others have not ended."""
    digest = outputs.provenance.digest
    logged = destination.logged(digest)
    chosen = choose_entries(outputs.folder, (logged, destination.logged()))
    stamps = {name: chosen[name].stamp for name in outputs.outputs if name in chosen}
    is_read = assignment.options.resume or not assignment.options.overwrite
    intact = find(stamps, lambda names: (chosen[n].read_entry() for n in names if is_read))
    done = {n for log in destination.finished_parts.values() for n in log.outputs}
    replaceable = intact.keys() if assignment.options.resume else intact.keys() - done
    paths = outputs.written_documents.union(str(outputs.folder / name) for name in replaceable)
    assignment = replace(assignment, replaceable=paths)
    plan = destination.plan
    is_other = plan is not None and plan.provenance.digest != digest
    if plan is not None and is_other and (destination.finished_parts or not logged):
        changes = _compare_runs(outputs.provenance, plan.provenance)
        found = tuple(_inspect_other_plan(destination, assignment, changes, len(intact)))
        if any(one.code != "resumed" for one in found):
            return replace(assignment, refusals=found)
        diagnostics.add(*found)
        return assignment
    complete = {name: intact[name] for name in intact if chosen[name].plan == digest}
    is_done = outputs.part in destination.finished_parts and len(complete) == len(outputs.outputs)
    if is_done and not assignment.options.resume and not assignment.options.overwrite:
        return replace(assignment, refusals=(_already_written(outputs),))
    stopped = destination.parts.keys() - destination.finished_parts.keys()
    ran_here = destination.state is not State.NONE
    if ran_here and (outputs.part is None or outputs.part in stopped):
        diagnostics.add(*_describe_stopped(outputs, complete, assignment.options.resume))
    if not assignment.options.resume:
        return assignment
    if plan is not None and complete:
        diagnostics.add(*_describe_replicas(outputs, plan.provenance))
    return replace(assignment, kept=complete, is_finished=is_done)


def _inspect_other_plan(
    destination: Destination, assignment: Assignment, changes: str, intact: int
) -> Iterator[Diagnostic]:
    """Yield what becomes of a stopped run of another plan, which left ``intact`` outputs."""
    where, parts = str(destination.record.output), destination.finished_parts
    several = len(parts) > 1
    named = f"part{'s' if several else ''} {shorten(map(str, parts), 3)}"
    written = f"{named} {'were' if several else 'was'} written by another run"
    if assignment.options.overwrite:
        if parts:
            message = f"{written} and {'are' if several else 'is'} replaced"
            yield Diagnostic("resumed", message, where=where)
    elif parts:
        hint = "the same source, step and options for all parts, or --overwrite; "
        hint += "`ckpttool help parts` explains"
        yield Diagnostic("parts", written, hint=hint, facts=changes, where=where)
    elif assignment.options.resume:
        message, hint = "another run did not end here", WITHOUT_RESUME
        yield Diagnostic("resume", message, hint=hint, facts=changes, where=where)
    elif intact:
        facts = f"{count(intact, 'complete output')} of it are replaced"
        message = "another run did not end here"
        yield Diagnostic("resumed", message, facts=facts, where=where)


def _inspect_finished(
    outputs: RunOutputs,
    destination: Destination,
    assignment: Assignment,
    find: FindUnchanged,
    diagnostics: Diagnostics,
) -> Assignment:
    """Return what a run keeps of a finished set, of which outputs may be gone or changed."""
    record = outputs.record
    try:
        manifest = ManifestFile.read(record.manifest)
        if not any(is_there(record.folder / one.path) for one in manifest.outputs()):
            paths = outputs.written_documents | {str(record.manifest)}
            return replace(assignment, replaceable=paths)
    except FormatError as error:
        if assignment.options.resume and not assignment.options.overwrite:
            damage = _damaged(error, "destination", "--resume needs it")
            return replace(assignment, refusals=(damage,))
        return assignment
    known = destination.stamps.outputs if destination.stamps is not None else {}
    stamps = {name: known.get(name) for name in outputs.outputs}
    code = "resume" if assignment.options.resume else "destination"
    problem = _other_set(outputs, destination, manifest, code)
    assignment = replace(assignment, replaces_itself=problem is None)
    if outputs.part is not None and assignment.options.overwrite:
        text = "complete, and this part takes the set apart"
        hint = f"run the other parts again{'' if problem else ', with --resume'}"
        diagnostics.add(Diagnostic("resumed", text, hint=hint, where=str(record.output)))
    if assignment.options.resume and problem is None:
        return _inspect_outputs(
            outputs, destination, assignment, manifest, stamps, find, diagnostics
        )
    if assignment.options.overwrite:
        return assignment
    is_unchanged = all(stamp_at(record.folder / n) == stamp for n, stamp in stamps.items())
    if problem is None and not is_unchanged:
        return assignment
    return replace(assignment, refusals=(problem or _already_written(outputs),))


def _other_set(
    outputs: RunOutputs, destination: Destination, manifest: ManifestFile, code: str
) -> Diagnostic | None:
    """Return why a finished set is not known to be that of a run, or None."""
    record, stamps = outputs.record, destination.stamps
    for error in destination.damaged:
        if error.path == str(record.stamps):
            return _damaged(error, code)
    if stamps is None:
        text, facts = "complete, but its source files are not known", f"no {record.stamps}"
        return Diagnostic(code, text, hint="--overwrite", facts=facts, where=str(record.output))
    facts = _compare_runs(outputs.provenance, stamps.provenance)
    if outputs.provenance.digest == stamps.provenance.digest:
        if manifest.digest == stamps.manifest:
            return None
        facts = f"{record.stamps} is of another set than {record.manifest}"
    message, hint = "written by another run", f"--overwrite, or {ELSEWHERE}"
    return Diagnostic(code, message, hint=hint, facts=facts, where=str(record.output))


def _compare_runs(mine: Provenance, other: Provenance) -> str:
    """Return the files that differ between two runs, and both command lines."""
    inputs = {file.path for file in {*mine.inputs} ^ {*other.inputs}}
    strategies = {file.path for file in {*mine.strategies} ^ {*other.strategies}}
    files = shorten(sorted(inputs | strategies), 3)
    versions = f"ckpttool {mine.ckpttool} in place of {other.ckpttool}"
    return join_clauses(
        files and f"files that differ: {files}",
        versions if mine.ckpttool != other.ckpttool else "",
        f"before: `{other.command}`",
        f"now: `{mine.command}`",
    )


def _damaged(error: FormatError, code: str, facts: str = "") -> Diagnostic:
    """Return the problem of a file of the record, which only ``--overwrite`` does not need."""
    (one,) = error.diagnostics
    return replace(one, code=code, hint="--overwrite", facts=join_clauses(one.facts, facts))


def _inspect_outputs(
    outputs: RunOutputs,
    destination: Destination,
    assignment: Assignment,
    manifest: ManifestFile,
    stamps: KnownStamps,
    find: FindUnchanged,
    diagnostics: Diagnostics,
) -> Assignment:
    """Return what a resumed run keeps of its own finished set."""
    folder, where = outputs.folder, str(outputs.record.output)
    gone = [name for name in outputs.outputs if not is_there(folder / name)]
    kept = find(stamps, lambda names: (one for one in manifest.outputs() if one.path in names))
    changed = [str(folder / n) for n in outputs.outputs if n not in kept and n not in gone]
    missing = [str(folder / name) for name in gone]
    documents = outputs.documents if outputs.part is None else ()  # a part does not write them
    for path in (one.path for one in documents if not is_written(one)):
        (changed if is_there(path) else missing).append(path)
    if missing and outputs.part is not None:
        text = f"{count(len(missing), 'output')} missing of a finalized set"
        hint, facts = "the same command without --part", shorten(missing, 3)
        refusal = Diagnostic("destination", text, hint=hint, facts=facts, where=where)
        return replace(assignment, refusals=(refusal,))
    if destination.stamps is not None and kept:
        diagnostics.add(*_describe_replicas(outputs, destination.stamps.provenance))
    if changed and not assignment.options.overwrite:
        text = f"{count(len(changed), 'output')} changed since written"
        hint, facts = "--resume --overwrite", shorten(changed, 3)
        refusal = Diagnostic("destination", text, hint=hint, facts=facts, where=where)
        return replace(assignment, refusals=(refusal,))
    if missing and kept:
        text = f"{count(len(missing), 'missing output')} written again, the others kept"
        diagnostics.add(Diagnostic("resumed", text, facts=shorten(missing, 3), where=where))
    return replace(
        assignment,
        kept=kept,
        replaceable=_all_files(outputs),
        is_finished=not (missing or changed),
    )


def _all_files(outputs: RunOutputs) -> frozenset[str]:
    """Return all files of a run; those of a set in parts include what `finalize` writes."""
    documents = (str(Path(document.path)) for document in outputs.documents)
    names = (str(outputs.folder / name) for name in outputs.outputs)
    return frozenset({str(outputs.record.manifest), *names, *documents})


def is_written(document: Document) -> bool:
    """Return whether a document is there as it is to be written."""
    stamp = stamp_at(Path(document.path))
    if stamp is None or stamp.nbytes != len(document.data):
        return False
    return read_file(document.path) == document.data


def access_problems(
    record: Record, logs: Collection[Path], hint: str = ELSEWHERE
) -> Iterator[Diagnostic]:
    """Yield why this user cannot write the record, and these logs in it."""
    if not is_there(record.home):
        return
    if not stat.S_ISDIR(record.home.lstat().st_mode):
        yield _in_the_way(record.home)
    elif problem := access_problem(record.home, os.R_OK | os.W_OK | os.X_OK, hint):
        yield problem
    else:
        written = {record.lock, record.plan, record.stamps, *logs}
        for path in list_folder(record.home):
            if is_there(path) and not _is_file(path):
                yield _in_the_way(path)
            elif path in written and (problem := access_problem(path, os.R_OK | os.W_OK, hint)):
                yield problem


def _in_the_way(path: Path) -> Diagnostic:
    message = "in the way of the record of the run"
    return Diagnostic("destination", message, hint="move it away", where=str(path))


def _foreign_partials(
    outputs: RunOutputs, destination: Destination, may_replace: bool
) -> Iterator[Diagnostic]:
    """Yield the problems of temporary files that are not of this set."""
    plan = destination.plan
    known = outputs.whole if destination.state is State.STOPPED else {}  # if its plan is gone
    known = known if plan is None else plan.outputs
    left: dict[Path | None, list[str]] = {}
    held: dict[str, list[str]] = {}
    for name in sorted(outputs.outputs):
        path = Path(f"{outputs.folder / name}{PARTIAL}")
        if not _is_file(path):
            continue
        other = None if name in known else _plan_that_lists(path)
        if is_held(path):
            by = "it is of another part" if name in known and outputs.part is not None else ""
            held.setdefault(by if other is None else f"see {other}", []).append(str(path))
        elif name not in known and not may_replace:
            left.setdefault(other, []).append(str(path))
    for by, paths in held.items():
        message, where = "another run is writing it", shorten(paths, 3)
        yield Diagnostic("busy", message, hint="wait until it ends", facts=by, where=where)
    for other, paths in left.items():
        message, facts = "it has the name of a temporary file", "no run that did not end lists it"
        hint = "move it away, or --overwrite"
        if other is not None:
            message, facts = "left half-written by a run that did not end", f"{other} lists it"
            hint = "the command that writes it, with --resume; or --overwrite"
        yield Diagnostic("destination", message, hint=hint, facts=facts, where=shorten(paths, 3))


def _plan_that_lists(partial: Path) -> Path | None:
    """Return the plan of another set that lists the output of a temporary file."""
    for record, name in records_around(Path(str(partial).removesuffix(PARTIAL))):
        with suppress(FileNotFoundError, FormatError):  # nothing is known from it
            if name in RecordedPlan.read(record.plan).outputs:
                return record.plan
    return None


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def busy_problems(assignment: Assignment, destination: Destination) -> Iterator[Diagnostic]:
    """Yield why a run cannot begin beside those that are writing."""
    outputs, running = assignment.outputs, destination.running
    record, plan = outputs.record, destination.plan
    if is_held(record.lock) is None:
        if plan is not None and not (assignment.options.overwrite or assignment.options.no_locks):
            yield undecided_problem(record, f"{plan.writer} since {plan.writer.time}")
        return
    if outputs.part is not None:
        in_the_way = {record.log(None), record.log(outputs.part)}
        is_beside = bool(running) and not in_the_way & running.keys()
        if is_beside and plan is not None:
            mine, other = outputs.provenance, plan.provenance
            if mine.digest != other.digest:
                yield beside_problem(destination, mine, other)
        running = {path: by for path, by in running.items() if path in in_the_way}
    for by in list(running.values())[:1]:
        yield busy_problem(record, by)


def busy_problem(record: Record, by: str) -> Diagnostic:
    """Return the problem that another run is writing."""
    message, hint = "another run is writing it", f"wait until it ends, or {ELSEWHERE}"
    return Diagnostic("busy", message, hint=hint, facts=by, where=str(record.output))


def undecided_problem(record: Record, by: str) -> Diagnostic:
    """Return the problem that without locks only the user knows whether another run has ended."""
    facts = f"{by}; this file system has no locks, so it may have ended"
    hint, where = f"wait until it ends; if it has ended, {NO_LOCKS}", str(record.output)
    return Diagnostic("busy", "another run may be writing it", hint=hint, facts=facts, where=where)


def beside_problem(destination: Destination, mine: Provenance, other: Provenance) -> Diagnostic:
    """Return the problem of a part of another plan than that which is being written."""
    message = "a part of another run is being written"
    by = shorten(destination.running.values(), 1) or "it has just ended"
    facts = join_clauses(by, _compare_runs(mine, other))
    hint, where = f"wait until it ends, or {ELSEWHERE}", str(destination.record.output)
    return Diagnostic("busy", message, hint=hint, facts=facts, where=where)


def _damage(outputs: RunOutputs, destination: Destination) -> Iterator[Diagnostic]:
    """Yield the problems of files of the record that this run needs and that are damaged."""
    record = outputs.record
    needed = {str(record.plan), str(record.log(outputs.part))}
    for error in destination.damaged:
        if outputs.part is None or error.path in needed:
            yield _damaged(error, "destination")


def _already_written(outputs: RunOutputs) -> Diagnostic:
    """Return the problem that a run has nothing to do, without ``--resume``."""
    message = f"{outputs.record.output} is already complete"
    if outputs.part is not None:
        message = f"part {outputs.part} of {message}"
    hint = "--resume accepts it, --overwrite writes it again"
    return Diagnostic("destination", message, hint=hint, path=str(outputs.record.output))


def _describe_stopped(
    outputs: RunOutputs, complete: Collection[str], is_resumed: bool
) -> Iterator[Diagnostic]:
    """Yield how much is kept of a run that did not end, or could be."""
    where = str(outputs.record.output)
    if complete:
        what = f"{len(complete)} of {count(len(outputs.outputs), 'output')} that a run completed"
        then, hint = ("kept", "") if is_resumed else ("written again", "--resume keeps them")
        yield Diagnostic("resumed", f"{what} before it stopped: {then}", hint=hint, where=where)
    elif is_resumed:
        text = "a run did not end here, and nothing of it can be kept"
        yield Diagnostic("resumed", text, where=where)


def _describe_replicas(outputs: RunOutputs, earlier: Provenance) -> Iterator[Diagnostic]:
    """Yield a note if the run that is resumed could read other files of the same source."""
    if files := list(read_otherwise(outputs.provenance, earlier)):
        text, where = "the run that is resumed read other replicas", str(outputs.record.output)
        yield Diagnostic("resumed", text, facts=join_clauses(*files[:3]), where=where)


def destination_changes(
    assignment: Assignment,
) -> Iterator[Diagnostic]:
    """Yield the problem that another run has written here since the destination was seen."""
    seen, now = assignment.seen, assignment.outputs.stamps()
    if seen is None:
        return
    new = [path for path, stamp in now.items() if seen.get(path) != stamp]
    if new:
        text, where = "another run has written it since this one began", shorten(new, 3)
        hint = "the same command" if assignment.options.resume else "--overwrite"
        yield Diagnostic("destination", text, hint=hint, where=where)
