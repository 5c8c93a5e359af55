"""``ckpttool verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import documents, options, tables, workflow
from ckpttool.cli.params import Choice
from ckpttool.cli.progress import open_progress
from ckpttool.problems import severities

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.execution.executors import RunOptions
    from ckpttool.planning.resolve import ResolveOptions


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool verify checkpoint/ -s strategy.ckpt --deep

    Find what is wrong with a checkpoint: damaged files, missing slices, ranks that disagree; with
    --deep also replicas that differ, NaN and Inf.  Exit code 0: nothing is wrong; 1: something is.
    """,
)
@options.source_options()
@options.resolve_options(
    "replicated",
    manifest=options.option(
        "--check-manifest",
        heading=options.SAFETY,
        flag_value="all",
        help="Compare all contents with the manifest; needs no strategy.",
    ),
)
@options.listed_under(
    options.SAFETY,
    "deep",
    "--deep",
    is_flag=True,
    help="Read all data, not only headers; compare replicas.",
)
@options.crc
@options.listed_under(
    options.SAFETY,
    "ignore",
    "--ignore",
    multiple=True,
    type=Choice([code for code, severity in severities("verify").items() if severity == "warning"]),
    metavar="CODE",
    help="Report warnings of this code as notes; repeat it for several codes.",
)
@options.run_options("jobs", "engine")
@options.report_options(limit=options.LIMIT)
def verify(
    source: Side,
    resolve: ResolveOptions,
    deep: bool,
    crc: bool,
    ignore: tuple[str, ...],
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Find what is wrong with a checkpoint."""
    options.refuse_two_strategies(source, resolve)
    catalog, strategy, _ = workflow.load(
        source.for_engine(run), report, find_strategy=not resolve.replicated, command="verify"
    )
    with ckpttool.open_engine(run.engine) as executor:
        found = ckpttool.verify(
            catalog,
            strategy,
            resolve,
            deep=deep,
            crc=crc,
            ignore=ignore,
            executor=executor,
            open_progress=open_progress("reading", report.hides_progress),
        )
    if report.as_json:
        tables.print_json(documents.describe_report(found, deep, report.limit))
    else:
        checked = {"checksums": crc, "hashes": resolve.manifest == "all"}
        tables.print_report(
            found, deep, [what for what, is_read in checked.items() if is_read], report
        )
    if found.findings:
        click.get_current_context().exit(1)
