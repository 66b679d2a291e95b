"""Ranks as threads of this process: as much of a Communicator as code needs that only gathers or adds zeros."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

LIMIT_S = 30.0


class ThreadCommunicator:
    """One rank's end. Sums are in rank order, not in the tree: they are exact where all addends but one are zero."""

    def __init__(self, rank: int, slots: list, meeting: threading.Barrier) -> None:
        self.name, self.rank, self.world, self.device = "threads", rank, len(slots), torch.device("cpu")
        self._slots, self._meeting = slots, meeting

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self._slots[self.rank] = x
        self.barrier()
        gathered = torch.stack(self._slots)
        self.barrier()
        return gathered if out is None else out.copy_(gathered)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        total = self.all_gather(x).sum(0)
        return total if out is None else out.copy_(total)

    def barrier(self) -> None:
        self._meeting.wait()

    def check(self) -> None:
        pass


def on_threads(world: int, function: Callable) -> list:
    """function(comm) on `world` ranks at once; their results in rank order."""
    slots, meeting = [None] * world, threading.Barrier(world, timeout=LIMIT_S)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: function(ThreadCommunicator(rank, slots, meeting)), range(world)))
