"""``ckpttool recipe show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttool.cli import options, tables
from ckpttool.wording import any_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpttool.model.recipes import Rule


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool recipe show qwen3

    Show the rules of a recipe: names of MindSpore and of Hugging Face with their axes, the loops
    and conditions of each, what is asked for, and what is left out.  RECIPE is a name or a file.
    """,
)
@click.argument("recipe", metavar="RECIPE")
def show(recipe: str) -> None:
    """Show the rules of a recipe."""
    from ckpttool.strategy_files.recipe_files import read_recipe

    known = read_recipe(recipe).recipe
    facts = {"from": [known.source]} | {
        f"asks {name}": [f"{any_of(choice.values)}: {choice.why}"]
        for name, choice in known.choices.items()
    }
    facts |= {f"each rank fuses {name}": [parts] for name, parts in known.fused.items()}
    tables.print_facts(f"{known.recipe}, version {known.version}", facts)
    rows = [row for rule in known.rules for row in _rows(rule)]
    columns = ("MindSpore", "axes", "Hugging Face", "axes", "for", "if")
    tables.print_table(f"{len(known.rules)} rules", columns, rows)
    if known.unused:
        tables.print_table("left out", ("MindSpore", "since it is"), [*known.unused.items()])


def _rows(rule: Rule) -> Iterator[tuple[str, ...]]:
    """Yield a row for each pair of names, and for each part of a fused tensor."""
    loops = ", ".join(f"{hole} in {text}" for hole, text in {**rule.loops, **rule.each}.items())
    condition = "" if rule.condition == "True" else rule.condition
    for ours, theirs in rule.names.items():
        yield ours, rule.axes or "", theirs, rule.axes or "", loops, condition
    ours_of: Mapping[str, str] = rule.mindspore
    pairs = [(*it, *other) for it in ours_of.items() for other in rule.huggingface.items()]
    for name, axes, other, of_other in pairs:
        yield name, axes, other, of_other, loops, condition
