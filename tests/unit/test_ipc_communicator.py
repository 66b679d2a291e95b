"""What the GPU communicator does on the host, without a GPU: arguments, routes, slots, streams, errors, the end.

tests/unit/test_ipc_on_host.py runs it over the kernels themselves, tests/gpu/test_communicator.py on GPUs.
"""

import ctypes
import gc
import subprocess

import pytest
import torch
import torch.distributed as dist

from rlk.build import SOURCES
from rlk.build.cpu import host_compiler
from rlk.collectives import failure as failures
from rlk.collectives import ipc, ipc_memory, routes
from rlk.collectives.arguments import DTYPE_CODE
from rlk.collectives.factory import make_communicator
from rlk.collectives.failure import Call, Failure
from rlk.collectives.fused import all_reduce_add_rms_norm
from rlk.collectives.ipc import IpcCommunicator
from rlk.collectives.ipc_library import LEAST_SLICE, MOST_GROUPS, Library, Ranks, Sizes
from rlk.errors import CheckFailed, UsageError
from rlk.ops.norm import add_rms_norm
from tests.collective_cases import same_bytes
from tests.fake_gpu import FakeGpu, FakeStream, OwnMemory, install
from tests.spawn import run_ranks

SLICE, DIRECT, PUSH = SIZES = Sizes(1024, 4096, 4096)


@pytest.fixture
def gpu():
    return FakeGpu()


@pytest.fixture
def cuda(monkeypatch, gpu):
    return install(monkeypatch, gpu)


@pytest.fixture
def comm(cuda, gpu):
    """Rank 1 of 4, whose global numbers are 10 to 13."""
    library = Library()
    segments = [library.memory_create(SLICE + 2 * DIRECT) for _ in range(4)]
    made = IpcCommunicator(OwnMemory(library, 1, segments, SIZES), timeout_s=2.5)
    yield made
    made.close()


def misaligned(x):
    """The same data two bytes behind a multiple of 16."""
    room = torch.zeros(x.numel() * x.element_size() + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + 2
    copy = room[start:start + x.numel() * x.element_size()].view(torch.int8)
    if copy.data_ptr() % x.element_size():
        raise ValueError("use a dtype of at most two bytes")
    return copy.view(x.dtype).view(x.shape).copy_(x)


# ---- what is handed to the kernels ----


def test_the_group_is_described_to_the_kernels(comm, gpu):
    comm.all_reduce(torch.ones(4))
    ((ranks, progress, *_),) = gpu.called("all_reduce")
    assert isinstance(ranks, Ranks) and (ranks.rank, ranks.world) == (1, 4)
    assert list(ranks.segment)[:4] == comm._memory.segments and list(ranks.segment)[4:] == [None] * 4
    assert (ranks.slice_bytes, ranks.direct_bytes, ranks.push_bytes) == SIZES
    assert ranks.timeout_ns == 2_500_000_000
    assert (ranks.failure, progress) == (comm._memory.failure_address, comm._memory.progress)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_place", [False, True])
def test_all_reduce_hands_over_code_addresses_count_and_stream(comm, gpu, cuda, dtype, in_place):
    cuda.stream = FakeStream(0x77)
    x = torch.randn(3, 5).to(dtype)
    result = comm.all_reduce(x, x if in_place else None)
    ((_, _, code, route, slot, source, target, count, stream),) = gpu.called("all_reduce")
    assert (code, route, slot) == (DTYPE_CODE[dtype], routes.PUSHED, -1)
    assert (source, target, count, stream) == (x.data_ptr(), result.data_ptr(), 15, 0x77)
    assert same_bytes(result, x) and (result is x) == in_place


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex128])
def test_all_gather_moves_any_dtype(comm, gpu, dtype):
    x = torch.ones(2, 3, dtype=dtype)
    result = comm.all_gather(x)
    ((_, _, size, code, _, _, count, _),) = gpu.called("all_gather")
    assert (size, code, count) == (x.element_size(), DTYPE_CODE[dtype], 6)
    assert result.shape == (4, 2, 3) and same_bytes(result[1], x)


def test_all_gather_takes_its_own_slice_of_the_output(comm):
    out = torch.zeros(4, 8)
    out[1] = 5
    assert comm.all_gather(out[1], out) is out
    assert (out[1] == 5).all()


