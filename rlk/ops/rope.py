"""Rotary position embedding: the one place where its angles are computed."""

from __future__ import annotations

import functools

import torch


@functools.cache
def rope_table(max_position: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of position * theta^(-2i/head_dim), FP32 [max_position, head_dim/2] on the CPU (Su et al., 2021).

    Computed in FP64 and rounded once. The tensors are shared between callers: do not write to them.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(max_position, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()
