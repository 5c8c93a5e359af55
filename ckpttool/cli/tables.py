"""Tables on stdout: as wide as they need to be in a pipe, folded to fit on a terminal.

No word is ever broken, so a name can be found and copied wherever it is shown.  Where columns do
not fit beside each other, that with the longest words gets lines of its own.

The library that draws the progress bars has tables, too, and takes a second for a thousand rows.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest

from ckpttool.cli.text import echo, printable

MARGIN, SPACE = 2, 3  # columns before a row, and between two cells
INDENT = 2  # further columns before what stands below or above the rest of its row


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout; columns whose name ends in ``>`` are aligned right, and not folded."""
    names = [column.rstrip(">") for column in columns]
    is_right = [column.endswith(">") for column in columns]
    body = [[printable(cell) for cell in row] for row in rows]
    cells = list(zip(names, *body, strict=True))
    widths = [max(map(_width, column)) for column in cells]
    room, alone = sum(widths), list[int]()
    columns_there = shutil.get_terminal_size().columns  # of no terminal COLUMNS, or 80
    if sys.stdout.isatty():
        room = columns_there - MARGIN - 1  # the rule sticks out
        least = [
            width if right else max(_width(word) for cell in column for word in cell.split(" "))
            for column, width, right in zip(cells, widths, is_right, strict=True)
        ]
        alone = _narrow(widths, least, room)
    row_width = _total(widths, alone) + INDENT * (0 in alone)
    lines = [printable(title), "", *_lines(names, widths, is_right, alone, room)]
    rule = row_width + 2 if sys.stdout.isatty() else min(row_width + 2, columns_there - 2)
    lines.append(f" {'─' * rule}")
    for row in body:
        lines += _lines(row, widths, is_right, alone, room)
    echo("\n".join((*lines, "")))


def _narrow(widths: list[int], least: Sequence[int], room: int) -> list[int]:
    """Narrow columns until a row fits; those that then have to stand alone.

    Parameters
    ----------
    widths
        Of each column; changed, from the widest on.
    least
        What each column takes if it is folded between all words.
    room
        Columns of the terminal that a row may take.
    """
    alone: list[int] = []
    left = list(range(len(widths)))
    while len(left) > 1 and _total(least, alone) + INDENT * (0 in alone) > room:
        alone.append(max(left, key=lambda i: least[i]))
        left.remove(alone[-1])
    excess = _total(widths, alone) + INDENT * (0 in alone) - room
    while excess > 0 and any(widths[i] > least[i] for i in left):
        widths[max(left, key=lambda i: widths[i] if widths[i] > least[i] else 0)] -= 1
        excess -= 1
    return alone


def _total(widths: Sequence[int], alone: Collection[int]) -> int:
    """Columns of a row, without those that stand alone."""
    beside = [width for i, width in enumerate(widths) if i not in alone]
    return sum(beside) + SPACE * (len(beside) - 1)


def _lines(
    cells: Sequence[str],
    widths: Sequence[int],
    is_right: Sequence[bool],
    alone: Collection[int],
    room: int,
) -> Iterator[str]:
    """The lines of a row: one, or as many as its longest cell is folded into.

    A first cell that stands alone comes before the others, any other below them.
    """
    beside = [i for i in range(len(cells)) if i not in alone]
    margin = " " * MARGIN
    if 0 in alone:
        yield from (f"{margin}{part}".rstrip() for part in _fold(cells[0], room))
        margin += " " * INDENT
    for parts in zip_longest(*(_fold(cells[i], widths[i]) for i in beside), fillvalue=""):
        line = margin
        for i, part in zip(beside, parts, strict=True):
            padding = " " * (widths[i] - _width(part))
            line += (padding + part if is_right[i] else part + padding) + " " * SPACE
        yield line.rstrip()
    margin = " " * (MARGIN + INDENT)
    for i in sorted(set(alone) - {0}):
        yield from (f"{margin}{part}" for part in _fold(cells[i], room - INDENT) if part)


def _fold(cell: str, width: int) -> list[str]:
    """A cell in parts of at most ``width`` columns, or of a word that is wider.

    Examples
    --------
    >>> _fold("ranks 0-3, 5-7 have adam_m.layers.0.weight", 13)
    ['ranks 0-3,', '5-7 have', 'adam_m.layers.0.weight']
    """
    if _width(cell) <= width:
        return [cell]
    parts: list[str] = []
    for word in cell.split(" "):
        if parts and _width(f"{parts[-1]} {word}") <= width:
            parts[-1] += f" {word}"
        else:
            parts.append(word)
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
