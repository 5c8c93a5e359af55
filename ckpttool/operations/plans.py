"""Plan merge, split, reshard, convert and average.

merge and split are reshard: merge reshards to one rank that holds full tensors, split reshards from
it.  convert writes each file of the source again, so it needs no strategy.  All problems are
collected before the first byte is written: those of the source, of the target and of the
destination.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import chain
from pathlib import Path
from shlex import quote

from msgspec import Struct
from msgspec.structs import replace

from ckpttool._version import __version__
from ckpttool.checkpoint.checkpoint import Checkpoint, ResolveOptions
from ckpttool.checkpoint.evidence import Evidence
from ckpttool.checkpoint.interpret import Files
from ckpttool.checkpoint.presence import REDUNDANCY_KEY
from ckpttool.checkpoint.recorded import read_kept, with_names_of_files
from ckpttool.checkpoint.resolve import no_strategy_error
from ckpttool.concurrency import InlineExecutor, OpenProgress, no_progress
from ckpttool.formats import FORMATS, format_of_suffix, suffix_of
from ckpttool.formats.base import PROVENANCE
from ckpttool.formats.local import is_visible, read_file, url_problem
from ckpttool.model.catalog import Catalog
from ckpttool.model.choices import TensorOptions
from ckpttool.model.plan import Kept, NotInTarget, Plan, Target
from ckpttool.model.strategy import Strategy
from ckpttool.operations.look import Sight, Subject, look
from ckpttool.planning import targets
from ckpttool.planning.averaging import AverageInput, average
from ckpttool.planning.metadata import carry_metadata
from ckpttool.planning.naming import ResumeRecords, name_files
from ckpttool.planning.needs import needed_slices
from ckpttool.planning.preflight import format_option, preflight
from ckpttool.planning.targets import ShardedOutput, StrategySidecar, numbered_target
from ckpttool.problems import CkptToolError, Diagnostic, Diagnostics, PlanError
from ckpttool.transaction.resume import Assignment, OutputOptions
from ckpttool.transaction.sources import changed_sources
from ckpttool.wording import any_of, format_numbers, format_ranks, shorten

_NOTHING_KEPT = Kept()  # of a manifest, unless files are written again
_OF_RANK_FILES = ("prefix", "name", "mindformers", "not_in_target", "strategy_path")  # options


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
            text = "numbered files go into a folder, and the name is that of a file"
            hint = f"-o {quote(path.removesuffix(Path(path).suffix))}"
            raise PlanError([Diagnostic("options", text, hint=hint, where=path)])
        return format or "safetensors"
    if format is not None and by_name not in (None, format):
        text = f"the suffix is that of {by_name}, but the format is {format}"
        hint = f"{format_option(path, format)}, or no --format"
        raise PlanError([Diagnostic("options", text, hint=hint, where=path)])
    if format is None and by_name is None and re.search(r"\.[A-Za-z]\w*$", Path(path).name):
        text = "the suffix is not that of a format"
        hint = f"a name that ends in {any_of(map(suffix_of, FORMATS))}, or --format"
        raise PlanError([Diagnostic("options", text, hint=hint, where=path)])
    return format or by_name or "hdf5"


def refuse_file_name(folder: str, format: str | None) -> None:
    """Raise `PlanError` if the folder of rank folders has the name of a file."""
    if (by_name := format_of_suffix(folder)) is not None:
        text = "a folder of rank folders is written, and the name is that of a file"
        hint = f"-o {quote(folder.removesuffix(Path(folder).suffix))}"
        hint = hint if by_name == format else f"--format {by_name} {hint}"
        raise PlanError([Diagnostic("options", text, hint=hint, where=folder)])


def rank_files(strategy: Strategy, folder: str, options: OutputOptions, catalog: Catalog) -> Target:
    """Return the target that writes a file for each rank of a strategy, or for some of them.

    Raises
    ------
    PlanError
        The folder is a URL, or has the suffix of a file; or see `name_files`.
    ValueError
        An option applies to merged checkpoints only.
    """
    options.refuse("max_shard_bytes")
    _refuse_url(folder)
    refuse_file_name(folder, options.format)
    format = options.format or "hdf5"
    ranks = strategy.ranks if options.ranks is None else sorted(options.ranks)
    names = name_files(catalog, ranks, format, options)
    paths = {rank: str(Path(folder, f"rank_{rank}", name)) for rank, name in names.items()}
    return Target(
        format,
        paths,
        ranks=len(strategy.ranks),
        strategy=strategy,
        attrs=header_attrs(options.crc),
    )


def _refuse_url(path: str) -> None:
    if (problem := url_problem(path)) is not None:
        what, hint = problem
        raise PlanError([Diagnostic("destination", what, hint=hint, where=path)])


def header_attrs(crc: bool) -> dict[str, str]:
    """Return the attributes of every output's header: an empty checksum with ``crc``."""
    return {"crc_num": ""} if crc else {}


