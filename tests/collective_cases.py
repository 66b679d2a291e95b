"""What every communicator must do, as functions of one rank; run by tests/unit (spawned) and tests/mpi (mpirun).

Every rank makes the data of all ranks from a common seed, so each checks against the tree on the host by itself.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from rlk.collectives import Communicator
from rlk.collectives.tree import tree_sum
from rlk.errors import CheckFailed

SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATHER_DTYPES = (*SUM_DTYPES, torch.int64, torch.uint8, torch.bool, torch.float64)
BATCH = 1000  # calls of many_reductions that are compared together


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(_raw(a)) == bytes(_raw(b))


def _raw(x: torch.Tensor) -> memoryview:
    return memoryview(x.contiguous().flatten().view(torch.uint8).numpy())


def inputs(generator: torch.Generator, world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """One tensor for each rank, of very different magnitudes: any other order of addition would show."""
    x = torch.randn((world, *shape), generator=generator) * 10.0 ** torch.randint(-3, 4, (world, *shape),
                                                                                 generator=generator)
    return list(x.to(dtype))


def mixed_calls(comm: Communicator, rounds: int, seed: int = 0, max_delay_s: float = 0.0, largest: int = 5000,
                with_many: bool = False) -> None:
    """All operations in a random order, sizes and dtypes, in place and out of place, at uneven speeds."""
    common = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(1000 + comm.rank)
    for _ in range(rounds):
        operation, place, n = (int(torch.randint(limit, (), generator=common)) for limit in (4 + with_many, 2, largest))
        if max_delay_s and torch.rand((), generator=own) < 0.3:
            time.sleep(max_delay_s * float(torch.rand((), generator=own)))
        if operation == 0:
            check_all_reduce(comm, inputs(common, comm.world, (n,), _pick(common, SUM_DTYPES)), bool(place))
        elif operation == 1:
            check_all_gather(comm, inputs(common, comm.world, (n,), _pick(common, GATHER_DTYPES)), bool(place))
        elif operation == 2:
            check_reduce_scatter(comm, inputs(common, comm.world, (comm.world * (n // 8), 3),
                                              _pick(common, SUM_DTYPES)), bool(place))
        elif operation == 3:
            comm.barrier()
        else:
            dtype = _pick(common, SUM_DTYPES)
            check_reduce_scatter_many(comm, [inputs(common, comm.world, (comm.world * (n // k), 2), dtype)
                                             for k in (8, 11, 60)], bool(place))


def _pick(generator: torch.Generator, choices: tuple):
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def check_all_reduce(comm: Communicator, x: list[torch.Tensor], in_place: bool) -> None:
    expected, mine = tree_sum(x).to(x[0].dtype), x[comm.rank].clone()
    result = comm.all_reduce(mine, mine if in_place else None)
    assert same_bytes(result, expected)
    assert same_bytes(mine, expected if in_place else x[comm.rank])


def check_all_gather(comm: Communicator, x: list[torch.Tensor], in_place: bool) -> None:
    expected = torch.stack(x)
    if in_place:
        out = torch.zeros_like(expected)
        out[comm.rank] = x[comm.rank]
        assert comm.all_gather(out[comm.rank], out) is out
        assert same_bytes(out, expected)
    else:
        assert same_bytes(comm.all_gather(x[comm.rank].clone()), expected)


def check_reduce_scatter(comm: Communicator, x: list[torch.Tensor], in_place: bool) -> None:
    expected = tree_sum(x).to(x[0].dtype).unflatten(0, (comm.world, -1))[comm.rank]
    mine = x[comm.rank].clone()
    out = mine.unflatten(0, (comm.world, -1))[comm.rank] if in_place else None
    assert same_bytes(comm.reduce_scatter(mine, out), expected)


def check_reduce_scatter_many(comm: Communicator, xs: list[list[torch.Tensor]], in_place: bool) -> None:
    """xs: for each tensor of the call, every rank's."""
    mine = [x[comm.rank].clone() for x in xs]
    outs = [x.unflatten(0, (comm.world, -1))[comm.rank] for x in mine] if in_place else None
    results = comm.reduce_scatter_many(mine, outs)
    assert len(results) == len(xs)
    for x, result in zip(xs, results, strict=True):
        assert same_bytes(result, tree_sum(x).to(x[0].dtype).unflatten(0, (comm.world, -1))[comm.rank])


