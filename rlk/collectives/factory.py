"""Picks the transport of a communicator."""

from __future__ import annotations

import socket
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from rlk.collectives import Communicator, LocalCommunicator, ipc, routes
from rlk.collectives.ipc_library import Library
from rlk.collectives.process_group import ProcessGroupCommunicator
from rlk.collectives.shm import ShmCommunicator
from rlk.errors import UsageError


def make_communicator(group: dist.ProcessGroup | None, device: str, mode: str, timeout_s: float) -> Communicator:
    """The communicator of `group` (None, or one rank: no transport); every rank of the group calls this.

    In consistency mode sums are in the fixed tree: over shared memory for CPU ranks of one host, over each other's
    memory for 2, 4 or 8 GPUs of one host that can reach each other, else over the process group. In native mode
    torch.distributed reduces in its own way. Ranks on GPUs have set their current GPU. The result's `name` says which.
    """
    if group is None or dist.get_world_size(group) == 1:
        return LocalCommunicator()
    if mode == "consistency" and device == "cpu" and _on_one_host(group):
        return ShmCommunicator(group, timeout_s)
    if mode == "consistency" and device == "cuda" and _peers_reach_each_other(group):
        try:
            return ipc.connect(group, timeout_s)
        except UsageError as error:  # on every rank alike
            warnings.warn(f"the collectives go through the process group, which is slower: {error}", stacklevel=2)
    return ProcessGroupCommunicator(group, fixed_order=mode == "consistency", device=device)


def _on_one_host(group: dist.ProcessGroup) -> bool:
    boot = Path("/proc/sys/kernel/random/boot_id")
    hosts = _gather(group, (socket.gethostname(), boot.read_text() if boot.exists() else ""))
    return all(host == hosts[0] for host in hosts)


def _peers_reach_each_other(group: dist.ProcessGroup) -> bool:
    """Whether this is a group of GPUs that can map each other's memory; the same answer on every rank.

    Raises UsageError, on every rank, when the kernels' library is missing on one.
    """
    if dist.get_world_size(group) not in routes.WORLDS or not _on_one_host(group):
        return False
    own = _gpu_ids()
    gpus = _gather(group, own[torch.cuda.current_device()])
    try:
        verdict = _reaches(own, gpus), ""
    except (UsageError, RuntimeError) as error:
        verdict = False, f"rank {dist.get_rank()}: {error}"
    verdicts = _gather(group, verdict)
    for _, problem in verdicts:
        if problem:
            raise UsageError(problem)
    return all(reaches for reaches, _ in verdicts)


def _reaches(own: list[str], gpus: list[str]) -> bool:
    """Whether this rank's GPU reads the memory of `gpus`; one that this process does not see is tried by mapping it."""
    library, here = Library(), torch.cuda.current_device()
    return all(library.can_access_peer(here, own.index(gpu)) for gpu in gpus if gpu in own and gpu != own[here])


def _gpu_ids() -> list[str]:
    """What tells the GPUs that this process sees from all others of the host."""
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def _gather(group: dist.ProcessGroup, value) -> list:
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone
