"""Scalar instructions that steer the wave: branches, barriers, the end, and what has no effect here."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.scalar import scalar_destination, typed_scalar
from tests.gfx942.emulator.table import Step, UnknownInstruction, decodes
from tests.gfx942.emulator.types import signed
from tests.gfx942.emulator.wave import VCC, Wave

INSTRUCTION_BYTES = 4  # of a branch; what the program counter adds before the offset
MODE = 0x3F0  # round to nearest even, denormals kept everywhere, NaN clamps to 0, IEEE: the only mode that is modelled
CLOCK_STEP = 4  # cycles per instruction, as far as a kernel that waits by the clock can tell


class Trap(Exception):
    """The kernel ran into s_trap."""


def target(instruction: Instruction, position: int = 0) -> int:
    """Address that a branch goes to: its 16-bit offset counts words from the next instruction."""
    words = signed(int(instruction.operands[position], 0), 16)
    return instruction.address + INSTRUCTION_BYTES + 4 * words


def _vcc(wave: Wave) -> int:
    return wave.read_sgprs(VCC, 2)


CONDITIONS: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda wave: True,
    "s_cbranch_scc0": lambda wave: wave.scc == 0,
    "s_cbranch_scc1": lambda wave: wave.scc == 1,
    "s_cbranch_vccz": lambda wave: _vcc(wave) == 0,
    "s_cbranch_vccnz": lambda wave: _vcc(wave) != 0,
    "s_cbranch_execz": lambda wave: wave.exec == 0,
    "s_cbranch_execnz": lambda wave: wave.exec != 0,
}


@decodes(*CONDITIONS)
def _branch(instruction: Instruction) -> Step:
    instruction.expect_operands(1)
    instruction.allow()
    condition, address = CONDITIONS[instruction.mnemonic], target(instruction)

    def step(wave: Wave) -> None:
        if condition(wave):
            wave.pc = wave.program.at(address)

    return step


@decodes("s_getpc_b64")
def _getpc(instruction: Instruction) -> Step:
    instruction.expect_operands(1)
    first, count, _ = scalar_destination(instruction, "b64")
    return lambda wave: wave.write_sgprs(first, count, instruction.address + INSTRUCTION_BYTES)


@decodes("s_setpc_b64")
def _setpc(instruction: Instruction) -> Step:
    instruction.expect_operands(1)
    read = typed_scalar(instruction.operands[0], "b64")

    def step(wave: Wave) -> None:
        wave.pc = wave.program.at(read(wave))

    return step


@decodes("s_swappc_b64", "s_call_b64")
def _call(instruction: Instruction) -> Step:
    instruction.expect_operands(2)
    first, count, _ = scalar_destination(instruction, "b64")
    if instruction.mnemonic == "s_call_b64":
        address = target(instruction, 1)

        def read(wave: Wave) -> int:
            return address
    else:
        read = typed_scalar(instruction.operands[1], "b64")

    def step(wave: Wave) -> None:
        goal = read(wave)
        wave.write_sgprs(first, count, instruction.address + INSTRUCTION_BYTES)
        wave.pc = wave.program.at(goal)

    return step


@decodes("s_endpgm")
def _end(instruction: Instruction) -> Step:
    def step(wave: Wave) -> None:
        wave.done = True

    return step


@decodes("s_barrier", "s_sleep")
def _wait(instruction: Instruction) -> Step:
    kind = "barrier" if instruction.mnemonic == "s_barrier" else "spin"

    def step(wave: Wave) -> None:
        wave.waits = kind

    return step


@decodes("s_waitcnt", "s_nop", "s_setprio", "s_icache_inv")
def _nothing(instruction: Instruction) -> Step:
    """Order, timing and caches are not modelled."""
    return lambda wave: None


@decodes("s_trap")
def _trap(instruction: Instruction) -> Step:
    def step(wave: Wave) -> None:
        raise Trap(f"{instruction.text!r} at {instruction.address:#x}")

    return step


@decodes("s_sethalt")
def _halt(instruction: Instruction) -> Step:
    if instruction.operands != ("0",):
        raise ValueError("a wave that halts would never go on")
    return lambda wave: None


@decodes("s_memtime", "s_memrealtime")
def _time(instruction: Instruction) -> Step:
    instruction.expect_operands(1)
    first, count, _ = scalar_destination(instruction, "b64")
    return lambda wave: wave.write_sgprs(first, count, CLOCK_STEP * wave.executed)


def _mode_field(operand: str) -> tuple[int, int]:
    """(first bit, mask) of hwreg(HW_REG_MODE, first, size)."""
    found = re.fullmatch(r"hwreg\(HW_REG_MODE(?:,(\d+),(\d+))?\)", operand)
    if not found:
        raise ValueError(f"hardware register {operand} is not modelled")
    return int(found[1] or 0), (1 << int(found[2] or 32)) - 1


@decodes("s_getreg_b32")
def _getreg(instruction: Instruction) -> Step:
    instruction.expect_operands(2)
    register, count, _ = scalar_destination(instruction, "b32")
    first, mask = _mode_field(instruction.operands[1])
    return lambda wave: wave.write_sgprs(register, count, MODE >> first & mask)


@decodes("s_setreg_b32", "s_setreg_imm32_b32")
def _setreg(instruction: Instruction) -> Step:
    """Accepts the mode that is modelled; the bits above those of MODE turn on exceptions, of which there are none."""
    instruction.expect_operands(2)
    first, mask = _mode_field(instruction.operands[0])
    read = typed_scalar(instruction.operands[1], "b32")
    modelled = mask & (0x3FF >> first)

    def step(wave: Wave) -> None:
        value = read(wave)
        if (value ^ MODE >> first) & modelled:
            raise UnknownInstruction(f"{instruction.text!r} at {instruction.address:#x} sets mode bits to {value:#x}, "
                                     f"expected {MODE >> first & mask:#x}: only that mode is modelled")

    return step
