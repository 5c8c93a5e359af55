"""The states of a destination, and the record of a run that they are read from.

The record of a set lies in a folder beside its manifest: ``OUT/.ckpttool/``, of a single file
``DIR/.FILE.ckpttool/``.

=====================  =============================================================================
``lock``               empty; locked while a run begins or ends, and by `ckpttool.finalize`
``plan.json``          what is written, from which files, and who began it
``*.log``              the log of each run (`ckpttool.transaction.log`), which its writer locks
``stamps.json``        of a finished set: its plan, and the stamps of its sources and outputs
``replaced-*.json``    the manifest of an older set with other names, which a run replaces
``replaced-*.stamps``  its ``stamps.json``
=====================  =============================================================================

``plan.json`` and ``stamps.json`` are sealed (`ckpttool.transaction.sealed_files`), with the
provenance of a run in their first line, and a line for each output.

A destination is in one of four states.  The first that applies is it:

========  ==========================================================================================
COMPLETE  the manifest is there: it is removed before the first output is renamed, and written last
RUNNING   a run has locked its log; file systems without locks do not show it
STOPPED   a plan or a log is there: a run ended early, or outputs wait for `ckpttool.finalize`
NONE      nothing is claimed
========  ==========================================================================================
"""

from __future__ import annotations

import errno
import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import cached_property
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import TypeVar

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from ckpttool.formats.local import list_folder, unreadable
from ckpttool.lazy import compile_late
from ckpttool.model.manifest import MANIFEST, Provenance, require_below
from ckpttool.model.plan import Document
from ckpttool.model.tensors import FileStamp
from ckpttool.problems import Diagnostic, FormatError
from ckpttool.storage.files import PARTIAL, is_there, stamp_at, sync_folder
from ckpttool.transaction.locks import is_held
from ckpttool.transaction.log import (
    RECORD_SCHEMA,
    Log,
    LoggedOutput,
    StampedOutput,
    Writer,
    require_schema,
)
from ckpttool.transaction.sealed_files import ManifestFile, SealedFile, sealed_text
from ckpttool.wording import count, shorten

LOG = compile_late(r"whole\.log|\d{1,6}-of-\d{1,6}\.log")
MAY_LACK = "files may be missing, or of another run"
RESUME = "the command that writes it, with --resume"
NO_LOCKS = "--no-locks"
REPLACED = "replaced-"
ANEW = "the command that writes it, with --overwrite"
MOST = 3  # logs that are described; an array job may leave thousands


T = TypeVar("T")


class State(Enum):
    """The state of a destination; see above."""

    NONE = "none"
    STOPPED = "stopped"
    RUNNING = "running"
    COMPLETE = "complete"


