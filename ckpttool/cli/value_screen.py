"""The screen of ``inspect --values``: each tensor as NumPy prints it, and its statistics."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckpttool.cli.tables import echo, print_text, terminal_columns
from ckpttool.wording import count, format_bytes, format_sizes, printable

if TYPE_CHECKING:
    from ckpttool.operations.values import Values
    from ckpttool.storage.statistics import Statistics


def print_values(values: Values) -> None:
    """Print the tensors, in the order of the checkpoint."""
    for i, tensor in enumerate(values.tensors):
        if i:
            echo("")
        rows = ""
        if tensor.rows is not None:
            rows = f", rows {_spell_slice(tensor.rows)}" if tensor.rows else ", no rows"
        size = f"{format_sizes(tensor.shape)}, {format_bytes(tensor.nbytes)}"
        what = tensor.dtype if tensor.text is not None else f"{tensor.dtype} {size}{rows}"
        print_text(what, printable(tensor.name))
        if tensor.rows is not None and not tensor.rows:
            print_text(f"--rows selects none: the tensor has {count(tensor.shape[0], 'row')}")
            continue
        columns = terminal_columns(sys.stdout)
        echo(tensor.printed(columns) if tensor.text is None else printable(tensor.text))
        if tensor.statistics is not None:
            print_text(_statistics_text(tensor.statistics))
        elif tensor.text is None:
            print_text("no statistics: NumPy has no such type, and these are the stored bytes")


def _statistics_text(statistics: Statistics) -> str:
    """Return the statistics on a line; those of the finite elements only if there are some."""
    numbers = {"min": statistics.minimum, "max": statistics.maximum, "mean": statistics.mean}
    texts = [
        f"{name} {number if isinstance(number, int) else format(number, '.6g')}"
        for name, number in {**numbers, "norm": statistics.norm}.items()
        if number is not None
    ]
    counts = {"NaN": statistics.nans, "Inf": statistics.infinities, "zero": statistics.zeros}
    return f"{', '.join(texts)}; {', '.join(f'{n} {name}' for name, n in counts.items())}"


def _spell_slice(rows: range) -> str:
    """Return rows as a slice that means them.

    Examples
    --------
    >>> _spell_slice(range(0, 4)), _spell_slice(range(5, -1, -2))
    ('0:4', '5::-2')
    """
    stop = rows.stop if rows.stop >= 0 else ""
    return f"{rows.start}:{stop}" + (f":{rows.step}" if rows.step != 1 else "")
