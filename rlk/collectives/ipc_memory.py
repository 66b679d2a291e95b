"""GPU memory that the processes of one host share: every rank's segment, mapped by all (CUDA and HIP IPC).

The memory comes from cudaMalloc or hipMalloc, not from torch's allocator: how that one carves up its memory (say, with
expandable_segments) does not matter.

Freeing memory that another process still has mapped is undefined. So each rank says in a page of shared host memory
when it has unmapped the others' segments, and a segment is freed once everybody has said so: when the last rank closes,
or at the next opening or closing of any group in this process, or with the process.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rlk.collectives.failure import Failure
from rlk.collectives.ipc_library import Library, Sizes
from rlk.collectives.shm import map_segments
from rlk.errors import UsageError

FLAGS_BYTES = 4096
_still_mapped: list[PeerMemory] = []  # released here, but not everywhere


class PeerMemory:
    """This rank's segment, the peers' mapped beside it, and what the kernels keep for themselves.

    segments         the ranks' segments as addresses of this process, in rank order
    progress         address of this rank's own state on the GPU
    failure          the failure record as the host sees it
    failure_address  .. and as the GPU does
    names            the ranks' global numbers, for messages
    Every rank of `group` makes one at the same time, on its current GPU. Raises UsageError, on every rank, when one of
    them cannot make its memory or map another's.
    """

    def __init__(self, group: dist.ProcessGroup, sizes: Sizes) -> None:
        free_what_is_unmapped()
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.names = dist.get_process_group_ranks(group)
        self.device = current_gpu()
        self.sizes = sizes
        self.library = Library()
        self.segments: list[int | None] = [None] * self.world
        self.progress = self.failure = self.failure_address = self._pinned = None
        self._flags: list[mmap.mmap] = []
        try:
            handles = _share(group, *self._create())
            _share(group, *self._open(handles))
            self._flags = map_segments(group, FLAGS_BYTES)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unmap the peers and free what is this rank's alone; its segment as soon as no peer has it mapped.

        The caller has seen to it that no kernel of this rank runs any more.
        """
        for rank, address in enumerate(self.segments):
            if rank != self.rank and address is not None:
                self.library.ipc_close(address)
        if self.progress is not None:
            self.library.memory_free(self.progress)
        self.failure = None
        if self._pinned is not None:
            self.library.pinned_free(self._pinned)
        if self._flags:
            self._flags[self.rank][0] = 1
        if self.segments[self.rank] is not None:
            _still_mapped.append(self)
        free_what_is_unmapped()

    def free_if_unmapped(self) -> bool:
        """Free this rank's segment if every rank has unmapped the others'. A rank that died never says so."""
        if not self._flags or not all(page[0] for page in self._flags):
            return False
        self.library.memory_free(self.segments[self.rank])
        for page in self._flags:
            page.close()
        return True

    def _create(self) -> tuple[bytes, str]:
        """This rank's memory. Returns its handle, and what went wrong or an empty string."""
        try:
            segment, progress, failure = self.library.collective_bytes(self.sizes, self.world)
            self.segments[self.rank] = self.library.memory_create(segment)
            self.progress = self.library.memory_create(progress)
            self._pinned, self.failure_address = self.library.pinned_create(failure)
            self.failure = Failure.from_address(self._pinned)
            torch.cuda.synchronize(self.device)  # it is all zeroes before any peer sees it
            return self.library.ipc_export(self.segments[self.rank]), ""
        except RuntimeError as error:
            return b"", f"rank {self.names[self.rank]} cannot make memory to share on {self.device}: {error}"

    def _open(self, handles: Sequence[bytes]) -> tuple[bytes, str]:
        """Map the peers' segments. Returns nothing, and what went wrong or an empty string."""
        for peer, handle in enumerate(handles):
            if peer == self.rank:
                continue
            try:
                self.segments[peer] = self.library.ipc_open(handle)
            except RuntimeError as error:
                return b"", (f"rank {self.names[self.rank]} cannot map the GPU memory of rank {self.names[peer]}: "
                             f"{error}; in containers, let the ranks share one (or start it with --ipc=host)")
        return b"", ""


def current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def free_what_is_unmapped() -> None:
    """Free the segments of closed groups that no peer has mapped any more."""
    for memory in list(_still_mapped):
        if memory.free_if_unmapped():
            _still_mapped.remove(memory)


def _share(group: dist.ProcessGroup, value: bytes, problem: str) -> list[bytes]:
    """Every rank's value; UsageError on all ranks when one has a problem."""
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (value, problem), group=group)
    for _, what in everyone:
        if what:
            raise UsageError(what)
    return [one for one, _ in everyone]
