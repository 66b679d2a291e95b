"""Negative controls: break one link between rollout and training on purpose, so that the audit must fail.

A zero that cannot fail proves nothing. Each fault does what a real defect of its kind would do; the run must end with
exit status 1 and name step, sample, position and both bit patterns. `rlk run --inject-fault NAME`.

Legend: R scored rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch

from rlk.collectives import Communicator
from rlk.model.qwen3 import Qwen3
from rlk.ops.gemm import linear_fp32
from rlk.ops.registry import registry


class Fault:
    """The trainer's hooks; a Fault without a name does nothing. The names are rlk.config.FAULTS."""

    def __init__(self, name: str):  # RunConfig has checked it
        self.name = name

    def after_rollout(self, model: Qwen3, last_rank: bool) -> None:
        """"weight-bit": the top exponent bit of the first QKV weight, so that the change cannot be rounded away."""
        if self.name == "weight-bit" and last_rank:
            weight = model.parameters["layers.0.qkv"].detach()
            bits = weight.view(torch.int16 if weight.element_size() == 2 else torch.int32)
            bits[0, 0] ^= 1 << (8 * weight.element_size() - 2)

    def kernels(self) -> AbstractContextManager:
        """"kernel-order": the second half of K before the first, where no rounding can hide it."""
        return registry.override("linear_fp32", _halves_swapped) if self.name == "kernel-order" else nullcontext()

    def temperature(self, temperature: float) -> float:
        return temperature * 1.25 if self.name == "temperature" else temperature

    def logprobs(self, logprob_R: torch.Tensor) -> torch.Tensor:
        return logprob_R.roll(1) if self.name == "shift" else logprob_R

    def support(self, support, hidden_RD: torch.Tensor, model: Qwen3, comm: Communicator, targets_R: torch.Tensor):
        """"crossing-token": the CSR without each row's least likely id, unless that is the sampled token itself."""
        if self.name != "crossing-token" or support is None:
            return support
        offsets, ids = support
        local_RV = linear_fp32(hidden_RD.detach(), model.parameters["lm_head"].detach())
        logits_RV = comm.all_gather(local_RV).transpose(0, 1).flatten(1)
        keep = torch.ones_like(ids, dtype=torch.bool)
        for row, (target, (begin, end)) in enumerate(zip(targets_R, pairwise(offsets.tolist()), strict=True)):
            least = begin + logits_RV[row, ids[begin:end].long()].argmin()
            keep[least] = ids[least] == target
        kept_before = torch.cat([offsets[:1], keep.long().cumsum(0)])  # offsets begin with 0
        return kept_before[offsets], ids[keep]


def _halves_swapped(x_RD: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
    half = x_RD.shape[-1] // 2
    return x_RD[:, half:].float() @ w_VD[:, half:].float().T + x_RD[:, :half].float() @ w_VD[:, :half].float().T
