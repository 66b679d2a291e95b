"""Small random models for the tests, and the least that it takes to run one.

Shape legend: T tokens, H query heads, G key/value heads, E head dim.
"""

from __future__ import annotations

import torch

from rlk.collectives import Communicator
from rlk.model.config import ModelConfig
from rlk.model.qwen3 import Part, Qwen3
from rlk.model.weights import fill
from rlk.ops.attention import attention_varlen

TINY_SHAPE = dict(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
                  vocab_size=500, max_position=2048, rope_theta=1e4, eos_token_ids=(1, 2))

TOKENS_T = torch.randint(0, TINY_SHAPE["vocab_size"], (70,), generator=torch.Generator().manual_seed(7))


class OneSequence:
    """A ForwardContext: the tokens are one sequence from position 0."""

    def __init__(self, length: int) -> None:
        self.positions_T = torch.arange(length)
        self.segments = torch.tensor([[0, length, 0, 0]], dtype=torch.int32)
        self.key_starts = torch.zeros(1, dtype=torch.int32)

    def attend(self, layer, q_THE, k_TGE, v_TGE):
        return attention_varlen(q_THE, k_TGE, v_TGE, self.segments, self.key_starts)


def logits_of(model: Qwen3, tokens_T: torch.Tensor = TOKENS_T) -> torch.Tensor:
    """FP32 logits of one sequence, the vocabulary padding included."""
    with torch.no_grad():
        return model.logits(model.hidden(tokens_T, OneSequence(len(tokens_T))))


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's raw bytes."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def random_model(seed: int, dtype: torch.dtype = torch.float32, comm: Communicator | None = None, leaves: int = 1,
                 shards: int = 1, **shape) -> Qwen3:
    """A Qwen3 of TINY_SHAPE (keywords replace its entries) with peaked, varied logits.

    The full weights depend on the seed alone: every rank and every layout cuts its shards from the same model.
    """
    model = Qwen3(ModelConfig(**(TINY_SHAPE | shape)), dtype, "cpu", comm, leaves, shards)
    generator = torch.Generator().manual_seed(seed)

    def read(part: Part, region: tuple[slice, ...]) -> torch.Tensor:
        return full[part.hf_name][region]

    full = {}
    for part in (part for spec in model.specs for part in spec.parts):
        noise = torch.randn(part.shape, generator=generator)
        full[part.hf_name] = 1 + 0.1 * noise if len(part.shape) == 1 else 0.3 * noise
    fill(model, read)
    return model
