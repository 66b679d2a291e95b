"""What the GPU communicator must do beyond tests/collective_cases.py, as functions of one rank's communicator.

tests/unit/test_ipc_on_host.py runs them over the kernels built for the host, tests/gpu/test_communicator.py on GPUs.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from rlk.collectives.objects import all_gather_object
from rlk.collectives.routes import EVERY_SIZE, Limits
from rlk.collectives.tree import tree_sum
from rlk.errors import CheckFailed
from rlk.ops.norm import add_rms_norm
from tests.collective_cases import SUM_DTYPES, check_all_reduce, inputs, mismatch, mixed_calls, same_bytes

# Limits that send every message one way; what is too large to be pushed goes one-shot.
PUSHED, ONE_SHOT, TWO_SHOT = (Limits(*limits) for limits in ((EVERY_SIZE, EVERY_SIZE), (-1, EVERY_SIZE), (-1, -1)))


class Moved:
    """A GPU communicator that takes and gives CPU tensors, and raises before it returns: for collective_cases.py."""

    def __init__(self, comm) -> None:
        self.comm, self.rank, self.world = comm, comm.rank, comm.world

    def __getattr__(self, operation):
        def call(x, out=None):
            x_gpu, out_gpu = self._move(x, out)
            result = getattr(self.comm, operation)(x_gpu, out_gpu)
            self.comm.check()
            return result.cpu() if out is None else out.copy_(result)

        return call

    def reduce_scatter_many(self, xs, outs=None):
        moved = [self._move(x, out) for x, out in zip(xs, outs or [None] * len(xs), strict=True)]
        results = self.comm.reduce_scatter_many([x for x, _ in moved], outs and [out for _, out in moved])
        self.comm.check()
        return [result.cpu() for result in results]

    def barrier(self):
        self.comm.barrier()

    def _move(self, x, out):
        """x and out on the GPU, where they share memory as they do here."""
        if out is None or out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel():
            return x.to(self.comm.device), None if out is None else out.to(self.comm.device)
        whole, part = (x, out) if x.numel() >= out.numel() else (out, x)
        first = (part.data_ptr() - whole.data_ptr()) // x.element_size()
        whole_gpu = whole.to(self.comm.device)
        part_gpu = whole_gpu.view(-1)[first:first + part.numel()].view(part.shape)
        return (whole_gpu, part_gpu) if whole is x else (part_gpu, whole_gpu)


def mixed(comm, limits, rounds, largest) -> None:
    comm.limits = limits
    mixed_calls(Moved(comm), rounds=rounds, max_delay_s=0.01, with_many=True)
    mixed_calls(Moved(comm), rounds=10, seed=1, largest=largest)
    for dtype in SUM_DTYPES:
        for count in (0, 1, 7, 1000, largest - 1, largest):
            check_all_reduce(Moved(comm), inputs(torch.Generator().manual_seed(count), comm.world, (count,), dtype),
                             in_place=count % 2 == 0)
    assert all_gather_object(comm, "x" * comm.rank) == ["x" * peer for peer in range(comm.world)]
    comm.close()
    with pytest.raises(CheckFailed, match="closed"):
        comm.barrier()


def many_at_once(comm) -> None:
    common = torch.Generator().manual_seed(4)
    for dtype in SUM_DTYPES:
        xs = [inputs(common, comm.world, (comm.world * (i + 1), 3), dtype) for i in range(20)]
        outs = comm.reduce_scatter_many([x[comm.rank].to(comm.device) for x in xs])
        comm.check()
        for x, out in zip(xs, outs, strict=True):
            assert same_bytes(out.cpu(), tree_sum(x).to(dtype).unflatten(0, (comm.world, -1))[comm.rank])


class Calls:
    """All operations on buffers of their own, in a fixed order: run eagerly, or captured and replayed."""

    def __init__(self, comm) -> None:
        self.comm, self.common = comm, torch.Generator().manual_seed(0)
        self.shapes = {"reduce": ((5000,), torch.bfloat16), "large": ((600_000,), torch.float32),
                       "gather": ((77,), torch.int64), "scatter": ((comm.world * 40, 3), torch.float16),
                       "parts": ((comm.world, 9), torch.float16), "first": ((8, 64), torch.float32),
                       "second": ((1000,), torch.bfloat16), "partial": ((8, 64), torch.float32)}
        self.static = {name: torch.zeros(shape, dtype=dtype, device=comm.device)
                       for name, (shape, dtype) in self.shapes.items()}
        self.residual = torch.randn(8, 64, generator=self.common).bfloat16().to(comm.device)
        self.w = torch.randn(64, generator=self.common).bfloat16().to(comm.device)

    def change(self) -> dict[str, list[torch.Tensor]]:
        """New inputs, of all ranks, in the same memory."""
        data = {}
        for name, (shape, dtype) in self.shapes.items():
            if dtype == torch.int64:
                data[name] = list(torch.randint(-9, 9, (self.comm.world, *shape), generator=self.common))
            else:
                data[name] = inputs(self.common, self.comm.world, shape, dtype)
            self.static[name].copy_(data[name][self.comm.rank])
        return data

    def __call__(self) -> dict[str, torch.Tensor]:
        comm, x, results = self.comm, self.static, {}
        results["reduce"] = comm.all_reduce(x["reduce"])
        results["gather"] = comm.all_gather(x["gather"])
        first = comm.staging((8, 64), torch.float32, 0)
        torch.mul(x["first"], 2, out=first)  # as a GEMM would leave it there
        results["first"] = comm.all_reduce_staged(first)
        results["large"] = comm.all_reduce(x["large"])
        results["scatter"], results["parts"] = comm.reduce_scatter_many([x["scatter"], x["parts"]])
        comm.barrier()
        second = comm.staging((1000,), torch.bfloat16, 1)
        second.copy_(x["second"])
        results["second"] = comm.all_reduce_staged(second)
        partial = comm.staging((8, 64), torch.float32, 0)
        partial.copy_(x["partial"])
        results["hidden"], results["y"] = comm.all_reduce_add_rms_norm(partial, self.residual, self.w, 1e-6)
        results["again"] = comm.all_reduce(x["reduce"], x["reduce"])
        return results

    def verify(self, data, results) -> None:
        self.comm.check()
        rank, world = self.comm.rank, self.comm.world
        sums = {name: tree_sum(xs).to(xs[0].dtype) for name, xs in data.items() if name != "gather"}
        for name in ("reduce", "large", "second"):
            assert same_bytes(results[name].cpu(), sums[name]), name
        assert same_bytes(results["again"].cpu(), sums["reduce"])
        assert same_bytes(results["gather"].cpu(), torch.stack(data["gather"]))
        assert same_bytes(results["first"].cpu(), tree_sum([2 * x for x in data["first"]]))
        for name in ("scatter", "parts"):
            assert same_bytes(results[name].cpu(), sums[name].unflatten(0, (world, -1))[rank]), name
        hidden, y = (x.cpu() for x in add_rms_norm(sums["partial"].to(self.comm.device), self.residual, self.w, 1e-6))
        assert same_bytes(results["hidden"].cpu(), hidden)
        if self.comm.device.type == "cuda":
            assert same_bytes(results["y"].cpu(), y)
        else:  # the CPU's norm adds its squares in another order
            torch.testing.assert_close(results["y"], y, rtol=0.01, atol=1e-3)


def eager_calls(comm, limits, rounds) -> None:
    comm.limits = limits
    calls = Calls(comm)
    for _ in range(rounds):
        data = calls.change()
        calls.verify(data, calls())
    comm.close()


def mismatched(comm, kind) -> str:
    return mismatch(Moved(comm), kind)


def slot_twice(comm) -> str:
    view = comm.staging((64,), torch.float32, 1)
    view.fill_(1)
    comm.all_reduce_staged(view)
    with pytest.raises(CheckFailed) as caught:
        comm.all_reduce_staged(view)
        comm.check()
    return str(caught.value)


def killed(comm, count) -> tuple[str, float]:
    """Rank 1 dies while the ranks reduce; what each other is told, and after how long."""
    x = torch.ones(count, device=comm.device)
    comm.all_reduce(x)
    comm.check()
    if comm.rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(CheckFailed) as caught:
        while True:
            start = time.monotonic()
            comm.all_reduce(x)
            comm.check()
    return str(caught.value), time.monotonic() - start


def closed(comm) -> str:
    """Rank 1 leaves after one barrier; what each other is told."""
    comm.barrier()
    if comm.rank == 1:
        comm.close()
        return ""
    with pytest.raises(CheckFailed) as caught:
        comm.barrier()
    with pytest.raises(CheckFailed, match="of no more use"):
        comm.barrier()
    comm.close()
    return str(caught.value)