def test_many_parts_go_in_as_few_launches_as_fit(comm, gpu):
    xs = [torch.randn(4 * (i + 1), 3) for i in range(20)]
    outs = comm.reduce_scatter_many(xs)
    launches = gpu.called("reduce_scatter")
    assert [n for _, _, _, _, n, _ in launches] == [16, 4]
    parts = [(part.x, part.out, part.count) for _, _, _, parts, _, _ in launches for part in parts]
    assert parts == [(x.data_ptr(), out.data_ptr(), out.numel()) for x, out in zip(xs, outs, strict=True)]
    assert all(same_bytes(out, x.chunk(4)[1]) for x, out in zip(xs, outs, strict=True))
    into = [torch.empty_like(out) for out in outs]
    assert all(a is b for a, b in zip(comm.reduce_scatter_many(xs, into), into, strict=True))
    assert comm.reduce_scatter_many([]) == []


def test_misaligned_tensors_are_copied_in_and_out(comm, gpu):
    x, out = misaligned(torch.randn(33).half()), misaligned(torch.zeros(33).half())
    assert comm.all_reduce(x, out) is out and same_bytes(out, x)
    assert comm.all_reduce(x, x) is x
    gathered = misaligned(torch.zeros(4, 33).half())
    assert same_bytes(comm.all_gather(x, gathered)[1], x)
    parts = misaligned(torch.randn(8, 5).half())
    own = misaligned(torch.zeros(2, 5).half())
    assert comm.reduce_scatter(parts, own) is own and same_bytes(own, parts[2:4])
    addresses = [args[at] for name, ats in (("all_reduce", (5, 6)), ("all_gather", (4, 5)))
                 for args in gpu.called(name) for at in ats]
    addresses += [value for args in gpu.called("reduce_scatter") for part in args[3] for value in (part.x, part.out)]
    assert not any(address % 16 for address in addresses)


def test_empty_messages_are_calls_too(comm, gpu):
    assert comm.all_reduce(torch.empty(0)).numel() == 0
    assert comm.all_gather(torch.empty(0, 3)).shape == (4, 0, 3)
    assert len(gpu.called("all_reduce")) == len(gpu.called("all_gather")) == 1


@pytest.mark.parametrize("bad, message", [
    (lambda c: c.all_reduce(torch.zeros(3, dtype=torch.int64)), "cannot sum torch.int64 over ranks: expected one of"),
    (lambda c: c.all_reduce(torch.zeros(3, device="meta")), "expected a CPU tensor, got one on meta"),
    (lambda c: c.all_reduce(torch.zeros(4, 4).t()[:3]), r"contiguous tensor, got x with strides \(1, 4\) for shape"),
    (lambda c: c.all_reduce(torch.zeros(4, 4), torch.zeros(4, 4).t()), "contiguous tensor, got out with strides"),
    (lambda c: c.all_reduce(torch.zeros(3), torch.zeros(4)), r"out is torch.float32 \(4,\) on cpu, expected"),
    (lambda c: c.all_gather(torch.zeros(3), torch.zeros(4, 3).half()), "out is torch.float16"),
    (lambda c: c.reduce_scatter(torch.zeros(6)), "over 4 ranks: the first dimension must be a multiple"),
    (lambda c: c.reduce_scatter_many([torch.zeros(4), torch.zeros(4).half()]), "expected one dtype"),
    (lambda c: c.reduce_scatter_many([torch.zeros(4)], []), "of 1 tensors into 0: expected as many"),
    (lambda c: c.staging((4,), torch.float32, 2), r"slots \[0, 1\], got 2"),
    (lambda c: c.staging((1025,), torch.float32, 0), "takes 4100 bytes, a direct slot has 4096: use all_reduce"),
    (lambda c: c.all_reduce_staged(torch.zeros(4)), r"not from staging\(\): use all_reduce"),
    (lambda c: c.all_reduce_add_rms_norm(torch.zeros(2, 24), torch.zeros(2, 24).bfloat16(),
                                         torch.zeros(24).bfloat16(), 1e-6), "rows of 24 elements"),
    (lambda c: c.all_reduce_add_rms_norm(torch.zeros(2, 16), torch.zeros(2, 16), torch.zeros(16).bfloat16(), 1e-6),
     r"got residual torch.float32 \(2, 16\) on cpu, expected torch.bfloat16"),
])
def test_bad_input_is_refused_before_anything_is_launched(comm, gpu, bad, message):
    launched = len(gpu.calls)
    with pytest.raises(ValueError, match=message):
        bad(comm)
    assert not {"all_reduce", "all_gather", "reduce_scatter"} & {name for name, _ in gpu.calls[launched:]}
    comm.all_reduce(torch.zeros(3))  # and it is of use as before


