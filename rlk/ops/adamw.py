"""AdamW on a slice of FP32 masters, and the sum of squares of a gradient slice.

Loshchilov & Hutter 2019, algorithm 2 with constant learning rate: w <- w (1 - lr decay) - lr m^ / (sqrt(v^) + eps).
"""

from __future__ import annotations

import ctypes

import torch

from rlk.ops.cpu_library import DTYPE_CODE, FLOAT, INT, LONG, POINTER, function, ptr
from rlk.ops.registry import EVERYWHERE, registry

_adamw = function("rlk_adamw", POINTER, POINTER, POINTER, POINTER, POINTER, INT, LONG, *[FLOAT] * 8)
_sum_squares = function("rlk_sum_squares", POINTER, LONG, POINTER)


def adamw(master: torch.Tensor, moment1: torch.Tensor, moment2: torch.Tensor, grad: torch.Tensor,
          weight: torch.Tensor, *, grad_scale: float, lr: float, beta1: float, beta2: float, eps: float, decay: float,
          step: int) -> None:
    """One in-place update of FP32 [n] master and moments from FP32 grad x grad_scale; weight gets the rounded master.

    `weight` is FP32 or BF16 [n]; it may be `master` itself. `step` counts from 1 (bias correction).
    """
    registry.call("adamw", master, master, moment1, moment2, grad, weight, grad_scale, lr, beta1, beta2, eps, decay,
                  1 - beta1**step, 1 - beta2**step)


def sum_squares(x: torch.Tensor) -> float:
    """Sum of squares of an FP32 tensor, accumulated in double in a fixed order."""
    return registry.call("sum_squares", x, x)


@registry.register("adamw", "cpu", contract=True)
def adamw_cpu(master, moment1, moment2, grad, weight, *scalars):
    _adamw(ptr(master), ptr(moment1), ptr(moment2), ptr(grad), ptr(weight), DTYPE_CODE[weight.dtype], master.numel(),
           *scalars)


@registry.register("adamw", "reference", contract=False, devices=EVERYWHERE)
def adamw_reference(master, moment1, moment2, grad, weight, grad_scale, lr, beta1, beta2, eps, decay, bias1, bias2):
    """The same update in plain PyTorch."""
    grad = grad * grad_scale
    moment1.lerp_(grad, 1 - beta1)
    moment2.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    master.mul_(1 - lr * decay).addcdiv_(moment1 / bias1, (moment2 / bias2).sqrt_().add_(eps), value=-lr)
    if weight.data_ptr() != master.data_ptr():
        weight.copy_(master)


@registry.register("sum_squares", "cpu", contract=True)
def sum_squares_cpu(x):
    total = ctypes.c_double()
    _sum_squares(ptr(x), x.numel(), ctypes.addressof(total))
    return total.value


@registry.register("sum_squares", "reference", contract=False, devices=EVERYWHERE)
def sum_squares_reference(x):
    """The same sum in plain PyTorch."""
    return float(x.double().square().sum())
