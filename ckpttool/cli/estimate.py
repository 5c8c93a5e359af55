"""What ``--dry-run`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.cli import tables
from ckpttool.wording import count, format_bytes, format_numbers, format_ranks, format_sizes

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.execution.estimate import Supply
    from ckpttool.execution.memory import Peak
    from ckpttool.operations.estimate import Estimate


def report_estimate(
    found: Estimate, outputs: str, report: ReportOptions, averaged: str = ""
) -> None:
    """Print what a run would do, as a document or for people; with ``verbose`` by rank.

    ``outputs`` says what it would write from what, and ``averaged`` of what it would be the mean.
    """
    if report.as_json:
        from ckpttool.operations.documents import estimate as document

        tables.print_json(document(found))
    elif not report.quiet:
        _print(found, outputs, averaged, report.verbose)


def _print(found: Estimate, outputs: str, averaged: str, verbose: bool) -> None:
    work, catalog = found.work, found.source
    noun = "file" if catalog.is_merged else "rank"
    reads = f"{format_bytes(work.reads.nbytes)} in {count(work.reads.requests, 'request')}"
    reads += f", {format_bytes(work.over_read)} of it unused" if work.over_read else ""
    reads += f"; headers {format_bytes(found.headers.nbytes)}"
    reads += f", samples {format_bytes(found.samples.nbytes)}"
    supplies = [one for one in work.supplies if one.nbytes]  # a text is in the headers
    metas = [source.meta for source in found.largest_sharded]
    facts = {
        "Dry run": [outputs],
        "mean": [averaged] if averaged else [],
        "beside": [*found.beside],
        "shapes": [f"{one.name} {format_sizes(one.shape)}" for one in metas],
        "casts": [str(cast)] if (cast := found.casting) is not None else [],
        "reads": [reads],
        "writes": [f"{format_bytes(found.written_bytes)} in {count(work.tasks, 'task')}"],
        "needs": [_needs(supplies, noun, verbose)] if supplies else [],
        "memory": [_memory(found.peak)],
        "disk": [
            f"{format_bytes(one.need)} needed, {format_bytes(one.free)} free in {one.folder}"
            for one in found.space
        ],
    }
    tables.print_facts("Dry run", facts)
    if verbose and supplies:
        rows = (
            (format_numbers(one.ranks, ", "), format_numbers(need.ranks, ", "), need.nbytes)
            for one in supplies
            for need in one.needs
        )
        columns = ("output ranks", f"source {noun}s", "bytes of each>")
        cells = ((*ranks, format_bytes(nbytes)) for *ranks, nbytes in rows)
        tables.print_table("what each output needs", columns, cells)


def _needs(supplies: Sequence[Supply], noun: str, verbose: bool) -> str:
    """Return which source ranks the outputs need, if it is short to say."""
    needed = {tuple(sorted(one.nbytes)) for one in supplies}
    if len(needed) == 1:
        (ranks,) = needed
        return format_ranks(ranks, noun, most=12)
    least, *_, most = sorted(map(len, needed))
    several = f"{least} to {most} source {noun}s" if most > least else count(most, f"source {noun}")
    return f"{several} for each output{'' if verbose else '; -v lists them'}"


def _memory(peak: Peak) -> str:
    """Return the memory of a run, and of whom it is."""
    of = "each worker of " if peak.is_of_worker else ""
    return f"about {format_bytes(peak.nbytes)} for {of}{peak.engine}"
