"""Groups of commands: a module for each command, imported only when the command is used.

So ``--version``, ``--help`` and the Tab key stay fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module

import click

from ckpttool.wording import nearest

# Keys of ``Context.meta``.
ANSWERED = "ckpttool.answered"  # whether the JSON document was printed
# Defaults for all commands, of the options that are named.
VARIABLES = {
    "--src-strategy": "CKPTTOOL_STRATEGY",
    "--strict": "CKPTTOOL_STRICT",
    "--max-memory": "CKPTTOOL_MAX_MEMORY",
    "--jobs": "CKPTTOOL_JOBS",
    "--color": "CKPTTOOL_COLOR",
}
FROM_ENVIRONMENT = "ckpttool.environment"  # a mapping: variables that were read, and their values
WORDS = "ckpttool.words"  # what was typed behind the name of the program


class HelpFormatter(click.HelpFormatter):
    """The help of a command, whose headings and names stand out where colours are shown."""

    def write_heading(self, heading: str) -> None:
        """Write the heading of a group."""
        super().write_heading(click.style(heading, bold=True))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: int, **settings: int) -> None:
        """Write names beside what they mean."""
        named = [(click.style(name, fg="cyan"), text) for name, text in rows]
        super().write_dl(named, *args, **settings)


class HelpContext(click.Context):
    """A context whose command has help in colours."""

    formatter_class = HelpFormatter


class LazyGroup(click.Group):
    """A group whose commands lie in modules of their names.

    Attributes
    ----------
    questions
        The name of each command, and the question that it answers.
    package
        The package of the modules.
    """

    questions: Mapping[str, str]
    package: str
    context_class = HelpContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(self.questions)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, or None."""
        if cmd_name not in self.questions:
            return None
        command = getattr(import_module(f"{self.package}.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command), f"{cmd_name} is not a command"
        command.short_help = self.questions[cmd_name]  # shells show it beside the name
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; without any, print the help.

        Versions of click differ in what they do without arguments.
        """
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the requested command; if the name is unknown, fail with a suggestion."""
        if args[0] not in self.questions and not args[0].startswith("-"):
            from ckpttool.cli.params import UsageProblem

            message = f"{ctx.command_path} has no command {args[0]!r}"
            raise UsageProblem(message, self.hint_for(ctx, args[0]))
        return super().resolve_command(ctx, args)

    def hint_for(self, ctx: click.Context, word: str) -> str:
        """Return what to type in place of the name of a command that is not there."""
        return f"{ctx.command_path} {nearest(word, self.questions) or '--help'}"

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands that --help shows."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.questions.items()))


def with_dashes(option: str) -> str:
    """Return the name of an option as it is declared: an underscore counts as a dash."""
    return option.replace("_", "-")


def words_of(ctx: click.Context) -> str:
    """Return the words of a command behind the name of the program; that of the program itself.

    Examples
    --------
    >>> words_of(click.Context(click.Group(), info_name="ckpttool"))
    'ckpttool'
    """
    words = str(ctx.info_name)
    while ctx.parent is not None and ctx.parent.parent is not None:
        ctx = ctx.parent
        words = f"{ctx.info_name} {words}"
    return words


def walk_commands(ctx: click.Context) -> Iterator[tuple[str, click.Context]]:
    """Yield the words and the context of each command of a group, and of the groups in it.

    Parameters
    ----------
    ctx
        The context of the group.
    """
    group = ctx.command
    assert isinstance(group, click.Group), "only a group has commands"
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None, f"{name} is listed"
        inner = click.Context(command, ctx, name)
        yield name, inner
        if isinstance(command, click.Group):
            yield from ((f"{name} {words}", command) for words, command in walk_commands(inner))
