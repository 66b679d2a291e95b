"""The HIP kernels on this GPU: the bytes of the host build, and sums over ranks in the bits of the tree."""

import ctypes
import itertools

import numpy as np
import pytest
import torch

from rlk.ops import gpu_library
from tests.gfx942 import hip_runs
from tests.gfx942.hip_runs import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LAUNCHERS,
    MOST_GROUPS,
    PROGRESS,
    STORED,
    WAVES,
    HostFibers,
    all_ranks,
    collective_bytes,
    draw_inputs,
    expected_sum,
)
from tests.gfx942.numerics import same_bytes
from tests.gfx942.retained_sets import INV_T, VOCAB, make_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

WORLDS = (1, 2, 4, 8)


def launch(name, *args):
    """The launcher `name` on torch's current stream; tensors travel as their addresses."""
    plain = [gpu_library.ptr(a) if isinstance(a, torch.Tensor) else a for a in args]
    gpu_library.function(f"rlk_gpu_{name}", *LAUNCHERS[name])(*plain, gpu_library.stream())


def on_gpu(array, device="cuda:0"):
    return torch.from_numpy(array.view({2: np.int16}.get(array.itemsize, array.dtype))).to(device)


def from_gpu(tensor, like):
    return tensor.cpu().numpy().view(like.dtype)


class Gpu:
    """The operators of hip_runs.HostFibers on the GPU."""

    def _run(self, name, args, result):
        tensors = {id(a): on_gpu(a) for a in args if isinstance(a, np.ndarray)}
        launch(name, *(tensors.get(id(a), a) for a in args))
        return from_gpu(tensors[id(result)], result)

    def find_targets(self, offsets, ids, targets):
        index = np.full(len(targets), -7, np.int64)
        return self._run("find_targets", [offsets, ids, targets, len(targets), index], index)

    def pick_logits(self, logits, offsets, ids, first_id, values):
        return self._run("pick_logits", [logits, *logits.shape, offsets, ids, first_id, values], values)

    def support_score(self, values, offsets, index, inv_t):
        scores = np.full((3, len(index)), 77, np.float32)
        return self._run("support_score", [values, offsets, index, len(index), inv_t, scores], scores)

    def support_score_backward(self, values, offsets, ids, index, lse, grad, first_id, inv_t, dtype, dlogits):
        return self._run("support_score_backward", [values, offsets, ids, index, lse, grad, *dlogits.shape, first_id,
                                                    inv_t, dtype, dlogits], dlogits)

    def draw(self, values, offsets, ids, inv_t, seed, uids, positions):
        tokens = np.full(len(uids), -7, np.int64)
        return self._run("draw", [values, offsets, ids, len(uids), inv_t, seed, uids, positions, tokens], tokens)


def results(run):
    """What `run` gives on the GPU and on both host builds."""
    return [run(build) for build in (Gpu(), *map(HostFibers, WAVES))]


def all_same(arrays):
    return all(same_bytes(arrays[0], other) for other in arrays[1:])


@pytest.mark.parametrize("sizes", [(1, 2, 31, 64, 255, 256, 257, 700, 2049, VOCAB), (9,) * 600])
def test_score_has_the_bytes_of_the_host_build(sizes):
    case = make_case(sizes)
    scores = results(lambda build: build.support_score(case.values, case.offsets, case.index, INV_T))
    assert all_same(scores)
    np.testing.assert_allclose(scores[0], case.scores(), rtol=2e-6, atol=4e-6)


def test_targets_are_found_and_logits_picked():
    case = make_case()
    for targets in (case.targets, np.full(case.rows, -1), np.full(case.rows, VOCAB)):
        assert all_same(results(lambda build, t=targets: build.find_targets(case.offsets, case.ids, t)))
    for first, columns in ((0, VOCAB), (1250, 1250)):
        logits = np.ascontiguousarray(case.logits[:, first:first + columns])
        assert all_same(results(lambda build, x=logits, first=first: build.pick_logits(
            x, case.offsets, case.ids, first, np.full_like(case.values, 77))))


