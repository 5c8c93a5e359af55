"""``ckpttool strategy convert``."""

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
    ckpttool strategy convert strategy.ckpt -o strategy.yaml

    Write a strategy in another form: .json is MindSpore's JSON, .yaml hand-written, every other
    name protobuf.  The files of pipeline stages become one.  What a form cannot say is refused, and
    the output is read again before it gets its name.
    """,
)
@options.strategies
@options.output_path("path", "Strategy file to write; its suffix is its form.", "new.yaml", "FILE")
@options.output_options.parameters["overwrite"]("overwrite", options.SAFETY)
@options.report_options()
def convert(strategies: tuple[str, ...], path: str, overwrite: bool, report: ReportOptions) -> None:
    """Write a strategy in another form."""
    from ckpttool.operations.strategies import convert_strategy

    print_written(convert_strategy(strategies, path, overwrite=overwrite), report)
