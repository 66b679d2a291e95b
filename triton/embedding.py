"""Token embedding with vocabulary-parallel rows, and its gradient.

Layout: the table w[V, D] BF16 and its gradient [V, D] FP32, row-major, of any size; tokens int64. A program makes
BLOCK neighbouring columns: of ROWS tokens forward, of one row of the gradient backward.

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
from rlk.kernels.row_launch import options
from rlk.kernels.variants import Variant, architecture


@triton.jit(do_not_specialize=["T", "first_row", "V"])
def embedding_rows(tokens, w, x, T, first_row, V, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T / ROWS, columns / BLOCK), each rounded up."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (place < T)[:, None] & (columns < D)
    row = tl.load(tokens + place, mask=place < T, other=-1) - first_row
    here = (row >= 0) & (row < V)
    values = tl.load(w + row[:, None] * D + columns, mask=inside & here[:, None], other=0.0).to(tl.float32) + 0.0
    tl.store(x + place[:, None] * D + columns, values.to(tl.bfloat16), mask=inside)


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


CONFIGS = {  # tokens, columns, warps: eight elements per lane; programs of fewer bytes begin no faster
    "gfx942": {"rows_4x512": (4, 512, 4)},
    "sm_90": {"rows_4x1024": (4, 1024, 8)},
}
BACKWARD_CONFIGS = {  # columns, warps: eight elements per lane, 128-bit loads
    "gfx942": {"block_512": (512, 1)},
    "sm_90": {"block_512": (512, 2)},
}
UNROLL = 8


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
    T = len(tokens_T)
    x_TD = w_VD.new_empty((T, D))
    check_tensor("embedding", "x", x_TD, torch.bfloat16)
    (rows, block, num_warps), = CONFIGS[architecture()].values()
    if T:
        embedding_rows[math.ceil(T / rows), math.ceil(D / block)](
            tokens_T, w_VD, x_TD, T, first_row, V, D, ROWS=rows, BLOCK=block, **options(num_warps))
    return x_TD


def embedding_backward(dx_TD: torch.Tensor, tokens_T: torch.Tensor, main_grad_VD: torch.Tensor,
                       first_row: int) -> None:
    """main_grad[token - first_row] += dx[t], FP32, t ascending, for the int64 tokens that main_grad holds, in place."""
    (V, D), T, dx_TD = main_grad_VD.shape, len(tokens_T), dx_TD.contiguous()
    check_multiple("embedding_backward", D=D)
    _check_tokens("embedding_backward", tokens_T)
    check_tensor("embedding_backward", "dx", dx_TD, torch.bfloat16, (T, D))
    _check_table("embedding_backward", "main_grad", main_grad_VD, torch.float32)
    (block, num_warps), = BACKWARD_CONFIGS[architecture()].values()
    if T:
        sorted_T, order_T = tokens_T.sort(stable=True)
        check_tensor("embedding_backward", "sorted tokens", sorted_T, torch.int64)
        check_tensor("embedding_backward", "order", order_T, torch.int64)
        embedding_backward_rows[T, math.ceil(D / block)](
            dx_TD, sorted_T, order_T, main_grad_VD, T, first_row, V, D, BLOCK=block, UNROLL=UNROLL,
            **options(num_warps))


def variants(arch: str) -> list[Variant]:
    """Every kernel that the launchers above can launch on `arch`."""
    numbers = dict.fromkeys(("T", "first_row", "V", "D"), "i32")
    forward = {"tokens": "*i64", "w": "*bf16", "x": "*bf16"}
    backward = {"dx": "*bf16", "tokens": "*i64", "order": "*i64", "main_grad": "*fp32"}
    return [
        Variant(kernel="embedding", name=name, function=embedding_rows, signature=forward | numbers,
                constants={"ROWS": rows, "BLOCK": block}, options=options(num_warps), divisible=(*forward, "D"),
                small=("tokens", "x"))
        for name, (rows, block, num_warps) in CONFIGS[arch].items()
    ] + [
        Variant(kernel="embedding_backward", name=name, function=embedding_backward_rows,
                signature=backward | numbers, constants={"BLOCK": block, "UNROLL": UNROLL},
                options=options(num_warps), divisible=(*backward, "D"), small=("dx", "tokens", "order"))
        for name, (block, num_warps) in BACKWARD_CONFIGS[arch].items()
    ]
