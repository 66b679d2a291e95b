"""Gradient of the RMS norm, and of the residual addition before it. BF16 rows, FP32 inside; the weight's in FP32.

Layout: rows [T, D], row-major; one program makes ROWS neighbouring rows, one after the other; lanes hold a row as in
norm.py. With STAGES > 1 the next STAGES - 1 rows are under way to shared memory meanwhile. Each program leaves its part
of the weight's gradient in `partials`, FP32 [T / ROWS, D], and weight_gradient_columns adds those up.

dx = scale * (dy * w - normed * mean) + dhidden, rounded once; normed = x * scale, scale as in norm.py, and mean =
scale * sum(dy * w * x) / D.

Reduction order. Along a row: x * x and dy * w * x over BLOCK elements, both as tl.sum would. Across rows, for one
column: fma(dy, normed, sum) over the program's rows ascending, from +0; partial i into accumulator i % PARTS,
ascending; the PARTS accumulators by tl.sum; that total onto main_grad by one addition. All of it is fixed by T alone:
no atomics, no dependence on the grid.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk.kernels import norm
from rlk.kernels.norm import inverse_rms
from rlk.kernels.operands import check_multiple, check_tensor
from rlk.kernels.row_launch import options
from rlk.kernels.variants import Variant, architecture


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["T"])
def rms_norm_backward_rows(dy, dhidden, x, w, dx, partials, T, D, eps, ADD: tl.constexpr, ROWS: tl.constexpr,
                           BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Grid (T / ROWS, rounded up). Without ADD dhidden is not read."""
    first = tl.program_id(0) * ROWS
    end = tl.minimum(first + ROWS, T)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    weight = tl.load(w + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(first, end, num_stages=STAGES):
        values = tl.load(x + row * D + columns, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(dy + row * D + columns, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            beside = tl.load(dhidden + row * D + columns, mask=inside, other=0.0).to(tl.float32)
        squares, products = tl.reduce((values * values, upstream * weight * values), 0, _add_both)
        scale = inverse_rms(squares, D, eps)
        mean = tl.div_rn(products * scale, D.to(tl.float32))
        normed = values * scale
        centred = upstream * weight - normed * mean
        if ADD:
            gradient = centred * scale + beside
        else:
            gradient = centred * scale
        tl.store(dx + row * D + columns, gradient.to(tl.bfloat16), mask=inside)
        total = tl.fma(upstream, normed, total)
    tl.store(partials + tl.program_id(0) * D + columns, total, mask=inside)


@triton.jit
def _tile_of_partials(partials, part, columns, count, inside, D):
    return tl.load(partials + part[:, None] * D + columns[None, :], mask=(part < count)[:, None] & inside[None, :],
                   other=0.0)


@triton.jit(do_not_specialize=["count"])
def weight_gradient_columns(partials, main_grad, count, D, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid (D / COLUMNS, rounded up): main_grad[D] += the sum of partials[count, D] over its rows."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)
    inside = columns < D
    total = tl.zeros((PARTS, COLUMNS), tl.float32)
    for first in range(0, count, 4 * PARTS):  # four tiles are under way together; what is not there adds +0
        a = _tile_of_partials(partials, first + part, columns, count, inside, D)
        b = _tile_of_partials(partials, first + PARTS + part, columns, count, inside, D)
        c = _tile_of_partials(partials, first + 2 * PARTS + part, columns, count, inside, D)
        d = _tile_of_partials(partials, first + 3 * PARTS + part, columns, count, inside, D)
        total = total + a + b + c + d
    before = tl.load(main_grad + columns, mask=inside, other=0.0)
    tl.store(main_grad + columns, before + tl.sum(total, 0), mask=inside)


CONFIGS = {  # columns, rows per program, warps, stages
    "gfx942": {"block_512": (512, 16, 1, 1), "block_1024": (1024, 16, 2, 1), "block_2048": (2048, 16, 4, 1),
               "block_4096": (4096, 16, 8, 1), "block_8192": (8192, 16, 8, 1)},
    "sm_90": {"block_512": (512, 16, 2, 4), "block_1024": (1024, 16, 4, 4), "block_2048": (2048, 16, 8, 4),
              "block_4096": (4096, 16, 8, 3), "block_8192": (8192, 16, 16, 3)},
}
SUM_CONFIGS = {  # partials and columns of a tile, warps: few columns, so that a weight of one head has programs enough
    "gfx942": {"sum_256x16": (256, 16, 8)},
    "sm_90": {"sum_256x16": (256, 16, 8)},
}


def choose(arch: str, D: int) -> str:
    """Name of the configuration for rows of D elements; ValueError when they are too long."""
    return norm.choose(arch, D)


def rms_norm_backward(dy_TD: torch.Tensor, dhidden_TD: torch.Tensor | None, x_TD: torch.Tensor, w_D: torch.Tensor,
                      eps: float, main_grad_D: torch.Tensor | None) -> torch.Tensor:
    """Gradient of x through the norm, plus `dhidden` of x used beside it; BF16, of x's shape.

    The weight's gradient is added onto main_grad, FP32 [D] (None: nowhere). D is a multiple of 16, at most 8192; else
    ValueError.
    """
    op, (*rows, D), arch = "rms_norm_backward", x_TD.shape, architecture()
    T = math.prod(rows)
    check_multiple(op, D=D)
    dy_TD, x_TD = dy_TD.contiguous(), x_TD.contiguous()
    dhidden_TD = None if dhidden_TD is None else dhidden_TD.contiguous()
    for name, tensor in (("x", x_TD), ("dy", dy_TD), ("dhidden", dhidden_TD)):
        if tensor is not None:
            check_tensor(op, name, tensor, torch.bfloat16, x_TD.shape)
    check_tensor(op, "w", w_D, torch.bfloat16, (D,))
    block, per_program, num_warps, stages = CONFIGS[arch][choose(arch, D)]
    dx_TD = torch.empty_like(x_TD)
    partials = x_TD.new_empty((math.ceil(T / per_program), D), dtype=torch.float32)
    if T:
        rms_norm_backward_rows[len(partials),](
            dy_TD, dy_TD if dhidden_TD is None else dhidden_TD, x_TD, w_D, dx_TD, partials, T, D, eps,
            ADD=dhidden_TD is not None, ROWS=per_program, BLOCK=block, STAGES=stages,
            **options(num_warps))
    if main_grad_D is not None:
        add_partials(op, partials, main_grad_D)
    return dx_TD


def add_partials(op: str, partials: torch.Tensor, main_grad_D: torch.Tensor) -> None:
    """main_grad[D] += the sum over the rows of partials, FP32 [n, D], in the order at the top of this file."""
    count, D = partials.shape
    check_tensor(op, "main_grad", main_grad_D, torch.float32, (D,))
    parts, columns, num_warps = SUM_CONFIGS[architecture()]["sum_256x16"]
    if count:
        weight_gradient_columns[math.ceil(D / columns),](partials, main_grad_D, count, D, PARTS=parts, COLUMNS=columns,
                                                         **options(num_warps))


def variants(arch: str) -> list[Variant]:
    """Every kernel that the launchers above can launch on `arch`."""
    pointers = {"dy": "*bf16", "dhidden": "*bf16", "x": "*bf16", "w": "*bf16", "dx": "*bf16", "partials": "*fp32"}
    sums = {"partials": "*fp32", "main_grad": "*fp32"}
    found = [
        Variant(kernel="rms_norm_backward", name=name + ("_dhidden" if add else ""), function=rms_norm_backward_rows,
                signature={**pointers, "T": "i32", "D": "i32", "eps": "fp32"},
                constants={"ADD": add, "ROWS": rows, "BLOCK": block, "STAGES": stages}, options=options(num_warps),
                divisible=(*pointers, "D"), small=tuple(pointers))
        for name, (block, rows, num_warps, stages) in CONFIGS[arch].items() for add in (False, True)
    ]
    return found + [
        Variant(kernel="weight_gradient", name=name, function=weight_gradient_columns,
                signature={**sums, "count": "i32", "D": "i32"}, constants={"PARTS": parts, "COLUMNS": columns},
                options=options(num_warps), divisible=(*sums, "D"), small=tuple(sums))
        for name, (parts, columns, num_warps) in SUM_CONFIGS[arch].items()
    ]
