"""``ckpttool recipe``: the group of the commands about recipes."""

from __future__ import annotations

import click

from ckpttool.cli.groups import LazyGroup

# The question that each command answers.
COMMANDS = {
    "show": "Which names and axes does a recipe know?",
    "check": "Does it fit this checkpoint, every tensor of both sides?",
}


class RecipeGroup(LazyGroup):
    """The group; each command is in the module of its name."""

    questions = COMMANDS
    package = "ckpttool.cli.recipe"


@click.group(
    cls=RecipeGroup,
    help="""\b
    ckpttool recipe show qwen3

    Look at recipes: what the tensors of a family of models are called here and in Hugging Face, and
    how their axes differ.  Nothing is written.
    """,
    epilog="`ckpttool recipe COMMAND --help` lists the options of a command.",
)
def recipe() -> None:
    """Look at recipes."""
