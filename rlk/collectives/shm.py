"""Collectives between processes of one host, over POSIX shared memory (hipkernels/cpu/shm_collectives.cpp)."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rlk.collectives.arguments import DTYPE_CODE, output, scattered_shape, several, summable
from rlk.collectives.failure import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    OPERATIONS,
    REDUCE_SCATTER,
    Failure,
    explain,
)
from rlk.errors import CheckFailed, UsageError
from rlk.ops.cpu_library import INT, LONG, POINTER, function, ptr

FOLDER = Path("/dev/shm")
CONTROL_BYTES = 4096  # kStagingOffset
STAGING_BYTES = 1 << 20  # larger messages go in pieces, each of which costs the ranks one meeting

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

    name, device = "shm", torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, staging_bytes: int = STAGING_BYTES) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._names = dist.get_process_group_ranks(group)  # the ranks' global numbers, for messages
        self._timeout_s = timeout_s
        self._busy = threading.Lock()
        self._broken = ""
        segments = map_segments(group, CONTROL_BYTES + staging_bytes)
        addresses = (ctypes.c_void_p * self.world)(
            *(ctypes.addressof(ctypes.c_char.from_buffer(segment)) for segment in segments))
        handle = ctypes.c_void_p()
        _create(addresses, self.rank, self.world, staging_bytes, int(timeout_s * 1e9), ctypes.addressof(handle))
        self._handle = handle.value
        # At interpreter exit too: peers then learn at once that this rank is gone.
        self._finalizer = weakref.finalize(self, _release, self._handle, segments)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._run(ALL_REDUCE, summable(x), output(x, x.shape, out, self.device))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._run(ALL_GATHER, x, output(x, (self.world, *x.shape), out, self.device))

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._run(REDUCE_SCATTER, summable(x), output(x, scattered_shape(x, self.world), out, self.device))

    def reduce_scatter_many(self, xs: Sequence[torch.Tensor],
                            outs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        return [self.reduce_scatter(x, out) for x, out in several(xs, outs)]

    def barrier(self) -> None:
        nothing = torch.empty(0)
        self._run(BARRIER, nothing, nothing)

    def check(self) -> None:
        """Nothing: a call that fails raises before it returns."""

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
        failure = Failure()
        _failure(self._handle, ctypes.addressof(failure))
        return explain(failure, operation, self.rank, self._names, self._timeout_s)


def map_segments(group: dist.ProcessGroup, size: int) -> list[mmap.mmap]:
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
