"""Statistics of elements, against NumPy and against sums without rounding."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ckpttool.storage.statistics import BLOCK_ELEMENTS, Statistics, measure
from tests.strategies import examples

TYPES = ["u1", "i1", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]


@examples(300)
@given(st.data(), st.sampled_from(TYPES))
def test_they_are_those_of_the_finite_elements_in_exact_arithmetic(data, dtype):
    numbers = data.draw(arrays.arrays(dtype, st.integers(0, 12)))
    stats = measure(numbers)
    finite = [one for one in numbers.tolist() if np.isfinite(one)]
    assert stats.elements == len(numbers)
    assert stats.finite == len(finite)
    assert stats.zeros == sum(one == 0 for one in numbers.tolist())
    assert stats.nans == int(np.isnan(numbers).sum())
    assert stats.infinities == int(np.isinf(numbers).sum())
    if not finite:
        assert (stats.minimum, stats.maximum, stats.mean, stats.norm) == (None, None, None, 0)
        return
    parts = [(Fraction(float(z.real)), Fraction(float(z.imag))) for z in finite]
    squares = sum(part**2 for one in parts for part in one)
    assert stats.norm == pytest.approx(root(squares), rel=1e-12)
    largest = max(abs(float(part)) for one in parts for part in one)
    mean = complex(*(float(sum(axis) / len(finite)) for axis in zip(*parts, strict=True)))
    assert abs(complex(stats.mean) - mean) <= largest * 1e-14
    assert isinstance(stats.mean, complex) == (dtype[0] == "c")
    if dtype[0] != "c":
        assert (stats.minimum, stats.maximum) == (min(finite), max(finite))


def root(squares):
    scale = 1 << 1200
    found = Fraction(math.isqrt(int(squares * scale**2 * scale**2)), scale**2)
    try:
        return float(found)
    except OverflowError:
        return math.inf


@pytest.mark.parametrize(
    ("numbers", "norm"),
    [([3e200, -4e200], 5e200), ([3e-200, 4e-200], 5e-200), ([5e-324] * 4, 1e-323)],
)
def test_squares_beyond_float64_do_not_matter(numbers, norm):
    assert measure(np.array(numbers)).norm == pytest.approx(norm, rel=1e-15)


def test_a_norm_that_no_float64_holds_is_infinite():
    assert measure(np.full(4, 1.7e308)).norm == math.inf
    assert measure(np.full(4, 1.7e308)).mean == 1.7e308


def test_blocks_may_be_merged_in_any_order():
    numbers = np.random.default_rng(1).normal(0, 1e6, 9 * BLOCK_ELEMENTS + 5).astype("f4")
    parts = [
        measure(numbers[i : i + 3 * BLOCK_ELEMENTS])
        for i in range(0, len(numbers), 3 * BLOCK_ELEMENTS)
    ]
    random.Random(1).shuffle(parts)
    merged = Statistics()
    for part in parts:
        merged = merged.merged(part)
    assert merged == measure(numbers)
    assert merged.mean == pytest.approx(math.fsum(numbers.tolist()) / len(numbers), rel=1e-13)
