"""The values of full tensors: what NumPy would print of them, and their statistics.

A tensor is read as `ckpttool.operations.open` reads it, unit by unit, so memory does not grow with
it.  For a large one, only the elements at its edges are kept, which NumPy prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain, product
from shlex import join
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.concurrency import InlineExecutor, OnProgress, OpenProgress, map_in_order, no_progress
from ckpttool.discovery.scan import CheckpointFiles
from ckpttool.model.patterns import unmatched_problems
from ckpttool.model.region import Region
from ckpttool.operations.answer import (
    Answer,
    Count,
    Document,
    Each,
    Reported,
    Unbounded,
    notes_and_problems,
)
from ckpttool.operations.load import Source, StrategySource, load
from ckpttool.operations.open import Array, LazyTensor, OpenCheckpoint
from ckpttool.operations.plans import plan_reading
from ckpttool.problems import PlanError, raise_all
from ckpttool.storage.numbers import Numbers
from ckpttool.storage.statistics import UNIT_ELEMENTS, Statistics, measure
from ckpttool.transaction.sources import require_unmodified_sources
from ckpttool.typed import parse_rows
from ckpttool.wording import count

PRINTED = 1000  # elements: NumPy prints the edges of a larger array
EDGE = 3  # elements at each end of an axis, which NumPy prints then
MAX_IN_FLIGHT = 64  # units that are read at a time, at most

Mean = float | tuple[float, float]  # of complex numbers the real and the imaginary part


class TensorValues(Struct, frozen=True):
    """The values of a tensor, or of some of its rows.

    Attributes
    ----------
    name, dtype, shape, nbytes
        The full tensor, with MindSpore's name of the type.
    rows
        The rows that are meant; None for all.
    elements
        The number of elements that are meant.
    shown
        All of them, or if `is_summarized` the first and the last three along each axis of more than
        six.  A text is an array of one text.
    statistics
        Of all elements that are meant; None if they are not numbers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    rows: range | None
    elements: int
    shown: Array
    statistics: Statistics | None

    @property
    def is_summarized(self) -> bool:
        """Whether there are so many elements that NumPy prints those at the edges."""
        return self.elements > PRINTED

    @property
    def text(self) -> str | None:
        """The text, if the tensor is one."""
        return str(self.shown) if self.shown.dtype.kind == "U" else None

    def printed(self, columns: int | None = None) -> str:
        """Return what NumPy prints of all elements, in so many columns; None for its default."""
        array, threshold = self.shown, self.elements
        if self.is_summarized:
            threshold = 0
            selected = _selected(self.shape, self.rows)
            for axis, size in enumerate(array.shape):
                if selected[axis] > size:  # NumPy prints "..." for the repeated element
                    array = np.repeat(array, [1] * (EDGE - 1) + [2] + [1] * EDGE, axis)
        with np.printoptions(threshold=threshold, edgeitems=EDGE, linewidth=columns or 75):
            return str(array[()])


class StatisticsOfValues(Answer, frozen=True):
    """Statistics of numbers.

    Attributes
    ----------
    elements
        Number of elements.
    nans
        How many are NaN.
    infinities
        How many are infinite.
    zeros
        How many are 0 or -0.
    finite
        How many are neither NaN nor infinite; what follows is of these.
    minimum
        The least; null for complex numbers, and if there is none.
    maximum
        The largest; null for complex numbers, and if there is none.
    mean
        The mean, real and imaginary of complex numbers; null if there is none.
    norm
        The square root of the sum of the squares; Infinity if a Float64 cannot hold it.
    """

    elements: Count
    nans: Count
    infinities: Count
    zeros: Count
    finite: Count
    minimum: float | None
    maximum: float | None
    mean: Mean | None
    norm: Unbounded


