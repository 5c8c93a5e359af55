"""What commands print: tables, verdicts and documents on stdout, notes on stderr.

Text is folded to fit on a terminal; in a pipe a row, a note or an error is one line.  Words are
never broken, so that a name can be found and copied.  If the columns do not fit, the column with
the longest words gets lines of its own above the row.  `click.echo` removes bold and colours where
they are not shown; rich would need 0.1 s to load, and its tables break words.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, zip_longest
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from ckpttool.cli.groups import ANSWERED
from ckpttool.formats.local import describe_os_error
from ckpttool.lazy import compile_late
from ckpttool.problems import ExecutionError
from ckpttool.wording import count, printable

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.operations.answer import Document, Json, Reported
    from ckpttool.problems import Diagnostic, SeverityOf


COLORS = {
    "OK": "green",
    "equal": "green",
    "warning": "yellow",
    "different": "red",
    "error": "red",
}
T = TypeVar("T")

MAX_ROWS = 40  # of a table on the screen; --json has all
MAX_RANGES = 6  # of ranks, in one line
MAX_FOUND = 50  # findings or differences that are shown without --limit
MARGIN, SPACE = 2, 3  # columns before a row, and between two cells
INDENT = 2  # columns before the rest of a paragraph, or of a row


def echo(line: str, end: str = "\n") -> None:
    """Print text; an error names standard output, as other errors name their file."""
    try:
        click.echo(f"{line}{end}", nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ExecutionError("standard output", describe_os_error(error)) from error


def print_json(document: Json) -> None:
    """Print the JSON document of a command, its only one."""
    from ckpttool.operations.answer import to_text

    click.get_current_context().meta[ANSWERED] = True
    echo(to_text(document))


def print_answer(
    document: Document, show: Callable[[], None], notes: Reported, report: ReportOptions
) -> None:
    """Print the document of a command, or its screen with ``show``, and its notes."""
    if report.as_json:
        print_json(document.to_dict())
        return
    if not report.quiet:
        show()
    print_notes(notes, notes.severity_of, report.quiet)


def print_tsv(columns: Sequence[str], rows: Any) -> None:
    """Print the parts of a document as lines; ``a.dtype`` is a key of a part of a part.

    Text is written as it is, with tabs and ends of lines escaped; other values are JSON.
    """
    import json

    def cell(value: Any, keys: Sequence[str]) -> str:
        for key in keys:
            value = value.get(key) if value is not None else None
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        return re.sub(r"[\\\t\n\r]", lambda it: it[0].encode("unicode_escape").decode(), text)

    echo("\t".join(columns))
    for row in rows:
        echo("\t".join(cell(row, name.split(".")) for name in columns))


def print_annotations(findings: Sequence[Diagnostic], severity_of: SeverityOf) -> None:
    """Print findings as the commands of a workflow of GitHub, which shows them beside a change.

    Source
    ------
    GitHub Actions, "Workflow commands": ``::error file=F,title=T::MESSAGE``, where % and ends of
    lines are written as in a URL, and in properties also colons and commas.
    """

    def escape(text: str, letters: str = "%\r\n") -> str:
        return re.sub(f"[{letters}]", lambda it: f"%{ord(it[0]):02X}", text)

    for finding in findings:
        file = f",file={escape(finding.path, '%:,')}" if finding.path else ""
        severity = severity_of[finding.code]
        level = severity if severity in ("error", "warning") else "notice"
        echo(f"::{level} title={finding.code}{file}::{escape(chr(10).join(finding.lines))}")


def print_text(
    message: str,
    label: str = "",
    code: str = "",
    *,
    indent: int = INDENT,
    err: bool = False,
    color: str | None = None,
) -> None:
    """Print a paragraph: folded on a terminal, one line in a pipe.

    Parameters
    ----------
    text
        The paragraph.
    label
        Its first word, bold and in one of `COLORS`.
    code
        Code of a diagnostic, which follows the label in brackets.
    indent
        Columns before the lines after the first.
    err
        Whether to print it on stderr.
    color
        The color of a paragraph without a label.
    """
    bracketed = f"[{code}]" if code else ""
    message = printable(f"{label}{bracketed}: {message}" if label else message)
    message = "\n".join(_fold(message, _room(sys.stderr if err else sys.stdout), indent))
    if label:
        message = click.style(label, fg=COLORS.get(label), bold=True) + message.removeprefix(label)
    elif color is not None:
        message = click.style(message, fg=color)
    if err:
        click.echo(message, err=True)
    else:
        echo(message)


def print_diagnostic(diagnostic: Diagnostic, severity: str, *, err: bool = False) -> None:
    """Print what is wrong, then the facts and the hint on lines of their own."""
    code = diagnostic.code if severity in ("error", "warning") else ""
    what, *more = diagnostic.lines
    print_text(what, severity, code, err=err)
    for line in more:
        print_text(" " * INDENT + line, indent=INDENT, err=err)


def print_findings(
    findings: Iterable[Diagnostic],
    notes: Iterable[Diagnostic],
    severity_of: SeverityOf,
    options: ReportOptions,
) -> None:
    """Print what a command found wrong, as many as ``--limit`` says, and the notes."""

    def show(shown: Iterable[Diagnostic]) -> None:
        for diagnostic in shown:
            print_diagnostic(diagnostic, str(severity_of[diagnostic.code]))

    from ckpttool.model.joining import join_alike

    print_first(join_alike(findings), options.limit, show)
    print_notes(notes, severity_of, options.quiet)


def print_first(items: Sequence[T], limit: int | None, show: Callable[[Sequence[T]], None]) -> None:
    """Print the first ``limit`` with ``show``, and how many others there are."""
    if shown := items[: MAX_FOUND if limit is None else limit]:
        show(shown)
    if more := len(items) - len(shown):
        print_text(f"and {more} more (--limit N shows N, --json all)")


def print_more(number: int, noun: str) -> None:
    """Print how many rows a table does not show, if there are any."""
    if number > 0:
        print_text(f"and {count(number, f'more {noun}')} (--json lists all)")
        echo("")


def print_notes(notes: Iterable[Diagnostic], severity_of: SeverityOf, quiet: bool) -> None:
    """Print notes and warnings on stderr; if ``quiet``, only the warnings."""
    from ckpttool.model.joining import join_alike

    for note in join_alike(notes):
        is_warning = severity_of[note.code] == "warning"
        if is_warning or not quiet:
            print_diagnostic(note, "warning" if is_warning else "note", err=True)


def terminal_columns(stream: TextIO) -> int | None:
    """Return the width of a terminal; None if the stream is a pipe or a file."""
    if not stream.isatty():
        return None
    from shutil import get_terminal_size

    own = os.get_terminal_size(stream.fileno())
    return get_terminal_size(own).columns or 80  # $COLUMNS first; 0 is not known


def _room(stream: TextIO) -> float:
    """Return the columns of a line: those of the terminal; infinite for a pipe or a file."""
    columns = terminal_columns(stream)
    return math.inf if columns is None else columns


def has_utf8(stream: TextIO) -> bool:
    """Return whether a stream takes every character, as UTF-8 does, and a text in memory."""
    encoding: str | None = stream.encoding
    return encoding is None or "utf" in encoding.lower()


def _rule_letter() -> str:
    # In the C locale Python writes UTF-8, whatever the terminal can show.
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG")
    return "─" if has_utf8(sys.stdout) and locale not in ("C", "POSIX") else "-"


def print_facts(
    title: str, facts: Mapping[str, Iterable[str]], colors: Mapping[str, str | None] = {}
) -> None:
    """Print a title, a line for each text, with the labels in a column, and an empty line.

    ``colors`` has those of texts, by their labels.
    """
    shown = {label: texts for label, given in facts.items() if (texts := [*given])}
    columns = _room(sys.stdout)
    echo(click.style("\n".join(_fold(printable(title), columns)), bold=True))
    indent = max(_width(printable(label)) for label in shown) + SPACE
    if columns < 2 * indent:
        indent = SPACE  # no column of labels
    for label, texts in shown.items():
        for head, words in zip_longest([printable(label)], map(printable, texts), fillvalue=""):
            line = head + " " * max(SPACE, indent - _width(head)) + words
            bold = click.style(head, bold=True) if head else ""
            body = "\n".join(_fold(line, columns, indent)).removeprefix(head)
            color = colors.get(label)
            echo(bold + (body if color is None else click.style(body, fg=color)))
    echo("")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, has_names: bool = False
) -> None:
    """Print a table; columns whose name ends in ``>`` are aligned right and not folded.

    A column without contents is left out.  On a narrow terminal the columns with the longest words
    stand above the rows: once for all rows that share them.  If the first column ``has_names``,
    their beginning up to the number of a layer does so first.
    """
    shown = [[printable(cell) for cell in row] for row in rows]
    inline = _read_columns(columns, shown)
    above: list[_Column] = []
    margin, room = MARGIN, _room(sys.stdout)
    least = {column: column.width for column in inline}
    if _end(margin, least.values()) >= room:
        by_layer = _read_columns(columns, [*_by_layer(shown)]) if has_names else inline
        if _end(margin, (column.folded(cells=True) for column in by_layer)) < room:
            inline = by_layer
        least = {column: column.folded(cells=True) for column in inline}
    while len(inline) > 1 and _end(margin, (least[column] for column in inline)) >= room:
        inline.remove(max(inline, key=lambda column: least[column]))
        above = [column for column in least if column not in inline]
        margin = MARGIN + INDENT
    grids = _Grid(above, MARGIN, room), _Grid(inline, margin, room)
    heads = [line for grid in grids for line in grid.lines(0)]
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in range(1, len(inline[0].cells)):
        groups.setdefault(tuple(column.cells[row] for column in above), []).append(row)
    body: list[str] = []
    for members in groups.values():
        body += grids[0].lines(members[0])
        body += (line for row in members for line in grids[1].lines(row))
    length = max(grid.end for grid in grids) - MARGIN + 2
    rule = f" {_rule_letter() * int(min(length, room - 1))}"
    lines = (*_fold(printable(title), room), "", *heads)
    bold = (click.style(line, bold=True) for line in lines)
    echo("\n".join((*bold, click.style(rule, dim=True), *body, "")))


_LAYER = compile_late(
    r"((?:(?:.*[.])?(?:\d+|{[\d,/-]+})[.](?=.))?).*"
)  # up to the number of a layer


def _by_layer(rows: Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Yield rows whose names begin in a row of their own: once for all that follow each other."""
    for layer, members in groupby(rows, key=lambda row: _LAYER.sub(r"\1", row[0])):
        indent = " " * INDENT if layer else ""
        for number, (name, *cells) in enumerate(members):
            if layer and not number:
                yield [layer, *("" for _ in cells)]
            yield [indent + name.removeprefix(layer), *cells]


