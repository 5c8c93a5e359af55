"""``ckpttool recipe check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import UsageProblem
from ckpttool.wording import NUMBER, count, fold_members, fold_names, format_shape, shorten

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.model.plan import Plan


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
@options.resolve_options(
    *("replicated", "include", "exclude"), *("weights_only", "recipe", "hf_config")
)
@options.report_options("quiet", "debug", "progress")
def check(source: Side, resolve: ResolveOptions, report: ReportOptions) -> None:
    """Say what a recipe makes of a checkpoint."""
    from ckpttool.execution.executors import default_jobs
    from ckpttool.operations.load import load
    from ckpttool.operations.plans import plan_reading

    if resolve.tensors.recipe is None:
        hint = "--recipe with a family of `ckpttool help recipes`, or a YAML file"
        raise UsageProblem("recipe check needs --recipe", hint)
    is_found = not resolve.replicated
    catalog, strategy, _ = load(source.source, find_strategy=is_found, open_count=report.open_count)
    with ckpttool.open_engine(f"threads:{default_jobs()}") as executor:
        plan, found = plan_reading(catalog, strategy, None, None, resolve, executor)
    tables.print_notes(found.of("note", "warning"), found.severity_of, report.quiet)
    _print(plan)


def _print(plan: Plan) -> None:
    """Print a row for each tensor that is made, those of equal layers together."""
    made = {transfer.name: transfer for transfer in plan.transfers}
    kinds = {
        name: (
            it.meta.shape,
            it.dtype,
            tuple(NUMBER.sub("#", old) for old in it.source.stored_names),
        )
        for name, it in made.items()
    }
    rows = []
    for folded, names in fold_members(kinds):
        meta = made[names[0]].meta
        stored = {old: None for name in names for old in made[name].source.stored_names}
        sources = shorten((old for old, _ in fold_names(stored)), 2)
        rows.append((folded, format_shape(meta.shape), meta.dtype, sources))
    columns = ("tensor", "shape", "type", "made of")
    tables.print_table(count(len(made), "tensor"), columns, rows, has_names=True)