@pytest.mark.parametrize("columns", [VOCAB, 1251])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_gradient_has_the_bytes_of_the_host_build(dtype, columns):
    case = make_case()
    lse = case.scores()[2].astype(np.float32)
    assert all_same(results(lambda build: build.support_score_backward(
        case.values, case.offsets, case.ids, case.index, lse, case.grad, 0, INV_T, dtype,
        np.full((case.rows, columns), 77, STORED[dtype]))))


def test_tokens_are_those_of_the_host_build():
    case = make_case((1, 2, 255, 256, 257, 700, VOCAB) * 20)
    keys = np.arange(case.rows) + (1 << 40), np.arange(case.rows) * 3
    assert all_same(results(lambda build: build.draw(case.values, case.offsets, case.ids, INV_T, 1 << 63, *keys)))


# ---- all-reduce ----


class GpuGroup:
    """The ranks of a group, each with a stream of its own: on one GPU, or each on its own."""

    def __init__(self, world, spread, slice_bytes=8192, timeout_s=20.0):
        self.devices = [torch.device("cuda", rank if spread else 0) for rank in range(world)]
        for a, b in itertools.permutations(set(self.devices), 2):
            torch.zeros(1, device=a).to(b)  # makes torch enable peer access
        segment, progress = collective_bytes(slice_bytes)
        self.segments = [torch.zeros(segment, dtype=torch.uint8, device=d) for d in self.devices]
        self.progresses = [torch.zeros(progress, dtype=torch.uint8, device=d) for d in self.devices]
        self.streams = [torch.cuda.Stream(d) for d in self.devices]
        self.ranks = all_ranks([s.data_ptr() for s in self.segments], slice_bytes, timeout_s)
        self._load_kernels()

    def _load_kernels(self):
        """Loading a kernel waits for the device, and would wait for a peer that cannot start: load all of them first,
        in workgroups that have failed already and so return at once."""
        failed = np.zeros(MOST_GROUPS, PROGRESS)
        failed["failure"]["kind"] = hip_runs.TIMED_OUT
        for rank, progress in enumerate(self.progresses):
            progress.copy_(torch.from_numpy(failed.view(np.uint8)))
            for dtype in STORED:
                x = torch.zeros(16, device=self.devices[rank])
                self.all_reduce(rank, dtype, x, x, 4)
        self.synchronize()
        for progress in self.progresses:
            progress.zero_()
        self.synchronize()

    def synchronize(self):
        for device in set(self.devices):
            torch.cuda.synchronize(device)

    def all_reduce(self, rank, dtype, x, out, count):
        with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
            launch("all_reduce", ctypes.addressof(self.ranks[rank]), self.progresses[rank], dtype, x, out, count)

    def put(self, arrays):
        tensors = [on_gpu(a, d) if a.size else torch.zeros(4, device=d)[:0] for a, d in
                   zip(arrays, self.devices, strict=True)]
        self.synchronize()
        return tensors

    def failures(self, rank):
        return self.progresses[rank].cpu().numpy().view(PROGRESS)["failure"]

    def check(self, tensors, expected):
        self.synchronize()
        for rank, tensor in enumerate(tensors):
            assert not self.failures(rank)["kind"].any(), self.failures(rank)[0]
            assert same_bytes(from_gpu(tensor, expected), expected)


@pytest.fixture(params=[False, True], ids=["one-gpu", "peers"])
def spread(request):
    return request.param


def make_group(world, spread, **options):
    if spread and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, there are {torch.cuda.device_count()}")
    return GpuGroup(world, spread, **options)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", STORED)
