"""The gfx942 code objects of the collectives between GPUs, executed: the bits of numpy's tree, in both wave orders."""

import itertools

import numpy as np
import pytest

from rlk.collectives.failure import NO_SLOT
from rlk.kernels import norm as triton_norm
from tests.gfx942 import collective_runs as runs
from tests.gfx942.collective_runs import EmulatedGroup, Job
from tests.gfx942.emulator import Device
from tests.gfx942.hip_runs import BFLOAT16, FLOAT16, FLOAT32, ORDERS, STORED
from tests.gfx942.numerics import same_bytes
from tests.gfx942.triton_runs import run_variant

WAVE = 64


def check(job, results):
    for rank, (outs, expected) in enumerate(zip(results, job.expected, strict=True)):
        for out, right in zip(outs, expected, strict=True):
            assert same_bytes(out, right), (rank, job.operation, job.dtype, job.route, job.slot, right.shape)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", STORED)
def test_sum_over_ranks_is_the_tree(dtype, world):
    """All routes, from slices and slots; one workgroup or several."""
    group = EmulatedGroup(world, ORDERS[world % 4 == 0], direct_bytes=512)
    rng, count = np.random.default_rng(world), 256 // STORED[dtype].itemsize
    for k, route in enumerate((runs.ONE_SHOT, runs.TWO_SHOTS, runs.PUSHED)[:2 * world - 1]):
        elements = count // world + 3 if world == 8 else count + 3
        job = runs.all_reduce(rng, world, dtype, elements, route, in_place=k == 1)
        check(job, group.run(job))
    if world < 8:
        job = runs.all_reduce(rng, world, dtype, count - 5, runs.ONE_SHOT, slot=dtype % 2)
        check(job, group.run(job))


@pytest.mark.parametrize("world, order", [(2, "reverse"), (4, "forward"), (4, "reverse")])
def test_mixed_calls(world, order):
    rng, slot = np.random.default_rng(world), NO_SLOT
    group = EmulatedGroup(world, order, slice_bytes=512, direct_bytes=1024, push_bytes=1024)
    for _ in range(7):
        job = runs.random_job(rng, world, WAVE, slot, group.sizes)
        check(job, group.run(job))
        slot = job.slot


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_gather_scatter_and_barrier(world):
    group, rng = EmulatedGroup(world, slice_bytes=512), np.random.default_rng(world)
    for job in (runs.all_gather(rng, world, FLOAT32, 33), runs.all_gather(rng, world, BFLOAT16, 7),
                runs.barrier(world), *(runs.reduce_scatter(rng, world, dtype, [5, 0, 8]) for dtype in STORED)):
        check(job, group.run(job))


@pytest.mark.parametrize("route", [runs.ONE_SHOT, runs.TWO_SHOTS])
def test_lanes_hold_several_vectors(route):
    """More rows of vectors than are on their way at a time, and a cut-off vector behind them."""
    group, rng = EmulatedGroup(2, slice_bytes=1 << 15, size=1 << 25), np.random.default_rng(1)
    group.cut = (1 << 15, 1)
    job = runs.all_reduce(rng, 2, FLOAT16, (1 << 14) - 3, route)
    check(job, group.run(job))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("D", [48, 512, 1024, 2064, 4096, 8192])
@pytest.mark.parametrize("route", [runs.ONE_SHOT, runs.PUSHED])
def test_norm_has_the_bits_of_the_sum_and_the_triton_kernel(D, order, route):
    """From a slice, or pushed, and from a slot."""
    world, T, rng = 2, 1 + (D == 48), np.random.default_rng(D)
    job = runs.norm(rng, world, WAVE, T, D, NO_SLOT if order == "forward" else 0, route)
    row = runs.round_up(4 * D, 128)
    group = EmulatedGroup(world, order, row, runs.round_up(T * 4 * D, 128), push_bytes=row)
    results = group.run(job)
    check(job, results)
    if order == "forward":
        _, residual, weight = job.inputs[0]
        partial = runs.expected_sum(FLOAT32, [xs[0] for xs in job.inputs])
        name = triton_norm.choose("gfx942", D)
        variant = next(v for v in triton_norm.variants("gfx942") if v.label == f"add_rms_norm/{name}")
        after = run_variant(Device(), variant, (T,), dict(partial=partial, residual=residual, w=weight, D=D,
                                                          hidden=np.zeros_like(residual), y=np.zeros_like(residual),
                                                          eps=runs.EPS))
        assert same_bytes(results[0][0], after["hidden"]) and same_bytes(results[0][1], after["y"])


