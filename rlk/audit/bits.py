"""Comparison of log-probs by their raw bits, never by value: -0.0 is not 0.0, and NaNs of two payloads differ."""

from __future__ import annotations

import numpy as np

from rlk.errors import CheckFailed


def as_bits(x: np.ndarray) -> np.ndarray:
    """The uint32 bit patterns of a float32 array (uint32 passes through). Raises CheckFailed for other dtypes."""
    x = np.ascontiguousarray(x)
    if x.dtype not in (np.float32, np.uint32):
        raise CheckFailed(f"log-probs are {x.dtype}, expected float32: a conversion would change the bits to compare")
    return x.view(np.uint32)


def compare_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Indices, int64 ascending, where two float32 or uint32 vectors differ in any bit.

    Raises CheckFailed when the lengths differ: a comparison of the common part would hide a shift.
    """
    if a.shape != b.shape:
        raise CheckFailed(f"got arrays of shapes {a.shape} and {b.shape}, expected equal shapes: check the alignment")
    return np.flatnonzero(as_bits(a) != as_bits(b))


def show_bits(bits: int) -> str:
    """A bit pattern with the float32 it stands for, such as '0xbf000000 (-0.5)'."""
    return f"0x{bits:08x} ({np.uint32(bits).view(np.float32)!s})"