def test_sum_over_ranks_is_the_tree(dtype, world, spread):
    group, rng = make_group(world, spread), np.random.default_rng(world)
    counts = [1, 7, 4096, 32768, 0, 100_003, 500_000]
    if world == 8 and not spread:
        counts.pop()  # 8 x 64 workgroups that wait for each other do not fit on one GPU at one time
    for count, in_place in zip(counts, itertools.cycle([False, True])):
        inputs = draw_inputs(rng, dtype, world, count)
        xs = group.put(inputs)
        outs = xs if in_place else group.put([np.full_like(x, 77) for x in inputs])
        for rank in range(world):
            group.all_reduce(rank, dtype, xs[rank], outs[rank], count)
        group.check(outs, expected_sum(dtype, inputs))


@pytest.mark.parametrize("world", [2, 4])
def test_many_generations_queue_up(world, spread):
    group, rng, count, calls = make_group(world, spread), np.random.default_rng(0), 2050, 500
    inputs = [x.reshape(calls, count) for x in draw_inputs(rng, BFLOAT16, world, calls * count)]
    padded = [np.zeros((calls, 2056), np.uint16) for _ in inputs]  # rows at multiples of 16 bytes
    for x, own in zip(padded, inputs, strict=True):
        x[:, :count] = own
    xs = group.put(padded)
    for call in range(calls):
        for rank in range(world):
            group.all_reduce(rank, BFLOAT16, xs[rank][call], xs[rank][call], count)
    expected = np.zeros_like(padded[0])
    expected[:, :count] = expected_sum(BFLOAT16, inputs)
    group.check(xs, expected)


@pytest.mark.parametrize("world", [2, 4])
def test_graph_replays_with_changing_inputs(world, spread):
    group, rng, count = make_group(world, spread), np.random.default_rng(0), 16_384
    xs, outs = (group.put([np.zeros(count, np.float16)] * world) for _ in range(2))
    graphs = [torch.cuda.CUDAGraph() for _ in range(world)]
    for rank, graph in enumerate(graphs):
        with torch.cuda.device(group.devices[rank]), torch.cuda.graph(graph, stream=group.streams[rank]):
            for x, out in ((xs, outs), (outs, outs)):
                group.all_reduce(rank, FLOAT16, x[rank], out[rank], count)
    for _ in range(20):
        inputs = draw_inputs(rng, FLOAT16, world, count)
        for x, new in zip(xs, group.put(inputs), strict=True):
            x.copy_(new)
        group.synchronize()
        for rank, graph in enumerate(graphs):
            with torch.cuda.device(group.devices[rank]), torch.cuda.stream(group.streams[rank]):
                graph.replay()
        once = expected_sum(FLOAT16, inputs)
        group.check(outs, expected_sum(FLOAT16, [once] * world))


def test_dead_rank_ends_the_others_with_the_failure_recorded(spread):
    group = make_group(2, spread, timeout_s=0.2)
    (x, _), (out, _) = group.put([np.ones(64, np.float32)] * 2), group.put([np.full(64, 77, np.float32)] * 2)
    for _ in range(2):  # the second time the broken workgroup returns at once
        group.all_reduce(0, FLOAT32, x, out, 64)
    group.synchronize()
    failure = group.failures(0)[0]
    assert (failure["kind"], failure["peer"], failure["signal"]) == (hip_runs.TIMED_OUT, 1, hip_runs.READY)
    assert (failure["generation"], failure["seen"]) == (1, 0)
    assert (out.cpu() == 77).all()


def test_ranks_that_disagree_both_find_out(spread):
    group = make_group(2, spread)
    xs = group.put([np.ones(64, np.float32)] * 2)
    for rank, count in enumerate((64, 32)):
        group.all_reduce(rank, FLOAT32, xs[rank], xs[rank], count)
    group.synchronize()
    for rank, counts in enumerate([(64, 32), (32, 64)]):
        failure = group.failures(rank)[0]
        assert (failure["kind"], failure["peer"]) == (hip_runs.MISMATCH, 1 - rank)
        assert (failure["mine"]["count"], failure["theirs"]["count"]) == counts
