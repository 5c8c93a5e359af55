"""Mark a set complete whose parts were written by several runs."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpttool.formats.local import describe_os_error
from ckpttool.model.manifest import MANIFEST
from ckpttool.problems import (
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
from ckpttool.transaction.log import LoggedOutput
from ckpttool.transaction.manifest import Manifest, ManifestFile, Written, remedy_for
from ckpttool.transaction.outputs import (
    find_unchanged,
    size_problem,
    stale_files,
)
from ckpttool.transaction.parts import Part
from ckpttool.transaction.record import finish_set
from ckpttool.transaction.resume import access_problems, is_written
from ckpttool.transaction.states import Destination, Record, State, look, unfinished_problem
from ckpttool.wording import count, format_ranks, shorten

ALTERED = "changed since it was written"


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
        problems := list(access_problems(record, record.logs(), "run it as the owner"))
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
    has_finished = destination.state is State.STOPPED
    remove_leftovers(record, destination.plan if has_finished else None)
    return _check_complete(folder, record)


def _busy(folder: str, destination: Destination) -> Diagnostic:
    by = next(iter(destination.running.values()), "it has just begun")
    hint = "wait until it ends"
    return Diagnostic("busy", "a run is still writing to it", hint=hint, facts=by, where=folder)


def _finish(folder: str, destination: Destination) -> None:
    """Write the documents of a set and its manifest, if all of its parts are done."""
    record, plan = destination.record, destination.plan
    if destination.state is State.RUNNING:
        raise PlanError([_busy(folder, destination)])
    if destination.state is not State.STOPPED:
        return  # another run has ended meanwhile
    raise_all(error.with_hint(_remedy_for(record, error)) for error in destination.damaged)
    if plan is None or not destination.parts:
        raise PlanError([unfinished_problem(destination, Path(folder))])
    errors: list[CkptToolError] = []
    problems = list(_missing_parts(folder, destination))
    outside = [one.path for one in plan.documents if not is_within(record.folder, one.path)]
    if outside:
        text, facts = "a link leads out of the folder of the set", shorten(outside, 3)
        problems.append(Diagnostic("parts", text, facts=facts, where=str(record.plan)))
    documents = [replace(one, path=str(record.folder / one.path)) for one in plan.documents]
    problems += (
        Diagnostic(
            "destination", "a file that is not of this set", hint="move it away", where=one.path
        )
        for one in documents
        if is_there(one.path) and not is_written(one)
    )
    if problems:
        errors.append(PlanError(problems))
    logged = destination.logged(plan.provenance.digest)  # in the order in which they were written
    names = sorted(plan.outputs, key=plan.outputs.__getitem__)
    entries = {name: logged[name] for name in names if name in logged}
    stamps = find_unchanged(
        record.folder,
        plan.provenance,
        {name: entry.stamp for name, entry in entries.items()},
        lambda names: (entries[name].read_entry() for name in names),
    )
    if changed := [name for name in entries if name not in stamps]:
        errors += _changed_parts(record, {name: entries[name] for name in changed})
    raise_all(errors)
    absent = [name for name in names if name not in entries]
    if absent:
        text, hint = (
            f"{count(len(absent), 'output')} in no log",
            "run all parts again, with --resume",
        )
        raise PlanError(
            [Diagnostic("parts", text, hint=hint, facts=shorten(absent, 3), where=folder)]
        )
    remove_half_written(record, plan.files)
    ordered = {name: stamps[name] for name in names}
    finish_set(record, plan.provenance, documents, entries.values(), ordered)


def _remedy_for(record: Record, error: FormatError) -> str:
    part = record.part_of(Path(error.path))
    if part is None:
        return "the command that writes the set, with --overwrite"
    return f"the same command with --part {part} --overwrite"


def _missing_parts(folder: str, destination: Destination) -> Iterator[Diagnostic]:
    """Yield the problem that parts are not done, with the runs that write them."""
    missing = destination.missing_parts
    if not missing:
        return
    of = missing[0].count
    named = format_ranks([part.number for part in missing], "part")
    runs = shorten((f"--part {part}" for part in missing), 3)
    hint = f"the same command with {runs}, then ckpttool finalize {folder}"
    begun = [part.number for part in missing if part in destination.parts]
    facts = ""
    if begun:
        facts = f"{format_ranks(begun, 'part')} had begun; --resume keeps what is complete"
    yield Diagnostic("parts", f"{named} of {of} missing", hint=hint, facts=facts, where=folder)


def _changed_parts(record: Record, changed: Mapping[str, LoggedOutput]) -> Iterator[VerifyError]:
    """Yield an error for each run that has to repeat outputs, which are missing or changed."""
    found: dict[Part | None, dict[str, str]] = {}
    for name, logged in changed.items():
        problem = size_problem(record.folder, logged.read_entry()) or ALTERED
        found.setdefault(record.part_of(logged.log), {})[name] = problem
    for part, problems in found.items():
        run = "the same command" + ("" if part is None else f" with --part {part}")
        is_altered = any(is_there(record.folder / name) for name in problems)  # not for --resume
        hint = f"{run} {'--overwrite' if is_altered else '--resume'}"
        yield from _output_errors(record.folder, problems, hint)


def _output_errors(folder: Path, problems: Mapping[str, str], hint: str) -> Iterator[VerifyError]:
    """Yield an error for each output of a set, by name, with what is wrong with it."""
    return (VerifyError(str(folder / name), [what], hint) for name, what in problems.items())


def _check_complete(folder: str, record: Record) -> Manifest:
    """Check the outputs of a set that is marked complete, and return its manifest."""
    path = record.manifest
    if not path.exists():
        message, facts, hint = "no parts in it", "a run with --part K/N leaves a log here", ""
        other = _find_other_set(record.folder)
        if other is not None:
            message, facts = "the parts in it are of single files", ""
            hint = f"ckpttool finalize {other}"
        raise PlanError([Diagnostic("parts", message, hint=hint, facts=facts, where=folder)])
    try:
        file = ManifestFile.read(path)
        manifest = file.manifest()
        paths = [output.path for output in manifest.outputs]
        changed = _changed_outputs(record, file, paths)
    except FormatError as error:
        raise error.with_hint(remedy_for(error)) from error
    if path.name != MANIFEST and path.name not in {
        f"{o.path}.{MANIFEST}" for o in manifest.outputs
    }:
        names = shorten((output.path for output in manifest.outputs), 3)
        text = f"{path.name} lists {names} in place of it"
        raise VerifyError(folder, [text], "rename the output and its manifest back")
    raise_all(_set_errors(path, manifest.outputs, changed))
    return replace(manifest, notes=tuple(_warn_of_others(path.parent, manifest.outputs)))


def _changed_outputs(record: Record, manifest: ManifestFile, names: Collection[str]) -> set[str]:
    """Return the outputs that are not as they were written, by their stamps or contents."""
    stamps = look(record).stamps
    if stamps is not None and stamps.manifest != manifest.digest:
        stamps = None  # of another set
    known = stamps.outputs if stamps is not None else {}
    provenance = stamps.provenance if stamps is not None else manifest.provenance()
    unchanged = find_unchanged(
        record.folder,
        provenance,
        {name: known.get(name) for name in names},
        lambda unclear: (one for one in manifest.outputs() if one.path in unclear),
    )
    return set(names) - unchanged.keys()


def _set_errors(
    path: Path, outputs: Sequence[Written], changed: Container[str]
) -> Iterator[VerifyError]:
    """Yield the problems of the outputs of a complete set."""
    found = {one.path: size_problem(path.parent, one) for one in outputs}
    problems = {
        name: problem or ALTERED for name, problem in found.items() if problem or name in changed
    }
    for is_missing, hint in (
        (True, "the command that writes the set, without --part, with --resume"),
        (False, "put a copy of it back, or write the set again with --overwrite"),
    ):
        named = {n: p for n, p in problems.items() if is_there(path.parent / n) is not is_missing}
        if named:
            yield from _output_errors(path.parent, named, hint)


def _warn_of_others(folder: Path, outputs: Sequence[Written]) -> Iterator[Diagnostic]:
    """Yield a warning about files that readers would mistake for outputs of the set."""
    first = outputs[0] if outputs else None
    if first is None or Path(first.path).parent != Path(f"rank_{first.rank}"):
        return
    ranks = {output.rank for output in outputs}
    if (stale := stale_files(first.rank, str(folder / first.path), ranks)) is not None:
        yield stale


def _find_other_set(folder: Path) -> Path | None:
    """Return a single file in a folder that has parts; None if there is none."""
    for home in sorted(folder.glob(f".*.{Path(MANIFEST).stem}")):
        if (home / "plan.json").exists():
            return folder / home.name.removeprefix(".").removesuffix(f".{Path(MANIFEST).stem}")
    return None
