"""``ckpttool strategy check``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, retyped, tables
from ckpttool.cli.params import StrategyFile, UsageProblem, whole_number
from ckpttool.problems import CkptToolError, join_alike, join_clauses
from ckpttool.wording import count, format_shape, shorten

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.operations.strategy_check import Candidate, DeviceFit

MAX_FINDINGS = 3  # of a strategy on the screen
_UNPROVEN = {
    "axis": "nothing shows on which axis {} sharded",
    "order": "nothing shows in which order ranks hold the slices of {}",
    "owners": "nothing shows which ranks hold the same of {}",
}
_VERDICTS = {"fits": "fits", "unknown": "cannot be known", "misfit": "does not fit"}


@click.command(
    cls=options.GroupedCommand,
    misplaced=dict.fromkeys(
        ("-s", "--src-strategy", "--strategy"),
        options.Misplaced("Strategies are named without an option.", ""),
    ),
    help="""\b
    ckpttool strategy check checkpoint/ strategy.ckpt new_strategy.ckpt

    Say of each strategy whether it fits a checkpoint: it fits, does not, or cannot be known; with
    evidence, the best first.  Samples of the contents are compared.  STRATEGY is a file, or the
    folder with those of all stages.  Exit code 0: nothing is found against one; 1: against each.
    """,
)
@options.source_options("src", "step", "pattern", "key")
@click.argument("strategies", nargs=-1, type=StrategyFile(), metavar="[STRATEGY]...")
@options.option(
    "Say which device matrices of N devices (of a stage) fit each axis, too.",
    type=whole_number(1, 1 << 20),
    metavar="N",
)("devices", options.STRATEGY)
@options.report_options()
def check(
    source: Side, strategies: tuple[str, ...], devices: int | None, report: ReportOptions
) -> None:
    """Say which strategy fits a checkpoint."""
    from ckpttool.cli import workflow
    from ckpttool.execution.executors import default_jobs
    from ckpttool.operations.look import resolve
    from ckpttool.operations.strategy_check import check_strategies, fit_devices

    if not strategies and devices is None:
        raise UsageProblem("strategy check needs STRATEGY, or --devices N")
    if _are_stages(strategies):
        raise _refuse_stages(source.path, strategies)
    try:
        catalog, found, _ = workflow.load(
            source, report, find_strategy=not strategies, command="inspect"
        )
    except CkptToolError as error:
        if _is_strategy(source.path):
            raise _exchange_paths(source.path, strategies) from error
        raise
    given = strategies or ((found,) if found is not None else ())
    if not given and catalog.needs_strategy:
        facts = "The ranks hold slices, and a strategy says of which axes."
        raise UsageProblem(f"strategy check needs STRATEGY for {catalog.root}", facts=facts)
    with ckpttool.open_engine(f"threads:{default_jobs()}") as executor:
        candidates = check_strategies(catalog, given, executor)
        fits = None
        if devices is not None:
            checkpoint = candidates[0].checkpoint if candidates else resolve(catalog)
            fits = () if checkpoint is None else fit_devices(checkpoint, devices)
    if report.as_json:
        from ckpttool.operations import documents

        tables.print_json(documents.strategy_check(catalog, candidates, fits))
    else:
        for one in candidates:
            _print_candidate(one, report)
        if fits and not report.quiet:
            _print_devices(fits)
    if candidates and not any(one.is_open for one in candidates):
        click.get_current_context().exit(1)


def _are_stages(strategies: Sequence[str]) -> bool:
    """Return whether strategies are one together, and some of them none by themselves."""
    if len(strategies) < 2:
        return False
    try:
        ckpttool.read_strategy(strategies)
    except CkptToolError:
        return False
    return not all(StrategyFile().fits(Path(path)) for path in strategies)


def _refuse_stages(src: str, strategies: Sequence[str]) -> UsageProblem:
    """Return the problem of the files of stages, of which each would be a strategy of its own."""
    ctx = click.get_current_context()
    folder = retyped.folder_of(strategies)
    facts = join_clauses(shorten(strategies, 3), retyped.EXPANDED if folder else "")
    hint = f"{ctx.command_path} {join([src, folder])}"
    if not folder:
        hint = f"ckpttool strategy merge {join(strategies)} -o merged.ckpt"
    text = "the strategies are the stages of one"
    return UsageProblem(text, hint, facts, ctx=ctx)


def _is_strategy(path: str) -> bool:
    """Return whether a path is a strategy file, or a folder with nothing else in it."""
    from ckpttool.formats.local import is_folder, list_readable

    files = list_readable(path) if is_folder(path) else [Path(path)]
    return bool(files) and all(map(StrategyFile().fits, files))


def _exchange_paths(src: str, strategies: Sequence[str]) -> UsageProblem:
    """Return the problem of a strategy as SRC; the checkpoint is perhaps behind it."""
    ctx = click.get_current_context()
    others = [path for path in strategies if not _is_strategy(path)]
    words = ["SRC", src, *strategies]
    if len(others) == 1:
        words = [*others, src, *(path for path in strategies if path not in others)]
    hint, facts = f"{ctx.command_path} {join(words)}", "SRC, the checkpoint, is the first path."
    return UsageProblem(f"{src} is a strategy, not a checkpoint", hint, facts, ctx=ctx)


def _print_candidate(one: Candidate, report: ReportOptions) -> None:
    """Print the verdict and the evidence."""
    if report.quiet and one.is_open:
        return
    tables.print_text(f"{one.path} ({'; '.join(_evidence(one))})", _VERDICTS[one.verdict])
    findings = [*join_alike(one.findings)]
    for finding in findings[:MAX_FINDINGS]:
        tables.print_text(f"  {finding.fact}", indent=4)
        if finding.facts:
            tables.print_text(f"    {finding.facts}", indent=6)
    if (more := len(findings) - MAX_FINDINGS) > 0:
        tables.print_text(f"  and {more} more (--json all)", indent=4)
    for aspect, names in one.unproven:
        tensors = count(len(names), "tensor")
        if aspect == "axis":
            tensors += " is" if len(names) == 1 else " are"
        text = _UNPROVEN[aspect].format(tensors)
        tables.print_text(f"  {text}: {shorten(names, 3)}", indent=4)
    for path, names in one.rivals:
        text = f"  {path} shards {count(len(names), 'tensor')} differently, and nothing contradicts"
        tables.print_text(f"{text} either: {shorten(names, 3)}", indent=4)


def _evidence(one: Candidate) -> Iterator[str]:
    """Yield what was compared."""
    if one.strategy is None:
        yield "not read"
        return
    yield f"lists {one.listed} of {count(one.tensors, 'tensor')}"
    if one.agreeing:
        yield f"replicas of {one.agreeing} of {one.sampled} sampled tensors are equal"
    if one.shaped:
        yield f"full shapes of {count(one.shaped, 'sharded tensor')} are as listed"
    if one.is_recorded:
        yield "the manifest names it or its equal"


def _print_devices(fits: Sequence[DeviceFit]) -> None:
    """Print the device matrices, and the axes that stand in the way."""
    (replicas, slices) = fits[0].device_matrix
    rows = []
    for one in fits:
        axes = [f"{way.tensor} axis {way.axis} ({way.size})" for way in one.in_the_way]
        rows.append((format_shape(one.device_matrix), "no" if axes else "yes", shorten(axes, 3)))
    title = f"{count(replicas * slices, 'device')} of a stage: replicas x slices of an axis"
    tables.print_table(title, ("device matrix", "fits", "axes in the way"), rows)
    tables.print_text(
        "A matrix of more axes fits if each of these fits as slices, and, where several shard one "
        "tensor axis, their product."
    )
