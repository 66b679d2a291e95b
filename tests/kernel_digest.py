"""SHA-256 of what the CPU kernels give on fixed inputs; `python -m tests.kernel_digest` prints it.

The tests run it under other instruction sets (RLK_CPU_ISA): a process can choose one only before it loads the kernels.
"""

from __future__ import annotations

import hashlib

import torch

from rlk.collectives import LocalCommunicator
from rlk.ops import embedding, gemm, norm, rope, swiglu
from rlk.ops.logprob import ScoreRule, score
from rlk.rollout.engine import SamplingParams
from rlk.train.optimizer import ShardedAdamW
from rlk.train.packing import PackContext, make_pack
from tests.engines import VALID_VOCAB, make_engine, make_prompts
from tests.models import random_model

SHAPES = [(1, 24, 64), (3, 50, 37), (7, 16, 40), (70, 33, 600), (200, 47, 72)]  # tokens, outputs, inputs


def raw(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def outputs(dtype: torch.dtype):
    """Every tensor that the operators give, forward and backward."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    for M, N, K in SHAPES:
        x, w, dy, grad = draw(M, K).to(dtype), draw(N, K).to(dtype), draw(M, N).to(dtype), draw(N, K)
        yield gemm.linear(x, w)
        yield gemm.linear_fp32(x, w)
        yield gemm.gemm_dx(dy, w)
        gemm.gemm_dw(dy, x, grad)
        yield grad
    yield gemm.linear_leaves(draw(9, 64).to(dtype), draw(20, 64).to(dtype), 4)

    T, D = 33, 50
    x, w, partial, dy, grad = draw(T, D).to(dtype), draw(D).to(dtype), draw(T, D), draw(T, D).to(dtype), draw(D)
    yield from norm.add_rms_norm_cpu(partial, x, w, 1e-6)
    yield norm.rms_norm_backward_cpu(dy, x, x, w, 1e-6, grad)
    yield grad
    heads, w, grad = draw(T, 3, 16).to(dtype), draw(16).to(dtype), draw(16)
    cos, sin = (table[:T] for table in rope.rope_table(64, 16, 10000.0))
    yield norm.qk_norm_rope_cpu(heads, w, cos, sin, 1e-6)
    yield norm.qk_norm_rope_backward_cpu(heads.flip(0), heads, w, cos, sin, 1e-6, grad)
    yield grad
    gate_up = draw(T, 2 * D).to(dtype) * 20
    yield swiglu.swiglu_cpu(gate_up)
    yield swiglu.swiglu_backward_cpu(dy, gate_up)
    tokens, table, grad = torch.arange(T) * 5 % 12, draw(8, D).to(dtype), draw(8, D)
    yield embedding.embedding_cpu(tokens, table, 2)
    embedding.embedding_backward_cpu(dy, tokens, grad, 2)
    yield grad


def whole_step(dtype: torch.dtype):
    """Samples, recomputed log-probs, gradients and new weights of a small model: the kernels that `outputs` leaves out.

    Contexts beyond 512 keys make attention merge chunks.
    """
    model, alone = random_model(5, dtype), LocalCommunicator()
    model.enable_training()
    optimizer = ShardedAdamW(model, alone, alone, lr=1e-2, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1,
                             grad_clip=1.0)
    for sampling in (SamplingParams(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, max_tokens=6, seed=1),
                     SamplingParams(max_tokens=6, seed=1)):
        with torch.no_grad():
            trajectories = make_engine(model).generate(make_prompts(3, 7, 530), 2, sampling)
        pack = make_pack(trajectories, list(range(len(trajectories))), 1, 0)
        hidden_RD = model.hidden(pack.tokens_T, PackContext(pack, alone))[pack.rows_R]
        rule = ScoreRule(sampling.temperature, VALID_VOCAB, pack.support)
        logprob_R, entropy_R = score(hidden_RD, model.parameters["lm_head"], pack.targets_R, rule, alone)
        yield from (torch.from_numpy(t.logprobs) for t in trajectories)
        yield from (pack.targets_R, logprob_R.detach(), entropy_R.detach())
        logprob_R.sum().backward()
        yield model.grads
        optimizer.step()
        yield model.storage.detach()


def digest() -> str:
    sha = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for tensors in (outputs(dtype), whole_step(dtype)):
            for tensor in tensors:
                sha.update(raw(tensor))
    return sha.hexdigest()


if __name__ == "__main__":
    print(digest())
