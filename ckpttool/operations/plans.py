"""Plan merge, split and reshard.

merge and split are reshard: merge reshards to one rank that holds full tensors, split reshards from
it.  All problems are collected before the first byte is written: those of the source, of the target
and of the destination.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

from ckpttool._version import __version__
from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.checkpoint.resolve import no_strategy_error
from ckpttool.checks.manifest import check_source
from ckpttool.concurrency import InlineExecutor, OpenProgress, no_progress
from ckpttool.formats import FORMAT_NAMES, format_of_suffix, suffix_of
from ckpttool.formats.base import PROVENANCE
from ckpttool.formats.local import is_visible, read_file, url_problem
from ckpttool.model.catalog import Catalog
from ckpttool.model.plan import NotInTarget, Plan, Target
from ckpttool.model.strategy import Strategy
from ckpttool.operations.source import resolve
from ckpttool.planning import targets
from ckpttool.planning.preflight import format_option, preflight
from ckpttool.planning.targets import ShardedOutput, StrategySidecar
from ckpttool.problems import CkptToolError, Diagnostic, Diagnostics, PlanError
from ckpttool.storage.checksums import check_files
from ckpttool.transaction.resume import Assignment, DestinationPolicy
from ckpttool.transaction.sources import changed_sources
from ckpttool.wording import format_ranks


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
        choices = self.overwrite, self.resume, self.part, self.no_locks, self.command
        return DestinationPolicy(*choices, open_progress)


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
            text = "--max-shard-size writes a folder, and the name is that of a file"
            hint = f"-o {path.removesuffix(Path(path).suffix)}"
            raise PlanError([Diagnostic("options", text, hint=hint, where=path)])
        return format or "safetensors"
    if format is not None and by_name not in (None, format):
        text = f"the suffix is that of {by_name}, but --format is {format}"
        hint = f"{format_option(path, format)}, or no --format"
        raise PlanError([Diagnostic("options", text, hint=hint, where=path)])
    if format is None and by_name is None and re.search(r"\.[A-Za-z]\w*$", Path(path).name):
        text = "the suffix is not that of a format"
        hint = "a name that ends in .h5, .ckpt or .safetensors, or --format"
        raise PlanError([Diagnostic("options", text, hint=hint, where=path)])
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
        strategy=strategy,
        attrs=header_attrs(options.crc),
        not_in_target=options.not_in_target,
    )


def _refuse_url(path: str) -> None:
    if (problem := url_problem(path)) is not None:
        what, hint = problem
        raise PlanError([Diagnostic("destination", what, hint=hint, where=path)])


def header_attrs(crc: bool) -> dict[str, str]:
    """Return the attributes of every output's header: an empty checksum with ``crc``."""
    return {"crc_num": ""} if crc else {}


def _provenance_of(catalog: Catalog, src: Strategy | None, dst: Strategy | None) -> dict[str, str]:
    """Return the attributes that say how the outputs of a run are made.

    They name no folder above the source, no host and no time, so equal inputs give equal outputs.
    A strategy is the SHA-256 of its files, one behind the other (``cat FILES | sha256sum``).
    Outputs of a checkpoint that ckpttool wrote keep its step and its strategy.
    """
    kept = dict(set.intersection(*({*one.attrs.items()} for one in catalog.files.values())))
    name = os.fsencode(Path(os.path.abspath(catalog.root)).name)  # noqa: PTH100, it resolves ".."
    found = {
        "version": __version__,
        "source": name.decode(errors="replace"),
        "step": catalog.step or kept.get(f"{PROVENANCE}step"),
        "src_strategy": _hash_strategy(src) or kept.get(f"{PROVENANCE}src_strategy"),
        "dst_strategy": _hash_strategy(dst),
    }
    return {f"{PROVENANCE}{key}": text for key, text in found.items() if text}


def _hash_strategy(strategy: Strategy | None) -> str | None:
    """Return the hash of the files that a strategy was read from; None for no files."""
    if strategy is None or not strategy.files:
        return None
    state = hashlib.sha256()
    for path in dict.fromkeys(strategy.files):
        state.update(read_file(path))
    return f"sha256:{state.hexdigest()}"


@dataclass(frozen=True, slots=True)
class _Source:
    """The source of a conversion.

    Attributes
    ----------
    catalog, strategy, options
        The files, their layouts and how they are resolved; see `resolve`.
    refusal
        An error if the command does not accept the source, else None.
    by_file
        Whether it is one file of full tensors, whatever its folder.
    """

    catalog: Catalog
    strategy: Strategy | None
    options: ResolveOptions
    refusal: CkptToolError | None = None
    by_file: bool = False