def _provenance_of(
    catalog: Catalog, checkpoint: Checkpoint, dst: Strategy | None, files: Files
) -> dict[str, str]:
    """Return the attributes that say how the outputs of a run are made.

    They name no folder above the source, no host and no time, so equal inputs give equal outputs.
    A strategy is the SHA-256 of its files, one behind the other (``cat FILES | sha256sum``).
    Outputs of a checkpoint that ckpttool wrote keep its step and its strategy, and files that are
    written again keep the strategy of their ranks.
    """
    kept = catalog.common_attrs
    src = checkpoint.strategy if checkpoint.strategy.layouts else None
    name = os.fsencode(Path(os.path.abspath(catalog.root)).name)  # noqa: PTH100, it resolves ".."
    found = {
        "version": __version__,
        "source": name.decode(errors="replace"),
        "step": catalog.step or kept.get(f"{PROVENANCE}step"),
        "src_strategy": _hash_strategy(src) or kept.get(f"{PROVENANCE}src_strategy"),
        "dst_strategy": _hash_strategy(dst),
    }
    if files == "kept":
        found |= {key: kept.get(f"{PROVENANCE}{key}") for key in ("dst_strategy", "dtype")}
    if casts := checkpoint.options.tensors.casts:
        found["dtype"] = " ".join(sorted(one.text for one in casts))
    return {f"{PROVENANCE}{key}": text for key, text in found.items() if text}


def _hash_strategy(strategy: Strategy | None) -> str | None:
    """Return the hash of the files that a strategy was read from; None for no files."""
    if strategy is None or not strategy.files:
        return None
    state = hashlib.sha256()
    for path in dict.fromkeys(strategy.files):
        state.update(read_file(path))
    return f"sha256:{state.hexdigest()}"


class Planned(Struct, frozen=True):
    """What is to be made of a source, and all that is wrong.

    Attributes
    ----------
    sight
        The source.
    target
        What is to be made.
    plan
        What would be written; None if something is wrong.
    found
        What is wrong with the source, and with the target.
    """

    sight: Sight
    target: Target
    plan: Plan | None
    found: Diagnostics


