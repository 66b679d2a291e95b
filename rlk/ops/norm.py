"""RMS normalisation alone, behind the residual addition, and with the rotary embedding of queries and keys.

Rule: FP32 inside, one rounding at the end; the sum of squares in 16 partial sums and a fixed tree (hipkernels/cpu/
rows.cpp). Weight gradients add the rows in ascending order onto main_grad.

Shapes: T tokens, D hidden, H heads, E head dimension, E2 = E / 2. x and its weight are FP32 or BF16, of one dtype;
shapes or dtypes that do not fit raise ValueError with both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rlk.ops.cpu_library import DTYPE_CODE, FLOAT, INT, LONG, POINTER, function, ptr
from rlk.ops.gradients import at_least_fp32, main_grad, wants_grad
from rlk.ops.registry import EVERYWHERE, registry


def rms_norm(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * w in x's dtype (Zhang and Sennrich, 2019). Differentiable."""
    if wants_grad(x_TD, w_D):
        return _RmsNorm.apply(x_TD, w_D, eps)
    return registry.call("rms_norm", x_TD, x_TD, w_D, eps)


def add_rms_norm(
    partial_TD: torch.Tensor, residual_TD: torch.Tensor, w_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden, rms_norm(hidden)) with hidden = residual_add(partial, residual), with those bits. Differentiable."""
    if wants_grad(partial_TD, residual_TD, w_D):
        return _AddRmsNorm.apply(partial_TD, residual_TD, w_D, eps)
    return registry.call("add_rms_norm", residual_TD, partial_TD, residual_TD, w_D, eps)


def residual_add(partial_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
    """residual + partial (FP32), rounded once to residual's dtype. Differentiable."""
    if wants_grad(partial_TD, residual_TD):
        return _ResidualAdd.apply(partial_TD, residual_TD)
    return registry.call("residual_add", residual_TD, partial_TD, residual_TD)


