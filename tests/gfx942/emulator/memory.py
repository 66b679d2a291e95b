"""Byte-addressed memory for vectors of addresses: global memory with guarded allocations, and LDS."""

from __future__ import annotations

import numpy as np

BASE = 1 << 20  # the first address of global memory: small integers and null are no addresses
GUARD = 256  # bytes between two allocations that belong to neither
WIDEST = 64  # bytes of the widest access
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
SHIFT = {1: 0, 2: 1, 4: 2}
PARTS = np.arange(16)[:, None]  # numbers of the words of one lane's access


class OutsideMemory(Exception):
    """A lane read or wrote where nothing was allocated."""


class Memory:
    """`size` bytes from address BASE; accesses must lie within allocations.

    Shapes: n lanes, c consecutive words of each lane.
    """

    name = "global memory"

    def __init__(self, size: int) -> None:
        end = BASE + -(-size // 4) * 4
        self.bytes = np.zeros(end, np.uint8)  # by address
        self.views = {width: self.bytes.view(dtype) for width, dtype in WORDS.items()}
        self.room = np.zeros(end + 1, np.uint8)  # bytes allocated from here on, at most WIDEST
        self.top = BASE
        self.changes = 0  # stores so far, and atomics that changed something: how a deadlock is told from work

    def allocate(self, size: int) -> int:
        """Address of `size` new bytes, aligned to 256."""
        start = -(-self.top // 256) * 256
        if start + size > len(self.bytes):
            raise MemoryError(f"the emulated memory of {len(self.bytes) - BASE} bytes is full: ask Device for more")
        self.room[start : start + size] = WIDEST
        tail = min(size, WIDEST)
        self.room[start + size - tail : start + size] = np.arange(tail, 0, -1)
        self.top = start + size + GUARD
        return start

    def load(self, addresses: np.ndarray, width: int, count: int = 1) -> np.ndarray:
        """uint32 [c, n]: `count` consecutive words of `width` bytes (1, 2 or 4) at int64 addresses [n]."""
        self.check(addresses, width * count)
        if width == 1 or not np.bitwise_or.reduce(addresses) & width - 1:
            words = self.views[width].take((addresses >> SHIFT[width]) + PARTS[:count])
            return words if width == 4 else words.astype(np.uint32)
        at = addresses + width * PARTS[:count]
        return sum(self.bytes[at + k].astype(np.uint32) << np.uint32(8 * k) for k in range(width))

    def store(self, addresses: np.ndarray, words: np.ndarray, width: int) -> None:
        """Write the low `width` bytes of uint32 words [c, n] one after another at addresses [n].

        Of lanes that write one place the last wins.
        """
        self.check(addresses, width * len(words))
        self.changes += 1
        if width == 1 or not np.bitwise_or.reduce(addresses) & width - 1:
            index = (addresses >> SHIFT[width]) + PARTS[: len(words)]
            self.views[width][index] = words.astype(WORDS[width], copy=False)
            return
        at = addresses + width * PARTS[: len(words)]
        for k in range(width):
            self.bytes[at + k] = (words >> np.uint32(8 * k)).astype(np.uint8)

    def check(self, addresses: np.ndarray, size: int) -> None:
        """Raise OutsideMemory unless `size` bytes at every address [n] lie within one allocation each."""
        if (self.room.take(addresses, mode="clip") < size).any():
            bad = next(int(address) for address in addresses if not self.contains(int(address), size))
            raise OutsideMemory(f"{size} bytes at {bad & (1 << 64) - 1:#x} lie outside every allocation of {self.name}")

    def contains(self, address: int, size: int) -> bool:
        """Whether `size` bytes, more than WIDEST too, are allocated."""
        inside = 0 <= address and address + size <= len(self.bytes)
        return inside and (size == 0 or bool(self.room[address : address + size].all()))


SHARED_APERTURE = 0x4000  # upper half of the flat addresses that are LDS: what src_shared_base reads


class FlatMemory:
    """What flat loads and stores see: LDS in its aperture, global memory everywhere else."""

    def __init__(self, memory: Memory, lds: Memory) -> None:
        self.memory, self.lds = memory, lds

    def load(self, addresses: np.ndarray, width: int, count: int = 1) -> np.ndarray:
        words = np.empty((count, len(addresses)), np.uint32)
        for memory, lanes, places in self._split(addresses):
            words[:, lanes] = memory.load(places, width, count)
        return words

    def store(self, addresses: np.ndarray, words: np.ndarray, width: int) -> None:
        for memory, lanes, places in self._split(addresses):
            memory.store(places, words[:, lanes], width)

    def _split(self, addresses: np.ndarray):
        local = addresses >> 32 == SHARED_APERTURE
        if not local.all():
            yield self.memory, ~local, addresses[~local]
        if local.any():
            yield self.lds, local, addresses[local] & 0xFFFFFFFF


class LocalMemory(Memory):
    """LDS of one workgroup: all of it may be used. It starts as a pattern, so that reading what nobody wrote shows."""

    PATTERN = 0xA5

    def __init__(self, size: int) -> None:
        self.bytes = np.full(-(-size // 4) * 4, self.PATTERN, np.uint8)
        self.views = {width: self.bytes.view(dtype) for width, dtype in WORDS.items()}
        self.changes = 0
        self.name = f"the workgroup's {size} bytes of LDS"

    def check(self, addresses: np.ndarray, size: int) -> None:
        if len(addresses) and addresses.max() + size > len(self.bytes):  # never negative
            raise OutsideMemory(f"{size} bytes at {int(addresses.max()):#x} lie outside {self.name}")
