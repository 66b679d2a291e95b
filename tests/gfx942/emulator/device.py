"""Launches: kernel arguments, workgroups, waves and barriers.

The waves of a workgroup run one after another, each until it ends, meets a barrier, sleeps in a spin, or has run for
QUANTUM instructions; so do the workgroups of launches that run together. Both orders of waves and workgroups can be
asked for: a kernel whose result depends on the order has a race.
"""

from __future__ import annotations

import functools
import itertools
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlk.build.code_object import Kernel, read_code_object
from tests.gfx942.emulator.memory import LocalMemory, Memory, OutsideMemory
from tests.gfx942.emulator.table import Step, UnknownInstruction, decode, load_instructions
from tests.gfx942.emulator.wave import LANES, Wave

IEEE_754 = 0xF0  # round to nearest even, denormals kept
LDS_BYTES = 65536  # of one workgroup on gfx942
PRELOAD_PROLOGUE = 256  # bytes: code for firmware that does not preload kernel arguments, skipped by one that does
# bits of the descriptor's kernel_code_properties: user SGPRs that the dispatch fills, in this order
DISPATCH_POINTER, KERNARG_POINTER, DISPATCH_ID = 1 << 1, 1 << 3, 1 << 4
OTHER_SGPRS = 0x7F & ~(DISPATCH_POINTER | KERNARG_POINTER | DISPATCH_ID)
QUANTUM = 10_000  # instructions of one wave until others get a turn, so that a spin that never sleeps ends too
# Instructions, all waves together, without one change of global memory: nobody is going to end a spin any more. A
# time-out inside the kernel is reached first when it is shorter than the clock's step times the wave's share of these.
IDLE_INSTRUCTIONS = 3_000_000


class Deadlock(Exception):
    """Waves wait for something that no wave does."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `args` in the order of the metadata: integers, floats, addresses, or bytes of a struct."""

    path: Path | str
    kernel: str
    grid: tuple[int, int, int]  # workgroups
    block: int | tuple[int, int, int]  # lanes of a workgroup
    args: tuple
    shared: int = 0  # bytes of dynamic LDS (Triton's metadata.shared)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Lanes of a workgroup in x, y and z."""
        return (self.block, 1, 1) if isinstance(self.block, int) else self.block

    @property
    def lanes(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]


@dataclass
class Program:
    """A kernel's steps in order of address."""

    kernel: Kernel
    steps: list[Step]
    index: dict[int, int]  # address -> position in steps

    def at(self, address: int) -> int:
        try:
            return self.index[address]
        except KeyError:
            raise UnknownInstruction(f"{self.kernel.name} jumps to {address:#x}, no instruction of it") from None

    def where(self, position: int) -> str:
        """Names an instruction: kernel, address and text."""
        address, text = self.kernel.instructions[min(position, len(self.steps) - 1)]
        return f"{self.kernel.name} at {address:#x}, {text!r}"


launched: set[tuple[Path, str]] = set()  # every (code object, kernel) that ran in this process


