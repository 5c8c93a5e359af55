"""Tensors that are made of the elements of others, with other axes.

A weight that a network fuses, such as ``linear_qkv``, and its parts elsewhere have the same
elements in another order.  Both are seen in one space, whose axes are factors of theirs: groups,
parts, heads, columns.  A `Arrangement` says which box of the space a tensor has, and how its own
axes are products of factors, outermost first.  So every such relation can be inverted, and one
function finds where the elements of a region lie.

`parse_axes` reads the notation of einops: ``(g p h) d`` are two axes, of which the first has three
factors.  A tensor may have a part of a factor: ``(g p[:4] h) d``.  If that is a single index, the
factor makes no axis: ``e[7] f d``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain, product

from msgspec import Struct

from ckpttool.model.region import Region

_TOKEN = re.compile(r"\s*(?:(\()|(\))|([A-Za-z_]\w*)(?:\[([^]:]*)(:)?([^]]*)\])?)")


class Factor(Struct, frozen=True):
    """A factor of an axis, and the part of it that a tensor has: ``start`` to ``stop``.

    Both are expressions of sizes; "" is the whole.  ``is_index`` says that it is one index.
    """

    name: str
    start: str = ""
    stop: str = ""
    is_index: bool = False


Axes = tuple[tuple[Factor, ...], ...]  # the factors of each axis; those of no axis come last


def parse_axes(text: str) -> tuple[Axes, tuple[Factor, ...]]:
    """Return the factors of each axis, outermost first, and those that make no axis.

    Raises
    ------
    ValueError
        The text is not of this notation.

    Examples
    --------
    >>> axes, _ = parse_axes("(g p[:4] h) d")
    >>> [[factor.name for factor in axis] for axis in axes]
    [['g', 'p', 'h'], ['d']]
    """
    axes: list[tuple[Factor, ...]] = []
    rest: list[Factor] = []
    group: list[Factor] | None = None
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None or (match[1] and group is not None) or (match[2] and group is None):
            raise ValueError(f"{text!r} is no list of axes: see {text[at:].strip()!r}")
        at = match.end()
        if match[1]:
            group = []
        elif match[2]:
            axes.append(tuple(group or ()))
            group = None
        else:
            first, colon, last = (part or "" for part in match.group(4, 5, 6))
            is_index = bool(first) and not colon
            factor = Factor(match[3], first.strip(), last.strip(), is_index)
            if group is not None:
                group.append(factor)
            elif is_index:
                rest.append(factor)
            else:
                axes.append((factor,))
    if group is not None:
        raise ValueError(f"{text!r} is no list of axes: a parenthesis is not closed")
    names = [factor.name for factor in (*chain(*axes), *rest)]
    if len(names) > len({*names}):
        raise ValueError(f"{text!r} has a factor twice")
    return tuple(axes), tuple(rest)


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


def common(one: Region, other: Region) -> Region | None:
    """Return the elements that two boxes share; None for none."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    return Region(start, stop) if all(map(int.__lt__, start, stop)) else None
