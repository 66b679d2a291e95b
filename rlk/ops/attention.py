"""Causal attention over packed sequences: with keys in a row buffer (training) or in pages (rollout).

Shape legend: T query rows (packed), U key rows (packed), H query heads (local), G key/value heads (local), E head
dim, P pages, S slots of a page, B rows of the block table; in the reference also N segments, Q and K their padded
query and key counts. H is a multiple of G: query head h reads key/value head h // (H / G).

Segments and key starts may lie on the host when the rest is on a GPU.

A segment is one int32 row (row_start, row_count, position_start, source): `row_count` consecutive query rows of one
sequence, the first at absolute position `position_start`. Its query row i sees the keys at positions
0 .. position_start + i of `source`. Segments with the same source are adjacent. Query rows outside every segment give
zeros.

The two forms share one C++ core (hipkernels/cpu/attention.h states the reduction order), so the same row has the
same bits alone, in a pack, in any chunk of a prefill, and in decode, whatever the page size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rlk.ops.cpu_library import DTYPE_CODE, INT, LONG, POINTER, function, ptr
from rlk.ops.registry import EVERYWHERE, registry

Tensor = torch.Tensor


def attention_varlen(q_THE: Tensor, k_UGE: Tensor, v_UGE: Tensor, segments: Tensor, key_starts: Tensor) -> Tensor:
    """softmax(q k' / sqrt(E)) v over the visible keys, in q's dtype, shape [T, H, E]. Differentiable in q, k and v.

    q, k, v: one dtype, last two dims contiguous (views of a fused qkv are fine). segments: int32 [n, 4].
    key_starts: int32 [sources]; the key at position j of source s is row key_starts[s] + j of k and v.
    Raises ValueError when a segment reaches outside q, or its keys outside k.
    """
    tensors = (q_THE, k_UGE, v_UGE, segments, key_starts)
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors[:3])
    if needs_gradient and registry.mode == "consistency":
        return _AttentionVarlen.apply(*tensors)
    # The native arm's backend is plain PyTorch, which differentiates itself.
    return registry.call("attention_varlen", q_THE, *tensors, need_lse=False)[0]


def attention_paged(q_THE: Tensor, k_cache_PSGE: Tensor, v_cache_PSGE: Tensor, segments: Tensor,
                    block_table: Tensor) -> Tensor:
    """As attention_varlen, with the keys in pages; shape [T, H, E]. Not differentiable.

    block_table: int32 [B, max_pages]; a segment's source is a row of it, and the key at position j is slot j % S of
    page block_table[source, j // S]. Slots at positions that no row sees are never read.
    Raises ValueError when a segment reaches outside q or the table, or the table outside the cache.
    """
    return registry.call("attention_paged", q_THE, q_THE, k_cache_PSGE, v_cache_PSGE, segments, block_table)


def write_kv(k_TGE: Tensor, v_TGE: Tensor, k_cache_PSGE: Tensor, v_cache_PSGE: Tensor, slots_T: Tensor) -> None:
    """Copy row t of k and v into slot slots_T[t] % S of page slots_T[t] // S, in place.

    slots_T: int64; -1 leaves the row out. Raises ValueError for a slot outside the cache; on a GPU, where the host does
    not look at the table, such a row is left out too.
    """
    registry.call("write_kv", k_TGE, k_TGE, v_TGE, k_cache_PSGE, v_cache_PSGE, slots_T)


class _AttentionVarlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THE, k_UGE, v_UGE, segments, key_starts):
        o_THE, lse_TH = registry.call("attention_varlen", q_THE, q_THE, k_UGE, v_UGE, segments, key_starts,
                                      need_lse=True)
        ctx.save_for_backward(q_THE, k_UGE, v_UGE, o_THE, lse_TH, segments, key_starts)
        return o_THE

    @staticmethod
    def backward(ctx, do_THE):
        dq_THE, dk_UGE, dv_UGE = registry.call("attention_varlen_backward", do_THE, do_THE, *ctx.saved_tensors)
        return dq_THE, dk_UGE, dv_UGE, None, None


# ---- reference: plain PyTorch, the oracle in float64 and the native arm's backend


@registry.register("attention_varlen", "reference", contract=False, devices=EVERYWHERE)
def attention_varlen_reference(q_THE, k_UGE, v_UGE, segments, key_starts, need_lse=False):
    """Returns (o_THE, None). Padded to a batch for F.scaled_dot_product_attention, which autograd differentiates."""
    key_starts = key_starts.to(q_THE.device, torch.int64)

    def gather(x_UGE, sources_N, position_NK):
        return _rows(x_UGE, key_starts[sources_N, None] + position_NK)

    return _attend_segments(q_THE, k_UGE, v_UGE, segments, gather), None


@registry.register("attention_paged", "reference", contract=False, devices=EVERYWHERE)
def attention_paged_reference(q_THE, k_cache_PSGE, v_cache_PSGE, segments, block_table):
    page_size = k_cache_PSGE.shape[1]

    def gather(cache_PSGE, sources_N, position_NK):
        page_NK = block_table[sources_N[:, None], position_NK // page_size].to(torch.int64)
        return _rows(cache_PSGE.flatten(0, 1), page_NK * page_size + position_NK % page_size)

    return _attend_segments(q_THE, k_cache_PSGE, v_cache_PSGE, segments, gather)


def _attend_segments(q_THE, k, v, segments, gather):
    """Attention of every segment; `gather(k or v, sources_N, position_NK)` reads keys as [N, K, G, E].

    Decodes (one row) and longer segments make a batch each, so that a prefill chunk does not pad the decodes.
    """
    segments = segments.to(q_THE.device, torch.int64)
    outputs, produced = [], 0
    place_T = torch.full((len(q_THE),), -1, device=segments.device)  # where each row's output is, in `outputs`
    decodes = segments[:, 1] == 1
    for batch in (segments[decodes], segments[~decodes]):
        if not len(batch):
            continue
        row_start_N, row_count_N, position_N, sources_N = batch.unbind(1)
        step_Q = torch.arange(int(row_count_N.max()), device=batch.device)
        real_NQ = step_Q < row_count_N[:, None]
        row_NQ = torch.where(real_NQ, row_start_N[:, None] + step_Q, row_start_N[:, None])
        position_NQ = position_N[:, None] + step_Q
        length_N = position_N + row_count_N
        key_K = torch.arange(int(length_N.max()), device=batch.device)
        # Padding repeats key 0, which is always written: nothing that a mask hides is read.
        position_NK = torch.where(key_K < length_N[:, None], key_K, 0)
        visible_NQK = key_K <= position_NQ[..., None] if position_N.any() else None
        o_NQHE = _sdpa(_rows(q_THE, row_NQ), gather(k, sources_N, position_NK), gather(v, sources_N, position_NK),
                       visible_NQK)
        place_T[row_NQ[real_NQ]] = produced + real_NQ.flatten().nonzero()[:, 0]
        produced += real_NQ.numel()
        outputs.append(o_NQHE.flatten(0, 1))
    if not outputs:
        return torch.zeros_like(q_THE)
    o_THE = _rows(torch.cat(outputs) if len(outputs) > 1 else outputs[0], place_T.clamp(min=0))
    outside_T = place_T < 0
    return o_THE.masked_fill(outside_T[:, None, None], 0) if outside_T.any() else o_THE


def _rows(x, index):
    """x[index] by index_select, whose gradient is much faster than that of general indexing."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)


def _sdpa(q_NQHE, k_NKGE, v_NKGE, visible_NQK):
    """Scaled dot-product attention; `visible_NQK` None is the causal square. Returns [N, Q, H, E]."""
    k_NGKE, v_NGKE = k_NKGE.transpose(1, 2), v_NKGE.transpose(1, 2)
    n, q, h, e = q_NQHE.shape
    if q == 1 and visible_NQK is not None:  # decode: a kv head's query heads see the same keys, as rows of one batch
        o = F.scaled_dot_product_attention(q_NQHE.reshape(n, k_NGKE.shape[1], -1, e), k_NGKE, v_NGKE,
                                           attn_mask=visible_NQK[:, None])
        return o.reshape(n, q, h, e)
    mask = None if visible_NQK is None else visible_NQK[:, None]
    o = F.scaled_dot_product_attention(q_NQHE.transpose(1, 2), k_NGKE, v_NGKE, attn_mask=mask, is_causal=mask is None,
                                       enable_gqa=h != k_NGKE.shape[1])
    return o.transpose(1, 2)


@registry.register("write_kv", "reference", contract=False, devices=EVERYWHERE)
def write_kv_reference(k_TGE, v_TGE, k_cache_PSGE, v_cache_PSGE, slots_T):
    written = slots_T >= 0
    if not bool(written.all()):
        k_TGE, v_TGE, slots_T = k_TGE[written], v_TGE[written], slots_T[written]
    for x_TGE, cache_PSGE in ((k_TGE, k_cache_PSGE), (v_TGE, v_cache_PSGE)):
        cache_PSGE.flatten(0, 1).index_copy_(0, slots_T, x_TGE)


# ---- cpu: C++ in one fixed order (hipkernels/cpu/attention.cpp, attention_backward.cpp)

_forward_varlen = function("rlk_attention_varlen", INT, POINTER, LONG, LONG, POINTER, LONG, POINTER, LONG, LONG,
                           POINTER, INT, POINTER, INT, INT, INT, INT, POINTER, POINTER)
_forward_paged = function("rlk_attention_paged", INT, POINTER, LONG, LONG, POINTER, POINTER, LONG, INT, POINTER, INT,
                          POINTER, INT, INT, INT, INT, INT, POINTER)
_backward_varlen = function("rlk_attention_varlen_backward", INT, POINTER, POINTER, LONG, LONG, POINTER, LONG, POINTER,
                            LONG, LONG, POINTER, POINTER, POINTER, INT, POINTER, INT, INT, INT, INT, POINTER, POINTER,
                            POINTER)
_write_kv = function("rlk_write_kv", POINTER, LONG, POINTER, LONG, POINTER, POINTER, LONG, POINTER, LONG, LONG)


@registry.register("attention_varlen", "cpu", contract=True)
def attention_varlen_cpu(q_THE, k_UGE, v_UGE, segments, key_starts, need_lse=False):
    """Returns (o_THE, lse_TH): lse is the FP32 base-2 log-sum-exp that the backward wants, or None."""
    q_THE, k_UGE, v_UGE = _strided_rows(q_THE, k_UGE, v_UGE)
    t, h, e = q_THE.shape
    o_THE = _output(q_THE, segments)
    lse_TH = torch.empty(t, h, dtype=torch.float32) if need_lse else None
    try:
        _forward_varlen(DTYPE_CODE[q_THE.dtype], q_THE.data_ptr(), t, q_THE.stride(0), k_UGE.data_ptr(),
                        k_UGE.stride(0), v_UGE.data_ptr(), v_UGE.stride(0), len(k_UGE), _table(segments),
                        len(segments), _table(key_starts), len(key_starts), h, k_UGE.shape[1], e, ptr(o_THE),
                        ptr(lse_TH))
    except RuntimeError as error:
        raise ValueError(f"attention_varlen: {_described(q_THE, k_UGE, segments)}, {len(key_starts)} key starts: "
                         "expected every segment's rows within q and its keys within k, and E a multiple of 16 up to "
                         "128; check the segment table") from error
    return o_THE, lse_TH


@registry.register("attention_varlen_backward", "cpu", contract=True)
def attention_varlen_backward_cpu(do_THE, q_THE, k_UGE, v_UGE, o_THE, lse_TH, segments, key_starts):
    """Gradients (dq_THE, dk_UGE, dv_UGE) in the dtype of q, zeros for rows that no segment uses.

    The key ranges of different sources must not overlap.
    """
    q_THE, k_UGE, v_UGE = _strided_rows(q_THE, k_UGE, v_UGE)
    t, h, e = q_THE.shape
    u, g, _ = k_UGE.shape
    dq_THE = _output(q_THE, segments)
    dk_UGE, dv_UGE = (torch.zeros(u, g, e, dtype=q_THE.dtype) for _ in range(2))
    try:
        _backward_varlen(DTYPE_CODE[q_THE.dtype], ptr(do_THE.contiguous()), q_THE.data_ptr(), t, q_THE.stride(0),
                         k_UGE.data_ptr(), k_UGE.stride(0), v_UGE.data_ptr(), v_UGE.stride(0), u, ptr(o_THE),
                         ptr(lse_TH), _table(segments), len(segments), _table(key_starts), len(key_starts), h, g, e,
                         ptr(dq_THE), ptr(dk_UGE), ptr(dv_UGE))
    except RuntimeError as error:
        raise ValueError(f"attention_varlen_backward: {_described(q_THE, k_UGE, segments)}: expected the segments of "
                         "one source to be adjacent; check the segment table") from error
    return dq_THE, dk_UGE, dv_UGE


@registry.register("attention_paged", "cpu", contract=True)
def attention_paged_cpu(q_THE, k_cache_PSGE, v_cache_PSGE, segments, block_table):
    (q_THE,) = _strided_rows(q_THE)
    t, h, e = q_THE.shape
    pages, page_size, g, _ = k_cache_PSGE.shape
    o_THE = _output(q_THE, segments)
    try:
        _forward_paged(DTYPE_CODE[q_THE.dtype], q_THE.data_ptr(), t, q_THE.stride(0), ptr(k_cache_PSGE),
                       ptr(v_cache_PSGE), pages, page_size, _table(segments), len(segments), _table(block_table),
                       *block_table.shape, h, g, e, ptr(o_THE))
    except RuntimeError as error:
        raise ValueError(f"attention_paged: {_described(q_THE, k_cache_PSGE, segments)}, block table "
                         f"{tuple(block_table.shape)}: expected every segment's rows within q, its positions within "
                         "its row of the table, and those pages within the cache; check the segment and block tables"
                         ) from error
    return o_THE


@registry.register("write_kv", "cpu", contract=True)
def write_kv_cpu(k_TGE, v_TGE, k_cache_PSGE, v_cache_PSGE, slots_T):
    k_TGE, v_TGE = _strided_rows(k_TGE, v_TGE)
    size = k_TGE.element_size()
    try:
        _write_kv(k_TGE.data_ptr(), k_TGE.stride(0) * size, v_TGE.data_ptr(), v_TGE.stride(0) * size,
                  ptr(k_cache_PSGE), ptr(v_cache_PSGE), k_cache_PSGE.shape[0] * k_cache_PSGE.shape[1],
                  _table(slots_T, torch.int64), len(slots_T), k_TGE.shape[1] * k_TGE.shape[2] * size)
    except RuntimeError as error:
        raise ValueError(f"write_kv: slots from {slots_T.min()} to {slots_T.max()}, expected -1 or a slot of the "
                         f"cache {tuple(k_cache_PSGE.shape)}; check the slot table") from error


def _strided_rows(*tensors):
    """The tensors with each row's heads contiguous; rows may be strided, so a slice of a fused qkv passes as it is."""
    if len({x.dtype for x in tensors}) > 1:
        raise TypeError(f"attention got dtypes {[x.dtype for x in tensors]}, expected one for q, k and v")
    return [x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in tensors]


def _table(x: Tensor, dtype: torch.dtype = torch.int32) -> int:
    if x.dtype != dtype:
        raise TypeError(f"attention got a table of {x.dtype}, expected {dtype}")
    return ptr(x)


def _output(q_THE, segments):
    """Room for a tensor like q: the kernel writes the rows of segments, the others are zero."""
    covered = int(segments[:, 1].sum()) == len(q_THE)
    return (torch.empty if covered else torch.zeros)(q_THE.shape, dtype=q_THE.dtype)


def _described(q_THE, keys, segments):
    return f"q {tuple(q_THE.shape)}, keys {tuple(keys.shape)}, {len(segments)} segments"
