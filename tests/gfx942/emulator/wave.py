"""The state of one wave: 64 lanes that run in step."""

from __future__ import annotations

import functools

import numpy as np

from tests.gfx942.emulator.memory import FlatMemory

LANES = 64
ALL_LANES = (1 << LANES) - 1
VCC, EXEC, M0 = 106, 126, 124  # SGPR numbers; vcc and exec are pairs
AGPR = 256  # accumulation register a0 is row 256 of the vector registers


class Wave:
    """Registers, masks and program counter. `vector` rows 0..255 are v0.., rows 256..511 are a0.. ."""

    def __init__(self, memory, lds, lane_count: int = LANES) -> None:
        self.memory, self.lds, self.flat = memory, lds, FlatMemory(memory, lds)
        self.vector = np.zeros((512, LANES), np.uint32)
        self.scalar = [0] * 128  # 32-bit values as int; EXEC itself is in `exec`
        self.scc = 0
        self.pc = 0  # index into the program
        self.done = False
        self.waits = ""  # "barrier", or "spin" (s_sleep): others get a turn
        self.executed = 0
        self.exec = (1 << lane_count) - 1

    @property
    def exec(self) -> int:
        return self._exec

    @exec.setter
    def exec(self, mask: int) -> None:
        self._exec = mask & ALL_LANES
        self.active = bits_of(self._exec)
        self.full = self._exec == ALL_LANES

    def write(self, row: int, values: np.ndarray, lanes: np.ndarray | None = None) -> None:
        """Write a vector register (uint32 [64]) in the active lanes; with `lanes` (bool [64]) only in those of them."""
        if lanes is not None:
            np.copyto(self.vector[row], values, where=self.active & lanes)
        elif self.full:
            self.vector[row] = values
        else:
            np.copyto(self.vector[row], values, where=self.active)

    def read_sgprs(self, first: int, count: int) -> int:
        """`count` SGPRs from `first` as one integer, the first lowest."""
        if first >= EXEC:
            return self._exec >> 32 * (first - EXEC) & (1 << 32 * count) - 1
        if count == 2:
            return self.scalar[first] | self.scalar[first + 1] << 32
        return sum(self.scalar[first + k] << (32 * k) for k in range(count))

    def write_sgprs(self, first: int, count: int, value: int) -> None:
        """Write `count` SGPRs from `first`, the first lowest; bits of `value` beyond them are dropped."""
        if first == EXEC:
            self.exec = value if count == 2 else self._exec >> 32 << 32 | value & 0xFFFFFFFF
            return
        if first == EXEC + 1:
            self.exec = self._exec & 0xFFFFFFFF | (value & 0xFFFFFFFF) << 32
            return
        for k in range(count):
            self.scalar[first + k] = value >> (32 * k) & 0xFFFFFFFF


@functools.lru_cache(maxsize=4096)
def bits_of(mask: int) -> np.ndarray:
    """A 64-bit mask as bool [64], lane 0 first; not to be written to."""
    lanes = np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), np.uint8), bitorder="little").view(bool)
    lanes.flags.writeable = False
    return lanes


def mask_of(lanes: np.ndarray) -> int:
    """bool [64] as a 64-bit mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")
