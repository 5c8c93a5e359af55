"""Cast elements between Float64, Float32, Float16 and BFloat16, in blocks that fit into a cache.

A cast rounds once, to the nearest number, and to the even one of two that are equally near.  NaN
becomes the quiet NaN of its sign.  A number beyond the largest one becomes Inf, which is counted.

NumPy's own cast to Float16 takes 30 times as long for numbers near zero, and NumPy has no BFloat16.
A cast of Float64 by way of Float32 would round twice.  So the bits are computed here:

- Float32 to BFloat16 cuts the lower half off, after an addition that carries into the upper half.
- To fewer exponent bits, a power of two is added to the magnitude.  It is so large that the sum
  has as many bits below the magnitude's first one as the result; the processor rounds it.  The
  difference between the bits of the sum and of the power of two is the significand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpttool.model.manifest import CastStats
from ckpttool.storage.numbers import Bytes, Float64s

Words = npt.NDArray[np.unsignedinteger]

BLOCK_BYTES = 128 << 10  # of the wider type; all blocks of scratch stay in a cache of 1 MiB
SCRATCH_BYTES = 5 * BLOCK_BYTES


class _Format(NamedTuple):
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
        """What is added to an exponent."""
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


class _Rounding(NamedTuple):
    """How a wider format ``a`` is rounded to ``b``; numbers are words of ``a``.

    Attributes
    ----------
    a, b
        The formats.
    shift
        How many bits of a mantissa are cut off.
    least, most
        The exponents of the smallest normal and the largest numbers of ``b``, in their places.
    overflow
        The smallest magnitude that is rounded to Inf.
    """

    a: _Format
    b: _Format
    shift: int
    least: int
    most: int
    overflow: int

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
        """Cast elements to another type.

        Parameters
        ----------
        data, src
            The bytes of the elements, little endian, and their type.
        out, dst
            The bytes of the result, other memory than that of ``data``, and its type.
        """
        a, b = FORMATS[src], FORMATS[dst]
        x, y = data.view(a.word), out.view(b.word)
        size = BLOCK_BYTES * 8 // max(32, a.bits, b.bits)
        with np.errstate(all="ignore"):  # NaN, Inf, and 0 / 0
            for at in range(0, len(x), size):
                block = self._cast(x[at : at + size], src, y[at : at + size], dst)
                self._stats = self._stats.merged(block)

    def _cast(self, x: Words, src: str, out: Words, dst: str) -> CastStats:
        """Cast a block; elements of 16 bits by way of Float32, which holds them exactly."""
        a, b = FORMATS[src], FORMATS[dst]
        if a.bits == 16:
            wide = out if dst == "Float32" else self._row(0, FORMATS["Float32"], len(x))
            _widen(x, src, wide)
            x, a = wide, FORMATS["Float32"]
        if b.bits < a.bits:
            return self._round(x, _Rounding.between(a, b), out)
        if b.bits > a.bits:
            np.copyto(out.view("<f8"), x.view("<f4"))
        is_nan = (out & b.of(b.sign - 1)) > b.infinity
        if is_nan.any():
            out[is_nan] = out[is_nan] & b.of(b.sign) | b.of(b.quiet_nan)
        return CastStats(len(out))

    def _row(self, number: int, of: _Format, size: int) -> Words:
        row: Words = self._scratch[number].view(of.word)[:size]
        return row

    def _round(self, x: Words, to: _Rounding, out: Words) -> CastStats:
        """Round a block to fewer bits."""
        a, b, real = to.a, to.b, f"<f{to.a.bits // 8}"
        x_abs, y_abs, power, bits = (self._row(number, a, len(x)) for number in (1, 2, 3, 4))
        np.bitwise_and(x, a.of(a.sign - 1), out=x_abs)
        beyond = np.zeros(0, np.intp)  # where the result is NaN or Inf
        if int(x_abs.max()) >= to.overflow:
            beyond = np.flatnonzero(x_abs >= to.overflow)
        if a.exponent == b.exponent:
            np.right_shift(x_abs, a.of(to.shift), out=bits)
            bits &= a.of(1)
            bits += a.of((1 << to.shift - 1) - 1)
            bits += x_abs
            bits >>= a.of(to.shift)
            np.left_shift(bits, a.of(to.shift), out=y_abs)
        else:
            np.bitwise_and(x_abs, a.of(a.infinity), out=power)
            np.clip(power, a.of(to.least), a.of(to.most), out=power)
            power += a.of(to.shift << a.mantissa)
            np.add(x_abs.view(real), power.view(real), out=y_abs.view(real))
            np.subtract(y_abs, power, out=bits)
            np.subtract(y_abs.view(real), power.view(real), out=y_abs.view(real))
            power -= a.of(to.least + (to.shift << a.mantissa))
            power >>= a.of(to.shift)
            bits += power
        not_finite = x_abs[beyond]
        bits[beyond] = np.where(not_finite > a.infinity, a.of(b.quiet_nan), a.of(b.infinity))
        np.right_shift(x, a.of(a.bits - b.bits), out=power)
        power &= a.of(b.sign)
        bits |= power
        np.copyto(out, bits, casting="unsafe")
        infinite = not_finite[not_finite < a.infinity]
        x_abs[beyond] = y_abs[beyond] = 0
        zeros = int(np.count_nonzero(x_abs)) - int(np.count_nonzero(y_abs))
        before, after = x_abs.view(real), y_abs.view(real)
        np.subtract(before, after, out=after)
        np.abs(after, out=after)
        max_abs = float(after.max(initial=0))
        np.divide(after, before, out=after)
        max_rel = float(np.fmax.reduce(after, initial=0))  # fmax passes over the NaN of 0 / 0
        largest = float(infinite.view(real).max(initial=0))
        return CastStats(len(x), len(infinite), largest, zeros, max_abs, max_rel)


def widen(x: Words, src: str, out: Float64s) -> None:
    """Write elements to ``out`` as Float64, which holds those of every type exactly."""
    if src == "Float64":
        np.copyto(out, x.view("<f8"))
        return
    if FORMATS[src].bits == 16:
        wide: Words = np.empty(len(x), "<u4")
        _widen(x, src, wide)
        x = wide
    np.copyto(out, x.view("<f4"))


def _widen(x: Words, src: str, out: Words) -> None:
    """Write elements of 16 bits to ``out`` as Float32."""
    if src == "BFloat16":
        np.left_shift(x, np.uint32(16), out=out, dtype=np.uint32)  # NumPy 1 would keep 16 bits
    else:
        np.take(_float16_table(), x, out=out, mode="wrap")  # "raise" would make a copy


@lru_cache(maxsize=1)
def _float16_table() -> Words:
    """Return the Float32 of each Float16; one look-up takes the same time for all numbers."""
    return np.arange(1 << 16, dtype="<u2").view("<f2").astype("<f4").view("<u4")