def _read_columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[_Column]:
    cells = [*zip(names, *rows, strict=True)]
    return [
        _Column((name.rstrip(">"), *rest), name.endswith(">"))
        for name, *rest in cells
        if not rows or any(rest)
    ]


class _Column:
    """The head and the cells of a column, and its width."""

    def __init__(self, cells: Sequence[str], is_right: bool) -> None:
        self.cells = cells
        self.is_right = is_right
        self.width = _widest(cells)

    def folded(self, cells: bool) -> int:
        """Return the least width if the head is folded between words, and perhaps the cells."""
        head, *rest = self.cells
        words = map(_words, rest) if cells and not self.is_right else [rest]
        return _widest(chain(_words(head), *words))


def _end(margin: int, widths: Iterable[int]) -> int:
    return margin + sum(width + SPACE for width in widths) - SPACE


class _Grid:
    """Columns side by side; one below the other where a terminal is too narrow."""

    def __init__(self, columns: Sequence[_Column], margin: int, room: float) -> None:
        self.columns = columns
        self.margin = margin
        self.room: float | None = None  # of columns that are one below the other
        if self.end >= room:
            self._narrow(room)

    @property
    def end(self) -> int:
        """The columns of the longest row, with the margin."""
        return _end(self.margin, (column.width for column in self.columns))

    def _narrow(self, room: float) -> None:
        """Narrow the columns: first the heads, then the widest cells."""
        least = {column: column.folded(cells=True) for column in self.columns}
        for column in self.columns:
            column.width = column.folded(cells=False)
        while self.end >= room:
            foldable = [column for column in self.columns if column.width > least[column]]
            if not foldable:
                self.room = room - 1 - self.margin
                break
            max(foldable, key=lambda column: column.width).width -= 1

    def lines(self, row: int) -> Iterator[str]:
        """Yield the lines of a row; row 0 is the heads."""
        margin = " " * self.margin
        if self.room is not None:
            folded = (part for it in self.columns for part in _fold(it.cells[row], self.room))
            yield from (margin + part for part in folded if part)
            return
        cells = (_fold(column.cells[row], column.width) for column in self.columns)
        for parts in zip_longest(*cells, fillvalue=""):
            line = margin
            for column, part in zip(self.columns, parts, strict=True):
                padding = " " * (column.width - _width(part))
                line += (padding + part if column.is_right else part + padding) + " " * SPACE
            if line := line.rstrip():
                yield line


