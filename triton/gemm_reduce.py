"""Adds up the partial sums of a split product, workspace FP32 [leaves x chunks, M, N], and finishes it.

Layout: one program makes BLOCK neighbouring columns of one row.

Reduction order: within a leaf, chunk sums ascending, the first as it is; leaves in the tree
((0+1)+(2+3))+((4+5)+(6+7)). Epilogues: one rounding to BF16, FP32 as it is, the BF16 residual added in FP32 before that
rounding, or SwiGLU of the two halves of the row, each rounded to BF16 first as the product alone would round it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk.kernels.operands import check_tensor
from rlk.kernels.swiglu import silu_times
from rlk.kernels.variants import Variant, architecture


@triton.jit
def _leaf_sum(workspace, offsets, inside, leaf, chunks, plane):
    workspace += leaf * chunks * plane
    total = tl.load(workspace + offsets, mask=inside, other=0.0)
    for chunk in range(1, chunks):
        total += tl.load(workspace + chunk * plane + offsets, mask=inside, other=0.0)
    return total


@triton.jit
def _tree_sum(workspace, offsets, inside, chunks, plane, LEAVES: tl.constexpr):
    for leaf in tl.static_range(LEAVES):  # a binary counter, as in gemm.py
        total = _leaf_sum(workspace, offsets, inside, leaf, chunks, plane)
        if leaf % 2 == 0:
            single = total
        else:
            total = single + total
            if leaf % 4 == 1:
                pair = total
            else:
                total = pair + total
                if leaf % 8 == 3:
                    quad = total
                else:
                    total = quad + total
    return total


@triton.jit(do_not_specialize=["M", "chunks"])
def gemm_reduce(workspace, residual, y, M, N, chunks, LEAVES: tl.constexpr, EPILOGUE: tl.constexpr,
                BLOCK: tl.constexpr):
    """Grid (M, columns of y / BLOCK). EPILOGUE: "round" to y's dtype, "residual" or "swiglu" (y has N/2 columns)."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = N // 2 if EPILOGUE == "swiglu" else N
    inside = columns < width
    total = _tree_sum(workspace + row * N, columns, inside, chunks, M * N, LEAVES)
    if EPILOGUE == "residual":
        total = tl.load(residual + row * N + columns, mask=inside, other=0.0).to(tl.float32) + total
    if EPILOGUE == "swiglu":
        up = _tree_sum(workspace + row * N + width, columns, inside, chunks, M * N, LEAVES)
        total = silu_times(total.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32))
    tl.store(y + row * width + columns, total.to(y.dtype.element_ty), mask=inside)


CONFIGS = {  # four FP32 per lane: 128-bit loads
    "gfx942": {"block_512": {"BLOCK": 512, "num_warps": 2}},
    "sm_90": {"block_512": {"BLOCK": 512, "num_warps": 4}},
}
LEAVES = (1, 2, 4, 8)
FINISHES = {  # (epilogue, dtype of y) -> leaf counts; gate and up are column-parallel: one leaf
    ("round", "bf16"): LEAVES, ("round", "fp32"): LEAVES, ("residual", "bf16"): LEAVES, ("swiglu", "bf16"): (1,),
}
NEVER = {"gfx942": (), "sm_90": (("round", "fp32", 1),)}  # one leaf of one chunk in FP32 is the result already


def choose(arch: str) -> dict:
    return CONFIGS[arch]["block_512"]


def _options(config: dict) -> dict:
    return {"num_warps": config["num_warps"], "enable_fp_fusion": False}


def grid(config: dict, M: int, width: int) -> tuple[int, int]:
    return M, math.ceil(width / config["BLOCK"])


def reduce(workspace: torch.Tensor, parts: tuple[int, int], out_dtype: torch.dtype, residual_MN: torch.Tensor | None,
           swiglu: bool, out_MN: torch.Tensor | None = None) -> torch.Tensor:
    """The finished product [M, N] (swiglu: [M, N/2]) from FP32 [leaves x chunks, M, N]; parts is (leaves, chunks).

    It goes into `out`, where that is given.
    """
    leaves, chunks = parts
    _, M, N = workspace.shape
    width = N // 2 if swiglu else N
    if residual_MN is not None:
        residual_MN = residual_MN.contiguous()
        check_tensor("linear", "the residual", residual_MN, torch.bfloat16, (M, N))
    y = workspace.new_empty((M, width), dtype=out_dtype) if out_MN is None else out_MN
    config = choose(architecture())
    epilogue = "swiglu" if swiglu else "residual" if residual_MN is not None else "round"
    gemm_reduce[grid(config, M, width)](
        workspace, workspace if residual_MN is None else residual_MN, y, M, N, chunks, LEAVES=leaves,
        EPILOGUE=epilogue, BLOCK=config["BLOCK"], **_options(config))
    return y


def variants(arch: str) -> list[Variant]:
    """Every kernel that `reduce` can launch on `arch`."""
    return [
        Variant(kernel="gemm_reduce", name=f"{name}_{epilogue}_leaves{leaves}_{out}", function=gemm_reduce,
                signature={"workspace": "*fp32", "residual": "*bf16" if epilogue == "residual" else "*fp32",
                           "y": f"*{out}", "M": "i32", "N": "i32", "chunks": "i32"},
                constants={"LEAVES": leaves, "EPILOGUE": epilogue, "BLOCK": config["BLOCK"]},
                options=_options(config), divisible=("workspace", "residual", "y", "N"),
                small=("workspace", "residual", "y"))
        for name, config in CONFIGS[arch].items()
        for (epilogue, out), leaf_counts in FINISHES.items() for leaves in leaf_counts
        if (epilogue, out, leaves) not in NEVER[arch]
    ]
