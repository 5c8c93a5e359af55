"""What commands print: tables, verdicts and documents on stdout, notes on stderr.

Text is folded to fit on a terminal; in a pipe a row, a note or an error is one line.  No word is
ever broken, so that a name can be found and copied.  If the columns do not fit on the terminal, the
column with the longest words gets lines of its own above the row.  `click.echo` removes bold and
colours where they are not shown; rich would need 0.1 s to load, and its tables break words.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, TextIO

import click

from ckpttool.cli.options import ANSWERED
from ckpttool.errors import ExecutionError
from ckpttool.formats.local import describe_os_error
from ckpttool.model.diagnostics import join_alike, severities
from ckpttool.model.wording import (
    count,
    format_bytes,
    format_shape,
    format_sizes,
    printable,
)

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.model.diagnostics import Diagnostic, Report, SeverityOf
    from ckpttool.model.tensors import TensorMeta
    from ckpttool.storage.compare import Tolerance
    from ckpttool.verification.describe import Json
    from ckpttool.verification.diff import Comparison, TensorDifference


COLORS = {
    "OK": "green",
    "equal": "green",
    "warning": "yellow",
    "different": "red",
    "error": "red",
}
MARGIN, SPACE = 2, 3  # columns before a row, and between two cells
INDENT = 2  # columns before the rest of a paragraph, or of a row


def echo(text: str) -> None:
    """Print text; an error names standard output, as other errors name their file."""
    try:
        click.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ExecutionError("standard output", describe_os_error(error)) from error


def print_json(document: Json) -> None:
    """Print the JSON document of a command, its only one."""
    import json

    click.get_current_context().meta[ANSWERED] = True
    echo(json.dumps(document))  # ASCII, which every locale can print


def print_text(
    text: str, label: str = "", code: str = "", *, indent: int = INDENT, err: bool = False
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
    """
    columns = terminal_columns(sys.stderr if err else sys.stdout)
    bracketed = f"[{code}]" if code else ""
    text = printable(f"{label}{bracketed}: {text}" if label else text)
    if columns is not None:
        text = "\n".join(_fold(text, columns, indent))
    if label:
        text = click.style(label, fg=COLORS.get(label), bold=True) + text.removeprefix(label)
    if err:
        click.echo(text, err=True)
    else:
        echo(text)


def print_diagnostic(one: Diagnostic, severity: str, *, err: bool = False) -> None:
    """Print what is wrong, then the facts and the hint on lines of their own."""
    code = one.code if severity in ("error", "warning") else ""
    what, *more = one.lines
    print_text(what, severity, code, err=err)
    for line in more:
        print_text(" " * INDENT + line, indent=INDENT, err=err)


def print_notes(notes: Iterable[Diagnostic], severity_of: SeverityOf, quiet: bool) -> None:
    """Print notes and warnings on stderr; if ``quiet``, only the warnings."""
    for note in join_alike(notes):
        is_warning = severity_of[note.code] == "warning"
        if is_warning or not quiet:
            print_diagnostic(note, "warning" if is_warning else "note", err=True)


def terminal_columns(stream: TextIO) -> int | None:
    """Return the width of a terminal; None if the stream is a pipe or a file."""
    if not stream.isatty():
        return None
    own = os.get_terminal_size(stream.fileno())
    return shutil.get_terminal_size(own).columns or 80  # $COLUMNS first; 0 is not known


def _rule_letter() -> str:
    # In the C locale Python writes UTF-8, whatever the terminal can show.
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG")
    has_utf8 = "utf" in sys.stdout.encoding.lower() and locale not in ("C", "POSIX")
    return "─" if has_utf8 else "-"


LONGEST_LABEL = 20  # columns; a longer title of facts gets a line of its own


