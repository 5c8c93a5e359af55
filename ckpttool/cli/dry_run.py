"""What ``--dry-run`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.cli import tables
from ckpttool.execution.executors import is_cluster
from ckpttool.model.belonging import format_roles
from ckpttool.wording import count, format_bytes, format_ranks, format_sizes

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.model.catalog import Catalog
    from ckpttool.operations.conversion import Conversion, DryRun, Memory, Supply


def report_estimate(
    answer: Conversion, outputs: str, report: ReportOptions, averaged: str = ""
) -> None:
    """Print what a run would do, as a document or for people; with ``verbose`` by rank.

    ``outputs`` says what it would write from what, and ``averaged`` of what it would be the mean.
    """
    if report.as_json:
        tables.print_json(answer.to_dict())
    elif not report.quiet and answer.dry_run is not None:
        _print(answer, answer.dry_run, outputs, averaged, report.verbose)


def _print(answer: Conversion, takes: DryRun, outputs: str, averaged: str, verbose: bool) -> None:
    data, over_read = takes.reads.data, takes.reads.over_read
    reads = f"{format_bytes(data.nbytes)} in {count(data.requests, 'request')}"
    reads += f", {format_bytes(over_read)} of it unused" if over_read else ""
    reads += f"; headers {format_bytes(takes.reads.headers.nbytes)}"
    reads += f", samples {format_bytes(takes.reads.samples.nbytes)}"
    supplies = [supply for supply in takes.sources if supply.needs]  # a text is in the headers
    roles, inputs = answer.roles or {}, answer.planned.inputs
    sharded = answer.largest_sharded or ()
    facts = {
        "outputs": [outputs],
        "mean": [averaged] if averaged else [],
        "beside": [*answer.beside],
        "shapes": [f"{tensor.name} {format_sizes(tensor.shape)}" for tensor in sharded],
        "roles": [format_roles(roles)] if {*roles} - {"weight"} else [],
        "casts": [] if answer.cast is None else [str(answer.cast)],
        "reads": [reads],
        "writes": [f"{format_bytes(takes.writes.nbytes)} in {count(takes.tasks, 'task')}"],
        "needs": [_needs(supplies, inputs, verbose)] if supplies else [],
        "memory": [_memory(takes.memory)],
        "disk": [
            f"{format_bytes(space.need)} needed, {format_bytes(space.free)} free in {space.folder}"
            for space in takes.disks
        ],
    }
    tables.print_facts("Dry run", facts)
    if verbose and supplies:
        number = ["input>"] if len(inputs) > 1 else []
        columns = ("output ranks", f"source {_noun(inputs)}s", *number, "bytes of each>")
        tables.print_table("what each output needs", columns, answer.rows_of_needs())


def _noun(inputs: Sequence[Catalog]) -> str:
    return "file" if all(item.is_merged for item in inputs) else "rank"


def _needs(supplies: Sequence[Supply], inputs: Sequence[Catalog], verbose: bool) -> str:
    """Return which source ranks the outputs need, if it is short to say."""
    needed = {tuple(_ranks_of_inputs(supply).items()) for supply in supplies}
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


def _ranks_of_inputs(supply: Supply) -> dict[int, tuple[int, ...]]:
    ranks: dict[int, tuple[int, ...]] = {}
    for need in supply.needs:
        number = need.input or 0
        ranks[number] = tuple(sorted((*ranks.get(number, ()), *need.ranks)))
    return ranks


def _memory(memory: Memory) -> str:
    of = "each worker of " if is_cluster(memory.engine) else ""
    return f"about {format_bytes(memory.nbytes)} for {of}{memory.engine}"
