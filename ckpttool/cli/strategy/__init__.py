"""``ckpttool strategy``: the group of the commands about strategies."""

from __future__ import annotations

import click

from ckpttool.cli.groups import LazyGroup

# The question that each command answers.
COMMANDS = {
    "show": "How does this strategy shard each parameter?",
    "convert": "How do I get it in another form: protobuf, JSON or YAML?",
    "merge": "How do I get one file for all pipeline stages?",
    "diff": "Are two strategies equal, parameter by parameter?",
    "check": "Which of these strategies fits this checkpoint?",
    "draft": "How do I begin a hand-written one?",
    "ranks": "Which ranks do I have to fetch for a target?",
}


class StrategyGroup(LazyGroup):
    """The group; each command is in the module of its name."""

    questions = COMMANDS
    package = "ckpttool.cli.strategy"


@click.group(
    cls=StrategyGroup,
    help="""\b
    ckpttool strategy show strategy.ckpt

    Look at strategies: those that MindSpore wrote, protobuf or JSON, and hand-written ones.  Needs
    no cluster.
    """,
    epilog="`ckpttool strategy COMMAND --help` lists the options of a command.",
)
def strategy() -> None:
    """Look at strategies."""