def plan_conversion(
    sources: Sequence[Subject],
    target: Target,
    options: OutputOptions,
    executor: Executor | None,
    open_progress: OpenProgress,
    weights: Sequence[float] = (),
    kept: Kept = _NOTHING_KEPT,
) -> tuple[Plan, Assignment]:
    """Plan what every conversion does: look at the source, plan, check the destination.

    Nothing is written.  Several sources are averaged with their ``weights``.  Of files that are
    written again, ``kept`` is what their manifest says of names.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error: those of the files, of the tensors, of the destination.
    """
    executor, catalogs = executor or InlineExecutor(), [one.catalog for one in sources]
    found = Diagnostics(strict=sources[0].options.strict)
    parts = [_plan(one, target, options, executor, kept, open_progress) for one in sources]
    _join([one.found for one in parts], found)
    plan = _average(parts, weights, found) if weights else parts[0].plan
    extensions = [*_extensions(sources[0], target, options)]
    plan = _complete(plan, extensions, found)
    assignment, of_target = preflight(
        target if plan is None else plan.target,
        plan,
        catalogs,
        inputs=[*_inputs(parts, sources, target)],
        documents=[*chain(*(one.documents for one in extensions))],
        options=options,
        executor=executor,
        open_progress=open_progress,
    )
    found.extend(of_target)
    found.add(*(assignment.notes if assignment is not None else ()))
    # What is wrong with the files comes first, since what else is wrong may follow from it.
    found.failures[:0] = chain(*(one.sight.file_errors for one in parts))
    has_errors = bool(found.failures or found.errors)
    if has_errors and (changed := changed_sources(*catalogs)):
        raise PlanError([*changed, *of_target.errors])
    found.raise_if_errors()
    assert plan is not None, "else there is an error"
    assert assignment is not None, "there is a plan"
    return plan, assignment


def _average(parts: Sequence[Planned], weights: Sequence[float], found: Diagnostics) -> Plan | None:
    # With the strategy of another set, names and shapes are not those of the input.
    if any(one.code == "strategy" for part in parts for one in part.found):
        return None
    sights = [part.sight for part in parts]
    known = [None if one.contents.is_incomplete else one.checkpoint for one in sights]
    plans = [part.plan for part in parts]
    return average([*zip(known, plans, strict=True)], weights, found)


def _complete(
    plan: Plan | None,
    extensions: Sequence[ShardedOutput | StrategySidecar | ResumeRecords],
    found: Diagnostics,
) -> Plan | None:
    plan = plan and carry_metadata(plan, found)
    for extension in extensions:
        plan = plan and extension.complete(plan, found)
    if plan is None:
        return None
    for extension in extensions:
        found.add(*extension.problems(plan))
    return replace(plan, notes=found.of("note", "warning"))


def _inputs(parts: Sequence[Planned], sources: Sequence[Subject], target: Target) -> Iterator[str]:
    """Yield the files that are read, which no output may replace; also damaged ones."""
    for source in sources:
        damaged = (error.path for error in source.catalog.damaged.values())
        yield from (*source.catalog.paths, *(path for path in damaged if is_visible(path)))
    for source, part in zip(sources, parts, strict=True):
        checkpoint = part.sight.checkpoint
        strategy = source.strategy if checkpoint is None else checkpoint.strategy
        yield from strategy.files if strategy is not None else ()
    yield from target.strategy.files if target.strategy is not None else ()


def _join(found: Sequence[Diagnostics], into: Diagnostics) -> None:
    """Add what was found of each source; what is not of all of them with its number."""
    is_of_all = set.intersection(*(set(one) for one in found))
    for number, one in enumerate(found, 1):
        side = f"input {number}" if len(found) > 1 else ""
        into.add(*(it if it in is_of_all or not side else it.on_side(side) for it in one))
        into.failures += [it.on_side(side) if side else it for it in one.failures]


