"""The two ends of a tensor-parallel block, as autograd functions that are each other's transpose.

Between them every rank computes its own heads or columns. On a group of one rank, and where no gradient is needed,
they cost nothing beyond the collective itself.
"""

from __future__ import annotations

import torch

from rlk.collectives import Communicator
from rlk.collectives.fused import all_reduce_add_rms_norm
from rlk.ops.gradients import wants_grad
from rlk.ops.norm import add_rms_norm


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return ctx.comm.all_reduce(dx.contiguous()), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def copy_to_tp(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Enter a parallel block: x as it is; its gradient, of which every rank computes a part, is summed over ranks."""
    if comm.world == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Copy.apply(x, comm)


def reduce_from_tp(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Leave a parallel block: the sum of the ranks' x; the gradient goes to every rank as it is.

    Without autograd x itself is overwritten, for x is a fresh GEMM result that nobody else holds.
    """
    if comm.world == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _Reduce.apply(x, comm)
    return comm.all_reduce(x, out=x)


def reduce_add_rms_norm(
    partial_TD: torch.Tensor, residual_TD: torch.Tensor, w_D: torch.Tensor, eps: float, comm: Communicator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave a parallel block into the residual stream: (hidden, its norm), by one kernel where the ranks have one."""
    if comm.world == 1 or wants_grad(partial_TD, residual_TD, w_D):
        return add_rms_norm(reduce_from_tp(partial_TD, comm), residual_TD, w_D, eps)
    return all_reduce_add_rms_norm(comm, partial_TD, residual_TD, w_D, eps)