def many_reductions(comm: Communicator, count: int, sizes: Sequence[int] = (129,)) -> None:
    """`count` all-reduces of changing data, each compared with the tree; a batch of them has one of the sizes."""
    common = torch.Generator().manual_seed(7)
    for batch, first in enumerate(range(0, count, BATCH)):
        calls, n = min(BATCH, count - first), sizes[batch % len(sizes)]
        x = torch.randn((comm.world, calls, n), generator=common)
        results = torch.empty((calls, n))
        for own, out in zip(x[comm.rank], results, strict=True):
            comm.all_reduce(own, out)
        expected = tree_sum(x.unbind(0))
        if not same_bytes(results, expected):
            wrong = (results.view(torch.int32) != expected.view(torch.int32)).any(1).nonzero()[0].item()
            raise AssertionError(f"rank {comm.rank}: call {first + wrong}, of {n} elements, is not the tree's sum")


def queued_calls(comm: Communicator, late: int, count: int, all_queued: Callable[[], None]) -> None:
    """`count` all-reduces, queued in another thread as on a stream; rank `late` starts when the others have all queued.

    all_queued() returns when every rank has called it.
    """
    common = torch.Generator().manual_seed(11)
    x = torch.randn((comm.world, count, 64), generator=common)
    mine = x[comm.rank].clone()
    with ThreadPoolExecutor(1) as stream:
        if comm.rank != late:
            calls = [stream.submit(comm.all_reduce, row, row) for row in mine]
        all_queued()
        if comm.rank == late:
            tree_sum([torch.randn(1 << 20) for _ in range(8)])  # it computes first
            calls = [stream.submit(comm.all_reduce, row, row) for row in mine]
        for call in calls:
            call.result()
    assert same_bytes(mine, tree_sum(x.unbind(0)))


def second_thread(comm: Communicator, late: int) -> None:
    """On every rank but `late`, which comes when they have tried: a call while another thread is in one raises."""
    if comm.rank == late:
        time.sleep(0.5)
        comm.barrier()
        return
    first = threading.Thread(target=comm.barrier)
    first.start()
    time.sleep(0.2)
    with pytest.raises(CheckFailed, match="another thread"):
        comm.barrier()
    first.join()


@contextmanager
def busy_process(nice: int = 0) -> Iterator[None]:
    """Another process that takes all the time of a core it gets; it ends by itself when this one does."""
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n for _ in range(1 << 20): pass"
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import os\nos.nice({nice})\n{loop}"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def mismatch(comm: Communicator, kind: str) -> str:
    """After some good calls the last rank makes another call than the others; returns the error each rank gets."""
    many_reductions(comm, 3)
    odd = comm.rank == comm.world - 1
    with pytest.raises(CheckFailed) as caught:
        if kind == "size":
            comm.all_reduce(torch.zeros(9 if odd else 8))
        elif kind == "dtype":
            comm.all_reduce(torch.zeros(8, dtype=torch.bfloat16 if odd else torch.float32))
        elif kind == "order" and odd:
            comm.barrier()
        else:
            comm.all_gather(torch.zeros(8))
    return str(caught.value)


MISMATCHES = {
    "size": ("all_reduce of 8 x float32", "all_reduce of 9 x float32"),
    "dtype": ("all_reduce of 8 x float32", "all_reduce of 8 x bfloat16"),
    "order": ("all_gather of 8 x float32", "barrier"),
}
