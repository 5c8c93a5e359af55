"""Inspect a checkpoint: find the facts that its description is made of.

Modules that read contents are imported late, so that inspecting a single file needs no numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpttool.checks.missing import find_nothing
from ckpttool.discovery.mindformers_output import find_devices
from ckpttool.discovery.rank_folders import find_nested_checkpoints
from ckpttool.formats import format_of_content
from ckpttool.formats.foreign import identify_foreign, read_rank_table
from ckpttool.formats.local import is_file, stat_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.strategy import Strategy
from ckpttool.operations.describe import Inspected, assess, summarize
from ckpttool.operations.inspected import (
    InspectedCheckpoint,
    InspectedForeign,
    InspectedSaves,
    InspectedStrategy,
    describe_checkpoint,
    describe_saves,
    describe_strategy,
    describe_table,
)
from ckpttool.operations.summary import EqualRanks, Summary, names_to_sample
from ckpttool.problems import CkptToolError, Diagnostics

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import Checkpoint, Contents, ResolveOptions
    from ckpttool.checkpoint.evidence import Evidence
    from ckpttool.checkpoint.resolve import Depth

MAX_SAMPLED_RANKS = 64
MAX_SAMPLES = 2048  # slices whose pages are read unasked: as quick as the headers of some files
MAX_FILE_SAMPLES = 4  # of a file, if a strategy lists the other tensors: as quick as its header


def are_strategies(paths: Sequence[str]) -> bool:
    """Return whether all paths are strategies: files, or folders without a checkpoint in them."""
    from ckpttool.strategy_files import folders

    return folders.are_strategies(paths) and not any(
        find_nested_checkpoints(Path(path)) for path in paths
    )


def inspect_other(
    path: str, diagnostics: Diagnostics
) -> InspectedStrategy | InspectedForeign | None:
    """Return what a strategy, or another file of MindSpore, is; None for a checkpoint.

    Raises
    ------
    StrategyError, FormatError
        The file is damaged.
    """
    if are_strategies([path]):
        from ckpttool.strategy_files.reader import read_strategy

        return describe_strategy(read_strategy(path), diagnostics)
    return inspect_foreign(path)


def inspect_catalog(
    catalog: Catalog,
    strategy: Strategy | None = None,
    found: Diagnostics | None = None,
    *,
    crc: bool = False,
    every_tensor: bool = False,
    options: ResolveOptions | None = None,
    contents: Depth = "samples",
    executor: Executor | None = None,
) -> InspectedCheckpoint | InspectedSaves:
    """Inspect what `scan` returned for ``"inspect"``; ``found`` collects problems, and the notes.

    With a strategy, or if the checkpoint describes itself, samples of the tensors are checked
    against the layouts.  Sampled pages show which ranks hold the same, for tensors without a
    layout.  If there are many, only the first of each row is sampled, unless ``every_tensor`` is
    True.  It is not known whether a checkpoint is complete if tensors that a strategy omits differ
    between ranks.  ``contents="all"`` reads as much as merge reads before it writes.  Only the
    choice of tensors and the comparison with the manifest are taken from ``options``.
    """
    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.execution.executors import default_jobs, open_engine
    from ckpttool.operations.look import Subject, look

    found = Diagnostics("inspect") if found is None else found
    if catalog.names_of:
        found.add(*catalog.diagnostics)
        return describe_saves(catalog, found)
    options = replace(options or ResolveOptions(), unlisted="first", check_replicas=False)
    table = Diagnostics("inspect")
    devices = {} if catalog.is_merged else find_devices(catalog.root, table)
    catalog = replace(catalog, diagnostics=(*catalog.diagnostics, *table))
    reads_header_only = catalog.is_merged and strategy is None and not crc
    engine = "inline" if reads_header_only else f"threads:{default_jobs()}"
    with open_engine(engine) if executor is None else nullcontext(executor) as reader:
        source = Subject(catalog, strategy, options)
        sight = look(source, found, reader, contents=contents, crc=crc)
        if sight.checkpoint is None:
            assert sight.error is not None, "else there are tensors"
            raise sight.error
        found.add(*sight.of_files)
        shown, has_misfits = sight.contents, bool(sight.misfits)
        checkpoint = _as_shown(sight.checkpoint.stored, shown, has_misfits)
        damaged = _damaged(catalog, checkpoint, shown.complete_step)
        found.failures[:0] = [*damaged, *sight.of_files.failures]
        found.add(*find_nothing(checkpoint.whole.catalog))
        summary = summarize(checkpoint)
        equal_ranks = _sample_equal_ranks(
            *(checkpoint, shown.evidence, summary, every_tensor, reader, found)
        )
    summary = replace(summary, equal_ranks=equal_ranks)
    catalog = sight.catalog if checkpoint.unfiltered is None else checkpoint.catalog
    done = assess(checkpoint, summary, found)
    made = () if sight.checkpoint.rearranged is None else tuple(sight.checkpoint.outputs())
    parts = Inspected(catalog, checkpoint, shown, summary, done, found, devices, made)
    return describe_checkpoint(parts)


def _as_shown(checkpoint: Checkpoint, contents: Contents, has_misfits: bool) -> Checkpoint:
    from ckpttool.checks import run_checks

    fits_nothing = has_misfits and not checkpoint.strategy.layouts
    diagnostics = run_checks(checkpoint, contents, "inspect")
    is_wrong = any(diagnostic.code == "strategy" for diagnostic in diagnostics)
    return replace(checkpoint, files="full") if is_wrong or fits_nothing else checkpoint


def _damaged(catalog: Catalog, checkpoint: Checkpoint, complete_step: str) -> list[CkptToolError]:
    """Return the errors of damaged files: first those that only the strategy shows to be damaged.

    What a person does not want of a file need not be there.
    """
    are_all = checkpoint.options.tensors.are_all_wanted
    reported = catalog.damaged if are_all else {}
    damaged = checkpoint.catalog.damaged.items()
    new = [
        checkpoint.with_remedy(error, complete_step)
        for rank, error in damaged
        if rank not in reported
    ]
    return [*new, *reported.values()]


def _sample_equal_ranks(
    checkpoint: Checkpoint,
    evidence: Evidence,
    summary: Summary,
    every_tensor: bool,
    executor: Executor,
    diagnostics: Diagnostics,
) -> Mapping[str, EqualRanks]:
    """Return which ranks hold the same, for tensors without a layout, by samples of pages.

    If there are too many tensors, only the first of each row is sampled.  If that is still too
    much, nothing is sampled; nor without layouts if there are too many ranks.  So it takes no
    longer than reading the headers.  ``every_tensor`` lifts these limits.
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
        sampled = answer(sample_ranks(catalog, names), executor, evidence)
    except CkptToolError as error:
        diagnostics.failures.append(error)
        return {}
    return {
        name: EqualRanks(name, groups, is_constant, catalog.metas[name].nbytes > SAMPLE_BYTES)
        for name, groups, is_constant in sampled
    }


def inspect_foreign(path: str) -> InspectedForeign | None:
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
    table = describe_table(read_rank_table(path)) if foreign.kind == "rank_table" else ()
    return InspectedForeign(path, foreign.kind, stat_file(path).nbytes, *table)
