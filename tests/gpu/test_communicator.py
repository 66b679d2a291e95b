"""The GPU communicator between processes: the cases of tests/ipc_cases.py and what only a GPU has.

Each rank is a process on a GPU of its own; with one GPU there are two ranks on it.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from rlk.build import ROOT
from rlk.collectives import ipc
from rlk.collectives.factory import make_communicator
from rlk.collectives.fused import all_reduce_add_rms_norm
from rlk.collectives.process_group import ProcessGroupCommunicator
from rlk.collectives.routes import Limits
from rlk.errors import CheckFailed
from rlk.kernels import gemm
from rlk.ops import gpu_library
from rlk.ops.norm import add_rms_norm
from tests import ipc_cases
from tests.collective_cases import (
    MISMATCHES,
    SUM_DTYPES,
    check_reduce_scatter,
    inputs,
    many_reductions,
    mixed_calls,
    same_bytes,
)
from tests.ipc_cases import ONE_SHOT, PUSHED, TWO_SHOT, Calls, Moved
from tests.spawn import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

LIMIT_S = 150.0


def gpus() -> int:
    return torch.cuda.device_count()


@pytest.fixture(scope="module", autouse=True)
def built():
    gpu_library.object_path()  # once, not in every rank


@pytest.fixture(params=[2, 4, 8])
def world(request):
    if request.param > max(gpus(), 2):
        pytest.skip(f"needs {request.param} GPUs, there are {gpus()}")
    return request.param


@pytest.fixture
def own_gpus(world):
    if gpus() < world:
        pytest.skip(f"needs a GPU for each of {world} ranks, there are {gpus()}")


def run(world, case, *args, may_die=(), **options):
    """case(communicator, *args) on every rank; `options` are those of ipc.connect."""
    return run_ranks(world, _on_gpu, case, args, options, may_die=may_die, limit_s=LIMIT_S)


def _on_gpu(rank, world, case, args, options):
    torch.cuda.set_device(rank % gpus())
    return case(ipc.connect(dist.group.WORLD, **{"timeout_s": 20.0, **options}), *args)


LIMITS = {"pushed": PUSHED, "one-shot": ONE_SHOT, "two-shot": TWO_SHOT, "all": Limits(8 << 10, 512 << 10)}


# ---- the bits ----


@pytest.mark.parametrize("slice_bytes", [4096, ipc.SIZES.slice])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_mixed_calls_at_uneven_speeds(world, slice_bytes, limits):
    run(world, ipc_cases.mixed, limits, 60, 1 << 20, sizes=ipc.SIZES._replace(slice=slice_bytes))


def test_reduce_scatter_of_many_tensors(world):
    run(world, ipc_cases.many_at_once)


def _graphs(comm, limits):
    comm.limits = limits
    calls = Calls(comm)
    for _ in range(3):
        data = calls.change()
        calls.verify(data, calls())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = calls()
    for i in range(20):
        data = calls.change()
        graph.replay()
        calls.verify(data, results)
        if i % 5 == 0:
            data = calls.change()
            calls.verify(data, calls())
    comm.close()


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_eager_calls_and_graph_replays_with_changing_inputs(world, limits):
    run(world, _graphs, limits)


def _fused(comm, limits):
    comm.limits = limits
    common = torch.Generator().manual_seed(1)
    for T, D in ((1, 16), (3, 1040), (8, 4096), (33, 4096), (5, 8192), (300, 2560)):
        partial = inputs(common, comm.world, (T, D), torch.float32)[comm.rank].to(comm.device)
        residual = torch.randn(T, D, generator=common).bfloat16().to(comm.device)
        w = torch.randn(D, generator=common).bfloat16().to(comm.device)
        composed = add_rms_norm(comm.all_reduce(partial), residual, w, 1e-6)
        for fused in (comm.all_reduce_add_rms_norm(partial, residual, w, 1e-6),
                      all_reduce_add_rms_norm(comm, partial.clone(), residual, w, 1e-6)):
            comm.check()
            for ours, theirs in zip(fused, composed, strict=True):
                assert same_bytes(ours.cpu(), theirs.cpu()), (T, D)


@pytest.mark.parametrize("limits", [PUSHED, ONE_SHOT], ids=["pushed", "one-shot"])
def test_the_fused_norm_has_the_bits_of_the_two_calls(world, limits):
    run(world, _fused, limits)


def _products_in_staging(comm):
    common, slot = torch.Generator().manual_seed(2), 0
    for M, N, leaves in ((1, 4096, 1), (8, 1024, 2), (33, 2560, 4)):  # one program sums all, or a reduction does
        x = torch.randn(M, 1024, generator=common).bfloat16().to(comm.device)
        w = torch.randn(N, 1024, generator=common).bfloat16().to(comm.device) * (comm.rank + 1)
        expected = comm.all_reduce(gemm.linear(x, w, leaves, torch.float32))
        staged = gemm.linear(x, w, leaves, torch.float32, out_MN=comm.staging((M, N), torch.float32, slot))
        summed = comm.all_reduce_staged(staged)
        comm.check()
        assert same_bytes(summed.cpu(), expected.cpu()), (M, N, leaves)
        slot = 1 - slot


def test_a_product_goes_straight_into_the_staging_area(world):
    run(world, _products_in_staging)


CALLS_IN_A_GRAPH, REPLAYS = 100, 200


def _changing_data(comm):
    """Every call sums other data than the one before; what comes out is counted on the GPU."""
    rank, world = comm.rank, comm.world
    count, wrong = 4099, torch.zeros((), dtype=torch.int64, device=comm.device)
    x = torch.arange(count, device=comm.device).float() + rank
    expected = world * torch.arange(count, device=comm.device).float() + sum(range(world))  # whole numbers: exact

    def calls():
        for _ in range(CALLS_IN_A_GRAPH):
            x.add_(1)
            expected.add_(world)
            wrong.add_((comm.all_reduce(x) != expected).sum())

    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for _ in range(REPLAYS):
        graph.replay()
        x.sub_(CALLS_IN_A_GRAPH - 1)
        expected.sub_((CALLS_IN_A_GRAPH - 1) * world)
    comm.check()
    assert wrong.item() == 0
    many_reductions(Moved(comm), 200)


def test_twenty_thousand_reductions_of_changing_data(world, own_gpus):
    run(world, _changing_data)


def _expandable(comm):
    mixed_calls(Moved(comm), rounds=20)
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    comm.close()


def test_expandable_segments_of_torchs_allocator_do_not_matter(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    run(2, _expandable)


def _process_group(over_ipc):
    rank, world = over_ipc.rank, over_ipc.world
    group = dist.new_group(backend="nccl")
    comm = ProcessGroupCommunicator(group, fixed_order=True, device="cuda")
    mixed_calls(Moved(comm), rounds=40, with_many=True)
    chosen = make_communicator(dist.group.WORLD, "cuda", "consistency", 20.0)
    assert (comm.name, over_ipc.name, chosen.name) == ("process_group", "ipc", "ipc")
    for dtype in SUM_DTYPES:
        x = inputs(torch.Generator().manual_seed(2), world, (world * 999, 3), dtype)[rank].to(comm.device)
        assert same_bytes(comm.all_reduce(x).cpu(), over_ipc.all_reduce(x).cpu())
        assert same_bytes(comm.reduce_scatter(x).cpu(), over_ipc.reduce_scatter(x).cpu())
    check_reduce_scatter(Moved(comm), inputs(torch.Generator().manual_seed(3), world, (world, 5), torch.float32), False)


def test_the_process_group_gives_the_same_bits(world, own_gpus):
    run(world, _process_group)


# ---- what goes wrong ----


def _second_stream(comm):
    x = torch.ones(8, device=comm.device)
    comm.all_reduce(x)
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(CheckFailed) as caught:
        comm.all_reduce(x)
    assert (comm.all_reduce(x).cpu() == comm.world).all()  # on the first it goes on
    comm.check()
    return str(caught.value)


def test_a_second_stream_raises_on_every_rank(world):
    for rank, message in enumerate(run(world, _second_stream)):
        assert f"rank {rank}: all_reduce on stream 0x" in message
        assert "this communicator's calls are on stream 0x0 (the default stream)" in message


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_calls_are_named_on_every_rank(world, kind):
    for message in run(world, ipc_cases.mismatched, kind):
        assert all(call in message for call in MISMATCHES[kind]), message
        assert f"rank {world - 1} calls" in message and "generation " in message, message


def test_a_slot_used_twice_in_a_row_is_an_error(world):
    messages = run(world, ipc_cases.slot_twice)
    assert any("slot 1 in generation 2 right after another call in slot 1" in message for message in messages)


def test_a_killed_rank_ends_the_others_within_the_time_out(world):
    results = run(world, ipc_cases.killed, 1 << 22, timeout_s=2.0, may_die=[1])
    results.pop(1)
    assert any("waits for rank 1's " in message and "no answer within 2 s" in message for message, _ in results)
    for message, seconds in results:
        assert re.search("(signal|call|data) of generation ", message), message
        assert seconds < 10, message


def test_a_rank_that_closed_is_named_at_once(world):
    messages = run(world, ipc_cases.closed, timeout_s=60.0)
    assert "rank 0 in a collective waits for rank 1's ready signal of generation 2 (it is at 1)" in messages[0]
    assert "has closed" in messages[0]


# ---- the end of the process ----

LEAVE = """
import sys
import torch
import torch.distributed as dist
from rlk.collectives import ipc

rank, world, folder, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("nccl" if way == "nccl" else "gloo", init_method=f"file://{folder}/store", rank=rank,
                        world_size=world)
comm = ipc.connect(dist.group.WORLD, 20.0)
x = torch.ones(4096, device="cuda")
comm.all_reduce(x)
if way == "nccl":
    dist.all_reduce(x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    y = comm.all_reduce(x)
for _ in range(3):
    graph.replay()
if way == "close, last rank first":
    for turn in reversed(range(world)):
        if rank == turn:
            comm.close()
        dist.barrier()
elif way == "close":
    comm.close()
elif way == "nccl":
    comm.close()
    dist.destroy_process_group()
print("left")
"""


@pytest.mark.parametrize("way", ["close", "close, last rank first", "exit", "nccl"])
def test_a_process_ends_without_a_hang(way, tmp_path):
    if way == "nccl" and gpus() < 2:
        pytest.skip("NCCL takes one rank per GPU, there is one GPU")
    ranks = [subprocess.Popen([sys.executable, "-c", LEAVE, str(rank), "2", str(tmp_path), way], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(2)]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0 and "left" in output, output
    finally:
        for rank in ranks:
            rank.kill()
