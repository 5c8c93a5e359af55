"""``ckpttool strategy draft``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.wording import count, shorten

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Side


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool strategy draft checkpoint/ -o draft.yaml

    Write a hand-written strategy as far as contents show it: what all ranks hold in full.  Every
    other line is a question, with the values that fit below it, and refused until one is taken.
    With -s only what that strategy does not list.
    """,
)
@options.source_options("src", "strategy_files", "step", "pattern", "key")
@options.output_path("path", "File to write, a hand-written strategy.", "draft.yaml", "FILE")
@options.output_options.parameters["overwrite"]("overwrite", options.SAFETY)
@options.report_options()
def draft(source: Side, path: str, overwrite: bool, report: ReportOptions) -> None:
    """Write a hand-written strategy as far as contents show it."""
    from ckpttool.execution.executors import default_jobs
    from ckpttool.operations.load import load
    from ckpttool.operations.strategy_draft import draft_strategy

    catalog, strategy, _ = load(
        source.source, find_strategy=False, command="inspect", open_count=report.open_count
    )
    with ckpttool.open_engine(f"threads:{default_jobs()}") as executor:
        drafted = draft_strategy(catalog, path, strategy, executor, overwrite=overwrite)
    if report.as_json:
        tables.print_json(drafted.to_dict())
    elif not report.quiet:
        parameters = count(drafted.replicated, "parameter")
        states = count(drafted.following, "optimizer state")
        tables.print_text(f"Wrote {drafted.path}: {parameters} replicated, {states} without a line")
        if drafted.questions:
            tables.print_text(f"To be answered in it: {shorten(drafted.questions, 3)}")
