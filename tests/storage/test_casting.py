"""Casts between floating-point types, against ml_dtypes, NumPy and exact arithmetic."""

import math
from bisect import bisect_left
from fractions import Fraction
from functools import cache
from itertools import permutations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.model.manifest import CastStats
from ckpttool.storage.casting import BLOCK_BYTES, FORMATS, Caster, _table
from ckpttool.storage.means import find_numbers
from tests.strategies import examples

WORDS = {name: np.dtype(f"<u{one.bits // 8}") for name, one in FORMATS.items()}
ROUNDED = [(a, b) for a, b in permutations(FORMATS, 2) if FORMATS[a].mantissa > FORMATS[b].mantissa]
EXACT = [(a, b) for a, b in permutations(FORMATS, 2) if FORMATS[b].bits > FORMATS[a].bits]
QUIET = {"Float64": 0x7FF8 << 48, "Float32": 0x7FC0 << 16, "Float16": 0x7E00, "BFloat16": 0x7FC0}


def cast(words, src, dst):
    out, caster = np.empty(len(words), WORDS[dst]), Caster()
    caster.cast(words.astype(WORDS[src]).view(np.uint8), src, out.view(np.uint8), dst)
    return out, caster.take_stats()


def numbers(words, dtype):
    words = words.astype(WORDS[dtype])
    with np.errstate(all="ignore"):  # a signalling NaN
        if dtype == "BFloat16":
            return (words.astype("<u4") << 16).view("<f4").astype("<f8")
        return words.view(f"<f{words.itemsize}").astype("<f8")


