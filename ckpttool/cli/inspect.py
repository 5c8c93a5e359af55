"""``ckpttool inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables, workflow
from ckpttool.model.catalog import MergedCatalog
from ckpttool.model.diagnostics import Diagnostics

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Side


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool inspect checkpoint/ -s strategy.ckpt

    Show what a checkpoint holds, from headers alone.  With a strategy: the full shape and the
    layout of every tensor.  SRC is a folder of rank folders, a file, or a folder with an index.
    """,
)
@options.source_options()
@options.crc
@options.report_options()
def inspect(source: Side, crc: bool, report: ReportOptions) -> None:
    """Show the contents of a checkpoint, from headers alone."""
    from ckpttool.execution.executors import default_jobs
    from ckpttool.verification.describe import describe_foreign

    foreign = describe_foreign(source.path)
    if foreign is not None:
        (tables.print_json if report.as_json else tables.print_foreign)(foreign)
        return
    diagnostics = Diagnostics("inspect")
    catalog, strategy, _ = workflow.load(source, report, command="inspect", diagnostics=diagnostics)
    reads_header_only = isinstance(catalog, MergedCatalog) and strategy is None and not crc
    engine = "inline" if reads_header_only else f"threads:{default_jobs()}"
    with ckpttool.open_engine(engine) as executor:
        document = ckpttool.describe(
            catalog, strategy, crc=crc, executor=executor, diagnostics=diagnostics
        )
    if report.as_json:
        tables.print_json(document)
    elif isinstance(catalog, MergedCatalog) and strategy is None:
        tables.print_merged(catalog, document)
    elif catalog.files or not catalog.errors("inspect"):
        tables.print_checkpoint(catalog, document)
    if not report.as_json:
        # The error of a damaged file says which replicas are read instead.
        notes = (n for n in diagnostics.of("note", "warning") if n.code != "damaged_replica")
        tables.print_notes(notes, diagnostics.severity_of, report.quiet)
    diagnostics.raise_if_errors()
