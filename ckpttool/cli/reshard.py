"""``ckpttool reshard``."""

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
    ckpttool reshard checkpoint/ -s strategy.ckpt \\
        -d new_strategy.ckpt -o new/ --format ckpt

    Write the files of other ranks, DIR/rank_R/PREFIXR.ckpt, from those of any number of ranks.
    SRC is a folder of rank folders; no merged file is made on the way.
    """,
)
@options.source_options()
@options.resolve_options(
    *("unlisted", "trust_strategy", "optimizer_shard"),
    *("strict", "check_replicas", "manifest"),
    *options.OF_TENSORS,
)
@options.rank_outputs
@options.run_options()
@options.report_options(dry_run=options.DRY_RUN, verbose=options.VERBOSE)
def reshard(
    source: Side,
    resolve: ResolveOptions,
    folder: str,
    dst_strategy: tuple[str, ...],
    output: OutputOptions,
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Shard a checkpoint for another strategy."""
    from ckpttool.cli import workflow
    from ckpttool.operations.jobs import Order, refuse_file_name

    refuse_file_name(folder, output)
    order = Order("reshard", [source.source], folder, dst_strategy, resolve, output)
    workflow.run_order(order, run, report)
