"""The collectives between GPUs on this machine's: one process, a stream per rank, on one GPU or each on its own."""

import contextlib
import ctypes
import itertools

import numpy as np
import pytest
import torch

from rlk.collectives.failure import NO_SLOT
from rlk.collectives.ipc_library import Sizes
from rlk.ops import gpu_library
from tests.gfx942 import collective_runs as runs
from tests.gfx942.hip_runs import BFLOAT16, FLOAT16, FLOAT32, LAUNCHERS, STORED
from tests.gfx942.numerics import same_bytes
from tests.gpu.test_hip_kernels import from_gpu, launch, on_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

WORLDS = (1, 2, 4, 8)
ROUTES = (runs.ONE_SHOT, runs.TWO_SHOTS, runs.PUSHED)

ON_ONE_GPU = 128  # workgroups of all ranks that one GPU runs at a time, one on each multiprocessor; the ranks' wait


def most_groups(world, spread):
    """Workgroups of one rank's call that may wait for those of the others."""
    return runs.MOST_GROUPS if spread else ON_ONE_GPU // world


class GpuGroup:
    """The ranks of a group in one process, each with a stream of its own: on one GPU, or each on its own."""

    def __init__(self, world, spread, slice_bytes=8192, direct_bytes=1 << 20, timeout_s=20.0, push_bytes=32_768):
        self.world, self.sizes = world, Sizes(slice_bytes, direct_bytes, push_bytes)
        self.devices = [torch.device("cuda", rank if spread else 0) for rank in range(world)]
        for a, b in itertools.permutations(set(self.devices), 2):
            torch.zeros(1, device=a).to(b)  # makes torch enable peer access
        segment, progress, record = runs.collective_bytes(self.sizes, world)
        self.segments = [torch.zeros(segment, dtype=torch.uint8, device=d) for d in self.devices]
        self.progresses = [torch.zeros(progress, dtype=torch.uint8, device=d) for d in self.devices]
        self.raw_records = [torch.zeros(record, dtype=torch.uint8).pin_memory() for _ in self.devices]
        self.streams = [torch.cuda.Stream(d) for d in self.devices]
        self.ranks = runs.all_ranks([s.data_ptr() for s in self.segments], self.sizes, timeout_s,
                                    [r.data_ptr() for r in self.raw_records])
        self._load_kernels()

    def _load_kernels(self):
        """Loading a kernel waits for the device, and would wait for a peer that cannot start: load all of them first,
        after a failure, so that they return at once."""
        rng = np.random.default_rng(0)
        jobs = [runs.barrier(self.world), runs.all_gather(rng, self.world, FLOAT32, 4),
                *(runs.norm(rng, self.world, 32, 1, 16, route=route) for route in (runs.ONE_SHOT, runs.PUSHED))]
        for dtype in STORED:
            jobs += [runs.all_reduce(rng, self.world, dtype, 4, route) for route in ROUTES]
            jobs.append(runs.reduce_scatter(rng, self.world, dtype, [4]))
        for progress in self.progresses:
            progress[0] = 1  # the host's record is taken
        self.synchronize()
        for rank, job in itertools.product(range(self.world), jobs):
            self.queue(rank, job)
        self.synchronize()
        for progress, segment in zip(self.progresses, self.segments, strict=True):
            progress.zero_()
            segment.zero_()
        self.synchronize()

    def synchronize(self):
        for device in set(self.devices):
            torch.cuda.synchronize(device)

    @contextlib.contextmanager
    def on(self, rank):
        with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
            yield

    def slot(self, rank, slot, like):
        """The slot as a tensor like another."""
        start = runs.direct_offset(self.sizes, slot)
        return self.segments[rank][start:start + like.nbytes].view(like.dtype).view(like.shape)

    def call(self, rank, job, xs, outs):
        """Queue the call of one rank on its stream; a slot is filled there first."""
        with self.on(rank):
            if job.slot != NO_SLOT:
                self.slot(rank, job.slot, xs[0]).copy_(xs[0])
            name, *args = job.arguments(xs, outs)
            launch(name, ctypes.addressof(self.ranks[rank]), self.progresses[rank], *args)

    def buffers(self, rank, job):
        """Tensors for the inputs and the results of one rank."""
        xs = [on_gpu(x, self.devices[rank]) for x in job.inputs[rank]]
        outs = [on_gpu(np.full_like(out, 77), self.devices[rank]) for out in job.expected[rank]]
        return xs, [job.alias(rank, x) for x in xs] if job.in_place else outs

    def queue(self, rank, job):
        with self.on(rank):
            xs, outs = self.buffers(rank, job)
        self.call(rank, job, xs, outs)
        return outs

    def run(self, *jobs):
        """Every rank queues all calls; returns their results, rank by rank."""
        buffers = [[self.buffers(rank, job) for rank in range(self.world)] for job in jobs]
        self.synchronize()
        for job, of_ranks in zip(jobs, buffers, strict=True):
            for rank, (xs, outs) in enumerate(of_ranks):
                self.call(rank, job, xs, outs)
        self.synchronize()
        return [[outs for _, outs in of_ranks] for of_ranks in buffers]

    def record(self, rank):
        return self.raw_records[rank].numpy().view(runs.FAILURE)[0]

    def check(self, *jobs):
        """Runs the jobs and compares all results."""
        for job, results in zip(jobs, self.run(*jobs), strict=True):
            for rank, outs in enumerate(results):
                assert self.record(rank)["kind"] == runs.NO_FAILURE, self.record(rank)
                for out, expected in zip(outs, job.expected[rank], strict=True):
                    assert same_bytes(from_gpu(out, expected), expected), (rank, job.operation, job.dtype, job.route)


