"""Tables on stdout: as wide as they need to be in a pipe, folded to fit on a terminal.

The library that draws the progress bars has tables, too, and takes a second for a thousand rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import click

from ckpttool.cli.text import printable

MARGIN, SPACE = 2, 3  # columns before a row, and between two cells
SEPARATORS = " ./_,"  # words of names and of prose end with one
NARROWEST = 5  # columns that a cell keeps on the narrowest terminal


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout; columns whose name ends in ``>`` are aligned right."""
    names = [column.rstrip(">") for column in columns]
    is_right = [column.endswith(">") for column in columns]
    body = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(_width, cells)) for cells in zip(names, *body, strict=True)]
    if sys.stdout.isatty():
        import shutil

        _narrow(widths, shutil.get_terminal_size().columns - 1)  # the rule sticks out
    rule = "─" * (sum(widths) + SPACE * (len(widths) - 1) + 2)
    lines = [printable(title), "", *_lines(names, widths, is_right), f" {rule}"]
    for row in body:
        lines += _lines(row, widths, is_right)
    click.echo("\n".join((*lines, "")))


def _narrow(widths: list[int], columns: int) -> None:
    """Take from the widest columns until a row fits, or nothing more can be taken."""
    excess = MARGIN + sum(widths) + SPACE * (len(widths) - 1) - columns
    while excess > 0 and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
        excess -= 1


def _lines(cells: Sequence[str], widths: Sequence[int], is_right: Sequence[bool]) -> Iterator[str]:
    """The lines of a row: one, or as many as its longest cell is folded into."""
    folded = [_fold(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for parts in zip_longest(*folded, fillvalue=""):
        line = " " * MARGIN
        for part, width, right in zip(parts, widths, is_right, strict=True):
            padding = " " * (width - _width(part))
            line += (padding + part if right else part + padding) + " " * SPACE
        yield line.rstrip()


def _fold(cell: str, width: int) -> list[str]:
    """A cell in parts of at most ``width`` columns, each ending with a word if that is not short.

    Examples
    --------
    >>> _fold("accum.layer1.weight, device matrix", 13)
    ['accum.layer1.', 'weight, ', 'device matrix']
    """
    if _width(cell) <= width:
        return [cell]
    parts = [""]
    for letter in cell:
        if _width(parts[-1] + letter) > width:
            full = parts.pop()
            end = max(full.rfind(separator) for separator in SEPARATORS) + 1
            end = end if 2 * end >= len(full) and letter != " " else len(full)
            parts += [full[:end], full[end:]]
        if letter != " " or parts[-1] or len(parts) == 1:  # no word begins with the space before it
            parts[-1] += letter
    return parts


def _width(text: str) -> int:
    """Columns that a text takes on a terminal: two for an ideograph, none for an accent."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "FW")
        for letter in text
    )
