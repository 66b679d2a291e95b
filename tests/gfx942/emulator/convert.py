"""Conversions between number types.

Floats to integers truncate and saturate, NaN becomes 0. Integers to floats, and floats to narrower ones, round to
nearest even, except those named rtz, which round toward zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gfx942.emulator.rounding import quiet
from tests.gfx942.emulator.types import TYPES
from tests.gfx942.emulator.vector import vector

U32 = np.uint32


def saturated(numbers: np.ndarray, name: str) -> np.ndarray:
    """FP64 with an integral value as integers of type `name`, clamped to its range; NaN becomes 0."""
    limits = np.iinfo(TYPES[name][1])
    wide = np.minimum(np.maximum(numbers, limits.min), limits.max)
    return np.where(numbers == numbers, wide, 0).astype(np.int64).astype(TYPES[name][1])


def to_integer(name: str, rounds: Callable[[np.ndarray], np.ndarray] = np.trunc) -> Callable:
    return lambda a: saturated(rounds(a.astype(np.float64)), name)


def toward_zero(a: np.ndarray) -> np.ndarray:
    """FP32 as FP16, rounded toward zero: a finite number never becomes infinite."""
    half = quiet(a.astype(np.float16))
    too_far = np.abs(half.astype(np.float32)) > np.abs(a)
    return np.where(too_far, np.nextafter(half, np.float16(0)), half)


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two arrays of 16-bit numbers as halves of 32-bit lanes."""
    return low.view(np.uint16).astype(U32) | high.view(np.uint16).astype(U32) << U32(16)


for _type in ("f32", "f64"):
    for _integer in ("i32", "u32"):
        vector(f"v_cvt_{_type}_{_integer}", _type, _integer, lambda a, t=TYPES[_type][1]: a.astype(t))
        vector(f"v_cvt_{_integer}_{_type}", _integer, _type, to_integer(_integer))
for _integer in ("i16", "u16"):
    vector(f"v_cvt_f16_{_integer}", "f16", _integer, lambda a: a.astype(np.float16))
    vector(f"v_cvt_{_integer}_f16", _integer, "f16", to_integer(_integer))
vector("v_cvt_f32_f64", "f32", "f64", lambda a: a.astype(np.float32))
vector("v_cvt_f64_f32", "f64", "f32", lambda a: a.astype(np.float64))
vector("v_cvt_f32_f16", "f32", "f16", lambda a: quiet(a.astype(np.float32)))
vector("v_cvt_f16_f32", "f16", "f32", lambda a: quiet(a.astype(np.float16)))
vector("v_cvt_rpi_i32_f32", "i32", "f32", to_integer("i32", lambda a: np.floor(a + 0.5)))
vector("v_cvt_flr_i32_f32", "i32", "f32", to_integer("i32", np.floor))
for _byte in range(4):
    vector(f"v_cvt_f32_ubyte{_byte}", "f32", "b32",
           lambda a, byte=_byte: (a >> U32(8 * byte) & U32(255)).astype(np.float32))

vector("v_cvt_pkrtz_f16_f32", "b32", "f32 f32", lambda a, b: packed(toward_zero(a), toward_zero(b)))
vector("v_pack_b32_f16", "b32", "f16 f16", packed, op_sel=True)


def normalized(a: np.ndarray, name: str) -> np.ndarray:
    """-1..1 or 0..1 as 16-bit integers of the whole range."""
    low = -1.0 if name == "i16" else 0.0
    return saturated(np.rint(np.clip(a.astype(np.float64), low, 1.0) * np.iinfo(TYPES[name][1]).max), name)


for _integer in ("i16", "u16"):
    vector(f"v_cvt_pknorm_{_integer}_f32", "b32", "f32 f32",
           lambda a, b, t=_integer: packed(normalized(a, t), normalized(b, t)))
vector("v_cvt_pk_i16_i32", "b32", "i32 i32",
       lambda a, b: packed(*(np.clip(x, -32768, 32767).astype(np.int16) for x in (a, b))))
vector("v_cvt_pk_u16_u32", "b32", "u32 u32",
       lambda a, b: packed(*(np.minimum(x, U32(65535)).astype(np.uint16) for x in (a, b))))


def _insert_byte(a: np.ndarray, position: np.ndarray, into: np.ndarray) -> np.ndarray:
    """FP32 as a byte, rounded to nearest even and clamped, in one of four places of a register."""
    shift = U32(8) * (position & U32(3))
    byte = np.clip(np.nan_to_num(np.rint(a), nan=0.0), 0, 255).astype(U32)
    return into & ~(U32(255) << shift) | byte << shift


vector("v_cvt_pk_u8_f32", "b32", "f32 u32 b32", _insert_byte)
