"""Collectives in one fixed order: the same bits on every rank, in every run, by every transport."""

from __future__ import annotations

from typing import Protocol

import torch


class Communicator(Protocol):
    """A group of `world` ranks. Every rank makes the same calls, with equal sizes and dtypes, in the same order.

    Sums are taken in FP32 over the balanced binary tree of collectives/tree.py, in rank order; 16-bit inputs are
    widened, summed in FP32 and rounded once. Tensors are contiguous. Mismatched calls raise CheckFailed naming both
    sides; a peer that does not arrive within the time-out raises CheckFailed naming rank, peer, signal, generation.
    """

    rank: int
    world: int

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over ranks. Returns `out` (may be x itself), or a new tensor."""

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Every rank's x, stacked: [world, *x.shape]. `out` may be storage of which x is this rank's own slice."""

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x is [world * n, ...]; returns this rank's [n, ...] of the sum over ranks."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def close(self) -> None:
        """Free what the communicator holds; in any order across ranks."""


class LocalCommunicator:
    """The group of one rank."""

    rank, world = 0, 1

    def all_reduce(self, x, out=None):
        return x.clone() if out is None else out.copy_(x)

    def all_gather(self, x, out=None):
        return x.clone().unsqueeze(0) if out is None else out.copy_(x.unsqueeze(0))

    def reduce_scatter(self, x, out=None):
        return self.all_reduce(x, out)

    def barrier(self):
        pass

    def close(self):
        pass
