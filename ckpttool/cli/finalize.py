"""``ckpttool finalize``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import Existing
from ckpttool.cli.progress import open_progress
from ckpttool.problems import severities
from ckpttool.wording import count, format_bytes

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.problems import Diagnostic


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool finalize new/

    Check that all parts of a set (--part K/N) are written, and complete it: write DIR/ckpttool.json
    and the indexes.  DIR is the folder of the outputs, or the one output file.
    """,
)
@click.argument(
    "folder", metavar="DIR", type=Existing("the folder of the outputs, or the one output file")
)
@options.variant("wait_seconds", help="Wait so long (90s, 10m, 1h) for runs that write there.")(
    "wait_seconds", options.SAFETY
)
@options.report_options()
def finalize(folder: str, wait_seconds: float | None, report: ReportOptions) -> None:
    """Mark the outputs of several runs with --part complete."""

    def print_note(note: Diagnostic) -> None:
        tables.print_notes([note], severities("convert"), report.quiet)

    show = open_progress("waiting", report.shown_progress)
    manifest = ckpttool.finalize(
        folder, wait_seconds=wait_seconds, open_progress=show, on_note=print_note
    )
    tables.print_notes(manifest.notes, severities("convert"), report.quiet)
    if report.as_json:
        from ckpttool.operations.finalized import Finalized

        tables.print_json(Finalized.of(folder, manifest, options.typed_command()).to_dict())
        return
    size = format_bytes(sum(output.nbytes for output in manifest.outputs))
    step = f", step {manifest.step}" if manifest.step else ""
    if not report.quiet:
        if (left_out := manifest.left_out) is not None:
            tensors, nbytes = count(left_out.tensors, "tensor"), format_bytes(left_out.nbytes)
            tables.print_text(f"Left out, as requested: {tensors}, {nbytes}")
        if manifest.renamed:
            tables.print_text(f"Renamed {count(manifest.renamed, 'tensor')}")
        if (cast := manifest.cast) is not None:
            tables.print_text(f"Cast {count(cast.elements, 'number')}; {cast}")
        files = count(len(manifest.outputs), "file")
        tables.print_text(f"{folder}: complete: {files}, {size}{step}")