class Record(Struct, frozen=True, dict=True):
    """The files that record a set of outputs; ``manifest`` is the path of its manifest."""

    manifest: Path

    @classmethod
    def of(cls, output: Path) -> Record:
        """Return the record of a folder of outputs, or of a single file."""
        if output.is_dir():
            return cls(output / MANIFEST)
        return cls(output.with_name(f"{output.name}.{MANIFEST}"))

    @property
    def folder(self) -> Path:
        """The folder that paths of outputs are relative to."""
        return self.manifest.parent

    @cached_property
    def home(self) -> Path:
        """The folder of the record."""
        return self.manifest.with_name(f".{self.manifest.stem}")

    @property
    def output(self) -> Path:
        """The folder of outputs, or the single file."""
        if self.manifest.name == MANIFEST:
            return self.folder
        return self.manifest.with_name(self.manifest.name.removesuffix(f".{MANIFEST}"))

    @cached_property
    def lock(self) -> Path:
        """The file that runs lock."""
        return self.home / "lock"

    @cached_property
    def plan(self) -> Path:
        """The plan: what is written."""
        return self.home / "plan.json"

    @cached_property
    def stamps(self) -> Path:
        """The stamps of a finished set."""
        return self.home / "stamps.json"

    def name_of(self, path: str) -> str:
        """Return the name of an output or document in records: its path from the folder."""
        return os.path.relpath(path, self.folder)

    def diagnostic(
        self, code: str, message: str, hint: str = "", facts: str = "", locked: Path | None = None
    ) -> Diagnostic:
        """Return a fact about the set; another run has ``locked`` a file."""
        where, path = str(self.output), None if locked is None else str(locked)
        return Diagnostic(code, message, hint=hint, facts=facts, where=where, path=path)

    def log(self, part: tuple[int, int] | None = None) -> Path:
        """Return the log of a run that writes all outputs, or those of ``--part``."""
        return self.home / ("whole.log" if part is None else f"{part[0]}-of-{part[1]}.log")

    def logs(self) -> list[Path]:
        """Return the logs, of whichever plan."""
        return [path for path in self.leftovers() if LOG.fullmatch(path.name)]

    def leftovers(self) -> list[Path]:
        """Return the files of a run: logs, plans, half-written files."""
        is_readable = self.home.is_dir() and os.access(self.home, os.R_OK | os.X_OK)
        files = list_folder(self.home) if is_readable else []
        names = (self.plan.name, f"{self.stamps.name}.")
        return [p for p in files if LOG.fullmatch(p.name) or p.name.startswith(names)]

    def replaced(self) -> list[Path]:
        """Return the manifests of older sets that a run replaces, the last one first."""
        manifests = self.home.glob(f"{REPLACED}*.json")
        return sorted(manifests, key=lambda path: -path.stat().st_mtime_ns)

    @staticmethod
    def stamps_of(replaced: Path) -> Path:
        """Return the stamps of a replaced set, beside its manifest."""
        return replaced.with_suffix(".stamps")

    def older_outputs(self) -> list[str]:
        """Return the paths of outputs that the manifests of this set and of replaced ones list."""
        names: dict[str, None] = {}
        for path in (self.manifest, *self.replaced()):
            with suppress(FileNotFoundError, FormatError):  # which says nothing of outputs
                names |= {output.path: None for output in ManifestFile.read(path).planned()}
        return list(names)

    def set_aside(self) -> None:
        """Keep manifest and stamps of an older set in the record, until its outputs are removed."""
        with suppress(FileNotFoundError, FormatError):
            digest = ManifestFile.read(self.manifest).digest
            replaced = self.home / f"{REPLACED}{digest}.json"
            self.manifest.replace(replaced)
            sync_folder(self.home)
            sync_folder(self.folder)
            self.stamps.replace(self.stamps_of(replaced))


class _Documents(Struct, frozen=True):
    """The documents of a set in its plan."""

    documents: tuple[Document, ...]

    def __post_init__(self) -> None:
        for document in self.documents:
            require_below(document.path)


class _RecordSchema(Struct, frozen=True):
    """The version of the record in a plan."""

    record: int = 1


class _ManifestDigest(Struct, frozen=True):
    """The SHA-256 of a manifest in the stamps of its set."""

    manifest: str


def _line(output: Mapping[str, object]) -> bytes:
    return json.dumps(output).encode("ascii")