def _plan_and_check(
    source: _Source,
    target: Target,
    policy: DestinationPolicy,
    executor: Executor | None,
    extension: ShardedOutput | StrategySidecar | None = None,
) -> tuple[Plan, Assignment]:
    """Resolve a source, plan its transfer, and check the destination.

    Parameters
    ----------
    source
        The source.
    target
        The outputs.
    policy
        How to treat existing files.
    executor
        Reads contents where they decide; by default the caller's own thread.
    extension
        Completes the plan with documents, if there are any.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error.
    """
    catalog, strategy, options = source.catalog, source.strategy, source.options
    executor = executor or InlineExecutor()
    diagnostics = Diagnostics(strict=options.strict)
    checkpoint, plan = None, None
    of_target = Diagnostics(strict=options.strict)
    is_compared = options.manifest != "ignore"
    listed = check_source(catalog, executor, diagnostics) if is_compared else {}
    try:
        if source.refusal is not None:
            raise source.refusal
        checkpoint = resolve(
            *(catalog, strategy, options, executor, diagnostics),
            by_file=source.by_file,
            open_progress=policy.open_progress,
        )
        with policy.open_progress(0, "planning"):
            plan = targets.plan(checkpoint, target, of_target)
            diagnostics.extend(of_target)
            if plan is not None:
                src = checkpoint.strategy if catalog.description is None else None
                provenance = _provenance_of(catalog, src, target.strategy)
                plan = replace(plan, provenance=provenance, listed=listed)
            if plan is not None and extension is not None:
                plan = extension.complete(plan, diagnostics)
    except CkptToolError as error:
        diagnostics.failures.append(error)
    crc = "crc_num" in target.attrs
    files = catalog.files.values()
    has_checks = crc or any(file.cipher is not None for file in files)
    nbytes = sum(file.nbytes for file in files)
    show_phase = policy.open_progress if has_checks else no_progress
    with show_phase(nbytes, "verifying checksums") as on_progress:
        checksum_errors, notes = check_files(catalog, executor, crc, on_progress)
    diagnostics.add(*notes)
    if plan is not None:
        if extension is not None:
            diagnostics.add(*extension.problems(plan))
        plan = replace(plan, notes=diagnostics.of("note", "warning"))
    strategies = (checkpoint.strategy if checkpoint else strategy, target.strategy)
    found = Diagnostics()
    assignment = preflight(
        target if plan is None else plan.target,
        plan,
        catalog,
        inputs=[*_files(catalog), *(name for one in strategies if one for name in one.files)],
        documents=[] if extension is None else extension.documents,
        policy=policy,
        executor=executor,
        diagnostics=found,
    )
    diagnostics.extend(found)
    diagnostics.add(*(assignment.notes if assignment is not None else ()))
    diagnostics.failures[:0] = checksum_errors
    if catalog.errors():  # first, since what else is wrong may follow from them
        diagnostics.failures.insert(0, PlanError(catalog.errors()))
    has_errors = bool(diagnostics.failures or diagnostics.errors)
    if has_errors and (changed := changed_sources(catalog)):
        raise PlanError([*changed, *found.errors])
    diagnostics.raise_if_errors()
    assert plan is not None, "else there is an error"
    assert assignment is not None, "there is a plan"
    return plan, assignment


def _files(catalog: Catalog) -> list[str]:
    """Return the paths of all existing files of a source, also of damaged ones."""
    damaged = (error.path for error in catalog.damaged.values())
    return [*catalog.paths, *(path for path in damaged if is_visible(path))]


def plan_merge(
    catalog: Catalog,
    strategy: Strategy | None,
    path: str,
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Assignment]:
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
    plan, assignment
        The outputs, and which of them this run writes, keeps and may replace.

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
    attrs = header_attrs(output.crc)
    if format == "safetensors":
        attrs["format"] = "pt"  # all loaders accept this mark; see `ckpttool.formats.safetensors`
    target, numbered = Target(format, {0: path}, attrs=attrs), None
    if output.max_shard_bytes is not None:
        numbered = ShardedOutput(path, format, output.max_shard_bytes, attrs)
        target = numbered.target()
    source = _Source(catalog, strategy, resolve_options)
    return _plan_and_check(source, target, output.policy(open_progress), executor, numbered)


def plan_split(
    catalog: Catalog,
    strategy: Strategy,
    folder: str,
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Assignment]:
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
    is_full = not (resolve_options.replicated or catalog.description is not None)
    refusal = _several_ranks_error(catalog) if is_full else None
    source = _Source(catalog, None, resolve_options, refusal, by_file=is_full)
    return _plan_ranks(source, strategy, folder, output_options, executor, open_progress)


def _several_ranks_error(catalog: Catalog) -> PlanError | None:
    """Return the error of a source that is not one full checkpoint: files of several ranks."""
    found = sorted({*catalog.files, *catalog.damaged})
    if catalog.is_merged or len(found) < 2:
        return None
    text = f"split takes one merged checkpoint, found {format_ranks(found)}"
    hint = "`ckpttool reshard`, or --replicated if every rank holds the whole model"
    ranks = tuple(found)
    return PlanError([Diagnostic("strategy", text, hint=hint, ranks=ranks, where=catalog.root)])


def _plan_ranks(
    source: _Source,
    strategy: Strategy,
    folder: str,
    options: OutputOptions,
    executor: Executor | None,
    open_progress: OpenProgress,
) -> tuple[Plan, Assignment]:
    """Plan the files of ranks, and their strategy file if it is requested."""
    path = options.strategy_path
    sidecar = None if path is None else StrategySidecar(path, options.part is not None)
    target = rank_files(strategy, folder, options)
    return _plan_and_check(source, target, options.policy(open_progress), executor, sidecar)


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
) -> tuple[Plan, Assignment]:
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
    is_described = catalog.description is not None
    if src_strategy is None and not is_described and not resolve_options.replicated:
        refusal = no_strategy_error(catalog, "-s STRATEGY")
    source = _Source(catalog, src_strategy, resolve_options, refusal)
    return _plan_ranks(source, dst_strategy, folder, output_options, executor, open_progress)
