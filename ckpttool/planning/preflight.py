"""Check the destination: formats, names, disk space, and files of an earlier run."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from shlex import quote

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.concurrency import OpenProgress
from ckpttool.discovery.mindformers_output import CHECKPOINT_FOLDERS, is_run_output
from ckpttool.formats import FORMATS, format_of_suffix, get_format, suffix_of
from ckpttool.formats.local import find_file_id
from ckpttool.model.catalog import Catalog
from ckpttool.model.joining import format_names
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.plan import Plan, Target
from ckpttool.model.tensors import FileId
from ckpttool.planning.targets import ShardedOutput, extensions
from ckpttool.problems import CkptToolError, Diagnostic, Diagnostics
from ckpttool.storage.files import (
    ELSEWHERE,
    PARTIAL,
    access_problem,
    final_name,
    is_finished,
    is_there,
)
from ckpttool.transaction.outputs import stale_files
from ckpttool.transaction.resume import Assignment, OutputOptions, inspect_previous_run
from ckpttool.wording import count, format_bytes, shorten

NUMBERED_BYTES = 10 * 10**9  # of numbered files that a hint proposes


def _check_format_and_space(plan: Plan, kept: Collection[str]) -> Diagnostics:
    """Check the limits of the output format, and the disk space for outputs not ``kept``."""
    diagnostics = Diagnostics()
    format = get_format(plan.target.format)
    refused: dict[Diagnostic, None] = {}
    dtypes: set[str] = set()
    sizes: dict[int, int] = {}
    attrs = plan.attrs
    for ranks, metas in plan.headers.items():
        refusals = list(format.refusals(metas, attrs))
        refused |= dict.fromkeys(refusals)
        dtypes |= {meta.dtype for meta in metas}
        nbytes = 0 if refusals or plan.target.is_virtual else format.file_bytes(metas, attrs)
        sizes |= dict.fromkeys(ranks, nbytes)
    if plan.target.is_virtual:
        diagnostics.add(*_find_unshown(plan))
    paths = plan.target.paths.items()
    written = {path: sizes[rank] for rank, path in paths if str(Path(path)) not in kept}
    replaced = any(map(is_there, written))
    diagnostics.add(*(replace(it, hint=it.hint or _other_outputs(plan)) for it in refused))
    diagnostics.add(*format.notes(dtypes, attrs))
    if plan.target.strategy is not None and not format.is_loaded_by_mindspore:
        message = f"MindSpore loads .ckpt and .safetensors, not {format.word}"
        diagnostics.add(Diagnostic("format", message, hint="--format ckpt"))
    for disk in find_space(written):
        if disk.need > disk.free:
            need, free = format_bytes(disk.need), format_bytes(disk.free)
            message = f"too little space: {need} needed, {free} free"
            facts = "replaced outputs stay until the new ones are complete" if replaced else ""
            hint, where = "free some space, or -o on another disk", disk.folder
            diagnostics.add(Diagnostic("destination", message, hint=hint, facts=facts, where=where))
    return diagnostics


def _find_unshown(plan: Plan) -> Iterator[Diagnostic]:
    """Yield why tensors cannot be shown as they lie in the files of the source."""
    reasons = {name: reason for name, (_, reason) in plan.shown.items() if reason}
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name in reasons if reasons[name] == reason]
        message = f"--virtual cannot show {count(len(names), 'tensor')}: {reason}"
        yield Diagnostic("options", message, hint="omit --virtual", facts=format_names(names))


class Space(Struct, frozen=True):
    """A disk that outputs are written to.

    Attributes
    ----------
    folder
        The nearest folder of an output that exists already.
    need
        Bytes of the outputs, less those of half-written files that are replaced.
    free
        Bytes that are free.
    """

    folder: str
    need: int
    free: int


def find_space(sizes: Mapping[str, int]) -> list[Space]:
    """Return what new files need of each disk, from their paths and sizes."""
    need: dict[int, int] = defaultdict(int)  # by device
    folders: dict[int, Path] = {}
    for path, nbytes in sizes.items():
        folder = next(parent for parent in Path(path).absolute().parents if parent.is_dir())
        device = folder.stat().st_dev
        folders.setdefault(device, folder)
        need[device] += max(nbytes - _partial_bytes(path), 0)  # a file takes whole blocks
    disks = {device: os.statvfs(folder) for device, folder in folders.items()}
    return [
        Space(str(folders[device]), nbytes, disks[device].f_bavail * disks[device].f_frsize)
        for device, nbytes in need.items()
    ]


def format_option(path: str, format: str) -> str:
    """Return the option that writes a file in another format: its suffix decides, or --format.

    Examples
    --------
    >>> format_option("out/full.h5", "ckpt"), format_option("llama-3.1", "ckpt")
    ('-o out/full.ckpt', '--format ckpt')
    """
    if format_of_suffix(path) is None:
        return f"--format {format}"
    return f"-o {quote(str(Path(path).with_suffix(suffix_of(format))))}"


def _other_outputs(plan: Plan) -> str:
    """Return the options that write the same tensors otherwise; "" if no format holds them."""
    target = plan.target
    formats = [name for name in FORMATS if name != target.format and _can_hold(name, plan)]
    if target.is_numbered or not target.is_merged:
        return ", or ".join(f"--format {name}" for name in formats)
    path = next(iter(target.paths.values()))
    words = [format_option(path, name) for name in formats]
    folder = path if format_of_suffix(path) is None else str(Path(path).with_suffix(""))
    numbered = ShardedOutput(folder, target.format, NUMBERED_BYTES)
    spread = numbered.complete(plan, Diagnostics())
    if spread is not None and _can_hold(target.format, spread):
        words.insert(0, f"-o {quote(folder)} --max-shard-size {NUMBERED_BYTES // 10**9}GB")
        words[0] += "" if target.format == "safetensors" else f" --format {target.format}"
    return ", or ".join(words)


def _can_hold(name: str, plan: Plan) -> bool:
    format, headers = get_format(name), plan.headers.values()
    return not any(next(format.refusals(metas, plan.attrs), None) for metas in headers)


def _partial_bytes(path: str) -> int:
    try:
        return Path(path + PARTIAL).lstat().st_blocks * 512
    except OSError:
        return 0


def _destination_problems(
    catalogs: Sequence[Catalog],
    target: Target,
    blocked: Mapping[str, Diagnostic],
    options: OutputOptions,
    existing: Sequence[str],
    older: Collection[str],
    assignment: Assignment | None,
) -> Iterator[Diagnostic]:
    """Yield everything that prevents writing the outputs under their names.

    Outputs of an ``older`` set, which --overwrite removes, are not in the way by themselves.
    """
    yield from dict.fromkeys(blocked.values())
    is_in_the_way = bool(existing) and not options.overwrite
    busy = list(assignment.busy_problems()) if is_in_the_way and assignment is not None else []
    yield from busy
    if is_in_the_way and not busy:
        message, facts = f"{existing[0]} exists already", ""
        if len(existing) > 1:
            message, facts = f"{len(existing)} outputs exist already", shorten(existing, 3)
        hint = f"{'--resume --overwrite' if options.resume else '--overwrite'}, or {ELSEWHERE}"
        yield Diagnostic("destination", message, hint=hint, facts=facts)
    for catalog in catalogs:
        yield from _mixing_problems(catalog, target)
        path = options.strategy_path
        if path is not None and is_inside(str(Path(path).parent), catalog.root):
            yield inside_problem(path, catalog, "--write-strategy")
    for stale in () if options.overwrite or blocked else _find_stale_files(target, options, older):
        yield replace(stale, code="destination", hint=f"{ELSEWHERE}, or {stale.hint}")


def _blocked(
    target: Target, inputs: Collection[str], documents: Collection[str], older: Collection[str]
) -> dict[str, Diagnostic]:
    """Return path to problem for outputs that cannot be written even with ``--overwrite``.

    Nor can it remove ``older`` outputs that are inputs.

    All outputs that are inputs share one problem.
    """
    input_ids = {find_file_id(path) for path in inputs}
    manifest = [target.manifest_path] if target.paths else []
    problems: dict[str, Diagnostic] = {}
    replaced = [path for path in older if find_file_id(path) in input_ids]
    is_one_file = target.is_merged and not target.is_numbered
    outputs = {*target.paths.values()}
    for path in (*target.paths.values(), *documents, *manifest):
        is_named = is_one_file and path in outputs
        hint = "-o with the name of a file" if is_named else f"move it away, or {ELSEWHERE}"
        option = "-o" if path in outputs else "--write-strategy"
        problem = _name_of_others(Path(path), option) or _location_problem(path, hint, "-o")
        if problem is None and Path(path).exists() and find_file_id(path) in input_ids:
            replaced.append(path)
        elif problem := problem or _partial_problem(Path(path + PARTIAL), input_ids, ELSEWHERE):
            problems[path] = problem
    if len(replaced) == 1:
        message, facts = f"{Path(replaced[0])} is an input of this run", ""
    else:
        message, facts = f"{len(replaced)} outputs are inputs of this run", shorten(replaced, 3)
    shared = Diagnostic("destination", message, hint=ELSEWHERE, facts=facts)
    return problems | dict.fromkeys(replaced, shared)


def document_problem(
    path: str, option: str, inputs: Collection[str], overwrite: bool
) -> Diagnostic | None:
    """Return what prevents writing a small file outside a set, or None.

    ``option`` names the file on the command line.  ``inputs`` are never replaced, under any name.
    """
    elsewhere = f"{option} with another path"
    input_ids = {find_file_id(path) for path in inputs}
    problem = _name_of_others(Path(path), option)
    problem = problem or _location_problem(path, f"{option} with the name of a file", option)
    if problem is None and Path(path).exists() and find_file_id(path) in input_ids:
        return Diagnostic("destination", f"{path} is an input of this run", hint=elsewhere)
    problem = problem or _partial_problem(Path(path + PARTIAL), input_ids, elsewhere)
    if problem is None and not overwrite and is_there(path):
        hint = f"--overwrite, or {elsewhere}"
        return Diagnostic("destination", f"{path} exists already", hint=hint)
    return problem


def _mixing_problems(catalog: Catalog, target: Target) -> Iterator[Diagnostic]:
    """Yield the problems of outputs that lie in the folder of a source, or hide it."""
    root = os.path.realpath(catalog.root)
    has_folder = target.paths and (target.is_numbered or not target.is_merged)
    if has_folder and os.path.realpath(target.output_folder) == root:
        yield Diagnostic("destination", f"{catalog.root} is the source folder", hint=ELSEWHERE)
        return
    is_above = has_folder and Path(os.path.realpath(target.output_folder)) == Path(root).parent
    if is_above and Path(root).name in CHECKPOINT_FOLDERS and is_run_output(Path(root).parent):
        message, facts = "outputs in this folder hide the source", f"it is in {catalog.root}"
        where = target.output_folder
        yield Diagnostic("destination", message, hint=ELSEWHERE, facts=facts, where=where)
    outputs = target.paths.values()
    if any(is_inside(path, root) for path in {str(Path(path).parent) for path in outputs}):
        yield inside_problem(target.output_folder if has_folder else next(iter(outputs)), catalog)


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path leads to a folder or below it; links count."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def inside_problem(path: str, catalog: Catalog, option: str = "-o") -> Diagnostic:
    """Return the problem of an output in the folder of a source."""
    outside = os.path.normpath(Path(catalog.root, os.pardir, Path(os.path.abspath(path)).name))  # noqa: PTH100
    message, hint = f"inside the source folder {catalog.root}", f"{option} {quote(outside)}"
    return Diagnostic("destination", message, hint=hint, where=path)


def _name_of_others(path: Path, option: str) -> Diagnostic | None:
    final = final_name(path.name)
    if final is None:
        return None
    message, facts = "the name of a temporary file", f"a run that writes {final} removes it"
    hint = f"{option} {quote(str(path.with_name(final)))}"
    return Diagnostic("destination", message, hint=hint, facts=facts, where=str(path))


def _location_problem(name: str, hint: str, option: str) -> Diagnostic | None:
    """Return a problem if the folder or the name of an output prevents writing it.

    ``hint`` is for a folder, device or pipe that has the name, and ``option`` names the output.
    """
    path, elsewhere = Path(name), f"{option} with another path"
    folder = next(p for p in path.absolute().parents if os.path.lexists(p))
    if not folder.is_dir():
        what = "a file" if os.path.exists(folder) else "a link that leads nowhere"  # noqa: PTH110
        return Diagnostic("destination", f"{folder} is {what}, not a folder", hint=elsewhere)
    problem = access_problem(folder, os.W_OK | os.X_OK, elsewhere)
    if problem := problem or _name_problem(path, folder, option):
        return problem
    if name.endswith("/") or path.is_dir():
        what = "is" if path.is_dir() else "ends like"
        return Diagnostic("destination", f"{name} {what} a folder", hint=hint)
    if path.exists() and not path.is_file():
        return Diagnostic("destination", f"{path} is a device or a pipe", hint=hint)
    return None


def _name_problem(path: Path, folder: Path, option: str) -> Diagnostic | None:
    limit = os.pathconf(folder, "PC_NAME_MAX")  # -1 or 0 without a limit
    *folders, name = path.absolute().relative_to(folder).parts
    longest = max(len(os.fsencode(part)) for part in (*folders, name + PARTIAL))
    if limit <= 0 or longest <= limit:
        return None
    output = str(path).removesuffix(f".{MANIFEST}")
    message = f"the name is too long: {limit} bytes at most, with the suffixes of temporary files"
    return Diagnostic("destination", message, hint=f"{option} with a shorter name", where=output)


def _partial_problem(
    partial: Path, input_ids: Collection[FileId], elsewhere: str
) -> Diagnostic | None:
    """Return a problem if the temporary file of an output cannot be created."""
    try:
        status = partial.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        message = f"{partial} is in the way of the temporary file"
        return Diagnostic("destination", message, hint="move it away")
    what = "an input of this run" if (status.st_dev, status.st_ino) in input_ids else ""
    what = what or ("a complete output" if is_finished(partial) else "")
    if what:
        message = f"{partial} is {what} and has the name of the temporary file"
        return Diagnostic("destination", message, hint="rename it")
    return access_problem(partial, os.R_OK | os.W_OK, elsewhere)


def _find_stale_files(
    target: Target,
    options: OutputOptions,
    removed: Collection[str] = (),
    left: Collection[str] = (),
) -> Iterator[Diagnostic]:
    if target.paths and not target.is_merged:
        ranks = range(target.ranks) if options.ranks is None else options.ranks
        yield from stale_files(target.paths, ranks, removed, left)


def preflight(
    target: Target,
    plan: Plan | None,
    catalogs: Sequence[Catalog],
    inputs: Collection[str],
    options: OutputOptions,
    executor: Executor,
    open_progress: OpenProgress,
) -> tuple[Assignment | None, Diagnostics]:
    """Inspect the destination, and find everything that prevents a run from writing there.

    Return what the run writes and keeps, None without a plan; and problems, with errors of files
    that cannot be read.  None of ``inputs`` is replaced, by whatever name.
    """
    diagnostics = Diagnostics()
    assignment = None if plan is None else Assignment.of(plan, options)
    documents = [path for it in extensions(target, options) for path in it.documents]
    target = target if plan is None else plan.target
    if assignment is not None:
        target = target.limited_to(assignment.ranks)
    elif options.part is not None:  # only a plan decides which outputs belong to a part
        target = target.limited_to(())
    older, left = ([], []) if assignment is None else assignment.older_outputs()
    blocked = _blocked(target, inputs, documents, older)
    # The record is read later, so it names the run that has written what is there now.
    paths = [path for path in (*target.paths.values(), *documents) if path not in blocked]
    manifest = [target.manifest_path] if target.paths else []
    there, manifest = (list(filter(is_there, files)) for files in (paths, manifest))
    there += [] if manifest else older  # of a run that was killed while it replaced them
    if plan is not None and assignment is not None and not blocked:
        seen = Diagnostics()
        try:
            assignment = inspect_previous_run(assignment, executor, open_progress, seen)
            seen.add(*assignment.refusals)
            kept: Collection[str] = assignment.replaceable if options.resume else ()
            if assignment.refusals and options.resume:  # nobody knows what it could keep
                kept = {str(Path(path)) for path in target.paths.values()}
            seen.extend(_check_format_and_space(plan.limited_to(assignment.ranks), kept))
        except CkptToolError as error:
            diagnostics.failures.append(error)
        diagnostics.add(*seen.errors)
        if options.overwrite:
            seen.add(*_find_stale_files(target, options, older, left))
            if older:
                message = f"removes {count(len(older), 'output')} of the older set, at the end"
                facts = shorten(older, 3)
                seen.add(assignment.record.diagnostic("resumed", message, facts=facts))
        assignment = replace(assignment, notes=(*assignment.notes, *seen.of("note", "warning")))
    if assignment is not None and assignment.refusals:
        there = manifest = []  # a refusal says more than that a file exists
    # Without a plan nothing says whether a manifest matters whose outputs are gone.
    replaceable = frozenset(manifest) if assignment is None else assignment.replaceable
    existing = [path for path in there if str(Path(path)) not in replaceable]
    if not existing and not blocked:
        existing = [path for path in manifest if path not in replaceable]
    problems = _destination_problems(
        catalogs, target, blocked, options, existing, older, assignment
    )
    diagnostics.add(*problems, *(() if assignment is None else assignment.notes))
    return assignment, diagnostics
