"""Vector instructions: how one is declared, and those that only move values.

A plain instruction is a function of numpy arrays of 64 lanes, declared with the types of its result and its sources:

    vector("v_add_u32", "u32", "u32 u32", lambda a, b: a + b)

Source modifiers (neg, abs, op_sel, SDWA selections, DPP moves) are applied before the function; clamp, SDWA and op_sel
of the result after it. The output modifiers mul:2, mul:4 and div:2 are refused: the hardware ignores them in the mode
that is modelled (IEEE, denormals kept), so code that has one expects another mode.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.lanes import DPP_WORDS, DppMove, dpp_move
from tests.gfx942.emulator.operand import (
    ScalarReader,
    VectorReader,
    is_float,
    modified_reader,
    scalar_reader,
    scalar_register,
    source_modifiers,
    vector_reader,
    vector_register,
)
from tests.gfx942.emulator.table import Step, decodes
from tests.gfx942.emulator.types import TYPES, to_bits, to_numbers
from tests.gfx942.emulator.wave import Wave, bits_of

Function = Callable[..., np.ndarray]
Writer = Callable[[Wave, np.ndarray], None]

SDWA_SOURCES = ("src0_sel", "src1_sel")
SDWA_WORDS = {*SDWA_SOURCES, "dst_sel", "dst_unused"}
PARTS = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16),
         "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8)}  # name -> (first bit, bits)

# Operations that write half a register and keep the other half; all others with 16 bits zero the high half.
KEEP_OTHER_HALF = {"v_mad_u16", "v_mad_i16", "v_mad_f16", "v_fma_f16", "v_div_fixup_f16"}


def vector(mnemonics: str, result: str, sources: str, function: Function, *, accumulates: bool = False,
           saturates: bool = False, op_sel: bool = False) -> None:
    """Declare instructions `mnemonics` (space-separated) whose lanes are function(*sources).

    accumulates: the last source is the destination. saturates: an integer function of + - * that may be clamped.
    op_sel: 16-bit sources and the result may be the high halves.
    """
    types = sources.split()
    count = len(types) + (not accumulates)

    @decodes(*mnemonics.split())
    def decoder(instruction: Instruction) -> Step:
        instruction.expect_operands(count)
        allow_modifiers(instruction, clamp=is_float(result) or saturates, op_sel=op_sel)
        integer_clamp = "clamp" in instruction.flags and not is_float(result)
        readers = [typed_reader(instruction, k + 1, name) for k, name in enumerate(types[:count - 1])]
        if accumulates:
            readers.append(typed_reader(instruction, 0, types[-1], source=None))
        write = typed_writer(instruction, 0, result)
        return make_step(saturating(function, result) if integer_clamp else function, readers, write)


def make_step(function: Function, readers: list[VectorReader], write: Writer) -> Step:
    """One call per step: unrolled for up to three sources, which is what nearly all instructions have."""
    if len(readers) == 1:
        (a,) = readers
        return lambda wave: write(wave, function(a(wave)))
    if len(readers) == 2:
        a, b = readers
        return lambda wave: write(wave, function(a(wave), b(wave)))
    if len(readers) == 3:
        a, b, c = readers
        return lambda wave: write(wave, function(a(wave), b(wave), c(wave)))
    return lambda wave: write(wave, function(*[read(wave) for read in readers]))


def saturating(function: Function, name: str) -> Function:
    """The exact integer result of `function`, clamped to the range of type `name`."""
    limits = np.iinfo(TYPES[name][1])
    return lambda *sources: np.clip(function(*[source.astype(np.int64) for source in sources]), limits.min, limits.max)


def allow_modifiers(instruction: Instruction, clamp: bool = False, op_sel: bool = False) -> None:
    """Raise ValueError for modifiers that this encoding has not, or that the reader and writer would not apply."""
    words: set[str] = {"clamp"} if clamp and instruction.encoding in ("e64", "", "sdwa") else set()
    if op_sel:
        words.add("op_sel")
    if instruction.encoding == "sdwa":
        words |= SDWA_WORDS
    if instruction.encoding == "dpp":
        words |= DPP_WORDS | {"row_mask", "bank_mask", "bound_ctrl"}
    if {"mul", "div"} & instruction.modifiers.keys():
        raise ValueError("an output modifier has no effect with IEEE mode and denormals, which are modelled")
    instruction.allow(*words)


def typed_reader(instruction: Instruction, position: int, name: str, source: int | None = -1) -> VectorReader:
    """Reads operand `position` as numbers of type `name`.

    `source` is its index among the sources (-1: position - 1), which selects its op_sel bit and its SDWA or DPP
    modifiers; None for an operand without any, such as the accumulator.
    """
    source = position - 1 if source == -1 else source
    bits, _ = TYPES[name]
    operand = instruction.operands[position]
    extend = operand.startswith("sext(")
    operand, negate, absolute = source_modifiers(operand[5:-1] if extend else operand, name)
    read = vector_reader(operand, bits, is_float(name), name == "i64")
    if source is not None:
        read = _selected_reader(instruction, read, source, bits, extend)
    read = modified_reader(read, bits, negate, absolute)
    if bits == 16:
        _, dtype = TYPES[name]
        return lambda wave: read(wave).astype(np.uint16).view(dtype)
    if name in ("b32", "u32", "b64", "u64"):
        return read
    return lambda wave: to_numbers(read(wave), name)


def _selected_reader(instruction: Instruction, read: VectorReader, source: int, bits: int,
                     extend: bool) -> VectorReader:
    """The part of a source that op_sel, SDWA or DPP selects."""
    if instruction.encoding == "sdwa" and source < 2:
        first, size = PARTS[instruction.modifiers.get(SDWA_SOURCES[source], "DWORD")]
        if size == 32:
            return read
        up, down = np.uint32(32 - first - size), np.uint32(32 - size)
        if extend:
            return lambda wave: ((read(wave) << up).view(np.int32) >> down.astype(np.int32)).view(np.uint32)
        return lambda wave: read(wave) << up >> down
    if extend:
        raise ValueError("sext outside SDWA")
    if instruction.encoding == "dpp" and source == 0:
        move = dpp_move(instruction)
        return lambda wave: _moved(move, wave, read(wave))
    if bits == 16 and op_sel_bit(instruction, source):
        return lambda wave: read(wave) >> np.uint32(16)
    return read


def _moved(move: DppMove, wave: Wave, values: np.ndarray) -> np.ndarray:
    return move(wave, values, values)  # lanes that are not to be written do not matter: the writer leaves them out


def op_sel_bit(instruction: Instruction, index: int) -> bool:
    """Bit `index` of op_sel: a source's, or with -1 the result's, which is printed only when it is set."""
    listed = instruction.modifiers.get("op_sel", "[]").strip("[]").split(",")
    sources = len(instruction.operands) - 1
    if index < 0:
        index = sources
    return index < len(listed) and listed[index] == "1"


def typed_writer(instruction: Instruction, position: int, name: str) -> Writer:
    """Writes numbers of type `name` into operand `position` in the active lanes, clamped to 0..1 if it is so marked."""
    row, count = _destination(instruction, position)
    size, dtype = TYPES[name]
    clamp = "clamp" in instruction.flags and is_float(name)
    wanted = max(size, 32) // 32
    if count != wanted:
        raise ValueError(f"result {instruction.operands[position]} has {count} registers, expected {wanted}")
    if size == 64:
        write = _pair_writer(row)
    elif instruction.encoding == "sdwa" and instruction.modifiers.get("dst_sel", "DWORD") != "DWORD":
        write = _part_writer(instruction, row)
    elif instruction.encoding == "dpp":
        move = dpp_move(instruction)
        return lambda wave, numbers: wave.write(row, to_bits(numbers, name), move.writes(wave))
    elif size == 16 and instruction.mnemonic in KEEP_OTHER_HALF:
        write = half_writer(row, op_sel_bit(instruction, -1))
    elif op_sel_bit(instruction, -1):
        raise ValueError("op_sel of a result whose other half this instruction would zero")
    elif size == 32 and not clamp:
        return lambda wave, numbers: wave.write(row, to_bits(numbers, name))
    else:
        def write(wave: Wave, bits: np.ndarray) -> None:
            wave.write(row, bits)
    if clamp:
        return lambda wave, numbers: write(wave, to_bits(clamped(numbers), name))
    return lambda wave, numbers: write(wave, to_bits(numbers, name))


def clamped(numbers: np.ndarray) -> np.ndarray:
    """Floats within 0..1; NaN and -0 become 0."""
    one = numbers.dtype.type(1)
    return np.where(numbers > 0, np.minimum(numbers, one), numbers.dtype.type(0))


def _destination(instruction: Instruction, position: int) -> tuple[int, int]:
    register = vector_register(instruction.operands[position])
    if register is None:
        raise ValueError(f"{instruction.operands[position]} is no vector register")
    return register


def _pair_writer(row: int) -> Writer:
    def write(wave: Wave, bits: np.ndarray) -> None:
        wave.write(row, bits.astype(np.uint32))
        wave.write(row + 1, (bits >> np.uint64(32)).astype(np.uint32))

    return write


def half_writer(row: int, high: bool) -> Writer:
    keep, shift = (np.uint32(0xFFFF), np.uint32(16)) if high else (np.uint32(0xFFFF0000), np.uint32(0))
    return lambda wave, bits: wave.write(row, wave.vector[row] & keep | bits << shift)


def _part_writer(instruction: Instruction, row: int) -> Writer:
    """SDWA: the low bits of the result become a byte or word of the register; dst_unused says what the rest becomes."""
    first, size = PARTS[instruction.modifiers["dst_sel"]]
    part = np.uint32((1 << size) - 1)
    shift = np.uint32(first)
    unused = instruction.modifiers.get("dst_unused", "UNUSED_PAD")
    if unused == "UNUSED_PAD":
        return lambda wave, bits: wave.write(row, (bits & part) << shift)
    if unused == "UNUSED_PRESERVE":
        keep = ~(part << shift)
        return lambda wave, bits: wave.write(row, wave.vector[row] & keep | (bits & part) << shift)
    if unused == "UNUSED_SEXT":
        up = np.int32(32 - size)
        down = np.int32(32 - size - first)
        return lambda wave, bits: wave.write(row, (bits.view(np.int32) << up >> down).view(np.uint32))
    raise ValueError(f"no dst_unused:{unused}")


def lane_mask_reader(operand: str) -> ScalarReader:
    """Reads a pair of SGPRs as a mask of lanes."""
    if (register := scalar_register(operand)) and register[1] != 2:
        raise ValueError(f"mask {operand} has {register[1]} registers, expected 2")
    return scalar_reader(operand, 64)


def lane_mask_writer(operand: str) -> Callable[[Wave, int], None]:
    """Writes a mask of lanes into a pair of SGPRs, or into vcc or exec."""
    register = scalar_register(operand)
    if register is None or register[1] != 2:
        raise ValueError(f"{operand} is no pair of SGPRs")
    first = register[0]
    return lambda wave, mask: wave.write_sgprs(first, 2, mask)


# ---- moves ----------------------------------------------------------------------------------------------------------

def unchanged(a: np.ndarray) -> np.ndarray:
    return a


vector("v_mov_b32 v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32", "b32", "b32", unchanged)
vector("v_mov_b64", "b64", "b64", unchanged)


@decodes("v_nop")
def _nop(instruction: Instruction) -> Step:
    instruction.expect_operands(0)
    return lambda wave: None


@decodes("v_swap_b32")
def _swap(instruction: Instruction) -> Step:
    instruction.expect_operands(2)
    instruction.allow()
    (one, _), (other, _) = (_destination(instruction, position) for position in (0, 1))

    def step(wave: Wave) -> None:
        first = wave.vector[one].copy()
        wave.write(one, wave.vector[other])
        wave.write(other, first)

    return step


@decodes("v_cndmask_b32")
def _cndmask(instruction: Instruction) -> Step:
    """Source 1 where the mask is set, else source 0. Typed as floats, whose signs neg and abs change bit by bit."""
    instruction.expect_operands(4)
    allow_modifiers(instruction)
    a, b = (typed_reader(instruction, position, "f32") for position in (1, 2))
    mask, write = lane_mask_reader(instruction.operands[3]), typed_writer(instruction, 0, "f32")
    return lambda wave: write(wave, np.where(bits_of(mask(wave)), b(wave), a(wave)))
