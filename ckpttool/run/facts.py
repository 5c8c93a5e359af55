"""What is found out about tensors while they are read: counts that add up, stretch by stretch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from ckpttool.errors import PlanError

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Numbers are equal if ``|a - b| <= atol + rtol * |b|``; NaN equals NaN, and 0 equals -0."""

    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no difference can be held against.

        Raises
        ------
        PlanError
            A bound is negative, infinite or NaN.
        """
        for name, bound in (("atol", self.atol), ("rtol", self.rtol)):
            if not 0 <= bound < math.inf:
                raise PlanError([f"{name}: expected a finite number from 0 on, found {bound}"])


@dataclass(frozen=True, slots=True)
class Difference:
    """How one reading of a tensor differs from the first.

    Attributes
    ----------
    count
        Elements that differ: in their bytes, or by more than the tolerance if there is one.
    same_number
        Of these, those that are the same number in other bytes (0 and -0, two kinds of NaN).
    max_abs, max_rel
        Largest ``|a - b|``, and ``|a - b| / |b|`` where ``b`` is not 0, among all elements whose
        bytes differ; None if there is none.  Inf if one of the two is, or no Float64 is as large;
        what has no distance (NaN and a number) or no ratio (a number and Inf) is left out.
    first
        Index of the first of the ``count`` elements.
    is_other
        Whether any bytes differ.
    content
        Equal for two readings that differ from the first in the same way; empty if none does.
    nans
        Elements that are NaN on one side alone.
    """

    count: int = 0
    same_number: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    first: Index | None = None
    is_other: bool = False
    content: bytes = b""
    nans: int = 0

    def then(self, later: Difference) -> Difference:
        """Of this stretch and the one behind it."""
        if not later.is_other:
            return self
        if not self.is_other:
            return later
        content = self.content or later.content
        if self.content and later.content:
            content = hashlib.sha256(self.content + later.content).digest()
        return Difference(
            self.count + later.count,
            self.same_number + later.same_number,
            _largest(self.max_abs, later.max_abs),
            _largest(self.max_rel, later.max_rel),
            later.first if self.first is None else self.first,
            True,
            content,
            self.nans + later.nans,
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found out about a tensor.

    Attributes
    ----------
    elements
        How many were counted, in the first reading.
    nans, infinities
        Of these, NaN and Inf.
    first_nan, first_infinity
        Their indices in the tensor.
    is_zero
        Whether all of the elements are zero, if there are any.
    differences
        Of every other reading from the first.
    hashes
        Of every reading those of its units, as a manifest lists them, if they are wanted.
    """

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    first_nan: Index | None = None
    first_infinity: Index | None = None
    is_zero: bool = True
    differences: tuple[Difference, ...] = ()
    hashes: tuple[tuple[str, ...], ...] = ()

    def then(self, later: Facts) -> Facts:
        """Of this stretch and the one behind it."""
        return Facts(
            self.elements + later.elements,
            self.nans + later.nans,
            self.infinities + later.infinities,
            later.first_nan if self.first_nan is None else self.first_nan,
            later.first_infinity if self.first_infinity is None else self.first_infinity,
            self.is_zero and later.is_zero,
            tuple(a.then(b) for a, b in zip(self.differences, later.differences, strict=True)),
            tuple(a + b for a, b in zip(self.hashes, later.hashes, strict=True)),
        )


def _largest(a: float | None, b: float | None) -> float | None:
    return max((x for x in (a, b) if x is not None), default=None)
