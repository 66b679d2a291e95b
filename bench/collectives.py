"""Times the GPU collectives against NCCL and torch's symmetric memory, and writes bench/results/collectives.json.

One process per GPU. What is timed is a CUDA graph of CALLS calls; a sample is a replay of it divided by CALLS, the
slowest rank's; a figure is the median of all samples. Every round times the arms in both orders, ours first and last.
All arms reduce in place, but for symmetric memory's one-shot and our direct staging, whose input lies where peers read.
Each arm's result is compared once: ours with the tree's bits, the others with the float64 sum within BF16's rounding.
NVLink multicast stays off.

    python bench/collectives.py [number of GPUs]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from record import write_result

from rlk.collectives import ipc, routes
from rlk.collectives.tree import tree_sum
from rlk.ops import gpu_library
from rlk.ops.norm import add_rms_norm

CALLS, WARM_UP, REPLAYS, ROUNDS = 50, 3, 12, 2  # two rounds of two orders: 48 samples an arm
SIZES = {"8k": 8 << 10, "64k": 64 << 10, "128k": 128 << 10, "256k": 256 << 10, "512k": 512 << 10,
         "1m": 1 << 20, "4m": 4 << 20, "32m": 32 << 20}
EVERY = routes.EVERY_SIZE
ROUTES = {"pushed": routes.Limits(EVERY, EVERY), "one_shot": routes.Limits(-1, EVERY),
          "two_shot": routes.Limits(-1, -1)}
MOST_PUSHED = 512 << 10
SCALE = 2.0**-80  # in place CALLS times, sums grow by world ** CALLS
T, D = 8, 4096  # rows and columns of the fused norm
LIMIT_S = 540


@dataclass
class Arm:
    """One way to do it: `call` may be captured; `reset` restores its input between replays."""

    name: str
    call: Callable[[], torch.Tensor]
    reset: Callable[[], object]
    exact: bool
    graph: torch.cuda.CUDAGraph | None = None


def reduce_arms(comm: ipc.IpcCommunicator, size: int, group: dist.ProcessGroup) -> tuple[list[Arm], torch.Tensor]:
    """Every way to reduce `size` bytes of BF16, and this rank's input."""
    count = size // 2
    generator = torch.Generator().manual_seed(100 + comm.rank)
    source = (torch.randn(count, generator=generator) * SCALE).bfloat16().to(comm.device)
    x, theirs = source.clone(), source.clone()
    shared = symmetric.empty(count, dtype=torch.bfloat16, device=comm.device)
    symmetric.rendezvous(shared, group)
    operations, name = torch.ops.symm_mem, group.group_name

    def ours(limits: routes.Limits):
        def call():
            comm.limits = limits
            return comm.all_reduce(x, x)

        return call

    arms = [
        *(Arm(f"ours_{route}", ours(limits), lambda: x.copy_(source), True) for route, limits in ROUTES.items()
          if route != "pushed" or size <= MOST_PUSHED),
        Arm("nccl", lambda: dist.all_reduce(theirs, group=group) or theirs, lambda: theirs.copy_(source), False),
        Arm("symm_mem_one_shot", lambda: operations.one_shot_all_reduce(shared, "sum", name),
            lambda: shared.copy_(source), False),
        Arm("symm_mem_two_shot", lambda: operations.two_shot_all_reduce_(shared, "sum", name),
            lambda: shared.copy_(source), False),
    ]
    if size <= ipc.SIZES.direct:
        slots = [comm.staging((count,), torch.bfloat16, slot) for slot in range(2)]
        out, turn = torch.empty_like(source), [0]

        def staged():
            turn[0] += 1
            comm.limits = ROUTES["one_shot"]
            return comm.all_reduce_staged(slots[turn[0] % 2], out)

        arms.append(Arm("ours_direct", staged, lambda: [slot.copy_(source) for slot in slots], True))
    return arms, source


def check(arm: Arm, source: torch.Tensor, group: dist.ProcessGroup) -> None:
    """One call of the arm against what the sum is; AssertionError when it is another."""
    everyone = [torch.empty_like(source) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, source, group=group)
    arm.reset()
    result = arm.call()
    torch.cuda.synchronize()
    if arm.exact:
        expected = tree_sum(everyone).to(source.dtype)
        assert torch.equal(result.view(torch.int16), expected.view(torch.int16)), arm.name
    else:
        # In units of SCALE. A library may round partial sums to BF16: 8 bits, relative to the largest of them.
        exact = sum(x.double() for x in everyone) / SCALE
        room = sum(x.double().abs() for x in everyone) / SCALE * 2.0**-7
        assert ((result.double() / SCALE - exact).abs() <= room).all(), arm.name


