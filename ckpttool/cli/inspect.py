"""``ckpttool inspect``."""

from __future__ import annotations

from shlex import join
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.problems import Diagnostics

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.operations.describe import Inspected


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool inspect checkpoint/ -s strategy.ckpt

    Say what a checkpoint is: its size, how it is sharded, and whether it is complete.  Then list
    its tensors, equal layers folded.  Headers and some pages of the tensors are read.  SRC is a
    file, an index or its folder, a folder of rank folders, or the output folder of a MindFormers
    run.  Strategy files (those of several stages together), group information, rank tables and
    graphs are shown as what they are.
    """,
)
@options.source_options()
@click.argument("more", nargs=-1, type=options.EXISTING, metavar="[STRATEGY]...")
@options.crc
@options.ignore_manifest("manifest", options.SAFETY)
@options.flag("List every tensor; sample those without a strategy.", "--all")(
    "show_all", options.DISPLAY
)
@options.flag("List every file.", "--ranks")("show_ranks", options.DISPLAY)
@options.report_options()
def inspect(
    source: Side,
    more: tuple[str, ...],
    crc: bool,
    manifest: str | None,
    show_all: bool,
    show_ranks: bool,
    report: ReportOptions,
) -> None:
    """Say what a checkpoint or a strategy is, and list its tensors."""
    from ckpttool.cli.overview import print_inspected

    found = Diagnostics("inspect")
    inspected = _inspect(source, more, found, report, crc, show_all, manifest == "ignore")
    if report.as_json:
        from ckpttool.operations import documents

        tables.print_json(documents.inspect(inspected))
    else:
        if not report.quiet:
            print_inspected(inspected, show_all=show_all, show_ranks=show_ranks)
        # The line "complete" says that replicas hold the slices, and an error names a damaged file.
        said = {"damaged_replica"} if report.quiet else {"damaged_replica", "missing_replica"}
        notes = (one for one in found.of("note", "warning") if one.code not in said)
        tables.print_notes(notes, found.severity_of, report.quiet)
    found.raise_if_errors()


def _inspect(
    source: Side,
    more: tuple[str, ...],
    found: Diagnostics,
    report: ReportOptions,
    crc: bool,
    every_tensor: bool,
    ignore_manifest: bool,
) -> Inspected:
    """Return what SRC is: strategies, another file of MindSpore, or a checkpoint."""
    from ckpttool.cli import workflow
    from ckpttool.operations.describe import describe_strategy
    from ckpttool.operations.inspect import inspect_catalog, inspect_foreign
    from ckpttool.strategy_files.folders import are_strategies

    strategies = (source.path, *more, *source.strategy_files)
    if are_strategies(strategies):
        options.refuse_options("a strategy", {"strategy_files", "show_all"})
        return describe_strategy(ckpttool.read_strategy(strategies), found)
    if more:
        paths, hint = (source.path, *more), ""
        checkpoints = [path for path in paths if not are_strategies([path])]
        if len(checkpoints) == 1:
            files = (path for path in (*source.strategy_files, *paths) if path not in checkpoints)
            words = (*checkpoints, *(word for path in files for word in ("-s", path)))
            hint = f"{click.get_current_context().command_path} {join(words)}"
        raise options.too_many_paths("one checkpoint, or strategy files", paths, hint)
    if foreign := inspect_foreign(source.path):
        options.refuse_options("not a checkpoint", ())
        return foreign
    catalog, strategy, _ = workflow.load(source, report, command="inspect", diagnostics=found)
    return inspect_catalog(
        *(catalog, strategy, found),
        crc=crc,
        every_tensor=every_tensor,
        ignore_manifest=ignore_manifest,
    )
