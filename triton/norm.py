"""RMS norm alone and behind the residual addition, and that addition alone. BF16 rows, FP32 inside.

Layout: rows [T, D], row-major; one program makes one row, so that a row's bits cannot depend on the batch. A lane holds
eight neighbouring elements (128-bit loads), the lanes of all warps the next ones, round after round.

Reduction order of the sum of squares: tl.sum over the row, filled up with +0 to BLOCK elements. One configuration per
BLOCK serves all callers, and rms_norm and add_rms_norm reduce by the same layout: the same order (a test holds it).
y = x * (1 / sqrt(sum / D + eps)) * w, each operation rounded to FP32, y once to BF16. add_rms_norm rounds hidden =
residual + partial to BF16 first, and normalises what it rounded.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk.kernels.operands import check_multiple, check_tensor
from rlk.kernels.row_launch import BLOCKS, choose_block, options
from rlk.kernels.variants import Variant, architecture

MOST_COLUMNS = 8192


@triton.jit
def inverse_rms(square_sum, count, eps):
    """1 / sqrt(square_sum / count + eps), each operation rounded correctly."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square_sum, count.to(tl.float32)) + eps))


@triton.jit
def _normalise(x, weight, y, columns, inside, D, eps):
    """The FP32 row x, normalised by weight, to the BF16 row at y."""
    scale = inverse_rms(tl.sum(x * x, 0), D, eps)
    tl.store(y + columns, (x * scale * weight.to(tl.float32)).to(tl.bfloat16), mask=inside)


@triton.jit
def rms_norm_rows(x, w, y, D, eps, BLOCK: tl.constexpr):
    """Grid (T,)."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    values = tl.load(x + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(w + columns, mask=inside, other=0.0)  # here, so that the reduction does not wait before it
    _normalise(values, weight, y + row * D, columns, inside, D, eps)


@triton.jit
def add_rms_norm_rows(partial, residual, w, hidden, y, D, eps, BLOCK: tl.constexpr):
    """Grid (T,). partial is FP32."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    added = tl.load(residual + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(partial + row * D + columns, mask=inside, other=0.0)
    weight = tl.load(w + columns, mask=inside, other=0.0)
    rounded = added.to(tl.bfloat16)
    tl.store(hidden + row * D + columns, rounded, mask=inside)
    _normalise(rounded.to(tl.float32), weight, y + row * D, columns, inside, D, eps)


@triton.jit
def residual_add_rows(partial, residual, hidden, D, BLOCK: tl.constexpr):
    """Grid (T, D / BLOCK). partial is FP32."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    added = tl.load(residual + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(partial + row * D + columns, mask=inside, other=0.0)
    tl.store(hidden + row * D + columns, added.to(tl.bfloat16), mask=inside)


# Warps per row, by BLOCK: as many as give each lane its eight elements, to a limit.
CONFIGS = {
    "gfx942": {"block_512": (512, 1), "block_1024": (1024, 2), "block_2048": (2048, 4), "block_4096": (4096, 8),
               "block_8192": (8192, 8)},
    "sm_90": {"block_512": (512, 2), "block_1024": (1024, 4), "block_2048": (2048, 8), "block_4096": (4096, 8),
              "block_8192": (8192, 8)},
}


def choose(arch: str, D: int) -> str:
    """Name of the configuration for rows of D elements; ValueError when they are too long."""
    for name, (block, _) in CONFIGS[arch].items():
        if D <= block:
            return name
    raise ValueError(f"the norm got rows of {D} elements, expected at most {MOST_COLUMNS}")


def _checked(op: str, w_D: torch.Tensor, **rows: tuple[torch.Tensor, torch.dtype]) -> tuple[int, int]:
    """Checks the operands and returns (T, D)."""
    shape = next(iter(rows.values()))[0].shape
    check_multiple(op, D=shape[-1])
    for name, (tensor, dtype) in rows.items():
        check_tensor(op, name, tensor, dtype, shape)
    if w_D is not None:
        check_tensor(op, "w", w_D, torch.bfloat16, shape[-1:])
    return math.prod(shape[:-1]), shape[-1]


def rms_norm(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * w on the GPU, BF16; D a multiple of 16, at most 8192; else ValueError."""
    x_TD = x_TD.contiguous()
    T, D = _checked("rms_norm", w_D, x=(x_TD, torch.bfloat16))
    block, num_warps = CONFIGS[architecture()][choose(architecture(), D)]
    y_TD = torch.empty_like(x_TD)
    if T:
        rms_norm_rows[T,](x_TD, w_D, y_TD, D, eps, BLOCK=block, **options(num_warps))
    return y_TD


def add_rms_norm(partial_TD: torch.Tensor, residual_TD: torch.Tensor, w_D: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden, rms_norm(hidden)) with hidden = residual_add(partial, residual), with the bits of those two."""
    partial_TD, residual_TD = partial_TD.contiguous(), residual_TD.contiguous()
    T, D = _checked("add_rms_norm", w_D, residual=(residual_TD, torch.bfloat16), partial=(partial_TD, torch.float32))
    block, num_warps = CONFIGS[architecture()][choose(architecture(), D)]
    hidden_TD, y_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    if T:
        add_rms_norm_rows[T,](partial_TD, residual_TD, w_D, hidden_TD, y_TD, D, eps, BLOCK=block,
                              **options(num_warps))
    return hidden_TD, y_TD


def residual_add(partial_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
    """residual + partial (FP32), rounded once to BF16."""
    partial_TD, residual_TD = partial_TD.contiguous(), residual_TD.contiguous()
    T, D = _checked("residual_add", None, residual=(residual_TD, torch.bfloat16), partial=(partial_TD, torch.float32))
    block, num_warps = choose_block(architecture())
    hidden_TD = torch.empty_like(residual_TD)
    if T:
        residual_add_rows[T, math.ceil(D / block)](partial_TD, residual_TD, hidden_TD, D, BLOCK=block,
                                                   **options(num_warps))
    return hidden_TD


def variants(arch: str) -> list[Variant]:
    """Every kernel that the launchers above can launch on `arch`."""
    found = []
    for kernel, function, signature, configs in (
        ("rms_norm", rms_norm_rows, {"x": "*bf16", "w": "*bf16", "y": "*bf16", "D": "i32", "eps": "fp32"}, CONFIGS),
        ("add_rms_norm", add_rms_norm_rows, {"partial": "*fp32", "residual": "*bf16", "w": "*bf16", "hidden": "*bf16",
                                             "y": "*bf16", "D": "i32", "eps": "fp32"}, CONFIGS),
        ("residual_add", residual_add_rows, {"partial": "*fp32", "residual": "*bf16", "hidden": "*bf16", "D": "i32"},
         BLOCKS),
    ):
        pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
        found += [Variant(kernel=kernel, name=name, function=function, signature=signature, constants={"BLOCK": block},
                          options=options(num_warps), divisible=(*pointers, "D"), small=pointers)
                  for name, (block, num_warps) in configs[arch].items()]
    return found