def print_facts(title: str, facts: Mapping[str, Sequence[str]]) -> None:
    """Print a line for each text, with the labels in a column of their own, and an empty line.

    The title is the label of the first texts, if it is short, else a line above.
    """
    first, *others = ((label, texts) for label, texts in facts.items() if texts)
    if len(title) <= LONGEST_LABEL:
        first = (title, first[1])
    else:
        echo(click.style(printable(title), bold=True))
    columns = terminal_columns(sys.stdout)
    indent = max(_width(printable(label)) for label, _ in (first, *others)) + SPACE
    if columns is not None and columns < 2 * indent:
        indent = SPACE  # no column of labels
    for label, texts in (first, *others):
        for head, text in zip_longest([printable(label)], map(printable, texts), fillvalue=""):
            line = head + " " * max(SPACE, indent - _width(head)) + text
            lines = [line] if columns is None else _fold(line, columns, indent)
            bold = click.style(head, bold=True) if head else ""
            echo(bold + "\n".join(lines).removeprefix(head))
    echo("")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; columns whose name ends in ``>`` are aligned right and not folded.

    A column without contents is left out.
    """
    cells = list(zip(*([printable(cell) for cell in row] for row in rows), strict=True))
    shown = [i for i in range(len(columns)) if not cells or any(cells[i])]
    filled = [(columns[i].rstrip(">"), *(cells[i] if cells else ())) for i in shown]
    table = list(zip(*filled, strict=True))
    is_right = [columns[i].endswith(">") for i in shown]
    widths = [max(map(_width, column)) for column in filled]
    inline = list(range(len(shown)))
    titles, room = [printable(title)], 0
    if (terminal := terminal_columns(sys.stdout)) is not None:
        titles = _fold(titles[0], terminal)
        room = terminal - MARGIN - 1  # the rule is longer than the rows
        inline = _fit(table, is_right, widths, room)
    header, *body = (list(_lines(row, widths, is_right, inline, room)) for row in table)
    heads = [click.style(line, bold=True) for line in (*titles, "", *header)]
    rule = click.style(f" {_rule_letter() * (_row_width(widths, inline) + 2)}", dim=True)
    echo("\n".join((*heads, rule, *chain.from_iterable(body), "")))


def _fit(
    table: Sequence[Sequence[str]], is_right: Sequence[bool], widths: list[int], room: int
) -> list[int]:
    """Narrow the columns, the widest first, until a row fits; return those that share a line."""
    words = [
        [word for cell in cells for word in _words(cell)] for cells in zip(*table, strict=True)
    ]
    least = [widths[i] if is_right[i] else max(map(_width, cells)) for i, cells in enumerate(words)]
    inline = list(range(len(widths)))
    while len(inline) > 1 and _row_width(least, inline) > room:
        inline.remove(max(inline, key=lambda i: least[i]))
    while _row_width(widths, inline) > room:
        foldable = [i for i in inline if widths[i] > least[i]]
        if not foldable:
            break
        widths[max(foldable, key=lambda i: widths[i])] -= 1
    return inline


def _row_width(widths: Sequence[int], inline: Sequence[int]) -> int:
    indent = INDENT if len(inline) < len(widths) else 0
    return indent + sum(widths[i] + SPACE for i in inline) - SPACE


def _lines(
    cells: Sequence[str],
    widths: Sequence[int],
    is_right: Sequence[bool],
    inline: Sequence[int],
    room: int,
) -> Iterator[str]:
    """Yield the lines of a row: the cells that have their own, then the inline cells."""
    margin = " " * MARGIN
    if others := [cell for i, cell in enumerate(cells) if i not in inline]:
        yield from (f"{margin}{part}" for cell in others for part in _fold(cell, room) if part)
        margin += " " * INDENT
    for parts in zip_longest(*(_fold(cells[i], widths[i]) for i in inline), fillvalue=""):
        line = margin
        for i, part in zip(inline, parts, strict=True):
            padding = " " * (widths[i] - _width(part))
            line += (padding + part if is_right[i] else part + padding) + " " * SPACE
        yield line.rstrip()


def _fold(text: str, width: int, indent: int = 0) -> list[str]:
    """Fold a text between words into lines of at most ``width`` columns.

    Lines after the first are indented.  A word that is wider than a line is not broken, and a
    bullet does not stand alone.

    Examples
    --------
    >>> _fold("ranks 0-3, 5-7 have adam_m.layers.0.weight", 13)
    ['ranks 0-3,', '5-7 have', 'adam_m.layers.0.weight']
    """
    if _width(text) <= width:
        return [text]
    first, *words = _words(text)
    lines = [first]
    for word in words:
        if _width(f"{lines[-1]} {word}") <= width or not lines[-1].strip(" -"):
            lines[-1] += f" {word}"
        else:
            lines.append(" " * indent + word)
    return lines


def _words(text: str) -> list[str]:
    """Split a text between words; ``rows / 2`` and ``32 x 16`` are one word."""
    return re.split(r"(?<! [/x]) (?![/x] )", text)


def _width(text: str) -> int:
    """Return the columns of a text on a terminal: 2 for an ideograph, 0 for an accent."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


MAX_ROWS = 50  # findings or differences that are shown without --limit


