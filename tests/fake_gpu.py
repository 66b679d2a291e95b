"""A GPU library without a GPU: it records the calls, moves bytes on the host, and can write a failure.

The peers' inputs are zeroes, so a sum over ranks is this rank's own input.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch

from rlk.collectives import ipc
from rlk.collectives.failure import Failure
from rlk.collectives.ipc_library import Sizes
from rlk.ops import gpu_library

SIZE = {0: 4, 1: 2, 2: 2}  # bytes of a dtype that can be summed


class FakeStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.waits = handle, 0

    def synchronize(self) -> None:
        self.waits += 1


class FakeGpu:
    """The C functions, as attributes; `calls` are (name, arguments) in order."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.memory: dict[int, ctypes.Array] = {}  # what was created, by address
        self.refuses: set[str] = set()  # functions that end with an error code
        self.peer_access = True

    def __getattr__(self, name: str):
        if not name.startswith("rlk_gpu_"):
            raise AttributeError(name)
        short = name.removeprefix("rlk_gpu_")

        def call(*args):
            args = tuple(getattr(arg, "_obj", arg) for arg in args)  # what byref() points to
            self.calls.append((short, args))
            if short in self.refuses:
                return 6
            getattr(self, f"do_{short}", lambda *args: None)(*args)
            return 0

        return call

    def called(self, name: str) -> list[tuple]:
        return [args for called, args in self.calls if called == name]

    def create(self, size: int) -> int:
        block = (ctypes.c_char * (size + 128))()
        address = -(-ctypes.addressof(block) // 128) * 128
        self.memory[address] = block
        return address

    def do_collective_bytes(self, slice_bytes, direct_bytes, push_bytes, world, segment, progress, failure):
        segment.value, progress.value, failure.value = slice_bytes + 2 * direct_bytes, 64, ctypes.sizeof(Failure)

    def do_direct_offset(self, slice_bytes, direct_bytes, slot, offset):
        offset.value = slice_bytes + slot * direct_bytes

    def do_memory_create(self, size, address):
        address.value = self.create(size)

    def do_pinned_create(self, size, host, device):
        host.value = device.value = self.create(size)

    def do_memory_free(self, address):
        del self.memory[address]

    def do_pinned_free(self, address):
        del self.memory[address]

    def do_ipc_export(self, address, handle):
        handle.raw = address.to_bytes(8, "little") * 8

    def do_ipc_open(self, handle, address):
        address.value = int.from_bytes(handle[:8], "little") + 1  # some address, of another process

    def do_can_access_peer(self, device, peer, yes):
        yes.value = int(self.peer_access)

    def do_all_reduce(self, ranks, progress, dtype, route, slot, x, out, count, stream):
        ctypes.memmove(out, x, count * SIZE[dtype])

    def do_all_gather(self, ranks, progress, size, code, x, out, count, stream):
        if out + ranks.rank * count * size != x:
            ctypes.memmove(out + ranks.rank * count * size, x, count * size)

    def do_reduce_scatter(self, ranks, progress, dtype, parts, n, stream):
        for part in list(parts)[:n]:
            size = part.count * SIZE[dtype]
            ctypes.memmove(part.out, part.x + ranks.rank * size, size)


class FakeCuda:
    """torch.cuda as far as the communicators use it."""

    def __init__(self, monkeypatch) -> None:
        self.stream, self.capturing, self.gpus, self.current = FakeStream(0), False, ["a", "b", "c", "d"], 0
        for name, stand_in in {
            "current_device": lambda: self.current,
            "device_count": lambda: len(self.gpus),
            "device": lambda device: contextlib.nullcontext(),
            "current_stream": lambda device=None: self.stream,
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": lambda device=None: None,
            "get_device_properties": lambda i: type("Properties", (), {"uuid": self.gpus[i]}),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


def host_bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor over memory of this process: stands for ipc.view_memory."""
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def install(monkeypatch, gpu) -> FakeCuda:
    """Let the communicators use `gpu` for the library, and host memory for the GPU's."""
    monkeypatch.setattr(gpu_library, "library", lambda: gpu)
    monkeypatch.setattr(ipc, "view_memory", host_bytes)
    return FakeCuda(monkeypatch)


class OwnMemory:
    """A PeerMemory of one process; its tensors are the CPU's. `peers` are the segments of the others."""

    def __init__(self, library, rank: int, segments: list[int], sizes: Sizes) -> None:
        self.rank, self.world, self.names = rank, len(segments), [10 + i for i in range(len(segments))]
        self.device = torch.device("cpu")
        self.sizes, self.library = sizes, library
        self.segments = segments
        _, progress, failure = library.collective_bytes(sizes, self.world)
        self.progress = library.memory_create(progress)
        pinned, self.failure_address = library.pinned_create(failure)
        self.failure = Failure.from_address(pinned)
        self.released = 0

    def release(self) -> None:
        self.released += 1
