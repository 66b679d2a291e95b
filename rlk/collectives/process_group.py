"""Collectives over a torch process group (gloo, NCCL, RCCL): several hosts, and the native arm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rlk.collectives.arguments import scattered_shape, several
from rlk.collectives.tree import tree_sum
from rlk.errors import CheckFailed

# torch 2.13 renamed them, and warns at every call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroupCommunicator:
    """A Communicator (see rlk.collectives) over torch.distributed.

    With `fixed_order` a sum is an all-gather followed by the tree on every rank: the bits of the other transports.
    Without it the library reduces in its own order and dtype. Mismatched calls are found on the CPU and in fixed order;
    elsewhere they are the library's to find. On a GPU everything but barrier() is queued on the current stream.
    """

    name = "process_group"

    def __init__(self, group: dist.ProcessGroup, fixed_order: bool, device: str = "cpu") -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self._group = group
        self._names = dist.get_process_group_ranks(group)
        self._fixed_order = fixed_order
        # Asking every rank what it calls costs one more small message, and on a GPU it would stop the stream.
        self._compare = fixed_order and self.device.type == "cpu"
        self._calls = 0

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty_like(x) if out is None else out
        self._begin("all_reduce", x)
        if self._fixed_order:
            return out.copy_(tree_sum(self._gather(x).unbind(0)))
        out.copy_(x)
        self._transport(dist.all_reduce, out)
        return out

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty((self.world, *x.shape)) if out is None else out
        self._begin("all_gather", x)
        return out.copy_(self._gather(x))

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        scattered_shape(x, self.world)  # or ValueError
        parts = x.unflatten(0, (self.world, -1))
        out = torch.empty_like(parts[0]) if out is None else out
        self._begin("reduce_scatter", x)
        if self._fixed_order:
            received = torch.empty_like(parts)
            self._transport(dist.all_to_all_single, _as_bytes(received), _as_bytes(parts))
            return out.copy_(tree_sum(received.unbind(0)))
        self._transport(_reduce_scatter, out, x)
        return out

    def reduce_scatter_many(self, xs: Sequence[torch.Tensor],
                            outs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        return [self.reduce_scatter(x, out) for x, out in several(xs, outs)]

    def barrier(self) -> None:
        self._begin("barrier", torch.empty(0))
        self._transport(dist.barrier)

    def check(self) -> None:
        """Wait for the calls so far."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Nothing: the process group belongs to whoever made it."""

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((self.world, *x.shape))
        self._transport(_all_gather, _as_bytes(gathered), _as_bytes(x))
        return gathered

    def _begin(self, operation: str, x: torch.Tensor) -> None:
        """Count the call and, where that is cheap, stop unless every rank makes the same one."""
        self._calls += 1
        if not self._compare:
            return
        mine = (operation, str(x.dtype).removeprefix("torch."), x.numel())
        calls: list = [None] * self.world
        self._transport(dist.all_gather_object, calls, mine)
        for peer, theirs in enumerate(calls):
            if theirs != mine:
                raise CheckFailed(
                    f"ranks disagree in call {self._calls}: rank {self._names[self.rank]} calls {_words(mine)}, rank "
                    f"{self._names[peer]} calls {_words(theirs)}; make every rank call the same operations in the "
                    "same order")

    def _transport(self, function, *args) -> None:
        try:
            function(*args, group=self._group)
        except RuntimeError as error:
            raise CheckFailed(f"rank {self._names[self.rank]}: {function.__name__} failed in call {self._calls} over "
                              f"ranks {self._names}: {error}; see whether one of them died") from error


def _words(call: tuple[str, str, int]) -> str:
    operation, dtype, count = call
    return operation if operation == "barrier" else f"{operation} of {count} x {dtype}"


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, flat: transports need not know the dtype of what they only move."""
    return x.view(-1).view(torch.uint8)
