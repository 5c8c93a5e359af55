"""What commands print: tables, verdicts and documents on stdout, notes on stderr.

Tables are as wide as needed in a pipe, and folded to fit on a terminal.  No word is ever broken, so
that a name can be found and copied.  If the columns do not fit on the terminal, the column with the
longest words gets lines of its own.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from ckpttool.model.diagnostics import severities
from ckpttool.model.wording import (
    count,
    format_bytes,
    format_shape,
    format_shapes,
    printable,
)

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.model.diagnostics import Diagnostic, Report, SeverityOf
    from ckpttool.model.tensors import TensorMeta
    from ckpttool.storage.compare import Tolerance
    from ckpttool.verification.describe import Json
    from ckpttool.verification.diff import Comparison, TensorDifference


def echo(text: str) -> None:
    """Print a line; an error names standard output, as other errors name their file."""
    try:
        click.echo(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def print_json(document: Json) -> None:
    """Print one JSON document."""
    import json

    echo(json.dumps(document))  # ASCII, which every locale can print


def print_notes(notes: Iterable[Diagnostic], severity_of: SeverityOf, quiet: bool) -> None:
    """Print diagnostics on stderr, one line each; if ``quiet``, only the warnings."""
    for note in notes:
        if severity_of[note.code] == "warning":
            click.echo(f"warning: {printable(note.text)}", err=True)
        elif not quiet:
            click.echo(f"note: {printable(note.text)}", err=True)


MARGIN, SPACE = 2, 3  # columns before a row, and between two cells
INDENT = 2  # more columns before a cell that has lines of its own, or before the rest of its row


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; columns whose name ends in ``>`` are aligned right and not folded."""
    table = [[column.rstrip(">") for column in columns]]
    table += [[printable(cell) for cell in row] for row in rows]
    is_right = [column.endswith(">") for column in columns]
    widths = [max(map(_width, cells)) for cells in zip(*table, strict=True)]
    terminal = shutil.get_terminal_size().columns  # $COLUMNS or 80 without a terminal
    room = terminal - MARGIN - 1  # the rule is longer than the rows
    if sys.stdout.isatty():
        inline = _fit(table, is_right, widths, room)
        rule = _row_width(widths, inline) + 2
    else:
        inline = list(range(len(columns)))
        rule = min(_row_width(widths, inline) + 2, terminal - 2)
    header, *body = ("\n".join(_lines(row, widths, is_right, inline, room)) for row in table)
    echo("\n".join((printable(title), "", header, f" {'─' * rule}", *body, "")))


