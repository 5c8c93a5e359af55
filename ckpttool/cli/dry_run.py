"""What ``--dry-run`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.cli import tables
from ckpttool.model.belonging import format_roles
from ckpttool.wording import count, format_bytes, format_numbers, format_ranks, format_sizes

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.execution.memory import Peak
    from ckpttool.execution.task_costs import Supply
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.plan import Plan
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
    work = found.work
    reads = f"{format_bytes(work.reads.nbytes)} in {count(work.reads.requests, 'request')}"
    reads += f", {format_bytes(work.over_read)} of it unused" if work.over_read else ""
    reads += f"; headers {format_bytes(found.headers.nbytes)}"
    reads += f", samples {format_bytes(found.samples.nbytes)}"
    supplies = [one for one in work.supplies if one.nbytes]  # a text is in the headers
    roles = found.plan.roles
    metas = [source.meta for source in found.largest_sharded]
    facts = {
        "Dry run": [outputs],
        "mean": [averaged] if averaged else [],
        "beside": [*found.beside],
        "shapes": [f"{one.name} {format_sizes(one.shape)}" for one in metas],
        "roles": [format_roles(roles)] if {*roles} - {"weight"} else [],
        "casts": [str(cast)] if (cast := found.casting) is not None else [],
        "reads": [reads],
        "writes": [f"{format_bytes(found.written_bytes)} in {count(work.tasks, 'task')}"],
        "needs": [_needs(supplies, found.plan, verbose)] if supplies else [],
        "memory": [_memory(found.peak)],
        "disk": [
            f"{format_bytes(one.need)} needed, {format_bytes(one.free)} free in {one.folder}"
            for one in found.space
        ],
    }
    tables.print_facts("Dry run", facts)
    if verbose and supplies:
        several = len(found.plan.inputs) > 1
        rows = (
            (
                format_numbers(one.ranks, ", "),
                format_numbers(need.ranks, ", "),
                *([str(need.input + 1)] if several else []),
                format_bytes(need.nbytes),
            )
            for one in supplies
            for need in one.needs
        )
        sources = f"source {_noun(found.plan.inputs)}s"
        columns = ("output ranks", sources, *(["input>"] if several else []), "bytes of each>")
        tables.print_table("what each output needs", columns, rows)


def _noun(inputs: Sequence[Catalog]) -> str:
    return "file" if all(one.is_merged for one in inputs) else "rank"


def _needs(supplies: Sequence[Supply], plan: Plan, verbose: bool) -> str:
    """Return which source ranks the outputs need, if it is short to say."""
    inputs, needed = plan.inputs, {tuple(one.ranks_of_inputs.items()) for one in supplies}
    if len(needed) == 1:
        (of_inputs,) = needed
        numbers: dict[str, list[int]] = {}
        for number, ranks in of_inputs:
            text = format_ranks(ranks, _noun([inputs[number]]), most=12)
            numbers.setdefault(text, []).append(number + 1)
        several = len(inputs) > 1
        texts = (
            text + (f" of {format_ranks(of, 'input')}" if several else "")
            for text, of in numbers.items()
        )
        return "; ".join(texts)
    noun = _noun(inputs)
    least, *_, most = sorted(sum(len(ranks) for _, ranks in one) for one in needed)
    text = f"{least} to {most} source {noun}s" if most > least else count(most, f"source {noun}")
    return f"{text} for each output{'' if verbose else '; -v lists them'}"


def _memory(peak: Peak) -> str:
    of = "each worker of " if peak.is_of_worker else ""
    return f"about {format_bytes(peak.nbytes)} for {of}{peak.engine}"
