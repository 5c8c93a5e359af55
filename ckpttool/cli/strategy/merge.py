"""``ckpttool strategy merge``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttool.cli import options
from ckpttool.cli.strategy.written import print_written

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool strategy merge stage_strategies/ -o merged.ckpt

    Write the strategy files of all pipeline stages as one, as MindSpore's merge_pipeline_strategys
    does: every item is copied as it is, and names get their stage in front.  The first file of a
    stage counts; the others must agree with it.
    """,
)
@options.strategies
@options.output_path("path", "Strategy file to write.", "merged.ckpt", "FILE")
@options.output_options.parameters["overwrite"]("overwrite", options.SAFETY)
@options.report_options()
def merge(strategies: tuple[str, ...], path: str, overwrite: bool, report: ReportOptions) -> None:
    """Write the strategy files of pipeline stages as one."""
    from ckpttool.operations.strategies import merge_strategies

    print_written(merge_strategies(strategies, path, overwrite=overwrite), report)
