"""Picks the transport of a communicator."""

from __future__ import annotations

import socket
from pathlib import Path

import torch.distributed as dist

from rlk.collectives import Communicator, LocalCommunicator
from rlk.collectives.process_group import ProcessGroupCommunicator
from rlk.collectives.shm import ShmCommunicator


def make_communicator(group: dist.ProcessGroup | None, device: str, mode: str, timeout_s: float) -> Communicator:
    """The communicator of `group` (None, or one rank: no transport); every rank of the group calls this.

    In consistency mode sums are in the fixed tree: over shared memory for CPU ranks of one host, else over the process
    group. In native mode torch.distributed reduces in its own way.
    """
    if group is None or dist.get_world_size(group) == 1:
        return LocalCommunicator()
    if mode == "consistency" and device == "cpu" and _on_one_host(group):
        return ShmCommunicator(group, timeout_s)
    return ProcessGroupCommunicator(group, fixed_order=mode == "consistency")


def _on_one_host(group: dist.ProcessGroup) -> bool:
    boot = Path("/proc/sys/kernel/random/boot_id")
    mine = (socket.gethostname(), boot.read_text() if boot.exists() else "")
    hosts: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, mine, group=group)
    return all(host == mine for host in hosts)
