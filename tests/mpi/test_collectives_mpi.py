"""The collectives under mpirun; skipped in a plain pytest. One command runs them:

    mpirun --allow-run-as-root --oversubscribe -n 2 python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import time

import pytest

from rlk.collectives.process_group import ProcessGroupCommunicator
from rlk.collectives.shm import ShmCommunicator
from rlk.topology import Topology, connect
from tests.collective_cases import MISMATCHES, many_reductions, mismatch, mixed_calls

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("staging_bytes", [4096, 1 << 20])
def test_mixed_calls_at_uneven_speeds(world_group, staging_bytes):
    comm = ShmCommunicator(world_group, 30.0, staging_bytes)
    mixed_calls(comm, rounds=100, max_delay_s=0.05)
    comm.close()


def test_ten_thousand_reductions_of_changing_data(world_group):
    comm = ShmCommunicator(world_group, 30.0)
    many_reductions(comm, 10_000)
    comm.close()


def test_late_rank_is_waited_for(world_group):
    comm = ShmCommunicator(world_group, 30.0)
    for late in range(comm.world):
        if comm.rank == late:
            time.sleep(0.3)
        many_reductions(comm, 3)
    comm.close()


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_calls_are_named_on_every_rank(world_group, kind):
    message = mismatch(ShmCommunicator(world_group, 20.0), kind)
    assert all(call in message for call in MISMATCHES[kind])


def test_process_group_gives_the_same_bits(world_group):
    mixed_calls(ProcessGroupCommunicator(world_group, fixed_order=True), rounds=30)


def test_all_groups_of_a_topology_reduce_side_by_side(world_group):
    world, rank = world_group.size(), world_group.rank()
    groups = connect(Topology.plan(world, rank, tp=2, cp=1, rollout_tp=1), "cpu", "consistency", 30.0)
    for comm in (groups.tp, groups.grad, groups.rollout, groups.world):
        mixed_calls(comm, rounds=20)
    groups.close()
