"""Lanes that read one another: DPP moves, swizzles, permutes, single lanes and lane counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.gfx942.emulator.addressing import check, registers
from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.operand import scalar_reader, scalar_register, vector_reader, vector_register
from tests.gfx942.emulator.table import Step, decodes
from tests.gfx942.emulator.wave import LANES, Wave

LANE = np.arange(LANES)
ROW, IN_ROW = LANE // 16, LANE % 16
HALF = 32  # ds_swizzle moves within groups of 32 lanes


# ---- DPP ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class DppMove:
    """Source 0 of a DPP instruction: lane k takes lane source[k]'s value.

    A source lane that is outside the row or not active is invalid: it counts as zero with `zero` (bound_ctrl), else
    the reading lane is not written. Nor are lanes left out by row_mask and bank_mask.
    """

    source: np.ndarray  # int [64]; -1 is outside
    enabled: np.ndarray  # bool [64], row_mask and bank_mask
    zero: bool

    def __call__(self, wave: Wave, values: np.ndarray, old: np.ndarray) -> np.ndarray:
        """The moved `values` [64]; `old` in lanes that `writes` leaves out, zero for invalid sources."""
        moved = np.where(self._valid(wave), values[self.source], values.dtype.type(0))
        return np.where(self.writes(wave), moved, old)

    def writes(self, wave: Wave) -> np.ndarray:
        """bool [64]: the lanes that this instruction may write, exec apart."""
        return self.enabled if self.zero else self.enabled & self._valid(wave)

    def _valid(self, wave: Wave) -> np.ndarray:
        return (self.source >= 0) & wave.active[self.source]


def _row_shift(shift: int) -> np.ndarray:
    inner = IN_ROW + shift
    return np.where((inner >= 0) & (inner < 16), LANE + shift, -1)


def _wave_shift(shift: int) -> np.ndarray:
    return np.where((LANE + shift >= 0) & (LANE + shift < LANES), LANE + shift, -1)


DPP_CONTROLS: dict[str, Callable[[int], np.ndarray]] = {
    "row_shl": _row_shift,
    "row_shr": lambda n: _row_shift(-n),
    "row_ror": lambda n: ROW * 16 + (IN_ROW - n) % 16,
    "row_newbcast": lambda n: ROW * 16 + n,
    "row_bcast": lambda n: np.where(LANE > n, (LANE // (n + 1)) * (n + 1) - 1, -1),  # 15: rows, 31: halves
    "wave_shl": _wave_shift,
    "wave_shr": lambda n: _wave_shift(-n),
    "wave_rol": lambda n: (LANE + n) % LANES,
    "wave_ror": lambda n: (LANE - n) % LANES,
}
DPP_FLAGS = {"row_mirror": ROW * 16 + 15 - IN_ROW, "row_half_mirror": LANE // 8 * 8 + 7 - LANE % 8}
DPP_WORDS = {*DPP_CONTROLS, *DPP_FLAGS, "quad_perm"}


def dpp_move(instruction: Instruction) -> DppMove | None:
    """How source 0 of the instruction moves between lanes; None when it does not."""
    source = None
    for name, value in instruction.modifiers.items():
        if name == "quad_perm":
            inner = np.array([int(x) for x in value.strip("[]").split(",")])
            source = LANE // 4 * 4 + inner[LANE % 4]
        elif name in DPP_CONTROLS:
            source = DPP_CONTROLS[name](int(value))
    for name in DPP_FLAGS.keys() & instruction.flags:
        source = DPP_FLAGS[name]
    if source is None:
        if "dpp" in instruction.encoding:
            raise ValueError("no DPP control known")
        return None
    rows, banks = (int(instruction.modifiers.get(key, "0xf"), 0) for key in ("row_mask", "bank_mask"))
    enabled = (rows >> ROW & 1 == 1) & (banks >> IN_ROW // 4 & 1 == 1)
    return DppMove(source, enabled, "bound_ctrl" in instruction.modifiers)


# ---- swizzle and permute --------------------------------------------------------------------------------------------

def swizzle_source(offset: int) -> np.ndarray:
    """The lane that each lane reads under ds_swizzle's 16-bit pattern, by the manual's pseudocode."""
    inner = LANE % HALF
    if offset >= 0xE000:  # the butterfly order of an FFT
        mask = offset & 31
        reversed_bits = sum((inner >> k & 1) << (4 - k) for k in range(5))
        inner = reversed_bits >> mask.bit_count() | inner & mask
    elif offset >= 0xC000:  # rotate
        mask, shift = offset & 31, offset >> 5 & 31
        inner = inner & mask | inner + (-shift if offset & 0x400 else shift) & 31 & ~mask
    elif offset & 0x8000:  # any order within four lanes
        inner = inner & ~3 | offset >> 2 * (inner & 3) & 3
    else:
        inner = (inner & offset & 31 | offset >> 5 & 31) ^ offset >> 10 & 31
    return LANE & ~(HALF - 1) | inner


def swizzle_pattern(value: str) -> int:
    """The 16-bit pattern of `swizzle(SWAP,16)` and its like, or of a plain number."""
    found = re.fullmatch(r"swizzle\((\w+),(.*)\)", value)
    if not found:
        return int(value, 0)
    mode, arguments = found[1], found[2].replace(" ", "").split(",")
    if mode == "BITMASK_PERM":  # per bit of the lane, high first: 0, 1, p(reserve), i(nvert)
        letters = arguments[0].strip("\"'")
        keep, one, flip = (sum((letter in kind) << (4 - k) for k, letter in enumerate(letters))
                           for kind in ("pi", "1", "i"))
        return keep | one << 5 | flip << 10
    numbers = [int(argument, 0) for argument in arguments]
    if mode == "QUAD_PERM":
        return 0x8000 | sum(number << 2 * k for k, number in enumerate(numbers))
    if mode == "BROADCAST":
        size, lane = numbers
        return 31 & ~(size - 1) | lane << 5
    if mode in ("SWAP", "REVERSE"):
        flip = numbers[0] if mode == "SWAP" else numbers[0] - 1
        return 31 | flip << 10
    raise ValueError(f"no swizzle {value}")


@decodes("ds_swizzle_b32")
def _swizzle(instruction: Instruction) -> Step:
    check(instruction, 2, "offset")
    row, data = (registers(operand, 1) for operand in instruction.operands)
    source = swizzle_source(swizzle_pattern(instruction.modifiers.get("offset", "0")))
    return lambda wave: wave.write(row, np.where(wave.active, wave.vector[data], 0)[source])


@decodes("ds_bpermute_b32", "ds_permute_b32")
def _permute(instruction: Instruction) -> Step:
    """Pull from, or push to, the lane at a quarter of the address; lanes that are not active give nothing: zero."""
    check(instruction, 3, "offset")
    row, address, data = (registers(operand, 1) for operand in instruction.operands)
    offset = instruction.offset()

    def pull(wave: Wave) -> None:
        lane = (wave.vector[address].astype(np.int64) + offset) // 4 % LANES
        wave.write(row, np.where(wave.active, wave.vector[data], 0)[lane])

    def push(wave: Wave) -> None:
        lane = (wave.vector[address].astype(np.int64) + offset) // 4 % LANES
        received = np.zeros(LANES, np.uint32)
        received[lane[wave.active]] = wave.vector[data][wave.active]  # of two senders the higher lane wins
        wave.write(row, received)

    return pull if "bpermute" in instruction.mnemonic else push


# ---- single lanes and counts ----------------------------------------------------------------------------------------

@decodes("v_readlane_b32")
def _readlane(instruction: Instruction) -> Step:
    check(instruction, 3)
    target, source, lane = instruction.operands
    first, row, read = _sgpr(target), registers(source, 1), scalar_reader(lane)
    return lambda wave: wave.write_sgprs(first, 1, int(wave.vector[row, read(wave) % LANES]))


@decodes("v_readfirstlane_b32")
def _readfirstlane(instruction: Instruction) -> Step:
    check(instruction, 2)
    first, row = _sgpr(instruction.operands[0]), registers(instruction.operands[1], 1)

    def step(wave: Wave) -> None:
        lane = (wave.exec & -wave.exec).bit_length() - 1 if wave.exec else 0
        wave.write_sgprs(first, 1, int(wave.vector[row, lane]))

    return step


@decodes("v_writelane_b32")
def _writelane(instruction: Instruction) -> Step:
    check(instruction, 3)
    target, value, lane = instruction.operands
    row, read, where = registers(target, 1), scalar_reader(value), scalar_reader(lane)

    def step(wave: Wave) -> None:
        wave.vector[row, where(wave) % LANES] = read(wave)

    return step


@decodes("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def _mbcnt(instruction: Instruction) -> Step:
    """Count the bits of source 0 that belong to lanes below this one, in the low or high half; add source 1."""
    check(instruction, 3)
    row, _ = vector_register(instruction.operands[0])
    bits, base = (vector_reader(operand) for operand in instruction.operands[1:])
    start = HALF if "_hi_" in instruction.mnemonic else 0
    below = np.array([(1 << min(max(lane - start, 0), HALF)) - 1 for lane in range(LANES)], np.uint32)
    return lambda wave: wave.write(row, np.bitwise_count(bits(wave) & below).astype(np.uint32) + base(wave))


def _sgpr(operand: str) -> int:
    found = scalar_register(operand)
    if found is None or found[1] != 1:
        raise ValueError(f"{operand} is no single SGPR")
    return found[0]
