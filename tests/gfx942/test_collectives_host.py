"""The collectives between GPUs on the host, one fiber per lane: the bits of numpy's tree, and what becomes of failures.

Mutations of hipkernels/gpu/segment.h that were seen to fail here: no wait for done, none for ready, ready before the
staging, no barrier after the waits, after staging or before done, no comparison of calls at the end or between the two
shots, no closing of the mailboxes. A release that is missing cannot show here: the fibers share one thread.
"""

import ctypes
import time

import numpy as np
import pytest

from rlk.collectives.failure import NO_SLOT
from rlk.collectives.ipc_library import SIZES, Sizes, segment_bytes
from tests.gfx942 import collective_runs as runs
from tests.gfx942.collective_runs import LINE, HostGroup, Job, direct_offset, receive_offset
from tests.gfx942.hip_runs import (
    BAD_DTYPE,
    BAD_SHAPE,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    MISALIGNED,
    ORDERS,
    STORED,
    WAVES,
    HostFibers,
    LaunchError,
    host_library,
)
from tests.gfx942.numerics import BF16_EPSILON, from_bf16, same_bytes

ROUTES = (runs.ONE_SHOT, runs.TWO_SHOTS, runs.PUSHED)
BUILDS = [(wave, order, seed) for wave in WAVES for order in ORDERS for seed in (0, 7)]
WORLDS = (1, 2, 4, 8)


@pytest.fixture(params=BUILDS, ids=lambda build: f"wave{build[0]}-{build[1]}{'-uneven' if build[2] else ''}")
def fibers(request):
    return HostFibers(*request.param)


def wave_of(fibers):
    return 32 if fibers.library is host_library(32) else 64


def check(job, results):
    for rank, (outs, expected) in enumerate(zip(results, job.expected, strict=True)):
        for out, right in zip(outs, expected, strict=True):
            assert same_bytes(out, right), (rank, job.operation, job.dtype, job.route, job.slot, right.shape)


def no_failure(group):
    assert not group.records["kind"].any() and not any(group.progress(r)["failure"]["kind"].any()
                                                       for r in range(group.world))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", STORED)
def test_sum_over_ranks_is_the_tree(fibers, dtype, world):
    """All routes, in place or not, sizes at all edges; one workgroup or several."""
    group, rng = HostGroup(fibers, world), np.random.default_rng(world)
    per_slice = group.sizes.slice // STORED[dtype].itemsize
    for k, count in enumerate([1, 7, per_slice, per_slice + 1, 0, 3 * per_slice - 1, 5]):
        for route in ROUTES:
            job = runs.all_reduce(rng, world, dtype, count, route, in_place=k % 2 == 1)
            check(job, group.run(job)[0])
    no_failure(group)


@pytest.mark.parametrize("route", ROUTES)
def test_one_workgroup_takes_several_slices(route):
    group, rng = HostGroup(HostFibers(), 2, slice_bytes=128), np.random.default_rng(1)
    job = runs.all_reduce(rng, 2, FLOAT32, runs.MOST_GROUPS * 32 + 70, route)
    check(job, group.run(job)[0])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world", WORLDS)
def test_lanes_hold_several_vectors(world, route):
    """Slices of more rows of vectors than are on their way at a time, and a cut-off vector behind them."""
    group, rng = HostGroup(HostFibers(64), world, slice_bytes=1 << 15, direct_bytes=1 << 16), np.random.default_rng(2)
    for job in (runs.all_reduce(rng, world, BFLOAT16, runs.MOST_GROUPS * 100 + 16_385, route),
                runs.all_reduce(rng, world, FLOAT32, (1 << 14) - 3, route, slot=1)):
        check(job, group.run(job)[0])


@pytest.mark.parametrize("world", WORLDS)
def test_mixed_calls_queue_up_in_any_order(fibers, world):
    """Ranks run ahead of each other through all operations, types, routes and slots."""
    rng, slot = np.random.default_rng([world, *fibers.order]), NO_SLOT
    group = HostGroup(fibers, world, slice_bytes=1024, direct_bytes=4096)
    jobs = []
    for _ in range(24 if world < 8 else 10):
        jobs.append(runs.random_job(rng, world, wave_of(fibers), slot, group.sizes))
        slot = jobs[-1].slot
    for job, results in zip(jobs, group.run(*jobs), strict=True):
        check(job, results)
    no_failure(group)


