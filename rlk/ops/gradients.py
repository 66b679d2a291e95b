"""Where weight gradients go: the backward of every operator adds into the weight's FP32 `main_grad`, in place."""

from __future__ import annotations

import torch


def main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """The FP32 gradient buffer of `weight`, of its shape; None if the weight is frozen (a reference model's)."""
    if not weight.requires_grad:
        return None
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} requires grad but has no main_grad: expected an FP32 tensor of "
            "that shape as an attribute; call the model's enable_training() first"
        )
    return buffer


def wants_grad(*tensors: torch.Tensor) -> bool:
    """Whether an operator on these inputs has to record its backward."""
    return torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """x in FP32, or in FP64 where the caller computes an oracle in it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