class Device:
    """A gfx942 with `size` bytes of memory."""

    def __init__(self, wave_order: str = "forward", size: int = 1 << 24) -> None:
        if wave_order not in ("forward", "reverse"):
            raise ValueError(f"wave_order is {wave_order!r}, expected 'forward' or 'reverse'")
        self.wave_order = wave_order
        self.memory = Memory(size)
        self.executed = 0  # wave-instructions so far
        self._changes, self._changed_at = 0, 0  # memory.changes, and `executed`, when memory last changed

    def put(self, array: np.ndarray) -> int:
        """Copy an array into new memory; returns its address."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.memory.allocate(len(raw))
        self.memory.bytes[address : address + len(raw)] = raw
        return address

    def get(self, address: int, shape, dtype) -> np.ndarray:
        """A copy of the array at `address`."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        if not self.memory.contains(address, size):
            raise OutsideMemory(f"{size} bytes at {address:#x} lie outside every allocation of {self.memory.name}")
        return self.memory.bytes[address : address + size].copy().view(dtype).reshape(shape)

    def launch(self, path, kernel: str, grid, block, args, shared: int = 0) -> None:
        """Run one kernel to its end."""
        self.launch_together([Launch(path, kernel, tuple(grid), block, tuple(args), shared)])

    def launch_together(self, launches: list[Launch]) -> None:
        """Run kernels that may wait for each other, their workgroups taking turns.

        Each workgroup runs until its waves all end or wait for another workgroup. Raises Deadlock when waves go on
        waiting and nothing happens in memory.
        """
        groups = [group for launch in launches for group in self._workgroups(launch)]
        if self.wave_order == "reverse":
            groups.reverse()
        self._changes, self._changed_at = self.memory.changes, self.executed
        while groups:
            groups = [group for group in groups if not group.advance()]

    def count(self, executed: int, where: str, wave: Wave) -> None:
        """Add to `executed`; raises Deadlock, naming the wave that ran last, when memory has not changed for long."""
        self.executed += executed
        if self._changes != self.memory.changes:
            self._changes, self._changed_at = self.memory.changes, self.executed
        elif self.executed - self._changed_at > IDLE_INSTRUCTIONS:
            raise Deadlock(f"{IDLE_INSTRUCTIONS} instructions changed nothing in memory; {where} is in "
                           f"{wave.program.where(wave.pc)}")

    def _workgroups(self, launch: Launch) -> list[_Workgroup]:
        path = Path(launch.path)
        program = load_program(path, launch.kernel, path.stat().st_mtime_ns)
        launched.add((path, launch.kernel))
        kernel, lanes = program.kernel, launch.lanes
        if not 0 < lanes <= kernel.max_workgroup or kernel.lds + launch.shared > LDS_BYTES:
            raise ValueError(f"{launch.kernel} got {lanes} lanes and {kernel.lds + launch.shared} bytes of LDS, "
                             f"expected at most {kernel.max_workgroup} and {LDS_BYTES}")
        if kernel.properties & OTHER_SGPRS:
            raise UnknownInstruction(f"{kernel.name} wants user SGPRs for a queue or for scratch memory (properties "
                                     f"{kernel.properties:#x}): the emulator has neither")
        if kernel.float_mode != IEEE_754 or not kernel.ieee_clamped:
            raise UnknownInstruction(f"{kernel.name} starts in float mode {kernel.float_mode:#x}, IEEE and DX10_CLAMP "
                                     f"{kernel.ieee_clamped}: the emulator has mode {IEEE_754:#x} with both")
        kernarg = self.put(np.frombuffer(pack_arguments(kernel, launch), np.uint8))
        packet = self.put(np.frombuffer(dispatch_packet(kernel, launch, kernarg), np.uint8))
        gx, gy, gz = launch.grid
        return [_Workgroup(self, program, launch, kernarg, packet, (x, y, z))
                for z, y, x in itertools.product(range(gz), range(gy), range(gx))]


class _Workgroup:
    """One workgroup of a launch. Its waves and LDS exist from its first turn to its end."""

    def __init__(self, device: Device, program: Program, launch: Launch, kernarg: int, packet: int,
                 index: tuple[int, int, int]) -> None:
        self.device, self.program, self.launch = device, program, launch
        self.kernarg, self.packet, self.index = kernarg, packet, index
        self.waves: list[Wave] = []

    def advance(self) -> bool:
        """Run until every wave has ended (True) or waits for another workgroup (False)."""
        if not self.waves:
            lds = LocalMemory(max(self.program.kernel.lds + self.launch.shared, 4))
            self.waves = [self._make_wave(lds, first) for first in range(0, self.launch.lanes, LANES)]
        ordered = self.waves if self.device.wave_order == "forward" else self.waves[::-1]
        while True:
            for wave in ordered:
                if not wave.done and wave.waits != "barrier":
                    wave.waits = ""
                    before = wave.executed
                    _run(wave)
                    self.device.count(wave.executed - before, f"workgroup {self.index}", wave)
            running = [wave for wave in self.waves if not wave.done]
            if not running:
                self.waves = []
                return True
            if any(wave.waits != "barrier" for wave in running):
                return False
            for wave in running:  # a wave that has ended is not waited for
                wave.waits = ""

    def _make_wave(self, lds: LocalMemory, first: int) -> Wave:
        """Registers as the dispatch leaves them (kernel descriptor, "Initial Kernel Execution State")."""
        kernel, (bx, by, _) = self.program.kernel, self.launch.shape
        wave = Wave(self.device.memory, lds, min(LANES, self.launch.lanes - first))
        wave.program = self.program
        lane = first + np.arange(LANES)
        wave.vector[0] = lane % bx | lane // bx % by << 10 | lane // bx // by << 20  # gfx942 packs x, y and z
        user = 0
        for bit, value in ((DISPATCH_POINTER, self.packet), (KERNARG_POINTER, self.kernarg), (DISPATCH_ID, 0)):
            if kernel.properties & bit:
                wave.write_sgprs(user, 2, value)
                user += 2
        words = self.device.get(self.kernarg, (kernel.preload_length,), np.uint32)
        for k, word in enumerate(words):
            wave.scalar[user + k] = int(word)
        position = kernel.user_sgprs
        for wanted, index in zip(kernel.workgroup_ids, self.index, strict=True):
            if wanted:
                wave.scalar[position] = index
                position += 1
        entry = kernel.instructions[0][0] + (PRELOAD_PROLOGUE if kernel.preload_length else 0)
        wave.pc = self.program.at(entry)
        return wave


