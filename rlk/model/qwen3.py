"""The one model: a dense Qwen3 decoder, which the trainer and the rollout engine run from the same storage.

Shape legend: T tokens (packed, one after another), B rows of logits, D hidden, F intermediate (this rank's), H query
heads (this rank's), G key/value heads (this rank's), E head dim, E2 = E / 2, V padded vocabulary (this rank's rows
where said), C = (H + 2G) * E columns of the fused qkv, A those of q, k or v alone, P positions of the RoPE table.

Tensor parallelism: a rank owns consecutive heads, intermediate columns and vocabulary rows. Row-parallel products
(o, down) are summed in FP32 over a balanced binary tree of `leaves` parts of K; a rank owns leaves / tp consecutive
parts and the all-reduce is the upper part of the tree, so the bits do not depend on tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.checkpoint import checkpoint

from rlk.collectives import Communicator, LocalCommunicator
from rlk.errors import UsageError
from rlk.model.config import ModelConfig
from rlk.model.parallel import copy_to_tp, reduce_add_rms_norm, reduce_from_tp
from rlk.ops.embedding import embedding
from rlk.ops.gemm import linear, linear_fp32, linear_leaves
from rlk.ops.norm import qk_norm_rope, rms_norm
from rlk.ops.rope import rope_table
from rlk.ops.swiglu import swiglu

ALIGNMENT = 64  # elements; every parameter starts on such a boundary of the storage, so that kernels may load vectors


class ForwardContext(Protocol):
    """Where the tokens of one forward pass sit, and how they see each other's keys."""

    positions_T: torch.Tensor  # int64: each token's position in its own sequence

    def attend(self, layer: int, q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
        """Causal attention within each sequence; returns o_THE. v_TGE may be a strided view."""


@dataclass(frozen=True)
class Part:
    """One tensor of the Hugging Face checkpoint, and how tensor parallelism cuts it."""

    hf_name: str
    shape: tuple[int, ...]  # in the checkpoint
    split: int | None  # the dimension cut into equal consecutive shards; None: every rank has all of it
    padded_rows: int = 0  # rows of the padded tensor that is cut (vocabulary); 0: shape[0]

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return (self.padded_rows or self.shape[0], *self.shape[1:])

    def local_shape(self, world: int) -> tuple[int, ...]:
        return tuple(n // world if dim == self.split else n for dim, n in enumerate(self.padded_shape))

    def shard(self, rank: int, world: int) -> tuple[slice, ...]:
        """This rank's region of the padded tensor, as one slice per dimension."""
        return tuple(
            slice(rank * n, (rank + 1) * n) if dim == self.split else slice(0, n)
            for dim, n in enumerate(self.local_shape(world))
        )


@dataclass(frozen=True)
class ParameterSpec:
    """One local parameter: the shards of its parts, one below the other."""

    name: str
    parts: tuple[Part, ...]
    decay: bool = True  # False for norm weights: no weight decay
    tp_partial: bool = False  # replicated, but each rank's gradient is only its own heads' part of the sum

    @property
    def tp_sharded(self) -> bool:
        return self.parts[0].split is not None

    def local_shape(self, world: int) -> tuple[int, ...]:
        shapes = [part.local_shape(world) for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def parameter_specs(config: ModelConfig) -> list[ParameterSpec]:
    """Every parameter in storage order: what storage, loading, export and resharding all go by."""
    D, F, E = config.hidden_size, config.intermediate_size, config.head_dim
    q_width, kv_width = config.num_heads * E, config.num_kv_heads * E

    def vocabulary(name: str, hf_name: str) -> ParameterSpec:
        return ParameterSpec(name, (Part(hf_name, (config.vocab_size, D), 0, config.padded_vocab),))

    def norm(name: str, hf_name: str, width: int = D, tp_partial: bool = False) -> ParameterSpec:
        return ParameterSpec(name, (Part(hf_name, (width,), None),), decay=False, tp_partial=tp_partial)

    specs = [vocabulary("embed_tokens", "model.embed_tokens.weight")]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        specs += [
            norm(ours + "input_norm", theirs + "input_layernorm.weight"),
            ParameterSpec(ours + "qkv", (
                Part(attention + "q_proj.weight", (q_width, D), 0),
                Part(attention + "k_proj.weight", (kv_width, D), 0),
                Part(attention + "v_proj.weight", (kv_width, D), 0),
            )),
            norm(ours + "q_norm", attention + "q_norm.weight", E, tp_partial=True),
            norm(ours + "k_norm", attention + "k_norm.weight", E, tp_partial=True),
            ParameterSpec(ours + "o", (Part(attention + "o_proj.weight", (D, q_width), 1),)),
            norm(ours + "post_norm", theirs + "post_attention_layernorm.weight"),
            ParameterSpec(ours + "gate_up", (
                Part(mlp + "gate_proj.weight", (F, D), 0),
                Part(mlp + "up_proj.weight", (F, D), 0),
            )),
            ParameterSpec(ours + "down", (Part(mlp + "down_proj.weight", (D, F), 1),)),
        ]
    specs.append(norm("norm", "model.norm.weight"))
    if not config.tie_embeddings:
        specs.append(vocabulary("lm_head", "lm_head.weight"))
    return specs


@dataclass
class LayerWeights:
    """One decoder layer's parameters on this rank."""

    input_norm: torch.Tensor  # [D]
    qkv: torch.Tensor  # [C, D]: query heads, then key heads, then value heads
    q_norm: torch.Tensor  # [E]
    k_norm: torch.Tensor  # [E]
    o: torch.Tensor  # [D, H * E]
    post_norm: torch.Tensor  # [D]
    gate_up: torch.Tensor  # [2F, D]: gate rows, then up rows
    down: torch.Tensor  # [D, F]


class Qwen3:
    """This rank's shard of the model.

    storage     1-D tensor of `dtype` that holds every parameter; zero where nothing was loaded
    parameters  name -> view of the storage, in storage order; "lm_head" is "embed_tokens" itself when tied
    spans       name -> slice of the storage
    Each parameter has the attributes tp_sharded, tp_partial, decay (see ParameterSpec) and, once enable_training()
    was called, main_grad.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device = "cpu",
                 tp_comm: Communicator | None = None, leaves: int = 1, shards: int = 1) -> None:
        """Allocate zeroed parameters. `shards`: the storage's length is a multiple of it (data-parallel optimizer).

        Raises UsageError when the model cannot be cut in tp_comm.world ranks and `leaves` parts.
        """
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.tp_comm = comm = tp_comm or LocalCommunicator()
        _check_division(config, comm.world, leaves)
        self.leaves, self.local_leaves = leaves, leaves // comm.world
        self.policy_version = 0
        self.checksum: str | None = None  # of the storage, when resharding filled it (weights.reshard_into)
        self.recompute = False
        self.grads: torch.Tensor | None = None

        self.num_heads = config.num_heads // comm.world
        self.num_kv_heads = config.num_kv_heads // comm.world
        self.vocab_rows = config.padded_vocab // comm.world
        self.first_row = comm.rank * self.vocab_rows
        q_width, kv_width = self.num_heads * config.head_dim, self.num_kv_heads * config.head_dim
        self._qkv_widths = (q_width, kv_width, kv_width)

        self.specs = parameter_specs(config)
        self.spans: dict[str, slice] = {}
        end = 0
        for spec in self.specs:
            length = torch.Size(spec.local_shape(comm.world)).numel()
            self.spans[spec.name] = slice(end, end + length)
            end = _round_up(end + length, ALIGNMENT)
        self.storage = torch.zeros(_round_up(end, ALIGNMENT * shards), dtype=dtype, device=self.device)
        self.parameters: dict[str, torch.Tensor] = {}
        for spec in self.specs:
            weight = self.storage[self.spans[spec.name]].view(spec.local_shape(comm.world))
            weight.tp_sharded, weight.tp_partial, weight.decay = spec.tp_sharded, spec.tp_partial, spec.decay
            self.parameters[spec.name] = weight
        if config.tie_embeddings:
            self.parameters["lm_head"] = self.parameters["embed_tokens"]

        weights = self.parameters
        self.layers = [
            LayerWeights(**{name: weights[f"layers.{i}.{name}"] for name in LayerWeights.__dataclass_fields__})
            for i in range(config.num_layers)
        ]
        # The norm that follows each layer: the next layer's, or the final one.
        self._next_norms = [layer.input_norm for layer in self.layers[1:]] + [weights["norm"]]
        cos_PE2, sin_PE2 = rope_table(config.max_position, config.head_dim, config.rope_theta)
        self._cos_PE2, self._sin_PE2 = cos_PE2.to(self.device), sin_PE2.to(self.device)

    def enable_training(self, recompute: bool = False) -> None:
        """Allocate FP32 gradients (`grads`, flat like the storage) and give each parameter its main_grad.

        `recompute`: keep only each layer's input for the backward pass and run the layer again there.
        """
        self.recompute = recompute
        self.grads = torch.zeros(self.storage.shape, dtype=torch.float32, device=self.device)
        for name, span in self.spans.items():
            weight = self.parameters[name]
            weight.main_grad = self.grads[span].view(weight.shape)
            weight.requires_grad_(True)

    def hidden(self, tokens_T: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """int64 tokens -> hidden_TD after the final norm, on every rank alike.

        Its gradient may be partial per rank: it is summed over the tensor-parallel group on the way back.
        """
        comm, eps = self.tp_comm, self.config.rms_norm_eps
        rope = self._cos_PE2[context.positions_T], self._sin_PE2[context.positions_T]
        # Every rank but the owner of a token's row adds +0, so the sum is exact.
        residual_TD = reduce_from_tp(embedding(tokens_T, self.parameters["embed_tokens"], self.first_row), comm)
        normed_TD = rms_norm(residual_TD, self.layers[0].input_norm, eps)
        recompute = self.recompute and torch.is_grad_enabled()
        for i in range(self.config.num_layers):
            if recompute:
                residual_TD, normed_TD = checkpoint(self._layer, i, residual_TD, normed_TD, rope, context,
                                                    use_reentrant=False, preserve_rng_state=False)
            else:
                residual_TD, normed_TD = self._layer(i, residual_TD, normed_TD, rope, context)
        return copy_to_tp(normed_TD, comm)

    def _layer(self, i: int, residual_TD: torch.Tensor, normed_TD: torch.Tensor,
               rope: tuple[torch.Tensor, torch.Tensor], context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual, its norm) before layer i -> the same before layer i + 1."""
        weights, comm, eps = self.layers[i], self.tp_comm, self.config.rms_norm_eps
        per_head = (-1, self.config.head_dim)

        qkv_TC = linear(copy_to_tp(normed_TD, comm), weights.qkv)
        q_TA, k_TA, v_TA = qkv_TC.split(self._qkv_widths, dim=-1)
        q_THE = qk_norm_rope(q_TA.unflatten(-1, per_head), weights.q_norm, *rope, eps)
        k_TGE = qk_norm_rope(k_TA.unflatten(-1, per_head), weights.k_norm, *rope, eps)
        o_THE = context.attend(i, q_THE, k_TGE, v_TA.unflatten(-1, per_head))
        partial_TD = linear_leaves(o_THE.flatten(1), weights.o, self.local_leaves)
        residual_TD, normed_TD = reduce_add_rms_norm(partial_TD, residual_TD, weights.post_norm, eps, comm)

        gate_up_T2F = linear(copy_to_tp(normed_TD, comm), weights.gate_up)
        partial_TD = linear_leaves(swiglu(gate_up_T2F), weights.down, self.local_leaves)
        return reduce_add_rms_norm(partial_TD, residual_TD, self._next_norms[i], eps, comm)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """FP32 logits over the whole padded vocabulary, [B, padded_vocab], on every rank; no gradient."""
        local_BV = linear_fp32(hidden_BD, self.parameters["lm_head"])
        if self.tp_comm.world == 1:
            return local_BV
        return self.tp_comm.all_gather(local_BV).transpose(0, 1).reshape(len(hidden_BD), -1)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _check_division(config: ModelConfig, tp: int, leaves: int) -> None:
    if leaves % tp or leaves & (leaves - 1):
        raise UsageError(f"leaves is {leaves}, expected a power of two that tp ({tp}) divides")
    for what, size, pieces in (
        ("num_attention_heads", config.num_heads, tp),
        ("num_key_value_heads", config.num_kv_heads, tp),
        ("padded vocabulary", config.padded_vocab, tp),
        ("attention width", config.num_heads * config.head_dim, leaves),
        ("intermediate_size", config.intermediate_size, leaves),
    ):
        if size % pieces:
            raise UsageError(f"{what} is {size}, expected a multiple of {pieces}; use a smaller tensor parallelism")
