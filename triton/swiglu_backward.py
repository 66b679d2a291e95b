"""Gradient of SwiGLU: dgate = dy * up * s * (1 + gate * (1 - s)) and dup = dy * gate * s, s = sigmoid(gate).

Layout: gate_up and its gradient [T, 2F] BF16, dy [T, F] BF16; one program makes BLOCK neighbouring columns of one row,
in both halves. FP32 inside. Elementwise: no reduction, one rounding.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk.kernels.operands import check_multiple, check_tensor
from rlk.kernels.row_launch import BLOCKS, choose_block, options
from rlk.kernels.variants import Variant, architecture


@triton.jit
def swiglu_backward_rows(dy, gate_up, dgate_up, F, BLOCK: tl.constexpr):
    """Grid (T, columns / BLOCK)."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    upstream = tl.load(dy + row * F + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    slope = tl.fma(gate, 1.0 - sigmoid, tl.full((BLOCK,), 1.0, tl.float32))
    tl.store(dgate_up + row * 2 * F + columns, (upstream * up * sigmoid * slope).to(tl.bfloat16), mask=inside)
    tl.store(dgate_up + row * 2 * F + F + columns, (upstream * gate * sigmoid).to(tl.bfloat16), mask=inside)


def swiglu_backward(dy_TF: torch.Tensor, gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Gradient of gate_up on the GPU: BF16 [T, F], [T, 2F] -> BF16 [T, 2F], F a multiple of 16; else ValueError."""
    T, F = dy_TF.shape
    check_multiple("swiglu_backward", half_a_row=F)
    dy_TF, gate_up_T2F = dy_TF.contiguous(), gate_up_T2F.contiguous()
    check_tensor("swiglu_backward", "dy", dy_TF, torch.bfloat16)
    check_tensor("swiglu_backward", "gate_up", gate_up_T2F, torch.bfloat16, (T, 2 * F))
    dgate_up_T2F = torch.empty_like(gate_up_T2F)
    block, num_warps = choose_block(architecture())
    if T:
        swiglu_backward_rows[T, math.ceil(F / block)](dy_TF, gate_up_T2F, dgate_up_T2F, F, BLOCK=block,
                                                      **options(num_warps))
    return dgate_up_T2F


def variants(arch: str) -> list[Variant]:
    """Every kernel that `swiglu_backward` can launch on `arch`."""
    pointers = {"dy": "*bf16", "gate_up": "*bf16", "dgate_up": "*bf16"}
    return [Variant(kernel="swiglu_backward", name=name, function=swiglu_backward_rows,
                    signature={**pointers, "F": "i32"}, constants={"BLOCK": block},
                    options=options(num_warps), divisible=(*pointers, "F"), small=tuple(pointers))
            for name, (block, num_warps) in BLOCKS[arch].items()]