class PrintedValues(Answer, frozen=True):
    """The values of a tensor.

    Attributes
    ----------
    name
        Its name.
    dtype
        Element type, by MindSpore's name; str for a text.
    shape
        The full shape.
    nbytes
        Bytes of the full tensor.
    rows
        Start, stop and step of the rows that are meant, as of a range of Python; null for all.
    statistics
        Of all elements that are meant; null if they are not numbers.
    elements
        The elements as nested lists, or the text. Complex numbers are [real, imaginary]; NaN,
        Infinity and -Infinity stand in quotes; bytes of a type without numbers are integers. null
        for more than 1000 elements.
    """

    name: str
    dtype: str
    shape: tuple[Count, ...]
    nbytes: Count
    rows: tuple[int, int, int] | None
    statistics: StatisticsOfValues | None
    elements: Any

    @classmethod
    def of(cls, values: TensorValues) -> PrintedValues:
        """Return values as documents have them."""
        array, rows, statistics = values.shown, values.rows, values.statistics
        numbers = array.view("u1") if array.dtype.kind == "V" else array
        if statistics is not None:
            counts = (statistics.elements, statistics.nans, statistics.infinities)
            bounds = (statistics.minimum, statistics.maximum, _pair(statistics.mean))
            printed = StatisticsOfValues(
                *(*counts, statistics.zeros, statistics.finite, *bounds, statistics.norm)
            )
        return cls(
            *(values.name, values.dtype, values.shape, values.nbytes),
            None if rows is None else (rows.start, rows.stop, rows.step),
            None if statistics is None else printed,
            None if values.is_summarized else _pair(numbers.tolist()),
        )


def _pair(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_pair, value)]
    return [value.real, value.imag] if isinstance(value, complex) else value


class Values(Document, frozen=True):
    """With --values: the tensors that the patterns match.

    Attributes
    ----------
    path
        The checkpoint.
    step
        The step that was read; null if the names have none.
    values
        The tensors, in the order of the checkpoint.
    notes
        Facts that do not stop the command: notes and warnings.
    problems
        Always empty: what is wrong is an error.
    tensors
        The tensors with the arrays that a screen prints.
    """

    aside = frozenset({"tensors"})

    path: str
    step: str | None
    values: Sequence[PrintedValues]
    notes: Reported
    problems: Reported
    tensors: tuple[TensorValues, ...]

    def _texts(self) -> Iterator[str]:
        yield f"{self.path}: {count(len(self.tensors), 'tensor')}"

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("tensor", "values")
        for tensor in self.tensors:
            yield (tensor.name, tensor.printed())


