"""``ckpttool inspect``."""

from __future__ import annotations

from shlex import join
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables, workflow
from ckpttool.problems import Diagnostics, severities

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Side


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
@options.listed_under(
    options.DISPLAY,
    "show_all",
    "--all",
    is_flag=True,
    help="List every tensor; sample those without a strategy.",
)
@options.listed_under(
    options.DISPLAY, "show_ranks", "--ranks", is_flag=True, help="List every file."
)
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
    from ckpttool.cli import overview
    from ckpttool.execution.executors import default_jobs
    from ckpttool.operations import describe
    from ckpttool.operations.inspect import examine

    strategies = (source.path, *more, *source.strategy_files)
    if describe.are_strategies(strategies):
        options.refuse_options("a strategy", {"strategy_files", "show_all"})
        named = ckpttool.read_strategy(strategies)
        summary = describe.summarize_strategy(named)
        if report.as_json:
            tables.print_json(describe.describe_strategy(named, summary))
        else:
            if not report.quiet:
                overview.print_strategy(named, summary, show_all=show_all)
            tables.print_notes(named.notes, severities("inspect"), report.quiet)
        return
    if more:
        paths, hint = (source.path, *more), ""
        checkpoints = [path for path in paths if not describe.are_strategies([path])]
        if len(checkpoints) == 1:
            files = (path for path in (*source.strategy_files, *paths) if path not in checkpoints)
            words = (*checkpoints, *(word for path in files for word in ("-s", path)))
            hint = f"{click.get_current_context().command_path} {join(words)}"
        raise options.too_many_paths("one checkpoint, or strategy files", paths, hint)
    foreign = describe.describe_foreign(source.path)
    if foreign is not None:
        options.refuse_options("not a checkpoint", ())
        if report.as_json:
            tables.print_json(foreign)
        elif not report.quiet:
            overview.print_foreign(foreign)
        return
    found = Diagnostics("inspect")
    catalog, strategy, _ = workflow.load(source, report, command="inspect", diagnostics=found)
    if catalog.names_of:
        found.add(*catalog.diagnostics)
        if report.as_json:
            tables.print_json(describe.describe_saves(catalog, found))
        else:
            if not report.quiet:
                overview.print_saves(catalog)
            tables.print_notes(found.of("note", "warning"), found.severity_of, report.quiet)
        found.raise_if_errors()
        return
    reads_header_only = catalog.is_merged and strategy is None and not crc
    engine = "inline" if reads_header_only else f"threads:{default_jobs()}"
    with ckpttool.open_engine(engine) as executor:
        examined = examine(
            catalog,
            strategy,
            crc=crc,
            every_tensor=show_all,
            ignore_manifest=manifest == "ignore",
            executor=executor,
            diagnostics=found,
        )
    if report.as_json:
        tables.print_json(describe.describe_inspection(examined))
    else:
        is_known = examined.catalog.files or not examined.catalog.errors("inspect")
        if is_known and not report.quiet:
            overview.print_checkpoint(examined, show_all=show_all, show_ranks=show_ranks)
        # The line "complete" says that replicas hold the slices, and an error names a damaged file.
        said = {"damaged_replica"} if report.quiet else {"damaged_replica", "missing_replica"}
        notes = (one for one in found.of("note", "warning") if one.code not in said)
        tables.print_notes(notes, found.severity_of, report.quiet)
    found.raise_if_errors()
