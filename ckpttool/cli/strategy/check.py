"""``ckpttool strategy check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import StrategyFile, UsageProblem

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.operations.strategy_check import Candidate

MAX_FINDINGS = 3  # of a strategy on the screen


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool strategy check checkpoint/ \\
        strategy.ckpt new_strategy.ckpt

    Say of each strategy whether it fits a checkpoint: proven, possible or no, the best first, with
    the doubts below.  Samples of the contents are compared.  STRATEGY is a file, or the folder with
    those of all stages.  Exit code 0: one is proven or possible; 1: none is.
    """,
)
@options.source_options("src", "step", "pattern", "key")
@click.argument("strategies", nargs=-1, type=StrategyFile(), metavar="[STRATEGY]...")
@options.report_options()
def check(source: Side, strategies: tuple[str, ...], report: ReportOptions) -> None:
    """Say which strategy fits a checkpoint."""
    from ckpttool.execution.executors import default_jobs
    from ckpttool.operations.load import load
    from ckpttool.operations.strategy_check import StrategyCheck, check_strategies
    from ckpttool.strategy_files.near import option_of

    if not strategies:
        raise UsageProblem("strategy check needs STRATEGY")
    catalog, _, _ = load(
        source.source, find_strategy=False, command="inspect", open_count=report.open_count
    )
    with ckpttool.open_engine(f"threads:{default_jobs()}") as executor:
        candidates = check_strategies(catalog, strategies, executor)
        is_open = any(candidate.is_open for candidate in candidates)
        together = () if is_open or not strategies[1:] else (strategies,)
        joined = check_strategies(catalog, together, executor)
    if report.as_json:
        tables.print_json(StrategyCheck(catalog.root, catalog.step, candidates).to_dict())
    else:
        for candidate in candidates:
            _print_candidate(candidate, report)
        if any(candidate.is_open for candidate in joined):
            tables.print_text(f"Try: {option_of(strategies)}, as together they are one strategy")
    if not is_open:
        click.get_current_context().exit(1)


def _print_candidate(candidate: Candidate, report: ReportOptions) -> None:
    """Print the verdict and the evidence."""
    if report.quiet and candidate.is_open:
        return
    tables.print_text(f"{candidate.verdict}: {candidate.evidence}", candidate.path)
    findings = candidate.reasons[not candidate.is_open :]
    for finding in findings[:MAX_FINDINGS]:
        tables.print_text(f"  {finding.fact}", indent=4)
        if finding.facts:
            tables.print_text(f"    {finding.facts}", indent=6)
    if (more := len(findings) - MAX_FINDINGS) > 0:
        tables.print_text(f"  and {more} more (--json all)", indent=4)
    for doubt in candidate.doubts:
        tables.print_text(f"  {doubt}", indent=4)
