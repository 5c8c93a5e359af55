"""Plan merge, split and reshard, and find everything that prevents them.

merge and split are reshard: merge reshards to one rank that holds full tensors, split reshards from
it.  All problems are collected before the first byte is written.  They are problems of the source,
of the target, and of the destination: formats, names, disk space, and files of an earlier run.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

from ckpttool.concurrency import InlineExecutor, OpenProgress, no_progress
from ckpttool.discovery.file_names import RANK_IN_NAME
from ckpttool.discovery.mindformers_output import CHECKPOINT_FOLDERS, is_run_output
from ckpttool.discovery.rank_folders import is_in_rank_folder
from ckpttool.errors import CkptToolError, PlanError
from ckpttool.formats import FORMAT_NAMES, format_of_suffix, get_format, suffix_of
from ckpttool.formats.local import why_not_a_path
from ckpttool.model.catalog import Catalog, MergedCatalog, RankCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import Diagnostic, Diagnostics
from ckpttool.model.dtypes import NOT_LOADED_FROM_SAFETENSORS
from ckpttool.model.manifest import JOURNAL, MANIFEST
from ckpttool.model.plan import NotInTarget, Plan, Target
from ckpttool.model.strategy import Merged, Strategy
from ckpttool.model.wording import format_ranks, shorten
from ckpttool.planning import targets
from ckpttool.planning.missing import find_incomplete_files
from ckpttool.planning.resolve import (
    ResolvedSources,
    ResolveOptions,
    no_strategy_error,
    resolve,
)
from ckpttool.planning.sources import not_full_message
from ckpttool.planning.targets import ShardedOutput, StrategySidecar
from ckpttool.storage.checksums import check_files
from ckpttool.storage.files import PARTIAL, access_problem, is_there
from ckpttool.transaction.manifest import changed_sources
from ckpttool.transaction.parts import files_of_others
from ckpttool.transaction.resume import Destination, DestinationPolicy, inspect_previous_run


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
        How to write parameters that the target strategy does not list; see
        `ckpttool.model.plan.Target`.
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

    def __post_init__(self) -> None:
        for name, choices in (("format", FORMAT_NAMES), ("not_in_target", get_args(NotInTarget))):
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

    def policy(self, open_progress: OpenProgress) -> DestinationPolicy:
        """Return the policy for existing files."""
        return DestinationPolicy(self.overwrite, self.resume, self.part, open_progress)


def choose_format(path: str, format: str | None, is_folder: bool = False) -> str:
    """Return the format of an output file: the given one, else that of its suffix, else HDF5.

    Parameters
    ----------
    path, format
        The file, and the requested format, if any.
    is_folder
        Whether ``path`` is a folder of numbered files, whose default format is safetensors.

    Raises
    ------
    PlanError
        The suffix is that of another format, or of none.
    """
    _refuse_url(path)
    by_name = format_of_suffix(path)
    if is_folder:
        if by_name is not None:
            reason = "ends like a file; --max-shard-size writes a folder, name that"
            text = f"{path} {reason} ({path.removesuffix(Path(path).suffix)})"
            raise PlanError([Diagnostic("options", text)])
        return format or "safetensors"
    if format is not None and by_name not in (None, format):
        reason = f"ends like {by_name}, but --format says {format}; leave --format away, or name"
        text = f"{path} {reason} {Path(path).with_suffix(suffix_of(format))}"
        raise PlanError([Diagnostic("options", text)])
    if format is None and by_name is None and re.search(r"\.[A-Za-z]\w*$", Path(path).name):
        reason = "no format has this ending; name a file that ends in .h5, .ckpt or .safetensors, "
        raise PlanError([Diagnostic("options", f"{path}: {reason}or give --format")])
    return format or by_name or "hdf5"


def rank_files(strategy: Strategy, folder: str, options: OutputOptions) -> Target:
    """Return the target that writes a file for each rank of a strategy, or for some of them.

    Raises
    ------
    PlanError
        The folder is a URL.
    ValueError
        An option applies to merged checkpoints only.
    """
    options.refuse("max_shard_bytes")
    _refuse_url(folder)
    format = options.format or "hdf5"
    paths = {
        rank: str(Path(folder, f"rank_{rank}", f"{options.prefix}{rank}{suffix_of(format)}"))
        for rank in (strategy.ranks if options.ranks is None else sorted(options.ranks))
    }
    return Target(
        format,
        paths,
        ranks=len(strategy.ranks),
        sharding=strategy,
        attrs=header_attrs(options.crc),
        not_in_target=options.not_in_target,
    )


def _refuse_url(path: str) -> None:
    url = why_not_a_path(path)
    if url is not None:
        raise PlanError([Diagnostic("destination", f"{path}: {url}")])


def header_attrs(crc: bool) -> dict[str, str]:
    """Return the attributes of every output's header: an empty checksum with ``crc``."""
    return {"crc_num": ""} if crc else {}


