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

    found = diff_strategies(ckpttool.read_strategy(a), ckpttool.read_strategy(b))
    if report.as_json:
        limited = replace(found, differences=found.differences[: report.limit])
        tables.print_json(limited.to_dict())
    else:
        _print(f"A {a} and B {b}", found, report)
    if not found.equal:
        click.get_current_context().exit(1)


def _print(sides: str, found: StrategyComparison, report: ReportOptions) -> None:
    """Print a verdict, the differences and the notes."""
    label = "equal" if found.equal else "different"
    parts = [f"{number} {_WORDS[kind]}" for kind, number in found.counts.items()]
    if found.a.ranks != found.b.ranks:
        parts[:0] = [f"{found.a.ranks} and {count(found.b.ranks, 'rank')}"]
    verdict = f": {', '.join(parts)}" if parts else ""
    if verdict or not report.quiet:
        tables.print_text(f"{sides}{verdict} ({count(found.tensors, 'tensor')})", label)

    def show(rows: Sequence[DifferenceRow]) -> None:
        tables.print_table("differences", ("tensors", "what", "A", "B"), map(_cells, rows))

    tables.print_first(found.rows, report.limit, show)
    if found.respelled and not report.quiet:
        text = f"{count(len(found.respelled), 'tensor')} with other device matrices or maps, and "
        tables.print_text(f"{text}the same slices on every rank: {shorten(found.respelled, 3)}")
    if found.by_patterns and not (found.equal or report.quiet):
        text = "Patterns were compared, and their order; only names show whether others are equal."
        tables.print_text(text)
    tables.print_notes(found.notes, found.notes.severity_of, report.quiet)


def _cells(row: DifferenceRow) -> Sequence[str]:
    """Return the cells of a row."""
    found, prefixes = row.difference, [one for one in row.prefixes if one]
    if "" in row.prefixes:
        name = f"{row.pattern} + {', '.join(prefixes)}" if prefixes else row.pattern
    else:
        name = row.pattern if not prefixes else f"{', '.join(prefixes)} of {row.pattern}"
    if found.kind == "stages":
        sides = [format_ranks([one.stage for one in side], "stage") for side in (found.a, found.b)]
    elif found.kind == "shape":
        sides = [format_sizes(side[0].full_shape or ()) for side in (found.a, found.b)]
    else:
        sides = [_show(side) for side in (found.a, found.b)]
    return (name, found.kind, *sides)


def _show(layouts: Sequence[Layout]) -> str:
    """Return how a side shards a parameter; "" if it does not list it."""
    from ckpttool.operations.summary import entries_of_layouts, sharded_text

    texts: dict[str, list[int]] = {}
    for one in layouts:
        (entry,) = entries_of_layouts({"": (one,)})
        placement = entry.placement
        how = sharded_text(placement) if placement.is_sharded else "in full"
        shown = f"{how} on {format_shape(one.device_matrix)}"
        texts.setdefault(shown, []).append(one.stage)
    if len(texts) < 2:
        return "".join(texts)
    return "; ".join(f"{format_ranks(stages, 'stage')}: {text}" for text, stages in texts.items())
