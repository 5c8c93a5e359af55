"""Tables on stdout: as wide as they need to be in a pipe, folded to fit on a terminal.

A word is never broken, so a name can be found and copied wherever it is shown.  Where columns do
not fit beside each other, the one with the longest words gets lines of its own.

The tables of rich take a second for a thousand rows.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from ckpttool.cli.text import echo, printable

MARGIN, SPACE = 2, 3  # columns before a row, and between two cells
INDENT = 2  # further columns before what stands below or above the rest of its row


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; align columns whose name ends in ``>`` right, and do not fold them."""
    table = [[column.rstrip(">") for column in columns]]
    table += [[printable(cell) for cell in row] for row in rows]
    is_right = [column.endswith(">") for column in columns]
    widths = [max(map(_width, cells)) for cells in zip(*table, strict=True)]
    beside = list(range(len(columns)))
    terminal = shutil.get_terminal_size().columns  # of no terminal COLUMNS, or 80
    room = terminal - MARGIN - 1  # the rule sticks out
    if sys.stdout.isatty():
        beside = _fit(table, is_right, widths, room)
    rule = _row_width(widths, beside) + 2
    if not sys.stdout.isatty():
        rule = min(rule, terminal - 2)
    header, *body = ("\n".join(_lines(row, widths, is_right, beside, room)) for row in table)
    echo("\n".join((printable(title), "", header, f" {'─' * rule}", *body, "")))


def _fit(
    table: Sequence[Sequence[str]], is_right: Sequence[bool], widths: list[int], room: int
) -> list[int]:
    """Narrow columns, the widest first, until a row fits; return those that stay beside others."""
    words = [
        [word for cell in cells for word in cell.split(" ")] for cells in zip(*table, strict=True)
    ]
    least = [widths[i] if is_right[i] else max(map(_width, found)) for i, found in enumerate(words)]
    beside = list(range(len(widths)))
    while len(beside) > 1 and _row_width(least, beside) > room:
        beside.remove(max(beside, key=lambda i: least[i]))
    while _row_width(widths, beside) > room:
        foldable = [i for i in beside if widths[i] > least[i]]
        if not foldable:
            break
        widths[max(foldable, key=lambda i: widths[i])] -= 1
    return beside


def _row_width(widths: Sequence[int], beside: Sequence[int]) -> int:
    indent = 0 if 0 in beside else INDENT
    return indent + sum(widths[i] + SPACE for i in beside) - SPACE


def _lines(
    cells: Sequence[str],
    widths: Sequence[int],
    is_right: Sequence[bool],
    beside: Sequence[int],
    room: int,
) -> Iterator[str]:
    """Yield the lines of a row; a first cell that stands alone comes first, any other last."""
    margin = " " * MARGIN
    if 0 not in beside:
        yield from (f"{margin}{part}".rstrip() for part in _fold(cells[0], room))
        margin += " " * INDENT
    for parts in zip_longest(*(_fold(cells[i], widths[i]) for i in beside), fillvalue=""):
        line = margin
        for i, part in zip(beside, parts, strict=True):
            padding = " " * (widths[i] - _width(part))
            line += (padding + part if is_right[i] else part + padding) + " " * SPACE
        yield line.rstrip()
    margin = " " * (MARGIN + INDENT)
    for i in sorted({*range(1, len(cells))}.difference(beside)):
        yield from (f"{margin}{part}" for part in _fold(cells[i], room - INDENT) if part)


def _fold(cell: str, width: int) -> list[str]:
    """Fold a cell between words into parts of ``width`` columns, or of a word that is wider.

    Examples
    --------
    >>> _fold("ranks 0-3, 5-7 have adam_m.layers.0.weight", 13)
    ['ranks 0-3,', '5-7 have', 'adam_m.layers.0.weight']
    """
    if _width(cell) <= width:
        return [cell]
    first, *words = cell.split(" ")
    parts = [first]
    for word in words:
        if _width(f"{parts[-1]} {word}") <= width:
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    return parts


def _width(text: str) -> int:
    """Return the columns that a text takes on a terminal: two for an ideograph, 0 for an accent."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