def _check_format_and_space(plan: Plan, kept: Collection[str]) -> Diagnostics:
    """Check the limits of the output format, and the disk space for outputs not ``kept``."""
    found = Diagnostics()
    format = get_format(plan.target.format)
    refused: dict[str, None] = {}
    dtypes: set[str] = set()
    need: dict[Path, int] = defaultdict(int)
    sizes: dict[int, int] = {}
    replaced = 0
    for ranks, metas in plan.headers.items():
        refusals = list(format.refusals(metas, plan.target.attrs))
        refused |= dict.fromkeys(refusals)
        dtypes |= {meta.dtype for meta in metas}
        nbytes = 0 if refusals else format.file_bytes(metas, plan.target.attrs)
        sizes |= dict.fromkeys(ranks, nbytes)
    for rank, path in plan.target.paths.items():
        folder = Path(path).absolute()
        while not folder.exists():
            folder = folder.parent
        if str(Path(path)) not in kept:
            replaced += is_there(path)
            need[folder if folder.is_dir() else folder.parent] += sizes[rank] - _partial_bytes(path)
    found.add(*Diagnostic.each("destination", refused))
    if plan.target.format == "safetensors" and dtypes & NOT_LOADED_FROM_SAFETENSORS:
        words = ", ".join(sorted(dtypes & NOT_LOADED_FROM_SAFETENSORS))
        text = f"MindSpore 2.10 does not load {words} from safetensors"
        found.add(Diagnostic("format", text))
    has_checksum = "crc_num" in plan.target.attrs
    if plan.target.format == "safetensors" and has_checksum and "BFloat16" in dtypes:
        text = "MindSpore 2.10 does not verify checksums of safetensors with BFloat16 in them: it "
        found.add(Diagnostic("format", f"{text}fails; load these without crc_check"))
    by_device: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in need.items():
        first, total = by_device.get(folder.stat().st_dev, (folder, 0))
        by_device[folder.stat().st_dev] = (first, total + nbytes)
    for folder, nbytes in by_device.values():
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if nbytes > free:
            also = ", and what is replaced stays until then" if replaced else ""
            text = f"{nbytes:,} bytes are to be written, {free:,} are free on this disk"
            found.add(Diagnostic("destination", f"{folder}: {text}{also}"))
    return found


def _partial_bytes(path: str) -> int:
    """Return the disk space of the temporary file of a killed run, which will be replaced."""
    try:
        return Path(path + PARTIAL).lstat().st_blocks * 512
    except OSError:
        return 0


IS_INPUT = "is an input of this run"

FileId = tuple[int, int]  # device and inode


