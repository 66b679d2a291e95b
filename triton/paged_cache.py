"""Keys and values into the pages of the cache: alone, and fused behind the Q/K norm and rotary embedding.

Layout: k, v [T, G, E] in rows of any stride over tokens; the caches [P, S, G, E] contiguous, of any size; slots int64.
Row t goes to slot slots[t] % S of page slots[t] // S, which is row slots[t] of the flattened cache. A slot outside the
cache, -1 among them, is written nowhere: the host never looks at the table, so that a captured graph may hold the call.

write_kv_rows: one program copies BLOCK neighbouring columns of one token's k and v, and reads them whatever the slot.
qk_norm_rope_write_heads: one program makes HEADS heads of one token as in rope.py, all queries or all keys; that of the
keys also copies the value heads of the same numbers. The arithmetic and its order are rope.py's: equal bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk.kernels import rope
from rlk.kernels.operands import check_multiple, check_reach, check_tensor, state_far
from rlk.kernels.rope import heads_of_program, rotated_heads
from rlk.kernels.row_launch import BLOCKS, choose_block, options
from rlk.kernels.variants import Variant, architecture


@triton.jit(do_not_specialize=["slot_count"])
def write_kv_rows(k, v, k_stride, v_stride, k_cache, v_cache, slots, slot_count, width, BLOCK: tl.constexpr):
    """Grid (T, width / BLOCK, rounded up); width = G * E."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    inside = columns < width  # whatever the slot: so the rows are asked for together with it
    key = tl.load(k + token * k_stride + columns, mask=inside, other=0.0)
    value = tl.load(v + token * v_stride + columns, mask=inside, other=0.0)
    inside = inside & (slot >= 0) & (slot < slot_count)
    tl.store(k_cache + slot * width + columns, key, mask=inside)
    tl.store(v_cache + slot * width + columns, value, mask=inside)


