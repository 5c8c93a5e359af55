"""Text from files, made fit for a terminal, and shapes for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

LONGEST_WORD = 1024


def echo(text: str) -> None:
    """Print a line; an error names standard output, as other errors name their file."""
    try:
        click.echo(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def printable(text: str) -> str:
    r"""Spell out what is not printable in a text, such as an escape sequence.

    Only both ends are shown of a word that no screen has room for, as names in a file may be.

    Examples
    --------
    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    >>> printable("b\udcff.ckpt")  # a byte of a path that is no UTF-8
    'b\\xff.ckpt'
    >>> len(printable(65536 * "x" + ": no such tensor"))
    633
    """
    if len(text) > LONGEST_WORD:
        text = re.sub(rf"\S{{{LONGEST_WORD},}}", _shorten_word, text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _spell(c) for c in text)


def _spell(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # as Python reads what is no UTF-8
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return ascii(letter)[1:-1]


def _shorten_word(found: re.Match[str]) -> str:
    word = found[0]
    return f"{word[:400]}...({len(word) - 600} more)...{word[-200:]}"


def format_shape(sizes: Sequence[int]) -> str:
    """Format sizes, or an index, for people."""
    return f"({', '.join(map(str, sizes))})"


def format_shapes(shapes: Sequence[Sequence[int]]) -> str:
    """Format several shapes as one, with the smallest and the largest size of an axis.

    Examples
    --------
    >>> format_shapes([[6, 8], [10, 8]])
    '(6-10, 8)'
    """
    sizes = [sorted({min(axis), max(axis)}) for axis in zip(*shapes, strict=True)]
    return f"({', '.join('-'.join(map(str, axis)) for axis in sizes)})"
