"""SwiGLU: silu(gate) * up (Shazeer, 2020), FP32 inside and one rounding.

Shapes: T tokens, F intermediate columns of this rank; gate is the first F columns, up the last F.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rlk.ops.cpu_library import DTYPE_CODE, INT, LONG, POINTER, function
from rlk.ops.gradients import at_least_fp32, wants_grad
from rlk.ops.registry import EVERYWHERE, registry


def swiglu(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, F] in the input's dtype. Differentiable."""
    if wants_grad(gate_up_T2F):
        return _Swiglu.apply(gate_up_T2F)
    return registry.call("swiglu", gate_up_T2F, gate_up_T2F)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_T2F):
        ctx.save_for_backward(gate_up_T2F)
        return registry.call("swiglu", gate_up_T2F, gate_up_T2F)

    @staticmethod
    def backward(ctx, dy_TF):
        (gate_up_T2F,) = ctx.saved_tensors
        return registry.call("swiglu_backward", gate_up_T2F, dy_TF, gate_up_T2F)


@registry.register("swiglu", "reference", contract=False, devices=EVERYWHERE)
def swiglu_reference(gate_up_T2F):
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


@registry.register("swiglu_backward", "reference", contract=False, devices=EVERYWHERE)
def swiglu_backward_reference(dy_TF, gate_up_T2F):
    gate_TF, up_TF = at_least_fp32(gate_up_T2F).chunk(2, dim=-1)
    sigmoid_TF = torch.sigmoid(gate_TF)
    dgate_TF = dy_TF * up_TF * sigmoid_TF * (1 + gate_TF * (1 - sigmoid_TF))
    return torch.cat((dgate_TF, dy_TF * gate_TF * sigmoid_TF), dim=-1).to(gate_up_T2F.dtype)


# The CPU backend: hipkernels/cpu/rows.cpp.

_swiglu = function("rlk_swiglu", POINTER, POINTER, LONG, LONG, INT)
_swiglu_backward = function("rlk_swiglu_backward", POINTER, POINTER, POINTER, LONG, LONG, INT)


@registry.register("swiglu", "cpu", contract=True)
def swiglu_cpu(gate_up_T2F):
    gate_up_T2F = gate_up_T2F.contiguous()
    width = gate_up_T2F.shape[-1] // 2
    y_TF = gate_up_T2F.new_empty((*gate_up_T2F.shape[:-1], width))
    _swiglu(gate_up_T2F.data_ptr(), y_TF.data_ptr(), y_TF.numel() // width, width, DTYPE_CODE[y_TF.dtype])
    return y_TF


@registry.register("swiglu_backward", "cpu", contract=True)
def swiglu_backward_cpu(dy_TF, gate_up_T2F):
    dy_TF, gate_up_T2F = dy_TF.contiguous(), gate_up_T2F.contiguous()
    dgate_up_T2F = torch.empty_like(gate_up_T2F)
    width = dy_TF.shape[-1]
    _swiglu_backward(dy_TF.data_ptr(), gate_up_T2F.data_ptr(), dgate_up_T2F.data_ptr(), dy_TF.numel() // width, width,
                     DTYPE_CODE[dy_TF.dtype])
    return dgate_up_T2F
