"""RMS norm over each head of queries and keys, then rotary embedding (rotate-half). BF16, FP32 inside, one rounding.

Layout: x[T, heads, E] lies in rows of the fused qkv, x_stride elements apart. One program makes HEADS heads of one
token, all queries or all keys, as two tiles [HEADS, E/2]: element e < E/2 pairs with e + E/2, so a lane holds both,
eight neighbouring elements of each; eight lanes (E = 128) or four (E = 64) hold a head. cos and sin are FP32 [T, E/2].

Reduction order of the sum of squares: a^2 + b^2 per pair, then tl.sum over the pairs of one head. One configuration per
E serves all callers. The rotation is fma(a, cos, -(b * sin)) and fma(b, cos, a * sin), as on the CPU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk.kernels.norm import inverse_rms
from rlk.kernels.operands import check_multiple, check_reach, check_tensor
from rlk.kernels.row_launch import options
from rlk.kernels.variants import Variant, architecture


@triton.jit
def _normed_rotation(a, b, first, second, c, s, eps, E: tl.constexpr):
    """The FP32 halves a and b of heads [HEADS, E/2], normed by the weight's halves and rotated, in BF16."""
    scale = inverse_rms(tl.sum(a * a + b * b, 1), tl.full((), E, tl.int32), eps)[:, None]
    a = a * scale * first.to(tl.float32)
    b = b * scale * second.to(tl.float32)
    return tl.fma(a, c, -(b * s)).to(tl.bfloat16), tl.fma(b, c, a * s).to(tl.bfloat16)


