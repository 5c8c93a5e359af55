"""Write the man page of ckpttool from the help texts of its commands: ``man/ckpttool.1``.

Commands are loaded one by one, since the group does not hold them.  The page has no date of its
own: the same help gives the same bytes.  The macros are those of mdoc(7); ``mandoc -T lint`` checks
them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from ckpttool.cli.groups import VARIABLES, walk_commands
from ckpttool.cli.main import main
from ckpttool.cli.options import GroupedCommand

PAGE = Path(__file__).parent.parent / "man" / "ckpttool.1"
DATE = "November 29, 2026"  # of the last change to this generator; mdoc wants one
FILES = {
    "ckpttool.json": "The manifest of a complete set of outputs.",
    ".ckpttool": "The folder with the record of a run.",
}


def escape(text: str) -> str:
    """Return a text that roff prints as it is."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def quote(text: str) -> str:
    """Return one argument of a macro; no word in it is a macro itself."""
    return '"' + escape(text).replace('"', '""') + '"'


def sentences(text: str) -> Iterator[str]:
    """Yield the lines of a paragraph; a sentence begins on a line of its own."""
    for sentence in re.split(r"(?<=[.?:])\s\s+", text.strip()):
        yield from map(
            escape, textwrap.wrap(" ".join(sentence.split()), 70, break_on_hyphens=False)
        )


def describe_option(param: click.Option, ctx: click.Context) -> Iterator[str]:
    """Yield the item of an option."""
    record = param.get_help_record(ctx)
    assert record is not None, "no option is hidden"
    names, text = record
    yield f".It Sy {quote(names)}"
    yield from sentences(text)


def describe_command(name: str, ctx: click.Context) -> Iterator[str]:
    """Yield the section of a command."""
    command = ctx.command
    usage = " ".join(command.collect_usage_pieces(ctx))
    yield f".Ss ckpttool {name}"
    yield from sentences(command.short_help or "")
    yield ".Bd -literal -offset indent"
    yield escape(f"ckpttool {name} {usage}")
    yield ".Ed"
    example, *paragraphs = (command.help or "").replace("\b\n", "").split("\n\n")
    for paragraph in paragraphs:
        yield ".Pp"
        yield from sentences(paragraph)
    yield ".Bd -literal -offset indent"
    yield from map(escape, example.splitlines())
    yield ".Ed"
    if isinstance(command, click.Group):
        return  # each of its commands has a section
    assert isinstance(command, GroupedCommand), "every command lists its options under headings"
    yield ".Bl -tag -width Ds"
    for options in command.options_by_heading(ctx).values():
        for param in options:
            yield from describe_option(param, ctx)
    yield ".El"


def make_page() -> str:
    """Return the man page."""
    group = click.Context(main, info_name="ckpttool", **main.context_settings)
    about = (main.help or "").split("\n\n")[1]
    lines = [
        f".Dd {DATE}",
        ".Dt CKPTTOOL 1",
        ".Os",
        ".Sh NAME",
        ".Nm ckpttool",
        ".Nd inspect, merge, split and reshard MindSpore checkpoints",
        ".Sh SYNOPSIS",
        ".Nm",
        ".Ar command",
        ".Op Ar option ...",
        ".Ar path ...",
        ".Sh DESCRIPTION",
        *sentences(about),
        ".Pp",
        *sentences(
            "`ckpttool help` lists the topics of the guide.  `ckpttool help NAME` prints a "
            "page, or what a message or an option means."
        ),
        ".Sh COMMANDS",
    ]
    for name, ctx in walk_commands(group):
        lines += describe_command(name, ctx)
    lines += [".Sh ENVIRONMENT", ".Bl -tag -width Ds"]
    for flag, name in VARIABLES.items():
        lines += [f".It Ev {name}", escape(f"The default of {flag}.")]
    lines += [".El", ".Sh FILES", ".Bl -tag -width Ds"]
    for name, text in FILES.items():
        lines += [f".It Pa {name}", escape(text)]
    lines += [".El"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(make_page(), encoding="utf-8")
    print(f"Wrote {PAGE}")
