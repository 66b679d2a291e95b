"""Gradient of the RMS norm over each head and the rotary embedding behind it. BF16, FP32 inside, one rounding.

Layout: dy and dx [T, H, E] contiguous, x[T, H, E] in rows of the fused qkv, x_stride elements apart. Rows are (token,
head) pairs, token-major. One program makes STEPS tiles of TILE neighbouring rows, each as two tiles [TILE, E/2] of
partners (e, e + E/2); a lane holds eight neighbouring elements of each half, as in rope.py. Each program leaves its
part of the weight's gradient in `partials`, FP32 [T H / (TILE STEPS), E].

The rotation is turned back by fma(a, cos, b * sin) and fma(b, cos, -(a * sin)); the norm as in norm_backward.py.

Reduction order. Along a row: first + second half's product per pair, then tl.sum over the pairs. Across rows, for one
element of the weight: fma(dnormed, normed, sum) over the tiles ascending, one sum per row of the tile, from +0; the
TILE sums by tl.sum; the programs' partials as in norm_backward.py. All of it is fixed by T and H alone.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk.kernels.norm import inverse_rms
from rlk.kernels.norm_backward import add_partials
from rlk.kernels.operands import check_multiple, check_reach, check_tensor
from rlk.kernels.row_launch import options
from rlk.kernels.variants import Variant, architecture


@triton.jit(do_not_specialize=["rows", "heads"])
def qk_norm_rope_backward_heads(dy, x, x_stride, w, cosine, sine, dx, partials, rows, heads, eps, E: tl.constexpr,
                                TILE: tl.constexpr, STEPS: tl.constexpr):
    """Grid (rows / (TILE STEPS), rounded up); rows = T * heads."""
    half = tl.arange(0, E // 2)
    shared = tl.broadcast_to(half[None, :], (TILE, E // 2))  # each row's lanes load their own copy: no LDS
    w_a, w_b = tl.load(w + shared).to(tl.float32), tl.load(w + shared + E // 2).to(tl.float32)
    total_a, total_b = tl.zeros((TILE, E // 2), tl.float32), tl.zeros((TILE, E // 2), tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step) * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & (half < E // 2)[None, :]
        token = row // heads
        offset = (token * x_stride + (row - token * heads) * E)[:, None] + half[None, :]
        # A row that is not there reads as ones with a gradient of zero, and adds +0.
        a = tl.load(x + offset, mask=inside, other=1.0).to(tl.float32)
        b = tl.load(x + offset + E // 2, mask=inside, other=1.0).to(tl.float32)
        place = row[:, None] * E + half[None, :]
        turned_a = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        turned_b = tl.load(dy + place + E // 2, mask=inside, other=0.0).to(tl.float32)
        angle = (token * (E // 2))[:, None] + half[None, :]
        c = tl.load(cosine + angle, mask=inside, other=0.0)
        s = tl.load(sine + angle, mask=inside, other=0.0)
        back_a = tl.fma(turned_a, c, turned_b * s)
        back_b = tl.fma(turned_b, c, -(turned_a * s))
        scale = inverse_rms(tl.sum(a * a + b * b, 1), tl.full((), E, tl.int32), eps)[:, None]
        a, b = a * scale, b * scale
        scaled_a, scaled_b = back_a * w_a, back_b * w_b
        mean = (tl.sum(scaled_a * a + scaled_b * b, 1) * (1.0 / E))[:, None]
        tl.store(dx + place, ((scaled_a - a * mean) * scale).to(tl.bfloat16), mask=inside)
        tl.store(dx + place + E // 2, ((scaled_b - b * mean) * scale).to(tl.bfloat16), mask=inside)
        total_a, total_b = tl.fma(back_a, a, total_a), tl.fma(back_b, b, total_b)
    partials += tl.program_id(0) * E + half
    tl.store(partials, tl.sum(total_a, 0))
    tl.store(partials + E // 2, tl.sum(total_b, 0))


CONFIGS = {  # head dimension -> rows of a tile, tiles per program, warps
    "gfx942": {"head_64": (64, 32, 4, 2), "head_128": (128, 16, 8, 2)},
    "sm_90": {"head_64": (64, 32, 4, 4), "head_128": (128, 16, 8, 4)},
}


def choose(arch: str, E: int) -> str:
    """Name of the configuration for heads of E elements; ValueError when there is none."""
    for name, (head_dim, *_) in CONFIGS[arch].items():
        if head_dim == E:
            return name
    raise ValueError(f"qk_norm_rope_backward got heads of {E} elements, expected 64 or 128")


def qk_norm_rope_backward(dy_THE: torch.Tensor, x_THE: torch.Tensor, w_E: torch.Tensor, cos_TE2: torch.Tensor,
                          sin_TE2: torch.Tensor, eps: float, main_grad_E: torch.Tensor | None) -> torch.Tensor:
    """Gradient of x, BF16 [T, H, E] contiguous; x may have any stride over tokens that is a multiple of 16.

    The weight's gradient is added onto main_grad, FP32 [E] (None: nowhere). E is 64 or 128; else ValueError.
    """
    op, (T, H, E), arch = "qk_norm_rope_backward", x_THE.shape, architecture()
    _, tile, steps, num_warps = CONFIGS[arch][choose(arch, E)]
    if x_THE.stride()[1:] != (E, 1):
        x_THE = x_THE.contiguous()
    dy_THE, w_E, cos_TE2, sin_TE2 = (tensor.contiguous() for tensor in (dy_THE, w_E, cos_TE2, sin_TE2))
    stride = x_THE.stride(0) if T > 1 else H * E
    check_multiple(op, stride_over_tokens=stride)
    check_reach(op, "x", x_THE, stride)
    for name, tensor, dtype, shape in (
        ("x", x_THE, torch.bfloat16, (T, H, E)), ("dy", dy_THE, torch.bfloat16, (T, H, E)),
        ("w", w_E, torch.bfloat16, (E,)), ("cos", cos_TE2, torch.float32, (T, E // 2)),
        ("sin", sin_TE2, torch.float32, (T, E // 2)),
    ):
        check_tensor(op, name, tensor, dtype, shape)
    dx_THE = x_THE.new_empty((T, H, E))
    partials = x_THE.new_empty((math.ceil(T * H / (tile * steps)), E), dtype=torch.float32)
    if T:
        qk_norm_rope_backward_heads[len(partials),](
            dy_THE, x_THE, stride, w_E, cos_TE2, sin_TE2, dx_THE, partials, T * H, H, eps, E=E, TILE=tile, STEPS=steps,
            **options(num_warps))
    if main_grad_E is not None:
        add_partials(op, partials, main_grad_E)
    return dx_THE


def variants(arch: str) -> list[Variant]:
    """The kernels that `qk_norm_rope_backward` can launch on `arch`, beside those of norm_backward.py."""
    pointers = {"dy": "*bf16", "x": "*bf16", "w": "*bf16", "cosine": "*fp32", "sine": "*fp32", "dx": "*bf16",
                "partials": "*fp32"}
    signature = {"dy": "*bf16", "x": "*bf16", "x_stride": "i32", **pointers, "rows": "i32", "heads": "i32",
                 "eps": "fp32"}
    return [Variant(kernel="qk_norm_rope_backward", name=name, function=qk_norm_rope_backward_heads,
                    signature=signature, constants={"E": E, "TILE": tile, "STEPS": steps},
                    options=options(num_warps), divisible=(*pointers, "x_stride"), small=tuple(pointers))
            for name, (E, tile, steps, num_warps) in CONFIGS[arch].items()]