@pytest.mark.parametrize("seed", range(1, 6))
def test_ranks_that_run_ahead_never_read_half_written_staging(seed):
    """Calls queue up on each rank's stream; ranks and lanes advance unevenly."""
    world, rng = 4, np.random.default_rng(seed)
    group = HostGroup(HostFibers(32, ORDERS[seed % 2], seed), world, slice_bytes=128)
    jobs = [runs.all_reduce(rng, world, FLOAT32, int(rng.integers(1, 150)), int(rng.integers(3))) for _ in range(40)]
    for job, results in zip(jobs, group.run(*jobs), strict=True):
        check(job, results)


@pytest.mark.parametrize("seed", range(1, 4))
def test_slots_are_not_filled_while_peers_read_them(seed):
    world, rng = 4, np.random.default_rng(seed)
    group = HostGroup(HostFibers(64, ORDERS[seed % 2], seed), world, slice_bytes=128, direct_bytes=512)
    jobs = [runs.all_reduce(rng, world, FLOAT32, 128, k // 2 % 3, slot=k % 2) for k in range(60)]
    for job, results in zip(jobs, group.run(*jobs), strict=True):
        check(job, results)
    no_failure(group)


@pytest.mark.parametrize("first", [0, (1 << 30) - 3, (1 << 31) - 3, (1 << 32) - 3, (1 << 33) - 3])
def test_receive_areas_are_cleared_before_tags_repeat(first):
    """After 2^31 pushes a tag comes again: a word of the old one must not be there, whatever is pulled in between."""
    world, rng = 2, np.random.default_rng(0)
    group = HostGroup(HostFibers(), world, push_bytes=4096)
    for rank in range(world):
        group.progress(rank)["pushes"] = first
    large = runs.all_reduce(rng, world, FLOAT32, 1000, runs.PUSHED)
    jobs = [large, large]
    for _ in range(4):
        jobs += [runs.all_reduce(rng, world, FLOAT32, 4, route) for route in (runs.PUSHED, runs.TWO_SHOTS)]
    for job, results in zip(jobs, group.run(*jobs), strict=True):
        check(job, results)
    no_failure(group)
    areas = group.segments[1][receive_offset(group.sizes):].reshape(runs.MOST_GROUPS, 2, world, 2 * 4096)
    behind = areas[0, :, :, 4 * 8:]  # what the last calls do not reach
    assert bool(behind.any()) == (first == 0) and areas[0].any() and not areas[1:].any()


def test_all_gather_of_any_element_size_and_in_place():
    world, rng = 4, np.random.default_rng(0)
    for count, itemsize in ((0, 4), (1, 1), (13, 1), (600, 1), (7, 2), (300, 4), (33, 8), (16, 16)):
        group = HostGroup(HostFibers(), world)
        inputs = [rng.integers(0, 256, (count, itemsize), np.uint8) for _ in range(world)]
        outs = [runs.aligned(np.zeros((world, count, itemsize), np.uint8)) for _ in range(world)]
        xs = [runs.aligned(x) for x in inputs]
        if count and count * itemsize % 16 == 0:
            for rank, x in enumerate(inputs):
                outs[rank][rank], xs[rank] = x, outs[rank][rank]
        with group.fibers.together():
            for rank in range(world):
                group.call(rank, "all_gather", itemsize, 14, xs[rank], outs[rank], count)
        assert all(same_bytes(out, np.stack(inputs)) for out in outs), (count, itemsize)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", STORED)
def test_parts_of_a_reduce_scatter(fibers, dtype, world):
    group, rng = HostGroup(fibers, world, slice_bytes=256), np.random.default_rng(3)
    for counts, in_place in (([5], False), ([8], True), ([0], False), ([3, 0, 64, 1, 31], False), ([1] * 16, False)):
        job = runs.reduce_scatter(rng, world, dtype, counts, in_place)
        check(job, group.run(job)[0])


# ---- the norm ----


@pytest.mark.parametrize("D", [16, 48, 512, 1040, 2048, 4096, 5120, 8192])
@pytest.mark.parametrize("slot", [NO_SLOT, 1])
@pytest.mark.parametrize("route", [runs.ONE_SHOT, runs.PUSHED])
def test_norm_has_the_bits_of_its_order_and_agrees_with_float64(fibers, D, slot, route):
    group = HostGroup(fibers, 2, slice_bytes=runs.round_up(8 * D, 128), direct_bytes=runs.round_up(12 * D, 128),
                      push_bytes=runs.round_up(4 * D, 128))
    rng = np.random.default_rng(D)
    job = runs.norm(rng, 2, wave_of(fibers), 3, D, slot, route)
    (results,) = group.run(job)
    check(job, results)
    hidden, y = results[0]
    x, w = from_bf16(hidden).astype(np.float64), from_bf16(job.inputs[0][2])
    exact = x / np.sqrt((x * x).mean(-1, keepdims=True) + runs.EPS) * w
    assert np.all(np.abs(from_bf16(y) - exact) <= np.abs(exact) * 1.02 * BF16_EPSILON)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("T", [0, 1, 3, runs.MOST_GROUPS * 2 + 5])
def test_rows_of_the_norm_are_shared_out(world, T):
    """More rows than workgroups, two of them in a slice; and all of them in a slot."""
    if world == 8 and T > 3:
        T = runs.MOST_GROUPS + 2
    group = HostGroup(HostFibers(64), world, slice_bytes=256, direct_bytes=runs.round_up(T * 64 + 1, 128))
    for slot in (NO_SLOT, 0):
        for route in (runs.ONE_SHOT, runs.PUSHED)[:1 + (T <= runs.MOST_GROUPS)]:
            job = runs.norm(np.random.default_rng(T), world, 64, T, 16, slot, route)
            check(job, group.run(job)[0])
            group.run(runs.barrier(world))  # a slot may not be used twice in a row


def test_norm_of_the_sum_has_the_bits_of_the_two_calls(fibers):
    group, rng = HostGroup(fibers, 4, slice_bytes=4096), np.random.default_rng(4)
    job = runs.norm(rng, 4, wave_of(fibers), 2, 1024)
    sums = Job(runs.ALL_REDUCE, [[xs[0]] for xs in job.inputs],
               [[runs.expected_sum(FLOAT32, [xs[0] for xs in job.inputs])]] * 4)
    fused, (apart, *_) = group.run(job, sums)
    hidden = runs.to_bf16(from_bf16(job.inputs[0][1]) + apart[0])
    assert same_bytes(fused[0][0], hidden)
    assert same_bytes(fused[0][1], runs.rms_norm(hidden, job.inputs[0][2], wave_of(fibers)))


# ---- failures ----


def one_call(count=12, dtype=FLOAT32, world=2, **options):
    return runs.all_reduce(np.random.default_rng(count), world, dtype, count, **options)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("route", [runs.ONE_SHOT, runs.PUSHED])
def test_dead_rank_ends_the_others_with_the_failure_recorded(fibers, world, route):
    group, dead = HostGroup(fibers, world, timeout_s=0.03), world - 2
    alive = sorted(set(range(world)) - {dead})
    group.run(one_call(world=world))
    for _ in range(2):  # the second time a broken workgroup returns at once: no second time-out, nothing written
        with group.fibers.together():
            outs = [group.queue(rank, one_call(world=world, route=route))[0] for rank in alive]
        assert all((out == 77).all() for out in outs)
    kinds = set()
    for rank in alive:
        record, progress = group.records[rank], group.progress(rank)[0]
        assert record.tobytes() == progress["failure"].tobytes()
        assert (record["generation"], record["signal"]) == (2, runs.CALL if route == runs.PUSHED else runs.READY)
        kinds.add(int(record["kind"]))
        if record["kind"] == runs.TIMED_OUT:
            assert record["peer"] == dead and record["seen"] == 1
        else:  # it was told by one that had timed out
            assert record["kind"] == runs.PEER_CLOSED and record["peer"] not in (rank, dead)
            assert record["reason"] in (runs.TIMED_OUT, runs.PEER_CLOSED)
    assert runs.TIMED_OUT in kinds


def test_data_that_never_come_end_in_a_time_out(fibers):
    """A rank that has died between its call and its data: the words of its call are put there by hand."""
    group, job = HostGroup(fibers, 2, timeout_s=0.03), one_call(route=runs.PUSHED)
    group.run(job)
    words = group.segments[0][LINE * 4 + 3 * LINE:][:2 * 48].view(np.uint32).reshape(2, 6, 2)  # mailbox of rank 1
    words[0] = words[1] + [0, 2]  # what it called in generation 1, with the next tag
    with group.fibers.together():
        (out,) = group.queue(0, job)
    record = group.records[0]
    assert (record["kind"], record["peer"], record["signal"]) == (runs.TIMED_OUT, 1, runs.DATA)
    assert (record["generation"], record["seen"]) == (2, 1) and (out == 77).all()


@pytest.mark.parametrize("route", [runs.ONE_SHOT, runs.PUSHED])
def test_closed_rank_is_not_waited_for(fibers, route):
    group = HostGroup(fibers, 2, timeout_s=20)
    group.run(one_call())
    with group.fibers.together():
        group.call(1, "close")
        group.queue(0, one_call(9 * 1024, route=route))  # several workgroups
    failures = group.progress(0)["failure"][:9]
    assert (failures["kind"] == runs.PEER_CLOSED).all() and (failures["peer"] == 1).all()
    assert not failures["reason"].any()
    assert group.records[0]["kind"] == runs.PEER_CLOSED and group.records[0]["peer"] == 1


DISAGREEING = {
    "size": (one_call(600), one_call(8)),
    "dtype": (one_call(8), one_call(8, BFLOAT16)),
    "operation": (one_call(600), runs.barrier(2)),
    "route": (one_call(600), one_call(600, route=runs.TWO_SHOTS)),
    "pushed": (one_call(600), one_call(600, route=runs.PUSHED)),
    "pushed size": (one_call(3000, route=runs.PUSHED), one_call(8, route=runs.PUSHED)),
    "pushed norm": (one_call(64, route=runs.PUSHED), runs.norm(np.random.default_rng(0), 2, 32, 4, 16,
                                                               route=runs.PUSHED)),
    "two shots pushed": (one_call(600, route=runs.TWO_SHOTS), one_call(600, route=runs.PUSHED)),
    "pushed operation": (one_call(600, route=runs.PUSHED), runs.barrier(2)),
    "slot": (one_call(600, slot=0), one_call(600, slot=1)),
    "norm": (one_call(64), runs.norm(np.random.default_rng(0), 2, 32, 4, 16)),
    "parts": tuple(runs.reduce_scatter(np.random.default_rng(0), 2, FLOAT32, counts) for counts in ([8, 4], [4, 8])),
}


@pytest.mark.parametrize("calls", DISAGREEING.values(), ids=DISAGREEING)
def test_ranks_that_disagree_all_find_out(fibers, calls):
    """Also those workgroups end that only one of the ranks has, and none hides what the ranks disagree about."""
    for odd, world in ((1, 2), (0, 2), (2, 4)):
        group = HostGroup(fibers, world, direct_bytes=4096, timeout_s=20)
        jobs = [calls[rank == odd] for rank in range(world)]
        with group.fibers.together():
            for rank, job in enumerate(jobs):
                group.queue(rank % 2, job) if world == 2 else queue_widened(group, rank, job)
        for rank, job in enumerate(jobs):
            record = group.records[rank]
            assert record["kind"] == runs.MISMATCH
            assert runs.TIMED_OUT not in group.progress(rank)["failure"]["kind"]
            assert (record["peer"] == odd) == (rank != odd)
            for side, of in (("mine", job), ("theirs", jobs[record["peer"]])):
                called = record[side]
                count = sum(x.size for x in of.inputs[0][:1 if of.operation == runs.NORM else None])
                assert (called["operation"], called["count"], called["slot"]) == (of.operation, count, of.slot)
                assert called["dtype"] == (0 if of.operation == runs.BARRIER else of.dtype)


@pytest.mark.parametrize("route", ROUTES)
def test_a_disagreement_is_not_hidden_by_a_rank_that_never_comes(fibers, route):
    """Rank 2 is absent, rank 3 calls something else: all say so. Pushed, at once; pulled, when rank 2's time is up."""
    group, start = HostGroup(fibers, 4, timeout_s=20 if route == runs.PUSHED else 0.5), time.monotonic()
    jobs = {rank: one_call(8 if rank == 3 else 60, world=4, route=route) for rank in (0, 1, 3)}
    with group.fibers.together():
        for rank, job in jobs.items():
            group.queue(rank, job)
    assert time.monotonic() - start < 10
    for rank in jobs:
        record = group.records[rank]
        assert (record["kind"], record["peer"] == 3) == (runs.MISMATCH, rank != 3)
        assert {record["mine"]["count"], record["theirs"]["count"]} == {8, 60}


def queue_widened(group, rank, job):
    """A call of two ranks' job by a rank of four: the sizes that it states are those of the job."""
    xs, outs = ([runs.aligned(a) for a in arrays[0]] for arrays in (job.inputs, job.expected))
    if job.operation == runs.REDUCE_SCATTER:
        pytest.skip("the sizes of its parts depend on the world")
    group._kept += [xs, outs]
    group.call(rank, *job.arguments(xs, outs))


def test_a_slot_may_not_be_used_twice_in_a_row(fibers):
    world = 2
    for between, reused in ((None, True), (one_call(), False), (one_call(route=runs.PUSHED), False),
                            (runs.barrier(2), False)):
        group = HostGroup(fibers, world, direct_bytes=4096, timeout_s=20)
        jobs = [one_call(600, slot=1), *([between] if between else []), one_call(600, slot=1)]
        results = group.run(*jobs)
        check(jobs[0], results[0])
        if not reused:
            check(jobs[-1], results[-1])
            no_failure(group)
            continue
        for rank in range(world):
            record = group.records[rank]
            assert record["kind"] == runs.SLOT_REUSED and record["peer"] == rank and record["generation"] == 2
            assert record["mine"]["slot"] == 1 and record["mine"]["count"] == 600


def test_wrong_arguments_are_refused():
    group, x = HostGroup(HostFibers(), 2, direct_bytes=128), runs.aligned(np.zeros(64, np.float32))
    bf = runs.aligned(np.zeros(1 << 14, np.uint16))
    part = runs.Part(x.ctypes.data, x.ctypes.data, -1)
    wrong = [
        (BAD_DTYPE, "all_reduce", 9, 0, NO_SLOT, x, x, 64), (BAD_SHAPE, "all_reduce", FLOAT32, 3, NO_SLOT, x, x, 64),
        (MISALIGNED, "all_reduce", FLOAT32, 0, NO_SLOT, x[1:], x, 60), (BAD_SHAPE, "all_reduce", 0, 0, 2, x, x, 8),
        (MISALIGNED, "all_reduce", FLOAT32, 0, NO_SLOT, x, x[1:], 60), (BAD_SHAPE, "all_reduce", 0, 0, 0, x, x, 33),
        (BAD_SHAPE, "all_reduce", FLOAT32, 0, NO_SLOT, x, x, -1), (BAD_SHAPE, "all_gather", 0, 0, x, x, 4),
        (MISALIGNED, "all_gather", 4, 0, x[1:], x, 4), (BAD_SHAPE, "reduce_scatter", FLOAT32, ctypes.byref(part), 0),
        (BAD_SHAPE, "reduce_scatter", FLOAT32, ctypes.byref(part), 17),
        (BAD_SHAPE, "reduce_scatter", FLOAT32, ctypes.byref(part), 1),
        (BAD_SHAPE, "all_reduce", FLOAT32, 2, NO_SLOT, x, x, runs.MOST_GROUPS * 1024 + 1),
        *((BAD_SHAPE, "all_reduce_rms_norm", 0, NO_SLOT, x, bf, bf, bf, bf, 1, D, 1e-6) for D in (0, 24, 80, 8208)),
        *((BAD_SHAPE, "all_reduce_rms_norm", route, NO_SLOT, x, bf, bf, bf, bf, T, D, 1e-6)
          for route, T, D in ((1, 1, 16), (2, 1, 1040), (2, 129, 16))),
        (MISALIGNED, "all_reduce_rms_norm", 0, NO_SLOT, x, bf, bf[1:], bf, bf, 1, 16, 1e-6),
    ]
    for code, *call in wrong:
        with pytest.raises(LaunchError) as caught:
            group.call(0, *call)
        assert caught.value.code == code, call
    for name, value in (("world", 3), ("rank", 2), ("slice_bytes", 100), ("direct_bytes", 100), ("push_bytes", 100)):
        group = HostGroup(HostFibers(), 2)
        setattr(group.ranks[0], name, value)
        for call in (("all_reduce", FLOAT32, 0, NO_SLOT, x, x, 4), ("barrier",), ("close",)):
            with pytest.raises(LaunchError) as caught:
                group.call(0, *call)
            assert caught.value.code == BAD_SHAPE
    for *sizes, world in ((100, 0, 0, 2), (0, 0, 0, 2), (128, 100, 0, 2), (128, 0, 100, 2), (128, 0, 0, 3)):
        with pytest.raises(LaunchError):
            runs.collective_bytes(Sizes(*sizes), world)
    with pytest.raises(LaunchError):
        direct_offset(Sizes(128, 128, 0), 2)


def test_values_at_the_edges_of_fp16_round_as_numpy_does(fibers):
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    picked = every[np.isfinite(every)][::61][:1000]
    pairs = [picked, picked[::-1].copy()]
    job = Job(runs.ALL_REDUCE, [[x] for x in pairs], [[runs.expected_sum(FLOAT16, pairs)]] * 2, FLOAT16)
    check(job, HostGroup(fibers, 2).run(job)[0])


# ---- memory ----


@pytest.mark.parametrize("world", WORLDS)
def test_the_memory_plan_knows_the_size_of_a_segment(world):
    for sizes in (SIZES, Sizes(128, 0, 0), Sizes(4096, 1280, 256)):
        assert runs.collective_bytes(sizes, world)[0] == segment_bytes(sizes, world)



def test_memory_is_shared_by_its_handle():
    library, address, other = host_library(32), ctypes.c_void_p(), ctypes.c_void_p()
    handle, yes = ctypes.create_string_buffer(64), ctypes.c_int()
    assert library.rlk_gpu_memory_create(5000, ctypes.byref(address)) == 0
    assert bytes((ctypes.c_char * 5000).from_address(address.value)) == bytes(5000)
    assert library.rlk_gpu_ipc_export(address, handle) == 0
    assert library.rlk_gpu_ipc_open(handle, ctypes.byref(other)) == 0 and other.value != address.value
    ctypes.c_char.from_address(address.value + 4999).value = b"x"
    assert ctypes.c_char.from_address(other.value + 4999).value == b"x"
    assert library.rlk_gpu_memory_free(other) != 0 and library.rlk_gpu_ipc_close(address) != 0
    assert library.rlk_gpu_ipc_close(other) == 0 and library.rlk_gpu_memory_free(address) == 0
    assert library.rlk_gpu_ipc_open(handle, ctypes.byref(other)) != 0
    assert library.rlk_gpu_memory_create(0, ctypes.byref(address)) == BAD_SHAPE
    assert library.rlk_gpu_pinned_create(80, ctypes.byref(address), ctypes.byref(other)) == 0
    assert address.value == other.value and library.rlk_gpu_pinned_free(address) == 0
    assert library.rlk_gpu_can_access_peer(0, 1, ctypes.byref(yes)) == 0 and yes.value == 1
