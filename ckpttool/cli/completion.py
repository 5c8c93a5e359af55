"""``ckpttool completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ckpttool.cli import options
from ckpttool.cli.params import Choice
from ckpttool.cli.tables import echo

SHELLS = ("bash", "zsh", "fish")


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    eval "$(ckpttool completion bash)"

    Print a script that makes the shell complete commands, options and paths at the Tab key.
    `ckpttool help completion` says where to put it.
    """,
)
@click.argument("shell", metavar="SHELL", type=Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    completion_class = get_completion_class(shell)
    assert completion_class is not None, "click knows the three shells"
    group = click.get_current_context().find_root().command
    echo(completion_class(group, {}, "ckpttool", "_CKPTTOOL_COMPLETE").source())