def _run(wave: Wave) -> None:
    """Run until the wave ends, waits, or has had its turn. An error says in which instruction it happened."""
    steps, position = wave.program.steps, wave.pc
    try:
        with np.errstate(all="ignore"):
            for _ in range(QUANTUM):
                position = wave.pc
                wave.pc = position + 1
                wave.executed += 1
                steps[position](wave)
                if wave.done or wave.waits:
                    return
    except OutsideMemory as error:
        raise OutsideMemory(f"{wave.program.where(position)}: {error}") from error
    except Exception as error:
        error.add_note(f"in {wave.program.where(position)}")
        raise


@functools.cache
def load_program(path: Path, name: str, modified: int) -> Program:
    """Decode one kernel. Raises UnknownInstruction for the first line that the emulator cannot run."""
    load_instructions()
    kernels = _read(path, modified)
    if name not in kernels:
        raise ValueError(f"{path} has no kernel {name!r}: it has {', '.join(kernels)}")
    kernel = kernels[name]
    try:
        steps = [decode(address, text) for address, text in kernel.instructions]
    except UnknownInstruction as error:
        raise UnknownInstruction(f"{name}: {error}") from error
    return Program(kernel, steps, {address: k for k, (address, _) in enumerate(kernel.instructions)})


@functools.cache
def _read(path: Path, modified: int) -> dict[str, Kernel]:
    return read_code_object(path)


def pack_arguments(kernel: Kernel, launch: Launch) -> bytes:
    """The kernarg segment: explicit arguments from `args`, hidden ones from the launch's shape, zero if not known."""
    explicit = [a for a in kernel.arguments if not a.kind.startswith("hidden")]
    args = list(launch.args)
    if len(args) == len(explicit) - 2:  # Triton's two scratch pointers, unused
        args += [0, 0]
    if len(args) != len(explicit):
        raise ValueError(f"{kernel.name} got {len(args)} arguments, expected {len(explicit)}")
    hidden = {"hidden_grid_dims": dimensions(launch), "hidden_dynamic_lds_size": launch.shared}
    for axis, blocks, lanes in zip("xyz", launch.grid, launch.shape, strict=True):
        hidden |= {f"hidden_block_count_{axis}": blocks, f"hidden_group_size_{axis}": lanes}
    segment = bytearray(max(kernel.kernarg_size, 4 * kernel.preload_length))
    for argument, value in [*zip(explicit, args, strict=True), *(
            (a, hidden.get(a.kind, 0)) for a in kernel.arguments if a.kind.startswith("hidden"))]:
        segment[argument.offset : argument.offset + argument.size] = as_bytes(value, argument.size)
    return bytes(segment)


def dimensions(launch: Launch) -> int:
    return max(k + 1 for k in range(3) if k == 0 or launch.grid[k] * launch.shape[k] > 1)


def dispatch_packet(kernel: Kernel, launch: Launch, kernarg: int) -> bytes:
    """The 64 bytes that started the kernel, as an HSA queue holds them."""
    grid = [blocks * lanes for blocks, lanes in zip(launch.grid, launch.shape, strict=True)]
    return struct.pack("<HHHHHHIIIIIQQQQ", 0, dimensions(launch), *launch.shape, 0, *grid, kernel.scratch,
                       kernel.lds + launch.shared, 0, kernarg, 0, 0)


def as_bytes(value, size: int) -> bytes:
    """An argument as the segment holds it: bytes as they are, floats as FP32 or FP64, integers in two's complement."""
    if isinstance(value, bytes | bytearray):
        if len(value) != size:
            raise ValueError(f"got {len(value)} bytes for an argument of {size}")
        return bytes(value)
    if isinstance(value, float | np.floating):
        return struct.pack({4: "<f", 8: "<d"}[size], value)
    return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")