@pytest.fixture(params=[False, True], ids=["one-gpu", "peers"])
def spread(request):
    return request.param


def make_group(world, spread, **options):
    if spread and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, there are {torch.cuda.device_count()}")
    return GpuGroup(world, spread, **options)


def wave():
    return 64 if torch.version.hip else 32


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", STORED)
def test_sum_over_ranks_is_the_tree(dtype, world, route, spread):
    group, rng = make_group(world, spread), np.random.default_rng(world)
    counts = [1, 7, 4096, 32768, 0, 100_003, 2_000_001]
    if world > 2 and not spread:
        del counts[-2:]  # more than ON_ONE_GPU
    most = max(counts)
    if route == runs.PUSHED:
        most = most_groups(world, spread) * runs.LEAST_SLICE // STORED[dtype].itemsize
    for k, count in enumerate(counts):
        group.check(runs.all_reduce(rng, world, dtype, min(count, most), route, in_place=k % 2 == 1))
    group.check(*(runs.all_reduce(rng, world, dtype, min(30_001, most), route, slot=k % 2) for k in range(4)))


@pytest.mark.parametrize("world", WORLDS)
def test_mixed_calls_queue_up_in_any_order(world, spread):
    group, rng, slot = make_group(world, spread, direct_bytes=1 << 16), np.random.default_rng(world), NO_SLOT
    jobs = []
    for _ in range(100):
        jobs.append(runs.random_job(rng, world, wave(), slot, group.sizes, most_groups(world, spread)))
        slot = jobs[-1].slot
    group.check(*jobs)


@pytest.mark.parametrize("world", WORLDS)
def test_large_gathers_and_scatters(world, spread):
    group, rng = make_group(world, spread), np.random.default_rng(world)
    count = 300_001 if spread else 5001
    for dtype in STORED:
        group.check(runs.all_gather(rng, world, dtype, count), runs.barrier(world),
                    runs.reduce_scatter(rng, world, dtype, [count, 64, 1, 4096]))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("D", [48, 512, 1040, 2048, 4096, 5120, 8192])
@pytest.mark.parametrize("route", [runs.ONE_SHOT, runs.PUSHED])
def test_norm_of_the_sum_has_the_bits_of_the_triton_kernel(D, world, route, spread):
    from rlk.kernels.norm import add_rms_norm

    group, rng = make_group(world, spread, slice_bytes=65_536, direct_bytes=1 << 20), np.random.default_rng(D)
    job = runs.norm(rng, world, wave(), 9, D, int(rng.integers(-1, 2)), route)
    group.check(job)
    _, residual, weight = job.inputs[0]
    partial = runs.expected_sum(FLOAT32, [xs[0] for xs in job.inputs])
    apart = add_rms_norm(on_gpu(partial), on_gpu(residual).view(torch.bfloat16), on_gpu(weight).view(torch.bfloat16),
                         runs.EPS)
    for got, expected in zip(apart, job.expected[0], strict=True):
        assert same_bytes(from_gpu(got.view(torch.int16), expected), expected)


