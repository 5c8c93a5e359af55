"""What convert and merge print of the file that they wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.cli import tables
from ckpttool.wording import count, format_bytes

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.operations.strategies import WrittenStrategy


def print_written(written: WrittenStrategy, report: ReportOptions) -> None:
    """Print which file was written, or its document, and the notes."""
    tables.print_notes(written.notes, written.notes.severity_of, report.quiet)
    if report.as_json:
        tables.print_json(written.to_dict())
        return
    if report.quiet:
        return
    strategy = written.strategy
    tensors = count(written.tensors, "tensor")
    if strategy.rules is not None:
        tensors = count(len(strategy.rules.rules), "line")
    sizes = [count(written.ranks, "rank"), tensors, format_bytes(written.nbytes)]
    sizes[1:1] = [count(written.stages, "stage")] if written.stages > 1 else []
    tables.print_text(f"Wrote {written.path} ({written.form}, {', '.join(sizes)})")
