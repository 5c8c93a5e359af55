"""Tables on stdout: as wide as needed in a pipe, folded to fit on a terminal.

No word is ever broken, so that a name can be found and copied.  If the columns do not fit on the
terminal, the column with the longest words gets lines of its own.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from ckpttool.model.catalog import MergedCatalog, SelfDescribedCatalog
from ckpttool.model.wording import (
    count,
    format_bytes,
    format_ranks,
    format_shape,
    format_shapes,
    printable,
)

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog
    from ckpttool.verification.describe import Json


def echo(text: str) -> None:
    """Print a line; an error names standard output, as other errors name their file."""
    try:
        click.echo(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


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


MOST_SLICES = 8  # of a tensor, in a table
LAYOUT = ("slice", "device matrix", "tensor map", "shard>")  # columns


def print_merged(catalog: MergedCatalog, document: Json) -> None:
    """Print the table of a single file, or of several files with an index."""
    stored = [tensor for file in catalog.files.values() for tensor in file.tensors.values()]
    several = "files" in document
    of_files = f"{len(catalog.files)} files, " if several else ""
    print_table(
        f"{document['path']}: {of_files}{document['format']}, "
        f"{format_bytes(sum(file.nbytes for file in catalog.files.values()))}, "
        f"{len(stored)} tensors",
        ("name", "dtype", "shape", "size>", *(["file"] if several else [])),
        (
            (meta.name, meta.dtype, format_shape(meta.shape), format_bytes(meta.nbytes), *where)
            for meta, where in (
                (tensor.meta, [PurePath(tensor.file.path).name] if several else [])
                for tensor in stored
            )
        ),
    )


def print_checkpoint(catalog: Catalog, document: Json) -> None:
    """Print the tables of rank folders."""
    total = sum(file.nbytes for file in catalog.files.values())
    of_step = f", step {catalog.step}" if catalog.step else ""
    ranks: Any = document["ranks"]
    places = [key for entry in ranks[:1] for key in ("server", "device") if key in entry]
    print_table(
        f"{catalog.root}: {count(len(catalog.files), 'rank')}{of_step}, {format_bytes(total)}",
        ("rank>", *places, "path", "format", "tensors>", "size>"),
        (
            (
                str(entry["rank"]),
                *("" if entry[key] is None else str(entry[key]) for key in places),
                ", ".join(
                    path.removeprefix(catalog.root).lstrip("/")
                    for path in (entry["path"], *entry.get("beside", ()))
                ),
                entry["format"],
                str(entry["tensors"]),
                format_bytes(entry["nbytes"]),
            )
            for entry in ranks
        ),
    )
    is_described = isinstance(catalog, SelfDescribedCatalog)
    if isinstance(catalog, SelfDescribedCatalog) and catalog.description.values:
        values = catalog.description.values.items()
        print_table("the checkpoint says", ("name", "value"), values)
    tensors = document.get("tensors")
    if isinstance(tensors, list) and is_described:
        print_table(
            f"{len(tensors)} tensors",
            ("name", "dtype", "shape", "slice", "parts", "ranks of each slice"),
            (_described_row(tensor) for tensor in tensors),
        )
    elif isinstance(tensors, list):
        total = len(catalog.metas)
        rest = f" of {total} tensors; slices of the others are missing, or do not fit: see below"
        print_table(
            f"{len(tensors)}{' tensors' if len(tensors) == total else rest}",
            ("name", "dtype", "shape", *LAYOUT, "stages"),
            ((*_row(tensor), ", ".join(map(str, tensor["stages"]))) for tensor in tensors),
        )


def print_largest(tensors: Sequence[Json]) -> None:
    """Print the largest sharded tensors of a source, if any is sharded."""
    if tensors:
        print_table(
            "largest sharded tensors: check that these are the shapes of the model",
            ("name", "dtype", "shape", *LAYOUT),
            (_row(tensor) for tensor in tensors),
        )


def _row(tensor: Mapping[str, Any]) -> Sequence[str]:
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


def _described_row(tensor: Mapping[str, Any]) -> Sequence[str]:
    slices = tensor.get("slices")
    if slices is None:
        return (
            tensor["name"],
            tensor["dtype"],
            format_shape(tensor["shape"]),
            "",
            "not described",
            "",
        )
    ranks = [format_ranks(held["ranks"]).partition(" ")[2] for held in slices[:MOST_SLICES]]
    more = len(slices) - MOST_SLICES
    return (
        tensor["name"],
        tensor["dtype"],
        format_shape(tensor["shape"]),
        format_shapes(tensor.get("slice_shapes", [tensor["slice_shape"]])),
        f"{len(slices)} boxes" if tensor["parts"] is None else format_shape(tensor["parts"]),
        " | ".join([*ranks, f"and {more} more"] if more > 0 else ranks),
    )