def _plan(
    source: Subject,
    target: Target,
    options: OutputOptions,
    executor: Executor,
    kept: Kept = _NOTHING_KEPT,
    open_progress: OpenProgress = no_progress,
) -> Planned:
    """Look at a source and plan its transfer, with the checks of a conversion; nothing is written.

    What is wrong is found, and not raised; then there may be no plan.
    """
    choices, found = source.options, Diagnostics(strict=source.options.strict)
    of_target, plan = Diagnostics(strict=choices.strict), None
    find_needed = None
    if options.ranks is not None:
        find_needed = partial(needed_slices, target=target, options=options)
    sight = look(
        *(source, found, executor),
        crc=options.crc,
        find_needed=find_needed,
        open_progress=open_progress,
    )
    if sight.checkpoint is not None:
        checkpoint = sight.checkpoint
        # Samples take as much memory as the checkpoint, and only checks need them.
        left = replace(sight.contents, sampled=(), sampled_copies=(), evidence=Evidence())
        sight = replace(sight, contents=left)
        try:
            if target.strategy is not None:
                of_files = with_names_of_files(sight.catalog, target.strategy)
                target = replace(target, strategy=of_files)
            with open_progress(0, "planning"):
                plan = targets.plan(checkpoint, sight.contents, target, options, of_target)
            found.extend(of_target)
            if plan is not None:
                provenance = _provenance_of(
                    *(sight.catalog, checkpoint, target.strategy, source.files)
                )
                listed = sight.listed
                plan = replace(plan, provenance=provenance, listed=listed, kept=kept)
        except CkptToolError as error:
            found.failures.append(error)
    found.add(*sight.of_files)
    return Planned(sight, target, plan, found)


