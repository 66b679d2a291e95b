"""Collectives together with the operator that follows them, where a transport has one kernel for both."""

from __future__ import annotations

import torch

from rlk.collectives import Communicator
from rlk.ops.norm import add_rms_norm
from rlk.ops.registry import EVERYWHERE, registry


def all_reduce_add_rms_norm(
    comm: Communicator, partial_TD: torch.Tensor, residual_TD: torch.Tensor, w_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """add_rms_norm of the sum over ranks of `partial`, with the bits of the two calls. Not differentiable.

    partial_TD [T, D] is overwritten where there is no kernel for both.
    """
    return registry.call("all_reduce_add_rms_norm", residual_TD, comm, partial_TD, residual_TD, w_D, eps)


@registry.register("all_reduce_add_rms_norm", "communicator", contract=True, devices=EVERYWHERE)
@registry.register("all_reduce_add_rms_norm", "reference", contract=False, devices=EVERYWHERE)
def _all_reduce_add_rms_norm(comm, partial_TD, residual_TD, w_D, eps):
    fuses = getattr(comm, "fuses_norm", None)
    if fuses and fuses(partial_TD, residual_TD):
        return comm.all_reduce_add_rms_norm(partial_TD, residual_TD, w_D, eps)
    return add_rms_norm(comm.all_reduce(partial_TD, out=partial_TD), residual_TD, w_D, eps)
