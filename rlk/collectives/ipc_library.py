"""The C functions of GPU IPC (hipkernels/gpu): their structures and argument types."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from rlk.ops.gpu_library import FLOAT, INT, LONG, POINTER, function

MOST_RANKS = 8
MOST_PARTS = 16  # kMostParts: parts of one reduce_scatter launch
SLOTS = 2  # kSlots
CONTROL_BYTES = 512  # sizeof(Control)
MOST_GROUPS = 128  # kMostGroups: workgroups of a call
LEAST_SLICE = 4 << 10  # kLeastSlice: what a workgroup of an all-reduce can push, in bytes
HANDLE_BYTES = 64  # of cudaIpcMemHandle_t and hipIpcMemHandle_t alike
ALIGNMENT = 16  # bytes; what 128-bit loads demand of every pointer


class Sizes(NamedTuple):
    """Bytes of a segment's pieces, multiples of 128 each; see hipkernels/gpu/segment.h."""

    slice: int  # staging of one workgroup; a larger message takes its slices one after another
    direct: int  # a direct slot
    push: int  # the most that a workgroup pushes to one peer


# Direct slots for the FP32 partial sums of 256 tokens of 4096; pushes of a row of 5120 in FP32, the largest of Qwen3's.
SIZES = Sizes(slice=256 << 10, direct=4 << 20, push=20 << 10)


def segment_bytes(sizes: Sizes, world: int) -> int:
    """What a rank's segment takes on its GPU, as rlk_gpu_collective_bytes says where the library is."""
    mailboxes = MOST_GROUPS * MOST_RANKS * CONTROL_BYTES
    return mailboxes + MOST_GROUPS * (sizes.slice + 4 * sizes.push * world) + SLOTS * sizes.direct


class Ranks(ctypes.Structure):
    """struct Ranks: the group as one rank sees it. `failure` is the device's address of the pinned record."""

    _fields_ = [("segment", ctypes.c_void_p * MOST_RANKS), ("rank", ctypes.c_int32), ("world", ctypes.c_int32),
                ("slice_bytes", ctypes.c_uint64), ("direct_bytes", ctypes.c_uint64), ("push_bytes", ctypes.c_uint64),
                ("timeout_ns", ctypes.c_uint64), ("failure", ctypes.c_void_p)]


class Part(ctypes.Structure):
    """struct Part: x of [world * count] elements, of whose sum over ranks this rank gets its `count` in out."""

    _fields_ = [("x", ctypes.c_void_p), ("out", ctypes.c_void_p), ("count", ctypes.c_int64)]


class Library:
    """The functions as they are; each raises RuntimeError with its code. Those with a result return it."""

    def __init__(self) -> None:
        self.all_reduce = function("rlk_gpu_all_reduce", POINTER, POINTER, INT, INT, INT, POINTER, POINTER, LONG,
                                   POINTER)
        self.all_gather = function("rlk_gpu_all_gather", POINTER, POINTER, INT, INT, POINTER, POINTER, LONG, POINTER)
        self.reduce_scatter = function("rlk_gpu_reduce_scatter", POINTER, POINTER, INT, POINTER, INT, POINTER)
        self.barrier = function("rlk_gpu_barrier", POINTER, POINTER, POINTER)
        self.all_reduce_rms_norm = function("rlk_gpu_all_reduce_rms_norm", POINTER, POINTER, INT, INT, *[POINTER] * 5,
                                            LONG, LONG, FLOAT, POINTER)
        self.close = function("rlk_gpu_close", POINTER, POINTER)
        self.memory_free = function("rlk_gpu_memory_free", POINTER)
        self.pinned_free = function("rlk_gpu_pinned_free", POINTER)
        self.ipc_close = function("rlk_gpu_ipc_close", POINTER)
        self._bytes = function("rlk_gpu_collective_bytes", LONG, LONG, LONG, INT, *[POINTER] * 3)
        self._offset = function("rlk_gpu_direct_offset", LONG, LONG, INT, POINTER)
        self._memory_create = function("rlk_gpu_memory_create", LONG, POINTER)
        self._pinned_create = function("rlk_gpu_pinned_create", LONG, POINTER, POINTER)
        self._export = function("rlk_gpu_ipc_export", POINTER, POINTER)
        self._open = function("rlk_gpu_ipc_open", POINTER, POINTER)
        self._can_access = function("rlk_gpu_can_access_peer", INT, INT, POINTER)

    def collective_bytes(self, sizes: Sizes, world: int) -> tuple[int, int, int]:
        """Bytes of a rank's segment, of its progress, and of the failure record."""
        segment, progress, failure = LONG(), LONG(), LONG()
        self._bytes(*sizes, world, ctypes.byref(segment), ctypes.byref(progress), ctypes.byref(failure))
        return segment.value, progress.value, failure.value

    def direct_offset(self, sizes: Sizes, slot: int) -> int:
        """Where in a segment direct slot `slot` begins."""
        offset = LONG()
        self._offset(sizes.slice, sizes.direct, slot, ctypes.byref(offset))
        return offset.value

    def memory_create(self, size: int) -> int:
        """Address of `size` zeroed bytes of the current GPU, outside torch's allocator."""
        address = ctypes.c_void_p()
        self._memory_create(size, ctypes.byref(address))
        return address.value

    def pinned_create(self, size: int) -> tuple[int, int]:
        """The host's and the GPU's address of `size` zeroed bytes of pinned memory."""
        host, device = ctypes.c_void_p(), ctypes.c_void_p()
        self._pinned_create(size, ctypes.byref(host), ctypes.byref(device))
        return host.value, device.value

    def ipc_export(self, address: int) -> bytes:
        """The handle by which another process maps what memory_create gave."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        self._export(address, handle)
        return handle.raw

    def ipc_open(self, handle: bytes) -> int:
        """Address of another process's memory on the current GPU."""
        address = ctypes.c_void_p()
        self._open(handle, ctypes.byref(address))
        return address.value

    def can_access_peer(self, device: int, peer: int) -> bool:
        yes = INT()
        self._can_access(device, peer, ctypes.byref(yes))
        return bool(yes.value)
