"""Where memory instructions go: the address of each lane, from registers, offsets and buffer descriptors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.memory import PARTS
from tests.gfx942.emulator.operand import scalar_reader, scalar_register, vector_register
from tests.gfx942.emulator.wave import LANES, Wave

# int64 [64] addresses, and bool [c, 64]: which of a lane's words exist; None when all do. Of a buffer, a word past its
# end does not exist: it reads as zero and is not written.
Place = tuple[np.ndarray, np.ndarray | None]
Places = Callable[[Wave], Place]

SCOPES = "sc0 sc1 nt"  # cache hints and scopes: memory here is always coherent


def check(instruction: Instruction, operands: int, modifiers: str = "") -> None:
    """Raise ValueError unless the instruction has so many operands and no modifier or flag but these."""
    instruction.expect_operands(operands)
    instruction.allow(*modifiers.split())


def registers(operand: str, count: int) -> int:
    """The first row of `count` vector registers; ValueError for anything else."""
    found = vector_register(operand)
    if found is None or found[1] != count:
        raise ValueError(f"{operand} is not {count} vector registers")
    return found[0]


def lds_places(operand: str, offset: int = 0) -> Places:
    """One LDS address per lane: a 32-bit register plus an offset."""
    row = registers(operand, 1)
    return lambda wave: (wave.vector[row].astype(np.int64) + offset, None)


def global_places(instruction: Instruction, address: str, base: str = "off") -> Places:
    """64-bit registers, or a scalar base and a 32-bit unsigned register, plus a signed offset."""
    offset = instruction.offset()
    if base == "off":
        row = registers(address, 2)
        return lambda wave: (_pairs(wave.vector[row : row + 2]) + offset, None)
    row = registers(address, 1)
    first, _ = scalar_register(base)
    return lambda wave: (wave.vector[row].astype(np.int64) + (signed_address(wave.read_sgprs(first, 2)) + offset), None)


def buffer_places(instruction: Instruction, width: int, count: int) -> Places:
    """Raw buffers: address = base + soffset + voffset + offset, the last three checked word by word against the size.

    A stride in the descriptor is a hint to the cache, unless lanes are indexed or the buffer is swizzled.
    """
    address, descriptor, scalar_offset = instruction.operands[-3:]
    offset = instruction.offset()
    first, _ = scalar_register(descriptor)
    soffset = scalar_reader(scalar_offset)
    indexed, offset_row = "idxen" in instruction.flags, None
    if "offen" in instruction.flags:
        offset_row = registers(address, 2 if indexed else 1) + indexed
    last = width * (count - 1)
    none = np.zeros(LANES, np.int64)

    def places(wave: Wave) -> Place:
        base, size = read_descriptor(wave, first, indexed)
        at = (none if offset_row is None else wave.vector[offset_row].astype(np.int64)) + (soffset(wave) + offset)
        exists = None if at.max() + last < size else at + width * PARTS[:count] < size
        return at + base, exists

    return places


def read_descriptor(wave: Wave, first: int, indexed: bool = False) -> tuple[int, int]:
    """Base address and bytes of the buffer that four SGPRs describe."""
    low, high, size, options = wave.scalar[first : first + 4]
    if high >> 31 or options >> 23 & 1 or indexed and high >> 16 & 0x3FFF:
        raise ValueError(f"the buffer descriptor {low:#x} {high:#x} {size:#x} {options:#x} is swizzled, adds lane "
                         "numbers or is indexed with a stride: expected a raw buffer")
    return low | (high & 0xFFFF) << 32, size


def signed_address(value: int) -> int:
    """64 bits as int64: addresses that no memory has stay comparable."""
    return value - (value >> 63 << 64)


def _pairs(words: np.ndarray) -> np.ndarray:
    """uint32 [2, 64], low words first, as int64 [64]."""
    return words.T.copy().view(np.int64)[:, 0]
