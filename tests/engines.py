"""Paged engines over small random models, and comparison of what they generate, for the tests."""

from __future__ import annotations

import numpy as np

from rlk.model.qwen3 import Qwen3
from rlk.rollout.engine import Prompt, SamplingParams, Trajectory
from rlk.rollout.paged.engine import PagedEngine

VALID_VOCAB = 490  # of the tiny model's 500: the last ids do not exist


def make_engine(model: Qwen3, **sizes) -> PagedEngine:
    """A roomy engine; keywords replace its sizes."""
    roomy = dict(valid_vocab=VALID_VOCAB, page_size=16, num_pages=512, prefill_chunk=512, max_running=64)
    return PagedEngine(model, **(roomy | sizes))


def make_prompts(seed: int, *lengths: int, shared: int = 0) -> list[Prompt]:
    """Random prompts of the given lengths; their first `shared` tokens are the same. Their uids start at 100."""
    random = np.random.default_rng(seed)
    head = random.integers(0, VALID_VOCAB, shared).tolist()
    return [Prompt(100 + i, tuple(head + random.integers(0, VALID_VOCAB, length - shared).tolist()))
            for i, length in enumerate(lengths)]


def trajectory_bytes(trajectory: Trajectory) -> tuple:
    """Everything that must not depend on how the engine went about it; arrays as bytes."""
    arrays = (trajectory.prompt_tokens, trajectory.tokens, trajectory.logprobs, trajectory.support_offsets,
              trajectory.support_ids)
    return trajectory.uid, trajectory.stop_reason, *(None if a is None else (a.dtype.str, a.tobytes()) for a in arrays)


def all_bytes(trajectories: list[Trajectory]) -> list[tuple]:
    return [trajectory_bytes(trajectory) for trajectory in trajectories]


def response_by_prefill(engine: PagedEngine, trajectory: Trajectory, sampling: SamplingParams) -> np.ndarray:
    """The engine's prefill log-probs of a response. A prompt token's retained set is taken to be that token alone."""
    prompt, response = trajectory.prompt_tokens, trajectory.tokens
    support = None
    if trajectory.support_offsets is not None:
        offsets = np.concatenate([np.arange(len(prompt) - 1), len(prompt) - 1 + trajectory.support_offsets])
        support = offsets, np.concatenate([prompt[1:], trajectory.support_ids])
    return engine.prefill_score(np.concatenate([prompt, response]), sampling, support)[len(prompt) - 1:]
