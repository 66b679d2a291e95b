"""The types of operands: how a register's bits are seen as numbers, and numbers as bits."""

from __future__ import annotations

import numpy as np

# name -> (bits, numpy type of the numbers)
TYPES = {
    "b32": (32, np.uint32), "u32": (32, np.uint32), "i32": (32, np.int32), "f32": (32, np.float32),
    "b64": (64, np.uint64), "u64": (64, np.uint64), "i64": (64, np.int64), "f64": (64, np.float64),
    "b16": (16, np.uint16), "u16": (16, np.uint16), "i16": (16, np.int16), "f16": (16, np.float16),
}
REGISTER = {16: np.uint32, 32: np.uint32, 64: np.uint64}  # how lanes of that many bits travel


def to_numbers(bits: np.ndarray, name: str) -> np.ndarray:
    """uint32 or uint64 lanes as numbers of type `name`; 16-bit types take the low half."""
    size, dtype = TYPES[name]
    return bits.astype(np.uint16).view(dtype) if size == 16 else bits.view(dtype)


def to_bits(numbers: np.ndarray, name: str) -> np.ndarray:
    """Numbers of type `name` as uint32 or uint64 lanes; 16-bit ones zero-extended."""
    size, dtype = TYPES[name]
    if numbers.dtype != dtype:
        numbers = numbers.astype(dtype)
    return numbers.view(np.uint16).astype(np.uint32) if size == 16 else numbers.view(REGISTER[size])


def signed(value: int, bits: int) -> int:
    """The low `bits` bits as a number in two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
