"""Matrix products: y = x w^T forward, dx = dy w and dw += dy^T x backward.

Rule: every output element is one FP32 accumulator that starts at +0.0 and takes fused multiply-adds with K ascending,
then one rounding. So a row's bits depend on that row and the weight alone. A row-parallel product splits K into equal
leaves, each such an accumulator, and adds them in a balanced binary tree. The weight gradient's accumulator takes the
tokens in ascending order. On a CPU it starts at main_grad, so a batch gives the bits of its micro-batches one after
another; on GPUs it starts at +0 and the sum is added to main_grad once per call.

Shapes: M rows (tokens), N output features, K input features. Operands are FP32 or BF16, of one dtype, and contiguous
weights; shapes or dtypes that do not fit raise ValueError with both.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from rlk.ops.cpu_library import DTYPE_CODE, INT, LONG, POINTER, function, ptr
from rlk.ops.gradients import at_least_fp32, main_grad, wants_grad
from rlk.ops.registry import EVERYWHERE, registry
from rlk.ops.swiglu import swiglu, swiglu_cpu, swiglu_reference


def linear(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """x w^T in x's dtype; x may have any leading dimensions. Differentiable."""
    if wants_grad(x_MK, w_NK):
        return _Linear.apply(x_MK, w_NK, None)
    return registry.call("linear", x_MK, x_MK, w_NK)


