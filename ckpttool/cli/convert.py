"""``ckpttool convert``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttool.cli import options

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.execution.executors import RunOptions
    from ckpttool.transaction.resume import OutputOptions


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool convert checkpoint/ -o converted/ \\
        --format safetensors

    Write the same files in another format: those of ranks for the same ranks and under the same
    names, a merged file as one, numbered files with an index as such.  Needs no strategy.
    """,
)
@options.source_options("src", "step", "pattern", "key")
@options.resolve_options("strict", "manifest", *options.OF_TENSORS)
@options.output_path("path", "Output file; a folder if SRC is one.", "converted/", "OUT")
@options.output_options(
    *options.OF_FILES,
    "name",
    "mindformers",
    format=options.format_of_output("by the suffix of OUT; of a folder that of SRC"),
    ranks=options.variant("ranks", help="Convert only these ranks, such as 0,3-7."),
)
@options.run_options()
@options.report_options(dry_run=options.DRY_RUN, verbose=options.VERBOSE)
def convert(
    source: Side,
    resolve: ResolveOptions,
    path: str,
    output: OutputOptions,
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Write a checkpoint in another format, file by file."""
    from ckpttool.cli import workflow
    from ckpttool.operations.jobs import Order

    order = Order("convert", [source.source], path, (), resolve, output)
    workflow.run_order(order, run, report)
