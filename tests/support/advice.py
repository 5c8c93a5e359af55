"""Every advice that a message can give, and how it is followed.

What stands behind ``Try:`` is a piece of advice, or several ones.  `ROWS` has a row for each form:
what is typed, and what the next run must be.  ``tests/conftest.py`` holds each hint that the
package makes in any test against them, and ``tests/e2e/test_followed.py`` types what the sessions
are told to type.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import click

from tests.support.commands import command_of, commands

_PARTS = re.compile(  # not between backticks
    r"(?:; (?!do(?:ne)?\b)|,? or (?=--|-[a-z]\b|ckpttool |without |no -)|, or )"
    r"(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)"
)
_WORD = r"(?:'[^']*'|\"[^\"]*\"|[^\s,;'\"`]+)"
_TOOLS = ("cp", "gzip", "bzip2", "xz", "zstd", "h5repack", "mv", "tar", "ulimit", "unzip")
_PLACE = r"(?:FILE|NEW|STRATEGY|SRC|TARGET|DIR|OUT|PATTERN|STEP|ADDRESS|HOST|NAME|COPY|MORE|N|TYPE)"


class Row(NamedTuple):
    """A form of advice.

    Attributes
    ----------
    name
        What it is.
    form
        A regular expression of its beginning; what follows says when it helps, or why.
    then
        What the next run is after it was typed: "well" or, if other problems may be left, "on".
        "" if a person does it, and the same command is typed then.
    """

    name: str
    form: str
    then: str


_OF_SHELL = rf"(?:{'|'.join(_TOOLS)}) "
ROWS = (
    Row(
        "page",
        r"`ckpttool help [^`]+`|ckpttool help\b|ckpttool(?: [a-z]+)* (?:--help|--version|-V)$",
        "well",
    ),
    Row(
        "line with a place",
        rf"`?ckpttool (?:.*[ =])?{_PLACE}\b|`ckpttool [a-z ]+`|reshard {_WORD} -d",
        "",
    ),
    Row("beginning", r"ckpttool [a-z].* \.\.\.$", "on"),
    Row("line", r"`ckpttool [a-z][^`]*`|ckpttool [a-z]", "on"),
    Row("look", r"ls ", "well"),
    Row(
        "shell with a place",
        rf"{_OF_SHELL}(?:.*[ >]){_PLACE}\b|(?:apt|pip|dask|mpiexec|git|chmod|iconv) ",
        "",
    ),
    Row("shell", _OF_SHELL, "on"),
    Row("without", r"(?:the same command )?without (?=-)|omit -|no --", "on"),
    Row(
        "same",
        r"(?:when it has ended, )?the (?:same command|command that (?:wrote|writes))",
        "on",
    ),
    Row("source", rf"{_WORD} as SRC\b", "on"),
    Row("option with a place", rf"(?:-[a-z]|--[a-z-]+) (?:{_PLACE}\b|with |for |and --)", ""),
    Row(
        "options",
        r"(?:(?:when|if) it (?:has ended|is there), )?(?:-[a-zA-Z]|--[a-z-]+)(?= |$|,)",
        "on",
    ),
    # What a person does: to files,
    Row("bring", r"(?:copy|restore|put|save|write|download|load|add)\b", ""),
    Row("take away", r"(?:move|rename|link)\b", ""),
    # to the machine and other runs,
    Row("make room", r"(?:wait|free|let|raise|start|install|fewer|less|mount|run)\b", ""),
    # with what nobody else knows,
    Row(
        "decide",
        r"(?:compare|correct|exchange|with numbers|this one|name|split or reshard|merge or split"
        r"|if that is right)\b",
        "",
    ),
    Row(
        "other file",
        r"(?:the|files?|inputs?|an?|another|one|only|its|other|some|absolute|rules|patterns|ranks|lines"
        r"|quotes|as many|strategies|each|these|for none)\b|[{]to:",
        "",
    ),
    # and in a text that he wrote.
    Row(
        "other words",
        r"`[^`]+`|\"[^\"]*\"(?::| and)|\S+: \{|A:0\.25|\S+ in place of \S+|\S+ or \S+, with all",
        "",
    ),
)


def parts_of(hint: str) -> tuple[str, ...]:
    return tuple(filter(None, (one.strip() for one in _PARTS.split(hint))))


@cache
def row_of(part: str) -> Row | None:
    return next((row for row in ROWS if re.match(row.form, part)), None)


@cache
def unknown(hint: str) -> str:
    return next((part for part in parts_of(hint) if row_of(part) is None), "")


class Typed(NamedTuple):
    """What is typed: a line of the shell, perhaps none, and the words of a command."""

    shell: str
    words: list[str]


def follow(part: str, words: list[str], complaint: str) -> Typed | None:
    """Return what a reader types after a command line; None if only he knows.

    Parameters
    ----------
    part
        A piece of advice.
    words
        The words behind the name of the program.
    complaint
        The first line of the message: it shows the side of a comparison, and a wrong value.
    """
    row = row_of(part)
    if row is None or not row.then:
        return None
    match row.name:
        case "page" | "line":
            text = part.split("`")[1] if part.startswith("`") else re.split(r", |; ", part)[0]
            return Typed("", shlex.split(text)[1:])
        case "beginning":
            new = shlex.split(part)[1:-1]
            return Typed("", [*new, *words[len(new) :]]) if new[0] == words[0] else None
        case "look":
            return Typed(part, ["--version"])
        case "shell":
            return Typed(re.split(r", ", part)[0], words)
        case "source":
            at = len(command_of(words).split()) + is_of_b(complaint)
            return Typed("", [*words[:at], shlex.split(part)[0], *words[at + 1 :]])
        case "same" if words[0] not in ("merge", "split", "reshard", "convert", "average"):
            return None
        case "same" if " one -" in part or "then" in part:
            return None
        case "without":
            return Typed("", _without(words, re.findall(r"(?<!\S)-{1,2}[a-z-]+", part)))
        case _:
            return Typed("", _with_options(words, _options_in(part), complaint))


def is_of_b(complaint: str) -> bool:
    return re.match(r"\w+\[\w+\]: B\b", complaint) is not None


def _options_in(part: str) -> list[str]:
    found = re.search(
        rf"(?<!\S)-[^\s,]*(?: (?!(?:if|to|for|and|which|accepts|without|of|writes)\b){_WORD})*",
        part,
    )
    return shlex.split(found[0]) if found else []


def _with_options(words: list[str], given: list[str], complaint: str) -> list[str]:
    """Return the words with options in the place of their old values.

    Of an option that can be repeated, only the values in the complaint are wrong, or all files.
    One that the command has not becomes the one that was meant.
    """
    command = commands()[command_of(words)]
    at, words = 0, [*words]
    absent = re.search(r" has no (-\S+)$", complaint)
    if absent:
        return [given[0] if word == absent[1] else word for word in words]
    while at < len(given):
        one = _find(command, given[at])
        value = [] if one is None or one.is_flag else given[at + 1 : at + 2]
        if one is not None:
            quoted = re.findall(r"'([^']*)'", complaint) if one.multiple else []
            wrong = [
                word
                for word in words[2:]
                if any(text in word if text else not word for text in quoted)
            ]
            is_of_files = not {"-s", "-d"}.isdisjoint(one.opts)
            if wrong or is_of_files or not one.multiple:
                words = _without(words, one.opts, wrong)
        words += [given[at], *value]
        at += 1 + len(value)
    return words


def _without(words: list[str], names: list[str], values: list[str] | None = None) -> list[str]:
    """Return the words without some options and their values: all, or these."""
    command = commands()[command_of(words)]
    left, at = list[str](), 0
    while at < len(words):
        name = words[at].partition("=")[0]
        one = _find(command, name)
        same = {name} if one is None else {*one.opts}
        width = 1 + (one is not None and not one.is_flag and "=" not in words[at])
        is_meant = not values or not {*words[at : at + width]}.isdisjoint(values)
        if not (words[at].startswith("-") and same & {*names} and is_meant):
            left += words[at : at + width]
        at += width
    return left


def _find(command: click.Command, flag: str) -> click.Option | None:
    params = (one for one in command.params if isinstance(one, click.Option))
    return next((one for one in params if flag in one.opts), None)


def complaints(printed: str) -> Iterator[tuple[str, str]]:
    first = ""
    for line in printed.splitlines():
        if line.startswith("  Try: "):
            yield first, line.removeprefix("  Try: ")
        elif not line.startswith(" "):
            first = line