def capture(arm: Arm, group: dist.ProcessGroup) -> None:
    arm.reset()
    for _ in range(WARM_UP):
        arm.call()
    torch.cuda.synchronize()
    dist.barrier(group)
    arm.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(arm.graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            arm.call()


def replay(arm: Arm, group: dist.ProcessGroup) -> list[float]:
    """Microseconds per call, of the slowest rank, for each of REPLAYS replays."""
    times = []
    for i in range(WARM_UP + REPLAYS):
        arm.reset()
        torch.cuda.synchronize()
        dist.barrier(group)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        arm.graph.replay()
        end.record()
        end.synchronize()
        if i >= WARM_UP:
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def measure(arms: list[Arm], group: dist.ProcessGroup) -> dict[str, float]:
    """Median microseconds of each arm, over both orders."""
    for arm in arms:
        capture(arm, group)
    samples: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(ROUNDS):
        for order in (arms, arms[::-1]):
            for arm in order:
                samples[arm.name] += replay(arm, group)
    for arm in arms:
        arm.graph = None  # before the next arms' memory is asked for
    return {name: median(times) for name, times in samples.items()}


def fused_arms(comm: ipc.IpcCommunicator, limits: routes.Limits) -> list[Arm]:
    """The bare all-reduce of [T, D] partial sums, with the norm in the same kernel, and with the norm after it."""
    comm.limits = limits
    generator = torch.Generator().manual_seed(comm.rank)
    partial, residual = torch.randn(T, D, generator=generator), torch.randn(T, D)
    partial, residual = partial.to(comm.device), residual.bfloat16().to(comm.device)
    w, out, eps = torch.ones(D, device=comm.device).bfloat16(), torch.empty_like(partial), 1e-6
    composed = add_rms_norm(comm.all_reduce(partial), residual, w, eps)
    fused = comm.all_reduce_add_rms_norm(partial, residual, w, eps)
    comm.check()
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(fused, composed, strict=True))

    def nothing():
        pass

    return [Arm("bare", lambda: comm.all_reduce(partial, out), nothing, True),
            Arm("fused", lambda: comm.all_reduce_add_rms_norm(partial, residual, w, eps), nothing, True),
            Arm("composed", lambda: add_rms_norm(comm.all_reduce(partial, out), residual, w, eps), nothing, True)]


def figures(microseconds: dict[str, dict[str, float]], norm: dict[str, float], chosen: dict[str, str]) -> dict:
    """The figures of the result file. `chosen`: the route that routes.py takes for a size."""
    made = {}
    for size, arms in microseconds.items():
        ours = arms[f"ours_{chosen[size]}"]
        made[f"allreduce_{size}_us"] = ours
        made[f"allreduce_{size}_over_nccl"] = ours / arms["nccl"]
        for peer in ("one_shot", "two_shot"):
            made[f"allreduce_{size}_over_symm_mem_{peer}"] = ours / arms[f"symm_mem_{peer}"]
        made |= {f"allreduce_{size}_{arm}_us": value for arm, value in arms.items()}
    made["fused_over_bare"] = norm["fused"] / norm["bare"]
    made |= {f"norm_{arm}_us": value for arm, value in norm.items()}
    return {name: round(value, 4) for name, value in made.items()}


def rank_main(rank: int, world: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world,
                            device_id=torch.device("cuda", rank))
    group = dist.group.WORLD
    comm = ipc.connect(group, 30.0)
    limits, names = comm.limits, {routes.PUSHED: "pushed", routes.ONE_SHOT: "one_shot", routes.TWO_SHOT: "two_shot"}
    chosen = {name: names[limits.route(size)] for name, size in SIZES.items()}
    microseconds = {}
    for name, size in SIZES.items():
        arms, source = reduce_arms(comm, size, group)
        for arm in arms:
            check(arm, source, group)
        microseconds[name] = measure(arms, group)
        comm.check()
        if rank == 0:
            print(name, {arm: round(value, 2) for arm, value in microseconds[name].items()}, flush=True)
    norm = measure(fused_arms(comm, limits), group)
    comm.check()
    if rank == 0:
        name = "collectives" if world == 2 else f"collectives-x{world}"
        write_result(name, f"python bench/collectives.py {world}", figures(microseconds, norm, chosen), target="gpu")
    dist.barrier(group)
    comm.close()
    sys.stdout.flush()
    os._exit(0)  # tearing down NCCL after it was captured can hang


def main() -> None:
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    if torch.cuda.device_count() < world:
        sys.exit(f"error: {world} GPUs are needed, torch sees {torch.cuda.device_count()}")
    gpu_library.object_path()  # built once, not by every rank
    with tempfile.TemporaryDirectory(prefix="rlk-bench-") as folder:
        context = torch.multiprocessing.spawn(rank_main, args=(world, folder), nprocs=world, join=False)
        deadline = time.monotonic() + LIMIT_S
        try:
            while not context.join(timeout=5):  # True once all have ended
                if time.monotonic() > deadline:
                    sys.exit(f"error: the ranks still run after {LIMIT_S} s")
        finally:
            for process in context.processes:
                process.kill()


if __name__ == "__main__":
    main()
