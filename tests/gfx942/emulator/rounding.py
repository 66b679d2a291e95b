"""Arithmetic that numpy does not have: fused multiply-add with one rounding, IEEE minimum and maximum, 2**x and others.

All functions take and return arrays of FP16, FP32 or FP64. Which NaN a NaN is, beyond being quiet, is not modelled.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

INTEGERS = {np.dtype(np.float16): np.int16, np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}
QUIET = {np.dtype(np.float16): 1 << 9, np.dtype(np.float32): 1 << 22, np.dtype(np.float64): 1 << 51}
BELOW_FP32, HALF_OF_FP32 = (1 << 29) - 1, 1 << 28  # bits of an FP64 that a normal FP32 has not; the highest of them
FP32_NORMAL = 2.0 ** -126
NOT_A_NUMBER = np.array([0xFFF8 << 48], np.uint64).view(np.float64)[0]  # what an invalid operation gives: sign set


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once to the type of the arguments."""
    if a.dtype == np.float64:
        return _fma_double(a, b, c)
    if a.dtype == np.float16:
        return fma_to_odd(a, b, c).astype(np.float16)
    total = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    # The sum was rounded to FP64. Rounding it again goes wrong only from halfway between two FP32 numbers.
    doubtful = (total.view(np.int64) & BELOW_FP32 == HALF_OF_FP32) | (np.abs(total) < FP32_NORMAL)
    return (fma_to_odd(a, b, c) if doubtful.any() else total).astype(np.float32)


def fma_to_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of FP16 or FP32 as an FP64 that rounds to FP32 or FP16 as the exact sum does.

    The product is exact in FP64. When the sum is not, its last bit is made odd toward the exact value: 53 bits hold the
    two extra bits that rounding to 24 needs, and the odd one keeps the sum off the halfway points.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    c = c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    inexact = np.abs(error) > 0  # false for NaN, where a term is infinite
    if not inexact.any():
        return total
    bits = total.view(np.int64)
    away = (error > 0) == (total > 0)
    step = np.where(inexact & (bits & 1 == 0), np.where(away, 1, -1), 0)
    return (bits + step).view(np.float64)


def _fma_double(a: np.ndarray, b: np.ndarray, c: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """FP64, lane by lane in exact fractions; `scale` (powers of two) multiplies before the rounding."""
    finite = np.isfinite(a) & np.isfinite(b)
    plain = np.where(finite & np.isinf(c), c, a * b + c)  # a finite product may overflow against an infinite c
    for k in np.flatnonzero(finite & np.isfinite(c)):
        exact = Fraction(float(a[k])) * Fraction(float(b[k])) + Fraction(float(c[k]))
        if exact == 0:
            continue  # numpy's zero has the right sign
        if scale is not None:
            exact *= Fraction(float(scale[k]))
        plain[k] = round_fraction(exact)
    return plain


def fma_scaled(a: np.ndarray, b: np.ndarray, c: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """(a * b + c) * scale with one rounding; `scale` holds powers of two in FP64."""
    if a.dtype == np.float64:
        return _fma_double(a, b, c, scale)
    return (fma_to_odd(a, b, c) * scale).astype(a.dtype)


def round_fraction(exact: Fraction) -> float:
    """The FP64 nearest to a fraction, ties to even; infinity when it is too large."""
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def bits(a: np.ndarray) -> np.ndarray:
    """Floats as signed integers of their width."""
    return a.view(INTEGERS[a.dtype])


def quiet(a: np.ndarray) -> np.ndarray:
    """NaNs made quiet, other values as they are."""
    raised = (bits(a) | INTEGERS[a.dtype](QUIET[a.dtype])).view(a.dtype)
    return np.where(np.isnan(a), raised, a)


def is_signaling(a: np.ndarray) -> np.ndarray:
    return np.isnan(a) & (bits(a) & INTEGERS[a.dtype](QUIET[a.dtype]) == 0)


def is_denormal(a: np.ndarray) -> np.ndarray:
    return (np.abs(a) < np.finfo(a.dtype).smallest_normal) & (a != 0)


def flushed(a: np.ndarray) -> np.ndarray:
    """Denormals of FP32 as zeros of their sign."""
    small = np.abs(a) < np.float32(FP32_NORMAL)
    return np.where(small, np.copysign(np.float32(0), a), a) if small.any() else a


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger: +0 above -0, a number above a NaN, except that a signaling NaN comes out quiet (IEEE mode)."""
    result = np.maximum(a, b)
    return result if (np.abs(result) > 0).all() else _extreme(a, b, a > b, bits(a) & bits(b))


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller, with the rules of `maximum`."""
    result = np.minimum(a, b)
    return result if (np.abs(result) > 0).all() else _extreme(a, b, a < b, bits(a) | bits(b))


def _extreme(a: np.ndarray, b: np.ndarray, first: np.ndarray, tied_bits: np.ndarray) -> np.ndarray:
    """a where `first`, else b; `tied_bits` for equal values, which may be zeros of two signs; then the NaN rules."""
    result = np.where(a == b, tied_bits.view(a.dtype), np.where(first, a, b))
    result = np.where(np.isnan(b), quiet(a), np.where(np.isnan(a), quiet(b), result))
    result = np.where(is_signaling(b), quiet(b), result)
    return np.where(is_signaling(a), quiet(a), result)


def fraction(a: np.ndarray) -> np.ndarray:
    """a - floor(a), below 1."""
    below_one = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    return np.where(np.isinf(a), a.dtype.type(NOT_A_NUMBER), np.minimum(a - np.floor(a), below_one))


def mantissa(a: np.ndarray) -> np.ndarray:
    """The number scaled by a power of two into 0.5..1; zero, infinity and NaN as they are."""
    return np.frexp(a)[0]


def exponent(a: np.ndarray) -> np.ndarray:
    """The power of two that `mantissa` took out; 0 for zero, infinity and NaN."""
    return np.where(np.isfinite(a), np.frexp(a)[1], 0)


def biased_exponent(a: np.ndarray) -> np.ndarray:
    """The exponent field: int64."""
    width = {2: (10, 0x1F), 4: (23, 0xFF), 8: (52, 0x7FF)}[a.dtype.itemsize]
    return bits(a).astype(np.int64) >> width[0] & width[1]


def rounded_function(function, a: np.ndarray) -> np.ndarray:
    """A function computed in FP64, then rounded. NaNs come out quiet; an invalid operation gives one, sign set."""
    result = function(a.astype(np.float64))
    invalid = np.isnan(result)
    if not invalid.any():
        return result.astype(a.dtype)
    return np.where(np.isnan(a), quiet(a), np.where(invalid, NOT_A_NUMBER, result).astype(a.dtype))


def flushing_function(function, a: np.ndarray) -> np.ndarray:
    """The same of an FP32 instruction that takes denormals as zero and gives zero for them."""
    return flushed(rounded_function(function, flushed(a)))


def sine(a: np.ndarray) -> np.ndarray:
    """sin(2 * pi * a) of FP64, exact where it is 0, 1 or -1."""
    turn = np.where(a == np.rint(a), np.copysign(0.0, a), a - np.rint(a))
    turn = np.where(np.abs(turn) > 0.25, np.copysign(0.5, turn) - turn, turn)
    return np.sin(2 * np.pi * turn)


def cosine(a: np.ndarray) -> np.ndarray:
    """cos(2 * pi * a) of FP64."""
    return sine(0.25 - np.abs(a - np.rint(a)))
