"""Cumulative sums along rows with the bits of torch.cumsum: the longest part of the native sampler's top-p.

For 2 to 7 rows of FP32 of at least 4096 columns, torch.cumsum on a GPU leaves each row to one workgroup, whose 512
lanes scan 1024 columns at a time. hipkernels/gpu/cumulative_sum.cpp makes the same additions in the same order, all
tiles at once. It runs where a probe has found its bytes equal to torch's: once a process, for this torch and this GPU,
on rows of several kinds. Everything else goes to torch.cumsum.

Shape legend: B rows, V columns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from rlk.ops.gpu_library import LONG, POINTER, function, ptr, stream
from rlk.ops.registry import registry

ROWS = range(2, 8)
LEAST_COLUMNS = 4096
TILE = 1024  # columns; kTile in hipkernels/gpu/cumulative_sum.cpp
RUNS = 16  # floats of a tile's spine; kRuns

_cumulative_sum = function("rlk_gpu_cumulative_sum", POINTER, LONG, LONG, POINTER, POINTER, POINTER)


def cumulative_sum(x_BV: torch.Tensor) -> torch.Tensor:
    """torch.cumsum(x_BV, 1), byte for byte, of a matrix of floats."""
    return registry.call("cumulative_sum", x_BV, x_BV)


def guarded(x_BV: torch.Tensor) -> bool:
    """Is this a shape whose order of additions in torch is known? Says nothing of the device."""
    return (x_BV.dtype == torch.float32 and x_BV.ndim == 2 and x_BV.shape[0] in ROWS and x_BV.is_contiguous()
            and x_BV.shape[1] >= LEAST_COLUMNS)


@functools.cache
def verified(device: int) -> bool:
    """Does this process's torch give the tiles' bytes on that GPU? Probed at the first call, for the readback too.

    Nothing can be probed while a graph is captured: raises RuntimeError then, so call this once before a capture.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("cumulative_sum is first called while a graph is captured, expected its probe before; call "
                           "rlk.ops.cumulative_sum.verified(device) before the capture")
    with torch.cuda.device(device):
        unequal = [_unequal(torch.cumsum(x_BV, 1), cumulative_sum_tiled(x_BV)) for x_BV in probes("cuda")]
    registry.probes.append(dict(library=f"torch {torch.__version__}", torch=torch.__version__,
                                gpu=torch.cuda.get_device_name(device), op="cumulative_sum", equal=not any(unequal),
                                unequal=sum(unequal)))
    return not any(unequal)


def probes(device: str) -> Iterator[torch.Tensor]:
    """Rows of several kinds: uniform, peaked, sorted probabilities, signs, denormals, infinities and NaN."""
    generator = torch.Generator(device).manual_seed(1)
    for rows, columns in ((2, 4096), (3, 4097), (4, 152_064), (5, 32_000), (7, 151_936)):
        uniform = torch.rand(rows, columns, generator=generator, device=device)
        normal = torch.randn(rows, columns, generator=generator, device=device)
        bad = normal.clone()
        bad[0, columns // 3], bad[0, columns // 2] = torch.inf, -torch.inf
        bad[1, columns // 2] = torch.nan
        yield from (uniform, normal, (normal * 8).softmax(1), (normal * 2).softmax(1).sort(1).values,
                    uniform * 1e-42, bad)


def _unequal(a_BV: torch.Tensor, b_BV: torch.Tensor) -> int:
    """How many elements differ in their bits."""
    return int((a_BV.view(torch.int32) != b_BV.view(torch.int32)).sum())


# ---- backends: the kernels where they are verified, else torch ----


@registry.register("cumulative_sum", "hip", contract=False, devices=("cuda",), dtypes=(torch.float32,),
                   guard=lambda x_BV: guarded(x_BV) and verified(x_BV.device.index))
def cumulative_sum_tiled(x_BV):
    rows, columns = x_BV.shape
    sums_BV = torch.empty_like(x_BV)
    runs = x_BV.new_empty(rows, -(-columns // TILE), RUNS)
    _cumulative_sum(ptr(x_BV), rows, columns, ptr(sums_BV), ptr(runs), stream())
    return sums_BV


@registry.register("cumulative_sum", "torch", contract=False, devices=("cuda",))
@registry.register("cumulative_sum", "cpu", contract=False)
def cumulative_sum_torch(x_BV):
    return torch.cumsum(x_BV, 1)
