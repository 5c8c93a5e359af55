"""Weighted sums of elements in Float64, and of products of two matrices.

Elements are multiplied by the weight of their source and added in the order of the sources.  So the
sum does not depend on where bands begin or on who computes them.  Nor do products: they add two
terms at a time, in order, since a library for matrices adds more in an order of its own.  It rounds
a sum of two once, since Float64 holds the products of other types exactly; those of Float64 are
added one by one.  Rounding the sum is left to `ckpttool.storage.casting`, the weights to the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.storage.casting import FORMATS, widen
from ckpttool.storage.numbers import Bytes, Flags, Float64s, decode

if TYPE_CHECKING:
    import numpy.typing as npt

SUM_SIZE = 1 << 17  # most elements of a sum: 1 MiB
SUM_BYTES = 3 * 8 * SUM_SIZE
# Elements of a product that are computed at a time: few enough for a processor's cache, and for
# one thread of a library (measured: 0.2 ns for each term, of 2,000 elements 0.8).
_BLOCK = 1 << 14


class WeightedSum:
    """A sum of at most `SUM_SIZE` elements; for one thread."""

    def __init__(self) -> None:
        self._sum = np.empty(SUM_SIZE)
        self._added = np.empty(SUM_SIZE)
        self.total, self._is_empty = self._sum[:0], True
        self.single: npt.NDArray[np.float32] | None = None  # the same numbers, if Float32 has them

    def start(self, size: int) -> None:
        """Begin a sum of ``size`` elements."""
        self.total, self._is_empty, self.single = self._sum[:size], True, None

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
            if weight != 1:
                added *= weight
            if not self._is_empty:
                self.total += added
        self._is_empty, self.single = False, None

    def add_product(
        self,
        rows: Float64s,
        columns: Float64s,
        weight: float,
        are_there: Sequence[Flags],
        at_once: int,
    ) -> None:
        """Add a product, multiplied by ``weight``; the sum has its elements.

        ``are_there`` says which rows, and which columns, the product has at all.  Other elements of
        the sum keep even the sign of a zero.  ``at_once`` terms are added at a time, one or two.
        """
        height, width = len(rows), columns.shape[1]
        product = self._added[: height * width].reshape(height, width)
        step = max(1, _BLOCK // width)
        scratch = np.empty((min(step, height), width))
        with np.errstate(all="ignore"):
            for first in range(0, height, step):
                block, of_block = product[first : first + step], rows[first : first + step]
                added, block[...] = scratch[: len(block)], 0
                for term in range(0, len(columns), at_once):
                    terms = slice(term, term + at_once)
                    np.matmul(of_block[:, terms], columns[terms], out=added)
                    block += added
            self.single = None
            product *= weight
            product[~are_there[0]] = -0.0
            product[:, ~are_there[1]] = -0.0
            self.total += product.reshape(-1)

    def multiply(self, data: Bytes, src: str) -> None:
        """Multiply each element by its scale, of a type, in Float32; NaN and Inf stay.

        So do transformers, vLLM and the code of DeepSeek, and numbers of 8 bits and their scales
        are of Float32.
        """
        scales = decode(data, src)
        assert scales is not None, "a scale is a number"
        with np.errstate(all="ignore"):
            np.multiply(self.total, scales, out=self.total)
            self.single = self.total.astype(np.float32)
            self.total[:] = self.single

    def find_not_finite(self) -> int | None:
        """Return the index of the first NaN or Inf in the sum; None if there is none."""
        is_finite = np.isfinite(self.total)
        return None if is_finite.all() else int(np.argmin(is_finite))


def find_numbers(data: Bytes, src: str) -> Float64s:
    """Return the numbers of elements of a type."""
    words = data.view(FORMATS[src].word)
    numbers: Float64s = np.empty(len(words))
    widen(words, src, numbers)
    return numbers