def qk_norm_rope(
    x_THE: torch.Tensor, w_E: torch.Tensor, cos_TE2: torch.Tensor, sin_TE2: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm over each head, then rotary embedding (rotate-half), rounded once. Differentiable.

    x may be a slice of the fused qkv (any stride over tokens). cos and sin are FP32 rows of `rope_table`, one per
    token. Element e < E/2 pairs with e + E/2, as in Hugging Face's Qwen3.
    """
    if wants_grad(x_THE, w_E):
        return _QkNormRope.apply(x_THE, w_E, cos_TE2, sin_TE2, eps)
    return registry.call("qk_norm_rope", x_THE, x_THE, w_E, cos_TE2, sin_TE2, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, w_D, eps):
        ctx.save_for_backward(x_TD)
        ctx.weight, ctx.eps = w_D, eps
        return registry.call("rms_norm", x_TD, x_TD, w_D, eps)

    @staticmethod
    def backward(ctx, dy_TD):
        (x_TD,) = ctx.saved_tensors
        grad_D = main_grad(ctx.weight)
        return registry.call("rms_norm_backward", x_TD, dy_TD, None, x_TD, ctx.weight, ctx.eps, grad_D), None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial_TD, residual_TD, w_D, eps):
        hidden_TD, y_TD = registry.call("add_rms_norm", residual_TD, partial_TD, residual_TD, w_D, eps)
        ctx.save_for_backward(hidden_TD)
        ctx.weight, ctx.eps = w_D, eps
        ctx.partial_dtype = partial_TD.dtype
        return hidden_TD, y_TD

    @staticmethod
    def backward(ctx, dhidden_TD, dy_TD):
        (hidden_TD,) = ctx.saved_tensors
        grad_D = main_grad(ctx.weight)
        dsum_TD = registry.call(
            "rms_norm_backward", hidden_TD, dy_TD, dhidden_TD, hidden_TD, ctx.weight, ctx.eps, grad_D
        )
        return dsum_TD.to(ctx.partial_dtype), dsum_TD, None, None


class _ResidualAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial_TD, residual_TD):
        ctx.partial_dtype = partial_TD.dtype
        return registry.call("residual_add", residual_TD, partial_TD, residual_TD)

    @staticmethod
    def backward(ctx, dhidden_TD):
        return dhidden_TD.to(ctx.partial_dtype), dhidden_TD


class _QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_THE, w_E, cos_TE2, sin_TE2, eps):
        ctx.save_for_backward(x_THE, cos_TE2, sin_TE2)
        ctx.weight, ctx.eps = w_E, eps
        return registry.call("qk_norm_rope", x_THE, x_THE, w_E, cos_TE2, sin_TE2, eps)

    @staticmethod
    def backward(ctx, dy_THE):
        x_THE, cos_TE2, sin_TE2 = ctx.saved_tensors
        dx_THE = registry.call(
            "qk_norm_rope_backward", x_THE, dy_THE, x_THE, ctx.weight, cos_TE2, sin_TE2, ctx.eps, main_grad(ctx.weight)
        )
        return dx_THE, None, None, None, None


# The reference: what ordinary PyTorch code does.


@registry.register("rms_norm", "reference", contract=False, devices=EVERYWHERE)
def rms_norm_reference(x_TD, w_D, eps):
    return F.rms_norm(x_TD, w_D.shape, w_D, eps)


@registry.register("rms_norm_backward", "reference", contract=False, devices=EVERYWHERE)
def rms_norm_backward_reference(dy_TD, dhidden_TD, x_TD, w_D, eps, main_grad_D):
    """Gradient of x through the norm, plus `dhidden` (None: nothing) of x used beside the norm."""
    x, dy = at_least_fp32(x_TD), at_least_fp32(dy_TD)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * rstd
    scaled = dy * w_D
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if dhidden_TD is not None:
        dx = dx + dhidden_TD
    if main_grad_D is not None:
        main_grad_D.add_((dy * normed).sum(tuple(range(dy.dim() - 1))))
    return dx.to(x_TD.dtype)


@registry.register("add_rms_norm", "reference", contract=False, devices=EVERYWHERE)
def add_rms_norm_reference(partial_TD, residual_TD, w_D, eps):
    hidden_TD = residual_add_reference(partial_TD, residual_TD)
    return hidden_TD, rms_norm_reference(hidden_TD, w_D, eps)


@registry.register("residual_add", "reference", contract=False, devices=EVERYWHERE)
def residual_add_reference(partial_TD, residual_TD):
    return (residual_TD + partial_TD).to(residual_TD.dtype)


def _rotate(x_THE, cos_T1E2, sin_T1E2):
    """Rotate the pairs (e, e + E/2) by the angles whose cosines and sines are given."""
    first, second = x_THE.chunk(2, dim=-1)
    return torch.cat(
        (first * cos_T1E2 - second * sin_T1E2, second * cos_T1E2 + first * sin_T1E2), dim=-1
    )


@registry.register("qk_norm_rope", "reference", contract=False, devices=EVERYWHERE)
def qk_norm_rope_reference(x_THE, w_E, cos_TE2, sin_TE2, eps):
    normed = at_least_fp32(F.rms_norm(x_THE, w_E.shape, w_E, eps))
    return _rotate(normed, cos_TE2.unsqueeze(1), sin_TE2.unsqueeze(1)).to(x_THE.dtype)


@registry.register("qk_norm_rope_backward", "reference", contract=False, devices=EVERYWHERE)
def qk_norm_rope_backward_reference(dy_THE, x_THE, w_E, cos_TE2, sin_TE2, eps, main_grad_E):
    dnormed = _rotate(at_least_fp32(dy_THE), cos_TE2.unsqueeze(1), -sin_TE2.unsqueeze(1))
    return rms_norm_backward_reference(dnormed, None, x_THE, w_E, eps, main_grad_E)


# The CPU backend: hipkernels/cpu/rows.cpp.

_rms_norm = function("rlk_rms_norm", *[POINTER] * 5, LONG, LONG, FLOAT, INT)
_rms_norm_backward = function("rlk_rms_norm_backward", *[POINTER] * 6, LONG, LONG, FLOAT, INT)
_residual_add = function("rlk_residual_add", *[POINTER] * 3, LONG, INT)
_qk_norm_rope = function("rlk_qk_norm_rope", *[POINTER] * 5, *[LONG] * 4, FLOAT, INT)
_qk_norm_rope_backward = function("rlk_qk_norm_rope_backward", *[POINTER] * 7, *[LONG] * 4, FLOAT, INT)


def _check(op, x, w):
    if x.shape[-1] != w.shape[0] or x.dtype != w.dtype:
        raise ValueError(
            f"{op} got x {tuple(x.shape)} {x.dtype} and w {tuple(w.shape)} {w.dtype}: "
            "expected one dtype and the same last dimension"
        )


@registry.register("rms_norm", "cpu", contract=True)
def rms_norm_cpu(x_TD, w_D, eps):
    _check("rms_norm", x_TD, w_D)
    D = w_D.shape[0]
    x_TD = x_TD.contiguous()
    y_TD = torch.empty_like(x_TD)
    _rms_norm(None, x_TD.data_ptr(), ptr(w_D), None, y_TD.data_ptr(), x_TD.numel() // D, D, eps, DTYPE_CODE[x_TD.dtype])
    return y_TD


@registry.register("rms_norm_backward", "cpu", contract=True)
def rms_norm_backward_cpu(dy_TD, dhidden_TD, x_TD, w_D, eps, main_grad_D):
    D = w_D.shape[0]
    dy_TD, x_TD = dy_TD.contiguous(), x_TD.contiguous()
    dhidden_TD = None if dhidden_TD is None else dhidden_TD.contiguous()
    dx_TD = torch.empty_like(x_TD)
    _rms_norm_backward(dy_TD.data_ptr(), ptr(dhidden_TD), x_TD.data_ptr(), ptr(w_D), dx_TD.data_ptr(),
                       ptr(main_grad_D), x_TD.numel() // D, D, eps, DTYPE_CODE[x_TD.dtype])
    return dx_TD


@registry.register("add_rms_norm", "cpu", contract=True)
def add_rms_norm_cpu(partial_TD, residual_TD, w_D, eps):
    _check("add_rms_norm", residual_TD, w_D)
    D = w_D.shape[0]
    partial_TD, residual_TD = _as_sum(partial_TD, residual_TD)
    hidden_TD, y_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    _rms_norm(partial_TD.data_ptr(), residual_TD.data_ptr(), ptr(w_D), hidden_TD.data_ptr(), y_TD.data_ptr(),
              residual_TD.numel() // D, D, eps, DTYPE_CODE[residual_TD.dtype])
    return hidden_TD, y_TD


@registry.register("residual_add", "cpu", contract=True)
def residual_add_cpu(partial_TD, residual_TD):
    partial_TD, residual_TD = _as_sum(partial_TD, residual_TD)
    hidden_TD = torch.empty_like(residual_TD)
    _residual_add(partial_TD.data_ptr(), residual_TD.data_ptr(), hidden_TD.data_ptr(), hidden_TD.numel(),
                  DTYPE_CODE[residual_TD.dtype])
    return hidden_TD


def _as_sum(partial_TD, residual_TD):
    if partial_TD.dtype != torch.float32 or partial_TD.shape != residual_TD.shape:
        raise ValueError(
            f"expected an FP32 partial sum of the residual's shape {tuple(residual_TD.shape)}, "
            f"got {partial_TD.dtype} {tuple(partial_TD.shape)}"
        )
    return partial_TD.contiguous(), residual_TD.contiguous()


def _as_heads(x_THE):
    """x with each token's heads contiguous; tokens may have any stride."""
    return x_THE if x_THE.stride()[1:] == (x_THE.shape[2], 1) else x_THE.contiguous()


@registry.register("qk_norm_rope", "cpu", contract=True)
def qk_norm_rope_cpu(x_THE, w_E, cos_TE2, sin_TE2, eps):
    _check("qk_norm_rope", x_THE, w_E)
    x_THE = _as_heads(x_THE)
    T, H, E = x_THE.shape
    y_THE = x_THE.new_empty((T, H, E))
    _qk_norm_rope(x_THE.data_ptr(), ptr(w_E), ptr(cos_TE2), ptr(sin_TE2), y_THE.data_ptr(), x_THE.stride(0), T, H, E,
                  eps, DTYPE_CODE[x_THE.dtype])
    return y_THE


@registry.register("qk_norm_rope_backward", "cpu", contract=True)
def qk_norm_rope_backward_cpu(dy_THE, x_THE, w_E, cos_TE2, sin_TE2, eps, main_grad_E):
    dy_THE, x_THE = dy_THE.contiguous(), _as_heads(x_THE)
    T, H, E = x_THE.shape
    dx_THE = x_THE.new_empty((T, H, E))
    _qk_norm_rope_backward(dy_THE.data_ptr(), x_THE.data_ptr(), ptr(w_E), ptr(cos_TE2), ptr(sin_TE2),
                           dx_THE.data_ptr(), ptr(main_grad_E), x_THE.stride(0), T, H, E, eps, DTYPE_CODE[x_THE.dtype])
    return dx_THE