def destination_problems(
    source: Catalog,
    target: Target,
    inputs: Collection[str],
    overwrite: bool,
    documents: Collection[str] = (),
    replaceable: Collection[str] = (),
) -> Iterator[str]:
    """Yield messages of everything that prevents writing the outputs under their names.

    Parameters
    ----------
    source
        The source.
    target
        The outputs.
    inputs
        All files that are read; none of them is replaced, by whatever name.
    overwrite
        Whether to replace other files.
    documents
        Small files that are written with the outputs.
    replaceable
        Outputs that are replaced even without ``overwrite``; see
        `ckpttool.transaction.resume.Destination`.
    """
    blocked = _blocked(target, inputs, documents)
    yield from dict.fromkeys(blocked.values())
    paths = [*target.paths.values(), *documents]
    manifest = [target.manifest_path] if target.paths else []
    files = [path for path in paths if is_there(path) and path not in blocked]
    existing = [path for path in files if str(Path(path)) not in replaceable]
    if not existing and not blocked:
        existing = [path for path in manifest if is_there(path) and path not in replaceable]
    if existing and not overwrite:
        have = f"{existing[0]} exists already"
        if len(existing) > 1:
            have = f"{len(existing)} outputs exist already ({shorten(existing, 3)})"
        yield f"{have}; --overwrite replaces what is there"
    yield from _mixing_problems(source, target)
    if target.is_merged:
        return
    stale = None if overwrite or blocked else _stale_files_message(target)
    if stale:
        yield f"{stale}; move it away, write to another folder, or keep it with --overwrite"


def _blocked(target: Target, inputs: Collection[str], documents: Collection[str]) -> dict[str, str]:
    """Return path to message for outputs that cannot be written even with ``--overwrite``.

    Outputs with the same cause have the same message.
    """
    input_ids = {_file_id(Path(path)) for path in inputs}
    paths = [*target.paths.values(), *documents, *([target.manifest_path] if target.paths else [])]
    found = {path: text for path in paths for text in _output_problems(path, input_ids)}
    inputs = [path for path, text in found.items() if text == IS_INPUT]
    have = f"{len(inputs)} outputs are inputs of this run ({shorten(inputs, 3)})"
    have = f"{Path(inputs[0])}: {IS_INPUT}" if len(inputs) == 1 else have
    return found | dict.fromkeys(inputs, f"{have}; write somewhere else")


def _mixing_problems(source: Catalog, target: Target) -> Iterator[str]:
    """Yield messages of outputs that the next scan of the source would read."""
    root, files = os.path.realpath(source.root), source.files.values()
    has_folder = target.paths and (target.is_numbered or not target.is_merged)
    if has_folder and os.path.realpath(target.output_folder) == root:
        yield f"{source.root}: is the source folder; write to another"
        return
    is_above = has_folder and Path(os.path.realpath(target.output_folder)) == Path(root).parent
    if is_above and Path(root).name in CHECKPOINT_FOLDERS and is_run_output(Path(root).parent):
        text = "what is written there would be taken for the checkpoint of that run, in the place"
        yield f"{target.output_folder}: {text} of {source.root}; write to another folder"
    if not isinstance(source, RankCatalog):
        return  # only the named files are read
    homes = {os.path.realpath(Path(path).parent) for file in files for path in file.paths}
    homes |= {os.path.realpath(Path(error.path).parent) for error in source.damaged.values()}
    mixed: dict[str, list[str]] = {}
    outputs = map(Path, target.paths.values())
    for path in (path for path in outputs if format_of_suffix(path.name) is not None):
        folder = os.path.realpath(path.parent)
        is_home = folder in homes and (folder != root or RANK_IN_NAME.search(path.name))
        if is_home or is_in_rank_folder(root, folder):
            mixed.setdefault(str(path.parent), []).append(str(path))
    for name, paths in mixed.items():
        text = f"{shorten(paths, 3)}: would be taken for a file of the source, which is read from"
        yield f"{text} {name}; write to a folder outside of it"


def _output_problems(name: str, input_ids: Collection[FileId]) -> Iterator[str]:
    """Yield a message if one output cannot be written."""
    path, partial = Path(name), Path(name + PARTIAL)
    folder = next(p for p in path.absolute().parents if os.path.lexists(p))
    if not folder.is_dir():
        what = "a file" if os.path.exists(folder) else "a link that leads nowhere"  # noqa: PTH110
        yield f"{folder}: is {what}; name a folder to write to"
    elif problem := access_problem(folder, os.W_OK | os.X_OK) or _name_problem(path, folder):
        yield problem
    elif name.endswith("/") or path.is_dir():
        what = "is" if path.is_dir() else "ends like that of"
        yield f"{name}: {what} a folder; name the file to be written"
    elif path.exists() and not path.is_file():
        yield f"{path}: is a device or a pipe; name a file to be written"
    elif path.exists() and _file_id(path) in input_ids:
        yield IS_INPUT  # `_blocked` joins the messages of several inputs
    else:
        yield from _partial_problems(partial, input_ids)


