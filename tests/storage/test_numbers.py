"""What bits mean: numbers of every element type, and what is counted and compared among them."""

import hashlib
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.lib.stride_tricks import as_strided

from ckpttool.model.dtypes import DTYPES
from ckpttool.storage.numbers import (
    NonfiniteCount,
    copy_elements,
    count_nonfinite,
    decode,
    find_differing,
    find_distances,
    find_magnitudes,
    find_same_numbers,
    take,
)
from tests.strategies import examples
from tests.support.readers import NUMPY_TYPES

BYTES = np.arange(256, dtype=np.uint8)
NO_NUMBERS = {"Int4", "random_op"}
SMALL = {"BFloat16", "Float8E4M3FN", "Float8E5M2", "HiFloat8"}
FLOATS = ["Float16", "Float32", "Float64", "Complex64", "Complex128", *sorted(SMALL)]


def raw(*values, dtype):
    return np.array(values, NUMPY_TYPES[dtype]).view(np.uint8)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_type_is_decoded_to_numbers_or_known_to_be_none(dtype):
    numbers = decode(np.zeros(3 * DTYPES[dtype].itemsize, np.uint8), dtype)
    if dtype in NO_NUMBERS:
        assert numbers is None
        return
    assert numbers.shape == (3,)
    assert not numbers.any()


@pytest.mark.parametrize("dtype", sorted({*DTYPES} - NO_NUMBERS - SMALL - {"Bool"}))
@given(st.data())
@examples(20)
def test_a_type_that_numpy_has_is_what_numpy_says(dtype, data):
    values = data.draw(arrays.arrays(NUMPY_TYPES[dtype], st.integers(0, 20)))
    got = decode(values.view(np.uint8), dtype)
    assert got.dtype == values.dtype
    assert got.tobytes() == values.tobytes()


def test_bfloat16_is_the_upper_half_of_a_float32():
    words = np.arange(1 << 16, dtype="<u2")
    got = decode(words.view(np.uint8), "BFloat16")
    for word in (0, 1, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x8000, 0xC2F7, 0xFFFF):
        assert got[word].tobytes() == b"\0\0" + struct.pack("<H", word)
    assert np.count_nonzero(np.isnan(got)) == 2 * 127
    assert np.count_nonzero(np.isinf(got)) == 2


def test_float8_e5m2_is_the_upper_half_of_a_float16():
    want = (BYTES.astype("<u2") << 8).view("<f2").astype("<f4")
    assert np.array_equal(decode(BYTES, "Float8E5M2"), want, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "known", "digest"),
    [  # all 256 values, of ml_dtypes 0.5 and of en_dtypes 0.0.4
        (
            "Float8E4M3FN",
            {0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x7E: 448.0, 0xFE: -448.0},
            "422eccfaa21e72a6b26855bb10cdcfead6c1ce3262ecd813c99d8cbf9677f2e2",
        ),
        (
            "HiFloat8",
            {0x00: 0.0, 0x01: 2**-22, 0x07: 2**-16, 0x08: 1.0, 0x0F: 1.875, 0x6E: 2.0**15,
             0x6F: math.inf, 0xEF: -math.inf, 0x7E: 2**-15, 0x88: -1.0},
            "2ac829ee895e0e5e803c4484a3953db8d598c6c8131b98ca32f75502a7a2fb4c",
        ),
    ],
)  # fmt: skip
def test_small_floats_have_the_values_that_other_programs_give_them(dtype, known, digest):
    got = decode(BYTES, dtype)
    assert {byte: float(got[byte]) for byte in known} == known
    got = np.where(np.isnan(got), np.float32("nan"), got).astype("<f4")
    assert hashlib.sha256(got.tobytes()).hexdigest() == digest


@pytest.mark.parametrize(
    ("dtype", "nans", "infinities"),
    [("Float8E4M3FN", 2, 0), ("Float8E5M2", 6, 2), ("HiFloat8", 1, 2)],
)
def test_a_census_of_all_bytes_finds_every_nan_and_infinity(dtype, nans, infinities):
    counts = count_nonfinite(decode(BYTES, dtype))
    assert counts[:2] == (nans, infinities)


@pytest.mark.parametrize("dtype", ["Bool", "Int8", "UInt64"])
def test_integers_are_always_numbers(dtype):
    ones = np.full(8 * DTYPES[dtype].itemsize, 255, np.uint8)
    assert count_nonfinite(decode(ones, dtype)) == NonfiniteCount(0, 0, None, None)