@pytest.mark.parametrize("world", [2, 4])
def test_graph_replays_with_changing_inputs(world, spread):
    """All operations in one graph, replayed with other inputs; the slots alternate across replays too."""
    group, rng = make_group(world, spread), np.random.default_rng(0)

    def draw():
        return [runs.all_reduce(rng, world, FLOAT16, 16_384), runs.all_reduce(rng, world, BFLOAT16, 777, runs.PUSHED),
                runs.all_reduce(rng, world, FLOAT32, 5000, slot=0),
                runs.all_gather(rng, world, BFLOAT16, 1000), runs.norm(rng, world, wave(), 8, 1024, slot=1),
                runs.norm(rng, world, wave(), 8, 2048, route=runs.PUSHED),
                runs.reduce_scatter(rng, world, BFLOAT16, [100, 7]),
                runs.all_reduce(rng, world, FLOAT32, 20_000, runs.TWO_SHOTS), runs.barrier(world)]

    jobs = draw()
    buffers = [[group.buffers(rank, job) for job in jobs] for rank in range(world)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(world)]
    group.synchronize()
    for rank, graph in enumerate(graphs):
        with torch.cuda.device(group.devices[rank]), torch.cuda.graph(graph, stream=group.streams[rank]):
            for job, (xs, outs) in zip(jobs, buffers[rank], strict=True):
                group.call(rank, job, xs, outs)
    for _ in range(20):
        jobs = draw()
        for rank in range(world):
            for job, (xs, _) in zip(jobs, buffers[rank], strict=True):
                for x, new in zip(xs, job.inputs[rank], strict=True):
                    x.copy_(on_gpu(new, group.devices[rank]))
        group.synchronize()
        for rank, graph in enumerate(graphs):
            with group.on(rank):
                graph.replay()
        group.synchronize()
        for rank in range(world):
            assert group.record(rank)["kind"] == runs.NO_FAILURE, group.record(rank)
            for job, (_, outs) in zip(jobs, buffers[rank], strict=True):
                for out, expected in zip(outs, job.expected[rank], strict=True):
                    assert same_bytes(from_gpu(out, expected), expected), (rank, job.operation)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world", [2, 4])
def test_no_read_is_torn_in_a_million_generations(world, route, spread):
    """Pulled: slices of 128 bytes, so that a call is many generations, and each workgroup goes on while its peers still
    read. Pushed, a call is one generation of each workgroup."""
    if not spread:
        pytest.skip("needs a GPU for each rank: torch's kernels between the calls wait for workgroups that spin")
    group, rng = make_group(world, spread, slice_bytes=128), np.random.default_rng(0)
    per_group = 1 if route == runs.PUSHED else 32 * (1 + (route == runs.TWO_SHOTS))
    count = runs.MOST_GROUPS * runs.LEAST_SLICE // 4 if route == runs.PUSHED else runs.MOST_GROUPS * 32 * 32
    calls, rounds = 25, 1_000_000 // (runs.MOST_GROUPS * per_group * 25) + 1
    jobs = [runs.all_reduce(rng, world, FLOAT32, count, route) for _ in range(2)]
    buffers = [[group.buffers(rank, job) for job in jobs] for rank in range(world)]
    targets = [[on_gpu(job.expected[0][0], d).view(torch.int32) for job in jobs] for d in group.devices]
    wrong = [torch.zeros((), dtype=torch.int64, device=d) for d in group.devices]

    def compare(rank, out, target):
        with group.on(rank):
            wrong[rank] += (out.view(torch.int32) != target).sum()

    for rank in range(world):  # loading a kernel of torch waits for the device: not while a workgroup spins there
        compare(rank, targets[rank][0], targets[rank][0])
    group.synchronize()
    for _ in range(rounds):
        for call in range(calls):
            for rank in range(world):
                xs, outs = buffers[rank][call % 2]
                group.call(rank, jobs[call % 2], xs, outs)
                compare(rank, outs[0], targets[rank][call % 2])
        group.synchronize()
    for rank in range(world):
        assert group.record(rank)["kind"] == runs.NO_FAILURE, group.record(rank)
    generations = sum(int(progress["generation"]) for progress in
                      runs.group_progress(group.progresses[0].cpu().numpy()))
    assert generations >= 1_000_000 and not any(int(count) for count in wrong)


