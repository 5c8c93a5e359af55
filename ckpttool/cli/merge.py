"""``ckpttool merge``."""

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
    ckpttool merge checkpoint/ -s strategy.ckpt -o merged.h5

    Write the full tensors of all ranks into one file.  SRC is a folder of rank folders.  A merged
    checkpoint (a file, or a folder with an index) is converted to another format.
    """,
)
@options.source_options()
@options.resolve_options()
@options.output_path("path", "Output file; with --max-shard-size a folder.", "merged.h5", "OUT")
@options.output_options(
    *options.OF_FILES,
    "virtual",
    format=options.format_of_output("by the suffix of OUT; hdf5 without one"),
)
@options.run_options()
@options.report_options(dry_run=options.DRY_RUN, verbose=options.VERBOSE)
def merge(
    source: Side,
    resolve: ResolveOptions,
    path: str,
    output: OutputOptions,
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Merge the files of all ranks into one."""
    from ckpttool.cli import workflow
    from ckpttool.operations.jobs import Order

    order = Order("merge", [source.source], path, (), resolve, output)
    workflow.run_order(order, run, report)
