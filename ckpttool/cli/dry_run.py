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
    answer: Estimate, outputs: str, report: ReportOptions, averaged: str = ""
) -> None:
    """Print what a run would do, as a document or for people; with ``verbose`` by rank.

    ``outputs`` says what it would write from what, and ``averaged`` of what it would be the mean.
    """
    if report.as_json:
        from ckpttool.operations.documents import estimate as document

        tables.print_json(document(answer))
    elif not report.quiet:
        _print(answer, outputs, averaged, report.verbose)


def _print(answer: Estimate, outputs: str, averaged: str, verbose: bool) -> None:
    work = answer.work
    reads = f"{format_bytes(work.reads.nbytes)} in {count(work.reads.requests, 'request')}"
    reads += f", {format_bytes(work.over_read)} of it unused" if work.over_read else ""
    reads += f"; headers {format_bytes(answer.headers.nbytes)}"
    reads += f", samples {format_bytes(answer.samples.nbytes)}"
    supplies = [supply for supply in work.supplies if supply.nbytes]  # a text is in the headers
    roles = answer.plan.roles
    metas = [source.meta for source in answer.largest_sharded]
    facts = {
        "Dry run": [outputs],
        "mean": [averaged] if averaged else [],
        "beside": [*answer.beside],
        "shapes": [f"{meta.name} {format_sizes(meta.shape)}" for meta in metas],
        "roles": [format_roles(roles)] if {*roles} - {"weight"} else [],
        "casts": [str(cast)] if (cast := answer.casting) is not None else [],
        "reads": [reads],
        "writes": [f"{format_bytes(answer.written_bytes)} in {count(work.tasks, 'task')}"],
        "needs": [_needs(supplies, answer.plan, verbose)] if supplies else [],
        "memory": [_memory(answer.peak)],
        "disk": [
            f"{format_bytes(space.need)} needed, {format_bytes(space.free)} free in {space.folder}"
            for space in answer.space
        ],
    }
    tables.print_facts("Dry run", facts)
    if verbose and supplies:
        several = len(answer.plan.inputs) > 1
        rows = (
            (
                format_numbers(supply.ranks, ", "),
                format_numbers(need.ranks, ", "),
                *([str(need.input + 1)] if several else []),
                format_bytes(need.nbytes),
            )
            for supply in supplies
            for need in supply.needs
        )
        sources = f"source {_noun(answer.plan.inputs)}s"
        columns = ("output ranks", sources, *(["input>"] if several else []), "bytes of each>")
        tables.print_table("what each output needs", columns, rows)


def _noun(inputs: Sequence[Catalog]) -> str:
    return "file" if all(item.is_merged for item in inputs) else "rank"


def _needs(supplies: Sequence[Supply], plan: Plan, verbose: bool) -> str:
    """Return which source ranks the outputs need, if it is short to say."""
    inputs, needed = plan.inputs, {tuple(supply.ranks_of_inputs.items()) for supply in supplies}
    if len(needed) == 1:
        (of_inputs,) = needed
        numbers: dict[str, list[int]] = {}
        for number, ranks in of_inputs:
            needed_ranks = format_ranks(ranks, _noun([inputs[number]]), most=12)
            numbers.setdefault(needed_ranks, []).append(number + 1)
        several = len(inputs) > 1
        texts = (
            needed_text + (f" of {format_ranks(of, 'input')}" if several else "")
            for needed_text, of in numbers.items()
        )
        return "; ".join(texts)
    noun = _noun(inputs)
    least, *_, most = sorted(sum(len(ranks) for _, ranks in of_inputs) for of_inputs in needed)
    numbers_text = f"{least} to {most} source {noun}s"
    numbers_text = numbers_text if most > least else count(most, f"source {noun}")
    return f"{numbers_text} for each output{'' if verbose else '; -v lists them'}"


def _memory(peak: Peak) -> str:
    of = "each worker of " if peak.is_of_worker else ""
    return f"about {format_bytes(peak.nbytes)} for {of}{peak.engine}"
