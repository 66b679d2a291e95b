"""The collectives under mpirun; skipped in a plain pytest. One command runs them:

    mpirun --allow-run-as-root --oversubscribe -n 2 python -m pytest --with-mpi tests/mpi

What ends ranks cannot be here, since mpirun then ends all of them: tests/unit/test_collectives.py kills one of 2, 4, 8.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from rlk.collectives.process_group import ProcessGroupCommunicator
from rlk.collectives.shm import ShmCommunicator
from rlk.topology import Topology, connect
from tests.collective_cases import (
    MISMATCHES,
    busy_process,
    many_reductions,
    mismatch,
    mixed_calls,
    queued_calls,
    second_thread,
)

pytestmark = pytest.mark.mpi(min_size=2)

SIZES = (1, 129, 512, 33)


@pytest.fixture
def comm(world_group):
    comm = ShmCommunicator(world_group, 60.0)
    yield comm
    comm.close()


@pytest.mark.parametrize("staging_bytes", [4096, 1 << 20])
def test_mixed_calls_at_uneven_speeds(world_group, staging_bytes):
    comm = ShmCommunicator(world_group, 30.0, staging_bytes)
    mixed_calls(comm, rounds=100, max_delay_s=0.05, with_many=True)
    comm.close()


def test_hundred_thousand_reductions_of_changing_data_under_load(comm):
    """The load runs beside all of them, for a few at full priority: then each call may wait for a whole time slice."""
    with busy_process(nice=19) if comm.rank == 0 else nullcontext():
        many_reductions(comm, 99_500, SIZES)
    with busy_process() if comm.rank == 0 else nullcontext():
        many_reductions(comm, 500, SIZES)


def test_late_rank_is_waited_for(comm):
    for late in range(comm.world):
        if comm.rank == late:
            time.sleep(0.3)
        many_reductions(comm, 3)


def test_rank_that_is_hundred_calls_behind_corrupts_nothing(comm):
    for late in range(comm.world):
        queued_calls(comm, late, 100, dist.barrier)


def test_second_thread_raises_on_every_rank(comm):
    for late in (0, 1):
        second_thread(comm, late)


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_calls_are_named_on_every_rank(comm, kind):
    message = mismatch(comm, kind)
    assert all(call in message for call in MISMATCHES[kind])


def test_process_group_gives_the_same_bits(world_group):
    mixed_calls(ProcessGroupCommunicator(world_group, fixed_order=True), rounds=30, with_many=True)


def test_all_groups_of_a_topology_reduce_side_by_side(world_group):
    world, rank = world_group.size(), world_group.rank()
    groups = connect(Topology.plan(world, rank, tp=2, cp=1, rollout_tp=1), "cpu", "consistency", 30.0)
    for comm in (groups.tp, groups.grad, groups.rollout, groups.world):
        mixed_calls(comm, rounds=20)
    groups.close()
