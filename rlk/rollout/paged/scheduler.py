"""Which tokens of which sequences go into the next forward pass: continuous batching with chunked prefill.

First come, first served. A step computes one token for every decoding sequence and, besides, up to `prefill_chunk`
tokens of sequences whose known tokens are not all in the cache. The oldest of those takes what it can, so the first
sample of a prompt has prefilled the whole of it before the others are admitted, and they share its pages. When a decode
needs a page and none is left, the youngest running sequence gives its pages back and waits; it will prefill what it
had, its sampled tokens included. `running` and then `waiting` are thereby always in the order of arrival, and the
oldest sequence always advances: every sequence finishes.

The plan depends on the sequences and the sizes alone, so every rank of a tensor-parallel group makes the same one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rlk.rollout.paged.kv_cache import PageTable
from rlk.rollout.paged.sequence import Sequence

# One forward pass: each sequence with the number of tokens it computes, from its first that is not in the cache.
Batch = list[tuple[Sequence, int]]


def sampling_rows(batch: Batch) -> tuple[list[Sequence], list[int]]:
    """The sequences whose last known token is in the batch, so that they sample, and the row of that token."""
    sequences, rows, end = [], [], 0
    for sequence, count in batch:
        end += count
        if sequence.computed + count == sequence.length:
            sequences.append(sequence)
            rows.append(end - 1)
    return sequences, rows


@dataclass
class Work:
    """What a generate() call took."""

    steps: int = 0
    decoded: int = 0  # tokens computed one per sequence and step
    prefilled: int = 0  # tokens computed in chunks
    shared: int = 0  # tokens found in pages of other sequences
    preemptions: int = 0


class Scheduler:
    """Owns the sequences of one generate() call until they finish."""

    def __init__(self, pages: PageTable, prefill_chunk: int, max_running: int, sequences: list[Sequence]) -> None:
        self.pages = pages
        self.prefill_chunk = prefill_chunk
        self.max_running = max_running
        self.waiting = deque(sequences)
        self.running: list[Sequence] = []
        self.work = Work()

    @property
    def unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> Batch:
        """The next forward pass. Follow it by `commit`."""
        self._make_room()
        batch: Batch = []
        budget = self.prefill_chunk
        for sequence in self.running:
            missing = sequence.length - sequence.computed
            if missing == 1:
                batch.append((sequence, 1))
                self.work.decoded += 1
            elif budget:
                budget -= self._prefill(batch, sequence, min(missing, budget))
        while budget and self.waiting and len(self.running) < self.max_running:
            # One page is left for each sequence that is running, so that a decode does not at once undo the admission.
            if not self.pages.admit(self.waiting[0], reserve=len(self.running)):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            self.work.shared += sequence.computed
            budget -= self._prefill(batch, sequence, min(sequence.length - sequence.computed, budget))
        self.work.steps += 1
        return batch

    def commit(self, batch: Batch, finished: list[Sequence]) -> None:
        """Record that `batch` was computed; `finished` sampled their last token in it."""
        for sequence, count in batch:
            sequence.computed += count
        if finished:
            for sequence in finished:
                self.pages.release(sequence)
            self.running = [sequence for sequence in self.running if not sequence.stop_reason]

    def abandon(self) -> None:
        """Give everything back after a failed step; what it was to write may not have been written."""
        for sequence in self.running:
            self.pages.release(sequence)
        self.pages.pool.forget()

    def _prefill(self, batch: Batch, sequence: Sequence, count: int) -> int:
        self.pages.register(sequence, sequence.computed + count)
        batch.append((sequence, count))
        self.work.prefilled += count
        return count

    def _make_room(self) -> None:
        """Give every running sequence a page for its newest token, the oldest first, at the cost of the youngest."""
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if not self.pages.lacks_page(sequence):
                index += 1
            elif self.pages.pool.available:
                self.pages.extend(sequence)
                index += 1
            else:
                self._preempt(self.running.pop())

    def _preempt(self, sequence: Sequence) -> None:
        self.pages.release(sequence)
        self.waiting.appendleft(sequence)
        self.work.preemptions += 1
