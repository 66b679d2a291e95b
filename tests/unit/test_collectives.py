"""Collectives between processes: fixed order, whole data, no hang, every mismatch named on every rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlk.collectives import LocalCommunicator
from rlk.collectives.factory import make_communicator
from rlk.collectives.objects import all_gather_object
from rlk.collectives.process_group import ProcessGroupCommunicator
from rlk.collectives.shm import ShmCommunicator
from rlk.collectives.tree import left_size, tree_sum
from rlk.errors import CheckFailed, UsageError
from tests.collective_cases import (
    MISMATCHES,
    check_all_reduce,
    check_reduce_scatter,
    inputs,
    many_reductions,
    mismatch,
    mixed_calls,
    same_bytes,
    second_thread,
)
from tests.spawn import run_ranks

SMALL_STAGING = 4096  # bytes: most messages of the tests then go in several pieces


def test_tree_adds_pairs_of_neighbours():
    a, b, c, d, e, f, g, h = (torch.randn(50) * 10.0**k for k in range(8))
    assert same_bytes(tree_sum([a, b, c, d, e, f, g, h]), ((a + b) + (c + d)) + ((e + f) + (g + h)))
    assert same_bytes(tree_sum([a, b, c, d, e, f]), ((a + b) + (c + d)) + (e + f))
    assert [left_size(n) for n in (2, 3, 4, 5, 8, 9)] == [1, 2, 2, 4, 4, 8]


def test_tree_over_ranks_completes_the_tree_over_leaves():
    leaves = [torch.randn(50) for _ in range(8)]
    for world in (1, 2, 4, 8):
        own = 8 // world
        ranks = [tree_sum(leaves[rank * own:(rank + 1) * own]) for rank in range(world)]
        assert same_bytes(tree_sum(ranks), tree_sum(leaves))


def test_one_rank_needs_no_transport():
    comm = make_communicator(None, "cpu", "consistency", 1.0)
    assert isinstance(comm, LocalCommunicator)
    mixed_calls(comm, rounds=20, with_many=True)
    assert all_gather_object(comm, {"a": 1}) == [{"a": 1}]


def _shm_mixed(rank, world):
    comm = ShmCommunicator(dist.group.WORLD, 30.0, SMALL_STAGING)
    mixed_calls(comm, rounds=100, max_delay_s=0.005, with_many=True)
    check_all_reduce(comm, inputs(torch.Generator().manual_seed(1), world, (0,), torch.float32), False)
    assert all_gather_object(comm, "x" * rank) == ["x" * peer for peer in range(world)]
    comm.close()
    with pytest.raises(CheckFailed, match="closed"):
        comm.barrier()


@pytest.mark.parametrize("world", [2, 3, 5])
def test_mixed_calls_in_pieces_at_uneven_speeds(world):
    run_ranks(world, _shm_mixed)


def _shm_many(rank, world):
    comm = ShmCommunicator(dist.group.WORLD, 30.0)
    start = time.monotonic()
    many_reductions(comm, 10_000)
    large = inputs(torch.Generator().manual_seed(2), world, (world * 300_000,), torch.float32)
    check_all_reduce(comm, large, in_place=True)
    check_reduce_scatter(comm, large, in_place=False)
    return time.monotonic() - start


def test_ten_thousand_reductions_of_changing_data():
    run_ranks(2, _shm_many)


def _every_half(rank, world):
    """All 65536 halves widened and rounded back (plus zero), and sums that fall between two halves."""
    comm = ShmCommunicator(dist.group.WORLD, 30.0)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    every = every[~every.isnan()]
    check_all_reduce(comm, [every, torch.zeros_like(every)], in_place=False)
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    finite = every.nan_to_num(posinf=0, neginf=0)
    check_all_reduce(comm, [finite, finite[order]], in_place=False)


def test_half_precision_rounds_like_torch():
    run_ranks(2, _every_half)


def _fixed_order_over_gloo(rank, world):
    mixed_calls(ProcessGroupCommunicator(dist.group.WORLD, fixed_order=True), rounds=30, with_many=True)
    native = ProcessGroupCommunicator(dist.group.WORLD, fixed_order=False)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = [torch.full((world * 2, 3), float(peer + 1), dtype=dtype) for peer in range(world)]
        check_all_reduce(native, x, in_place=False)
        check_reduce_scatter(native, x, in_place=False)
    native.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_process_group_gives_the_same_bits(world):
    run_ranks(world, _fixed_order_over_gloo)


def _mismatch(rank, world, kind):
    own = mismatch(ShmCommunicator(dist.group.WORLD, 20.0), kind)
    gloo = mismatch(ProcessGroupCommunicator(dist.group.WORLD, fixed_order=True), kind)
    return own, gloo


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_calls_are_named_on_every_rank(world, kind):
    for rank, messages in enumerate(run_ranks(world, _mismatch, kind)):
        for message in messages:
            assert all(call in message for call in MISMATCHES[kind]), message
            assert f"rank {rank} calls" in message and f"rank {world - 1} calls" in message, message
        assert "generation 4" in messages[0]


def _killed(rank, world, timeout_s):
    comm = ShmCommunicator(dist.group.WORLD, timeout_s, SMALL_STAGING)
    if rank == 1:
        # A large all-reduce takes many generations: the kill falls into the middle of one.
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    x = torch.ones(1 << 20)
    start = time.monotonic()
    with pytest.raises(CheckFailed) as caught:
        while True:
            start = time.monotonic()
            comm.all_reduce(x)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("world", [2, 4, 8])
def test_killed_rank_is_named_within_the_time_out(world):
    results = run_ranks(world, _killed, 1.0, may_die=[1])
    for rank in [rank for rank in range(world) if rank != 1]:
        message, seconds = results[rank]
        assert f"rank {rank} in all_reduce waits for rank 1's " in message, message
        assert "signal of generation " in message and "no answer within 1 s" in message, message
        assert seconds < 3


def _closed(rank, world):
    comm = ShmCommunicator(dist.group.WORLD, 60.0)
    comm.barrier()
    if rank == 1:
        comm.close()
        return ""
    with pytest.raises(CheckFailed) as caught:
        comm.barrier()
    with pytest.raises(CheckFailed, match="of no more use"):
        comm.barrier()
    return str(caught.value)


def test_rank_that_closed_is_named_at_once():
    message = run_ranks(2, _closed, limit_s=30)[0]
    assert "rank 0 in barrier waits for rank 1's ready signal of generation 2 (it is at 1)" in message
    assert "has closed" in message


def _second_thread(rank, world):
    second_thread(ShmCommunicator(dist.group.WORLD, 30.0), late=1)


def test_second_thread_raises_and_does_not_hang():
    run_ranks(2, _second_thread)


def _leaves_nothing(rank, world):
    comm = ShmCommunicator(dist.group.WORLD, 30.0)
    left = list(Path("/dev/shm").glob(f"rlk-{os.getpid()}-*"))
    with pytest.raises(UsageError, match="shared memory"):
        ShmCommunicator(dist.group.WORLD, 30.0, staging_bytes=1 << 50)
    return left + list(Path("/dev/shm").glob(f"rlk-{os.getpid()}-*")), comm.world


def test_shared_memory_has_no_names_once_connected():
    assert run_ranks(2, _leaves_nothing) == [([], 2)] * 2


def _misuse(rank, world):
    comm = ShmCommunicator(dist.group.WORLD, 30.0)
    for bad in (lambda: comm.all_reduce(torch.zeros(3, dtype=torch.int64)),
                lambda: comm.reduce_scatter(torch.zeros(3)),
                lambda: comm.all_reduce(torch.zeros(4, 4).t()[:3]),
                lambda: comm.all_reduce(torch.zeros(3), torch.zeros(4)),
                lambda: comm.all_gather(torch.zeros(3), torch.zeros(2, 3, dtype=torch.bfloat16))):
        with pytest.raises(ValueError):
            bad()
    many_reductions(comm, 2)  # bad arguments leave the communicator usable


def test_bad_arguments_are_refused():
    run_ranks(2, _misuse)
