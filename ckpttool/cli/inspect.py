"""``ckpttool inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import documents, options, tables, workflow
from ckpttool.errors import CkptToolError, FormatError
from ckpttool.model.catalog import MergedCatalog
from ckpttool.model.diagnostics import Diagnostic, Diagnostics, severities

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Source


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool inspect checkpoint/ -s strategy.ckpt

    Show what a checkpoint holds, from headers alone (with a strategy some pages of the tensors show
    whether it is true).  SRC is a file or a folder with an index
    (param_name_map.json, model.safetensors.index.json), whose tensors are listed, or a folder of
    rank folders (or the output folder of a MindFormers run), whose ranks are listed, and with a
    strategy the tensors, their full shapes and layouts.  A checkpoint that describes itself is
    shown like this without one.  Group information, rank tables and graphs are shown as what they
    are.
    """,
)
@options.source()
@options.crc
@options.report()
def inspect(source: Source, crc: bool, report: ReportOptions) -> None:
    """Show the contents of a checkpoint, from headers alone."""
    from ckpttool.discovery.scan import scan_all
    from ckpttool.execution.executors import default_jobs

    if documents.print_foreign(source.path, report.as_json):
        return
    diagnostics = Diagnostics("inspect")
    catalog, strategy, _ = workflow.load(
        source, report, tolerated=diagnostics.failures, scan=scan_all
    )
    reads_header_only = isinstance(catalog, MergedCatalog) and strategy is None and not crc
    engine = "inline" if reads_header_only else f"threads:{default_jobs()}"
    with ckpttool.open_engine(engine) as executor:
        document = ckpttool.describe(
            catalog, strategy, crc=crc, executor=executor, diagnostics=diagnostics
        )
    if report.as_json:
        documents.print_json(document)
    elif isinstance(catalog, MergedCatalog) and strategy is None:
        tables.print_merged(catalog, document)
    elif catalog.files or not catalog.errors("inspect"):
        tables.print_checkpoint(catalog, document)
    if not report.as_json:
        notes = diagnostics.of("note", "warning")
        diagnostics.failures, notes = _join_replaced(diagnostics.failures, notes)
        documents.print_notes(notes, report.quiet, severities("inspect"))
    diagnostics.raise_if_errors()


def _join_replaced(
    errors: list[CkptToolError], notes: tuple[Diagnostic, ...]
) -> tuple[list[CkptToolError], tuple[Diagnostic, ...]]:
    """Join the error of a damaged file with the diagnostic on the replicas that replace it."""
    replaced = {note.path: note for note in notes if note.code == "damaged_replica"}
    joined: list[CkptToolError] = []
    for error in errors:
        if isinstance(error, FormatError) and (note := replaced.get(error.path)) is not None:
            where = f"rank {note.ranks[0]}: {error.path}"
            error = type(error)(where, error.offset, f"{error.reason}; {note.hint}")
        joined.append(error)
    return joined, tuple(note for note in notes if note.code != "damaged_replica")
