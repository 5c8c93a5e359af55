"""A device matrix on the screen: the ranks in a grid of two axes, block by block.

It is drawn with rich on a terminal, and written as plain text into a pipe.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import click

from ckpttool.cli import tables
from ckpttool.model.layout import divisors
from ckpttool.wording import format_numbers

MAX_CELLS = 128  # of more ranks each cell has a range
PIPE_COLUMNS = 78  # that are not on a terminal
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")  # of ranks that hold the same

Block = tuple[str, str, Sequence[str], Sequence[tuple[str, Sequence[range]]]]


def draw_matrix(
    title: str,
    matrix: Sequence[int],
    ranks: range,
    marks: Mapping[int, str],
    groups: Mapping[int, int],
) -> None:
    """Draw the ranks of a device matrix.

    Parameters
    ----------
    title
        The line above.
    matrix, ranks
        Sizes of the device axes, outermost first, and the ranks in their order.
    marks
        Rank to its marks: ``(`` without a file, ``[`` explained, ``([`` both.
    groups
        Rank to the number of its group; ranks of one group have one colour on a terminal.
    """
    blocks = [*_blocks(matrix, ranks, tables.terminal_columns(sys.stdout) or PIPE_COLUMNS)]
    if sys.stdout.isatty():
        _draw_grid(title, blocks, marks, groups)
    else:
        _write_grid(title, blocks, marks)


def _blocks(matrix: Sequence[int], ranks: range, room: int) -> Iterator[Block]:
    """Yield the device matrix in blocks of two axes: a title, a corner, the heads and the rows.

    If there are too many ranks, the innermost axes are not drawn, and each cell has a range of
    ranks.  So it is for neighbours along an axis that would be wider than ``room`` columns.
    """
    axes = len(matrix)
    while axes > 1 and math.prod(matrix[:axes]) > MAX_CELLS:
        axes -= 1
    *outer, height, width = (1,) * max(0, 2 - axes) + tuple(matrix[:axes])
    names = [f"axis {len(matrix) - 1 - place}" for place in range(axes)]
    corner = " \\ ".join(names[-2:])
    step, digits = len(ranks) // math.prod(matrix[:axes]), len(str(ranks[-1]))

    def columns(joined: int) -> int:
        cell = digits + 2 if step * joined == 1 else 2 * digits + 3
        return len(corner) + 4 + width // joined * (cell + 3) + 2  # of [(5)]

    joined = next((number for number in divisors(width) if columns(number) <= room), width)
    parts = [range(x, x + joined) for x in range(0, width, joined)]
    start = ranks[0]
    for at in product(*map(range, outer)):
        title = ", ".join(f"{name}: {i}" for name, i in zip(names, at, strict=False))
        rows = []
        for y in range(height):
            cells = [range(start + x[0] * step, start + (x[-1] + 1) * step) for x in parts]
            rows.append((str(y) if axes > 1 else "", cells))
            start += width * step
        yield title, corner, [format_numbers(x) for x in parts], rows


def _cell(ranks: range, marks: Mapping[int, str]) -> str:
    cell, inside = format_numbers(ranks), {*"".join(marks.get(rank, "") for rank in ranks)}
    if "(" in inside:
        cell = f"({cell})"
    return f"[{cell}]" if "[" in inside else cell


def _write_grid(title: str, blocks: Sequence[Block], marks: Mapping[int, str]) -> None:
    """Print a grid as plain text."""
    tables.echo(title)
    for name, corner, heads, rows in blocks:
        tables.echo("")
        if name:
            tables.echo(f"  {name}")
        texts = [[head, *(_cell(cell, marks) for cell in cells)] for head, cells in rows]
        lines = [[corner, *heads], *texts]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            tables.echo(f"  {'  '.join(cells)}".rstrip())
    _print_legend(marks)


def _print_legend(marks: Mapping[int, str]) -> None:
    if any("(" in mark for mark in marks.values()):
        tables.echo("  (R): has no file that can be read")
    tables.echo("")


def _draw_grid(
    title: str, blocks: Sequence[Block], marks: Mapping[int, str], groups: Mapping[int, int]
) -> None:
    """Draw a grid on a terminal; ranks that hold the same have one colour."""
    from rich.box import ASCII, ROUNDED
    from rich.columns import Columns
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    box = ROUNDED if tables.has_utf8(sys.stdout) else ASCII
    drawn = []
    for name, corner, heads, rows in blocks:
        table = Table(title=name or None, box=box, title_justify="left")
        for head in (corner, *heads):
            table.add_column(head, justify="right", no_wrap=True)
        for head, cells in rows:
            texts = []
            for cell in cells:
                number = groups.get(cell[0])
                style = "" if number is None else COLOURS[number % len(COLOURS)]
                mark = marks.get(cell[0], "") if len(cell) == 1 else ""
                if "[" in mark:
                    style = f"bold reverse {style}"
                elif mark:
                    style = "dim"
                texts.append(Text(_cell(cell, marks), style))
            table.add_row(Text(head, "bold"), *texts)
        drawn.append(table)
    columns = tables.terminal_columns(sys.stdout) or PIPE_COLUMNS
    console = Console(
        file=io.StringIO(), width=columns, force_terminal=True, color_system="standard"
    )
    console.print(Columns(drawn))
    file = console.file
    assert isinstance(file, io.StringIO), "given above"
    tables.echo(click.style(title, bold=True))
    tables.echo(file.getvalue().rstrip())
    _print_legend(marks)
