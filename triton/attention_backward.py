"""Gradients of causal attention over rows of keys (attention.py's varlen form). BF16 in and out, FP32 sums, no atomics.

Shape legend: T query rows (packed), U key rows (packed), H query heads, G kv heads, E head dim.

DATA LAYOUT. A VECTOR is one (query row, head of the group of a kv head). attention_pack lays q and do out as
[G, T, H / G, E], so that the vectors of a kv head ascend by row, then head, and a tile of them is one block of memory
whatever the group; lse and delta likewise, [G, T, H / G].
  attention_dkdv  one program per (kv head, block of BLOCK_N keys) goes through the segments of the block's source, and
                  in each through the tiles of BLOCK_M vectors, counted from the segment's first, that see a key of it
  attention_dq    one program per (tile of vectors, kv head) goes through the blocks of keys that the tile sees

REDUCTION ORDER, for vector i and key j that it sees, t_ij = (q_i . k_j) * scale as in the forward:
  p_ij = exp2(fma(q_i . k_j, scale, -lse_i))     FP32; rounded to BF16 where it multiplies do
  delta_i = sum over e of do_ie * o_ie           in the order of the one configuration of attention_pack
  ds_ij = p_ij * (-delta_i + do_i . v_j)         FP32, then rounded to BF16; one accumulator from -delta, E ascending
  dq_i = (sum over j of ds_ij k_j) / sqrt(E)     one FP32 accumulator of the matrix unit, j ascending
  dv_j = sum over i of p_ij do_i;  dk_j = (sum over i of ds_ij q_i) / sqrt(E)         likewise, i ascending
One rounding at the end. Pairs that do not see each other count as zeros within a tile and are left out beyond it. So
each gradient is one program's, in an order that the segments of its own source fix: no neighbour, no grid and no number
of multiprocessors can change it.
"""

from __future__ import annotations

import itertools
import math

import torch
import triton
import triton.language as tl

from rlk.kernels.attention import HEAD_DIMS, Config, check_keys, logit_scale, options
from rlk.kernels.attention_plan import BackwardPlan, backward_plan
from rlk.kernels.operands import check_multiple, check_reach, check_tensor
from rlk.kernels.variants import Variant, architecture

OP = "attention_varlen_backward"
TERMS = tl.constexpr(4)  # of a vector, beside each other: lse, delta and two that nobody reads


