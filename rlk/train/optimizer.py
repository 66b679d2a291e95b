"""AdamW with FP32 masters and moments sharded over the gradient group (dp x cp).

The model's weights are one flat buffer, and so are its FP32 gradients. Each rank owns one equal slice of both: it
receives its slice of the summed gradient (reduce-scatter in the fixed tree), updates its masters, writes the rounded
weights into its slice of the one weight storage, and an all-gather in place completes that storage on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rlk.collectives import Communicator
from rlk.model.qwen3 import Qwen3
from rlk.ops.adamw import adamw, sum_squares


class ShardedAdamW:
    """The optimizer of one tensor-parallel shard of the model; every rank of the run calls it in step."""

    def __init__(self, model: Qwen3, grad_comm: Communicator, tp_comm: Communicator, *, lr: float, beta1: float,
                 beta2: float, eps: float, weight_decay: float, grad_clip: float):
        self.model, self.grad_comm, self.tp_comm = model, grad_comm, tp_comm
        self.lr, self.beta1, self.beta2, self.eps = lr, beta1, beta2, eps
        self.weight_decay, self.grad_clip = weight_decay, grad_clip
        self.steps = 0
        size = model.storage.numel() // grad_comm.world
        self.slice = slice(grad_comm.rank * size, (grad_comm.rank + 1) * size)
        self.weight = model.storage.detach()[self.slice]
        # FP32 weights are their own masters: a second copy could only disagree.
        self.master = self.weight if self.weight.dtype == torch.float32 else self.weight.float()
        self.moment1, self.moment2 = torch.zeros(2, size, dtype=torch.float32, device=self.weight.device)
        self._pieces = list(self._own_pieces())

    def _own_pieces(self) -> Iterator[tuple[slice, bool, bool]]:
        """(slice within this rank's shard, decays, counts in the norm) for each parameter that the shard meets."""
        base = self.model.storage.data_ptr()
        for parameter in {id(p): p for p in self.model.parameters.values()}.values():
            begin = (parameter.data_ptr() - base) // parameter.element_size() - self.slice.start
            begin, end = max(begin, 0), min(begin + parameter.numel(), self.slice.stop - self.slice.start)
            if begin < end:
                # A replicated parameter has the same gradient on every tensor-parallel rank: count it once.
                yield slice(begin, end), parameter.decay, parameter.tp_sharded or self.tp_comm.rank == 0

    @torch.no_grad()
    def step(self) -> float:
        """Apply the accumulated gradients and clear them; returns the global gradient norm before clipping.

        A norm that is not finite leaves the weights as they were.
        """
        for parameter in self.model.parameters.values():
            if parameter.tp_partial:
                self.tp_comm.all_reduce(parameter.main_grad, out=parameter.main_grad)
        grad = self.grad_comm.reduce_scatter(self.model.grads)
        self.model.grads.zero_()
        norm = self._global_norm(grad)
        if math.isfinite(norm):
            self._update(grad, min(1.0, self.grad_clip / (norm + 1e-6)) if self.grad_clip > 0 else 1.0)
        return norm

    def _global_norm(self, grad: torch.Tensor) -> float:
        mine = torch.tensor([sum(sum_squares(grad[piece]) for piece, _, counts in self._pieces if counts)],
                            dtype=torch.float64, device=grad.device)
        by_rank = self.tp_comm.all_gather(self.grad_comm.all_gather(mine))
        return sum(by_rank.flatten().tolist()) ** 0.5  # added in rank order

    def _update(self, grad: torch.Tensor, grad_scale: float) -> None:
        self.steps += 1
        for piece, decays, _ in self._pieces:
            adamw(self.master[piece], self.moment1[piece], self.moment2[piece], grad[piece], self.weight[piece],
                  grad_scale=grad_scale, lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps,
                  decay=self.weight_decay if decays else 0.0, step=self.steps)
        storage = self.model.storage.detach()
        self.grad_comm.all_gather(self.weight, out=storage.view(self.grad_comm.world, -1))
        self.model.policy_version += 1