@pytest.mark.parametrize("world", [1, 4, 8])
def test_norm_of_several_rows_over_any_world(world):
    group, rng = EmulatedGroup(world, slice_bytes=128, direct_bytes=512), np.random.default_rng(world)
    for slot, route in ((NO_SLOT, runs.ONE_SHOT), (1, runs.ONE_SHOT), (0, runs.PUSHED)):
        job = runs.norm(rng, world, WAVE, 3, 32, slot, route)
        check(job, group.run(job))


def test_values_at_the_edges_of_fp16_round_as_numpy_does():
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    picked = every[np.isfinite(every)][::151]
    pairs = [picked, picked[::-1].copy()]
    job = Job(runs.ALL_REDUCE, [[x] for x in pairs], [[runs.expected_sum(FLOAT16, pairs)]] * 2, FLOAT16)
    check(job, EmulatedGroup(2, slice_bytes=1024).run(job))


# ---- failures ----


def one_call(count=12, world=2, **options):
    return runs.all_reduce(np.random.default_rng(count), world, FLOAT32, count, **options)


@pytest.mark.parametrize("order", ORDERS)
def test_dead_rank_ends_the_others_with_the_failure_recorded(order):
    group, job, alive = EmulatedGroup(4, order, timeout_s=1e-6), one_call(world=4), (0, 1, 3)
    group.run(job)
    for _ in range(2):  # the second time broken workgroups return at once
        launches, outs = zip(*(group.launch(rank, job) for rank in alive), strict=True)
        group.device.launch_together(list(launches))
        for rank, (out,) in zip(alive, outs, strict=True):
            assert (group.device.get(out, (12,), np.float32) == 77).all()
            failure = group.record(rank)
            progress = group.progress(rank)[0]
            assert failure.tobytes() == progress["failure"].tobytes() and progress["generation"] == 1
            assert (failure["generation"], failure["signal"]) == (2, runs.READY)
            assert (failure["kind"], failure["peer"], failure["seen"]) == (runs.TIMED_OUT, 2, 1) or (
                failure["kind"] == runs.PEER_CLOSED and failure["peer"] in alive)


def test_closed_rank_is_not_waited_for():
    group = EmulatedGroup(2, timeout_s=20)
    group.device.launch_together([group.close_launch(1), group.launch(0, one_call(100))[0]])
    failures = group.progress(0)["failure"][:2]
    assert (failures["kind"] == runs.PEER_CLOSED).all() and (failures["peer"] == 1).all()
    assert group.record(0)["kind"] == runs.PEER_CLOSED


@pytest.mark.parametrize("other", [one_call(8), one_call(100, route=runs.TWO_SHOTS), one_call(100, route=runs.PUSHED),
                                   runs.barrier(2)], ids=["size", "route", "pushed", "operation"])
def test_ranks_that_disagree_both_find_out(other):
    group, calls = EmulatedGroup(2, timeout_s=20), (one_call(100), other)
    group.device.launch_together([group.launch(rank, job)[0] for rank, job in enumerate(calls)])
    for rank, (mine, theirs) in enumerate(itertools.permutations(calls)):
        failure = group.record(rank)
        assert (failure["kind"], failure["peer"]) == (runs.MISMATCH, 1 - rank)
        for side, job in (("mine", mine), ("theirs", theirs)):
            assert (failure[side]["operation"], failure[side]["count"]) == (job.operation, job.size)


def test_a_slot_may_not_be_used_twice_in_a_row():
    group, job = EmulatedGroup(2, direct_bytes=512, timeout_s=20), one_call(100, slot=1)
    check(job, group.run(job))
    group.run(job)
    for rank in range(2):
        failure = group.record(rank)
        assert (failure["kind"], failure["mine"]["slot"], failure["generation"]) == (runs.SLOT_REUSED, 1, 2)
