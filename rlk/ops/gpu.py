"""The GPU backends of the operators: Triton (triton/) and HIP C++ (hipkernels/gpu/), for NVIDIA and AMD alike.

Each function here hands the operator's arguments to its kernel; the rule stands in the operator's file and the
reduction order in the kernel's.
Triton is imported at the first call: a machine without a GPU needs none.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from rlk.ops import cublas, gpu_sampler
from rlk.ops.cpu_library import DTYPE_CODE
from rlk.ops.gpu_library import FLOAT, INT, LONG, POINTER, function, ptr, stream
from rlk.ops.registry import registry

BF16, FP32, INT64 = (torch.bfloat16,), (torch.float32,), (torch.int64,)


def _kernels(name: str) -> ModuleType:
    return importlib.import_module(f"rlk.kernels.{name}")


def _backend(op: str, name: str, dtypes: tuple[torch.dtype, ...], guard=None):
    return registry.register(op, name, contract=True, devices=("cuda",), dtypes=dtypes, guard=guard)


# ---- large matrix products: cuBLAS, where a trial gave the bits of our kernels ----


@_backend("linear", "cublas", BF16, lambda x_MK, w_NK: cublas.serves_linear(x_MK, w_NK, 1, torch.bfloat16))
def linear_cublas(x_MK, w_NK):
    return cublas.linear(x_MK, w_NK, 1, torch.bfloat16)


@_backend("linear_swiglu", "cublas", BF16, lambda x_MK, w_NK: cublas.serves_linear(x_MK, w_NK, 1, torch.bfloat16))
def linear_swiglu_cublas(x_MK, w_NK):
    gate_up_M2F = cublas.linear(x_MK, w_NK, 1, torch.bfloat16).reshape(-1, w_NK.shape[0])
    return _kernels("swiglu").swiglu(gate_up_M2F).reshape(*x_MK.shape[:-1], -1)


@_backend("linear_fp32", "cublas", BF16, lambda x_MK, w_NK: cublas.serves_linear(x_MK, w_NK, 1, torch.float32))
def linear_fp32_cublas(x_MK, w_NK):
    return cublas.linear(x_MK, w_NK, 1, torch.float32)


@_backend("linear_leaves", "cublas", BF16,
          lambda x_MK, w_NK, leaves: cublas.serves_linear(x_MK, w_NK, leaves, torch.float32))
def linear_leaves_cublas(x_MK, w_NK, leaves):
    return cublas.linear(x_MK, w_NK, leaves, torch.float32)


@_backend("gemm_dx", "cublas", BF16, cublas.serves_dx)
def gemm_dx_cublas(dy_MN, w_NK):
    return cublas.gemm_dx(dy_MN, w_NK)


@_backend("gemm_dw", "cublas", BF16, cublas.serves_dw)
def gemm_dw_cublas(dy_MN, x_MK, main_grad_NK):
    cublas.gemm_dw(dy_MN, x_MK, main_grad_NK)


# ---- matrix products: triton/gemm.py, gemm_backward.py ----


def _linear(x_MK, w_NK, leaves, out_dtype, **epilogue):
    y_MN = _kernels("gemm").linear(x_MK.reshape(-1, x_MK.shape[-1]), w_NK, leaves, out_dtype, **epilogue)
    return y_MN.reshape(*x_MK.shape[:-1], y_MN.shape[-1])


@_backend("linear", "triton", BF16)
def linear(x_MK, w_NK):
    return _linear(x_MK, w_NK, 1, torch.bfloat16)


@_backend("linear_fp32", "triton", BF16)
def linear_fp32(x_MK, w_NK):
    return _linear(x_MK, w_NK, 1, torch.float32)


@_backend("linear_leaves", "triton", BF16)
def linear_leaves(x_MK, w_NK, leaves):
    return _linear(x_MK, w_NK, leaves, torch.float32)


@_backend("linear_swiglu", "triton", BF16)
def linear_swiglu(x_MK, w_NK):
    return _linear(x_MK, w_NK, 1, torch.bfloat16, swiglu=True)


@_backend("gemm_dx", "triton", BF16)
def gemm_dx(dy_MN, w_NK):
    dx_MK = _kernels("gemm_backward").input_gradient(dy_MN.reshape(-1, dy_MN.shape[-1]), w_NK)
    return dx_MK.reshape(*dy_MN.shape[:-1], w_NK.shape[1])


@_backend("gemm_dw", "triton", BF16)
def gemm_dw(dy_MN, x_MK, main_grad_NK):
    _kernels("gemm_backward").weight_gradient(dy_MN.reshape(-1, dy_MN.shape[-1]), x_MK.reshape(-1, x_MK.shape[-1]),
                                              main_grad_NK)


# ---- rows: triton/norm.py, rope.py, swiglu.py, embedding.py, and their gradients in *_backward.py ----


@_backend("rms_norm", "triton", BF16)
def rms_norm(x_TD, w_D, eps):
    return _kernels("norm").rms_norm(x_TD, w_D, eps)


@_backend("add_rms_norm", "triton", BF16)
def add_rms_norm(partial_TD, residual_TD, w_D, eps):
    return _kernels("norm").add_rms_norm(partial_TD, residual_TD, w_D, eps)


@_backend("residual_add", "triton", BF16)
def residual_add(partial_TD, residual_TD):
    return _kernels("norm").residual_add(partial_TD, residual_TD)


@_backend("qk_norm_rope", "triton", BF16)
def qk_norm_rope(x_THE, w_E, cos_TE2, sin_TE2, eps):
    return _kernels("rope").qk_norm_rope(x_THE, w_E, cos_TE2, sin_TE2, eps)


@_backend("swiglu", "triton", BF16)
def swiglu(gate_up_T2F):
    return _kernels("swiglu").swiglu(gate_up_T2F)


@_backend("rms_norm_backward", "triton", BF16)
def rms_norm_backward(dy_TD, dhidden_TD, x_TD, w_D, eps, main_grad_D):
    return _kernels("norm_backward").rms_norm_backward(dy_TD, dhidden_TD, x_TD, w_D, eps, main_grad_D)


@_backend("qk_norm_rope_backward", "triton", BF16)
def qk_norm_rope_backward(dy_THE, x_THE, w_E, cos_TE2, sin_TE2, eps, main_grad_E):
    return _kernels("rope_backward").qk_norm_rope_backward(dy_THE, x_THE, w_E, cos_TE2, sin_TE2, eps, main_grad_E)


@_backend("swiglu_backward", "triton", BF16)
def swiglu_backward(dy_TF, gate_up_T2F):
    return _kernels("swiglu_backward").swiglu_backward(dy_TF, gate_up_T2F)


@_backend("embedding", "triton", BF16)
def embedding(tokens_T, w_VD, first_row):
    return _kernels("embedding").embedding(tokens_T, w_VD, first_row)


@_backend("embedding_backward", "triton", BF16)
def embedding_backward(dx_TD, tokens_T, main_grad_VD, first_row):
    _kernels("embedding").embedding_backward(dx_TD, tokens_T, main_grad_VD, first_row)


# ---- rows into the pages of the cache: triton/paged_cache.py. A slot outside the cache is left out, not refused: the
# host does not read the table ----


@_backend("write_kv", "triton", BF16)
def write_kv(k_TGE, v_TGE, k_cache_PSGE, v_cache_PSGE, slots_T):
    _kernels("paged_cache").write_kv(k_TGE, v_TGE, k_cache_PSGE, v_cache_PSGE, slots_T)


@_backend("qk_norm_rope_write", "triton", BF16)
def qk_norm_rope_write(qkv_THE, q_weight_E, k_weight_E, cos_TE2, sin_TE2, eps, k_cache_PSGE, v_cache_PSGE, slots_T):
    return _kernels("paged_cache").qk_norm_rope_write(qkv_THE, q_weight_E, k_weight_E, cos_TE2, sin_TE2, eps,
                                                      k_cache_PSGE, v_cache_PSGE, slots_T)


# ---- the optimizer: triton/optimizer.py ----


@_backend("adamw", "triton", FP32)
def adamw(master, moment1, moment2, grad, weight, *scalars):
    _kernels("optimizer").adamw(master, moment1, moment2, grad, weight, *scalars)


@_backend("sum_squares", "triton", FP32)
def sum_squares(x):
    return float(_kernels("optimizer").sum_squares(x))


# ---- attention: triton/attention.py, attention_backward.py. Tiles are cut on the host, where the segments must be; but
# those of a decode step are the tiles, and are uploaded as they are ----


@_backend("attention_varlen", "triton", BF16)
def attention_varlen(q_THE, k_UGE, v_UGE, segments, key_starts, need_lse=False):
    o_THE, lse_TH = _kernels("attention").attention_varlen(q_THE, k_UGE, v_UGE, _on_host(segments),
                                                           _on_gpu(key_starts, q_THE.device))
    return o_THE, lse_TH if need_lse else None


@_backend("attention_paged", "triton", BF16)
def attention_paged(q_THE, k_cache_PSGE, v_cache_PSGE, segments, block_table):
    kernels, most_keys = _kernels("attention"), None
    if segments.is_cuda and torch.cuda.is_current_stream_capturing():  # the host cannot look: it must be a decode step
        if len(segments) != len(q_THE):
            raise ValueError(f"attention_paged got {len(segments)} segments for {len(q_THE)} query rows while a graph "
                             "is captured, expected one for each row, in order; capture decode steps alone, or give "
                             "the segments on the CPU")
    else:
        table = _on_host(segments)
        most_keys = kernels.longest_decode(table, q_THE, k_cache_PSGE, block_table)
        segments = _on_gpu(segments, q_THE.device).contiguous() if most_keys else table
    return kernels.attention_paged(q_THE, k_cache_PSGE, v_cache_PSGE, segments, block_table, most_keys)


@_backend("attention_varlen_backward", "triton", BF16)
def attention_varlen_backward(do_THE, q_THE, k_UGE, v_UGE, o_THE, lse_TH, segments, key_starts):
    return _kernels("attention_backward").attention_varlen_backward(
        do_THE, q_THE, k_UGE, v_UGE, o_THE, lse_TH, _on_host(segments), _on_gpu(key_starts, q_THE.device))


def _on_host(table):
    """The table on the CPU; from the GPU it is read once for all layers, and again when torch has written into it."""
    if not table.is_cuda:
        return table
    version = None if table.is_inference() else table._version
    read = getattr(table, "read_by_host", None)
    if read is None or version is None or read[0] != version:
        read = table.read_by_host = version, table.cpu()
    return read[1]


def _on_gpu(table, device):
    """The table on the GPU; from the CPU it is copied once, not for every layer."""
    return table if table.is_cuda else _kernels("attention_plan").upload(table, device)


# ---- log-prob over the vocabulary: triton/logprob.py ----


@_backend("tile_stats", "triton", FP32)
def tile_stats(logits_TV, tiles, first_id, valid_vocab, inv_temperature):
    return _kernels("logprob").tile_stats(logits_TV, tiles, first_id, valid_vocab, inv_temperature)


@_backend("merge_tiles", "triton", FP32)
def merge_tiles(stats, target_logits_T, inv_temperature):
    return _kernels("logprob").merge_tiles(stats, target_logits_T, inv_temperature)


@_backend("tile_stats_backward", "triton", BF16)
def tile_stats_backward(logits_TV, targets_T, lse_T, grad_T, first_id, valid_vocab, inv_temperature, dlogits_TV):
    _kernels("logprob").tile_stats_backward(logits_TV, targets_T, lse_T, grad_T, first_id, valid_vocab,
                                            inv_temperature, dlogits_TV)


# ---- the sampler: hipkernels/gpu/sampler_select.cpp, sampler_draw.cpp ----


@_backend("draw", "hip", FP32)
def draw(logits_BV, params, uids_B, positions_B, valid_vocab):
    return gpu_sampler.draw(logits_BV, params, uids_B, positions_B, valid_vocab)


# ---- log-prob over retained sets: hipkernels/gpu/retained_set.cpp ----

_find_targets = function("rlk_gpu_find_targets", POINTER, POINTER, POINTER, LONG, POINTER, POINTER)
_pick_logits = function("rlk_gpu_pick_logits", POINTER, LONG, LONG, POINTER, POINTER, LONG, POINTER, POINTER)
_support_score = function("rlk_gpu_support_score", POINTER, POINTER, POINTER, LONG, FLOAT, POINTER, POINTER)
_support_score_backward = function("rlk_gpu_support_score_backward", *[POINTER] * 6, LONG, LONG, LONG, FLOAT, INT,
                                   POINTER, POINTER)


@_backend("find_targets", "hip", INT64)
def find_targets(offsets, ids_N, targets_T):
    index_T = torch.empty_like(targets_T)
    _find_targets(ptr(offsets), ptr(ids_N), ptr(targets_T), targets_T.numel(), ptr(index_T), stream())
    return index_T


@_backend("pick_logits", "hip", FP32)
def pick_logits(logits_TV, offsets, ids_N, first_id, values_N):
    _pick_logits(ptr(logits_TV), *logits_TV.shape, ptr(offsets), ptr(ids_N), first_id, ptr(values_N), stream())


@_backend("support_score", "hip", FP32)
def support_score(values_N, offsets, index_T, inv_temperature):
    scores = values_N.new_empty(3, index_T.numel())
    _support_score(ptr(values_N), ptr(offsets), ptr(index_T), index_T.numel(), inv_temperature, ptr(scores),
                   stream())
    return scores.unbind()


@_backend("support_score_backward", "hip", BF16)
def support_score_backward(values_N, offsets, ids_N, index_T, lse_T, grad_T, first_id, inv_temperature, dlogits_TV):
    _support_score_backward(ptr(values_N), ptr(offsets), ptr(ids_N), ptr(index_T), ptr(lse_T), ptr(grad_T),
                            *dlogits_TV.shape, first_id, inv_temperature, DTYPE_CODE[dlogits_TV.dtype],
                            ptr(dlogits_TV), stream())