def print_report(found: Report, deep: bool, crc: bool, options: ReportOptions) -> None:
    """Print the result of verify: a verdict, the findings and the notes."""
    depth = "all data read" if deep else "--deep reads the data"
    of_step = f", step {found.step}" if found.step else ""
    read = f"{count(len(found.ranks), 'rank')}{of_step}, {count(found.tensors, 'tensor')}, "
    read += f"{format_bytes(found.nbytes)}; {depth}"
    findings = join_alike(found.findings)
    counts = Counter(str(found.severity_of[one.code]) for one in findings)
    present = [severity for severity in ("error", "warning") if counts[severity]]
    verdict = ", ".join(count(counts[severity], severity) for severity in present)
    read_right = "headers and checksums" if crc else "headers"
    clean = "nothing is wrong" if deep else f"the {read_right} are right"
    clean += "" if found.is_whole else " in each rank by itself"
    if present or not options.quiet:
        print_text(f"{found.path}: {verdict or clean} ({read})", (*present, "OK")[0])
    _print_findings(findings, found.severity_of, options.limit)
    # What a conversion warns of is shown with -q as well; what --ignore made a note is not.
    of_verify = severities("verify")
    shown_as: SeverityOf = {
        code: "note" if of_verify[code] == "warning" else severity
        for code, severity in severities("convert").items()
    }
    print_notes(found.notes, shown_as, options.quiet)


def print_comparison(
    a: str, b: str, found: Comparison, tolerance: Tolerance | None, options: ReportOptions
) -> None:
    """Print the result of diff: a verdict, the differences, the findings and the notes."""
    how = "bytes" if tolerance is None else f"atol {tolerance.atol:g}, rtol {tolerance.rtol:g}"
    size = f"({count(found.tensors, 'tensor')}, {format_bytes(found.nbytes)} compared, {how})"
    facts = [f"{number} {_WORDS[kind]}" for kind, number in found.count_kinds().items()]
    verdict = f": {', '.join(facts)}" if facts else ""
    if found.findings:
        replicas = "replicas differ (the lowest rank's are compared)"
        verdict = f"{verdict}; {replicas}" if facts else f": {replicas}, nothing else does"
    if verdict or not options.quiet:
        print_text(f"A {a} and B {b}{verdict} {size}", "different" if verdict else "equal")
    if found.differences:
        columns = ("tensor", "what", "A", "B", "shape", "differ>", "max abs>", "first")
        shown = found.differences[: _max_shown(options.limit)]
        if shown:
            print_table("differences", columns, map(_difference_row, shown))
        _print_number_of_others(len(found.differences) - len(shown))
    severity_of = severities("diff")
    _print_findings(join_alike(found.findings), severity_of, options.limit)
    print_notes(found.notes, severity_of, options.quiet)


def _print_findings(
    findings: Sequence[Diagnostic], severity_of: SeverityOf, limit: int | None
) -> None:
    shown = findings[: _max_shown(limit)]
    for found in shown:
        print_diagnostic(found, str(severity_of[found.code]))
    _print_number_of_others(len(findings) - len(shown))


def _max_shown(limit: int | None) -> int:
    return MAX_ROWS if limit is None else limit


def _print_number_of_others(number: int) -> None:
    if number:
        print_text(f"and {number} more (--limit N shows N, --json all)")


_WORDS = {  # by kind of difference
    "only in A": "only in A",
    "only in B": "only in B",
    "dtype": "of another type",
    "shape": "of another shape",
    "text": "with another text",
    "values": "with other values",
}


def _difference_row(tensor: TensorDifference) -> Sequence[str]:
    """Return the cells of a tensor; A and B say what else differs than values."""
    name = tensor.name if tensor.rank is None else f"{tensor.name} (rank {tensor.rank})"
    if tensor.values is None or tensor.a is None:
        a, b = ("" if meta is None else _show(meta) for meta in (tensor.a, tensor.b))
        return (name, tensor.kind, a, b, "", "", "", "")
    values = tensor.values
    differ = f"{values.count} of {math.prod(tensor.a.shape)}"
    details = {"the same number": values.same_number, "NaN on one side": values.nans}
    if any(details.values()):
        differ += f" ({', '.join(f'{n} {what}' for what, n in details.items() if n)})"
    largest = "" if values.max_abs is None else f"{values.max_abs:.4g}"
    first = "" if values.first is None else format_shape(values.first)
    return (name, "", "", "", format_sizes(tensor.a.shape), differ, largest, first)


def _show(meta: TensorMeta) -> str:
    if meta.text is not None:
        return repr(meta.text if len(meta.text) <= 40 else meta.text[:37] + "...")
    return f"{meta.dtype} {format_shape(meta.shape)}"
