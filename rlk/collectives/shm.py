"""Collectives between processes of one host, over POSIX shared memory (hipkernels/cpu/shm_collectives.cpp)."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from rlk.errors import CheckFailed, UsageError
from rlk.ops.cpu_library import INT, LONG, POINTER, function, ptr

FOLDER = Path("/dev/shm")
CONTROL_BYTES = 4096  # kStagingOffset
STAGING_BYTES = 1 << 20  # larger messages go in pieces, each of which costs the ranks one meeting

SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*SUM_DTYPES, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
          torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128)
DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}

# enums of hipkernels/collective_protocol.h
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BARRIER = range(4)
SIGNALS = ("ready", "done")
TIMED_OUT, PEER_CLOSED, MISMATCH = 1, 2, 3


class _Call(ctypes.Structure):
    _fields_ = [("operation", ctypes.c_int32), ("dtype", ctypes.c_int32), ("count", ctypes.c_uint64)]

    def __str__(self) -> str:
        if self.operation == BARRIER:
            return "barrier"
        return f"{OPERATIONS[self.operation]} of {self.count} x {str(DTYPES[self.dtype]).removeprefix('torch.')}"


class _Failure(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("peer", ctypes.c_int32), ("signal", ctypes.c_int32),
                ("reserved", ctypes.c_int32), ("generation", ctypes.c_uint64), ("seen", ctypes.c_uint64),
                ("mine", _Call), ("theirs", _Call)]


_create = function("rlk_shm_create", POINTER, INT, INT, LONG, LONG, POINTER)
_call = function("rlk_shm_call", POINTER, INT, INT, INT, POINTER, POINTER, LONG)
_failure = function("rlk_shm_failure", POINTER, POINTER)
_close = function("rlk_shm_close", POINTER)


class ShmCommunicator:
    """A Communicator (see rlk.collectives) over shared memory; the ranks are processes of one host.

    `group` only carries the segments' names, once. `timeout_s` bounds every wait for a peer. A message larger than
    `staging_bytes` goes in pieces. One call at a time: a second thread's call raises. After a CheckFailed the
    communicator raises at every further call.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, staging_bytes: int = STAGING_BYTES) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._names = dist.get_process_group_ranks(group)  # the ranks' global numbers, for messages
        self._timeout_s = timeout_s
        self._busy = threading.Lock()
        self._broken = ""
        segments = _map_segments(group, CONTROL_BYTES + staging_bytes)
        addresses = (ctypes.c_void_p * self.world)(
            *(ctypes.addressof(ctypes.c_char.from_buffer(segment)) for segment in segments))
        handle = ctypes.c_void_p()
        _create(addresses, self.rank, self.world, staging_bytes, int(timeout_s * 1e9), ctypes.addressof(handle))
        self._handle = handle.value
        # At interpreter exit too: peers then learn at once that this rank is gone.
        self._finalizer = weakref.finalize(self, _release, self._handle, segments)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._run(ALL_REDUCE, _summable(x), _output(x, x.shape, out))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._run(ALL_GATHER, x, _output(x, (self.world, *x.shape), out))

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if x.dim() == 0 or x.shape[0] % self.world:
            raise ValueError(f"reduce_scatter of shape {tuple(x.shape)} over {self.world} ranks: the first dimension "
                             "must be a multiple of the ranks; pad it")
        out = _output(x, (x.shape[0] // self.world, *x.shape[1:]), out)
        return self._run(REDUCE_SCATTER, _summable(x), out)

    def barrier(self) -> None:
        nothing = torch.empty(0)
        self._run(BARRIER, nothing, nothing)

    def close(self) -> None:
        self._broken = self._broken or "it is closed"
        self._finalizer()

    def _run(self, operation: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if not self._busy.acquire(blocking=False):
            raise CheckFailed(f"rank {self._names[self.rank]}: {OPERATIONS[operation]} called while another thread is "
                              "in a call of this communicator; give each thread its own, or call from one thread")
        try:
            if self._broken:
                raise CheckFailed(f"rank {self._names[self.rank]}: {OPERATIONS[operation]} on a communicator that is "
                                  f"of no more use: {self._broken}")
            _call(self._handle, operation, DTYPE_CODE[x.dtype], x.element_size(), ptr(x), ptr(out), x.numel())
        except RuntimeError as error:
            self._broken = self._explain(OPERATIONS[operation])
            raise CheckFailed(self._broken) from error
        finally:
            self._busy.release()
        return out

    def _explain(self, operation: str) -> str:
        """What went wrong in the last call, naming rank, peer, signal and generation."""
        failure = _Failure()
        _failure(self._handle, ctypes.addressof(failure))
        rank, peer = self._names[self.rank], self._names[failure.peer]
        if failure.kind == MISMATCH:
            return (f"ranks disagree in generation {failure.generation}: rank {rank} calls {failure.mine}, rank {peer} "
                    f"calls {failure.theirs}; make every rank call the same operations in the same order")
        waited = (f"rank {rank} in {operation} waits for rank {peer}'s {SIGNALS[failure.signal]} signal of generation "
                  f"{failure.generation} (it is at {failure.seen})")
        if failure.kind == PEER_CLOSED:
            return f"{waited}, but rank {peer} has closed its communicator; see that rank's own error"
        return (f"{waited}: no answer within {self._timeout_s:g} s; see whether rank {peer} died or hangs, or raise "
                "--timeout")


def _summable(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in SUM_DTYPES:
        raise ValueError(f"cannot sum {x.dtype} over ranks: expected one of {SUM_DTYPES}; convert it")
    return x


def _output(x: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
    """`out`, checked, or a new tensor of `shape`, with x's dtype."""
    if not x.is_cpu:
        raise ValueError(f"expected a CPU tensor, got one on {x.device}")
    if x.dtype not in DTYPE_CODE:
        raise ValueError(f"cannot exchange {x.dtype}: expected one of {DTYPES}; view it as torch.uint8")
    if out is None:
        return torch.empty(shape, dtype=x.dtype)
    if out.dtype != x.dtype or not out.is_cpu or out.shape != shape:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}, expected {x.dtype} {tuple(shape)} "
                         "on the CPU")
    return out


def _map_segments(group: dist.ProcessGroup, size: int) -> list[mmap.mmap]:
    """Create this rank's segment (zeroed) and map everybody's, in rank order.

    The names are gone when this returns, on success and on failure, so nothing is left behind when a rank dies later.
    """
    name = FOLDER / f"rlk-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        problem = _create_segment(name, size)
        made: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(made, (name, problem), group=group)
        for _, problem in made:
            if problem:
                raise UsageError(problem)
        segments = [_map(path) for path, _ in made]
        dist.barrier(group)
        return segments
    finally:
        name.unlink(missing_ok=True)


def _create_segment(name: Path, size: int) -> str:
    """Returns what went wrong, or an empty string: every rank must hear of it."""
    try:
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a full /dev/shm fails here, not by a signal at first use
        finally:
            os.close(descriptor)
    except OSError as error:
        return (f"cannot take {size} bytes of shared memory in {FOLDER}: {error.strerror}; enlarge it "
                "(docker: --shm-size)")
    return ""


def _map(name: Path) -> mmap.mmap:
    descriptor = os.open(name, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


def _release(handle: int, segments: list[mmap.mmap]) -> None:
    _close(handle)
    for segment in segments:
        segment.close()
