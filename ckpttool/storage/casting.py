"""Cast elements between Float64, Float32, Float16 and BFloat16, in blocks.

It computes the bits of results and counts what a cast loses.  `ckpttool.model.choices` says which
tensors are cast, and `ckpttool.storage.region_io` reads them.

A cast rounds once, to the nearest number, and to the even one of two that are equally near.  NaN
becomes the quiet NaN of its sign.  A number beyond the largest one becomes Inf, which is counted.

NumPy's own cast to Float16 takes 30 times as long for numbers near zero, and NumPy lacks BFloat16.
A cast of Float64 by way of Float32 would round twice.  So the bits are computed here:

- Float64 to Float32 is what the processor rounds.
- Float32 to BFloat16 cuts the lower half off, after an addition that carries into the upper half.
- To fewer exponent bits, a power of two is added to the magnitude.  It is so large that the sum
  has as many bits below the magnitude's first one as the result; the processor rounds it.  The
  difference between the bits of the sum and of the power of two is the significand.
- A type of 16 bits has 65,536 numbers, whose results are looked up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from msgspec import Struct

from ckpttool.model.manifest import CastStats
from ckpttool.storage.numbers import Bytes, Float64s

if TYPE_CHECKING:
    import numpy.typing as npt

Words: TypeAlias = "npt.NDArray[np.unsignedinteger]"

# Bytes of the wider type.  A step of NumPy over a block takes about 0.1 ms: in shorter ones,
# threads wait for the interpreter's lock more than they compute (measured, two threads: three times
# as long).
BLOCK_BYTES = 1 << 20
SCRATCH_BYTES = 4 * BLOCK_BYTES


class _Format(Struct, frozen=True):
    """A floating-point format: its bits, the bits of its exponent, and those of its mantissa."""

    bits: int
    exponent: int
    mantissa: int

    @property
    def word(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integer with as many bits."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def bias(self) -> int:
        """The number that is added to an exponent."""
        return (1 << self.exponent - 1) - 1

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << self.bits - 1

    @property
    def infinity(self) -> int:
        """The bits of Inf."""
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def quiet_nan(self) -> int:
        """The bits of a NaN without a sign."""
        return self.infinity | 1 << self.mantissa - 1

    def of(self, number: int) -> np.unsignedinteger:
        """Return a number as a word."""
        return self.word.type(number)


FORMATS = {
    "Float64": _Format(64, 11, 52),
    "Float32": _Format(32, 8, 23),
    "Float16": _Format(16, 5, 10),
    "BFloat16": _Format(16, 8, 7),
}


class _Rounding(Struct, frozen=True):
    """The rounding of a wider format ``a`` to ``b``; numbers are words of ``a``.

    ``least`` and ``most`` are the exponents of the smallest normal and the largest numbers of
    ``b``, in their places.
    """

    a: _Format
    b: _Format
    shift: int  # how many bits of a mantissa are cut off
    least: int
    most: int
    overflow: int  # the smallest magnitude that is rounded to Inf

    @classmethod
    def between(cls, a: _Format, b: _Format) -> _Rounding:
        """Return how ``a`` is rounded to ``b``."""
        shift = a.mantissa - b.mantissa
        least = a.bias - b.bias + 1 << a.mantissa
        most = a.bias + b.bias << a.mantissa
        overflow = most + (1 << a.mantissa) - (1 << shift - 1)
        return cls(a, b, shift, least, most, overflow)


class Caster:
    """Casts elements, and counts what that does; for one thread."""

    def __init__(self) -> None:
        self._stats = CastStats()
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8).reshape(-1, BLOCK_BYTES)

    def take_stats(self) -> CastStats:
        """Return what the casts since the last call did."""
        stats, self._stats = self._stats, CastStats()
        return stats

    def cast(self, data: Bytes, src: str, out: Bytes, dst: str) -> None:
        """Cast elements, little endian, to type ``dst``; ``out`` is other memory than ``data``."""
        a, b = FORMATS[src], FORMATS[dst]
        x, y = data.view(a.word), out.view(b.word)
        size = BLOCK_BYTES * 8 // max(32, a.bits, b.bits)
        with np.errstate(all="ignore"):  # NaN, Inf, and 0 / 0
            for at in range(0, len(x), size):
                block = self._cast(x[at : at + size], src, y[at : at + size], dst)
                self._stats = self._stats.merged(block)

    def _cast(self, x: Words, src: str, out: Words, dst: str) -> CastStats:
        a, b = FORMATS[src], FORMATS[dst]
        if a.bits == 16:
            return self._look_up(x, _table(src, dst), out)
        if b.bits < a.bits:
            return self._round(x, _Rounding.between(a, b), out)
        np.copyto(out.view("<f8"), x.view("<f4"))
        _quiet(out, b)
        return CastStats(len(out))

    def _look_up(self, x: Words, table: _Table, out: Words) -> CastStats:
        index = self._scratch.reshape(-1).view(np.intp)[: len(x)]
        np.copyto(index, x)
        np.take(table.words, index, out=out, mode="wrap")  # "raise" would make a copy
        if not table.is_lossy:
            return CastStats(len(x))
        is_there = np.zeros(1 << 16, np.bool_)
        is_there[index] = True
        words = np.flatnonzero(is_there)
        infinities, zeros = (
            int(np.count_nonzero(is_so[index])) if is_so[words].any() else 0
            for is_so in (table.is_infinite, table.is_zero)
        )
        largest = float(table.magnitudes[words[table.is_infinite[words]]].max(initial=0))
        errors = (float(kind[words].max(initial=0)) for kind in (table.absolute, table.relative))
        return CastStats(len(x), infinities, largest, zeros, *errors)

    def _row(self, number: int, of: _Format, size: int) -> Words:
        row: Words = self._scratch[number].view(of.word)[:size]
        return row

    def _round(self, x: Words, to: _Rounding, out: Words) -> CastStats:
        """Round a block to fewer bits."""
        a, b, real = to.a, to.b, f"<f{to.a.bits // 8}"
        y, x_abs, power, bits = (self._row(number, a, len(x)) for number in range(4))
        shift, magnitude = a.of(to.shift), a.of(a.sign - 1)
        is_cut, is_native = a.exponent == b.exponent, b.bits == 32
        if is_native:
            rounded: npt.NDArray[np.float32] = out.view("<f4")
            np.copyto(rounded, x.view(real), casting="same_kind")
            np.copyto(y.view(real), rounded)
            before = x.view(real)
        elif is_cut:
            np.right_shift(x, shift, out=y)
            y &= a.of(1)
            y += a.of((1 << to.shift - 1) - 1)
            y += x
            y >>= shift
            np.copyto(out, y, casting="unsafe")
            y <<= shift
            before = x.view(real)
        else:
            np.bitwise_and(x, magnitude, out=x_abs)
            np.bitwise_and(x_abs, a.of(a.infinity), out=power)
            np.clip(power, a.of(to.least), a.of(to.most), out=power)
            power += a.of(to.shift << a.mantissa)
            np.add(x_abs.view(real), power.view(real), out=y.view(real))
            np.subtract(y, power, out=bits)
            np.subtract(y.view(real), power.view(real), out=y.view(real))
            power -= a.of(to.least + (to.shift << a.mantissa))
            power >>= shift
            bits += power
            np.right_shift(x, a.of(a.bits - b.bits), out=power)
            power &= a.of(b.sign)
            bits |= power
            np.copyto(out, bits, casting="unsafe")
            before = x_abs.view(real)
        error = y.view(real)
        np.subtract(before, error, out=error)
        y &= magnitude  # takes half the time of np.abs
        largest_error, infinite = error.max(), x[:0]
        # What became NaN or Inf, or was, is that far from its number, if all exponents fit.
        shows = is_native or is_cut
        if not np.isfinite(largest_error) if shows else int(x_abs.max()) >= to.overflow:
            beyond = np.flatnonzero((x & magnitude) >= to.overflow)
            not_finite = x[beyond] & magnitude
            words = np.where(not_finite > a.infinity, b.of(b.quiet_nan), b.of(b.infinity))
            out[beyond] = words | (x[beyond] >> a.of(a.bits - b.bits)).astype(b.word) & b.of(b.sign)
            infinite = not_finite[not_finite < a.infinity]
            error[beyond] = 0
            largest_error = error.max()
        np.divide(error, before, out=error)
        y &= magnitude
        max_rel = float(np.fmax.reduce(error, initial=0))  # fmax passes over the NaN of 0 / 0
        zeros = int(np.count_nonzero(error == 1)) if max_rel == 1 else 0
        largest = float(infinite.view(real).max(initial=0))
        return CastStats(len(x), len(infinite), largest, zeros, float(largest_error), max_rel)


class _Table(Struct, frozen=True):
    """The result of a cast for each word of a type of 16 bits.

    The errors are 0 where the number or the result is not finite.  The last two say whether a
    number becomes Inf, or 0, that was not.
    """

    words: Words  # the words of the other type
    is_lossy: bool  # whether any of them is another number
    magnitudes: Float64s  # the magnitude of each number, in Float64
    absolute: Float64s
    relative: Float64s
    is_infinite: npt.NDArray[np.bool_]
    is_zero: npt.NDArray[np.bool_]


@lru_cache(maxsize=8)
def _table(src: str, dst: str) -> _Table:
    """Return what becomes of each word; Float32 holds all numbers of 16 bits exactly."""
    a, b = FORMATS["Float32"], FORMATS[dst]
    before = _widened(src)
    words: Words = np.empty(1 << 16, b.word)
    if b.bits == 16:
        Caster()._round(before, _Rounding.between(a, b), words)
        after = _widened(dst)[words]
    else:
        np.copyto(words.view(f"<f{b.bits // 8}"), before.view("<f4"))
        after = before
    _quiet(words, b)
    x, y = (np.abs(word.view("<f4").astype("<f8")) for word in (before, after))
    is_infinite = np.isfinite(x) & np.isinf(y)
    x_rest, y_rest = (np.where(np.isfinite(x) & np.isfinite(y), column, 0) for column in (x, y))
    absolute = np.abs(x_rest - y_rest)
    relative = absolute / np.where(x_rest == 0, 1, x_rest)
    is_lossy = bool(is_infinite.any() or absolute.any())
    is_zero = (x_rest != 0) & (y_rest == 0)
    return _Table(words, is_lossy, x, absolute, relative, is_infinite, is_zero)


def _quiet(words: Words, of: _Format) -> None:
    is_nan = (words & of.of(of.sign - 1)) > of.infinity
    if is_nan.any():
        words[is_nan] = words[is_nan] & of.of(of.sign) | of.of(of.quiet_nan)


@lru_cache(maxsize=2)
def _widened(src: str) -> Words:
    words = np.arange(1 << 16, dtype="<u2")
    if src == "BFloat16":
        return words.astype("<u4") << np.uint32(16)
    return words.view("<f2").astype("<f4").view("<u4")


def widen(x: Words, src: str, out: Float64s) -> None:
    """Write elements to ``out`` as Float64, which holds those of every type exactly."""
    with np.errstate(all="ignore"):  # signalling NaN
        if src == "BFloat16":
            words = x.astype("<u4")
            words <<= np.uint32(16)
            np.copyto(out, words.view("<f4"))
        elif src == "Float16":
            np.take(_table(src, "Float64").words.view("<f8"), x, out=out, mode="wrap")
        else:
            np.copyto(out, x.view(f"<f{FORMATS[src].bits // 8}"))