class RecordedPlan(Struct, frozen=True):
    """The outputs of a run, or of several runs of one plan."""

    writer: Writer
    provenance: Provenance
    outputs: Mapping[str, int]
    documents: tuple[Document, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the outputs and documents."""
        return (*self.outputs, *(document.path for document in self.documents))

    @classmethod
    def read(cls, path: Path) -> RecordedPlan:
        """Read the plan of a record.

        Raises
        ------
        FormatError
            The file is damaged or another, or cannot be read.
        FileNotFoundError
            It does not exist.
        """
        file = SealedFile.read(path)
        head = file.parts()
        require_schema(path, head(_RecordSchema).record)
        outputs = {line.path: line.rank for line in file.planned()}
        return cls(head(Writer), head(Provenance), outputs, head(_Documents).documents)

    def text(self) -> Iterator[bytes]:
        """Return the text of the document."""
        documents = [
            {
                "path": document.path,
                "kind": document.kind,
                "data": b64encode(document.data).decode(),
            }
            for document in self.documents
        ]
        head = {**self.provenance.head_with_stamps(), **to_builtins(self.writer)}
        head |= {"record": RECORD_SCHEMA, "documents": documents}
        outputs = self.outputs.items()
        return sealed_text(head, ([_line({"rank": rank, "path": path})] for path, rank in outputs))


class FinishedStamps(Struct, frozen=True):
    """The stamps of a finished set."""

    provenance: Provenance
    manifest: str
    outputs: Mapping[str, FileStamp]

    @classmethod
    def read(cls, path: Path) -> FinishedStamps:
        """Read the stamps of a record; the errors are those of `RecordedPlan.read`."""
        file = SealedFile.read(path)
        outputs = {line.path: line.stamp for line in file.lines(StampedOutput)}
        head = file.parts()
        return cls(head(Provenance), head(_ManifestDigest).manifest, outputs)

    def text(self) -> Iterator[bytes]:
        """Return the text of the document."""
        head = {**self.provenance.head_with_stamps(), "manifest": self.manifest}
        outputs = self.outputs.items()
        return sealed_text(head, ([_line({"path": path, "stamp": at})] for path, at in outputs))


class Destination(Struct, frozen=True):
    """A destination as read without a lock.

    Attributes
    ----------
    record
        The record that shows it.
    state
        One of the four states.
    plan
        The plan of the run that is under way or was stopped; it may also be left in a finished set.
        None if it is not there, or is damaged.
    logs
        The logs, which may have entries of other plans as well.
    running
        Who is writing, by the log that the writer has locked.
    stamps
        The stamps of a finished set; None if they are not there, or are damaged.
    damaged
        Files of the record that cannot be used, by path.
    """

    record: Record
    state: State
    plan: RecordedPlan | None = None
    logs: tuple[Log, ...] = ()
    running: Mapping[Path, str] = {}
    stamps: FinishedStamps | None = None
    damaged: Mapping[Path, FormatError] = {}

    @property
    def runs(self) -> list[Log]:
        """The logs whose last run was one of the plan."""
        digest = "" if self.plan is None else self.plan.provenance.digest
        return [log for log in self.logs if log.plan == digest]

    @property
    def finished(self) -> frozenset[str]:
        """The outputs of runs of the plan that have ended well."""
        return frozenset(name for log in self.runs for name in log.done or ())

    @property
    def missing(self) -> list[str]:
        """The outputs of the plan that no run has finished, or that are in no log."""
        if self.plan is None:
            return []
        known = self.finished & self.logged(self.plan.provenance.digest).keys()
        return [name for name in self.plan.outputs if name not in known]

    def half_written(self, plan: str) -> dict[str, list[LoggedOutput]]:
        """Return the units of half-written outputs, from the last log that has some."""
        in_order = sorted(self.logs, key=lambda log: log.writer.time if log.writer else "")
        return {name: lines for log in in_order for name, lines in log.units.get(plan, {}).items()}

    def logged(self, plan: str | None = None) -> dict[str, LoggedOutput]:
        """Return the outputs that logs list, for a plan (`Provenance.digest`) or for any."""
        plans = (item for log in self.logs for item in log.plans.items())
        of_plan = (outputs for digest, outputs in plans if plan in (None, digest))
        return choose_entries(self.record.folder, of_plan)


def choose_entries(
    folder: Path, logs: Iterable[Mapping[str, LoggedOutput]]
) -> dict[str, LoggedOutput]:
    """Return the outputs in several logs; of several entries that with the stamp of the file."""
    chosen: dict[str, LoggedOutput] = {}
    for log in logs:
        for name, output in log.items():
            if name not in chosen or output.stamp == stamp_at(folder / name):
                chosen[name] = output
    return chosen


def read_destination(record: Record) -> Destination:
    """Read a destination; keep no lock and write nothing."""
    if record.home.is_dir() and not os.access(record.home, os.R_OK | os.X_OK):
        state = State.COMPLETE if is_there(record.manifest) else State.NONE
        home = str(record.home)
        error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), home)
        return Destination(record, state, damaged={record.home: unreadable(home, error)})
    damaged: dict[Path, FormatError] = {}

    def read(reader: Callable[[Path], T], path: Path) -> T | None:
        try:
            return reader(path)
        except FormatError as error:
            damaged[path] = error
        except FileNotFoundError:
            pass  # of a log: its run has just ended
        return None

    plan = read(RecordedPlan.read, record.plan)
    logs = tuple(log for path in record.logs() if (log := read(Log.read, path)) is not None)
    running = find_writers(record, logs)
    state, stamps = State.NONE, None
    if is_there(record.manifest):
        state, stamps = State.COMPLETE, read(FinishedStamps.read, record.stamps)
    elif running:
        state = State.RUNNING
    elif is_there(record.plan) or any(log.writer for log in logs):
        state = State.STOPPED
    return Destination(record, state, plan, logs, running, stamps, damaged)


def find_writers(record: Record, logs: Iterable[Log] = ()) -> Mapping[Path, str]:
    """Return who is writing, by the log that each has locked; empty without locks."""
    writers = {log.path: str(log.writer) for log in logs if log.writer is not None}
    return {path: writers.get(path, "it has just begun") for path in record.logs() if is_held(path)}


def find_unfinished_run(output: Path) -> Diagnostic | None:
    """Return why a folder, or a single file, is not a complete output; None if nothing says so."""
    destination = read_destination(Record.of(output))
    diagnostic = destination.record.diagnostic
    if destination.state in {State.RUNNING, State.STOPPED}:
        return unfinished_problem(destination)
    if destination.state is State.NONE and destination.damaged:  # which nobody may read
        error = next(iter(destination.damaged.values()))
        message = "it is not known whether a run has ended here"
        return diagnostic(
            "unfinished", message, "run it as the owner", f"{error.path}: {error.reason}"
        )
    for destination_of, name in runs_that_list(output) if output.is_file() else ():
        if destination_of.state is not State.COMPLETE and name not in destination_of.logged():
            facts = f"{destination_of.record.plan} lists it, and no log there lists it as complete"
            return diagnostic("unfinished", "a run has not completed it", RESUME, facts)
    return None


def runs_that_list(output: Path) -> Iterator[tuple[Destination, str]]:
    """Yield each destination whose plan lists a file, and the path of the file in that plan."""
    folders = output.absolute().parents[:2]
    around = ((Record(folder / MANIFEST), os.path.relpath(output, folder)) for folder in folders)
    for record, name in ((Record.of(output), output.name), *around):
        destination = read_destination(record)
        if destination.plan is not None and name in destination.plan.outputs:
            yield destination, name


def unfinished_problem(destination: Destination) -> Diagnostic:
    """Return the problem of a destination that is RUNNING or STOPPED."""
    diagnostic = destination.record.diagnostic
    if destination.state is State.RUNNING:
        message, by = "a run of ckpttool is writing here", next(iter(destination.running.values()))
        return diagnostic("unfinished", message, "wait until it ends", f"{by}; {MAY_LACK}")
    if destination.runs and all(log.is_done for log in destination.runs):
        message = "its parts are not finalized"
        return diagnostic("unfinished", message, *describe_missing(destination))
    hint = ANEW if destination.damaged else RESUME
    if is_held(destination.record.lock) is None:
        hint = f"when it has ended, {hint} {NO_LOCKS}"
    return diagnostic("unfinished", "a run of ckpttool did not end here", hint, MAY_LACK)


def describe_missing(destination: Destination) -> tuple[str, str]:
    """Return the remedy for a set whose runs have ended, and what is missing of it."""
    hint = f"ckpttool finalize {quote(str(destination.record.output))}"
    if missing := destination.missing:
        hint = f"the command that writes them, with --resume, then {hint}"
    return hint, shorten(missing, 3) or "files may be missing"


def describe_record(output: Path) -> Iterator[Diagnostic]:
    """Yield notes on the runs in the record of a folder, or of a single file.

    They name the runs of a set that is not finished, and files that cannot be used.
    """
    record = Record.of(output)
    destination = read_destination(record)
    for path, error in destination.damaged.items():
        if path == record.home and destination.state is State.NONE:
            continue  # `find_unfinished_run` reports it
        hint = "" if path == record.home else ANEW
        (problem,) = error.diagnostics
        yield replace(problem, code="leftover", hint=hint)
    plan, logs = destination.plan, destination.logs
    if destination.state is State.COMPLETE or plan is None:
        return
    for log in islice(logs, MOST):
        complete = shorten(sorted(log.outputs), 3) or "nothing"
        facts = f"`{log.command}`; complete: {complete}"
        facts += f"; {log.writer} since {log.writer.time}" if log.writer else ""
        state = "stopped"
        if log.is_done or log.path in destination.running:
            state = "is done" if log.is_done else "is writing"
        message = f"log of a run that {state}"
        yield Diagnostic("leftover", message, facts=facts, where=str(log.path))
    if len(logs) > MOST:
        message = f"{count(len(logs) - MOST, 'more log')} of runs"
        yield Diagnostic("leftover", message, where=str(record.home))
    half = [name for name in plan.outputs if is_there(f"{record.folder / name}{PARTIAL}")]
    if half and destination.state is State.STOPPED:
        files = count(len(half), "half-written file")
        yield Diagnostic("leftover", files, facts=shorten(half, 3), where=str(output))
