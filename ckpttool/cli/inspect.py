"""``ckpttool inspect``."""

from __future__ import annotations

import click

from ckpttool.cli import options, report
from ckpttool.cli.beside import show_other
from ckpttool.errors import CkptToolError, raise_all


@click.command(
    short_help="Show what a checkpoint holds, from headers alone.",
    help="""\b
    ckpttool inspect checkpoint/ -s strategy.ckpt

    Show what a checkpoint holds, from headers alone.  SRC is a file, whose tensors are listed, or
    a folder of rank folders (or the output folder of a MindFormers run), whose ranks are listed,
    and with a strategy the tensors, their full shapes and layouts.  Group information, rank tables
    and graphs are shown as what they are.
    """,
)
@options.source
@options.src_strategy
@options.step
@options.pattern
@options.as_json
@options.quiet
@options.debug
def inspect(
    src: str,
    src_strategy: tuple[str, ...],
    step: str | None,
    pattern: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show what a checkpoint holds, from headers alone."""
    if show_other(src, as_json):
        return
    errors: list[CkptToolError] = []
    catalog, strategy, _ = options.load(src, pattern, step, src_strategy, tolerated=errors)
    errors[:0] = catalog.damaged.values()
    notes = catalog.notes
    is_file = catalog.is_undivided and strategy is None
    if is_file:
        document = report.describe_file(catalog.files[0])
    else:
        document, notes = report.describe_checkpoint(catalog, strategy, errors)
    if as_json:
        report.print_json(document)
    elif is_file:
        report.print_file(catalog.files[0])
    else:
        report.print_checkpoint(catalog, document)
    if not as_json:
        report.print_notes(notes, quiet)
    raise_all(errors)