# ---- routes ----


@pytest.mark.parametrize("size, route", [(0, routes.PUSHED), (400, routes.PUSHED), (404, routes.ONE_SHOT),
                                         (4000, routes.ONE_SHOT), (4004, routes.TWO_SHOT), (1 << 20, routes.TWO_SHOT)])
def test_the_size_picks_the_route(comm, gpu, size, route):
    assert comm.limits == routes.LIMITS["sm_90"][4]
    comm.limits = routes.Limits(400, 4000)
    comm.all_reduce(torch.zeros(size // 4))
    assert gpu.called("all_reduce")[0][3] == route


def test_what_the_kernels_cannot_push_goes_one_shot(comm, gpu):
    comm.limits = routes.Limits(routes.EVERY_SIZE, routes.EVERY_SIZE)
    most = MOST_GROUPS * LEAST_SLICE // 4
    for count in (most, most + 1):
        comm.all_reduce(torch.zeros(count))
    comm._memory.sizes = SIZES._replace(push=LEAST_SLICE - 128)
    comm.all_reduce(torch.zeros(1))
    assert [args[3] for args in gpu.called("all_reduce")] == [routes.PUSHED, routes.ONE_SHOT, routes.ONE_SHOT]
    comm._memory.sizes = SIZES
    for T, D in ((MOST_GROUPS, 512), (MOST_GROUPS + 1, 512), (1, 1024), (1, 1040)):
        comm.all_reduce_add_rms_norm(torch.zeros(T, D), torch.zeros(T, D).bfloat16(), torch.ones(D).bfloat16(), 1e-6)
    assert [args[2] for args in gpu.called("all_reduce_rms_norm")] == [routes.PUSHED, routes.ONE_SHOT, routes.PUSHED,
                                                                       routes.ONE_SHOT]


def test_every_architecture_and_world_has_its_limits():
    for architecture in ("sm_90", "gfx942"):
        for world in routes.WORLDS:
            limits = routes.limits(architecture, world)
            assert 0 < limits.pushed < limits.one_shot and limits.pushed <= MOST_GROUPS * LEAST_SLICE
        assert routes.limits(architecture, 1).route(0) == routes.ONE_SHOT


# ---- direct staging ----


def test_staging_is_this_ranks_segment(comm, gpu):
    first, second = (comm.staging((4, 8), torch.float32, slot) for slot in range(2))
    assert first.data_ptr() == comm._memory.segments[1] + SLICE
    assert second.data_ptr() == first.data_ptr() + DIRECT
    second.copy_(torch.arange(32).view(4, 8))
    assert same_bytes(comm.staging((32,), torch.float32, 1), torch.arange(32).float())
    assert same_bytes(comm.all_reduce_staged(second), second)
    comm.all_reduce_staged(comm.staging((16,), torch.bfloat16, 0), torch.zeros(16).bfloat16())
    assert [(args[2], args[4], args[7]) for args in gpu.called("all_reduce")] == [(0, 1, 32), (1, 0, 16)]
    with pytest.raises(ValueError, match="out lies in slot 1, which the peers read"):
        comm.all_reduce_staged(second, second)


def test_a_staged_partial_sum_is_read_in_place_by_the_fused_call(comm, gpu):
    residual, w = torch.randn(3, 32).bfloat16(), torch.ones(32).bfloat16()
    for partial in (torch.zeros(3, 32), comm.staging((3, 32), torch.float32, 1)):
        hidden, y = comm.all_reduce_add_rms_norm(partial, residual, w, 1e-6)
        *_, slot, source, _, _, to_hidden, to_y, T, D, eps, _ = gpu.called("all_reduce_rms_norm")[-1]
        assert (source, T, D, eps) == (partial.data_ptr(), 3, 32, 1e-6)
        assert (to_hidden, to_y) == (hidden.data_ptr(), y.data_ptr())
        assert slot == (-1 if partial.numel() == 96 and partial.data_ptr() != comm._slots[1].data_ptr() else 1)


def test_the_norm_is_fused_where_it_fits_and_composed_elsewhere(comm, gpu):
    w, residual = torch.ones(32).bfloat16(), torch.randn(3, 32).bfloat16()
    all_reduce_add_rms_norm(comm, torch.randn(3, 32), residual, w, 1e-6)
    assert len(gpu.called("all_reduce_rms_norm")) == 1 and not gpu.called("all_reduce")
    comm.limits = routes.Limits(-1, 100)  # the message is larger
    partial = torch.randn(3, 32)
    composed = all_reduce_add_rms_norm(comm, partial.clone(), residual, w, 1e-6)
    assert len(gpu.called("all_reduce_rms_norm")) == 1 and len(gpu.called("all_reduce")) == 1
    expected = add_rms_norm(partial, residual, w, 1e-6)
    assert all(same_bytes(a, b) for a, b in zip(composed, expected, strict=True))
    fp32 = torch.randn(3, 32)
    assert not comm.fuses_norm(fp32, fp32) and not comm.fuses_norm(torch.zeros(3, 24), torch.zeros(3, 24).bfloat16())


# ---- streams ----


def test_a_second_stream_raises_and_names_both(comm, gpu, cuda):
    comm.barrier()
    first, cuda.stream = cuda.stream, FakeStream(0xabc)
    for call in (lambda: comm.all_reduce(torch.zeros(4)), comm.barrier, lambda: comm.all_gather(torch.zeros(4))):
        with pytest.raises(CheckFailed, match=r"rank 11: .* on stream 0xabc, but this communicator's calls are on "
                                              r"stream 0x0 \(the default stream\); .*communicator of its own"):
            call()
    assert not gpu.called("all_reduce")
    cuda.stream = first
    comm.all_reduce(torch.zeros(4))


def test_graphs_are_captured_on_any_stream(comm, gpu, cuda):
    cuda.stream, cuda.capturing = FakeStream(1), True
    comm.all_reduce(torch.zeros(4))
    comm.barrier()
    assert cuda.stream.waits == 0  # a capture may not be waited for
    cuda.stream, cuda.capturing = FakeStream(2), False
    comm.barrier()
    assert cuda.stream.waits == 1
    cuda.stream, cuda.capturing = FakeStream(3), True
    comm.all_reduce(torch.zeros(4))
    assert [args[-1] for args in gpu.called("all_reduce")] == [1, 3]


# ---- failures ----


def fail(comm, kind, **fields):
    record = comm._memory.failure
    for name, value in fields.items():
        setattr(record, name, value)
    record.kind = kind


def call_of(operation, dtype, count, slot=-1, detail=0):
    return Call(operation, dtype, count, slot, detail)


@pytest.mark.parametrize("kind, fields, message", [
    (failures.TIMED_OUT, dict(peer=3, signal=0, generation=7, seen=6),
     "rank 11 in a collective waits for rank 13's ready signal of generation 7 (it is at 6): no answer within 2.5 s; "
     "see whether rank 13 died or hangs, or raise --timeout"),
    (failures.PEER_CLOSED, dict(peer=0, signal=1, generation=7, seen=5),
     "rank 11 in a collective waits for rank 10's done signal of generation 7 (it is at 5), but rank 10 has closed its "
     "communicator; see that rank's own error"),
    (failures.PEER_CLOSED, dict(peer=0, signal=0, generation=2, seen=1, reason=failures.TIMED_OUT),
     "rank 11 in a collective waits for rank 10's ready signal of generation 2 (it is at 1), but rank 10 has closed "
     "its communicator after a time-out of its own; see that rank's own error"),
    (failures.MISMATCH, dict(peer=0, generation=3, mine=call_of(0, 0, 8), theirs=call_of(0, 0, 8, detail=1)),
     "ranks disagree in generation 3: rank 11 calls all_reduce of 8 x float32, rank 10 calls all_reduce of 8 x float32 "
     "by another route or in other parts; make every rank call the same operations in the same order"),
    (failures.MISMATCH, dict(peer=2, generation=9, mine=call_of(0, 1, 64, 1), theirs=call_of(3, 0, 0)),
     "ranks disagree in generation 9: rank 11 calls all_reduce of 64 x bfloat16 in slot 1, rank 12 calls barrier; make "
     "every rank call the same operations in the same order"),
    (failures.SLOT_REUSED, dict(peer=1, generation=4, mine=call_of(0, 0, 64, 1)),
     "rank 11 calls all_reduce of 64 x float32 in slot 1 in generation 4 right after another call in slot 1, which "
     "peers may still be reading; alternate the slots, or make another call between"),
])
def test_a_recorded_failure_is_raised_by_the_next_call_and_every_further_one(comm, gpu, kind, fields, message):
    comm.all_reduce(torch.zeros(4))
    fail(comm, kind, **fields)
    with pytest.raises(CheckFailed) as caught:
        comm.all_gather(torch.zeros(4))
    assert str(caught.value) == message
    for call in (comm.barrier, comm.check, lambda: comm.reduce_scatter(torch.zeros(4)),
                 lambda: comm.staging((1,), torch.float32, 0)):
        with pytest.raises(CheckFailed, match="rank 11: .* of no more use: "):
            call()
    assert len(gpu.called("all_reduce")) == 1 and not gpu.called("all_gather")
    comm.close()


def test_check_waits_for_the_calls_so_far(comm, cuda):
    comm.check()
    assert cuda.stream.waits == 0  # there were none
    comm.all_reduce(torch.zeros(4))
    comm.check()
    assert cuda.stream.waits == 1
    fail(comm, failures.TIMED_OUT, peer=3, signal=0, generation=1)
    with pytest.raises(CheckFailed, match="rank 13's ready signal of generation 1"):
        comm.check()


def test_a_refused_launch_names_the_function(comm, gpu):
    gpu.refuses = {"all_reduce"}
    with pytest.raises(RuntimeError, match="rlk_gpu_all_reduce failed with code 6"):
        comm.all_reduce(torch.zeros(4))


# ---- the end ----


def test_close_tells_the_peers_once_on_the_communicators_stream(comm, gpu, cuda):
    cuda.stream = FakeStream(5)
    comm.all_reduce(torch.zeros(4))
    cuda.stream = FakeStream(6)
    comm.close()
    comm.close()
    assert [args[-1] for args in gpu.called("close")] == [5]
    assert comm._memory.released == 1
    with pytest.raises(CheckFailed, match="rank 11: barrier on a communicator that is of no more use: it is closed"):
        comm.barrier()


def test_a_forgotten_communicator_closes_itself(comm, gpu):
    memory = comm._memory
    held = [comm]
    del comm
    other = IpcCommunicator(memory, 1.0)
    del other
    gc.collect()
    assert len(gpu.called("close")) == 1 and memory.released == 1
    held.clear()


def test_a_lost_gpu_does_not_stop_the_close(comm, gpu):
    gpu.refuses = {"close"}
    comm.close()
    assert comm._memory.released == 0  # nothing there can be given back


# ---- between processes, over a library that only pretends ----


def pretend(gpus=("a", "b", "c"), peer_access=True, refuses=()):
    """For the rest of this process. Every rank sees all GPUs; its own is the one of its rank."""
    gpu = FakeGpu()
    gpu.peer_access, gpu.refuses = peer_access, set(refuses)
    cuda = install(pytest.MonkeyPatch(), gpu)
    cuda.gpus, cuda.current = list(gpus), dist.get_rank()
    return gpu


def _close_in_turn(rank, world, first):
    gpu = pretend()
    comm = ipc.connect(dist.group.WORLD, 1.0, SIZES)
    peers = [args[0] for args in gpu.called("ipc_open")]
    own = comm._memory.segments[rank]
    for turn in ([0, 1] if first == 0 else [1, 0]):
        if rank == turn:
            comm.close()
        dist.barrier()
    kept = own in gpu.memory
    ipc_memory.free_what_is_unmapped()
    comm.close()
    return len(peers), kept, own in gpu.memory, len(gpu.called("ipc_close")), len(gpu.memory)


@pytest.mark.parametrize("first", [0, 1])
def test_a_segment_is_freed_when_nobody_has_it_mapped_in_either_order(first):
    results = run_ranks(2, _close_in_turn, first)
    for rank, (opened, kept, later, closed, left) in enumerate(results):
        assert (opened, closed) == (1, 1)
        assert kept == (rank == first)  # the other rank still had it mapped
        assert not later and left == 0


def _cannot_map(rank, world):
    gpu = pretend(refuses=["ipc_open"] if rank == 1 else [])
    with pytest.raises(UsageError) as caught:
        ipc.connect(dist.group.WORLD, 1.0, SIZES)
    return str(caught.value), len(gpu.memory)


def test_every_rank_hears_that_one_cannot_map():
    for message, blocks in run_ranks(2, _cannot_map):
        assert "rank 1 cannot map the GPU memory of rank 0: rlk_gpu_ipc_open failed with code 6" in message
        assert "--ipc=host" in message
        assert blocks == 1  # the segment alone is kept: a peer may have it mapped


def _chosen(rank, world, mode, options):
    hosts = options.pop("hosts", None)
    pretend(**options)
    if hosts:
        pytest.MonkeyPatch().setattr("socket.gethostname", lambda: hosts[rank])
    with pytest.warns(UserWarning) if "refuses" in options else pytest.MonkeyPatch.context() as caught:
        comm = make_communicator(dist.group.WORLD, "cuda", mode, 1.0)
    return comm.name, comm.device.type, str(caught[0].message) if "refuses" in options else ""


@pytest.mark.parametrize("world, mode, options, name", [
    (2, "consistency", {}, "ipc"),
    (2, "native", {}, "process_group"),
    (3, "consistency", {}, "process_group"),
    (2, "consistency", {"peer_access": False}, "process_group"),
    (2, "consistency", {"peer_access": False, "gpus": ("a", "a")}, "ipc"),  # two ranks on one GPU
    (2, "consistency", {"hosts": ("one", "two")}, "process_group"),
    (2, "consistency", {"refuses": ["ipc_export"]}, "process_group"),
])
def test_the_factory_takes_ipc_where_all_gpus_reach_each_other(world, mode, options, name):
    for chosen, device, warning in run_ranks(world, _chosen, mode, options):
        assert (chosen, device) == (name, "cuda")
        assert not options.get("refuses") or "cannot make memory to share" in warning


def _odd_world(rank, world):
    pretend()
    with pytest.raises(UsageError, match=r"serves groups of \(2, 4, 8\) ranks, this one has 3"):
        ipc.connect(dist.group.WORLD, 1.0)


def test_other_worlds_are_refused():
    run_ranks(3, _odd_world)


# ---- the records are those of the header ----

LAYOUT = r"""
#include <cstddef>
#include <cstdio>
#include "collective_protocol.h"
int main() {
  using namespace rlk;
  printf("%zu %zu %zu", sizeof(Failure), offsetof(Failure, mine), offsetof(Failure, theirs));
  printf(" %zu %zu %zu %zu", sizeof(Call), offsetof(Call, count), offsetof(Call, slot), offsetof(Call, detail));
  printf(" %d %d %d %d", kTimedOut, kPeerClosed, kMismatch, kSlotReused);
  printf(" %d %d %d %d %d\n", kAllReduce, kAllGather, kReduceScatter, kBarrier, kAllReduceNorm);
}
"""


def test_the_failure_record_is_laid_out_as_in_the_header(tmp_path):
    (tmp_path / "layout.cpp").write_text(LAYOUT)
    subprocess.run([host_compiler(), "-std=c++17", f"-I{SOURCES}", tmp_path / "layout.cpp", "-o", tmp_path / "layout"],
                   check=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    expected = [*layout(Failure, "mine", "theirs"), *layout(Call, "count", "slot", "detail"), failures.TIMED_OUT,
                failures.PEER_CLOSED, failures.MISMATCH, failures.SLOT_REUSED, failures.ALL_REDUCE,
                failures.ALL_GATHER, failures.REDUCE_SCATTER, failures.BARRIER, failures.ALL_REDUCE_NORM]
    assert [int(word) for word in printed.split()] == expected


def layout(record, *fields):
    return [ctypes.sizeof(record), *(getattr(record, name).offset for name in fields)]
