"""``ckpttool merge``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, workflow
from ckpttool.cli.params import PathName

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.execution.executors import RunOptions
    from ckpttool.planning.plans import OutputOptions
    from ckpttool.planning.resolve import ResolveOptions


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool merge checkpoint/ -s strategy.ckpt -o merged.h5

    Merge the files of all ranks into one file that holds every parameter undivided.  SRC is a
    folder of rank folders, or one that describes itself (MindFormers' Checkpoint 2.0) and needs
    no -s, or the output folder of a MindFormers run, whose strategies are found without -s; or
    one file or a folder with an index (param_name_map.json, model.safetensors.index.json), which
    is then converted to another format.
    """,
)
@options.source_options()
@options.resolve_options()
@options.listed_under(
    options.OUTPUT,
    "path",
    "-o",
    "--output",
    type=PathName(),
    required=True,
    metavar="OUT",
    help="Output file; a folder with --max-shard-size.",
)
@options.output_options(
    *("max_shard_bytes", "crc", "part", "overwrite", "resume"),
    format=options.option(
        "--format",
        type=options.FORMAT_CHOICE,
        help="Format of the output.  [default: by the ending of OUT, else hdf5]",
    ),
)
@options.run_options()
@options.report_options(verbose=options.VERBOSE)
def merge(
    source: Side,
    resolve: ResolveOptions,
    path: str,
    output: OutputOptions,
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Merge the files of all ranks into one."""
    options.refuse_two_strategies(source, resolve)
    output = options.with_format(path, output)
    options.refuse_hdf5_checksum(output)
    path = options.absolute_for_cluster(path, run)
    catalog, strategy, _ = workflow.load(
        source.for_engine(run), report, find_strategy=not resolve.replicated
    )
    plan = partial(ckpttool.plan_merge, catalog, strategy, path, resolve, output)
    workflow.convert(plan, run, report)
