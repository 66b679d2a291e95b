"""Operands: registers, inline constants and literals, read as vectors of lanes or as integers.

A reader is made once, when an instruction is decoded, and called for every wave that runs it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np

from tests.gfx942.emulator.memory import SHARED_APERTURE
from tests.gfx942.emulator.types import REGISTER, TYPES
from tests.gfx942.emulator.wave import AGPR, EXEC, LANES, M0, VCC, Wave

NAMED = {"vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "exec": (EXEC, 2), "exec_lo": (EXEC, 1),
         "exec_hi": (EXEC + 1, 1), "m0": (M0, 1), "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1),
         "flat_scratch_hi": (103, 1), "xnack_mask": (104, 2)}
INLINE_FLOATS = {"0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0"}
INVERSE_TWO_PI = {16: 0x3118, 32: 0x3E22F983, 64: 0x3FC45F306DC9C882}  # 1/(2*pi), as printed by its first digits

VectorReader = Callable[[Wave], np.ndarray]
ScalarReader = Callable[[Wave], int]


def vector_register(operand: str) -> tuple[int, int] | None:
    """(row, count) of `v3`, `a[0:3]`; None for anything else. Rows of AGPRs start at 256."""
    if found := re.fullmatch(r"([va])(\d+)", operand):
        return int(found[2]) + (AGPR if found[1] == "a" else 0), 1
    if found := re.fullmatch(r"([va])\[(\d+):(\d+)\]", operand):
        first, last = int(found[2]), int(found[3])
        return first + (AGPR if found[1] == "a" else 0), last - first + 1
    return None


def scalar_register(operand: str) -> tuple[int, int] | None:
    """(first, count) of `s3`, `s[4:7]`, `vcc`, `exec`, `m0`; None for anything else."""
    if operand in NAMED:
        return NAMED[operand]
    if found := re.fullmatch(r"s(\d+)", operand):
        return int(found[1]), 1
    if found := re.fullmatch(r"s\[(\d+):(\d+)\]", operand):
        return int(found[1]), int(found[2]) - int(found[1]) + 1
    return None


def constant(operand: str, bits: int, floating: bool = False, sign_extended: bool = False) -> int | None:
    """The bit pattern of an inline constant or literal for an operand of `bits` bits; None for a register.

    The disassembler prints inline constants in decimal and literals in hexadecimal. Inline integers are sign-extended
    and inline floats have the operand's width. Of a 64-bit operand a literal is the high half of a float, and the low
    half of an integer, sign-extended when the integer is signed.
    """
    mask = (1 << bits) - 1
    if operand in INLINE_FLOATS:
        return int.from_bytes(struct.pack({16: "<e", 32: "<f", 64: "<d"}[bits], float(operand)), "little")
    if operand.startswith("0.15915494"):
        return INVERSE_TWO_PI[bits]
    if re.fullmatch(r"-?\d+", operand):
        return int(operand) & mask
    if not re.fullmatch(r"0x[0-9a-f]+", operand):
        return None
    value = int(operand, 16)
    if bits == 64 and floating:
        return value << 32
    if bits == 64 and sign_extended and value >> 31 == 1:
        return value | 0xFFFFFFFF << 32
    return value & mask


def scalar_reader(operand: str, bits: int = 32, sign_extended: bool = False) -> ScalarReader:
    """Reads `bits` bits (32, 64, 128, ...) as an unsigned integer."""
    if (value := constant(operand, bits, sign_extended=sign_extended)) is not None:
        return lambda wave: value
    if operand in ("src_scc", "scc"):
        return lambda wave: wave.scc
    if operand == "src_shared_base":  # a flat address of LDS: the aperture, then the offset
        return lambda wave: SHARED_APERTURE << 32
    if operand in ("src_vccz", "vccz"):
        return lambda wave: int(wave.read_sgprs(VCC, 2) == 0)
    if operand in ("src_execz", "execz"):
        return lambda wave: int(wave.exec == 0)
    if register := scalar_register(operand):
        first, count = register
        if first >= EXEC or count > 1:
            count = min(count, bits // 32)
            return lambda wave: wave.read_sgprs(first, count)
        return lambda wave: wave.scalar[first]
    raise ValueError(f"operand {operand!r} is no scalar")


def vector_reader(operand: str, bits: int = 32, floating: bool = False, sign_extended: bool = False) -> VectorReader:
    """Reads one value per lane: uint32 [64] for up to 32 bits, uint64 [64] for 64. Scalars are equal in all lanes."""
    if register := vector_register(operand):
        row, count = register
        if bits <= 32:
            return lambda wave: wave.vector[row]
        if count != 2:
            raise ValueError(f"operand {operand!r} has {count} registers, expected 2 for 64 bits")
        return lambda wave: wave.vector[row] | wave.vector[row + 1].astype(np.uint64) << np.uint64(32)
    dtype = REGISTER[bits]
    if (value := constant(operand, bits, floating, sign_extended)) is not None:
        fixed = np.full(LANES, value, dtype)
        fixed.flags.writeable = False
        return lambda wave: fixed
    read = scalar_reader(operand, bits)
    return lambda wave: np.full(LANES, read(wave), dtype)


def source_modifiers(operand: str, name: str) -> tuple[str, bool, bool]:
    """(operand, negate, absolute) of a source: `-|v1|`, `neg(1.0)`. Raises ValueError when its type is an integer."""
    plain = operand
    negate = absolute = False
    if plain.startswith("neg("):
        plain, negate = plain[4:-1], True
    elif plain.startswith("-") and not plain[1:2].isdigit():
        plain, negate = plain[1:], True
    if plain.startswith("|"):
        plain, absolute = plain.strip("|"), True
    if (negate or absolute) and name[0] != "f":
        raise ValueError(f"{operand!r}: neg and abs of a source of type {name}")
    return plain, negate, absolute


def modified_reader(read: VectorReader, bits: int, negate: bool, absolute: bool) -> VectorReader:
    """A reader of float bit patterns with abs, then neg, applied: signs only, NaNs keep their payload."""
    if not (negate or absolute):
        return read
    sign = REGISTER[bits](1 << (bits - 1))
    if not absolute:
        return lambda wave: read(wave) ^ sign
    if not negate:
        return lambda wave: read(wave) & ~sign
    return lambda wave: read(wave) | sign


def is_float(name: str) -> bool:
    return TYPES[name][1] in (np.float16, np.float32, np.float64)
