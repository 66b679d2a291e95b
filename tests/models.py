"""Small random models for the tests."""

from __future__ import annotations

import torch

from rlk.collectives import Communicator
from rlk.model.config import ModelConfig
from rlk.model.qwen3 import Part, Qwen3
from rlk.model.weights import fill

TINY_SHAPE = dict(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
                  vocab_size=500, max_position=2048, rope_theta=1e4, eos_token_ids=(1, 2))


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
