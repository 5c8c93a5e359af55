"""``ckpttool strategy diff``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import StrategyFile
from ckpttool.wording import count, format_ranks, format_shape, format_sizes, shorten

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.model.layout import Layout
    from ckpttool.operations.strategy_diff import DifferenceRow, StrategyComparison

_WORDS = {  # by kind of difference
    "only in A": "only in A",
    "only in B": "only in B",
    "stages": "in other stages",
    "slices": "in other slices",
    "optimizer shard": "with another optimizer shard",
    "shape": "of another full shape",
    "order": "after other patterns",
}


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool strategy diff strategy.ckpt new_strategy.ckpt

    Compare two strategies, parameter by parameter: which ranks hold which slices, in which stages,
    with which optimizer shard.  A and B are files, or folders with those of all stages.  Exit code
    0: every rank holds the same; 1: they differ.
    """,
)
@click.argument("a", type=StrategyFile())
@click.argument("b", type=StrategyFile())
@options.report_options(limit=options.LIMIT)
def diff(a: str, b: str, report: ReportOptions) -> None:
    """Compare two strategies, parameter by parameter."""
    from ckpttool.operations.strategy_diff import diff_strategies

    comparison = diff_strategies(ckpttool.read_strategy(a), ckpttool.read_strategy(b))
    if report.as_json:
        limited = replace(comparison, differences=comparison.differences[: report.limit])
        tables.print_json(limited.to_dict())
    else:
        _print(f"A {a} and B {b}", comparison, report)
    if not comparison.equal:
        click.get_current_context().exit(1)


def _print(sides: str, comparison: StrategyComparison, report: ReportOptions) -> None:
    """Print a verdict, the differences and the notes."""
    label = "equal" if comparison.equal else "different"
    parts = [f"{number} {_WORDS[kind]}" for kind, number in comparison.counts.items()]
    if comparison.a.ranks != comparison.b.ranks:
        parts[:0] = [f"{comparison.a.ranks} and {count(comparison.b.ranks, 'rank')}"]
    verdict = f": {', '.join(parts)}" if parts else ""
    if verdict or not report.quiet:
        tables.print_text(f"{sides}{verdict} ({count(comparison.tensors, 'tensor')})", label)

    def show(rows: Sequence[DifferenceRow]) -> None:
        tables.print_table("differences", ("tensors", "what", "A", "B"), map(_cells, rows))

    tables.print_first(comparison.rows, report.limit, show)
    if comparison.respelled and not report.quiet:
        tensors = count(len(comparison.respelled), "tensor")
        names = shorten(comparison.respelled, 3)
        what = f"{tensors} with other device matrices or maps, and the same slices on every rank"
        tables.print_text(f"{what}: {names}")
    if comparison.by_patterns and not (comparison.equal or report.quiet):
        doubt = "Patterns were compared, and their order; only names show whether others are equal."
        tables.print_text(doubt)
    tables.print_notes(comparison.notes, comparison.notes.severity_of, report.quiet)


def _cells(row: DifferenceRow) -> Sequence[str]:
    """Return the cells of a row."""
    difference = row.difference
    if difference.kind == "stages":
        stages = ([layout.stage for layout in side] for side in (difference.a, difference.b))
        sides = [format_ranks(numbers, "stage") for numbers in stages]
    elif difference.kind == "shape":
        sides = [format_sizes(side[0].full_shape or ()) for side in (difference.a, difference.b)]
    else:
        sides = [_show(side) for side in (difference.a, difference.b)]
    return (row.name(), difference.kind, *sides)


def _show(layouts: Sequence[Layout]) -> str:
    """Return how a side shards a parameter; "" if it does not list it."""
    from ckpttool.operations.summary import entries_of_layouts, sharded_text

    texts: dict[str, list[int]] = {}
    for layout in layouts:
        (entry,) = entries_of_layouts({"": (layout,)})
        placement = entry.placement
        how = sharded_text(placement) if placement.is_sharded else "in full"
        shown = f"{how} on {format_shape(layout.device_matrix)}"
        texts.setdefault(shown, []).append(layout.stage)
    if len(texts) < 2:
        return "".join(texts)
    return "; ".join(f"{format_ranks(stages, 'stage')}: {it}" for it, stages in texts.items())
