"""``ckpttool recipe check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttool.cli import options, tables
from ckpttool.cli.params import UsageProblem
from ckpttool.problems import Diagnostics

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.cli.options import ReportOptions, Side


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool recipe check qwen3/ \\
        --recipe qwen3:fc1=interleaved,attention=grouped

    Say what a recipe makes of each tensor of a checkpoint.  Exit code 5: it does not use every
    tensor, or cannot make every tensor that the configuration asks for.
    """,
)
@options.source_options("src", "strategy_files", "step", "pattern", "key")
@options.resolve_options("replicated", *options.OF_EXPORT)
@options.report_options()
def check(source: Side, resolve: ResolveOptions, report: ReportOptions) -> None:
    """Say what a recipe makes of a checkpoint."""
    from ckpttool.cli.overview import print_made
    from ckpttool.operations.answer import notes_and_problems
    from ckpttool.operations.inspected import InspectedCheckpoint
    from ckpttool.operations.inspection import inspect_catalog
    from ckpttool.operations.load import load

    if resolve.tensors.recipe is None:
        hint = "--recipe with a family of `ckpttool help recipes`, or a YAML file"
        raise UsageProblem("recipe check needs --recipe", hint)
    is_found, found = not resolve.replicated, Diagnostics("inspect")
    catalog, strategy, _ = load(source.source, find_strategy=is_found, open_count=report.open_count)
    answer = inspect_catalog(catalog, strategy, found, options=resolve, contents="all")
    found.raise_if_errors()
    assert isinstance(answer, InspectedCheckpoint), "else no step was chosen, which is an error"
    notes = notes_and_problems(found)["notes"]
    tables.print_answer(answer, lambda: print_made(answer.parts.made), notes, report)
