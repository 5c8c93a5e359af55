"""``ckpttool strategy show``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import excluding
from ckpttool.problems import Diagnostics

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool strategy show strategy.ckpt

    Show the stages, the device matrix and the layout of each parameter, equal layers folded.
    STRATEGY is a file or a folder; the files of pipeline stages are shown together.
    """,
)
@options.strategies
@options.flag("List every tensor.", "--all")("show_all", options.DISPLAY)
@options.flag("Print it as a hand-written strategy.", "--yaml")("as_yaml", options.DISPLAY)
@options.report_options()
def show(strategies: tuple[str, ...], show_all: bool, as_yaml: bool, report: ReportOptions) -> None:
    """Show how a strategy shards each parameter."""
    from ckpttool.cli.overview import print_strategy
    from ckpttool.operations.inspected import describe_strategy

    if as_yaml and report.as_json:
        raise excluding("--yaml", "--json")
    diagnostics, strategy = Diagnostics("inspect"), ckpttool.read_strategy(strategies)
    if as_yaml:
        from ckpttool.strategy_files.writer import encode_strategy

        tables.echo(encode_strategy(strategy, "standard output.yaml").decode().rstrip("\n"))
        return
    described = describe_strategy(strategy, diagnostics)
    show_it = partial(print_strategy, described, show_all)
    tables.print_answer(described, show_it, described.notes, report)
