"""What the emulator's memory tests share: how accesses are written, and a wave that is set up for them."""

import numpy as np

from tests.gfx942.assembly import ODD_LANES, make_wave

SIZE = 4096  # bytes of the memory under test
TARGET = range(8, 12)  # the registers that results go to, or data come from
MASKS = [(1 << 64) - 1, ODD_LANES, 1 << 63, 0]
SPACES = {  # how an instruction of each kind is written; DATA is the register, {o} the offset
    "global": "v[2:3], off offset:{o}", "global with a scalar base": "v1, s[2:3] offset:{o}",
    "flat": "v[2:3] offset:{o}", "buffer": "v1, s[4:7], s9 offen offset:{o}", "lds": "v1 offset:{o}",
}


def register(count, first=TARGET[0], bank="v"):
    return f"{bank}{first}" if count == 1 else f"{bank}[{first}:{first + count - 1}]"


def prepare(space, offsets, exec_mask=MASKS[0]):
    """A wave whose lanes address `offsets` [64] into SIZE random bytes: (wave, memory, where the bytes begin)."""
    wave = make_wave(exec_mask)
    wave.memory.allocate(512)
    start = 0 if space == "lds" else wave.memory.allocate(SIZE)
    memory = wave.lds if space == "lds" else wave.memory
    memory.bytes[start : start + SIZE] = np.random.default_rng(3).integers(0, 256, SIZE, np.uint8)
    wave.vector[1] = offsets
    pointers = np.asarray(offsets, np.int64) + start
    wave.vector[2], wave.vector[3] = pointers & 0xFFFFFFFF, pointers >> 32
    wave.write_sgprs(2, 2, start)
    wave.write_sgprs(4, 2, start - 256)  # the buffer begins earlier: its scalar offset makes up for it
    wave.scalar[6], wave.scalar[7], wave.scalar[9] = SIZE + 256, 0x27000, 256
    return wave, memory, start


def bytes_of(memory, start):
    return memory.bytes[start : start + SIZE].tobytes()


def active(exec_mask):
    return [lane for lane in range(64) if exec_mask >> lane & 1]


def spread(seed=1):
    """An offset per lane, some not aligned, some the same."""
    return np.random.default_rng(seed).integers(0, SIZE - 64, 64)