def plan_merge(
    catalog: Catalog,
    strategy: Strategy | None,
    path: str | os.PathLike[str],
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
    path, output = os.fspath(path), output_options
    output.refuse(*_OF_RANK_FILES, "ranks")
    is_folder = output.max_shard_bytes is not None
    target = _merged(path, choose_format(path, output.format, is_folder), output, is_folder)
    source = Subject(catalog, strategy, resolve_options)
    return plan_conversion([source], target, output, executor, open_progress)


def _merged(path: str, format: str, options: OutputOptions, is_folder: bool) -> Target:
    attrs = header_attrs(options.crc)
    if format == "safetensors":
        attrs["format"] = "pt"  # all loaders accept this mark; see `ckpttool.formats.safetensors`
    return (
        numbered_target(path, format, attrs)
        if is_folder
        else Target(format, {0: path}, attrs=attrs)
    )


def plan_split(
    catalog: Catalog,
    strategy: Strategy,
    folder: str | os.PathLike[str],
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
    source = _source_of_split(catalog, resolve_options)
    target = rank_files(strategy, os.fspath(folder), output_options, catalog)
    return plan_conversion([source], target, output_options, executor, open_progress)


def _source_of_split(catalog: Catalog, options: ResolveOptions) -> Subject:
    is_full = not (options.replicated or catalog.description is not None)
    refusal = _several_ranks_error(catalog) if is_full else None
    return Subject(catalog, None, options, refusal, files="full" if is_full else "joined")


def _several_ranks_error(catalog: Catalog) -> PlanError | None:
    """Return the error of a source that is not one full checkpoint: files of several ranks."""
    found = sorted({*catalog.files, *catalog.damaged})
    if catalog.is_merged or len(found) < 2:
        return None
    text = f"split takes one merged checkpoint, found {format_ranks(found)}"
    hint = "`ckpttool reshard`, or --replicated if every rank holds the whole model"
    ranks = tuple(found)
    return PlanError([Diagnostic("strategy", text, hint=hint, ranks=ranks, where=catalog.root)])


def _extensions(
    source: Subject, target: Target, options: OutputOptions
) -> Iterator[ShardedOutput | StrategySidecar | ResumeRecords]:
    if target.is_numbered:
        folder, limit = target.output_folder, options.max_shard_bytes
        yield ShardedOutput(folder, target.format, limit, is_kept=source.files == "kept")
    if options.strategy_path is not None:
        yield StrategySidecar(options.strategy_path, options.part is not None)
    if options.mindformers:
        yield ResumeRecords(target.paths)


def plan_reshard(
    catalog: Catalog,
    src_strategy: Strategy | None,
    dst_strategy: Strategy,
    folder: str | os.PathLike[str],
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
    source = _source_of_reshard(catalog, src_strategy, resolve_options)
    target = rank_files(dst_strategy, os.fspath(folder), output_options, catalog)
    return plan_conversion([source], target, output_options, executor, open_progress)


def _source_of_reshard(
    catalog: Catalog, strategy: Strategy | None, options: ResolveOptions
) -> Subject:
    is_unknown = strategy is None and catalog.description is None and not options.replicated
    refusal = no_strategy_error(catalog, "-s STRATEGY") if is_unknown else None
    return Subject(catalog, strategy, options, refusal)


_OF_KEPT_FILES = ("strict", "manifest", "tensors")  # of `ResolveOptions`


def plan_convert(
    catalog: Catalog,
    path: str | os.PathLike[str],
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Assignment]:
    """Plan to write each file of a checkpoint again, in another format; for `execute`.

    Parameters
    ----------
    catalog
        The source, from `scan`.
    path
        The output file, or the folder for the files of ranks, or for numbered files.  Files of
        ranks keep their names, but for the suffix.
    resolve_options
        ``strict``, ``manifest`` and ``tensors``; no tensor is joined, so nothing else applies.
    output_options
        Options of the outputs.  The default format of a folder is that of the source.
    executor, open_progress
        As for `plan_merge`.

    Raises
    ------
    FormatError, PlanError
        All problems, in one error.
    ValueError
        An option applies only where tensors are joined, or to outputs of a strategy.
    """
    path, output = os.fspath(path), output_options
    is_whole = output.crc or resolve_options.tensors.are_all_wanted
    catalog = catalog if is_whole else catalog.with_remains()
    names, unset = ResolveOptions.__struct_fields__, ResolveOptions()
    changed = [n for n in names if getattr(resolve_options, n) != getattr(unset, n)]
    if unused := [name for name in changed if name not in _OF_KEPT_FILES]:
        raise ValueError(f"{', '.join(unused)}: not an option of convert, which joins nothing")
    output.refuse(*_OF_RANK_FILES)
    _refuse_url(path)
    kept, unknown = Kept(), None
    if catalog.needs_strategy:
        kept, unknown = read_kept(catalog, resolve_options.manifest == "ignore")
    refusal = _described_error(catalog) or unknown
    is_renamed = bool(resolve_options.tensors.renames) and kept.strategy is None
    noted = [*_note_strategies(catalog, is_renamed), *_conversion_problems(catalog, path, output)]
    is_folder = _is_folder(catalog, output)
    is_whole = output.ranks is None and output.max_shard_bytes is None
    has_keys = any(file.cipher is not None for file in catalog.files.values())
    is_same = resolve_options.tensors == TensorOptions() and not (output.crc or has_keys)
    if is_folder and output.format is None and is_whole and is_same:
        found = _format_of(catalog)
        text = f"the format is that of the source, {found}"
        hint = f"--format {any_of(one for one in FORMATS if one != found)}"
        noted.append(Diagnostic("same_format", text, hint=hint, where=catalog.root))
    catalog = replace(catalog, diagnostics=tuple(noted))
    if output.ranks is not None:
        catalog = _limited_to(catalog, output.ranks)
    format = (
        output.format or _format_of(catalog) if is_folder else choose_format(path, output.format)
    )
    if catalog.is_merged:
        target = _merged(path, format, output, is_folder)
    else:
        target = _again(catalog, path, format, output, kept)
    source = Subject(catalog, None, resolve_options, refusal, files="kept")
    return plan_conversion([source], target, output, executor, open_progress, kept=kept)


def _is_folder(catalog: Catalog, options: OutputOptions) -> bool:
    is_one_file = catalog.is_merged and not catalog.documents
    return not is_one_file or options.max_shard_bytes is not None


def _described_error(catalog: Catalog) -> PlanError | None:
    if catalog.description is None:
        return None
    src = quote(catalog.root)
    text = "the checkpoint describes its slices itself, which files of ranks cannot"
    hint = f"ckpttool merge {src} -o OUT, or reshard {src} -d STRATEGY -o DIR"
    facts = f"see {shorten(catalog.description.files, 2)}"
    return PlanError([Diagnostic("source", text, hint=hint, facts=facts, where=catalog.root)])


def _note_strategies(catalog: Catalog, is_renamed: bool) -> Iterator[Diagnostic]:
    """Yield the diagnostics of a scan, and that the strategies beside the files are not copied."""
    found = list(catalog.strategy_files)
    for one in catalog.diagnostics:
        if one.code == "strategy_file" and one.path is not None:
            found.append(one.path)
        else:
            yield one
    if found:
        text = f"{shorten(found, 1)}: a strategy, which is not copied"
        yield Diagnostic("strategy_file", text, facts="it is that of the output, too")
    if is_renamed and catalog.needs_strategy:
        text = "strategies have the old names, and the manifest of the output both"
        yield Diagnostic("new_names", text, facts="so they fit as long as it lies with the files")


def _conversion_problems(
    catalog: Catalog, path: str, options: OutputOptions
) -> Iterator[Diagnostic]:
    """Yield why files cannot be written again as the options say."""
    src, is_merged = quote(catalog.root), catalog.is_merged
    if options.max_shard_bytes is not None and not is_merged:
        text, hint = "files of ranks cannot be numbered", f"ckpttool merge {src} -s STRATEGY ..."
        yield Diagnostic("options", text, hint=hint, where=catalog.root)
    there = {*catalog.files, *catalog.damaged}
    absent = sorted({*(options.ranks or ())} - there - {*catalog.missing_ranks})
    if options.ranks is not None and is_merged:
        text, hint = "a merged checkpoint has no ranks", "the same command without --rank"
        yield Diagnostic("options", text, hint=hint, where=catalog.root)
    elif absent:
        text, hint = f"{format_ranks(absent)}: not in the source", f"--rank {format_numbers(there)}"
        yield Diagnostic("options", text, hint=hint, ranks=tuple(absent), where=catalog.root)
    if not _is_folder(catalog, options):
        return
    if format_of_suffix(path) is not None:
        text = "a folder is written, as the source is one, and the name is that of a file"
        more = "" if is_merged else "-s STRATEGY "
        hint = f"-o {Path(path).with_suffix('')}, or ckpttool merge {src} {more}-o {path}"
        yield Diagnostic("options", text, hint=hint, where=path)
    formats = {file.format for file in catalog.files.values()}
    if options.format is None and len(formats) > 1:
        text, facts = "the files have several formats", any_of(sorted(formats))
        yield Diagnostic("options", text, hint="--format", facts=facts, where=catalog.root)


def _format_of(catalog: Catalog) -> str:
    """Return the format of the files of a source; any one if several or none can be read."""
    return next((file.format for file in catalog.files.values()), "hdf5")


def _limited_to(catalog: Catalog, ranks: Collection[int]) -> Catalog:
    """Return the catalog of some ranks; the others need not be there, or be right."""
    return replace(
        catalog,
        files={rank: file for rank, file in catalog.files.items() if rank in ranks},
        damaged={rank: error for rank, error in catalog.damaged.items() if rank in ranks},
        expected_ranks=frozenset(ranks),
    )


def _again(
    catalog: Catalog, folder: str, format: str, options: OutputOptions, kept: Kept
) -> Target:
    """Return the target that writes each file of ranks again, under the same name below a folder.

    The marks that all headers have stay, where the format keeps them.  So does the strategy that a
    manifest names.
    """
    paths = {
        rank: str(Path(folder, _name_in(os.path.relpath(file.path, catalog.root), format)))
        for rank, file in catalog.files.items()
    }
    common = catalog.common_attrs if catalog.files else {}
    attrs = {key: common[key] for key in ("format", REDUNDANCY_KEY) if key in common}
    ranks = max(catalog.files, default=0) + 1
    return Target(
        format,
        paths,
        ranks=ranks,
        strategy=Strategy.without_layouts(ranks, kept.files),
        attrs={**attrs, **header_attrs(options.crc)},
        folder=folder,
    )


def _name_in(path: str, format: str) -> str:
    """Return the name of a file in another format.

    Examples
    --------
    >>> _name_in("rank_0/net-1_10.ckpt", "safetensors"), _name_in("rank_0/net-1.10", "ckpt")
    ('rank_0/net-1_10.safetensors', 'rank_0/net-1.10.ckpt')
    """
    stem = path if format_of_suffix(path) is None else path.removesuffix(Path(path).suffix)
    return stem + suffix_of(format)


_LOOK_BYTES = 16 << 10  # of a set are compared with its manifest by who only looks at it


def plan_reading(
    catalog: Catalog,
    strategy: Strategy | None,
    target: Strategy | None,
    rank: int | None,
    options: ResolveOptions,
    executor: Executor,
    not_in_target: NotInTarget = "follow",
) -> tuple[Plan, Diagnostics]:
    """Plan what a merge, or a reshard to a rank of ``target``, would write, for who only reads it.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems of the source and of the target, in one error.
    """
    read = try_reading(catalog, strategy, target, rank, options, executor, not_in_target)
    read.found.raise_if_errors()
    assert read.plan is not None, "else there is an error"
    return read.plan, read.found


def plan_average(
    inputs: Sequence[AverageInput],
    path: str | os.PathLike[str],
    dst_strategy: Strategy | None = None,
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Assignment]:
    """Plan the weighted mean of several checkpoints; for `execute`.

    Weights of the model in floating point are averaged.  All else is that of the last input.

    Parameters
    ----------
    inputs
        The checkpoints, at least two; the sum of their weights is 1.
    path
        The output file, as for `plan_merge`; the folder of rank files with ``dst_strategy``.
    dst_strategy
        Layouts of the target; None for full tensors.
    resolve_options, output_options, executor, open_progress
        As for `plan_merge`; for a target as for `plan_reshard`.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error.
    ValueError
        An option applies to other outputs only.
    """
    path, output, sources = os.fspath(path), output_options, []
    for catalog, strategy, _ in inputs:
        is_of_ranks = strategy is None and bool(catalog.needs_strategy or catalog.one_of_several)
        is_replicated = resolve_options.replicated and is_of_ranks
        tensors = replace(resolve_options.tensors, is_shared=True)
        options = replace(resolve_options, replicated=is_replicated, tensors=tensors)
        is_full = dst_strategy is not None and catalog.is_merged and catalog.description is None
        source = Subject(catalog, strategy, options)
        sources.append(_source_of_split(catalog, options) if is_full else source)
    if dst_strategy is not None:
        target = rank_files(dst_strategy, path, output, sources[-1].catalog)
    else:
        output.refuse(*_OF_RANK_FILES, "ranks")
        is_folder = output.max_shard_bytes is not None
        target = _merged(path, choose_format(path, output.format, is_folder), output, is_folder)
    weights = [one.weight for one in inputs]
    return plan_conversion(sources, target, output, executor, open_progress, weights)


def try_reading(
    catalog: Catalog,
    strategy: Strategy | None,
    target: Strategy | None,
    rank: int | None,
    options: ResolveOptions,
    executor: Executor,
    not_in_target: NotInTarget = "follow",
) -> Planned:
    """Look and plan as `plan_reading`, and collect what is wrong."""
    ranks = None if rank is None else (rank,)
    source = Subject(catalog, strategy, options)
    if target is not None:
        is_one = catalog.is_merged or len(catalog.files) == 1
        is_split = strategy is None and is_one and catalog.description is None
        source = _source_of_reshard(catalog, strategy, options)
        source = _source_of_split(catalog, options) if is_split else source
    planned = _plan(
        replace(source, sampled_bytes=_LOOK_BYTES),
        Target.unwritten(target, ranks),
        OutputOptions(ranks=ranks, not_in_target=not_in_target),
        executor,
    )
    planned.found.failures[:0] = planned.sight.file_errors
    return planned