# ---- failures ----


def test_dead_rank_ends_the_others_with_the_failure_recorded(spread):
    group = make_group(2, spread, timeout_s=0.2)
    for _ in range(2):  # the second time the broken workgroup returns at once
        (out,) = group.queue(0, runs.all_reduce(np.random.default_rng(0), 2, FLOAT32, 64))
    group.synchronize()
    failure = group.record(0)
    assert (failure["kind"], failure["peer"], failure["signal"]) == (runs.TIMED_OUT, 1, runs.READY)
    assert (failure["generation"], failure["seen"]) == (1, 0)
    assert (out.cpu() == 77).all()


def test_closed_rank_is_not_waited_for(spread):
    group = make_group(2, spread)
    with group.on(1):
        launch("close", ctypes.addressof(group.ranks[1]))
    group.queue(0, runs.all_reduce(np.random.default_rng(0), 2, FLOAT32, 64))
    group.synchronize()
    assert (group.record(0)["kind"], group.record(0)["peer"]) == (runs.PEER_CLOSED, 1)


@pytest.mark.parametrize("theirs", ["size", "route", "pushed", "operation"])
def test_ranks_that_disagree_both_find_out(theirs, spread):
    group, rng = make_group(2, spread), np.random.default_rng(0)
    mine = runs.all_reduce(rng, 2, FLOAT32, 20_000)
    other = {"size": runs.all_reduce(rng, 2, FLOAT32, 32), "route": runs.all_reduce(rng, 2, FLOAT32, 20_000, 1),
             "pushed": runs.all_reduce(rng, 2, FLOAT32, 20_000, runs.PUSHED),
             "operation": runs.barrier(2)}[theirs]
    for rank, job in enumerate((mine, other)):
        group.queue(rank, job)
    group.synchronize()
    for rank, jobs in enumerate([(mine, other), (other, mine)]):
        failure = group.record(rank)
        assert (failure["kind"], failure["peer"]) == (runs.MISMATCH, 1 - rank)
        for side, job in zip(("mine", "theirs"), jobs, strict=True):
            assert (failure[side]["operation"], failure[side]["count"]) == (job.operation, job.size)


def test_a_slot_may_not_be_used_twice_in_a_row(spread):
    group, job = make_group(2, spread), runs.all_reduce(np.random.default_rng(0), 2, FLOAT32, 64, slot=1)
    group.run(job, job)
    for rank in range(2):
        failure = group.record(rank)
        assert (failure["kind"], failure["mine"]["slot"], failure["generation"]) == (runs.SLOT_REUSED, 1, 2)


def test_memory_outside_the_caching_allocator_is_zeroed_and_shared_by_handle():
    address, host, device, yes = (ctypes.c_void_p() for _ in range(4))
    handle = ctypes.create_string_buffer(64)

    def call(name, *args):
        gpu_library.function(f"rlk_gpu_{name}", *LAUNCHERS[name])(*args)

    call("memory_create", 5000, ctypes.byref(address))
    call("ipc_export", address, handle)
    assert any(handle.raw)
    call("pinned_create", 128, ctypes.byref(host), ctypes.byref(device))
    assert bytes((ctypes.c_char * 128).from_address(host.value)) == bytes(128)
    call("can_access_peer", 0, 0, ctypes.byref(yes))
    call("pinned_free", host)
    call("memory_free", address)
    with pytest.raises(RuntimeError, match="code 8"):
        call("ipc_open", bytes(64), ctypes.byref(address))