def _fold(line: str, width: float, indent: int = 0) -> list[str]:
    """Fold a text between words into lines of at most ``width`` columns.

    Lines after the first are indented.  A word that is wider than a line is not broken, and a
    bullet does not stand alone.

    Examples
    --------
    >>> _fold("ranks 0-3, 5-7 have adam_m.layers.0.weight", 13)
    ['ranks 0-3,', '5-7 have', 'adam_m.layers.0.weight']
    """
    if _width(line) <= width:
        return [line]
    first, *words = _words(line, width - indent)
    lines = [first]
    for word in words:
        if _width(f"{lines[-1]} {word}") <= width or not lines[-1].strip(" -"):
            lines[-1] += f" {word}"
        else:
            lines.append(" " * indent + word)
    return lines


# What stays on one line: `a command`, (4, 2), [0:4, 0:2], 64 x 2, rows / 2, x 4, step 2_10,
# 189.8 KiB, 8 ranks.
_TIED = compile_late(
    r"`[^`]+`|\(\d+(?:, \d+)+\)|\[\d+(?::\d+)?(?:, \d+(?::\d+)?)+\]|(?<=\d) x (?=\d)| / |"
    r"(?<![^ (])(?:x|step|ranks?|stages?|byte) (?=\d)|(?<![^ (])\d[\d.,_-]*(?<!,) (?=[^\d ])"
)


def _words(line: str, width: float = math.inf) -> list[str]:
    """Split a text between words; what `_TIED` finds is one word, unless it is wider."""
    tied = _TIED.sub(lambda it: it[0].replace(" ", "\0" if len(it[0]) <= width else " "), line)
    return [word.replace("\0", " ") for word in tied.split(" ")]


def _widest(texts: Iterable[str]) -> int:
    return max(map(_width, texts), default=0)


def _width(word: str) -> int:
    """Return the columns of a text on a terminal: 2 for an ideograph, 0 for an accent."""
    if word.isascii():
        return len(word)
    from rich.cells import cell_len

    return cell_len(word)
