"""Runs gfx942 code objects on the CPU, instruction by instruction, from their own disassembly.

What is modelled: registers, exec mask, LDS, barriers, memory with bounds, several workgroups and launches that wait for
each other, and each instruction's result as the CDNA3 instruction set manual gives it. An MFMA adds its products with K
ascending, one rounding each. An instruction that is not known, and an access outside memory that was given, raise.
What is not: time, wait counts, hazards, caches and memory order. That a kernel runs here says what it computes.

    memory.py       bytes at addresses; LDS
    instruction.py  a line of disassembly: mnemonic, operands, modifiers
    operand.py      what an operand reads and writes
    wave.py         the state of 64 lanes
    table.py        which mnemonic is decoded by what
    types.py, rounding.py   numbers as bits; arithmetic that numpy does not have
    scalar.py, control.py   scalar instructions
    vector.py, integer.py, floating.py, division.py, compare.py, convert.py, packed.py   vector instructions
    lanes.py, memory_ops.py, addressing.py, atomics.py, matrix.py   instructions across lanes, on memory, and of the
                    matrix unit
    device.py       launches: kernel arguments, workgroups, barriers
"""

from tests.gfx942.emulator.device import Deadlock, Device, Launch
from tests.gfx942.emulator.memory import OutsideMemory
from tests.gfx942.emulator.table import UnknownInstruction

__all__ = ["Deadlock", "Device", "Launch", "OutsideMemory", "UnknownInstruction"]
