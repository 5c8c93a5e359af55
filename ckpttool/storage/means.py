"""Weighted sums of elements in Float64.

An element is multiplied by the weight of its source and added, in the order of the sources, so the
sum does not depend on where bands begin or on who computes them.  Rounding the sum is left to
`ckpttool.storage.casting`, the weights to the plan.
"""

from __future__ import annotations

import numpy as np

from ckpttool.model.plan import Term
from ckpttool.model.region import Region
from ckpttool.storage.casting import FORMATS, widen
from ckpttool.storage.numbers import Bytes, Float64s, decode

SUM_SIZE = 1 << 17  # most elements of a sum: 1 MiB
SUM_BYTES = 3 * 8 * SUM_SIZE


class WeightedSum:
    """A sum of at most `SUM_SIZE` elements; for one thread."""

    def __init__(self) -> None:
        self._sum = np.empty(SUM_SIZE)
        self._added = np.empty(SUM_SIZE)
        self.total, self._is_empty = self._sum[:0], True

    def start(self, size: int) -> None:
        """Begin a sum of ``size`` elements."""
        self.total, self._is_empty = self._sum[:size], True

    def add(self, data: Bytes, src: str, weight: float) -> None:
        """Add elements of a type, each multiplied by ``weight``; their number is that of the sum.

        NaN and Inf stay in the sum, as `find_not_finite` shows.
        """
        added = self.total if self._is_empty else self._added[: len(self.total)]
        with np.errstate(all="ignore"):
            if src in FORMATS:
                widen(data.view(FORMATS[src].word), src, added)
            elif (numbers := decode(data, src)) is not None:
                np.copyto(added, numbers)
            added *= weight
            if not self._is_empty:
                self.total += added
        self._is_empty = False

    def multiply(self, scales: Float64s) -> None:
        """Multiply each element by its scale; NaN and Inf stay."""
        with np.errstate(all="ignore"):
            self.total *= scales

    def find_not_finite(self) -> int | None:
        """Return the index of the first NaN or Inf in the sum; None if there is none."""
        is_finite = np.isfinite(self.total)
        return None if is_finite.all() else int(np.argmin(is_finite))


def spread(data: Bytes, term: Term, region: Region) -> Float64s:
    """Return the scale of each element of ``region``, from those that `Term.elements` names."""
    numbers = decode(data, term.source.meta.dtype)
    assert numbers is not None, "a scale is a number"
    wanted, block = term.elements(region), term.block or ()
    with np.errstate(invalid="ignore"):  # signalling NaN
        scales = numbers.astype(np.float64).reshape(wanted.shape)
    for axis, size in enumerate(block):
        places = np.arange(region.start[axis], region.stop[axis]) // size - wanted.start[axis]
        scales = np.take(scales, places, axis)
    scales = scales.reshape(*scales.shape, *(1,) * (len(region.shape) - scales.ndim))
    return np.broadcast_to(scales, region.shape).reshape(-1)


def first_number(data: Bytes, src: str) -> float:
    """Return the first of some elements of a type."""
    number: Float64s = np.empty(1)
    widen(data.view(FORMATS[src].word)[:1], src, number)
    return float(number[0])
