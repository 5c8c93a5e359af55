"""``ckpttool inspect``."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import join
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import OutputPath, UsageProblem
from ckpttool.problems import Diagnostics, ExecutionError
from ckpttool.wording import format_bytes

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.operations.describe import Inspected


@dataclass(frozen=True, slots=True)
class Page:
    """The page to write, if one is wanted."""

    path: str | None
    overwrite: bool


def _build_page(path: str | None, overwrite: bool) -> Page:
    if overwrite and path is None:
        raise UsageProblem("--overwrite without --plot", "--plot layout.html --overwrite")
    return Page(path, overwrite)


page_options = options.OptionGroup(
    options.OUTPUT,
    "page",
    _build_page,
    {
        "path": options.option(
            "Write FILE, a page that shows in a browser which rank holds which slice.",
            "--plot",
            type=OutputPath("layout.html"),
            metavar="FILE",
        ),
        "overwrite": options.flag(
            "Replace the page of --plot if it exists.",
            aliases=("--force",),
            heading=options.SAFETY,
        ),
    },
)


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
@page_options()
@options.report_options()
def inspect(
    source: Side,
    more: tuple[str, ...],
    crc: bool,
    manifest: str | None,
    show_all: bool,
    show_ranks: bool,
    page: Page,
    report: ReportOptions,
) -> None:
    """Say what a checkpoint or a strategy is, and list its tensors."""
    from ckpttool.cli.overview import print_inspected

    found = Diagnostics("inspect")
    inspected = _inspect(source, more, found, report, crc, show_all, manifest == "ignore")
    drawn = "" if page.path is None else _draw(inspected, page.path, page.overwrite, found)
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
        if drawn and not report.quiet:
            tables.print_text(drawn)
    found.raise_if_errors()


def _draw(inspected: Inspected, path: str, overwrite: bool, found: Diagnostics) -> str:
    """Write the page of a checkpoint and return a line that says so; "" if it is refused."""
    from ckpttool.cli.overview import facts_of
    from ckpttool.operations import plot
    from ckpttool.operations.describe import Inspection

    refusals = [*plot.refusals(inspected, path, overwrite)]
    found.add(*refusals)
    if refusals or not isinstance(inspected, Inspection):
        return ""
    try:
        nbytes = plot.write(inspected, facts_of(inspected), path)
    except ExecutionError as error:
        found.failures.append(error)
        return ""
    return f"Wrote {path} ({format_bytes(nbytes)}), which a browser opens without a network"


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
