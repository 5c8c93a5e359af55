"""The values of full tensors: what NumPy would print of them, and their statistics.

A tensor is read as `ckpttool.operations.open` reads it, unit by unit, so memory does not grow with
it.  Of a large one only the elements at its edges are kept, which NumPy prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import product

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.concurrency import InlineExecutor, OnProgress, OpenProgress, map_in_order, no_progress
from ckpttool.model.catalog import Catalog
from ckpttool.model.choices import TensorOptions
from ckpttool.model.region import Region
from ckpttool.model.strategy import Strategy
from ckpttool.operations.open import Array, LazyTensor, OpenCheckpoint
from ckpttool.operations.plans import plan_reading
from ckpttool.problems import Diagnostics
from ckpttool.storage.numbers import Numbers
from ckpttool.storage.statistics import UNIT_ELEMENTS, Statistics, measure
from ckpttool.transaction.sources import require_unmodified_sources
from ckpttool.wording import Brief, count

PRINTED = 1000  # elements: NumPy prints the edges of a larger array
EDGE = 3  # elements at each end of an axis, which NumPy prints then
MAX_IN_FLIGHT = 64  # units that are read at a time, at most

Rows = tuple[int | None, int | None, int | None]  # start, stop and step of a slice


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
        Of all elements that are meant; None if they are no numbers.
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
            for axis, size in enumerate(array.shape):
                if self._selected[axis] > size:  # NumPy prints "..." for the repeated element
                    array = np.repeat(array, [1] * (EDGE - 1) + [2] + [1] * EDGE, axis)
        with np.printoptions(threshold=threshold, edgeitems=EDGE, linewidth=columns or 75):
            return str(array[()])

    @property
    def _selected(self) -> tuple[int, ...]:
        return self.shape if self.rows is None else (len(self.rows), *self.shape[1:])


class Values(Brief, Struct, frozen=True):
    """The tensors that patterns match, and the notes on the checkpoint."""

    path: str
    step: str | None
    tensors: tuple[TensorValues, ...]
    found: Diagnostics

    def _texts(self) -> Iterator[str]:
        yield f"{self.path}: {count(len(self.tensors), 'tensor')}"

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("tensor", "values")
        for one in self.tensors:
            yield (one.name, one.printed())


def read_values(
    catalog: Catalog,
    strategy: Strategy | None,
    patterns: Sequence[str],
    rows: Rows | None = None,
    options: ResolveOptions = ResolveOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> Values:
    """Read full tensors, of every checkpoint that merge takes.

    Parameters
    ----------
    catalog, strategy, options
        The checkpoint, as for `plan_merge`.
    patterns
        Of the names of tensors; see `ckpttool.model.patterns`.
    rows
        A slice of rows; a tensor without axes has none and is read as a whole.
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
    options = replace(options, tensors=TensorOptions(patterns, shown_by="--values"))
    plan, found = plan_reading(catalog, strategy, None, None, options, executor)
    (output,) = plan.outputs([0])
    opened = OpenCheckpoint(catalog.root, output.tensors, {})
    nbytes = sum(_nbytes_of(one, rows) for one in opened.values())
    with require_unmodified_sources(catalog), open_progress(nbytes, "reading values") as progress:
        read = tuple(_read(one, rows, executor, progress) for one in opened.values())
    return Values(catalog.root, catalog.step, read, found)


def _rows_of(tensor: LazyTensor, rows: Rows | None) -> range | None:
    if rows is None or not tensor.shape:
        return None
    return range(tensor.shape[0])[slice(*rows)]


def _selected_shape(tensor: LazyTensor, rows: range | None) -> tuple[int, ...]:
    return tensor.shape if rows is None else (len(rows), *tensor.shape[1:])


def _nbytes_of(tensor: LazyTensor, rows: Rows | None) -> int:
    meant = _selected_shape(tensor, _rows_of(tensor, rows))
    return tensor.nbytes * math.prod(meant) // max(tensor.size, 1)


def _read(
    tensor: LazyTensor, rows: Rows | None, executor: Executor, on_progress: OnProgress
) -> TensorValues:
    positions = _rows_of(tensor, rows)
    shape = _selected_shape(tensor, positions)
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
        for box, found in map_in_order(executor, measure_box, boxes, MAX_IN_FLIGHT):
            statistics = statistics.merged(found)
            on_progress(box.size * tensor.nbytes // tensor.size)
    described = tensor.name, tensor.stored_dtype, tensor.shape, tensor.nbytes
    return TensorValues(*described, positions, elements, shown, statistics)


def _as_slice(positions: range) -> slice:
    """Return the slice that means some positions; a range may end before the first one."""
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
