"""``ckpttool strategy ranks``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import RANK_FILES, UsageProblem
from ckpttool.problems import severities
from ckpttool.wording import format_numbers

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.planning.needs import RankNeeds


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool strategy ranks -s strategy.ckpt \\
        -d new_strategy.ckpt --rank 0-7

    Print which source ranks each target rank needs, from the strategies alone, and in brackets
    those of which one is enough.  Without -d they are those that a merge needs.  `also` are ranks
    to fetch with them: they would show an optimizer shard that the strategy hides.
    """,
)
@options.strategy("SRC", "-s", required=True)("src_strategy", options.STRATEGY)
@options.strategy("the target", "-d")("dst_strategy", options.STRATEGY)
@options.variant("ranks", help="Only these target ranks, such as 0,3-7.")("ranks", options.STRATEGY)
@options.option(
    "Print the files to fetch, such as 'ckpt/rank_{rank}/net-1_10.ckpt'.",
    type=RANK_FILES,
)("files", options.DISPLAY)
@options.option("Print the files relative to DIR, which has all of them.", metavar="DIR")(
    "relative_to", options.DISPLAY
)
@options.flag("End each file with a NUL byte, for xargs -0.", "-0", "--null")(
    "null", options.DISPLAY
)
@options.report_options()
def ranks(
    src_strategy: tuple[str, ...],
    dst_strategy: tuple[str, ...],
    ranks: tuple[int, ...] | None,
    files: str | None,
    relative_to: str | None,
    null: bool,
    report: ReportOptions,
) -> None:
    """Print which source ranks a target needs."""
    from ckpttool.operations.strategies import RanksToFetch, files_to_fetch
    from ckpttool.planning.needs import find_needs

    if ranks is not None and not dst_strategy:
        raise UsageProblem("--rank is of the target", "-d STRATEGY", "A merge needs one set.")
    if files is None and (null or relative_to is not None):
        flag = "-0" if null else "--relative-to"
        raise UsageProblem(f"{flag} is about the files to fetch", "--files PATTERN")
    src = ckpttool.read_strategy(src_strategy)
    dst = ckpttool.read_strategy(dst_strategy) if dst_strategy else None
    needs = find_needs(src, dst, ranks)
    paths = None if files is None else files_to_fetch(needs, files, relative_to)
    tables.print_notes(needs.notes, severities("convert"), report.quiet)
    if report.as_json:
        tables.print_json(RanksToFetch.of(needs, paths).to_dict())
    elif paths is not None:
        end = "\0" if null else "\n"
        tables.echo("".join(f"{path}{end}" for path in paths), end="")
    elif not report.quiet:
        for rank in needs.ranks:
            name = "merge" if dst is None else f"rank {rank.rank}"
            tables.print_text(_line(name, rank))
        if len(needs.ranks) > 1:
            tables.print_text(_line("together", replace(needs.together, groups=())))


def _line(name: str, needs: RankNeeds) -> str:
    several = [format_numbers(ranks) for ranks in needs.groups if len(ranks) > 1]
    alternatives = f" ({'; '.join(f'one of {ranks}' for ranks in several)})" if several else ""
    fetch = format_numbers(needs.fetch) or "any rank"
    also = ", which would show a hidden optimizer shard"
    also = f"; also: {format_numbers(needs.also)}{also}" if needs.also else ""
    return f"{name}: {fetch}{alternatives}{also}"
