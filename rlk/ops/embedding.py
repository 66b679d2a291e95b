"""Token embedding with vocabulary-parallel rows.

Rule: a rank returns its own tokens' rows plus +0.0 and zeros for the others, so the sum over ranks is exact: -0.0
becomes +0.0 at any world size. The gradient adds the tokens' rows in ascending order onto main_grad.

Shapes: T tokens, V rows of this rank, D hidden.
"""

from __future__ import annotations

import torch

from rlk.ops.cpu_library import DTYPE_CODE, INT, LONG, POINTER, function, ptr
from rlk.ops.gradients import at_least_fp32, main_grad, wants_grad
from rlk.ops.registry import EVERYWHERE, registry


def embedding(tokens_T: torch.Tensor, w_VD: torch.Tensor, first_row: int) -> torch.Tensor:
    """Row (token - first_row) of w for each int64 token, zeros where w does not hold it: [T, D]. Differentiable."""
    if wants_grad(w_VD):
        return _Embedding.apply(tokens_T, w_VD, first_row)
    return registry.call("embedding", w_VD, tokens_T, w_VD, first_row)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens_T, w_VD, first_row):
        ctx.save_for_backward(tokens_T)
        ctx.weight, ctx.first_row = w_VD, first_row
        return registry.call("embedding", w_VD, tokens_T, w_VD, first_row)

    @staticmethod
    def backward(ctx, dx_TD):
        (tokens_T,) = ctx.saved_tensors
        registry.call("embedding_backward", dx_TD, dx_TD, tokens_T, main_grad(ctx.weight), ctx.first_row)
        return None, None, None


@registry.register("embedding", "reference", contract=False, devices=EVERYWHERE)
def embedding_reference(tokens_T, w_VD, first_row):
    row_T = tokens_T - first_row
    here_T = (row_T >= 0) & (row_T < w_VD.shape[0])
    rows_TD = w_VD[row_T.clamp(0, w_VD.shape[0] - 1)]
    return torch.where(here_T.unsqueeze(-1), rows_TD, torch.zeros_like(rows_TD))


@registry.register("embedding_backward", "reference", contract=False, devices=EVERYWHERE)
def embedding_backward_reference(dx_TD, tokens_T, main_grad_VD, first_row):
    row_T = tokens_T - first_row
    here_T = (row_T >= 0) & (row_T < main_grad_VD.shape[0])
    main_grad_VD.index_add_(0, row_T[here_T], at_least_fp32(dx_TD[here_T]))


# The CPU backend: hipkernels/cpu/rows.cpp.

_embedding = function("rlk_embedding", POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, INT)
_embedding_backward = function("rlk_embedding_backward", POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, INT)


@registry.register("embedding", "cpu", contract=True)
def embedding_cpu(tokens_T, w_VD, first_row):
    V, D = w_VD.shape
    T = tokens_T.numel()
    x_TD = w_VD.new_empty((T, D))
    _embedding(_as_ids(tokens_T), ptr(w_VD), x_TD.data_ptr(), T, first_row, V, D, DTYPE_CODE[w_VD.dtype])
    return x_TD


@registry.register("embedding_backward", "cpu", contract=True)
def embedding_backward_cpu(dx_TD, tokens_T, main_grad_VD, first_row):
    V, D = main_grad_VD.shape
    dx_TD = dx_TD.contiguous()
    _embedding_backward(dx_TD.data_ptr(), _as_ids(tokens_T), ptr(main_grad_VD), tokens_T.numel(), first_row, V, D,
                        DTYPE_CODE[dx_TD.dtype])


def _as_ids(tokens_T):
    if tokens_T.dtype != torch.int64 or tokens_T.dim() != 1:
        raise ValueError(f"expected int64 tokens [T], got {tokens_T.dtype} {tuple(tokens_T.shape)}")
    return ptr(tokens_T)