@pytest.mark.parametrize("dtype", FLOATS)
@given(st.data())
@examples(30)
def test_a_census_is_what_counting_one_by_one_gives(dtype, data):
    nbytes = data.draw(st.integers(1, 12)) * DTYPES[dtype].itemsize
    numbers = decode(np.frombuffer(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), "u1"),
                     dtype)  # fmt: skip
    parts = [(float(x.real), float(x.imag)) for x in numbers]
    nans = [i for i, pair in enumerate(parts) if any(map(math.isnan, pair))]
    infinities = [i for i, pair in enumerate(parts) if any(map(math.isinf, pair))]
    first = [found[0] if found else None for found in (nans, infinities)]
    assert count_nonfinite(numbers) == NonfiniteCount(len(nans), len(infinities), *first)


def test_a_complex_number_counts_if_one_of_its_parts_does():
    numbers = decode(raw(1, complex(0, math.nan), complex(math.inf, 0), dtype="Complex64"),
                     "Complex64")  # fmt: skip
    assert count_nonfinite(numbers) == NonfiniteCount(1, 1, 1, 2)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@given(st.data())
@examples(30)
def test_elements_differ_if_one_of_their_bytes_does(itemsize, data):
    count = data.draw(st.integers(0, 9))
    a = np.frombuffer(data.draw(st.binary(min_size=count * itemsize, max_size=count * itemsize)),
                      np.uint8)  # fmt: skip
    b = a.copy()
    changed = data.draw(st.sets(st.integers(0, max(0, len(a) - 1)), max_size=3)) if count else ()
    for at in changed:
        b[at] ^= data.draw(st.integers(1, 255))
    want = sorted({at // itemsize for at in changed})
    differing = np.flatnonzero(find_differing(a, b, itemsize))
    assert list(differing) == want
    for data_, picked in ((a, take(a, differing, itemsize)), (b, take(b, differing, itemsize))):
        rows = data_.reshape(-1, itemsize)[want]
        assert picked.tobytes() == rows.tobytes()


def test_numbers_are_the_same_whatever_their_bytes_are():
    nan = np.array([0x7FC00001, 0xFFC00000, 0, 0x80000000, 0x3F800000, 0x7F800000], "<u4")
    other = np.array([0x7FC00000, 0x7FC00002, 0x80000000, 0, 0x3F800001, 0xFF800000], "<u4")
    a, b = (decode(words.view(np.uint8), "Float32") for words in (nan, other))
    assert list(find_same_numbers(a, b)) == [True, True, True, True, False, False]
    a, b = (decode(words.view(np.uint8), "Complex64") for words in (nan, other))
    assert list(find_same_numbers(a, b)) == [True, True, False]


@pytest.mark.parametrize("dtype", ["Int8", "UInt8", "Int32", "Int64", "UInt64", "Bool"])
@given(st.data())
@examples(40)
def test_distances_of_integers_are_exact_before_they_are_rounded(dtype, data):
    kind = "?" if dtype == "Bool" else NUMPY_TYPES[dtype]
    a, b = (data.draw(arrays.arrays(kind, 4)) for _ in range(2))
    got = find_distances(*(decode(x.view(np.uint8), dtype) for x in (a, b)))
    assert list(got) == [float(abs(int(x) - int(y))) for x, y in zip(a, b, strict=True)]


def test_large_integers_that_differ_by_one_do_differ():
    a, b = (decode(raw(n, dtype="Int64"), "Int64") for n in (2**60, 2**60 + 1))
    assert list(find_distances(a, b)) == [1.0]
    a, b = (decode(raw(n, dtype="Int64"), "Int64") for n in (-(2**63), 2**63 - 1))
    assert list(find_distances(a, b)) == [2.0**64]


@given(arrays.arrays("<f4", 5), arrays.arrays("<f4", 5))
@examples(60)
def test_distances_of_floats_are_those_of_their_values(a, b):
    got = find_distances(*(decode(x.view(np.uint8), "Float32") for x in (a, b)))
    with np.errstate(all="ignore"):
        want = np.abs(a.astype("<f8") - b.astype("<f8"))
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    assert np.array_equal(got, np.where(is_same, 0, want), equal_nan=True)


def test_distances_and_magnitudes_of_complex_numbers_are_moduli():
    a = decode(raw(3 + 4j, 1, dtype="Complex64"), "Complex64")
    b = decode(raw(0, 1j, dtype="Complex64"), "Complex64")
    assert list(find_distances(a, b)) == [5.0, math.sqrt(2)]
    assert list(find_magnitudes(a)) == [5.0, 1.0]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_elements_are_copied_whatever_the_order_and_the_steps_of_their_axes(itemsize, order, step):
    stored = np.random.default_rng(0).integers(0, 256, (40, 3, 50, itemsize), np.uint8)
    shape, strides = stored.shape, [*stored.strides]
    src = as_strided(stored, (20, *shape[1:]), (strides[0] * step, *strides[1:]))
    src = src.transpose(*order, 3)
    dst = np.zeros(src.shape, np.uint8)
    copy_elements(dst, src)
    assert dst.tobytes() == src.tobytes()