def words_of(values, dtype):
    if dtype == "BFloat16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    return values.astype(f"<f{FORMATS[dtype].bits // 8}").view(WORDS[dtype])


@cache
def magnitudes(dtype):
    found = numbers(np.arange(FORMATS[dtype].infinity), dtype)
    return [Fraction(float(one)) for one in found]


def nearest(value, dtype):
    """The word of the nearest magnitude, the even one of two; Inf from half a step on."""
    known = magnitudes(dtype)
    last = len(known) - 1
    if value >= known[last] + (known[last] - known[last - 1]) / 2:
        return len(known)  # Inf
    at = min(bisect_left(known, value), last)
    if known[at] <= value or value == known[at]:
        return at
    below, above = value - known[at - 1], known[at] - value
    if below == above:
        return at if at % 2 == 0 else at - 1
    return at - 1 if below < above else at


def expected(words, src, dst):
    """The words of the result, from exact arithmetic, for a result of 16 bits."""
    values = numbers(words, src)
    found = []
    for value in values:
        if math.isnan(value):
            word = QUIET[dst]
        elif math.isinf(value):
            word = FORMATS[dst].infinity
        else:
            word = nearest(Fraction(abs(float(value))), dst)
        found.append(word | (0x8000 if np.signbit(value) else 0))
    return np.array(found, "<u2")


def stats_of(src_words, src, dst_words, dst):
    """The statistics, from the numbers before and after."""
    x, y = numbers(src_words, src), numbers(dst_words, dst)
    both = np.isfinite(x) & np.isfinite(y)
    beyond = np.isfinite(x) & np.isinf(y)
    errors, of = np.abs(x[both] - y[both]), np.abs(x[both])
    return CastStats(
        len(x),
        int(beyond.sum()),
        float(np.abs(x[beyond]).max(initial=0)),
        int(((x != 0) & (y == 0)).sum()),
        float(errors.max(initial=0)),
        float((errors[of > 0] / of[of > 0]).max(initial=0)),
    )


def assert_same_stats(found, wanted):
    assert (found.elements, found.infinities, found.zeros) == (
        wanted.elements,
        wanted.infinities,
        wanted.zeros,
    )
    assert found.largest == wanted.largest
    assert found.max_abs == wanted.max_abs
    assert found.max_rel == pytest.approx(wanted.max_rel, rel=2e-7)


def near_halves(src, dst, size, seed=0):
    """Words of a wide type near the middle between two numbers of a narrow one, of all sizes."""
    a, b = FORMATS[src], FORMATS[dst]
    random = np.random.default_rng(seed)
    cut = a.mantissa - b.mantissa
    word = random.integers(0, 1 << 63, size, np.uint64, endpoint=True) * np.uint64(2)
    word = word + random.integers(0, 2, size, np.uint64)
    word = word >> np.uint64(64 - a.bits)
    half = np.uint64(1 << cut - 1)
    word = (word >> np.uint64(cut) << np.uint64(cut)) + half
    word = word + random.integers(0, 3, size).astype(np.uint64) - np.uint64(1)
    if a.exponent > b.exponent:  # half of them near the numbers that the narrow type has
        low, high = a.bias - b.bias - b.mantissa - 1, a.bias + b.bias + 2
        exponent = random.integers(low, high, size).astype(np.uint64) << np.uint64(a.mantissa)
        cleared = word & ~np.uint64(a.infinity)
        word = np.where(random.integers(0, 2, size) == 1, cleared | exponent, word)
    return word


@pytest.mark.parametrize(("src", "dst"), [("Float16", "BFloat16"), ("BFloat16", "Float16")])
def test_all_words_of_16_bits_are_rounded_exactly(src, dst):
    words = np.arange(1 << 16)
    found, stats = cast(words, src, dst)
    np.testing.assert_array_equal(found, expected(words, src, dst))
    assert_same_stats(stats, stats_of(words, src, found, dst))


@pytest.mark.parametrize(("src", "dst"), EXACT)
def test_a_wider_type_holds_the_same_numbers_and_quiet_nans(src, dst):
    words = np.arange(1 << 16)
    if src == "Float32":
        words = np.random.default_rng(0).integers(0, 1 << 32, 1 << 17)
        words[:4] = 0x7F800001, 0xFF800001, 0x7FC00123, 0xFFFFFFFF
    found, stats = cast(words, src, dst)
    x, y = numbers(words, src), numbers(found, dst)
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(np.signbit(x), np.signbit(y))
    is_nan = np.isnan(x)
    assert {*found[is_nan].tolist()} == {QUIET[dst], QUIET[dst] | FORMATS[dst].sign}
    assert stats == CastStats(len(words))


@pytest.mark.parametrize(("src", "dst"), [(a, b) for a, b in ROUNDED if FORMATS[b].bits == 16])
def test_numbers_near_the_middle_of_two_are_rounded_once(src, dst):
    words = near_halves(src, dst, 20_000)
    found, stats = cast(words, src, dst)
    np.testing.assert_array_equal(found, expected(words, src, dst))
    assert_same_stats(stats, stats_of(words, src, found, dst))


def test_float64_to_float32_is_what_numpy_says():
    words = near_halves("Float64", "Float32", 300_000)
    words[:3] = 0, 1 << 63, 0x7FF0 << 48
    found, stats = cast(words, "Float64", "Float32")
    x = words.view("<f8")
    with np.errstate(all="ignore"):
        wanted = x.astype("<f4")
    nans = np.isnan(x)
    np.testing.assert_array_equal(found[~nans], wanted.view("<u4")[~nans])
    np.testing.assert_array_equal(found[nans] & 0x7FFFFFFF, QUIET["Float32"])
    assert_same_stats(stats, stats_of(words, "Float64", found, "Float32"))


@given(st.floats(width=64), st.sampled_from(["BFloat16", "Float16"]))
@examples(200)
def test_any_float64_is_rounded_once(value, dst):
    word = np.array([value]).view("<u8")
    np.testing.assert_array_equal(cast(word, "Float64", dst)[0], expected(word, "Float64", dst))


def check_float32(words):
    x = words.view("<f4")
    nans = np.isnan(x)
    signs = (words >> 16 & 0x8000).astype("<u2")
    for dst, dtype in (("BFloat16", ml_dtypes.bfloat16), ("Float16", np.float16)):
        found, _ = cast(words, "Float32", dst)
        with np.errstate(all="ignore"):
            wanted = np.where(nans, QUIET[dst] | signs, x.astype(dtype).view("<u2"))
        np.testing.assert_array_equal(found, wanted)


def test_float32_in_strides_is_what_ml_dtypes_and_numpy_say():
    check_float32(np.arange(0, 1 << 32, 4099, dtype="<u8").astype("<u4"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(16))
def test_float32_numbers_in_stride_are_what_ml_dtypes_and_numpy_say(part):
    check_float32(np.arange(part << 28, (part + 1) << 28, 37, dtype="<u8").astype("<u4"))


@pytest.mark.parametrize(("src", "dst"), [*ROUNDED, *EXACT])
def test_blocks_join_to_the_cast_of_all_elements(src, dst):
    size = 2 * BLOCK_BYTES // WORDS[src].itemsize + 3
    values = np.random.default_rng(1).standard_normal(size) * 1e-3
    values[[0, size // 2, -1]] = np.nan, np.inf, 0
    words = words_of(values, src)
    found, stats = cast(words, src, dst)
    parts = [cast(words[at : at + 1000], src, dst) for at in range(0, size, 1000)]
    np.testing.assert_array_equal(found, np.concatenate([part for part, _ in parts]))
    joined = CastStats()
    for _, part in parts:
        joined = joined.merged(part)
    assert stats == joined


@pytest.mark.parametrize(("src", "dst"), [*ROUNDED, *EXACT])
def test_no_elements_and_only_nans_and_zeros_have_no_errors(src, dst):
    for size in (0, 1):
        for value in (0.0, -0.0, np.nan, np.inf):
            _, stats = cast(words_of(np.full(size, value), src), src, dst)
            assert stats == CastStats(size)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_signalling_nan_is_read_without_a_warning_of_numpy(dtype):
    _table.cache_clear()  # what was computed before warns no more
    word = np.array([FORMATS[dtype].infinity + 1], WORDS[dtype])
    assert np.isnan(find_numbers(word.view(np.uint8), dtype)).all()
