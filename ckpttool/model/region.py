"""Boxes of elements, the grid of slices under a box, and cuts that are contiguous in C order.

It is arithmetic on indices alone: layouts, slicings, plans and the copy count on it, so each of its
algorithms exists once.  These know the tensor of the elements, and where they are stored.

A weight that a network fuses, such as ``linear_qkv``, and its parts elsewhere have the same
elements in another order.  Both are seen in one space, whose axes are factors of theirs: groups,
parts, heads, columns.  An `Arrangement` says which box of the space a tensor has, and how its own
axes are products of factors.  So every such relation can be inverted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from operator import add, gt, lt, mul, sub

from msgspec import Struct


class Region(Struct, frozen=True):
    """The elements ``start <= index < stop`` of a tensor, axis by axis.

    A 0-d tensor has the one region ``Region((), ())``, which holds one element.  An axis may be
    empty (``start == stop``).

    >>> Region((0, 2), (4, 6)).shape
    (4, 4)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"region with {len(self.start)} starts and {len(self.stop)} stops")
        # A plan makes millions of regions, so this is spelled for speed.
        if any(map(gt, self.start, self.stop)) or (self.start and min(self.start) < 0):
            raise ValueError(f"region from {self.start} to {self.stop} is no box")

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Region:
        """Return the region of all elements of a tensor of ``shape``."""
        return _whole(shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.start)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"

    def contains(self, index: tuple[int, ...]) -> bool:
        """Return whether the region has the element at ``index``."""
        return all(a <= i < b for a, i, b in zip(self.start, index, self.stop, strict=True))

    def relative_to(self, origin: tuple[int, ...]) -> Region:
        """Return the same box with indices counted from ``origin``."""
        if len(self.start) != len(origin):
            raise ValueError(f"an origin of {len(origin)} axes for {self}")
        return Region(tuple(map(sub, self.start, origin)), tuple(map(sub, self.stop, origin)))

    def moved_by(self, offset: tuple[int, ...]) -> Region:
        """Return the box moved by ``offset`` along each axis; the inverse of `relative_to`."""
        if len(self.start) != len(offset):
            raise ValueError(f"an offset of {len(offset)} axes for {self}")
        return Region(tuple(map(add, self.start, offset)), tuple(map(add, self.stop, offset)))

    def bands(self, max_elements: int) -> Iterator[Region]:
        """Yield bands of this region in C order; a contiguous region has contiguous bands.

        A band has at most ``max_elements``: a single row that is larger is cut as well.  Each
        element is in exactly one band.  An empty region yields nothing.

        >>> [band.shape for band in Region((0, 0), (5, 3)).bands(6)]
        [(2, 3), (2, 3), (1, 3)]
        >>> [band.shape for band in Region((0, 0), (2, 3)).bands(2)]
        [(1, 2), (1, 1), (1, 2), (1, 1)]
        """
        if max_elements < 1:
            raise ValueError(f"bands of at most {max_elements} elements")
        shape = self.shape
        if 0 in shape:
            return
        axis, inner = len(shape), 1
        while axis > 0 and inner * shape[axis - 1] <= max_elements:
            axis -= 1
            inner *= shape[axis]
        if axis == 0:
            yield self
            return
        axis -= 1  # the axis that is cut in steps; the axes before it are walked one by one
        step = max(1, max_elements // inner)
        for outer in _indices(self.start[:axis], self.stop[:axis]):
            for first in range(self.start[axis], self.stop[axis], step):
                last = min(first + step, self.stop[axis])
                yield Region(
                    (*outer, first, *self.start[axis + 1 :]),
                    (*(index + 1 for index in outer), last, *self.stop[axis + 1 :]),
                )

    def tiles(self, rows: int, columns: int) -> Iterator[Region]:
        """Yield boxes of at most so many rows and columns of its last two axes, in C order.

        >>> [tile.shape for tile in Region((0, 0, 0), (1, 3, 2)).tiles(2, 2)]
        [(1, 2, 2), (1, 1, 2)]
        """
        *_, low, left = self.start
        *_, high, right = self.stop
        for outer in _indices(self.start[:-2], self.stop[:-2]):
            ends = tuple(index + 1 for index in outer)
            for row, column in product(range(low, high, rows), range(left, right, columns)):
                stop = (*ends, min(row + rows, high), min(column + columns, right))
                yield Region((*outer, row, column), stop)


class View(Struct, frozen=True):
    """Elements of a tensor in C order: from number ``first`` on, in steps of ``strides``."""

    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(region: Region, shape: tuple[int, ...]) -> View:
        """Return the elements of a region of a tensor of ``shape``."""
        strides = strides_of(shape)
        return View(sum(map(mul, region.start, strides)), region.shape, strides)


class Steps(Struct, frozen=True):
    """Elements of an array: from the index ``start`` on, in steps along its axes.

    There are ``shape`` of them; each of ``along`` has an axis of the array, and how many of its
    positions are a step.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    along: tuple[tuple[int, int], ...]

    def moved_by(self, offset: tuple[int, ...]) -> Steps:
        """Return the elements moved by ``offset`` along each axis of the array."""
        return Steps(tuple(map(add, self.start, offset)), self.shape, self.along)


class Arrangement(Struct, frozen=True):
    """The elements of a tensor: a box of a space, whose axes are factors of those of the tensor.

    Attributes
    ----------
    axes
        The axes of the space whose product is each axis of the tensor, outermost first.
    box
        The elements in the space.
    """

    axes: tuple[tuple[int, ...], ...]
    box: Region

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Arrangement:
        """Return the arrangement of a tensor whose axes are those of the space."""
        return Arrangement(tuple((axis,) for axis in range(len(shape))), Region.whole(shape))

    @property
    def is_plain(self) -> bool:
        """Whether the axes of the tensor are those of the space."""
        return self.axes == tuple((axis,) for axis in range(self.box.ndim))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        sizes = self.box.shape
        return tuple(math.prod(sizes[factor] for factor in axis) for axis in self.axes)

    def boxes(self, region: Region) -> Iterator[Region]:
        """Yield the boxes of the space that are a region of the tensor, in its C order."""
        sizes, first = self.box.shape, self.box.start
        of_axes = (
            _boxes(start, stop, [sizes[factor] for factor in axis])
            for axis, start, stop in zip(self.axes, region.start, region.stop, strict=True)
        )
        for spans in product(*map(tuple, of_axes)):
            start, stop = [*first], [*self.box.stop]
            for axis, of_axis in zip(self.axes, spans, strict=True):
                for factor, (low, high) in zip(axis, of_axis, strict=True):
                    start[factor], stop[factor] = first[factor] + low, first[factor] + high
            yield Region(tuple(start), tuple(stop))

    def index(self, place: Sequence[int]) -> tuple[int, ...]:
        """Return the index in the tensor of an element of the space."""
        sizes, first, index = self.box.shape, self.box.start, []
        for axis in self.axes:
            at = 0
            for factor in axis:
                at = at * sizes[factor] + place[factor] - first[factor]
            index.append(at)
        return tuple(index)

    def overlaps(self, other: Arrangement) -> bool:
        """Return whether two tensors have elements in common; their space is the same."""
        return common(self.box, other.box) is not None

    def bounds(self, box: Region) -> Region:
        """Return the smallest region of the tensor that has a box of the space."""
        last = self.index([stop - 1 for stop in box.stop])
        return Region(self.index(box.start), tuple(at + 1 for at in last))

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each factor: itself, the axis of the tensor, and how many positions a step is.

        Factors come in the order of the axes.
        """
        sizes = self.box.shape
        for number, axis in enumerate(self.axes):
            step = math.prod(sizes[factor] for factor in axis)
            for factor in axis:
                step //= max(sizes[factor], 1)
                yield factor, number, step


def _boxes(start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the boxes of numbers of several digits, whose ``sizes`` are given, from a range.

    >>> [*_boxes(1, 6, [3, 2])]
    [((0, 1), (1, 2)), ((1, 3), (0, 2))]
    """
    if start >= stop:
        return
    if not sizes:
        yield ()
        return
    inner, rest = math.prod(sizes[1:]), sizes[1:]
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        for box in _boxes(head, tail, rest):
            yield ((first, first + 1), *box)
        return
    if head:
        for box in _boxes(head, inner, rest):
            yield ((first, first + 1), *box)
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in rest))
    for box in _boxes(0, tail, rest):
        yield ((last, last + 1), *box)


def common(a: Region, b: Region) -> Region | None:
    """Return the elements that two boxes share; None for none."""
    if not (all(map(lt, a.start, b.stop)) and all(map(lt, b.start, a.stop))):
        return None  # as of most experts
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    return Region(start, stop) if all(map(int.__lt__, start, stop)) else None


@lru_cache(maxsize=1024)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many elements of a tensor in C order a step along each axis is.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@lru_cache(maxsize=1024)  # most of a thousand tensors have the same few shapes
def _whole(shape: tuple[int, ...]) -> Region:
    return Region((0,) * len(shape), shape)


def grid_overlaps(
    cuts: Sequence[Sequence[int]], slice_counts: Sequence[int], wanted: Region
) -> Iterator[tuple[tuple[int, ...], Region, Region]]:
    """Yield every stretch of a slice that overlaps ``wanted``, in C order.

    Arithmetic on the boundaries finds them, without a search.

    Parameters
    ----------
    cuts
        Boundaries of the stretches along each axis, ascending from 0 to its size.
    slice_counts
        Number ``n`` of slices along each axis.  Slice ``i`` holds stretch ``i``, and also
        ``i + n``, ``i + 2n``, ... if there are more stretches than slices.
    wanted
        Elements of the full tensor.

    Yields
    ------
    index, in_slice, in_full
        Position of the slice; the overlap, counted in the slice and in the full tensor.
    """
    if not wanted.size:
        return
    spans: list[list[tuple[int, int, int, int, int]]] = []
    for cut, n, low, high in zip(cuts, slice_counts, wanted.start, wanted.stop, strict=True):
        span = []
        for i in _touched(cut, low, high):
            a, b = max(low, cut[i]), min(high, cut[i + 1])
            if a == b:  # a slice without rows, between others
                continue
            # A slice holds its stretches back to back, in their order in the full tensor.
            shift = i // n * (cut[i + 1] - cut[i]) - cut[i]
            span.append((i % n, a + shift, b + shift, a, b))
        spans.append(span)
    for chosen in product(*spans):
        if chosen:
            index, first, last, start, stop = zip(*chosen, strict=True)
            yield index, Region(first, last), Region(start, stop)
        else:
            yield (), wanted, wanted


def count_overlaps(cuts: Sequence[Sequence[int]], wanted: Region) -> int:
    """Return how many stretches overlap ``wanted``, with the empty ones between them.

    >>> count_overlaps([(0, 4, 8), (0, 2, 4, 6)], Region((1, 1), (8, 3)))
    4
    """
    axes = zip(cuts, wanted.start, wanted.stop, strict=True)
    return math.prod(len(_touched(cut, low, high)) for cut, low, high in axes)


def flat_index(
    index: Sequence[int], sizes: Sequence[int], axes: Iterable[int] | None = None
) -> int:
    """Return the number of an element in C order, by its ``index`` along all or some ``axes``.

    >>> flat_index((1, 9, 2), (2, 10, 3)), flat_index((1, 9, 2), (2, 10, 3), [0, 2])
    (59, 5)
    """
    number = 0
    for axis in range(len(sizes)) if axes is None else axes:
        number = number * sizes[axis] + index[axis]
    return number


def _touched(cut: Sequence[int], low: int, high: int) -> range:
    return range(bisect_right(cut, low) - 1, bisect_left(cut, high))


def _indices(start: tuple[int, ...], stop: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not start:
        yield ()
        return
    for first in range(start[0], stop[0]):
        for rest in _indices(start[1:], stop[1:]):
            yield (first, *rest)
