"""Minimum, maximum, mean and norm of elements, and how many are NaN, infinite or zero.

Blocks of `BLOCK_ELEMENTS` are summed in Float64, pairwise as NumPy does; the sums of blocks are
added without rounding.  So a result depends on where blocks begin, and not on who computes them or
in which order.  `UNIT_ELEMENTS` is the part of a tensor that one call reads: every reader divides a
tensor into the same units.  Reading and decoding are left to others.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from msgspec import Struct

from ckpttool.storage.numbers import Numbers, count_nonfinite, widen

BLOCK_ELEMENTS = 1 << 16  # in Float64 they stay in the cache
UNIT_ELEMENTS = 1 << 18  # at most 4 MiB, which are read at once
_MOST_SQUARED = 400  # a power of two; beyond it the squares of a block may leave Float64


class Statistics(Struct, frozen=True):
    """Statistics of some elements.

    Attributes
    ----------
    nans, infinities
        How many are NaN and infinite; a complex number counts if one of its parts is.
    minimum, maximum
        Of integers as integers; None for complex numbers, and of no elements.
    total, squares
        The sums of the numbers (real, imaginary) and of their squared magnitudes.
    """

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0  # how many are 0 or -0
    finite: int = 0  # how many are neither NaN nor infinite; what follows is of these
    minimum: float | None = None
    maximum: float | None = None
    total: tuple[Fraction, Fraction] = (Fraction(), Fraction())
    squares: Fraction = Fraction()

    @property
    def mean(self) -> float | complex | None:
        """The mean of the finite elements; None if there are none."""
        if not self.finite:
            return None
        real, imaginary = (float(total / self.finite) for total in self.total)
        return complex(real, imaginary) if self.minimum is None else real

    @property
    def norm(self) -> float:
        """The square root of the sum of the squares; Inf if a Float64 cannot hold it."""
        number = self.squares
        half = (number.numerator.bit_length() - number.denominator.bit_length()) // 2
        root = math.sqrt(number / Fraction(4) ** half)  # near 1, as a Float64 can hold it
        try:
            return math.ldexp(root, half)
        except OverflowError:
            return math.inf

    def merged(self, other: Statistics) -> Statistics:
        """Return the statistics of both together."""
        lows = [side.minimum for side in (self, other) if side.minimum is not None]
        highs = [side.maximum for side in (self, other) if side.maximum is not None]
        return Statistics(
            self.elements + other.elements,
            self.nans + other.nans,
            self.infinities + other.infinities,
            self.zeros + other.zeros,
            self.finite + other.finite,
            min(lows, default=None),
            max(highs, default=None),
            (self.total[0] + other.total[0], self.total[1] + other.total[1]),
            self.squares + other.squares,
        )


def measure(numbers: Numbers) -> Statistics:
    """Return the statistics of numbers in one axis, as `ckpttool.storage.numbers.decode` makes.

    >>> stats = measure(np.array([3.0, -4.0, 0.0, np.nan]))
    >>> stats.minimum, stats.maximum, stats.norm, stats.nans, stats.zeros
    (-4.0, 3.0, 5.0, 1, 1)
    """
    stats = Statistics()
    for at in range(0, len(numbers), BLOCK_ELEMENTS):
        stats = stats.merged(_measure_block(numbers[at : at + BLOCK_ELEMENTS]))
    return stats


def _measure_block(numbers: Numbers) -> Statistics:
    nans, infinities, *_ = count_nonfinite(numbers)
    zeros = len(numbers) - int(np.count_nonzero(numbers))
    counts = (len(numbers), nans, infinities, zeros)
    finite = numbers[np.isfinite(numbers)] if nans or infinities else numbers
    if not len(finite):
        return Statistics(*counts)
    is_complex = finite.dtype.kind == "c"
    limits = None, None
    if not is_complex:
        limits = finite.min().item(), finite.max().item()
    parts = widen(finite).view("<f8")
    _, exponent = math.frexp(np.abs(parts).max())
    shift = exponent if abs(exponent) > _MOST_SQUARED else 0
    scaled = np.ldexp(parts, -shift) if shift else parts
    scale = Fraction(2) ** shift
    reals, imaginaries = (scaled[0::2], scaled[1::2]) if is_complex else (scaled, scaled[:0])
    total = _exactly(reals.sum()) * scale, _exactly(imaginaries.sum()) * scale
    squares = _exactly(np.square(scaled).sum()) * scale**2
    return Statistics(*counts, len(finite), *limits, total, squares)


def _exactly(number: np.float64) -> Fraction:
    return Fraction(float(number))