@triton.jit
def heads_of_program(q_heads, k_heads, E: tl.constexpr, HEADS: tl.constexpr):
    """(Whether program_id(1) makes queries, their offsets in q or k [HEADS, E/2], which of them there are)."""
    q_blocks = tl.cdiv(q_heads, HEADS)
    is_q = tl.program_id(1) < q_blocks
    block = tl.program_id(1) if is_q else tl.program_id(1) - q_blocks
    heads = q_heads if is_q else k_heads
    head = block * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, E // 2)
    return is_q, head[:, None] * E + half[None, :], (head < heads)[:, None] & (half < E // 2)[None, :]


@triton.jit
def rotated_heads(x, token, is_q, offsets, inside, q_weight, k_weight, cosine, sine, q_heads, eps, E: tl.constexpr,
                  HEADS: tl.constexpr):
    """Both halves of the program's heads, normed and rotated. x: the token's row of the fused qkv."""
    if not is_q:
        x += q_heads * E
    a = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + offsets + E // 2, mask=inside, other=0.0).to(tl.float32)
    # Each head's lanes load their own copy: no LDS.
    shared = tl.broadcast_to(tl.arange(0, E // 2)[None, :], (HEADS, E // 2))
    if is_q:
        first, second = tl.load(q_weight + shared), tl.load(q_weight + shared + E // 2)
    else:
        first, second = tl.load(k_weight + shared), tl.load(k_weight + shared + E // 2)
    c = tl.load(cosine + token * (E // 2) + shared)
    s = tl.load(sine + token * (E // 2) + shared)
    return _normed_rotation(a, b, first, second, c, s, eps, E)


@triton.jit(do_not_specialize=["q_heads", "k_heads"])
def qk_norm_rope_heads(x, x_stride, q_weight, k_weight, cosine, sine, q, k, q_heads, k_heads, eps, E: tl.constexpr,
                       HEADS: tl.constexpr):
    """Grid (T, q_heads / HEADS + k_heads / HEADS, each rounded up). The k heads follow the q heads in x."""
    token = tl.program_id(0)
    is_q, offsets, inside = heads_of_program(q_heads, k_heads, E, HEADS)
    a, b = rotated_heads(x + token * x_stride, token, is_q, offsets, inside, q_weight, k_weight, cosine, sine, q_heads,
                         eps, E, HEADS)
    if is_q:
        tl.store(q + token * q_heads * E + offsets, a, mask=inside)
        tl.store(q + token * q_heads * E + offsets + E // 2, b, mask=inside)
    else:
        tl.store(k + token * k_heads * E + offsets, a, mask=inside)
        tl.store(k + token * k_heads * E + offsets + E // 2, b, mask=inside)


CONFIGS = {  # head dimension -> heads per program, warps
    "gfx942": {"head_64": (64, 16, 1), "head_128": (128, 8, 1)},
    "sm_90": {"head_64": (64, 8, 1), "head_128": (128, 8, 1)},
}


def choose(arch: str, E: int) -> str:
    """Name of the configuration for heads of E elements; ValueError when there is none."""
    for name, (head_dim, _, _) in CONFIGS[arch].items():
        if head_dim == E:
            return name
    raise ValueError(f"qk_norm_rope got heads of {E} elements, expected 64 or 128")


def qk_norm_rope(x_THE: torch.Tensor, w_E: torch.Tensor, cos_TE2: torch.Tensor, sin_TE2: torch.Tensor,
                 eps: float) -> torch.Tensor:
    """rope(rms_norm(x) * w) on the GPU, BF16 [T, H, E]; x may have any stride over tokens that is a multiple of 16."""
    return _launch(x_THE, x_THE.shape[1], 0, w_E, w_E, cos_TE2, sin_TE2, eps)[0]


def qkv_norm_rope(qkv_THE: torch.Tensor, q_heads: int, k_heads: int, q_weight_E: torch.Tensor,
                  k_weight_E: torch.Tensor, cos_TE2: torch.Tensor, sin_TE2: torch.Tensor,
                  eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k) of the fused qkv [T, q_heads + k_heads + v_heads, E] in one launch, with the bits of `qk_norm_rope`."""
    return _launch(qkv_THE, q_heads, k_heads, q_weight_E, k_weight_E, cos_TE2, sin_TE2, eps)


def _launch(x_THE, q_heads, k_heads, q_weight_E, k_weight_E, cos_TE2, sin_TE2, eps):
    op, (T, heads, E) = "qk_norm_rope", x_THE.shape
    _, per_program, num_warps = CONFIGS[architecture()][choose(architecture(), E)]
    if q_heads + k_heads > heads:
        raise ValueError(f"{op} got {q_heads} + {k_heads} heads, expected at most the {heads} of x")
    if x_THE.stride()[1:] != (E, 1):
        x_THE = x_THE.contiguous()
    stride = x_THE.stride(0) if T > 1 else heads * E
    check_multiple(op, stride_over_tokens=stride)
    check_reach(op, "x", x_THE, stride)
    check_tensor(op, "x", x_THE, torch.bfloat16)
    for name, tensor, dtype, shape in (
        ("q_weight", q_weight_E, torch.bfloat16, (E,)), ("k_weight", k_weight_E, torch.bfloat16, (E,)),
        ("cos", cos_TE2, torch.float32, (T, E // 2)), ("sin", sin_TE2, torch.float32, (T, E // 2)),
    ):
        check_tensor(op, name, tensor, dtype, shape)
        if not tensor.is_contiguous():
            raise ValueError(f"{op} got {name} with strides {tensor.stride()}, expected it contiguous")
    q_THE, k_THE = x_THE.new_empty((T, q_heads, E)), x_THE.new_empty((T, k_heads, E))
    blocks = math.ceil(q_heads / per_program) + math.ceil(k_heads / per_program)
    if T and blocks:
        qk_norm_rope_heads[T, blocks](
            x_THE, stride, q_weight_E, k_weight_E, cos_TE2, sin_TE2, q_THE, k_THE if k_heads else q_THE, q_heads,
            k_heads, eps, E=E, HEADS=per_program, **options(num_warps))
    return q_THE, k_THE


def variants(arch: str) -> list[Variant]:
    """Every kernel that the launchers above can launch on `arch`."""
    pointers = {"x": "*bf16", "q_weight": "*bf16", "k_weight": "*bf16", "cosine": "*fp32", "sine": "*fp32",
                "q": "*bf16", "k": "*bf16"}
    signature = {"x": "*bf16", "x_stride": "i32", **pointers, "q_heads": "i32", "k_heads": "i32", "eps": "fp32"}
    return [Variant(kernel="qk_norm_rope", name=name, function=qk_norm_rope_heads, signature=signature,
                    constants={"E": E, "HEADS": per_program}, options=options(num_warps),
                    divisible=(*pointers, "x_stride"), small=tuple(pointers))
            for name, (E, per_program, num_warps) in CONFIGS[arch].items()]
