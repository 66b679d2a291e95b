"""Token embedding with vocabulary-parallel rows, and its gradient.

Layout: the table w[V, D] BF16 and its gradient [V, D] FP32, row-major, of any size; tokens int64. One program makes
BLOCK neighbouring columns of one row.

Forward: the row plus +0.0, zeros where w does not hold the token. No reduction.
Backward: the tokens are sorted, equal ones in the order of their positions. The program at the first of a run of equal
tokens owns their row of the gradient and adds the rows of dx onto it one by one, positions ascending, in FP32; the
others end at once. So the order is that of the CPU's kernel, whatever the grid, and no two programs share an element.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk.kernels.operands import check_multiple, check_tensor, state_far
from rlk.kernels.variants import Variant, architecture


@triton.jit(do_not_specialize=["first_row", "V"])
def embedding_rows(tokens, w, x, first_row, V, D, BLOCK: tl.constexpr):
    """Grid (T, columns / BLOCK)."""
    place = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    row = tl.load(tokens + place) - first_row
    here = (row >= 0) & (row < V)
    values = tl.load(w + row * D + columns, mask=inside & here, other=0.0).to(tl.float32) + 0.0
    tl.store(x + place * D + columns, values.to(tl.bfloat16), mask=inside)


@triton.jit
def _row_of_run(dx, tokens, order, place, token, T, D, columns, inside):
    """(the row of dx at `place` of the sorted tokens, whether it belongs to the run of `token`: zeros if not)."""
    member = tl.load(tokens + place, mask=place < T, other=token - 1) == token
    source = tl.load(order + place, mask=member, other=0).to(tl.int32)
    return tl.load(dx + source * D + columns, mask=inside & member, other=0.0).to(tl.float32), member


@triton.jit(do_not_specialize=["T", "first_row", "V"])
def embedding_backward_rows(dx, tokens, order, main_grad, T, first_row, V, D, BLOCK: tl.constexpr,
                            UNROLL: tl.constexpr):
    """Grid (T, columns / BLOCK). tokens is sorted; order gives each its position."""
    place = tl.program_id(0)
    token = tl.load(tokens + place)
    starts = tl.load(tokens + place - 1, mask=place > 0, other=token - 1) != token
    row = token - first_row
    if starts & (row >= 0) & (row < V):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < D
        target = main_grad + row * D + columns
        total = tl.load(target, mask=inside, other=0.0)
        more = place < T
        while more:  # loads of UNROLL rows are under way together; they are added one after the other
            for _ in tl.static_range(UNROLL):
                values, more = _row_of_run(dx, tokens, order, place, token, T, D, columns, inside)
                total = tl.where(more, total + values, total)
                place += 1
        tl.store(target, total, mask=inside)


CONFIGS = {  # eight elements per lane: 128-bit loads
    "gfx942": {"block_512": {"BLOCK": 512, "num_warps": 1}},
    "sm_90": {"block_512": {"BLOCK": 512, "num_warps": 2}},
}
UNROLL = 8


def choose(arch: str) -> dict:
    return CONFIGS[arch]["block_512"]


def _options(config: dict) -> dict:
    return {"num_warps": config["num_warps"], "enable_fp_fusion": False}


def _check_tokens(op: str, tokens_T: torch.Tensor) -> None:
    if tokens_T.dim() != 1:
        raise ValueError(f"{op} got tokens {tuple(tokens_T.shape)}, expected [T]; flatten them")
    check_tensor(op, "tokens", tokens_T, torch.int64)


def _check_table(op: str, name: str, table_VD: torch.Tensor, dtype: torch.dtype) -> None:
    """As check_tensor, but the table may have any size."""
    check_tensor(op, name, table_VD[:1], dtype)
    if table_VD.dim() != 2 or not table_VD.is_contiguous():
        raise ValueError(f"{op} got {name} {tuple(table_VD.shape)} with strides {table_VD.stride()}, expected [V, D], "
                         "contiguous")
    state_far(table_VD)


def embedding(tokens_T: torch.Tensor, w_VD: torch.Tensor, first_row: int) -> torch.Tensor:
    """Row (token - first_row) of w for each int64 token on the GPU, zeros where w does not hold it: BF16 [T, D].

    D is a multiple of 16; else ValueError.
    """
    (V, D), tokens_T = w_VD.shape, tokens_T.contiguous()
    check_multiple("embedding", D=D)
    _check_tokens("embedding", tokens_T)
    _check_table("embedding", "w", w_VD, torch.bfloat16)
    x_TD = w_VD.new_empty((len(tokens_T), D))
    check_tensor("embedding", "x", x_TD, torch.bfloat16)
    config = choose(architecture())
    if len(tokens_T):
        embedding_rows[len(tokens_T), math.ceil(D / config["BLOCK"])](
            tokens_T, w_VD, x_TD, first_row, V, D, BLOCK=config["BLOCK"], **_options(config))
    return x_TD


def embedding_backward(dx_TD: torch.Tensor, tokens_T: torch.Tensor, main_grad_VD: torch.Tensor,
                       first_row: int) -> None:
    """main_grad[token - first_row] += dx[t], FP32, t ascending, for the int64 tokens that main_grad holds, in place."""
    (V, D), dx_TD = main_grad_VD.shape, dx_TD.contiguous()
    check_multiple("embedding_backward", D=D)
    _check_tokens("embedding_backward", tokens_T)
    check_tensor("embedding_backward", "dx", dx_TD, torch.bfloat16, (len(tokens_T), D))
    _check_table("embedding_backward", "main_grad", main_grad_VD, torch.float32)
    config = choose(architecture())
    if len(tokens_T):
        sorted_T, order_T = tokens_T.sort(stable=True)
        check_tensor("embedding_backward", "sorted tokens", sorted_T, torch.int64)
        check_tensor("embedding_backward", "order", order_T, torch.int64)
        embedding_backward_rows[len(tokens_T), math.ceil(D / config["BLOCK"])](
            dx_TD, sorted_T, order_T, main_grad_VD, len(tokens_T), first_row, V, D, BLOCK=config["BLOCK"],
            UNROLL=UNROLL, **_options(config))


def variants(arch: str) -> list[Variant]:
    """Every kernel that the launchers above can launch on `arch`."""
    found = []
    for kernel, function, pointers, numbers, constants, far in (
        ("embedding", embedding_rows, {"tokens": "*i64", "w": "*bf16", "x": "*bf16"}, ("first_row", "V", "D"), {}, "w"),
        ("embedding_backward", embedding_backward_rows,
         {"dx": "*bf16", "tokens": "*i64", "order": "*i64", "main_grad": "*fp32"}, ("T", "first_row", "V", "D"),
         {"UNROLL": UNROLL}, "main_grad"),
    ):
        found += [Variant(kernel=kernel, name=name, function=function,
                          signature=pointers | dict.fromkeys(numbers, "i32"),
                          constants={"BLOCK": config["BLOCK"], **constants}, options=_options(config),
                          divisible=(*pointers, "D"), small=tuple(name for name in pointers if name != far))
                  for name, config in CONFIGS[arch].items()]
    return found
