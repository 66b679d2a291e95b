"""Collectives between GPUs of one host, by kernels that read each other's memory (hipkernels/gpu).

Calls are queued on torch's current stream and return at once. A kernel that cannot go on records why and ends; the next
call, or check(), raises. Everything may be captured in a graph, and replayed with other data in the same memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlk.collectives import routes
from rlk.collectives.arguments import (
    DTYPE_CODE,
    contiguous,
    nbytes,
    output,
    scattered_shape,
    several,
    summable,
)
from rlk.collectives.failure import NO_FAILURE, NO_SLOT, explain
from rlk.collectives.ipc_library import (
    ALIGNMENT,
    LEAST_SLICE,
    MOST_GROUPS,
    MOST_PARTS,
    MOST_RANKS,
    SIZES,
    SLOTS,
    Part,
    Ranks,
    Sizes,
)
from rlk.collectives.ipc_memory import PeerMemory
from rlk.contract import architecture_of
from rlk.errors import CheckFailed, UsageError

NORM_COLUMNS = 8192  # the longest row of the fused norm
NORM_MULTIPLE = 16


@dataclass
class _Link:
    """What must be taken down when the communicator goes; it does not refer to the communicator."""

    memory: PeerMemory
    ranks: Ranks
    stream: torch.cuda.Stream | None = None  # of the first eager call, and so of every one


def connect(group: dist.ProcessGroup, timeout_s: float, sizes: Sizes = SIZES) -> IpcCommunicator:
    """The communicator of `group`, on this process's current GPU; every rank of the group calls it.

    `group` only carries the memory handles, once. A message of more than MOST_GROUPS slices goes in pieces.
    Raises UsageError, on every rank, when the group is not of 1, 2, 4 or 8 ranks or memory cannot be shared.
    """
    world = dist.get_world_size(group)
    if world not in (1, *routes.WORLDS):
        raise UsageError(f"GPU IPC serves groups of {routes.WORLDS} ranks, this one has {world}; use the process group")
    return IpcCommunicator(PeerMemory(group, sizes), timeout_s)


class IpcCommunicator:
    """A Communicator (see rlk.collectives) over GPU memory that all ranks have mapped.

    `timeout_s` bounds every wait for a peer. The stream of the first eager call is the communicator's: eager calls on
    another raise, and graphs that contain its calls must be replayed on it. After a CheckFailed that a kernel has
    recorded the communicator raises at every further call.

    device  of its tensors
    limits  which messages go which way (routes.py); equal on all ranks
    """

    name = "ipc"

    def __init__(self, memory: PeerMemory, timeout_s: float) -> None:
        self.rank, self.world, self.device = memory.rank, memory.world, memory.device
        self.limits = routes.limits(architecture_of("cuda"), self.world)
        self._memory, self._library, self._names = memory, memory.library, memory.names
        self._timeout_s = timeout_s
        self._broken = ""
        self._slots: list[torch.Tensor | None] = [None] * SLOTS
        segments = (ctypes.c_void_p * MOST_RANKS)(*memory.segments)
        ranks = Ranks(segments, self.rank, self.world, *memory.sizes, int(timeout_s * 1e9), memory.failure_address)
        self._link = _Link(memory, ranks)
        # At interpreter exit too: peers then learn at once that this rank is gone.
        self._finalizer = weakref.finalize(self, _release, self._link)

    # ---- the Communicator's calls ----

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._all_reduce(summable(x), output(x, x.shape, out, self.device), NO_SLOT)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = output(x, (self.world, *x.shape), out, self.device)
        source, target = _aligned(x), _aligned_target(out)
        self._launch("all_gather", self._library.all_gather, x.element_size(), DTYPE_CODE[x.dtype], source.data_ptr(),
                     target.data_ptr(), x.numel())
        return _settle(out, target)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.reduce_scatter_many([x], None if out is None else [out])[0]

    def reduce_scatter_many(self, xs: Sequence[torch.Tensor],
                            outs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        pairs = [(summable(x), output(x, scattered_shape(x, self.world), out, self.device))
                 for x, out in several(xs, outs)]
        for first in range(0, len(pairs), MOST_PARTS):
            batch = pairs[first:first + MOST_PARTS]
            sources, targets = [_aligned(x) for x, _ in batch], [_aligned_target(out) for _, out in batch]
            parts = (Part * len(batch))(*((x.data_ptr(), out.data_ptr(), out.numel())
                                          for x, out in zip(sources, targets, strict=True)))
            self._launch("reduce_scatter", self._library.reduce_scatter, DTYPE_CODE[batch[0][0].dtype], parts,
                         len(batch))
            for (_, out), target in zip(batch, targets, strict=True):
                _settle(out, target)
        return [out for _, out in pairs]

    def barrier(self) -> None:
        """Wait until every rank is here: the host as well, unless the call is being captured."""
        self._launch("barrier", self._library.barrier)
        with torch.cuda.device(self.device):
            if not torch.cuda.is_current_stream_capturing():
                self.check()

    def check(self) -> None:
        """Wait for the calls so far; raises CheckFailed when one of them failed."""
        if not self._broken:
            if self._link.stream is not None:
                self._link.stream.synchronize()
            else:
                torch.cuda.synchronize(self.device)  # graphs may have been replayed
        self._raise_failure("check")

    def close(self) -> None:
        """Tell the peers and give back the memory, after the calls so far. Views from staging() end with it."""
        self._broken = self._broken or "it is closed"
        self._slots = [None] * SLOTS
        self._finalizer()

    # ---- direct staging ----

    def staging(self, shape: Sequence[int], dtype: torch.dtype, slot: int) -> torch.Tensor:
        """A tensor over this rank's direct staging area `slot` (0 or 1), which peers read without a copy.

        Fill it, on the communicator's stream, with this rank's input of the next all_reduce_staged or
        all_reduce_add_rms_norm. One slot may not serve two calls in a row: alternate them. It is valid until close().
        """
        if slot not in range(SLOTS):
            raise ValueError(f"direct staging has slots {list(range(SLOTS))}, got {slot!r}")
        size, room = nbytes(shape, dtype), self._memory.sizes.direct
        if size > room:
            raise ValueError(f"{tuple(shape)} of {dtype} takes {size} bytes, a direct slot has {room}: use all_reduce, "
                             "or connect with larger direct slots")
        return self._slot(slot)[:size].view(dtype).view(tuple(shape))

    def all_reduce_staged(self, view: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over ranks of what they put in their staging(..) views, all of one slot; `view` is this rank's."""
        slot = self._slot_of(view)
        out = output(summable(view), view.shape, out, self.device)
        if slot == NO_SLOT:
            raise ValueError("all_reduce_staged of a tensor that is not from staging(): use all_reduce")
        if self._slot_of(out) == slot:
            raise ValueError(f"out lies in slot {slot}, which the peers read: give another")
        return self._all_reduce(view, out, slot)

    # ---- with the norm that follows ----

    def fuses_norm(self, partial_TD: torch.Tensor, residual_TD: torch.Tensor) -> bool:
        """Whether all_reduce_add_rms_norm takes these, and is the faster way; every rank gets the same answer."""
        D = residual_TD.shape[-1]
        return (partial_TD.dtype == torch.float32 and residual_TD.dtype == torch.bfloat16
                and D % NORM_MULTIPLE == 0 and 0 < D <= NORM_COLUMNS
                and self._route(nbytes(partial_TD.shape, partial_TD.dtype)) != routes.TWO_SHOT)

    def all_reduce_add_rms_norm(self, partial_TD: torch.Tensor, residual_TD: torch.Tensor, w_D: torch.Tensor,
                                eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """ops.norm.add_rms_norm(all_reduce(partial), residual, w, eps), its bits, in one kernel: (hidden, y).

        partial FP32 (a staging() view is read in place), residual and w BF16; D a multiple of 16 up to 8192; else
        ValueError.
        """
        D = residual_TD.shape[-1] if residual_TD.dim() else 0
        if D % NORM_MULTIPLE or not 0 < D <= NORM_COLUMNS:
            raise ValueError(f"all_reduce_add_rms_norm got rows of {D} elements, expected a multiple of "
                             f"{NORM_MULTIPLE} up to {NORM_COLUMNS}")
        for name, x, dtype, shape in (("partial", partial_TD, torch.float32, residual_TD.shape),
                                      ("residual", residual_TD, torch.bfloat16, residual_TD.shape),
                                      ("w", w_D, torch.bfloat16, (D,))):
            if x.dtype != dtype or x.shape != shape or x.device != self.device:
                raise ValueError(f"all_reduce_add_rms_norm got {name} {x.dtype} {tuple(x.shape)} on {x.device}, "
                                 f"expected {dtype} {tuple(shape)} on {self.device}")
            contiguous(name, x)
        slot = self._slot_of(partial_TD)
        sources = [_aligned(x) for x in (partial_TD, residual_TD, w_D)]
        hidden_TD, y_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
        T, row = residual_TD.numel() // D, nbytes((D,), torch.float32)
        fits = T <= MOST_GROUPS and row <= self._memory.sizes.push
        route = routes.PUSHED if fits and self._route(T * row) == routes.PUSHED else routes.ONE_SHOT
        self._launch("all_reduce_add_rms_norm", self._library.all_reduce_rms_norm, route, slot,
                     *(x.data_ptr() for x in (*sources, hidden_TD, y_TD)), T, D, eps)
        return hidden_TD, y_TD

    # ---- inside ----

    def _route(self, size: int) -> int:
        """routes.PUSHED, ONE_SHOT or TWO_SHOT for `size` bytes; what the kernels cannot push goes one-shot."""
        route = self.limits.route(size)
        can_push = self._memory.sizes.push >= LEAST_SLICE and size <= MOST_GROUPS * LEAST_SLICE
        return route if can_push or route != routes.PUSHED else routes.ONE_SHOT

    def _all_reduce(self, x: torch.Tensor, out: torch.Tensor, slot: int) -> torch.Tensor:
        route = self._route(nbytes(x.shape, x.dtype))
        source, target = _aligned(x), _aligned_target(out)
        self._launch("all_reduce", self._library.all_reduce, DTYPE_CODE[x.dtype], route, slot, source.data_ptr(),
                     target.data_ptr(), x.numel())
        return _settle(out, target)

    def _launch(self, operation: str, function: Callable, *args) -> None:
        """Queue a kernel on the current stream, unless one before it failed or the stream is another's."""
        self._raise_failure(operation)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if not torch.cuda.is_current_stream_capturing():
                self._own(stream, operation)
            function(ctypes.byref(self._link.ranks), self._memory.progress, *args, stream.cuda_stream)

    def _own(self, stream: torch.cuda.Stream, operation: str) -> None:
        """An eager call is on `stream`: kernels of two streams would take each other's generations."""
        link = self._link
        if link.stream is None:
            link.stream = stream
        elif stream.cuda_stream != link.stream.cuda_stream:
            raise CheckFailed(
                f"rank {self._names[self.rank]}: {operation} on stream {_hex(stream)}, but this communicator's calls "
                f"are on stream {_hex(link.stream)}; call it on that one (and let it wait for yours), or give each "
                "stream a communicator of its own")

    def _raise_failure(self, operation: str) -> None:
        """Raises CheckFailed when a kernel has recorded a failure, or the communicator is closed."""
        if self._broken:
            raise CheckFailed(f"rank {self._names[self.rank]}: {operation} on a communicator that is of no more use: "
                              f"{self._broken}")
        failure = self._memory.failure
        if failure.kind != NO_FAILURE:
            self._broken = explain(failure, "a collective", self.rank, self._names, self._timeout_s)
            raise CheckFailed(self._broken)

    def _slot(self, slot: int) -> torch.Tensor:
        """The bytes of direct staging area `slot`."""
        if self._broken:
            self._raise_failure("staging")
        if self._slots[slot] is None:
            memory = self._memory
            offset = self._library.direct_offset(memory.sizes, slot)
            self._slots[slot] = view_memory(memory.segments[self.rank] + offset, memory.sizes.direct, self.device)
        return self._slots[slot]

    def _slot_of(self, x: torch.Tensor) -> int:
        """The slot whose beginning x is, or NO_SLOT."""
        for slot, area in enumerate(self._slots):
            if area is not None and x.numel() and x.data_ptr() == area.data_ptr():
                return slot
        return NO_SLOT


class _GpuBytes:
    """Memory of the GPU, by the protocol that torch.as_tensor reads; it owns nothing."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def view_memory(address: int, size: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor over memory of `device`."""
    return torch.as_tensor(_GpuBytes(address, size), device=device)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it that 128-bit loads can take."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def _aligned_target(out: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(out) if out.data_ptr() % ALIGNMENT else out


def _settle(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`out`, filled from the aligned tensor that the kernel wrote, if that is another one."""
    return out if target is out else out.copy_(target)


def _hex(stream: torch.cuda.Stream) -> str:
    return f"{stream.cuda_stream:#x}" if stream.cuda_stream else "0x0 (the default stream)"


def _release(link: _Link) -> None:
    memory = link.memory
    try:
        with torch.cuda.device(memory.device):
            stream = link.stream or torch.cuda.current_stream()
            memory.library.close(ctypes.byref(link.ranks), stream.cuda_stream)
            torch.cuda.synchronize(memory.device)
            memory.release()
    except RuntimeError:
        return  # the GPU is lost, and with it the process's memory there