def _fit(
    table: Sequence[Sequence[str]], is_right: Sequence[bool], widths: list[int], room: int
) -> list[int]:
    """Narrow the columns, the widest first, until a row fits; return those that share a line."""
    words = [
        [word for cell in cells for word in cell.split(" ")] for cells in zip(*table, strict=True)
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
    indent = 0 if 0 in inline else INDENT
    return indent + sum(widths[i] + SPACE for i in inline) - SPACE


def _lines(
    cells: Sequence[str],
    widths: Sequence[int],
    is_right: Sequence[bool],
    inline: Sequence[int],
    room: int,
) -> Iterator[str]:
    """Yield the lines of a row: a first cell with its own lines, inline cells, other cells."""
    margin = " " * MARGIN
    if 0 not in inline:
        yield from (f"{margin}{part}".rstrip() for part in _fold(cells[0], room))
        margin += " " * INDENT
    for parts in zip_longest(*(_fold(cells[i], widths[i]) for i in inline), fillvalue=""):
        line = margin
        for i, part in zip(inline, parts, strict=True):
            padding = " " * (widths[i] - _width(part))
            line += (padding + part if is_right[i] else part + padding) + " " * SPACE
        yield line.rstrip()
    margin = " " * (MARGIN + INDENT)
    for i in sorted({*range(1, len(cells))}.difference(inline)):
        yield from (f"{margin}{part}" for part in _fold(cells[i], room - INDENT) if part)


def _fold(cell: str, width: int) -> list[str]:
    """Fold a cell between words into parts of at most ``width`` columns, or of one wider word.

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
    """Return the columns of a text on a terminal: 2 for an ideograph, 0 for an accent."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


LAYOUT = ("slice", "device matrix", "tensor map", "shard>")  # columns


def print_largest(tensors: Sequence[Json]) -> None:
    """Print the largest sharded tensors of a source, if any is sharded."""
    if tensors:
        print_table(
            "largest sharded tensors: check that these are the shapes of the model",
            ("name", "dtype", "shape", *LAYOUT),
            (layout_row(tensor) for tensor in tensors),
        )


def layout_row(tensor: Mapping[str, Any]) -> Sequence[str]:
    """Return the cells of a full tensor and its layout; the columns end with `LAYOUT`."""
    listed = tensor["device_matrix"] is not None
    return (
        tensor["name"],
        tensor["dtype"],
        format_shape(tensor["shape"]),
        format_shapes(tensor.get("slice_shapes", [tensor["slice_shape"]])),
        format_shape(tensor["device_matrix"]) if listed else "not listed",
        " ".join(format_shape(axes) if axes else "-" for axes in tensor["tensor_map"])
        if listed
        else "",
        str(tensor["optimizer_shard"]) if listed and tensor["optimizer_shard"] > 1 else "",
    )


MAX_ROWS = 50  # of a table without --limit


def print_report(found: Report, deep: bool, crc: bool, options: ReportOptions) -> None:
    """Print the result of verify: a verdict, the findings and the notes."""
    shallow = "headers and checksums looked at" if crc else "headers read"
    depth = "all data read" if deep else f"{shallow}, not the data (--deep)"
    of_step = f", step {found.step}" if found.step else ""
    read = f"{count(len(found.ranks), 'rank')}{of_step}, {count(found.tensors, 'tensor')}, "
    read += f"{format_bytes(found.nbytes)}; {depth}"
    counts = found.count_severities()
    verdict = ", ".join(
        count(counts[severity], severity) for severity in ("error", "warning") if counts[severity]
    )
    clean = "nothing is wrong" if found.is_whole else "nothing is wrong with each rank by itself"
    echo(printable(f"{found.path}: {verdict or clean} ({read})"))
    _print_findings(found.findings, found.severity_of, options.limit)
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
    size = f"{count(found.tensors, 'tensor')}, {format_bytes(found.nbytes)} compared, {how}"
    verdict = "equal"
    if found.differences:
        parts = (f"{number} {_WORDS[kind]}" for kind, number in found.count_kinds().items())
        verdict = f"different: {', '.join(parts)}"
    if found.findings:
        replicas = "replicas differ (the lowest rank's are compared)"
        verdict = (
            f"{verdict}; {replicas}" if found.differences else f"{replicas}, nothing else does"
        )
    echo(printable(f"A {a} and B {b}: {verdict} ({size})"))
    if found.differences:
        columns = ("tensor", "what", "A", "B", "differ>", "max abs>", "max rel>", "first")
        rows = [_difference_row(tensor) for tensor in found.differences]
        _print_rows("differences", columns, rows, options.limit)
    severity_of = severities("diff")
    _print_findings(found.findings, severity_of, options.limit)
    print_notes(found.notes, severity_of, options.quiet)


def _print_findings(
    findings: Sequence[Diagnostic], severity_of: SeverityOf, limit: int | None
) -> None:
    rows = [(str(severity_of[found.code]), found.code, found.text) for found in findings]
    if rows:
        _print_rows("findings", ("severity", "kind", "what"), rows, limit)


_WORDS = {  # by kind of difference
    "only in A": "only in A",
    "only in B": "only in B",
    "dtype": "of another type",
    "shape": "of another shape",
    "text": "with another text",
    "values": "with other values",
}


def _difference_row(tensor: TensorDifference) -> Sequence[str]:
    name = tensor.name if tensor.rank is None else f"{tensor.name} (rank {tensor.rank})"
    a, b = ("" if meta is None else _show(meta) for meta in (tensor.a, tensor.b))
    if tensor.values is None or tensor.a is None:
        return (name, tensor.kind, a, b, "", "", "", "")
    values = tensor.values
    differ = f"{values.count} of {math.prod(tensor.a.shape)}"
    details = {"the same number": values.same_number, "NaN on one side": values.nans}
    if any(details.values()):
        differ += f" ({', '.join(f'{n} {what}' for what, n in details.items() if n)})"
    largest = ("" if x is None else f"{x:.6g}" for x in (values.max_abs, values.max_rel))
    first = "" if values.first is None else format_shape(values.first)
    return (name, tensor.kind, a, b, differ, *largest, first)


def _show(meta: TensorMeta) -> str:
    if meta.text is not None:
        return repr(meta.text if len(meta.text) <= 40 else meta.text[:37] + "...")
    return f"{meta.dtype} {format_shape(meta.shape)}"


def _print_rows(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], limit: int | None
) -> None:
    """Print a table of the first rows, and the number of the others."""
    max_rows = MAX_ROWS if limit is None else limit
    if max_rows:
        print_table(title, columns, rows[:max_rows])
    if len(rows) > max_rows:
        echo(f"and {len(rows) - max_rows} more (--limit N shows N, --json all)")