@triton.jit(do_not_specialize=("group", "rows"))
def attention_pack(q, o, d_o, lse, q_packed, d_o_packed, terms, group, rows, q_stride, E: tl.constexpr,
                   BLOCK_M: tl.constexpr):
    """Grid (tiles of a kv head's vectors, G). q, o and d_o [T, H, E], lse [T, H]; for the others see DATA LAYOUT."""
    kv_head = tl.program_id(1)
    vector = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = vector < rows * group
    row = vector // group
    head = kv_head * group + vector - row * group
    row = row.to(tl.int64)
    at = row * (group * tl.num_programs(1)) + head
    packed = kv_head.to(tl.int64) * rows * group + vector
    e = tl.arange(0, E)[None, :]
    there = live[:, None]
    q_tile = tl.load(q + (row * q_stride + head * E)[:, None] + e, mask=there)
    o_tile = tl.load(o + at[:, None] * E + e, mask=there)
    d_o_tile = tl.load(d_o + at[:, None] * E + e, mask=there)
    delta = tl.sum(d_o_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    tl.store(q_packed + packed[:, None] * E + e, q_tile, mask=there)
    tl.store(d_o_packed + packed[:, None] * E + e, d_o_tile, mask=there)
    tl.store(terms + packed * TERMS, tl.load(lse + at, mask=live), mask=live)
    tl.store(terms + packed * TERMS + 1, delta, mask=live)


@triton.jit
def weights(products, a, b, lse, delta, scale, visible, MASKED: tl.constexpr):
    """(p, ds) in FP32 of a tile of pairs: products q . k and, a and b being do and v or v and do, a b^T = do . v.

    The exponents come before the second product, so that the exponentials can run beside it.
    """
    t = tl.fma(products, scale + tl.zeros_like(products), (-lse).broadcast_to(products.shape))
    if MASKED:
        t = tl.where(visible, t, float("-inf"))
    d_p = tl.dot(a, tl.trans(b), (-delta).broadcast_to(products.shape))
    p = tl.exp2(t)
    return p, p * d_p


@triton.jit
def add_keys(acc, q, d_o, k, v, lse, delta, scale, position_m, key_start, kv_head, key_stride, value_stride, begin,
             stop, end, MASKED: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr):
    """acc + ds k over the blocks of keys from `begin` up to `stop`; as attend_keys, only keys before `end` are read."""
    e = tl.arange(0, E)
    n = tl.arange(0, BLOCK_N)
    for start in range(begin, stop, BLOCK_N):
        position = start + n
        visible = position[None, :] <= position_m[:, None]
        if MASKED:
            position = tl.minimum(position, end - 1)
        row = (key_start + position).to(tl.int64)[:, None]
        k_block = tl.load(k + row * key_stride + kv_head * E + e[None, :])
        v_block = tl.load(v + row * value_stride + kv_head * E + e[None, :])
        products = tl.dot(q, tl.trans(k_block))
        _, ds = weights(products, d_o, v_block, lse[:, None], delta[:, None], scale, visible, MASKED)
        acc = tl.dot(ds.to(q.dtype), k_block, acc)
    return acc


@triton.jit(do_not_specialize=("group", "rows"))
def attention_dq(q_packed, k, v, d_o_packed, terms, dq, tiles, starts, scale, softmax_scale, group, rows, key_stride,
                 value_stride, WHOLE: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid (tiles, G). dq [T, H, E]. tiles [n, 4]: (first vector, vectors, first vector's position x group, source).

    WHOLE: whole blocks of keys get their own loop.
    """
    tile = tiles + 4 * tl.program_id(0)
    first = tl.load(tile)
    count = tl.load(tile + 1)
    place = tl.load(tile + 2)
    source = tl.load(tile + 3)
    kv_head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    e = tl.arange(0, E)
    live = m < count
    m = tl.minimum(m, count - 1)
    position_m = (place + m) // group
    packed = kv_head.to(tl.int64) * rows * group + first + m
    q_tile = tl.load(q_packed + packed[:, None] * E + e[None, :])
    d_o_tile = tl.load(d_o_packed + packed[:, None] * E + e[None, :])
    lse_m = tl.load(terms + packed * TERMS)
    delta_m = tl.load(terms + packed * TERMS + 1)
    key_start = tl.load(starts + source)
    end = (place + count - 1) // group + 1
    acc = tl.zeros((BLOCK_M, E), tl.float32)
    masked_from = 0
    if WHOLE:
        masked_from = (place // group + 1) // BLOCK_N * BLOCK_N
        acc = add_keys(acc, q_tile, d_o_tile, k, v, lse_m, delta_m, scale, position_m, key_start, kv_head, key_stride,
                       value_stride, 0, masked_from, end, False, E, BLOCK_N)
    acc = add_keys(acc, q_tile, d_o_tile, k, v, lse_m, delta_m, scale, position_m, key_start, kv_head, key_stride,
                   value_stride, masked_from, end, end, True, E, BLOCK_N)
    row = (first + m) // group
    at = row.to(tl.int64) * (group * tl.num_programs(1)) + kv_head * group + first + m - row * group
    tl.store(dq + at[:, None] * E + e[None, :], (acc * softmax_scale).to(dq.dtype.element_ty), mask=live[:, None])


@triton.jit
def add_vectors(dk, dv, k, v, of_segment, scale, position_n, group, begin, stop, MASKED: tl.constexpr,
                E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(dk, dv) + (ds q, p do) over the tiles from vector `begin` up to `stop` of a segment.

    of_segment: its first vector's q, do, terms and place, and how many it has. Without MASKED each vector must see
    every key.
    """
    q, d_o, terms, place, count = of_segment
    e = tl.arange(0, E)
    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, TERMS)
    for start in range(begin, stop, BLOCK_M):
        live = m < count - start
        at = start.to(tl.int64) + m[:, None]
        q_tile = tl.load(q + at * E + e[None, :], mask=live[:, None], other=0.0)
        d_o_tile = tl.load(d_o + at * E + e[None, :], mask=live[:, None], other=0.0)
        # One wide load for both: of a vector alone, every lane would load what its own keys need.
        pair = tl.load(terms + at * TERMS + c[None, :], mask=live[:, None], other=0.0)
        visible = (place + start + m)[None, :] >= (position_n * group)[:, None]
        products = tl.dot(k, tl.trans(q_tile))
        # A vector that is not there has weight exp2(-inf) with every key.
        lse = tl.where(live, tl.sum(tl.where(c[None, :] == 0, pair, 0.0), 1), float("inf"))
        delta = tl.sum(tl.where(c[None, :] == 1, pair, 0.0), 1)
        p, ds = weights(products, v, d_o_tile, lse[None, :], delta[None, :], scale, visible, MASKED)
        ds = ds.to(k.dtype)
        dv = tl.dot(p.to(k.dtype), d_o_tile, dv)
        dk = tl.dot(ds, q_tile, dk)
    return dk, dv


@triton.jit(do_not_specialize=("group", "rows"))
def attention_dkdv(q_packed, k, v, d_o_packed, terms, dk, dv, blocks, segments, starts, scale, softmax_scale, group,
                   rows, key_stride, value_stride, WHOLE: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr):
    """Grid (G, blocks). dk and dv [U, G, E]. blocks [n, 4]: (first position, keys, first segment, end of segments).

    WHOLE: tiles of vectors that see the whole block get their own loop.
    """
    kv_head = tl.program_id(0)
    block = blocks + 4 * tl.program_id(1)
    position = tl.load(block)
    count = tl.load(block + 1)
    segment_begin = tl.load(block + 2)
    segment_end = tl.load(block + 3)
    n = tl.arange(0, BLOCK_N)
    e = tl.arange(0, E)
    key = tl.load(starts + tl.load(segments + 4 * segment_begin + 3)) + position + tl.minimum(n, count - 1)
    key = key.to(tl.int64)[:, None]
    k_block = tl.load(k + key * key_stride + kv_head * E + e[None, :])
    v_block = tl.load(v + key * value_stride + kv_head * E + e[None, :])
    dk_acc = tl.zeros((BLOCK_N, E), tl.float32)
    dv_acc = tl.zeros((BLOCK_N, E), tl.float32)
    for s in range(segment_begin, segment_end):
        vector = kv_head.to(tl.int64) * rows * group + tl.load(segments + 4 * s) * group
        vectors = tl.load(segments + 4 * s + 1) * group
        place = tl.load(segments + 4 * s + 2) * group  # position x group of the segment's first vector
        # Vectors from first_seen on see the first key, those from seen on the whole block.
        first_seen = tl.maximum(position * group - place, 0) // BLOCK_M * BLOCK_M
        whole = vectors
        if WHOLE:
            seen = tl.maximum((position + BLOCK_N - 1) * group - place, 0)
            whole = tl.minimum(tl.cdiv(seen, BLOCK_M) * BLOCK_M, vectors)
        of_segment = (q_packed + vector * E, d_o_packed + vector * E, terms + vector * TERMS, place, vectors)
        dk_acc, dv_acc = add_vectors(dk_acc, dv_acc, k_block, v_block, of_segment, scale, position + n, group,
                                     first_seen, whole, True, E, BLOCK_M)
        if WHOLE:
            dk_acc, dv_acc = add_vectors(dk_acc, dv_acc, k_block, v_block, of_segment, scale, position + n, group,
                                         tl.maximum(first_seen, whole), vectors, False, E, BLOCK_M)
    at = (key * tl.num_programs(0) + kv_head) * E + e[None, :]
    there = (n < count)[:, None]
    tl.store(dk + at, (dk_acc * softmax_scale).to(dk.dtype.element_ty), mask=there)
    tl.store(dv + at, dv_acc.to(dv.dtype.element_ty), mask=there)


FUNCTIONS = {"attention_pack": attention_pack, "attention_dkdv": attention_dkdv, "attention_dq": attention_dq}
CONFIGS: dict[str, dict[str, Config]] = {
    "gfx942": {
        "pack_32_w4": Config("attention_pack", {"BLOCK_M": 32}, {"num_warps": 4}),
        "dkdv_32x64_w4": Config("attention_dkdv", {"BLOCK_M": 32, "BLOCK_N": 64, "WHOLE": False},
                                {"num_warps": 4, "num_stages": 1, "waves_per_eu": 2, "matrix_instr_nonkdim": 16}),
        "dq_64x64_w4": Config("attention_dq", {"BLOCK_M": 64, "BLOCK_N": 64, "WHOLE": False},
                              {"num_warps": 4, "num_stages": 1, "waves_per_eu": 2, "matrix_instr_nonkdim": 16}),
    },
    "sm_90": {
        "pack_32_w4": Config("attention_pack", {"BLOCK_M": 32}, {"num_warps": 4}),
        "dkdv_64x128_w8": Config("attention_dkdv", {"BLOCK_M": 64, "BLOCK_N": 128, "WHOLE": True},
                                 {"num_warps": 8, "num_stages": 2}),
        # Taller tiles read keys and values half as often: with 64 vectors the L2 cache would be what limits it.
        "dq_128x64_w8": Config("attention_dq", {"BLOCK_M": 128, "BLOCK_N": 64, "WHOLE": True},
                               {"num_warps": 8, "num_stages": 3}),
    },
}


def choose(arch: str, kernel: str) -> Config:
    """The configuration of "attention_pack", "attention_dkdv" or "attention_dq": one serves all shapes."""
    return next(config for config in CONFIGS[arch].values() if config.kernel == kernel)


def make_plan(segments: torch.Tensor, q_THE: torch.Tensor, G: int, sources: int, key_rows: int) -> BackwardPlan:
    """attention_plan.backward_plan for these queries in this process's configurations."""
    tile_vectors = choose(architecture(), "attention_dq").constants["BLOCK_M"]
    block_keys = choose(architecture(), "attention_dkdv").constants["BLOCK_N"]
    return backward_plan(segments, len(q_THE), q_THE.shape[1] // G, tile_vectors, block_keys, sources, key_rows,
                         q_THE.device)


def attention_varlen_backward(
    do_THE: torch.Tensor, q_THE: torch.Tensor, k_UGE: torch.Tensor, v_UGE: torch.Tensor, o_THE: torch.Tensor,
    lse_TH: torch.Tensor, segments: torch.Tensor | BackwardPlan, key_starts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (dq [T, H, E], dk and dv [U, G, E]) in BF16 for do, given the forward's inputs, o and lse.

    Zeros for rows that no segment uses. do, q, k, v, o BF16, lse FP32 [T, H]; q, k and v may have strided rows, below
    2 GiB from the first to the last; do, o and lse are copied where they are not contiguous.
    segments: on the CPU, or make_plan's, to be made once for all layers. key_starts int32 [sources] on the GPU; its
    entries are not checked, and the key ranges of sources must not overlap. Every row must hold finite numbers.
    Raises ValueError for shapes, strides and segments that do not fit.
    """
    T, H, E = q_THE.shape
    U, G, _ = k_UGE.shape
    if E not in HEAD_DIMS or k_UGE.shape[-1] != E or H % G or do_THE.shape != q_THE.shape:
        raise ValueError(f"{OP} got do {tuple(do_THE.shape)}, q {tuple(q_THE.shape)} and keys {tuple(k_UGE.shape)}, "
                         f"expected E one of {HEAD_DIMS}, H a multiple of G, and do of q's shape")
    plan = segments if isinstance(segments, BackwardPlan) else make_plan(segments, q_THE, G, len(key_starts), U)
    if (plan.query_rows, plan.key_rows) != (T, U):
        raise ValueError(f"{OP} got {T} query rows and {U} keys with a plan of {plan.query_rows} and {plan.key_rows}; "
                         "make one for these")
    do_THE, o_THE, lse_TH, key_starts = (x.contiguous() for x in (do_THE, o_THE, lse_TH, key_starts))
    q_THE = _whole_heads(q_THE)
    for name, x in (("do", do_THE), ("q", q_THE), ("o", o_THE)):
        check_tensor(OP, name, x, torch.bfloat16, (T, H, E))
    check_tensor(OP, "lse", lse_TH, torch.float32, (T, H))
    check_tensor(OP, "key_starts", key_starts, torch.int32)
    check_keys(OP, k_UGE, v_UGE)
    for name, x in (("q", q_THE), ("k", k_UGE), ("v", v_UGE)):
        check_multiple(OP, **{f"{name}_row_stride": x.stride(0)})
        check_reach(OP, name, x, x.stride(0))
    dq_THE = (q_THE.new_empty if plan.covered else q_THE.new_zeros)((T, H, E))
    dk_UGE, dv_UGE = ((k_UGE.new_empty if plan.keys_covered else k_UGE.new_zeros)((U, G, E)) for _ in range(2))
    if not len(plan.segments):
        return dq_THE, dk_UGE, dv_UGE
    q_packed, d_o_packed = (q_THE.new_empty((G, T, H // G, E)) for _ in range(2))
    terms = q_THE.new_empty((G, T, H // G, TERMS.value), dtype=torch.float32)
    pack, dkdv, dq = (choose(architecture(), kernel) for kernel in FUNCTIONS)
    attention_pack[triton.cdiv(T * (H // G), pack.constants["BLOCK_M"]), G](
        q_THE, o_THE, do_THE, lse_TH, q_packed, d_o_packed, terms, H // G, T, q_THE.stride(0), E=E, **pack.constants,
        **options(pack))
    packed = (q_packed, k_UGE, v_UGE, d_o_packed, terms)
    numbers = (key_starts, logit_scale(E), 1 / math.sqrt(E), H // G, T, k_UGE.stride(0), v_UGE.stride(0))
    attention_dkdv[G, len(plan.blocks)](*packed, dk_UGE, dv_UGE, plan.blocks, plan.segments, *numbers, E=E,
                                        **dkdv.constants, **options(dkdv))
    attention_dq[len(plan.tiles), G](*packed, dq_THE, plan.tiles, *numbers, E=E, **dq.constants, **options(dq))
    return dq_THE, dk_UGE, dv_UGE


def _whole_heads(x_THE: torch.Tensor) -> torch.Tensor:
    return x_THE if x_THE.stride(2) == 1 and x_THE.stride(1) == x_THE.shape[2] else x_THE.contiguous()


TYPES = {"*bf16": ("q", "k", "v", "o", "d_o", "q_packed", "d_o_packed", "dq", "dk", "dv"), "*fp32": ("lse", "terms"),
         "*i32": ("tiles", "blocks", "segments", "starts"), "fp32": ("scale", "softmax_scale"),
         "i32": ("group", "rows", "q_stride", "key_stride", "value_stride")}


def variants(arch: str) -> list[Variant]:
    """Every kernel that the launcher can launch on `arch`."""
    found, kinds = [], {name: kind for kind, names in TYPES.items() for name in names}
    for (name, config), E in itertools.product(CONFIGS[arch].items(), HEAD_DIMS):
        function, fixed = FUNCTIONS[config.kernel], config.constants | {"E": E}
        signature = {argument: kinds[argument] for argument in function.arg_names if argument not in fixed}
        pointers = tuple(argument for argument, kind in signature.items() if kind.startswith("*"))
        strides = tuple(argument for argument in signature if argument.endswith("_stride"))
        found.append(Variant(config.kernel, f"{name}_e{E}", function, signature, fixed, options(config),
                             (*pointers, *strides), small=pointers))
    return found
