"""Packed instructions: the same operation on two numbers per lane, FP32 in register pairs or 16 bits in halves.

op_sel says which number of each source the low result takes, op_sel_hi the high one; neg_lo and neg_hi negate.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.operand import (
    VectorReader,
    constant,
    modified_reader,
    scalar_reader,
    scalar_register,
    vector_reader,
    vector_register,
)
from tests.gfx942.emulator.rounding import fma, fma_to_odd, maximum, minimum
from tests.gfx942.emulator.table import Step, decodes
from tests.gfx942.emulator.types import to_bits, to_numbers
from tests.gfx942.emulator.vector import clamped, half_writer, saturating, typed_reader, typed_writer, unchanged
from tests.gfx942.emulator.wave import LANES, Wave

SELECTIONS = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")


def selection(instruction: Instruction, key: str, default: int) -> list[bool]:
    """One bit per source."""
    sources = len(instruction.operands) - 1
    if key not in instruction.modifiers:
        return [bool(default)] * sources
    listed = [bit == "1" for bit in instruction.modifiers[key].strip("[]").split(",")]
    if len(listed) != sources:
        raise ValueError(f"{key} has {len(listed)} bits, expected {sources}")
    return listed


def pair_readers(operand: str) -> tuple[VectorReader, VectorReader]:
    """Readers of the low and the high 32 bits of a pair of registers; a constant has the low ones only."""
    if register := vector_register(operand) or scalar_register(operand):
        if register[1] != 2:
            raise ValueError(f"{operand} has {register[1]} registers, expected 2")
        if vector_register(operand):
            row = register[0]
            return lambda wave: wave.vector[row], lambda wave: wave.vector[row + 1]
        read = scalar_reader(operand, 64)
        return (lambda wave: np.full(LANES, read(wave) & 0xFFFFFFFF, np.uint32),
                lambda wave: np.full(LANES, read(wave) >> 32, np.uint32))

    def no_high(wave: Wave) -> np.ndarray:
        raise ValueError(f"the high half of the constant {operand} is not defined")

    return vector_reader(operand, 32), no_high


def _half_readers(instruction: Instruction, position: int) -> list[VectorReader]:
    """Readers of the bits of one source for the low and for the high FP32 result."""
    operand = instruction.operands[position]
    halves = pair_readers(operand)
    readers = []
    for result, (select, default, negate) in enumerate((("op_sel", 0, "neg_lo"), ("op_sel_hi", 1, "neg_hi"))):
        high = selection(instruction, select, default)[position - 1]
        if high and constant(operand, 32) is not None:
            raise ValueError(f"{('op_sel', 'op_sel_hi')[result]} selects the high half of a constant")
        readers.append(modified_reader(halves[high], 32, selection(instruction, negate, 0)[position - 1], False))
    return readers


def packed_f32(mnemonic: str, function: Callable, sources: int) -> None:
    """Declare an operation on pairs of FP32: both numbers of all lanes in one call."""

    @decodes(mnemonic)
    def decoder(instruction: Instruction) -> Step:
        instruction.expect_operands(sources + 1)
        instruction.allow(*SELECTIONS, "clamp")
        halves = [_half_readers(instruction, position + 1) for position in range(sources)]
        row, count = vector_register(instruction.operands[0]) or (0, 0)
        if count != 2:
            raise ValueError(f"{instruction.operands[0]} is no pair of vector registers")
        clamp = "clamp" in instruction.flags

        def step(wave: Wave) -> None:
            result = function(*[np.concatenate((low(wave), high(wave))).view(np.float32) for low, high in halves])
            bits = (clamped(result) if clamp else result).view(np.uint32)
            wave.write(row, bits[:LANES])
            wave.write(row + 1, bits[LANES:])

        return step


packed_f32("v_pk_add_f32", lambda a, b: a + b, 2)
packed_f32("v_pk_mul_f32", lambda a, b: a * b, 2)
packed_f32("v_pk_fma_f32", fma, 3)


@decodes("v_pk_mov_b32")
def _pk_mov(instruction: Instruction) -> Step:
    """The low result is a number of source 0, the high one of source 1, both chosen by op_sel."""
    instruction.expect_operands(3)
    instruction.allow("op_sel", "op_sel_hi")
    first, second = selection(instruction, "op_sel", 0)
    low, high = pair_readers(instruction.operands[1])[first], pair_readers(instruction.operands[2])[second]
    row, _ = vector_register(instruction.operands[0])

    def step(wave: Wave) -> None:
        upper = high(wave).copy()  # the low result may overwrite it
        wave.write(row, low(wave))
        wave.write(row + 1, upper)

    return step


def packed_16(mnemonic: str, name: str, function: Callable, sources: int, saturates: bool = False) -> None:
    """Declare an operation on the two 16-bit halves of 32-bit registers."""
    floating = name == "f16"

    @decodes(mnemonic)
    def decoder(instruction: Instruction) -> Step:
        instruction.expect_operands(sources + 1)
        instruction.allow("op_sel", "op_sel_hi", *(("neg_lo", "neg_hi") if floating else ()),
                          *(("clamp",) if floating or saturates else ()))
        readers = [_word_reader(instruction, position + 1, name) for position in range(sources)]
        row, _ = vector_register(instruction.operands[0])
        clamp = "clamp" in instruction.flags
        compute = saturating(function, name) if clamp and not floating else function

        def step(wave: Wave) -> None:
            result = compute(*[read(wave) for read in readers])
            bits = to_bits(clamped(result) if clamp and floating else result, name)
            wave.write(row, bits[:LANES] | bits[LANES:] << np.uint32(16))

        return step


def _word_reader(instruction: Instruction, position: int, name: str) -> VectorReader:
    """Numbers [128]: those of one source for the low results of all lanes, then for the high results."""
    operand = instruction.operands[position]
    inline_float = constant(operand, 16) if "." in operand else None
    read = vector_reader(operand) if inline_float is None else vector_reader(hex(inline_float))
    shifts = [np.uint32(16 * selection(instruction, key, default)[position - 1])
              for key, default in (("op_sel", 0), ("op_sel_hi", 1))]
    signs = [np.uint32(selection(instruction, key, 0)[position - 1] << 15) for key in ("neg_lo", "neg_hi")]

    def numbers(wave: Wave) -> np.ndarray:
        bits = read(wave)
        words = [bits >> shift ^ sign for shift, sign in zip(shifts, signs, strict=True)]
        return to_numbers(np.concatenate(words), name)

    return numbers


packed_16("v_pk_add_f16", "f16", lambda a, b: a + b, 2)
packed_16("v_pk_mul_f16", "f16", lambda a, b: a * b, 2)
packed_16("v_pk_fma_f16", "f16", fma, 3)
packed_16("v_pk_max_f16", "f16", maximum, 2)
packed_16("v_pk_min_f16", "f16", minimum, 2)
for _type in ("i16", "u16"):
    packed_16(f"v_pk_add_{_type}", _type, lambda a, b: a + b, 2, saturates=True)
    packed_16(f"v_pk_sub_{_type}", _type, lambda a, b: a - b, 2, saturates=True)
    packed_16(f"v_pk_mad_{_type}", _type, lambda a, b, c: a * b + c, 3, saturates=True)
    packed_16(f"v_pk_max_{_type}", _type, np.maximum, 2)
    packed_16(f"v_pk_min_{_type}", _type, np.minimum, 2)
packed_16("v_pk_mul_lo_u16", "u16", lambda a, b: a * b, 2)
packed_16("v_pk_lshlrev_b16", "u16", lambda a, b: b << (a & np.uint16(15)), 2)
packed_16("v_pk_lshrrev_b16", "u16", lambda a, b: b >> (a & np.uint16(15)), 2)
packed_16("v_pk_ashrrev_i16", "i16", lambda a, b: b >> (a & np.int16(15)), 2)

# ---- FP32 arithmetic whose sources may be FP16 ----------------------------------------------------------------------


@decodes("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def _fma_mix(instruction: Instruction) -> Step:
    """op_sel_hi marks the sources that are FP16, op_sel those that are in the high half."""
    instruction.expect_operands(4)
    instruction.allow("op_sel", "op_sel_hi", "clamp")
    halves = selection(instruction, "op_sel_hi", 0)
    if any(high and not half for high, half in zip(selection(instruction, "op_sel", 0), halves, strict=True)):
        raise ValueError("op_sel of a source that is FP32")
    a, b, c = (typed_reader(instruction, k + 1, "f16" if half else "f32") for k, half in enumerate(halves))

    def compute(wave: Wave) -> np.ndarray:
        return fma_to_odd(*(read(wave).astype(np.float32) for read in (a, b, c)))

    if instruction.mnemonic == "v_fma_mix_f32":
        write = typed_writer(instruction, 0, "f32")
        return lambda wave: write(wave, compute(wave).astype(np.float32))
    row, _ = vector_register(instruction.operands[0])
    write = half_writer(row, instruction.mnemonic == "v_fma_mixhi_f16")
    clamp = clamped if "clamp" in instruction.flags else unchanged
    return lambda wave: write(wave, to_bits(clamp(compute(wave).astype(np.float16)), "f16"))
