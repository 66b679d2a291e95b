"""Q/K norm, rotary embedding and the write into the pages of the cache, as one operator for the engine.

Rule: the bits of `qk_norm_rope` on the query and on the key heads, and of `write_kv`.

Shapes: T tokens, H query heads, G kv heads, E head dimension, E2 = E / 2, P pages, S slots of a page.
"""

from __future__ import annotations

import torch

from rlk.ops.attention import write_kv_cpu, write_kv_reference
from rlk.ops.norm import qk_norm_rope_cpu, qk_norm_rope_reference
from rlk.ops.registry import EVERYWHERE, registry


def qk_norm_rope_write(
    qkv_THE: torch.Tensor, q_weight_E: torch.Tensor, k_weight_E: torch.Tensor, cos_TE2: torch.Tensor,
    sin_TE2: torch.Tensor, eps: float, k_cache_PSGE: torch.Tensor, v_cache_PSGE: torch.Tensor, slots_T: torch.Tensor,
) -> torch.Tensor:
    """rope(rms_norm(q)), [T, H, E]; rope(rms_norm(k)) and v go into slot slots_T[t] of the pages, in place.

    qkv: [T, H + 2 G, E], the query heads, then the key heads, then the value heads; any stride over tokens. cos and sin
    are FP32 rows of `rope_table`, one per token. slots_T: int64; -1 leaves the token's key and value out. Not
    differentiable. Raises ValueError when there is no query head, or (on a CPU) for a slot outside the cache.
    """
    return registry.call("qk_norm_rope_write", qkv_THE, qkv_THE, q_weight_E, k_weight_E, cos_TE2, sin_TE2, eps,
                         k_cache_PSGE, v_cache_PSGE, slots_T)


def _in_steps(qk_norm_rope, write_kv):
    """The operator out of its two steps."""

    def fused(qkv_THE, q_weight_E, k_weight_E, cos_TE2, sin_TE2, eps, k_cache_PSGE, v_cache_PSGE, slots_T):
        G = k_cache_PSGE.shape[2]
        H = qkv_THE.shape[1] - 2 * G
        if H < 1:
            raise ValueError(f"qk_norm_rope_write got {qkv_THE.shape[1]} heads for pages {tuple(k_cache_PSGE.shape)}, "
                             f"expected at least {2 * G + 1}: queries, then {G} keys and {G} values")
        q_THE, k_TGE, v_TGE = qkv_THE.split((H, G, G), dim=1)
        k_TGE = qk_norm_rope(k_TGE, k_weight_E, cos_TE2, sin_TE2, eps)
        write_kv(k_TGE, v_TGE, k_cache_PSGE, v_cache_PSGE, slots_T)
        return qk_norm_rope(q_THE, q_weight_E, cos_TE2, sin_TE2, eps)

    return fused


registry.register("qk_norm_rope_write", "reference", contract=False, devices=EVERYWHERE)(
    _in_steps(qk_norm_rope_reference, write_kv_reference))
registry.register("qk_norm_rope_write", "cpu", contract=True)(_in_steps(qk_norm_rope_cpu, write_kv_cpu))