def _name_problem(path: Path, folder: Path) -> str | None:
    """Return a message if a name, or that of a temporary file next to it, is too long."""
    limit = os.pathconf(folder, "PC_NAME_MAX")  # -1 or 0 without a limit
    *folders, name = path.absolute().relative_to(folder).parts
    longest = max(len(os.fsencode(part)) for part in (*folders, name + PARTIAL, name + JOURNAL))
    if limit <= 0 or longest <= limit:
        return None
    output = str(path).removesuffix(f".{MANIFEST}")
    text = f"names may have {limit} bytes there, and that of a file beside it would have more"
    return f"{output}: {text}; give it a shorter one"


def _partial_problems(partial: Path, input_ids: Collection[FileId]) -> Iterator[str]:
    """Yield a message if the temporary file of an output cannot be created."""
    try:
        found = partial.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        yield f"{partial}: is in the way of the temporary file; move it away"
    elif (found.st_dev, found.st_ino) in input_ids:
        yield f"{partial}: an input of this run has the name of the temporary file; rename it"
    elif problem := access_problem(partial, os.R_OK | os.W_OK):
        yield problem


def _file_id(path: Path) -> FileId:
    found = path.stat()
    return found.st_dev, found.st_ino


def _stale_files_message(target: Target) -> str | None:
    """Return a message if there are files of ranks or formats that the target does not have."""
    if target.is_merged:
        return None
    first = list(target.paths.items())[:1]
    stale = [path for one in first for path in files_of_others(*one, range(target.ranks))]
    beyond = f"not of the {target.ranks} ranks of the target in its format, so left from another"
    return f"{shorten(stale, 3)}: {beyond} run" if stale else None


def _plan_and_check(
    catalog: Catalog,
    strategy: Strategy | Merged | None,
    refusal: CkptToolError | None,
    target: Target,
    options: ResolveOptions,
    policy: DestinationPolicy,
    executor: Executor | None,
    extension: ShardedOutput | StrategySidecar | None = None,
) -> tuple[Plan, Destination]:
    """Resolve a source, plan its transfer, and check the destination.

    Parameters
    ----------
    catalog, strategy
        The source and its layouts; see `resolve`.
    refusal
        An error if the command does not accept the source, else None.
    target
        The outputs.
    options, policy
        How to resolve the source, and how to treat existing files.
    executor
        Reads contents where they decide; by default the caller's own thread.
    extension
        Completes the plan with documents, if there are any.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error.
    """
    executor = executor or InlineExecutor()
    diagnostics = Diagnostics(strict=options.strict)
    resolved, plan = None, None
    try:
        if refusal is not None:
            raise refusal
        resolved = resolve(catalog, strategy, options, executor, diagnostics)
        plan = targets.plan(resolved, target, diagnostics)
        if plan is not None and extension is not None:
            plan = extension.complete(plan, diagnostics)
    except CkptToolError as error:
        diagnostics.failures.append(error)
    checksum_errors, notes = check_files(catalog, executor, "crc_num" in target.attrs)
    diagnostics.add(*notes)
    if resolved is not None:
        _check_contents(resolved, plan, diagnostics)
    if plan is not None:
        if extension is not None:
            diagnostics.add(*Diagnostic.each("destination", extension.problems(plan)))
        plan = replace(plan, notes=diagnostics.of("note", "warning"))
    source_files = resolved.sharding.files if resolved else strategy.files if strategy else ()
    found = Diagnostics()
    destination = preflight(
        target if plan is None else plan.target,
        plan,
        catalog,
        inputs=[*_files(catalog), *source_files, *target.sharding.files],
        documents=[] if extension is None else extension.documents,
        policy=policy,
        executor=executor,
        diagnostics=found,
    )
    diagnostics.extend(found)
    diagnostics.add(*destination.notes)
    diagnostics.failures[:0] = checksum_errors
    if catalog.errors():  # first, since what else is wrong may follow from them
        diagnostics.failures.insert(0, PlanError(catalog.errors()))
    has_errors = bool(diagnostics.failures or diagnostics.errors)
    if has_errors and (changed := changed_sources(catalog)):
        raise PlanError([*Diagnostic.each("changed", changed), *found.errors])
    diagnostics.raise_if_errors()
    assert plan is not None, "else there is an error"
    return plan, destination


