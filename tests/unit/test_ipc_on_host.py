"""The GPU communicator between processes without a GPU: the kernels run on the host, one fiber per lane.

The memory is shared as on a GPU: handles travel, every rank maps its peers' segments.
"""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
import torch.distributed as dist

from rlk.build.host_fibers import build_host
from rlk.collectives import ipc, ipc_memory
from tests import ipc_cases
from tests.collective_cases import MISMATCHES
from tests.fake_gpu import install
from tests.ipc_cases import ONE_SHOT, PUSHED, TWO_SHOT
from tests.spawn import run_ranks


@pytest.fixture(scope="module", autouse=True)
def built():
    build_host(32)  # once, not in every rank


def run(world, case, *args, may_die=(), **options):
    """case(communicator, *args) on every rank; `options` are those of ipc.connect."""
    return run_ranks(world, _on_host, case, args, options, may_die=may_die)


def _on_host(rank, world, case, args, options):
    patch = pytest.MonkeyPatch()
    install(patch, ctypes.CDLL(str(build_host(32))))
    patch.setattr(ipc_memory, "current_gpu", lambda: torch.device("cpu"))
    options = {"timeout_s": 30.0, "sizes": ipc.SIZES._replace(slice=4096), **options}
    return case(ipc.connect(dist.group.WORLD, **options), *args)


@pytest.mark.parametrize("world, rounds", [(2, 30), (4, 6)])
@pytest.mark.parametrize("limits", [PUSHED, ONE_SHOT, TWO_SHOT], ids=["pushed", "one-shot", "two-shot"])
def test_mixed_calls_at_uneven_speeds(world, rounds, limits):
    run(world, ipc_cases.mixed, limits, rounds, 20_000)


@pytest.mark.parametrize("limits", [PUSHED, ONE_SHOT, TWO_SHOT], ids=["pushed", "one-shot", "two-shot"])
def test_calls_with_changing_inputs_staging_and_the_fused_norm(limits):
    run(2, ipc_cases.eager_calls, limits, 3)


def test_reduce_scatter_of_many_tensors():
    run(2, ipc_cases.many_at_once)


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_calls_are_named_on_every_rank(kind):
    for message in run(2, ipc_cases.mismatched, kind):
        assert all(call in message for call in MISMATCHES[kind]), message
        assert "rank 1 calls" in message and "generation 4" in message, message


def test_a_slot_used_twice_in_a_row_is_an_error():
    for message in run(2, ipc_cases.slot_twice):
        assert "slot 1 in generation 2 right after another call in slot 1" in message


def test_a_killed_rank_ends_the_others_within_the_time_out():
    message, seconds = run(2, ipc_cases.killed, 1 << 16, timeout_s=1.0, may_die=[1])[0]
    assert "rank 0 in a collective waits for rank 1's " in message
    assert re.search("1's (ready signal|done signal|call|data) of generation ", message), message
    assert "no answer within 1 s" in message
    assert seconds < 4


def test_a_rank_that_closed_is_named_at_once():
    message = run(2, ipc_cases.closed, timeout_s=60.0)[0]
    assert "rank 0 in a collective waits for rank 1's ready signal of generation 2 (it is at 1)" in message
    assert "has closed" in message
