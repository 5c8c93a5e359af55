"""``ckpttool split``."""

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
    ckpttool split merged.h5 -d strategy.ckpt \\
        -o sliced/ --format ckpt

    Write the files of all ranks, DIR/rank_R/PREFIXR.ckpt, from a merged checkpoint.  SRC is a file,
    or a folder with an index; with --replicated also a folder of rank folders.
    """,
)
@options.source_options("src", "step", "pattern", "key")
@options.resolve_options(*("replicated", "unlisted", "strict", "manifest"), *options.OF_TENSORS)
@options.rank_outputs
@options.run_options()
@options.report_options(dry_run=options.DRY_RUN, verbose=options.VERBOSE)
def split(
    source: Side,
    resolve: ResolveOptions,
    folder: str,
    dst_strategy: tuple[str, ...],
    output: OutputOptions,
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Shard a merged checkpoint for the ranks of a strategy."""
    from ckpttool.cli import workflow
    from ckpttool.operations.jobs import Order, refuse_file_name

    refuse_file_name(folder, output)
    order = Order("split", [source.source], folder, dst_strategy, resolve, output)
    workflow.run_order(order, run, report)