def _check_contents(resolved: ResolvedSources, plan: Plan | None, diagnostics: Diagnostics) -> None:
    """Add the problems that contents show, and those of a merged source that may be slices."""
    catalog, sharding = resolved.catalog, resolved.sharding
    if isinstance(sharding, Merged) or isinstance(catalog, MergedCatalog):
        diagnostics.add(*Diagnostic.each("strategy", filter(None, [not_full_message(catalog)])))
    elif plan is not None and not resolved.is_deduplicated:
        diagnostics.add(
            *(
                replace(one, message=f"{one.message}; these are read")
                for one in find_incomplete_files(catalog, resolved.sources)
                if one.code == "lacking"
            )
        )
    diagnostics.add(*resolved.content_diagnostics)


def _files(catalog: Catalog) -> list[str]:
    """Return the paths of all existing files of a source, also of damaged ones."""
    damaged = (error.path for error in catalog.damaged.values())
    return [*catalog.paths, *(path for path in damaged if os.access(path, os.F_OK))]


def preflight(
    target: Target,
    plan: Plan | None,
    source: Catalog,
    inputs: Sequence[str],
    documents: Sequence[str],
    policy: DestinationPolicy,
    executor: Executor,
    diagnostics: Diagnostics,
) -> Destination:
    """Inspect the destination, and find everything that prevents a run from writing there.

    Parameters
    ----------
    target
        The outputs.
    plan
        Their plan; None if problems of the source prevent one.
    source
        The source.
    inputs
        All files that are read.
    documents
        Small files that are written with the outputs.
    policy
        How to treat existing files, and which outputs this run writes.
    executor
        Reads outputs of an earlier run where their contents decide.
    diagnostics
        Collects problems, and errors of files that cannot be read.
    """
    found = Destination(tuple(target.paths) if policy.part is None else ())
    if plan is not None:  # only a plan decides which outputs belong to a part
        found = Destination.of(plan, policy)
    target = target.limited_to(found.ranks)
    own_documents = documents if policy.part is None else ()
    if plan is not None and not _blocked(target, inputs, own_documents):
        seen = Diagnostics()
        try:
            found = inspect_previous_run(plan, found, policy, executor, seen)
            kept = found.replaceable if policy.resume else ()
            seen.extend(_check_format_and_space(plan.limited_to(found.ranks), kept))
        except CkptToolError as error:
            diagnostics.failures.append(error)
        diagnostics.add(*seen.errors)
        if policy.overwrite and (stale := _stale_files_message(target)) is not None:
            text = f"{stale}; it stays, and is taken for a part of this set: move it away"
            seen.add(Diagnostic("stale", text))
        found = replace(found, notes=(*found.notes, *seen.of("note", "warning")))
    problems = destination_problems(
        source, target, inputs, policy.overwrite, documents, found.replaceable
    )
    diagnostics.add(*Diagnostic.each("destination", problems))
    return found


