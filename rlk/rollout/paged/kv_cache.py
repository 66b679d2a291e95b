"""The paged KV cache: which pages are in use, which sequence they belong to, and the pages themselves.

A page holds the keys and values of S consecutive tokens of a sequence, in every layer. Whole pages that prefill wrote
are registered under a digest of their tokens and of all tokens before, so that another sequence that starts with the
same tokens shares them: the samples of one prompt, and prompts of later calls. A partly filled page is never shared,
so a shared page is never written.

Shape legend: L layers, P pages, S page size (tokens), G kv heads (local), E head dim, B lanes (running sequences).
"""

from __future__ import annotations

import numpy as np
import torch

from rlk.rollout.paged.sequence import Sequence


def allocate_pages(num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int,
                   dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every page, each [L, P, S, G, E] and uninitialized: attention reads only what was written."""
    shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


class PagePool:
    """The state of each page.

    A page is held by one or more sequences, free, or idle: held by none but still found by its digest. `take` hands
    out free pages first, then the page that has been idle for longest.
    """

    def __init__(self, num_pages: int) -> None:
        self.holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: dict[int, None] = {}  # a dict keeps insertion order: idle for longest comes first
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that `take` can still hand out."""
        return len(self._free) + len(self._idle)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def find(self, digests: list[bytes]) -> list[int]:
        """Pages of the longest registered prefix; they are not held yet."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, page: int) -> None:
        """Add a holder to a page that `find` returned."""
        self._idle.pop(page, None)
        self.holders[page] += 1

    def take(self) -> int:
        """A page for writing, held once. The caller has checked `available`."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._idle))
            del self._idle[page]
            del self._page_of[self._digest_of.pop(page)]
        self.holders[page] = 1
        return page

    def release(self, pages: list[int]) -> None:
        """Drop one holder of each page. The last page goes idle first: without it its prefix is still of use."""
        for page in reversed(pages):
            self.holders[page] -= 1
            if self.holders[page] == 0:
                if page in self._digest_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, digest: bytes) -> None:
        """Let `find` return this held page; the first page registered under a digest stays."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def forget(self) -> None:
        """Forget every digest: the weights changed, and the keys and values with them."""
        self._page_of.clear()
        self._digest_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()


class PageTable:
    """Gives running sequences their pages and a lane: one row of `block_table` int32 [B, most pages of a sequence]."""

    def __init__(self, num_pages: int, page_size: int, lanes: int, max_length: int) -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.block_table = np.zeros((lanes, self.pages_for(max_length)), np.int32)
        self._free_lanes = list(range(lanes - 1, -1, -1))

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def admit(self, sequence: Sequence, reserve: int = 0, share: bool = True) -> bool:
        """Give a lane, and pages for all known tokens; False, and nothing changed, unless `reserve` pages are left.

        Pages that already hold its first tokens are shared and count as computed. The last known token is always
        computed again, for its logits.
        """
        pool, length = self.pool, sequence.length
        shared = []
        if share:
            shared = pool.find(sequence.page_digests(self.page_size)[:(length - 1) // self.page_size])
        fresh = self.pages_for(length) - len(shared)
        if fresh + reserve > pool.available - sum(map(pool.is_idle, shared)):
            return False
        for page in shared:
            pool.hold(page)
        sequence.pages = shared + [pool.take() for _ in range(fresh)]
        sequence.computed = len(shared) * self.page_size
        sequence.lane = self._free_lanes.pop()
        self.block_table[sequence.lane, :len(sequence.pages)] = sequence.pages
        return True

    def lacks_page(self, sequence: Sequence) -> bool:
        """True when the newest token of a running sequence has no page yet."""
        return sequence.length > len(sequence.pages) * self.page_size

    def extend(self, sequence: Sequence) -> None:
        """Give one more page; the caller has checked `pool.available`."""
        page = self.pool.take()
        self.block_table[sequence.lane, len(sequence.pages)] = page
        sequence.pages.append(page)

    def register(self, sequence: Sequence, end: int) -> None:
        """Share the whole pages among tokens computed..end, which this engine step is about to write.

        Within a step every layer writes its keys and values before it reads any, so a sequence that is admitted later
        in the same step may already use them.
        """
        digests = sequence.page_digests(self.page_size)
        for index in range(sequence.computed // self.page_size, end // self.page_size):
            self.pool.register(sequence.pages[index], digests[index])

    def release(self, sequence: Sequence) -> None:
        """Take lane and pages back."""
        self.pool.release(sequence.pages)
        self._free_lanes.append(sequence.lane)
        sequence.pages, sequence.lane, sequence.computed = [], -1, 0
