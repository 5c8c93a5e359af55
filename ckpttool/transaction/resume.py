"""What a run writes, keeps and may replace, by the state of its destination.

========  ==========================================================================================
NONE      everything is written
STOPPED   what a log of the same plan lists is as it was written; so are units of half-written files
RUNNING   refused; only runs with ``--part`` of one plan run side by side
COMPLETE  the outputs are as written if the stamps of the sources are those of the set
========  ==========================================================================================

An output is as it was written if its stamp is the recorded one, otherwise if its contents have the
recorded hashes.  What follows for each output is `decide`, and nothing else decides it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from ckpttool.concurrency import OpenProgress
from ckpttool.formats import FORMATS
from ckpttool.formats.local import list_folder, read_file
from ckpttool.model.manifest import Provenance, find_unequal_reads
from ckpttool.model.plan import Document, Plan
from ckpttool.model.tensors import FileStamp
from ckpttool.problems import Diagnostic, Diagnostics, FormatError, join_clauses
from ckpttool.storage.files import ELSEWHERE, PARTIAL, access_problem, is_there, is_within, stamp_at
from ckpttool.transaction.locks import is_held
from ckpttool.transaction.log import LoggedOutput, Writer
from ckpttool.transaction.outputs import FindUnchanged, find_unchanged
from ckpttool.transaction.parts import ranks_of_part
from ckpttool.transaction.sealed_files import ManifestFile
from ckpttool.transaction.sources import provenance_of
from ckpttool.transaction.states import (
    NO_LOCKS,
    Destination,
    Record,
    RecordedPlan,
    State,
    choose_entries,
    read_destination,
    runs_that_list,
)
from ckpttool.typed import (
    PREFIX,
    NotInTarget,
    TypedError,
    parse_file_name,
    require_choice,
    require_number,
    require_rank,
    require_seconds,
)
from ckpttool.wording import Brief, count, shorten

WITHOUT_RESUME = "the same command without --resume"
ACCEPT_OR_AGAIN = "--resume accepts it, --overwrite writes it again"
WAIT = "--wait 10m"  # hint


class OutputOptions(Struct, frozen=True):
    """Options of the outputs, and of existing files.

    Attributes
    ----------
    format
        Format of the outputs; None to take it from the suffix, else HDF5.
    prefix
        Start of the names of rank files: ``rank_R/{prefix}R`` with the suffix of the format.
    name
        Name of each rank file, in place of ``prefix``: a text with the field ``{rank}``, perhaps
        with ``{model}`` and ``{step}`` as the names of the source have them.
    mindformers
        Write ``meta.json`` into the folder of each rank, with which MindFormers 1.x resumes.  The
        default name is then ``{model}_rank_{rank}-{step}``.
    ranks
        Write only these ranks of the strategy.
    not_in_target
        How to write parameters that the target strategy does not list.  ``"follow"`` shards
        optimizer state like its parameter and writes the rest in full to every rank.  ``"full"``
        writes everything in full.  ``"drop"`` writes nothing.  Single values go to every rank.
        None is ``"follow"``, and refuses a target that lists too few of the weights.
    strategy_path
        Write the strategy of the outputs to this file, which MindSpore's own tools can read; see
        `ckpttool.planning.targets`.
    max_shard_bytes
        Write a merged checkpoint as a folder of numbered files with at most this many bytes of
        tensors each.  The default format is then safetensors.  The folder also gets the index files
        of MindSpore and of Hugging Face.
    virtual
        Write an HDF5 file without bytes of tensors: these stay in the files of the source, where
        libhdf5 reads them.  See `ckpttool.execution.virtual`.
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
    wait_seconds
        Resume, and wait at most so long for a run that is writing there; None not to wait.
    no_locks
        On a file system without locks, go on where a plan is left: its run has ended.
    command
        The command line, which the record of the run shows to users.

    Examples
    --------
    >>> OutputOptions("ckpt", overwrite=True).prefix
    'checkpoint_'
    """

    format: str | None = None
    prefix: str = PREFIX
    name: str | None = None
    mindformers: bool = False
    ranks: Collection[int] | None = None
    not_in_target: NotInTarget | None = None
    strategy_path: str | None = None
    max_shard_bytes: int | None = None
    virtual: bool = False
    crc: bool = False
    part: tuple[int, int] | None = None
    overwrite: bool = False
    resume: bool = False
    wait_seconds: float | None = None
    no_locks: bool = False
    command: str = "python"

    @property
    def wanted_format(self) -> str | None:
        """The format in an option, if any; MindFormers reads .ckpt."""
        return self.format or ("ckpt" if self.mindformers else None)

    def __post_init__(self) -> None:
        for name, choices in (("format", tuple(FORMATS)), ("not_in_target", get_args(NotInTarget))):
            require_choice(name, getattr(self, name), (None, *choices))
        if self.strategy_path is not None:
            force_setattr(self, "strategy_path", os.fspath(self.strategy_path))
        if "/" in self.prefix:
            raise ValueError(f"prefix={self.prefix!r}, expected the beginning of a file name")
        if self.name is not None:
            try:
                parse_file_name(self.name)
            except TypedError as error:
                raise ValueError(f"name: {error}") from error
        if self.prefix != PREFIX and (self.name is not None or self.mindformers):
            raise ValueError(f"prefix={self.prefix!r} does not go with name= and mindformers=")
        if self.ranks is not None:
            if not isinstance(self.ranks, Iterable):
                raise TypeError(f"ranks={self.ranks!r}, expected numbers, such as [0, 2, 3]")
            ranks = tuple(require_rank("ranks", rank) for rank in self.ranks)
            force_setattr(self, "ranks", ranks)
            if not ranks:
                raise ValueError("ranks=[], expected at least one rank")
        if self.part is not None and not 1 <= self.part[0] <= self.part[1]:
            raise ValueError(f"part={self.part}, expected (k, n) with k from 1 to n")
        require_number("max_shard_bytes", self.max_shard_bytes)
        require_seconds("wait_seconds", self.wait_seconds)
        if self.wait_seconds is not None:
            force_setattr(self, "resume", True)

    def refuse(self, *names: str) -> None:
        """Raise `ValueError` if one of the options ``names`` is set, which do not apply here."""
        unset = OutputOptions()
        unused = sorted(name for name in names if getattr(self, name) != getattr(unset, name))
        if unused:
            raise ValueError(f"{', '.join(unused)}: not an option of these outputs")


class Found(Enum):
    """The state of an output before a run writes it."""

    GONE = "it is not there"
    WRITTEN = "a run of this plan wrote it, and has not ended well"
    FINISHED = "a run of this plan wrote it, and has ended well"
    OF_ANOTHER = "a run of another plan wrote it, and has not ended well"
    CHANGED = "no record tells of it, or it has changed since"


def decide(found: Found, options: OutputOptions) -> Literal["write", "keep", "refuse"]:
    """Return what a run does with an output."""
    if options.resume and found in {Found.WRITTEN, Found.FINISHED}:
        return "keep"
    if options.overwrite or found in {Found.GONE, Found.WRITTEN, Found.OF_ANOTHER}:
        return "write"
    return "refuse"


class Assignment(Brief, Struct, frozen=True):
    """The outputs that one run has to write, and what it keeps and may replace.

    Attributes
    ----------
    options
        What the user wants.
    provenance
        What the run reads and does.
    outputs
        Path of each output of this run, relative to the manifest, and its rank.
    whole
        The same for all outputs of the set.
    documents
        Documents of the set.
    destination
        The state of the destination, as read without a lock.
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

    options: OutputOptions
    provenance: Provenance
    outputs: Mapping[str, int]
    whole: Mapping[str, int]
    documents: tuple[Document, ...]
    destination: Destination
    kept: Mapping[str, FileStamp] = {}
    seen: Mapping[str, FileStamp] | None = None
    replaceable: frozenset[str] = frozenset()
    replaces_itself: bool = False
    is_finished: bool = False
    refusals: tuple[Diagnostic, ...] = ()
    notes: tuple[Diagnostic, ...] = ()

    @classmethod
    def of(cls, plan: Plan, options: OutputOptions) -> Assignment:
        """Return which outputs a run writes, before the destination is read.

        Raises
        ------
        OSError
            A source or strategy file is gone.
        """
        nothing = Destination(Record(Path(plan.target.manifest_path)), State.NONE)
        paths = plan.target.paths
        whole = {nothing.record.name_of(path): rank for rank, path in paths.items()}
        provenance = provenance_of(plan, options.command)
        run = cls(options, provenance, whole, whole, plan.documents, nothing)
        if options.part is None:
            return run
        own = set(ranks_of_part(plan, options.part))
        outputs = {path: rank for path, rank in whole.items() if rank in own}
        facts = f"{count(len(paths), 'output file')} for {options.part[1]} parts"
        note = Diagnostic("part", f"part {run.part} has nothing to write", facts=facts)
        return replace(run, outputs=outputs, notes=() if outputs else (note,))

    def _texts(self) -> Iterator[str]:
        yield f"{count(len(self.outputs), 'output')} in {self.folder}"
        yield f"{len(self.kept)} kept" if self.kept else ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the outputs."""
        return tuple(self.outputs.values())

    @property
    def kept_ranks(self) -> frozenset[int]:
        """Ranks of the outputs that are kept."""
        return frozenset(self.outputs[name] for name in self.kept)

    @property
    def half_written(self) -> Mapping[str, list[LoggedOutput]]:
        """The units that an earlier run wrote of outputs whose temporary files are there."""
        of_plan = self.destination.half_written(self.provenance.digest).items()
        files = {name: f"{self.folder / name}{PARTIAL}" for name in self.outputs}
        return {name: units for name, units in of_plan if name in files and is_there(files[name])}

    @property
    def record(self) -> Record:
        """The record of the set."""
        return self.destination.record

    @property
    def part(self) -> str | None:
        """The part that this run writes, "K/N"; None if one run writes all outputs."""
        return None if self.options.part is None else "{}/{}".format(*self.options.part)

    @property
    def log(self) -> Path:
        """The log of this run."""
        return self.record.log(self.options.part)

    @property
    def folder(self) -> Path:
        """The folder that paths of outputs are relative to."""
        return self.record.folder

    @property
    def files(self) -> tuple[str, ...]:
        """All files that the run would replace or remove.

        With ``--part`` the documents of an older set are removed, and `finalize` writes them.
        """
        outputs = (self.folder / name for name in self.outputs)
        documents = (Path(document.path) for document in self.documents)
        return tuple(map(str, (*outputs, *documents, self.record.manifest)))

    @property
    def written_documents(self) -> frozenset[str]:
        """The documents that are there as they are to be written, so that nothing is lost."""
        return frozenset(str(Path(of.path)) for of in self.documents if is_written(of))

    def plan(self) -> RecordedPlan:
        """Return what the record says that this run writes.

        `finalize` writes documents below the folder only, so others are not recorded.
        """
        documents = tuple(
            replace(document, path=path)
            for document in self.documents
            if is_within(self.folder, path := self.record.name_of(document.path))
        )
        return RecordedPlan(Writer.this(), self.provenance, self.whole, documents)

    def stamps(self) -> dict[str, FileStamp]:
        """Return the stamps of those of its files that are there."""
        return {path: stamp for path in self.files if (stamp := stamp_at(Path(path))) is not None}

    def recorded_stamps(self) -> dict[str, FileStamp | None]:
        """Return the stamps of its outputs in a finished set; None if one is not recorded."""
        finished = self.destination.stamps
        stamps = {} if finished is None else finished.outputs
        return {name: stamps.get(name) for name in self.outputs}

    def older_outputs(self) -> tuple[list[str], list[str]]:
        """Return the older outputs that are removed at the end, and those that stay in the way.

        They are of older sets or of runs that did not end, and the new set does not have them.
        """
        if not os.access(self.folder, os.X_OK):  # then this user sees none
            return [], []
        folders, is_all = {Path(name).parent for name in self.whole}, self.options.ranks is None
        listed, logged = self.record.older_outputs(), read_destination(self.record).logged()
        removed, left = list[str](), list[str]()
        for name in dict.fromkeys([*listed, *logged]):
            path, is_beside = str(self.folder / name), Path(name).parent in folders
            if name not in self.whole and (is_beside or is_all) and is_there(path):
                is_removed = is_all if name in listed else is_beside
                (removed if is_removed else left).append(path)
        return removed, left

    def busy_problems(self, now: Destination | None = None) -> Iterator[Diagnostic]:
        """Yield why the run cannot begin beside those that are writing ``now``."""
        record, now = self.record, now or read_destination(self.record)
        plan, running = now.plan, now.running
        if is_held(record.lock) is None:
            if plan is not None and not (self.options.overwrite or self.options.no_locks):
                yield undecided_problem(record, f"{plan.writer} since {plan.writer.time}")
            return
        if self.part is not None:
            in_the_way = {record.log(), self.log}
            is_beside = bool(running) and not in_the_way & running.keys()
            if is_beside and plan is not None and self.provenance.digest != plan.provenance.digest:
                yield beside_problem(now, self.provenance, plan.provenance)
            running = {path: by for path, by in running.items() if path in in_the_way}
        for path, by in list(running.items())[:1]:
            yield busy_problem(record, by, path)

    @property
    def resume_hint(self) -> str:
        """How to go on after this run has ended early; its plan is there."""
        more = f" {NO_LOCKS}" if is_held(self.record.lock) is None else ""
        return f"the same command with --resume{more}"

    def seen_again(self) -> Assignment:
        """Return the same with the present state of the destination."""
        return replace(self, destination=read_destination(self.record))

    def count_complete(self) -> int:
        """Return how many outputs ``--resume`` keeps, after a run was stopped."""
        logged = self.destination.logged(self.provenance.digest)
        stamps = {name: logged[name].stamp for name in self.outputs if name in logged}
        return len(find_unchanged(self.folder, self.provenance, stamps, lambda names: ()))


def inspect_previous_run(
    run: Assignment, executor: Executor, open_progress: OpenProgress, diagnostics: Diagnostics
) -> Assignment:
    """Find what an earlier run left where a plan is to write, and which outputs can be kept."""
    record, overwrites = run.record, run.options.overwrite
    run = replace(run, seen=None if overwrites else run.stamps())
    if not run.folder.is_dir():
        return run
    if closed := tuple(access_problems(record, [run.log])):
        return replace(run, refusals=closed)
    run = replace(run, destination=read_destination(record))
    diagnostics.add(*_foreign_partials(run))
    find = partial(
        find_unchanged,
        run.folder,
        run.provenance,
        executor=executor,
        open_progress=open_progress,
    )
    problems = list(run.busy_problems(run.destination))
    if run.destination.state is State.COMPLETE and not problems:
        return _inspect_finished(run, find, diagnostics)
    problems += () if overwrites else _damage(run)
    if problems:
        return replace(run, refusals=tuple(problems))
    return _inspect_stopped(run, find, diagnostics)


def _inspect_stopped(run: Assignment, find: FindUnchanged, diagnostics: Diagnostics) -> Assignment:
    """Return what a run keeps and may replace where others have not ended."""
    destination, plan, options = run.destination, run.destination.plan, run.options
    digest = run.provenance.digest
    logged = destination.logged(digest)
    chosen = choose_entries(run.folder, (logged, destination.logged()))
    stamps = {name: chosen[name].stamp for name in run.outputs if name in chosen}
    is_read = options.resume or not options.overwrite
    intact = find(stamps, lambda names: (chosen[n].read_entry() for n in names if is_read))
    finished = destination.finished

    def find_state(name: str) -> Found:
        if chosen[name].plan != digest:
            return Found.OF_ANOTHER
        return Found.FINISHED if name in finished else Found.WRITTEN

    decisions = {name: decide(find_state(name), options) for name in intact}
    replaceable = (str(run.folder / name) for name in intact if decisions[name] != "refuse")
    run = replace(run, replaceable=run.written_documents.union(replaceable))
    is_other = plan is not None and plan.provenance.digest != digest
    if plan is not None and is_other and (finished or not logged):
        others = chosen.keys() - set(run.outputs)
        has_others = any(is_there(run.folder / name) for name in others)
        problem = _other_plan(run, plan, len(intact), has_others)
        if problem is not None and problem.code != "resumed":
            return replace(run, refusals=(problem,))
        diagnostics.add(*filter(None, [problem]))
        return run
    complete = {name: intact[name] for name in intact if chosen[name].plan == digest}
    own = next((log for log in destination.runs if log.path == run.log), None)
    is_done = own is not None and own.is_done and len(complete) == len(run.outputs)
    if is_done and not options.resume and not options.overwrite:
        return replace(run, refusals=(_already_written(run),))
    is_stopped = run.part is None or (own is not None and not own.is_done)
    if destination.state is not State.NONE and is_stopped:
        diagnostics.add(*_describe_stopped(run, complete))
    if not options.resume:
        return run
    if plan is not None and complete:
        diagnostics.add(*_describe_replicas(run, plan.provenance))
    return replace(run, kept=complete, is_finished=is_done)


def _other_plan(
    run: Assignment, plan: RecordedPlan, intact: int, has_others: bool
) -> Diagnostic | None:
    """Return what becomes of a stopped run of another plan, which left ``intact`` outputs.

    Outputs of other names are only replaced where ``--overwrite`` says so.
    """
    options, diagnostic = run.options, run.record.diagnostic
    finished = len(run.destination.finished)
    changes = _compare_runs(run.provenance, plan.provenance)
    written = f"{count(finished, 'output')} written by another run"
    stopped = "another run did not end here"
    if options.overwrite:
        return diagnostic("resumed", written, facts="now replaced") if finished else None
    if finished:
        hint = "the same source, step and options for all parts, or --overwrite; "
        return diagnostic("parts", written, f"{hint}`ckpttool help parts` explains", changes)
    if options.resume:
        hint = "--overwrite, or -o with another path" if has_others else WITHOUT_RESUME
        return diagnostic("resume", stopped, hint, changes)
    facts = f"{count(intact, 'complete output')} of it are replaced"
    return diagnostic("resumed", stopped, facts=facts) if intact else None


def _inspect_finished(run: Assignment, find: FindUnchanged, diagnostics: Diagnostics) -> Assignment:
    """Return what a run keeps of a finished set, whose outputs may be gone or changed."""
    record, options = run.record, run.options
    try:
        manifest = ManifestFile.read(record.manifest)
        if not any(is_there(record.folder / output.path) for output in manifest.planned()):
            return replace(run, replaceable=run.written_documents | {str(record.manifest)})
    except FormatError as error:
        if options.resume and not options.overwrite:
            damage = _damaged(error, "destination", "resuming needs it")
            return replace(run, refusals=(damage,))
        return run
    problem = _other_set(run, manifest)
    run = replace(run, replaces_itself=problem is None)
    if run.part is not None and options.overwrite:
        message = "complete, and this part takes the set apart"
        hint = f"run the other parts again{'' if problem else ', with --resume'}"
        diagnostics.add(record.diagnostic("resumed", message, hint))
    if options.resume and problem is None:
        return _inspect_outputs(run, manifest, find, diagnostics)
    if options.overwrite:
        return run
    stamps = run.recorded_stamps().items()
    if problem is None and any(stamp_at(run.folder / name) != stamp for name, stamp in stamps):
        return run
    return replace(run, refusals=(problem or _already_written(run),))


def _other_set(run: Assignment, manifest: ManifestFile) -> Diagnostic | None:
    """Return why a finished set is not known to be that of a run, or None."""
    record, stamps = run.record, run.destination.stamps
    code = "resume" if run.options.resume else "destination"
    if error := run.destination.damaged.get(record.stamps):
        return _damaged(error, code)
    if stamps is None:
        message = "complete, but its source files are not known"
        return record.diagnostic(code, message, "--overwrite", f"no {record.stamps}")
    facts = _compare_runs(run.provenance, stamps.provenance)
    if run.provenance.digest == stamps.provenance.digest:
        if manifest.digest == stamps.manifest:
            return None
        facts = f"{record.stamps} is of another set than {record.manifest}"
    hint, paths = f"--overwrite, or {ELSEWHERE}", {output.path for output in manifest.planned()}
    if run.options.ranks is not None and not paths <= run.whole.keys():
        facts = join_clauses("one run writes all ranks of a set, or its parts", facts)
        hint = f"{ELSEWHERE}, or one run for all ranks; `ckpttool help --part` shows several runs"
    return record.diagnostic(code, "written by another run", hint, facts)


def _compare_runs(mine: Provenance, other: Provenance) -> str:
    """Return the files that differ between two runs, and both command lines."""
    inputs = {file.path for file in {*mine.inputs} ^ {*other.inputs}}
    strategies, files = [*_compare_strategies(mine, other)], shorten(sorted(inputs), 3)
    versions = f"ckpttool {mine.ckpttool} in place of {other.ckpttool}"
    differ = join_clauses(
        *strategies,
        files and f"files that differ: {files}",
        versions if mine.ckpttool != other.ckpttool else "",
    )
    if mine.command == other.command:  # of Python, without a command line
        return differ or "the options differ"
    return join_clauses(differ, f"before: `{other.command}`", f"now: `{mine.command}`")


def _compare_strategies(mine: Provenance, other: Provenance) -> Iterator[str]:
    """Yield which strategies differ between two runs; those of an old record have no roles.

    A file that is also that of the target has only that role.
    """
    has_roles = all(strategy.role is not None for strategy in other.strategies)
    words = {"target": "target", "source": "strategy"} if has_roles else {None: "strategy"}
    for role, word in words.items():
        now, before = (
            {file.name: file.sha256 for file in of.strategies if role in (None, file.role)}
            for of in (mine, other)
        )
        if now.keys() == before.keys() and now != before:
            changed = sorted(name for name in now if now[name] != before[name])
            yield f"{word} {shorten(changed, 2)} has changed"
        elif now != before and (role != "source" or (now and before)):
            names = (shorten(sorted(of), 2) or f"no {word}" for of in (now, before))
            yield f"{word} {' in place of '.join(names)}"


def _damaged(error: FormatError, code: str, facts: str = "") -> Diagnostic:
    (problem,) = error.diagnostics
    return replace(problem, code=code, hint="--overwrite", facts=join_clauses(problem.facts, facts))


def _inspect_outputs(
    run: Assignment, manifest: ManifestFile, find: FindUnchanged, diagnostics: Diagnostics
) -> Assignment:
    """Return what a resumed run keeps of its own finished set."""
    diagnostic = run.record.diagnostic
    kept = find(run.recorded_stamps(), lambda of: (o for o in manifest.outputs() if o.path in of))
    documents = run.documents if run.part is None else ()  # else it does not write them
    is_right = {str(run.folder / name): name in kept for name in run.outputs}
    is_right |= {document.path: is_written(document) for document in documents}
    wrong = {
        path: Found.CHANGED if is_there(path) else Found.GONE
        for path, is_kept in is_right.items()
        if not is_kept
    }
    missing = [path for path, state in wrong.items() if state is Found.GONE]
    changed = [path for path, state in wrong.items() if decide(state, run.options) == "refuse"]
    if missing and run.part is not None:
        message = f"{count(len(missing), 'output')} missing of a finalized set"
        hint = "the same command without --part"
        refusal = diagnostic("destination", message, hint, shorten(missing, 3))
        return replace(run, refusals=(refusal,))
    if run.destination.stamps is not None and kept:
        diagnostics.add(*_describe_replicas(run, run.destination.stamps.provenance))
    if changed:
        message = f"{count(len(changed), 'output')} changed since written"
        refusal = diagnostic("destination", message, "--resume --overwrite", shorten(changed, 3))
        return replace(run, refusals=(refusal,))
    if missing and kept:
        message = f"{count(len(missing), 'missing output')} written again, the others kept"
        diagnostics.add(diagnostic("resumed", message, facts=shorten(missing, 3)))
    return replace(run, kept=kept, replaceable=frozenset(run.files), is_finished=not wrong)


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


def _foreign_partials(run: Assignment) -> Iterator[Diagnostic]:
    """Yield the problems of temporary files that are not of this set.

    Those of a run that `Assignment.busy_problems` reports are left out.
    """
    plan = run.destination.plan
    known = run.whole if run.destination.state is State.STOPPED else {}  # if its plan is gone
    known = known if plan is None else plan.outputs
    left: dict[Path | None, list[str]] = {}
    in_use: dict[str, list[str]] = {}
    is_part = run.part is not None
    reported = known.keys() if run.destination.running and not is_part else set[str]()
    for name in sorted(run.outputs.keys() - reported):
        path = Path(f"{run.folder / name}{PARTIAL}")
        if not _is_file(path):
            continue
        runs = () if name in known else runs_that_list(run.folder / name)
        other = next((run_there.record.plan for run_there, _ in runs), None)
        if is_held(path):
            by = "it is of another part" if name in known and is_part else ""
            in_use.setdefault(by if other is None else f"see {other}", []).append(str(path))
        elif name not in known and not run.options.overwrite:
            left.setdefault(other, []).append(str(path))
    for by, paths in in_use.items():
        message, where = "another run is writing it", shorten(paths, 3)
        yield Diagnostic("busy", message, hint=WAIT, facts=by, where=where, path=paths[0])
    for other, paths in left.items():
        message, facts = "it has the name of a temporary file", "no run that did not end lists it"
        hint = "move it away, or --overwrite"
        if other is not None:
            message, facts = "left half-written by a run that did not end", f"{other} lists it"
            hint = "the command that writes it, with --resume, or --overwrite"
        yield Diagnostic("destination", message, hint=hint, facts=facts, where=shorten(paths, 3))


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def busy_problem(record: Record, by: str, locked: Path) -> Diagnostic:
    """Return the problem that another run is writing; it has ``locked`` a file."""
    hint = f"{WAIT}, or {ELSEWHERE}"
    return record.diagnostic("busy", "another run is writing it", hint, by, locked)


def undecided_problem(record: Record, by: str) -> Diagnostic:
    """Return the problem that without locks only the user knows whether another run has ended."""
    facts = f"{by}; this file system has no locks, so it may have ended"
    hint = f"{WAIT}; if it has ended, {NO_LOCKS}"
    message = "another run may be writing it"
    return record.diagnostic("busy", message, hint, facts, record.plan)


def beside_problem(destination: Destination, mine: Provenance, other: Provenance) -> Diagnostic:
    """Return the problem of a part of another plan than that which is being written."""
    by = shorten(destination.running.values(), 1) or "it has just ended"
    facts, hint = join_clauses(by, _compare_runs(mine, other)), f"{WAIT}, or {ELSEWHERE}"
    message, record = "a part of another run is being written", destination.record
    locked = next(iter(destination.running), record.lock)
    return record.diagnostic("busy", message, hint, facts, locked)


def _damage(run: Assignment) -> Iterator[Diagnostic]:
    for path, error in run.destination.damaged.items():
        if run.part is None or path in {run.record.plan, run.log}:
            yield _damaged(error, "destination")


def _already_written(run: Assignment) -> Diagnostic:
    output, of = str(run.record.output), "" if run.part is None else f"part {run.part} of "
    message = f"{of}{output} is already complete"
    return Diagnostic("destination", message, hint=ACCEPT_OR_AGAIN, path=output)


def _describe_stopped(run: Assignment, complete: Collection[str]) -> Iterator[Diagnostic]:
    """Yield how much is kept of a run that did not end, or could be."""
    diagnostic, is_resumed = run.record.diagnostic, run.options.resume
    if complete:
        what = f"{len(complete)} of {count(len(run.outputs), 'output')} that a run completed"
        then, hint = ("kept", "") if is_resumed else ("written again", "--resume keeps them")
        yield diagnostic("resumed", f"{what} before it stopped: {then}", hint)
    half = run.half_written
    if half and is_resumed:
        message = f"goes on inside {count(len(half), 'half-written output')}"
        yield diagnostic("resumed", message, facts=shorten(sorted(half), 3))
    elif is_resumed and not complete:
        yield diagnostic("resumed", "a run did not end here, and nothing of it can be kept")


def _describe_replicas(run: Assignment, earlier: Provenance) -> Iterator[Diagnostic]:
    if files := list(find_unequal_reads(run.provenance, earlier)):
        message = "the run that is resumed read other replicas"
        yield run.record.diagnostic("resumed", message, facts=join_clauses(*files[:3]))


def destination_changes(run: Assignment) -> Iterator[Diagnostic]:
    """Yield the problem that another run has written here since the destination was seen."""
    if run.seen is None:
        return
    new = [path for path, stamp in run.stamps().items() if run.seen.get(path) != stamp]
    if new:
        problem = overtaken_problem(run.record, shorten(new, 3))
        if not run.options.resume:
            problem = replace(problem, code="destination", hint=ACCEPT_OR_AGAIN, path=None)
        yield problem


def overtaken_problem(record: Record, where: str) -> Diagnostic:
    """Return the problem that another run was faster; resuming again takes that into account."""
    message, hint = "another run has written it since this one began", "the same command"
    return Diagnostic("busy", message, hint=hint, where=where, path=str(record.lock))