def plan_merge(
    catalog: Catalog,
    strategy: Strategy | None,
    path: str,
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Destination]:
    """Plan a merge into one file, or into numbered files with an index; for `execute`.

    Parameters
    ----------
    catalog
        The source, from `scan`.
    strategy
        The layouts.  None for a source that holds full tensors, for a checkpoint that describes
        itself, and for replicated ranks.
    path
        The output file; a folder with ``max_shard_bytes``.
    resolve_options
        How the source is resolved to full tensors.
    output_options
        Options of the outputs.
    executor
        Reads contents where they decide; by default the caller's own thread.
    open_progress
        Called with the number of bytes to read if outputs of an earlier run are verified.  It
        returns a context manager, which returns a function to call with the bytes read since the
        last call.

    Returns
    -------
    plan, destination
        The outputs, and the state of their files now.

    Raises
    ------
    FormatError, PlanError
        All problems, in one error.
    ValueError
        An option applies to outputs for ranks only.
    """
    output = output_options
    output.refuse("prefix", "ranks", "not_in_target", "strategy_path")
    format = choose_format(path, output.format, is_folder=output.max_shard_bytes is not None)
    target, numbered = Target(format, {0: path}, attrs=header_attrs(output.crc)), None
    if output.max_shard_bytes is not None:
        numbered = ShardedOutput(path, format, output.max_shard_bytes, header_attrs(output.crc))
        target = numbered.target()
    return _plan_and_check(
        catalog,
        strategy,
        None,
        target,
        resolve_options,
        output.policy(open_progress),
        executor,
        numbered,
    )


def plan_split(
    catalog: Catalog,
    strategy: Strategy,
    folder: str,
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Destination]:
    """Plan to shard a full checkpoint for the ranks of ``strategy``; for `execute`.

    Parameters
    ----------
    catalog
        The source, from `scan`: one file, several with an index, a folder with the file of one
        rank, replicated ranks, or a checkpoint that describes itself.
    strategy
        Layouts of the target.
    folder
        The output folder, which will hold the rank folders.
    resolve_options
        How the source is resolved; ``unlisted`` also applies to tensors that may be slices of one
        rank.
    output_options
        Options of the outputs.
    executor, open_progress
        As for `plan_merge`.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error.
    ValueError
        An option applies to merged checkpoints only.
    """
    is_full = not (resolve_options.replicated or isinstance(catalog, SelfDescribedCatalog))
    return _plan_and_check(
        catalog,
        Merged() if is_full else None,
        _several_ranks_error(catalog) if is_full else None,
        rank_files(strategy, folder, output_options),
        resolve_options,
        output_options.policy(open_progress),
        executor,
        _sidecar(output_options),
    )


def _several_ranks_error(catalog: Catalog) -> PlanError | None:
    """Return the error of a source that is not one full checkpoint: files of several ranks."""
    found = sorted({*catalog.files, *catalog.damaged})
    if isinstance(catalog, MergedCatalog) or len(found) < 2:
        return None
    text = f"{catalog.root}: {format_ranks(found)} found; split takes one full checkpoint: use "
    text += "reshard with the strategy of these ranks (-s STRATEGY), or say --replicated if "
    return PlanError([Diagnostic("strategy", f"{text}every rank holds everything")])


def _sidecar(options: OutputOptions) -> StrategySidecar | None:
    path = options.strategy_path
    return None if path is None else StrategySidecar(path, options.part is not None)


def plan_reshard(
    catalog: Catalog,
    src_strategy: Strategy | None,
    dst_strategy: Strategy,
    folder: str,
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Destination]:
    """Plan to shard a checkpoint for the ranks of ``dst_strategy``; for `execute`.

    Parameters
    ----------
    catalog, src_strategy
        The source, from `scan`, and its layouts; None for a checkpoint that describes itself.
    dst_strategy
        Layouts of the target.
    folder, output_options
        As for `plan_split`.
    resolve_options, executor, open_progress
        As for `plan_merge`.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error.
    ValueError
        An option applies to merged checkpoints only.
    """
    refusal = None
    is_described = isinstance(catalog, SelfDescribedCatalog)
    if src_strategy is None and not is_described and not resolve_options.replicated:
        is_merged = isinstance(catalog, MergedCatalog)
        other = "or use split if it holds everything undivided" if is_merged else ""
        refusal = no_strategy_error(catalog, other)
    return _plan_and_check(
        catalog,
        src_strategy,
        refusal,
        rank_files(dst_strategy, folder, output_options),
        resolve_options,
        output_options.policy(open_progress),
        executor,
        _sidecar(output_options),
    )
