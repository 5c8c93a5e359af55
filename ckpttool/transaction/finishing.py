"""Mark a set complete whose outputs were written by several runs.

A run with ``--part`` cannot know whether others have ended, so none of them writes the manifest.
A set is complete if each output of the plan is in the log of some run that has ended well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from shlex import quote

from msgspec.structs import replace

from ckpttool.concurrency import OpenProgress, no_progress
from ckpttool.formats.local import describe_os_error
from ckpttool.model.manifest import MANIFEST, OutputEntry
from ckpttool.problems import (
    BusyError,
    CkptToolError,
    Diagnostic,
    ExecutionError,
    FormatError,
    PlanError,
    VerifyError,
    raise_all,
)
from ckpttool.storage.files import is_there, is_within
from ckpttool.transaction.claim import remove_half_written, remove_leftovers
from ckpttool.transaction.locks import CLAIM_SECONDS, FileLock, HeldError
from ckpttool.transaction.outputs import (
    find_intact,
    find_unchanged,
    size_problem,
    stale_files,
)
from ckpttool.transaction.record import finish_set
from ckpttool.transaction.resume import WAIT, access_problems, is_written
from ckpttool.transaction.sealed_files import (
    WRITE_AGAIN,
    Manifest,
    ManifestFile,
    Written,
    remedy_for,
)
from ckpttool.transaction.states import (
    Destination,
    Record,
    State,
    describe_missing,
    read_destination,
    unfinished_problem,
)
from ckpttool.transaction.waiting import wait_while_busy
from ckpttool.wording import count, shorten

AGAIN = "the command that writes the set, with --resume --overwrite"


def finalize(
    folder: str | os.PathLike[str],
    *,
    wait_seconds: float | None = None,
    open_progress: OpenProgress = no_progress,
    on_note: Callable[[Diagnostic], None] = lambda note: None,
) -> Manifest:
    """Mark an output folder, or a single file, complete, if runs have written all outputs.

    A set that is already marked is only checked.

    Parameters
    ----------
    folder
        The folder, or the file.
    wait_seconds, open_progress, on_note
        How long to wait for runs that write there, and what shows it; see `wait_while_busy`.

    Raises
    ------
    FormatError
        The record or the manifest is damaged, or is another kind of file.
    BusyError
        A run is writing to the folder.
    PlanError
        Outputs are missing.
    VerifyError
        Outputs are missing or were changed.
    ExecutionError
        A file cannot be written.
    """
    attempt = partial(_finalize, os.fspath(folder))
    return wait_while_busy(attempt, wait_seconds, open_progress=open_progress, on_note=on_note)


def _finalize(folder: str) -> Manifest:
    """Do what `finalize` does, without waiting."""
    record = Record.of(Path(folder))
    destination = read_destination(record)
    ended = None
    if destination.state is State.RUNNING:
        raise BusyError([_busy(folder, destination)])
    if destination.state is not State.COMPLETE and (
        problems := list(access_problems(record, record.logs(), "run it as the owner"))
    ):
        raise PlanError(problems)
    if destination.state is State.STOPPED:
        try:
            lock = FileLock(record.lock, CLAIM_SECONDS)
        except HeldError as error:
            raise BusyError([_busy(folder, read_destination(record))]) from error
        try:
            with lock:
                _finish(folder, read_destination(record))
        except OSError as error:
            raise ExecutionError(str(record.manifest), describe_os_error(error)) from error
        ended = destination.plan
    notes = remove_leftovers(record, ended)
    manifest = _check_complete(folder, record)
    return replace(manifest, notes=(*notes, *manifest.notes))


def _busy(folder: str, destination: Destination) -> Diagnostic:
    begins = (destination.record.lock, "it has just begun")
    locked, by = next(iter(destination.running.items()), begins)
    message = "a run is still writing to it"
    return Diagnostic("busy", message, hint=WAIT, facts=by, where=folder, path=str(locked))


def _finish(folder: str, destination: Destination) -> None:
    """Write the documents of a set and its manifest, if all of its outputs are."""
    record, plan = destination.record, destination.plan
    if destination.state is State.RUNNING:
        raise BusyError([_busy(folder, destination)])
    if destination.state is not State.STOPPED:
        return  # another run has ended meanwhile
    raise_all(error.with_hint(AGAIN) for error in destination.damaged.values())
    if plan is None or not any(log.is_done for log in destination.runs):
        raise PlanError([unfinished_problem(destination)])
    problems, missing = [], destination.missing
    if missing:
        message = f"{len(missing)} of {count(len(plan.outputs), 'output')} missing"
        hint, facts = describe_missing(destination)
        problems.append(Diagnostic("parts", message, hint=hint, facts=facts, where=folder))
    paths = [document.path for document in plan.documents]
    if outside := [path for path in paths if not is_within(record.folder, path)]:
        message, facts = "a link leads out of the folder of the set", shorten(outside, 3)
        problems.append(Diagnostic("parts", message, facts=facts, where=str(record.plan)))
    documents = [replace(of, path=str(record.folder / of.path)) for of in plan.documents]
    message, hint = "a file that is not of this set", "move it away"
    problems += (
        Diagnostic("destination", message, hint=hint, where=document.path)
        for document in documents
        if not record.replaced() and is_there(document.path) and not is_written(document)
    )
    errors: list[CkptToolError] = [PlanError(problems)] if problems else []
    logged = destination.logged(plan.provenance.digest)  # in the order in which they were written
    names = sorted(plan.outputs, key=plan.outputs.__getitem__)
    entries = {name: logged[name] for name in names if name in logged}
    intact = find_intact(record.folder, plan.provenance, entries)
    changed = (entries[name].read_entry() for name in entries if name not in intact)
    raise_all([*errors, *_output_errors(record.folder, changed, AGAIN)])
    remove_half_written(record, plan.files)
    finish_set(record, plan.provenance, documents, intact)


def _output_errors(
    folder: Path, outputs: Iterable[Written | OutputEntry], hint: str
) -> Iterator[VerifyError]:
    for output in outputs:
        what = size_problem(folder, output) or "changed since it was written"
        yield VerifyError(str(folder / output.path), [what], hint)


def _check_complete(folder: str, record: Record) -> Manifest:
    """Check the outputs of a set that is marked complete, and return its manifest."""
    path = record.manifest
    if not path.exists():
        message, facts, hint = "no parts in it", "a run of a part leaves a log here", ""
        if other := _find_other_set(record.folder):
            message, facts = "the parts in it are of single files", ""
            hint = f"ckpttool finalize {quote(str(other))}"
        raise PlanError([Diagnostic("parts", message, hint=hint, facts=facts, where=folder)])
    try:
        file = ManifestFile.read(path)
        manifest = file.manifest()
        changed = _changed_outputs(record, file, manifest.outputs)
    except FormatError as error:
        raise error.with_hint(remedy_for(error)) from error
    names = [output.path for output in manifest.outputs]
    if path.name not in {MANIFEST, *(f"{name}.{MANIFEST}" for name in names)}:
        text = f"{path.name} lists {shorten(names, 3)} in place of it"
        raise VerifyError(folder, [text], "rename the output and its manifest back")
    missing = [output for output in changed if not is_there(record.folder / output.path)]
    altered = [output for output in changed if output not in missing]
    again = "the command that writes the set, without --part, with --resume"
    raise_all(
        [
            *_output_errors(record.folder, missing, again),
            *_output_errors(record.folder, altered, WRITE_AGAIN),
        ]
    )
    return replace(manifest, notes=tuple(_warn_of_others(path.parent, manifest.outputs)))


def _changed_outputs(
    record: Record, manifest: ManifestFile, outputs: Sequence[Written]
) -> list[Written]:
    """Return the outputs that are not as they were written, by their stamps or contents."""
    stamps = read_destination(record).stamps
    if stamps is not None and stamps.manifest != manifest.digest:
        stamps = None  # of another set
    known = stamps.outputs if stamps is not None else {}
    unchanged = find_unchanged(
        record.folder,
        stamps.provenance if stamps is not None else manifest.provenance(),
        {output.path: known.get(output.path) for output in outputs},
        lambda unclear: (output for output in manifest.outputs() if output.path in unclear),
    )
    return [output for output in outputs if output.path not in unchanged]


def _warn_of_others(folder: Path, outputs: Sequence[Written]) -> Iterator[Diagnostic]:
    first = next(iter(outputs), None)
    if first is not None and Path(first.path).parent == Path(f"rank_{first.rank}"):
        paths = {output.rank: str(folder / output.path) for output in outputs}
        yield from stale_files(paths, paths)


def _find_other_set(folder: Path) -> Path | None:
    stem = Path(MANIFEST).stem
    for home in sorted(folder.glob(f".*.{stem}")):
        if (home / "plan.json").exists():
            return folder / home.name.removeprefix(".").removesuffix(f".{stem}")
    return None