def linear_fp32(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """x w^T with the FP32 accumulators unrounded (the language-model head). Forward only."""
    return registry.call("linear_fp32", x_MK, x_MK, w_NK)


def linear_leaves(x_MK: torch.Tensor, w_NK: torch.Tensor, leaves: int) -> torch.Tensor:
    """x w^T in FP32, as the tree sum of `leaves` (a power of two) equal parts of K: this rank's. Differentiable.

    The tensor-parallel all-reduce of the result is the upper part of the same tree.
    """
    if wants_grad(x_MK, w_NK):
        return _Linear.apply(x_MK, w_NK, leaves)
    return registry.call("linear_leaves", x_MK, x_MK, w_NK, leaves)


def linear_swiglu(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in x's dtype, gate and up being the halves of x w^T's columns: the bits of swiglu(linear(x, w)).

    Differentiable; without a gradient to record, a backend may keep gate and up to itself.
    """
    if wants_grad(x_MK, w_NK):
        return swiglu(linear(x_MK, w_NK))
    return registry.call("linear_swiglu", x_MK, x_MK, w_NK)


def gemm_dx(dy_MN: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """dy w, the input's gradient, in dy's dtype: one FP32 accumulator per element, N ascending."""
    return registry.call("gemm_dx", dy_MN, dy_MN, w_NK)


def gemm_dw(dy_MN: torch.Tensor, x_MK: torch.Tensor, main_grad_NK: torch.Tensor) -> None:
    """main_grad += dy^T x in FP32, rows ascending."""
    registry.call("gemm_dw", dy_MN, dy_MN, x_MK, main_grad_NK)


class _Linear(torch.autograd.Function):
    """linear (leaves None) and linear_leaves. The weight is not a saved tensor: checkpointing would detach it."""

    @staticmethod
    def forward(ctx, x_MK, w_NK, leaves):
        ctx.save_for_backward(x_MK)
        ctx.weight = w_NK
        if leaves is None:
            return registry.call("linear", x_MK, x_MK, w_NK)
        return registry.call("linear_leaves", x_MK, x_MK, w_NK, leaves)

    @staticmethod
    def backward(ctx, dy_MN):
        (x_MK,) = ctx.saved_tensors
        dy_MN = dy_MN.to(x_MK.dtype)
        dx_MK = gemm_dx(dy_MN, ctx.weight) if ctx.needs_input_grad[0] else None
        grad_NK = main_grad(ctx.weight)
        if grad_NK is not None:
            gemm_dw(dy_MN, x_MK, grad_NK)
        return dx_MK, None, None


# The reference: what ordinary PyTorch code does.


@registry.register("linear", "reference", contract=False, devices=EVERYWHERE)
def linear_reference(x_MK, w_NK):
    return F.linear(x_MK, w_NK)


@registry.register("linear_swiglu", "reference", contract=False, devices=EVERYWHERE)
def linear_swiglu_reference(x_MK, w_NK):
    return swiglu_reference(F.linear(x_MK, w_NK))


@registry.register("linear_fp32", "reference", contract=False, devices=EVERYWHERE)
def linear_fp32_reference(x_MK, w_NK):
    return at_least_fp32(F.linear(x_MK, w_NK))


@registry.register("linear_leaves", "reference", contract=False, devices=EVERYWHERE)
def linear_leaves_reference(x_MK, w_NK, leaves):
    return at_least_fp32(F.linear(x_MK, w_NK))


@registry.register("gemm_dx", "reference", contract=False, devices=EVERYWHERE)
def gemm_dx_reference(dy_MN, w_NK):
    return torch.matmul(dy_MN, w_NK)


@registry.register("gemm_dw", "reference", contract=False, devices=EVERYWHERE)
def gemm_dw_reference(dy_MN, x_MK, main_grad_NK):
    dy_NM, x_MK = dy_MN.flatten(0, -2).t(), x_MK.flatten(0, -2)
    if x_MK.dtype == main_grad_NK.dtype:
        main_grad_NK.addmm_(dy_NM, x_MK)
    else:
        main_grad_NK.add_(torch.mm(dy_NM, x_MK))


# The CPU backend: hipkernels/cpu/gemm.cpp.

_linear = function("rlk_linear", POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, INT, INT)
_gemm_dx = function("rlk_gemm_dx", POINTER, POINTER, POINTER, LONG, LONG, LONG, INT)
_gemm_dw = function("rlk_gemm_dw", POINTER, POINTER, POINTER, LONG, LONG, LONG, INT)


def _linear_cpu(x_MK, w_NK, leaves, out_dtype):
    N, K = w_NK.shape
    *lead, inner = x_MK.shape
    if inner != K or x_MK.dtype != w_NK.dtype:
        raise ValueError(
            f"linear got x {tuple(x_MK.shape)} {x_MK.dtype} and w {tuple(w_NK.shape)} {w_NK.dtype}: "
            "expected one dtype and the same last dimension"
        )
    if leaves < 1 or leaves & (leaves - 1) or K % leaves:
        raise ValueError(f"linear_leaves got {leaves} leaves for K = {K}: expected a power of two that divides K")
    x_MK = x_MK.contiguous()
    y_MN = x_MK.new_empty(*lead, N) if out_dtype is x_MK.dtype else x_MK.new_empty(*lead, N, dtype=out_dtype)
    _linear(x_MK.data_ptr(), ptr(w_NK), y_MN.data_ptr(), math.prod(lead), N, K, leaves, DTYPE_CODE[x_MK.dtype],
            DTYPE_CODE[out_dtype])
    return y_MN


@registry.register("linear", "cpu", contract=True)
def linear_cpu(x_MK, w_NK):
    return _linear_cpu(x_MK, w_NK, 1, x_MK.dtype)


@registry.register("linear_swiglu", "cpu", contract=True)
def linear_swiglu_cpu(x_MK, w_NK):
    return swiglu_cpu(linear_cpu(x_MK, w_NK))


@registry.register("linear_fp32", "cpu", contract=True)
def linear_fp32_cpu(x_MK, w_NK):
    return _linear_cpu(x_MK, w_NK, 1, torch.float32)


@registry.register("linear_leaves", "cpu", contract=True)
def linear_leaves_cpu(x_MK, w_NK, leaves):
    return _linear_cpu(x_MK, w_NK, leaves, torch.float32)


@registry.register("gemm_dx", "cpu", contract=True)
def gemm_dx_cpu(dy_MN, w_NK):
    N, K = w_NK.shape
    if dy_MN.shape[-1] != N or dy_MN.dtype != w_NK.dtype:
        raise ValueError(
            f"gemm_dx got dy {tuple(dy_MN.shape)} {dy_MN.dtype} and w {tuple(w_NK.shape)} {w_NK.dtype}: "
            "expected one dtype, and dy's last dimension equal to w's first"
        )
    dy_MN = dy_MN.contiguous()
    dx_MK = dy_MN.new_empty((*dy_MN.shape[:-1], K))
    _gemm_dx(dy_MN.data_ptr(), ptr(w_NK), dx_MK.data_ptr(), dx_MK.numel() // K, N, K, DTYPE_CODE[dy_MN.dtype])
    return dx_MK


@registry.register("gemm_dw", "cpu", contract=True)
def gemm_dw_cpu(dy_MN, x_MK, main_grad_NK):
    N, K = main_grad_NK.shape
    if (dy_MN.shape[-1], x_MK.shape[-1]) != (N, K) or dy_MN.shape[:-1] != x_MK.shape[:-1] or dy_MN.dtype != x_MK.dtype:
        raise ValueError(
            f"gemm_dw got dy {tuple(dy_MN.shape)} {dy_MN.dtype} and x {tuple(x_MK.shape)} {x_MK.dtype} for a gradient "
            f"of shape {(N, K)}: expected the same rows, one dtype, and last dimensions {N} and {K}"
        )
    if main_grad_NK.dtype != torch.float32:
        raise ValueError(f"gemm_dw got a {main_grad_NK.dtype} main_grad, expected float32")
    dy_MN, x_MK = dy_MN.contiguous(), x_MK.contiguous()
    M = x_MK.numel() // K
    _gemm_dw(dy_MN.data_ptr(), x_MK.data_ptr(), ptr(main_grad_NK), M, N, K, DTYPE_CODE[x_MK.dtype])
