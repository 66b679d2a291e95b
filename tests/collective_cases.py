"""What every communicator must do, as functions of one rank; run by tests/unit (spawned) and tests/mpi (mpirun).

Every rank makes the data of all ranks from a common seed, so each checks against the tree on the host by itself.
"""

from __future__ import annotations

import time

import pytest
import torch

from rlk.collectives import Communicator
from rlk.collectives.tree import tree_sum
from rlk.errors import CheckFailed

SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATHER_DTYPES = (*SUM_DTYPES, torch.int64, torch.uint8, torch.bool, torch.float64)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(_raw(a)) == bytes(_raw(b))


def _raw(x: torch.Tensor) -> memoryview:
    return memoryview(x.contiguous().flatten().view(torch.uint8).numpy())


def inputs(generator: torch.Generator, world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """One tensor for each rank, of very different magnitudes: any other order of addition would show."""
    x = torch.randn((world, *shape), generator=generator) * 10.0 ** torch.randint(-3, 4, (world, *shape),
                                                                                 generator=generator)
    return list(x.to(dtype))


def mixed_calls(comm: Communicator, rounds: int, seed: int = 0, max_delay_s: float = 0.0, largest: int = 5000) -> None:
    """All operations in a random order, sizes and dtypes, in place and out of place, at uneven speeds."""
    common = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(1000 + comm.rank)
    for _ in range(rounds):
        operation, place, n = (int(torch.randint(limit, (), generator=common)) for limit in (4, 2, largest))
        if max_delay_s and torch.rand((), generator=own) < 0.3:
            time.sleep(max_delay_s * float(torch.rand((), generator=own)))
        if operation == 0:
            check_all_reduce(comm, inputs(common, comm.world, (n,), _pick(common, SUM_DTYPES)), bool(place))
        elif operation == 1:
            check_all_gather(comm, inputs(common, comm.world, (n,), _pick(common, GATHER_DTYPES)), bool(place))
        elif operation == 2:
            check_reduce_scatter(comm, inputs(common, comm.world, (comm.world * (n // 8), 3),
                                              _pick(common, SUM_DTYPES)), bool(place))
        else:
            comm.barrier()


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


def many_reductions(comm: Communicator, count: int, n: int = 129) -> None:
    """`count` all-reduces of changing data, each compared with the tree."""
    common = torch.Generator().manual_seed(7)
    for _ in range(count):
        x = torch.randn((comm.world, n), generator=common)
        assert same_bytes(comm.all_reduce(x[comm.rank]), tree_sum(x.unbind(0)))


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
