"""Mark a set complete whose parts were written by several runs."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpttool.errors import (
    CkptToolError,
    ExecutionError,
    FormatError,
    PlanError,
    VerifyError,
    describe_os_error,
    raise_all,
)
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.wording import format_ranks, shorten
from ckpttool.storage.files import is_there, is_within
from ckpttool.transaction.claim import remove_half_written, remove_leftovers
from ckpttool.transaction.locks import CLAIM_SECONDS, FileLock, HeldError
from ckpttool.transaction.log import LoggedOutput
from ckpttool.transaction.manifest import Manifest, ManifestFile, Written, remedy_for
from ckpttool.transaction.outputs import files_of_others, find_unchanged, size_problems
from ckpttool.transaction.record import finish_set
from ckpttool.transaction.resume import access_problems, is_written
from ckpttool.transaction.states import Destination, Record, State, look, unfinished_problem

ALTERED = "changed by somebody else since it was written"


def finalize(folder: str) -> Manifest:
    """Mark an output folder, or a single file, complete, if all parts are done.

    A set that is already marked is only checked.

    Raises
    ------
    FormatError
        The record or the manifest is damaged, or is another kind of file.
    PlanError
        Parts are missing, or a run is writing to the folder.
    VerifyError
        Outputs are missing or were changed.
    ExecutionError
        A file cannot be written.
    """
    record = Record.of(Path(folder))
    destination = look(record)
    if destination.state is State.RUNNING:
        raise PlanError([_busy(folder, destination)])
    if destination.state is not State.COMPLETE and (
        problems := list(access_problems(record, record.logs()))
    ):
        raise PlanError(problems)
    if destination.state is State.STOPPED:
        try:
            lock = FileLock(record.lock, CLAIM_SECONDS)
        except HeldError as error:
            raise PlanError([_busy(folder, look(record))]) from error
        try:
            _finish(folder, look(record))
        except OSError as error:
            raise ExecutionError(str(record.manifest), describe_os_error(error)) from error
        finally:
            lock.release()
    remove_leftovers(record)
    return _check_complete(folder, record)


def _busy(folder: str, destination: Destination) -> Diagnostic:
    by = next(iter(destination.running.values()), "it has just begun")
    text = f"{folder}: a run is still writing to it ({by})"
    return Diagnostic("busy", text, "wait until it ends")


def _finish(folder: str, destination: Destination) -> None:
    """Write the documents of a set and its manifest, if all of its parts are done."""
    record, plan = destination.record, destination.plan
    if destination.state is State.RUNNING:
        raise PlanError([_busy(folder, destination)])
    if destination.state is not State.STOPPED:
        return  # another run has ended meanwhile
    raise_all(
        type(error)(error.path, error.offset, f"{error.reason}; {_remedy_for(record, error)}")
        for error in destination.damaged
    )
    if plan is None or not destination.parts:
        raise PlanError([unfinished_problem(destination, Path(folder))])
    errors: list[CkptToolError] = []
    problems = list(_missing_parts(folder, destination))
    problems += Diagnostic.each(
        "parts",
        (
            f"{record.plan}: {document.path!r} is not below its folder: a link leads out of it"
            for document in plan.documents
            if not is_within(record.folder, document.path)
        ),
    )
    documents = [replace(one, path=str(record.folder / one.path)) for one in plan.documents]
    problems += (
        Diagnostic("destination", f"{one.path}: exists, and is not of this set", "move it away")
        for one in documents
        if is_there(one.path) and not is_written(one)
    )
    if problems:
        errors.append(PlanError(problems))
    entries = destination.logged(plan.provenance.digest)
    stamps = find_unchanged(
        record.folder,
        plan.provenance,
        {name: entry.stamp for name, entry in entries.items()},
        lambda names: (entries[name].read_entry() for name in names),
    )
    if changed := [name for name in entries if name not in stamps]:
        texts = _output_problems(record, {name: entries[name] for name in changed})
        errors.append(VerifyError(folder, list(texts)))
    raise_all(errors)
    absent = [name for name in plan.outputs if name not in entries]
    if absent:
        text = f"{folder}: the logs do not tell of {shorten(absent, 3)}"
        raise PlanError([Diagnostic("parts", text, "run all parts again, with --resume")])
    remove_half_written(record, plan.files)
    ordered = [entries[name] for name in sorted(plan.outputs, key=plan.outputs.__getitem__)]
    finish_set(record, plan.provenance, documents, ordered, {n: stamps[n] for n in plan.outputs})


def _remedy_for(record: Record, error: FormatError) -> str:
    part = record.part_of(Path(error.path))
    return f"run part {part} again, with --overwrite" if part else "--overwrite writes all anew"


def _missing_parts(folder: str, destination: Destination) -> Iterator[Diagnostic]:
    """Yield the problem that parts are not done, with the runs that mend it."""
    missing = destination.missing_parts
    if not missing:
        return
    of = missing[0].count
    named = format_ranks([part.number for part in missing], "part")
    runs = shorten((f"--part {part}" for part in missing), 3)
    hint = f"run what is missing ({runs})"
    begun = [part.number for part in missing if part in destination.parts]
    if begun:
        hint += f"; {format_ranks(begun, 'part')} had begun, and --resume keeps what is complete"
    text = f"{folder}: {named} of {of} {'is' if len(missing) == 1 else 'are'} not there"
    yield Diagnostic("parts", text, hint)


def _output_problems(record: Record, changed: Mapping[str, LoggedOutput]) -> Iterator[str]:
    """Yield the problems of outputs that are gone or changed, each with the remedy."""
    parts = {name: record.part_of(logged.log) for name, logged in changed.items()}
    altered = {part for name, part in parts.items() if is_there(record.folder / name)}
    for name, logged in changed.items():
        run = "the run" if parts[name] is None else f"part {parts[name]}"
        way = "--overwrite" if parts[name] in altered else "--resume"  # which refuses altered ones
        problems = list(size_problems(record.folder, [logged.read_entry()]))
        for problem in problems or [f"{name}: {ALTERED}"]:
            yield f"{problem}; run {run} again, with {way}"


def _check_complete(folder: str, record: Record) -> Manifest:
    """Check the outputs of a set that is marked complete, and return its manifest."""
    path = record.manifest
    if not path.exists():
        reason = "no parts in it; a run with --part K/N leaves its log when it is done"
        other = _find_other_set(record.folder)
        if other is not None:
            reason = f"only parts of single files: name one of them, such as {other}"
        raise PlanError([Diagnostic("parts", f"{folder}: {reason}")])
    try:
        file = ManifestFile.read(path)
        manifest = file.manifest()
        paths = [output.path for output in manifest.outputs]
        changed = _changed_outputs(record, file, paths)
    except FormatError as error:
        reason = f"{error.reason}; {remedy_for(error)}"
        raise type(error)(error.path, error.offset, reason) from error
    wrong = list(_set_problems(path, manifest.outputs, changed))
    if path.name != MANIFEST and path.name not in {
        f"{o.path}.{MANIFEST}" for o in manifest.outputs
    }:
        names = shorten((output.path for output in manifest.outputs), 3)
        text = f"{path.name} speaks of {names} and not of it; if it was renamed, give it and"
        wrong = [f"{text} {path.name} their old names again"]
    if wrong:
        raise VerifyError(folder, wrong)
    return replace(manifest, notes=tuple(_warn_of_others(path.parent, manifest.outputs)))


def _changed_outputs(record: Record, manifest: ManifestFile, names: Collection[str]) -> set[str]:
    """Return the outputs that are not as they were written, by their stamps or contents."""
    stamps = look(record).stamps
    if stamps is not None and stamps.manifest != manifest.digest:
        stamps = None  # of another set
    known = stamps.outputs if stamps is not None else {}
    provenance = stamps.provenance if stamps is not None else manifest.head.provenance()
    unchanged = find_unchanged(
        record.folder,
        provenance,
        {name: known.get(name) for name in names},
        lambda unclear: (one for one in manifest.outputs() if one.path in unclear),
    )
    return set(names) - unchanged.keys()


def _set_problems(path: Path, outputs: Sequence[Written], changed: Container[str]) -> Iterator[str]:
    """Yield the problems of the outputs of a complete set, each with the remedy."""
    for output in outputs:
        remedy = "the command that wrote the set, without --part, writes it again with --resume"
        if is_there(path.parent / output.path):
            remedy = "put a copy of it back, or write the set anew (--overwrite)"
        problems = list(size_problems(path.parent, [output]))
        if not problems and output.path in changed:
            problems = [f"{output.path}: {ALTERED}"]
        yield from (f"{problem}; {remedy}" for problem in problems)


def _warn_of_others(folder: Path, outputs: Sequence[Written]) -> Iterator[Diagnostic]:
    """Yield a warning about files that readers would mistake for outputs of the set."""
    first = outputs[0] if outputs else None
    if first is None or Path(first.path).parent != Path(f"rank_{first.rank}"):
        return
    ranks = {output.rank for output in outputs}
    others = files_of_others(first.rank, str(folder / first.path), ranks)
    if others:
        text = f"{shorten(others, 3)}: not of this set, so left from another run"
        yield Diagnostic("stale", text, "it stays, and is taken for a part of it: move it away")


def _find_other_set(folder: Path) -> Path | None:
    """Return a single file in a folder that has parts; None if there is none."""
    for home in sorted(folder.glob(f".*.{Path(MANIFEST).stem}")):
        if (home / "plan.json").exists():
            return folder / home.name.removeprefix(".").removesuffix(f".{Path(MANIFEST).stem}")
    return None
