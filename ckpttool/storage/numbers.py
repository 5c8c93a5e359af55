"""The numbers that elements of every type represent: values, NaN, Inf and zero.

Tensors are compared as bytes; only bytes that differ are decoded.  Every array of bytes here holds
whole elements, little endian, one after another.  `ckpttool.storage.compare` decides which
differences count.

Source
------
IEEE 754 for the usual types; BFloat16 is the upper half of a Float32, and Float8E5M2 that of a
Float16; the OCP 8-bit floating point specification for Float8E4M3FN (no infinity); "Ascend HiFloat8
Format for Deep Learning" (Luo et al. 2024) for HiFloat8, all 256 values checked against the package
en_dtypes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ckpttool.model.dtypes import DTYPES

if TYPE_CHECKING:
    import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
# NumPy moves one element at a time to another line of the cache.  Neighbours that fill a word are
# moved together, and parted where they lie close: fifteen times as fast (measured, rows of 4 KiB).
_WORD_BYTES = 16
_WORD = np.dtype((np.void, _WORD_BYTES))
_ROWS = 128  # that are moved at a time, so that their words stay in a processor's cache
Flags: TypeAlias = "npt.NDArray[np.bool_]"
Numbers: TypeAlias = "npt.NDArray[np.number]"
Float64s: TypeAlias = "npt.NDArray[np.float64]"

# NumPy's names of these types are the same, in lower case.
_NATIVE = {"Bool": np.dtype("u1")} | {
    name: np.dtype(name.lower()).newbyteorder("<")
    for name in DTYPES
    if re.fullmatch(r"U?Int(8|16|32|64)|Float(16|32|64)|Complex(64|128)", name)
}


class NonfiniteCount(NamedTuple):
    """Counts of NaN and Inf, and the position of the first of each.

    A complex number counts if its real or imaginary value does.
    """

    nans: int
    infinities: int
    first_nan: int | None
    first_infinity: int | None


def decode(data: Bytes, dtype: str) -> Numbers | None:
    """Return the exact numbers of elements; None for a type without one number per element.

    >>> decode(np.array([0x80, 0x3F], np.uint8), "BFloat16")
    array([1.], dtype=float32)
    >>> decode(np.array([7], np.uint8), "Int4") is None  # two numbers in a byte
    True
    """
    if dtype in _NATIVE:
        return data.view(_NATIVE[dtype])
    if dtype == "BFloat16":
        return (data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    if dtype == "Float8E5M2":
        return (data.astype("<u2") << np.uint16(8)).view("<f2")
    if dtype in _SMALL_FLOATS:
        return np.take(_table(dtype), data)  # takes half the time of an index
    return None


def count_nonfinite(numbers: Numbers) -> NonfiniteCount:
    """Count NaN and Inf in numbers from `decode`."""
    if numbers.dtype.kind not in "fc" or bool(np.isfinite(numbers).all()):
        return NonfiniteCount(0, 0, None, None)
    nans, infinities = np.isnan(numbers), np.isinf(numbers)
    return NonfiniteCount(
        int(np.count_nonzero(nans)),
        int(np.count_nonzero(infinities)),
        int(nans.argmax()) if nans.any() else None,
        int(infinities.argmax()) if infinities.any() else None,
    )


def find_differing(a: Bytes, b: Bytes, itemsize: int) -> Flags:
    """Return whether the bytes of each element differ."""
    word = f"<u{min(itemsize, 8)}"
    differing: Flags = a.view(word) != b.view(word)
    return differing[0::2] | differing[1::2] if itemsize == 16 else differing


def take(data: Bytes, positions: npt.NDArray[np.intp], itemsize: int) -> Bytes:
    """Return the bytes of the elements at some positions."""
    if len(positions) * itemsize == len(data):
        return data
    return data.view(_word(itemsize))[positions].view(np.uint8)


def _word(itemsize: int) -> str:
    return "<c16" if itemsize == 16 else f"<u{itemsize}"


def find_same_numbers(a: Numbers, b: Numbers) -> Flags:
    """Return whether each two numbers are equal; NaN equals NaN, and 0 equals -0."""
    if a.dtype.kind == "c":
        parts = find_same_numbers(a.view(a.real.dtype), b.view(b.real.dtype))
        return parts[0::2] & parts[1::2]
    same: Flags = a == b
    if a.dtype.kind == "f":
        same |= np.isnan(a) & np.isnan(b)
    return same


def find_distances(a: Numbers, b: Numbers) -> Float64s:
    """Return ``|a - b|`` of each element; 0 where both are the same number, NaN and Inf included.

    The distance is Inf where one number is Inf, or where a Float64 cannot hold it.  It is NaN where
    only one number is NaN.  Integers are subtracted as integers, because Float64 may round two
    large ones to the same number.
    """
    distances: Float64s
    if a.dtype.kind in "iu":
        wide = "<i8" if a.dtype.kind == "i" else "<u8"
        x, y = a.astype(wide), b.astype(wide)
        words = x.view("<u8"), y.view("<u8")
        distances = np.where(x >= y, words[0] - words[1], words[1] - words[0]).astype("<f8")
    elif a.dtype.kind == "c":
        parts = find_distances(a.view(a.real.dtype), b.view(b.real.dtype))
        with np.errstate(all="ignore"):
            distances = np.hypot(parts[0::2], parts[1::2])
    else:
        with np.errstate(all="ignore"):
            distances = np.abs(widen(a) - widen(b))
        distances[find_same_numbers(a, b)] = 0
    return distances


def find_magnitudes(numbers: Numbers) -> Float64s:
    """Return ``|x|`` of each element."""
    with np.errstate(all="ignore"):
        magnitudes: Float64s = np.abs(widen(numbers))
    return magnitudes


def scale_down(numbers: Numbers) -> Numbers:
    """Return a sixteenth of each element in Float64, so that sums and differences are finite."""
    with np.errstate(all="ignore"):
        smaller: Numbers = widen(numbers) / 16
    return smaller


def widen(numbers: Numbers) -> npt.NDArray[np.float64 | np.complex128]:
    """Return the same numbers as Float64 or Complex128."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return numbers.astype("<c16" if numbers.dtype.kind == "c" else "<f8")


