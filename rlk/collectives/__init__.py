"""Collectives in one fixed order: the same bits on every rank, in every run, by every transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rlk.collectives.arguments import several


class Communicator(Protocol):
    """A group of `world` ranks. Every rank makes the same calls, with equal sizes and dtypes, in the same order.

    Sums are taken in FP32 over the balanced binary tree of collectives/tree.py, in rank order; 16-bit inputs are
    widened, summed in FP32 and rounded once. Tensors are contiguous. Mismatched calls raise CheckFailed naming both
    sides; a peer that does not arrive within the time-out raises CheckFailed naming rank, peer, signal, generation. On
    a GPU calls are queued on the current stream, and what went wrong is raised by a later call or by check().
    """

    name: str  # the transport: "local", "shm", "ipc" or "process_group"
    rank: int
    world: int
    device: torch.device  # of the tensors it takes

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over ranks. Returns `out` (may be x itself), or a new tensor."""

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Every rank's x, stacked: [world, *x.shape]. `out` may be storage of which x is this rank's own slice."""

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x is [world * n, ...]; returns this rank's [n, ...] of the sum over ranks."""

    def reduce_scatter_many(self, xs: Sequence[torch.Tensor],
                            outs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """reduce_scatter of several tensors of one dtype, at the price of fewer calls where the transport can."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def check(self) -> None:
        """Wait for the calls so far and raise CheckFailed when one of them went wrong."""

    def close(self) -> None:
        """Free what the communicator holds; in any order across ranks."""


class LocalCommunicator:
    """The group of one rank; its tensors may be anywhere."""

    name, rank, world, device = "local", 0, 1, torch.device("cpu")

    def all_reduce(self, x, out=None):
        return x.clone() if out is None else out.copy_(x)

    def all_gather(self, x, out=None):
        return x.clone().unsqueeze(0) if out is None else out.copy_(x.unsqueeze(0))

    def reduce_scatter(self, x, out=None):
        return self.all_reduce(x, out)

    def reduce_scatter_many(self, xs, outs=None):
        return [self.reduce_scatter(x, out) for x, out in several(xs, outs)]

    def barrier(self):
        pass

    def check(self):
        pass

    def close(self):
        pass
