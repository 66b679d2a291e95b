"""SwiGLU: y[T, F] = silu(gate) * up with gate and up the halves of a row of gate_up[T, 2F]. BF16, FP32 inside.

Layout: one program makes BLOCK neighbouring columns of one row. Elementwise: no reduction, one rounding.
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
def silu_times(gate, up):
    """gate * sigmoid(gate) * up in FP32: the one expression of every SwiGLU."""
    return gate * (1.0 / (1.0 + tl.exp(-gate))) * up


@triton.jit
def swiglu_rows(gate_up, y, F, BLOCK: tl.constexpr):
    """Grid (T, columns / BLOCK)."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate = tl.load(gate_up + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * F + columns, silu_times(gate, up).to(tl.bfloat16), mask=inside)


def swiglu(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up on the GPU: BF16 [T, 2F] -> BF16 [T, F], F a multiple of 16; else ValueError."""
    T, width = gate_up_T2F.shape
    F = width // 2
    check_multiple("swiglu", half_a_row=F)
    gate_up_T2F = gate_up_T2F.contiguous()
    check_tensor("swiglu", "gate_up", gate_up_T2F, torch.bfloat16, (T, 2 * F))
    y_TF = gate_up_T2F.new_empty((T, F))
    block, num_warps = choose_block(architecture())
    if T:
        swiglu_rows[T, math.ceil(F / block)](gate_up_T2F, y_TF, F, BLOCK=block, **options(num_warps))
    return y_TF


def variants(arch: str) -> list[Variant]:
    """Every kernel that `swiglu` can launch on `arch`."""
    return [Variant(kernel="swiglu", name=name, function=swiglu_rows,
                    signature={"gate_up": "*bf16", "y": "*bf16", "F": "i32"}, constants={"BLOCK": block},
                    options=options(num_warps), divisible=("gate_up", "y", "F"), small=("gate_up", "y"))
            for name, (block, num_warps) in BLOCKS[arch].items()]