@lru_cache(maxsize=8)
def _table(dtype: str) -> npt.NDArray[np.float32]:
    return np.array([_SMALL_FLOATS[dtype](byte) for byte in range(256)], np.float32)


def _float8_e4m3fn(byte: int) -> float:
    # Bias 7, no infinity, NaN where all bits except the sign are set.
    sign, exponent, mantissa = (-1.0 if byte & 0x80 else 1.0), (byte & 0x7F) >> 3, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * math.ldexp(mantissa / 8 + (exponent > 0), max(exponent, 1) - 7)


def _hifloat8(byte: int) -> float:
    """Decode HiFloat8, which has one zero and one NaN.

    A prefix code gives the number of exponent bits (0 to 4); the bits after them are the mantissa.
    The exponent is sign and magnitude, without its leading one.  Below the smallest prefix, the
    last three bits encode a power of two, from 2**-22 to 2**-16.
    """
    sign, bits = (-1.0 if byte & 0x80 else 1.0), byte & 0x7F
    if bits == 0:
        return math.nan if byte & 0x80 else 0.0
    if bits == 0x6F:
        return sign * math.inf
    if bits < 8:
        return sign * math.ldexp(1.0, bits - 23)
    if bits < 16:
        return sign * (1 + (bits & 7) / 8)
    # Prefixes 001, 01, 10, 11 -> bits of the exponent field, bits of the mantissa field.
    width, rest = {0: (1, 3), 1: (2, 3), 2: (3, 2), 3: (4, 1)}[bits >> 5]
    field = bits >> rest & ((1 << width) - 1)
    top = 1 << (width - 1)
    exponent = (top | field & (top - 1)) * (-1 if field & top else 1)
    return sign * math.ldexp(1 + (bits & ((1 << rest) - 1)) / (1 << rest), exponent)


_SMALL_FLOATS: dict[str, Callable[[int], float]] = {
    "Float8E4M3FN": _float8_e4m3fn,
    "HiFloat8": _hifloat8,
    # A power of two: bias 127, no sign, NaN where all bits are set.
    "F8_E8M0": lambda byte: math.nan if byte == 0xFF else math.ldexp(1.0, byte - 127),
}


def copy_elements(dst: Bytes, src: Bytes) -> None:
    """Copy elements between arrays of one shape, whose last axis has the bytes of an element.

    The other axes may lie in another order.
    """
    if dst.strides[-2:-1] == src.strides[-2:-1]:  # as of most pieces
        dst[...] = src
        return
    axis, last = _innermost(dst), _innermost(src)
    each = _WORD_BYTES // src.shape[-1]
    is_turned = axis != last and min(axis, last) >= 0 and src.strides[axis]
    if not is_turned or not 1 < each <= src.shape[last]:
        word = _word(src.shape[-1])  # bytes would be moved one by one (measured: 15 times as long)
        dst.view(word)[..., 0] = src.view(word)[..., 0]
        return
    to, of = (np.moveaxis(array, (axis, last), (-3, -2)) for array in (dst, src))
    for index in np.ndindex(to.shape[:-3]):
        _transpose(to[index], of[index])


def _innermost(array: Bytes) -> int:
    """Return the axis whose elements are neighbours; -1 for none."""
    itemsize = array.shape[-1]
    axes = (axis for axis in range(array.ndim - 2, -1, -1) if array.shape[axis] > 1)
    return next((axis for axis in axes if array.strides[axis] == itemsize), -1)


def _transpose(dst: Bytes, src: Bytes) -> None:
    """Copy rows of neighbours into columns of neighbours."""
    rows, columns, itemsize = src.shape
    each = _WORD_BYTES // itemsize
    whole = columns // each * each
    dst[:, whole:] = src[:, whole:]
    words = src[:, :whole].reshape(rows, -1, _WORD_BYTES).view(_WORD)[..., 0]
    element = np.dtype(f"u{itemsize}")
    into = dst[:, :whole].transpose(1, 0, 2).view(element)[..., 0].reshape(-1, each, rows)
    for first in range(0, rows, _ROWS):
        moved = np.ascontiguousarray(words[first : first + _ROWS].T)
        parted = moved.view(element).reshape(len(moved), -1, each)
        into[:, :, first : first + _ROWS] = parted.transpose(0, 2, 1)
