"""Inspect a checkpoint: find the facts that its description is made of.

Modules that read contents are imported late, so that inspecting a single file needs no numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpttool.checkpoint.presence import take_remains
from ckpttool.checkpoint.recorded import limit_to_written_ranks
from ckpttool.checks.presence import find_nothing
from ckpttool.concurrency import InlineExecutor
from ckpttool.discovery.mindformers_output import find_devices
from ckpttool.discovery.rank_folders import find_manifests, find_nested_checkpoints
from ckpttool.formats import format_of_content
from ckpttool.formats.foreign import (
    ForeignFile,
    identify_foreign,
    read_rank_table,
)
from ckpttool.formats.local import is_file, stat_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.choices import TensorOptions
from ckpttool.model.strategy import Strategy
from ckpttool.operations.describe import (
    Inspection,
    SavesInspection,
    StrategyInspection,
    assess,
    describe_strategy,
    summarize,
)
from ckpttool.operations.summary import EqualRanks, Summary, names_to_sample
from ckpttool.problems import CkptToolError, Diagnostics

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import Checkpoint, ResolveOptions
    from ckpttool.checkpoint.resolve import Contents

MAX_SAMPLED_RANKS = 64
MAX_SAMPLES = 2048  # slices whose pages are read unasked: as quick as the headers of some files
MAX_FILE_SAMPLES = 4  # of a file, if a strategy lists the other tensors: as quick as its header


def are_strategies(paths: Sequence[str]) -> bool:
    """Return whether all paths are strategies: files, or folders without a checkpoint in them."""
    from ckpttool.strategy_files import folders

    return folders.are_strategies(paths) and not any(
        find_nested_checkpoints(Path(path)) for path in paths
    )


def inspect_other(path: str, found: Diagnostics) -> StrategyInspection | ForeignFile | None:
    """Return what a strategy, or another file of MindSpore, is; None for a checkpoint.

    Raises
    ------
    StrategyError, FormatError
        The file is damaged.
    """
    if are_strategies([path]):
        from ckpttool.strategy_files.reader import read_strategy

        return describe_strategy(read_strategy(path), found)
    return inspect_foreign(path)


def inspect_catalog(
    catalog: Catalog,
    strategy: Strategy | None,
    found: Diagnostics,
    *,
    crc: bool = False,
    every_tensor: bool = False,
    options: ResolveOptions | None = None,
    contents: Contents = "samples",
) -> Inspection | SavesInspection:
    """Inspect what `scan` returned for ``"inspect"``; see `examine`."""
    from ckpttool.execution.executors import default_jobs, open_engine

    if catalog.names_of:
        found.add(*catalog.diagnostics)
        return SavesInspection(catalog.root, catalog.names_of, found)
    reads_header_only = catalog.is_merged and strategy is None and not crc
    engine = "inline" if reads_header_only else f"threads:{default_jobs()}"
    with open_engine(engine) as executor:
        return examine(
            *(catalog, strategy),
            crc=crc,
            every_tensor=every_tensor,
            options=options,
            contents=contents,
            executor=executor,
            diagnostics=found,
        )


def examine(
    catalog: Catalog,
    strategy: Strategy | None = None,
    *,
    crc: bool = False,
    every_tensor: bool = False,
    options: ResolveOptions | None = None,
    contents: Contents = "samples",
    executor: Executor | None = None,
    diagnostics: Diagnostics | None = None,
) -> Inspection:
    """Inspect a checkpoint; ``diagnostics`` collects problems, and the notes.

    With a strategy, or if the checkpoint describes itself, samples of the tensors are checked
    against the layouts.  Pages of the tensors without a layout tell which ranks hold the same: of
    all of them, or of the first of each row if there are many.  With ``every_tensor`` there is no
    limit.  It is not known whether a checkpoint is complete if tensors that a strategy omits differ
    between ranks.  With ``contents="all"`` as much is read as merge reads before it writes.  Of
    ``options`` only the choice of tensors acts, and whether the manifest is compared.
    """
    executor = executor or InlineExecutor()
    found = Diagnostics("inspect") if diagnostics is None else diagnostics
    tensors = TensorOptions() if options is None else options.tensors
    catalog = take_remains(catalog, tensors, checks_bytes=crc)
    if tensors.are_all_wanted:
        found.failures[:0] = catalog.damaged.values()
    if crc:
        from ckpttool.storage.checksums import check_files

        errors, of_checksums = check_files(catalog, executor, crc=True)
        found.failures += errors
        catalog = replace(catalog, diagnostics=(*catalog.diagnostics, *of_checksums))
    is_compared = options is None or options.manifest != "ignore"
    if is_compared and find_manifests(catalog):
        from ckpttool.checks.manifest import check_source

        check_source(catalog, executor, found)
    catalog = limit_to_written_ranks(catalog, strategy)
    table = Diagnostics("inspect")
    devices = {} if catalog.is_merged else find_devices(catalog.root, table)
    catalog = replace(catalog, diagnostics=(*catalog.diagnostics, *table))
    found.add(*catalog.errors())
    checkpoint = _resolve(catalog, strategy, options, contents, executor, found)
    found.add(*find_nothing(checkpoint.whole.catalog))
    if checkpoint.chosen_from is not None:
        catalog = checkpoint.catalog
    summary = summarize(checkpoint)
    equal_ranks = _sample_equal_ranks(checkpoint, summary, every_tensor, executor, found)
    summary = replace(summary, equal_ranks=equal_ranks)
    done = assess(checkpoint, summary, found)
    return Inspection(catalog, checkpoint, summary, done, found, devices)


def _resolve(
    catalog: Catalog,
    strategy: Strategy | None,
    options: ResolveOptions | None,
    contents: Contents,
    executor: Executor,
    found: Diagnostics,
) -> Checkpoint:
    """Return the full tensors of a checkpoint, not joined if nothing says how to join them."""
    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.checkpoint.resolve import resolve
    from ckpttool.checks import is_refused, run_checks

    by_file = strategy is None and catalog.description is None
    resolve_with = partial(
        resolve,
        catalog,
        options=replace(options or ResolveOptions(), unlisted="first"),
        executor=executor,
        contents=contents,
        is_refused=partial(is_refused, command="inspect"),
        files="full" if by_file else "joined",
    )
    checkpoint = resolve_with(strategy)
    misfits = checkpoint.misfits
    if misfits:  # the tensors that it fits are joined all the same
        checkpoint = resolve_with(checkpoint.strategy)
    is_wrong = any(one.code == "strategy" for one in run_checks(checkpoint, "inspect"))
    found.add(*run_checks(checkpoint, "inspect", misfits=misfits))
    if is_wrong or (misfits and not checkpoint.strategy.layouts):
        checkpoint = replace(checkpoint, files="full")
    found.failures += [] if checkpoint.unread is None else [checkpoint.unread]
    reported = catalog.damaged if options is None or options.tensors.are_all_wanted else ()
    damaged = checkpoint.catalog.damaged.items()
    new = (error for rank, error in damaged if rank not in reported)
    found.failures[:0] = map(checkpoint.with_remedy, new)
    return checkpoint


def _sample_equal_ranks(
    checkpoint: Checkpoint,
    summary: Summary,
    every_tensor: bool,
    executor: Executor,
    found: Diagnostics,
) -> Mapping[str, EqualRanks]:
    """Return which ranks hold the same of tensors without a layout, as some pages tell.

    Of too many tensors only the first of each row is sampled, and without layouts none of too many
    ranks, unless every tensor is requested.  So it takes no longer than reading the headers.
    """
    catalog, ranks = checkpoint.catalog, len(checkpoint.catalog.files)
    limit = MAX_SAMPLES if ranks <= MAX_SAMPLED_RANKS else 0
    if checkpoint.are_joined:
        limit = max(MAX_SAMPLES, MAX_FILE_SAMPLES * ranks)
    names = names_to_sample(summary.entries)
    if ranks * len(names) > limit and not every_tensor:
        names = names_to_sample(row.first for row in summary.rows)
    if not names or (ranks * len(names) > limit and not every_tensor):
        return {}
    from ckpttool.checkpoint.contents import sample_ranks
    from ckpttool.checkpoint.evidence import answer
    from ckpttool.storage.sampling import SAMPLE_BYTES

    try:
        sampled = answer(sample_ranks(catalog, names), executor, checkpoint.evidence)
    except CkptToolError as error:
        found.failures.append(error)
        return {}
    return {
        name: EqualRanks(name, groups, is_constant, catalog.metas[name].nbytes > SAMPLE_BYTES)
        for name, groups, is_constant in sampled
    }


def inspect_foreign(path: str) -> ForeignFile | None:
    """Return a graph, an exported model, group information or a rank table; None for all else.

    Raises
    ------
    FormatError
        The rank table is damaged.
    """
    try:
        is_known = is_file(path) and format_of_content(path) is None
        foreign = identify_foreign(path) if is_known else None
    except OSError:
        return None  # the scan of the source reports the error
    if foreign is None or foreign.kind not in ("graph", "mindir", "group_info", "rank_table"):
        return None
    contents = read_rank_table(path) if foreign.kind == "rank_table" else None
    return ForeignFile(path, foreign.kind, stat_file(path).nbytes, contents)
