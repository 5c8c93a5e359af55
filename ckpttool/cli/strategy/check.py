"""``ckpttool strategy check``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import StrategyFile, UsageProblem
from ckpttool.model.joining import join_alike
from ckpttool.wording import count, shorten

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.operations.strategy_check import Candidate

MAX_FINDINGS = 3  # of a strategy on the screen
_UNPROVEN = {
    "axis": "nothing shows on which axis {} sharded",
    "order": "nothing shows in which order ranks hold the slices of {}",
    "owners": "nothing shows which ranks hold the same of {}",
}


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
    findings = [*join_alike(candidate.findings)]
    reason = ", ".join(_evidence(candidate)) if candidate.is_open else findings.pop(0).message
    tables.print_text(f"{candidate.verdict}: {reason}", candidate.path)
    for finding in findings[:MAX_FINDINGS]:
        tables.print_text(f"  {finding.fact}", indent=4)
        if finding.facts:
            tables.print_text(f"    {finding.facts}", indent=6)
    if (more := len(findings) - MAX_FINDINGS) > 0:
        tables.print_text(f"  and {more} more (--json all)", indent=4)
    for aspect, names in candidate.unproven.items():
        tensors = count(len(names), "tensor")
        if aspect == "axis":
            tensors += " is" if len(names) == 1 else " are"
        unproven = _UNPROVEN[aspect].format(tensors)
        tables.print_text(f"  {unproven}: {shorten(names, 3)}", indent=4)


def _evidence(candidate: Candidate) -> Iterator[str]:
    """Yield what was compared."""
    yield f"{candidate.files} of {count(candidate.ranks or 0, 'rank')}"
    yield f"{candidate.listed} of {count(candidate.tensors, 'tensor')}"
    if candidate.agreeing:
        yield "replicas equal"
    if candidate.shaped:
        yield f"full shapes of {count(candidate.shaped, 'sharded tensor')} as listed"
    if candidate.recorded:
        yield "the manifest names it or its equal"
