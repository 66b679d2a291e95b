"""The HIP kernels' gfx942 code objects, executed: the bytes of the host build, in both wave orders."""

import itertools

import numpy as np
import pytest

from tests.gfx942 import hip_runs
from tests.gfx942.hip_runs import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    ORDERS,
    STORED,
    Emulated,
    EmulatedGroup,
    HostFibers,
    draw_inputs,
    expected_sum,
)
from tests.gfx942.numerics import same_bytes
from tests.gfx942.retained_sets import INV_T, VOCAB, make_case


@pytest.fixture
def host():
    return HostFibers(64)


@pytest.fixture(params=ORDERS)
def gfx942(request):
    return Emulated(request.param)


@pytest.fixture
def case():
    return make_case((1, 2, 64, 257, 700))


def test_score_has_the_bytes_of_the_host_build(gfx942, case, host):
    scores = gfx942.support_score(case.values, case.offsets, case.index, INV_T)
    assert same_bytes(scores, host.support_score(case.values, case.offsets, case.index, INV_T))
    np.testing.assert_allclose(scores, case.scores(), rtol=2e-6, atol=4e-6)


def test_targets_are_found(gfx942, case):
    targets = np.array([*case.targets[:3], -1, VOCAB])
    index = gfx942.find_targets(case.offsets, case.ids, targets)
    assert index.tolist() == [*case.index[:3], -1, -1]
    many = make_case((1,) * 300)
    assert same_bytes(gfx942.find_targets(many.offsets, many.ids, many.targets), many.index)


@pytest.mark.parametrize("first, columns", [(0, VOCAB), (1250, 1250)])
def test_logits_are_picked(gfx942, case, first, columns, host):
    logits = np.ascontiguousarray(case.logits[:, first:first + columns])
    picked, expected = (build.pick_logits(logits, case.offsets, case.ids, first, np.full_like(case.values, 77))
                    for build in (gfx942, host))
    assert same_bytes(picked, expected)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_gradient_has_the_bytes_of_the_host_build(gfx942, case, dtype, host):
    lse = case.scores()[2].astype(np.float32)
    for columns in (1251, 40):  # 1251: rows that start at no multiple of 16
        got, expected = (
            build.support_score_backward(case.values, case.offsets, case.ids, case.index, lse, case.grad, 1250, INV_T,
                                         dtype, np.full((case.rows, columns), 77, STORED[dtype]))
            for build in (gfx942, host))
        assert same_bytes(got, expected)


def test_tokens_are_those_of_the_host_build(gfx942, host):
    case = make_case((1, 2, 64, 257, 700) * 3)
    keys = (np.arange(case.rows) + (1 << 40), np.arange(case.rows) * 3)
    got, expected = (build.draw(case.values, case.offsets, case.ids, INV_T, 1 << 63, *keys) for build in (gfx942, host))
    assert same_bytes(got, expected)
    values = case.values.copy()
    values[case.row(3).start + 5] = np.nan
    assert gfx942.draw(values, case.offsets, case.ids, INV_T, 1, *keys)[3] == -1


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", STORED)
def test_sum_over_ranks_is_the_tree(dtype, world):
    """A few generations: changing data and sizes, in place or not, one workgroup or several."""
    group, rng = EmulatedGroup(world, ORDERS[world % 4 == 0]), np.random.default_rng(world)
    per_slice = group.slice_bytes // STORED[dtype].itemsize
    for count, in_place in zip([1, 2 * per_slice + 3, 0, 7, per_slice], itertools.cycle([False, True])):
        inputs = draw_inputs(rng, dtype, world, count)
        for out in group.run(dtype, inputs, in_place):
            assert same_bytes(out, expected_sum(dtype, inputs)), (count, in_place)


def test_one_workgroup_takes_several_slices():
    group, rng = EmulatedGroup(2, slice_bytes=128), np.random.default_rng(1)
    inputs = draw_inputs(rng, FLOAT16, 2, 64 * 64 + 70)
    for out in group.run(FLOAT16, inputs):
        assert same_bytes(out, expected_sum(FLOAT16, inputs))


def test_values_at_the_edges_of_fp16_round_as_numpy_does():
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    picked = every[np.isfinite(every)][::151]
    pairs = [picked, picked[::-1].copy()]
    for out in EmulatedGroup(2, slice_bytes=1024).run(FLOAT16, pairs):
        assert same_bytes(out, expected_sum(FLOAT16, pairs))


@pytest.mark.parametrize("order", ORDERS)
def test_dead_rank_ends_the_others_with_the_failure_recorded(order):
    group, count = EmulatedGroup(4, order, timeout_s=1e-6), 12
    group.run(FLOAT32, [np.ones(count, np.float32)] * 4)
    x, alive = group.device.put(np.ones(count, np.float32)), (0, 1, 3)
    outs = {rank: group.device.put(np.full(count, 77, np.float32)) for rank in alive}
    for _ in range(2):  # the second time broken workgroups return at once
        group.device.launch_together([group.launch(rank, FLOAT32, x, outs[rank], count) for rank in alive])
        for rank in alive:
            assert (group.device.get(outs[rank], (count,), np.float32) == 77).all()
            progress = group.progress(rank)[0]
            failure = progress["failure"]
            assert (progress["generation"], failure["generation"], failure["signal"]) == (1, 2, hip_runs.READY)
            assert (failure["kind"], failure["peer"], failure["seen"]) == (hip_runs.TIMED_OUT, 2, 1) or (
                failure["kind"] == hip_runs.PEER_CLOSED and failure["peer"] in alive)


def test_closed_rank_is_not_waited_for():
    group, count = EmulatedGroup(2, timeout_s=3600), 100
    x = group.device.put(np.zeros(count, np.float32))
    group.device.launch_together([group.close_launch(1), group.launch(0, FLOAT32, x, x, count)])
    failures = group.progress(0)["failure"][:2]
    assert (failures["kind"] == hip_runs.PEER_CLOSED).all() and (failures["peer"] == 1).all()


def test_ranks_that_disagree_both_find_out():
    group = EmulatedGroup(2, timeout_s=3600)
    x = group.device.put(np.ones(16, np.float32))
    group.device.launch_together([group.launch(0, FLOAT32, x, x, 16), group.launch(1, FLOAT32, x, x, 8)])
    for rank, counts in enumerate([(16, 8), (8, 16)]):
        failure = group.progress(rank)[0]["failure"]
        assert (failure["kind"], failure["peer"]) == (hip_runs.MISMATCH, 1 - rank)
        assert (failure["mine"]["count"], failure["theirs"]["count"]) == counts