def read_values(
    catalog: CheckpointFiles,
    strategy: StrategySource | None,
    patterns: Sequence[str],
    rows: slice | str | None = None,
    options: ResolveOptions = ResolveOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> Values:
    """Read full tensors, of every checkpoint that merge takes.

    Parameters
    ----------
    catalog, strategy, options
        The checkpoint, as for `ckpttool.open`.
    patterns
        Of the names of tensors; see `ckpttool.model.patterns`.  With a recipe of its names.
    rows
        A slice of rows, or its text as of ``--rows``: ``slice(0, 4)`` or ``"0:4"``.  A tensor
        without axes has none and is read as a whole.
    executor
        Reads, with threads or inline; by default the caller's own thread.
    open_progress
        See `ckpttool.verify`.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, as merge has them, or a pattern that matches no name.
    """
    executor = executor or InlineExecutor()
    rows = parse_rows(rows) if isinstance(rows, str) else rows
    if not isinstance(rows, slice | None):
        raise TypeError(f"rows={rows!r}, expected a slice, such as slice(0, 4) or '0:4'")
    chosen = replace(options.tensors, include=patterns, shown_by="--values")
    of_files = replace(chosen, include=()) if chosen.recipe else chosen
    files, of_src, _ = load(Source.of(catalog, strategy))
    options = replace(options, tensors=of_files)
    plan, diagnostics = plan_reading(files, of_src, None, None, options, executor).require()
    (output,) = plan.outputs([0])
    tensors, wanted = output.tensors, chosen.included
    if chosen.recipe:  # patterns are about the names that it makes
        of_strategy = chain(*(("-s", file) for file in (of_src.files if of_src else ())))
        words = ("ckpttool", "inspect", "--all", files.root, *of_strategy, *of_files.words)
        hint = f"`{join(words)}` lists the names"
        unmatched = unmatched_problems(wanted, [it.meta.name for it in tensors], files.root)
        raise_all(PlanError([replace(problem, hint=hint)]) for problem in unmatched)
        tensors = tuple(it for it in tensors if any(of.matches(it.meta.name) for of in wanted))
    opened = OpenCheckpoint(files.root, tensors, {}, overflows=True)
    nbytes = sum(_nbytes_of(tensor, rows) for tensor in opened.values())
    with require_unmodified_sources(files), open_progress(nbytes, "reading values") as progress:
        read = tuple(_read(tensor, rows, executor, progress) for tensor in opened.values())
    reported = notes_and_problems(diagnostics)
    printed = Each(PrintedValues.of, read)
    return Values(files.root, files.step, printed, **reported, tensors=read)


def _rows_of(tensor: LazyTensor, rows: slice | None) -> range | None:
    if rows is None or not tensor.shape:
        return None
    return range(tensor.shape[0])[rows]


def _selected(shape: tuple[int, ...], rows: range | None) -> tuple[int, ...]:
    return shape if rows is None else (len(rows), *shape[1:])


def _nbytes_of(tensor: LazyTensor, rows: slice | None) -> int:
    meant = _selected(tensor.shape, _rows_of(tensor, rows))
    return tensor.nbytes * math.prod(meant) // max(tensor.size, 1)


def _read(
    tensor: LazyTensor, rows: slice | None, executor: Executor, on_progress: OnProgress
) -> TensorValues:
    positions = _rows_of(tensor, rows)
    shape = _selected(tensor.shape, positions)
    elements = math.prod(shape)

    def read_box(box: Region) -> Array:
        index = [slice(a, b) for a, b in zip(box.start, box.stop, strict=True)]
        if positions is not None:
            index[0] = _as_slice(positions[index[0]])
        return np.asarray(tensor[tuple(index)])

    def measure_box(box: Region) -> Statistics:
        array = read_box(box).reshape(-1)
        if is_bool:  # a byte of a file may be true and not 1
            return measure((array.view("u1") != 0).astype("u1"))
        numbers: Numbers = array.view(tensor.dtype)
        return measure(numbers)

    is_bool = tensor.dtype.kind == "b"
    whole = Region.whole(shape)
    shown = _read_edges(shape, read_box, tensor.dtype) if elements > PRINTED else read_box(whole)
    statistics = Statistics() if tensor.dtype.kind in "biufc" else None
    if statistics is not None:
        boxes = ((box, box) for box in whole.bands(UNIT_ELEMENTS))
        for box, measured in map_in_order(executor, measure_box, boxes, MAX_IN_FLIGHT):
            statistics = statistics.merged(measured)
            on_progress(box.size * tensor.nbytes // tensor.size)
    described = tensor.name, tensor.stored_dtype, tensor.shape, tensor.nbytes
    return TensorValues(*described, positions, elements, shown, statistics)


def _as_slice(positions: range) -> slice:
    stop = positions.stop if positions.stop >= 0 else None
    return slice(positions.start, stop, positions.step) if positions else slice(0)


def _read_edges(
    shape: Sequence[int], read_box: Callable[[Region], Array], dtype: np.dtype[np.generic]
) -> Array:
    """Return the elements that NumPy prints of a large array; see `TensorValues.shown`."""
    ends = [[(0, 0, n)] if n <= 2 * EDGE else [(0, 0, EDGE), (EDGE, n - EDGE, n)] for n in shape]
    shown = np.empty([min(n, 2 * EDGE) for n in shape], dtype)
    for part in product(*ends):
        box = Region(tuple(start for _, start, _ in part), tuple(stop for *_, stop in part))
        at = tuple(slice(first, first + stop - start) for first, start, stop in part)
        shown[at] = read_box(box)
    return shown
