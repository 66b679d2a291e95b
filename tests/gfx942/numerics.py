"""Numbers for tests: BF16 as uint16, and float64 references' tolerances."""

from __future__ import annotations

import numpy as np

BF16_EPSILON = 2.0**-8  # largest relative error of one rounding to BF16


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to BF16, nearest, ties to even; NaN becomes 0x7fc0. Returns uint16."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """uint16 BF16 as float32."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def random_bf16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return to_bf16(rng.standard_normal(shape) * scale)


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