@triton.jit(do_not_specialize=["q_heads", "k_heads", "slot_count"])
def qk_norm_rope_write_heads(x, x_stride, q_weight, k_weight, cosine, sine, q, k_cache, v_cache, slots, slot_count,
                             q_heads, k_heads, eps, E: tl.constexpr, HEADS: tl.constexpr):
    """Grid (T, q_heads / HEADS + k_heads / HEADS, each rounded up). x holds the q heads, the k heads, the v heads."""
    token = tl.program_id(0)
    x += token * x_stride
    is_q, offsets, inside = heads_of_program(q_heads, k_heads, E, HEADS)
    a, b = rotated_heads(x, token, is_q, offsets, inside, q_weight, k_weight, cosine, sine, q_heads, eps, E, HEADS)
    if is_q:
        tl.store(q + token * q_heads * E + offsets, a, mask=inside)
        tl.store(q + token * q_heads * E + offsets + E // 2, b, mask=inside)
    else:
        slot = tl.load(slots + token)
        x += (q_heads + k_heads) * E
        value_a = tl.load(x + offsets, mask=inside, other=0.0)
        value_b = tl.load(x + offsets + E // 2, mask=inside, other=0.0)
        inside = inside & (slot >= 0) & (slot < slot_count)
        k_cache += slot * k_heads * E
        v_cache += slot * k_heads * E
        tl.store(k_cache + offsets, a, mask=inside)
        tl.store(k_cache + offsets + E // 2, b, mask=inside)
        tl.store(v_cache + offsets, value_a, mask=inside)
        tl.store(v_cache + offsets + E // 2, value_b, mask=inside)


def _as_rows(op: str, name: str, x_THE: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """(x with each token's heads contiguous, its stride over tokens)."""
    _, heads, E = x_THE.shape
    if x_THE.stride()[1:] != (E, 1):
        x_THE = x_THE.contiguous()
    stride = x_THE.stride(0) if len(x_THE) > 1 else heads * E
    check_multiple(op, **{f"{name}_stride_over_tokens": stride})
    check_reach(op, name, x_THE, stride)
    check_tensor(op, name, x_THE, torch.bfloat16, shape)
    return x_THE, stride


def _check_cache(op: str, tokens: int, k_cache_PSGE: torch.Tensor, v_cache_PSGE: torch.Tensor,
                 slots_T: torch.Tensor) -> int:
    """Checks the pages and the table of slots, and returns the number of slots."""
    shape = k_cache_PSGE.shape
    for name, cache in (("k_cache", k_cache_PSGE), ("v_cache", v_cache_PSGE)):
        if cache.dim() != 4 or cache.shape != shape or not cache.is_contiguous():
            raise ValueError(f"{op} got {name} {tuple(cache.shape)} with strides {cache.stride()} beside k_cache "
                             f"{tuple(shape)}, expected [P, S, G, E], contiguous, the same for both")
        check_tensor(op, name, cache[:1], torch.bfloat16)
        state_far(cache)
    check_tensor(op, "slots", slots_T, torch.int64, (tokens,))
    if not slots_T.is_contiguous():
        raise ValueError(f"{op} got slots with strides {slots_T.stride()}, expected them contiguous")
    return shape[0] * shape[1]


def write_kv(k_TGE: torch.Tensor, v_TGE: torch.Tensor, k_cache_PSGE: torch.Tensor, v_cache_PSGE: torch.Tensor,
             slots_T: torch.Tensor) -> None:
    """Row t of k and v, BF16, into slot slots[t] of the pages, in place on the GPU; a slot outside is left out.

    G * E and the strides over tokens are multiples of 16; else ValueError.
    """
    op, (_, _, G, E) = "write_kv", k_cache_PSGE.shape
    T = len(k_TGE)
    slot_count = _check_cache(op, T, k_cache_PSGE, v_cache_PSGE, slots_T)
    k_TGE, k_stride = _as_rows(op, "k", k_TGE, (T, G, E))
    v_TGE, v_stride = _as_rows(op, "v", v_TGE, (T, G, E))
    check_multiple(op, width=G * E)
    block, num_warps = choose_block(architecture())
    if T:
        write_kv_rows[T, math.ceil(G * E / block)](
            k_TGE, v_TGE, k_stride, v_stride, k_cache_PSGE, v_cache_PSGE, slots_T, slot_count, G * E, BLOCK=block,
            **options(num_warps))


def qk_norm_rope_write(qkv_THE: torch.Tensor, q_weight_E: torch.Tensor, k_weight_E: torch.Tensor,
                       cos_TE2: torch.Tensor, sin_TE2: torch.Tensor, eps: float, k_cache_PSGE: torch.Tensor,
                       v_cache_PSGE: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
    """q = rope(rms_norm(q) * w), BF16 [T, H, E]; k likewise and v as it is go into the pages. One launch.

    qkv BF16 [T, H + 2 G, E]: query, key, value heads. The bits are those of qk_norm_rope and write_kv.
    """
    op, (T, heads, E), arch = "qk_norm_rope_write", qkv_THE.shape, architecture()
    G = k_cache_PSGE.shape[2]
    H = heads - 2 * G
    if H < 1 or k_cache_PSGE.shape[3] != E:
        raise ValueError(f"{op} got {heads} heads of {E} for pages {tuple(k_cache_PSGE.shape)}, expected at least "
                         f"{2 * G + 1} heads of {k_cache_PSGE.shape[3]}: queries, then {G} keys and {G} values")
    _, per_program, num_warps = rope.CONFIGS[arch][rope.choose(arch, E)]
    slot_count = _check_cache(op, T, k_cache_PSGE, v_cache_PSGE, slots_T)
    qkv_THE, stride = _as_rows(op, "qkv", qkv_THE, (T, heads, E))
    for name, tensor, dtype, shape in (
        ("q_weight", q_weight_E, torch.bfloat16, (E,)), ("k_weight", k_weight_E, torch.bfloat16, (E,)),
        ("cos", cos_TE2, torch.float32, (T, E // 2)), ("sin", sin_TE2, torch.float32, (T, E // 2)),
    ):
        check_tensor(op, name, tensor, dtype, shape)
        if not tensor.is_contiguous():
            raise ValueError(f"{op} got {name} with strides {tensor.stride()}, expected it contiguous")
    q_THE = qkv_THE.new_empty((T, H, E))
    if T:
        qk_norm_rope_write_heads[T, math.ceil(H / per_program) + math.ceil(G / per_program)](
            qkv_THE, stride, q_weight_E, k_weight_E, cos_TE2, sin_TE2, q_THE, k_cache_PSGE, v_cache_PSGE, slots_T,
            slot_count, H, G, eps, E=E, HEADS=per_program, **options(num_warps))
    return q_THE


def variants(arch: str) -> list[Variant]:
    """Every kernel that the launchers above can launch on `arch`."""
    caches = {"k_cache": "*bf16", "v_cache": "*bf16", "slots": "*i64", "slot_count": "i32"}
    rows = {"k": "*bf16", "v": "*bf16", "k_stride": "i32", "v_stride": "i32", **caches, "width": "i32"}
    heads = {"x": "*bf16", "x_stride": "i32", "q_weight": "*bf16", "k_weight": "*bf16", "cosine": "*fp32",
             "sine": "*fp32", "q": "*bf16", **caches, "q_heads": "i32", "k_heads": "i32", "eps": "fp32"}
    return [
        _variant("write_kv", name, write_kv_rows, rows, {"BLOCK": block}, options(num_warps))
        for name, (block, num_warps) in BLOCKS[arch].items()
    ] + [
        _variant("qk_norm_rope_write", name, qk_norm_rope_write_heads, heads, {"E": E, "HEADS": per_program},
                 options(num_warps))
        for name, (E, per_program, num_warps) in rope.CONFIGS[arch].items()
    ]


def _variant(kernel, name, function, signature, constants, compiler) -> Variant:
    pointers = tuple(argument for argument, kind in signature.items() if kind.startswith("*"))
    return Variant(kernel, name, function, signature, constants, compiler,
                   divisible=(*pointers, *(x for x in ("x_stride", "k_stride", "v_stride", "width") if x in signature)),
                   small=tuple(x for x in pointers if x not in ("k_cache", "v_cache")))
