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
    from ckpttool.operations.recipe_check import RecipeCheck


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
@options.report_options()
def check(source: Side, resolve: ResolveOptions, report: ReportOptions) -> None:
    """Say what a recipe makes of a checkpoint."""
    from ckpttool.execution.executors import default_jobs
    from ckpttool.operations.load import load
    from ckpttool.operations.recipe_check import check_recipe

    if resolve.tensors.recipe is None:
        hint = "--recipe with a family of `ckpttool help recipes`, or a YAML file"
        raise UsageProblem("recipe check needs --recipe", hint)
    is_found = not resolve.replicated
    catalog, strategy, _ = load(source.source, find_strategy=is_found, open_count=report.open_count)
    with ckpttool.open_engine(f"threads:{default_jobs()}") as executor:
        checked = check_recipe(catalog, strategy, resolve, executor)
    tables.print_answer(checked, lambda: _print(checked), checked.notes, report)


def _print(checked: RecipeCheck) -> None:
    """Print a row for each tensor that is made, those of equal layers together."""
    made = {tensor.name: tensor for tensor in checked.tensors}
    kinds = {
        name: (it.shape, it.dtype, tuple(NUMBER.sub("#", old) for old in it.made_of))
        for name, it in made.items()
    }
    rows = []
    for folded, names in fold_members(kinds):
        shape, dtype, _ = kinds[names[0]]
        stored = {old: None for name in names for old in made[name].made_of}
        sources = shorten((old for old, _ in fold_names(stored)), 2)
        rows.append((folded, format_shape(shape), dtype, sources))
    columns = ("tensor", "shape", "type", "made of")
    tables.print_table(count(len(made), "tensor"), columns, rows, has_names=True)
