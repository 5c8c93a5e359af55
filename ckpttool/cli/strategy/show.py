"""``ckpttool strategy show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.problems import Diagnostics

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions


@click.command(
    cls=options.GroupedCommand,
    misplaced=dict.fromkeys(
        ("-s", "--src-strategy", "--strategy"),
        ("The strategy is named without an option.", "ckpttool strategy show STRATEGY"),
    ),
    help="""\b
    ckpttool strategy show strategy.ckpt

    Show the stages, the device matrix and the layout of each parameter, equal layers folded.
    STRATEGY is a file or a folder; the files of pipeline stages are shown together.
    """,
)
@options.strategies
@options.flag("List every tensor.", "--all")("show_all", options.DISPLAY)
@options.report_options()
def show(strategies: tuple[str, ...], show_all: bool, report: ReportOptions) -> None:
    """Show how a strategy shards each parameter."""
    from ckpttool.operations.describe import describe_strategy

    found = Diagnostics("inspect")
    described = describe_strategy(ckpttool.read_strategy(strategies), found)
    if report.as_json:
        from ckpttool.operations import documents

        tables.print_json(documents.inspect(described))
        return
    if not report.quiet:
        from ckpttool.cli.overview import print_strategy

        print_strategy(described, show_all)
    tables.print_notes(found.of("note", "warning"), found.severity_of, report.quiet)
