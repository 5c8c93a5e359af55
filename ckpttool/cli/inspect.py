"""``ckpttool inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import documents, options, tables, workflow
from ckpttool.cli.documents import show_other
from ckpttool.errors import CkptToolError, FormatError, PlanError, raise_all
from ckpttool.model.catalog import MergedCatalog

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Source
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.diagnostics import Note


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
    """Show what a checkpoint holds, from headers alone."""
    from ckpttool.discovery.scan import scan_all

    if show_other(source.path, report.as_json):
        return
    errors: list[CkptToolError] = []
    catalog, strategy, _ = workflow.load(source, report, tolerated=errors, scan=scan_all)
    errors[:0] = catalog.damaged.values()
    errors += (PlanError([finding.text]) for finding in catalog.findings)
    catalog = _with_warnings(catalog)
    catalog = _verify(catalog, errors) if crc else catalog
    if isinstance(catalog, MergedCatalog) and strategy is None:
        document, notes = documents.describe_undivided(catalog)
    else:
        document, notes = documents.describe_checkpoint(catalog, strategy, errors)
    if report.as_json:
        documents.print_json(document)
    elif isinstance(catalog, MergedCatalog) and strategy is None:
        tables.print_undivided(catalog, document)
    elif catalog.files or not catalog.findings:
        tables.print_checkpoint(catalog, document)
    if not report.as_json:
        errors, notes = _told_once(errors, notes)
        documents.print_notes(notes, report.quiet)
    raise_all(errors)


def _with_warnings(catalog: Catalog) -> Catalog:
    """Turn the problems of a catalog into warnings: inspect shows what is there."""
    from dataclasses import replace

    from ckpttool.model.diagnostics import Note

    said = tuple(Note("unfinished", text, is_warning=True) for text in catalog.problems)
    return replace(catalog, notes=(*said, *catalog.notes))


def _told_once(
    errors: list[CkptToolError], notes: tuple[Note, ...]
) -> tuple[list[CkptToolError], tuple[Note, ...]]:
    """Join the note on who replaces a damaged file with the error of that file."""
    kept = list(notes)
    for i, error in enumerate(errors):
        for note in notes:
            told, damage, rest = note.text.partition(str(error))
            if note.is_warning and damage and isinstance(error, FormatError):
                errors[i] = type(error)(told + error.path, error.offset, error.reason + rest)
                kept.remove(note)
                break
    return errors, tuple(kept)


def _verify(catalog: Catalog, errors: list[CkptToolError]) -> Catalog:
    """Verify the checksums of all files; add errors to ``errors``, and a note otherwise."""
    from dataclasses import replace

    from ckpttool.execution.executors import default_jobs
    from ckpttool.storage.checksums import check_files

    with ckpttool.open_engine(f"threads:{default_jobs()}") as executor:
        found, notes = check_files(catalog, executor, crc=True)
    errors += found
    return replace(catalog, notes=(*catalog.notes, *notes))
