"""What a rollout engine is: the protocol, and the types that cross it.

Shape legend: R response tokens of one sample, N entries of its retained set over all its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

SAMPLE_BITS = 16  # a sample's uid is (prompt uid << SAMPLE_BITS) | sample index
GREEDY = 0.0  # temperature 0: argmax (lowest id wins a tie), scored at temperature 1 over the whole vocabulary


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn. The order is vLLM's: temperature, min-p, top-k, top-p."""

    temperature: float = 1.0
    top_p: float = 1.0  # in (0, 1]; 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # in [0, 1]; 0 is off
    max_tokens: int = 16  # response length cap, tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # benchmarks: every response runs to max_tokens
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, expected in (("temperature", self.temperature >= 0, "at least 0"),
                                     ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
                                     ("top_k", self.top_k >= 0, "at least 0"),
                                     ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
                                     ("max_tokens", self.max_tokens >= 1, "at least 1")):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == GREEDY

    @property
    def score_temperature(self) -> float:
        """The temperature at which log-probs are taken: the sampling temperature, or 1 when greedy."""
        return 1.0 if self.greedy else self.temperature

    @property
    def full_vocabulary(self) -> bool:
        """True when log-probs are over the whole vocabulary, so that no retained set travels."""
        return self.greedy or (self.top_p >= 1 and self.top_k == 0 and self.min_p == 0)


@dataclass(frozen=True)
class Prompt:
    """One prompt. `uid` is unique within the run; sample i of it has uid `(uid << SAMPLE_BITS) | i`."""

    uid: int
    tokens: tuple[int, ...]


@dataclass
class Trajectory:
    """One sampled response with everything that training may use of it."""

    uid: int  # of the sample; keys the sampling noise, with the position
    prompt_tokens: np.ndarray  # int32 [P]
    tokens: np.ndarray  # int32 [R], the EOS included
    logprobs: np.ndarray  # float32 [R]; for the audit only
    support_offsets: np.ndarray | None  # int64 [R+1], CSR over support_ids; None: the whole vocabulary
    support_ids: np.ndarray | None  # int32 [N], ascending within a token
    stop_reason: str  # "eos" or "length"
    policy_version: int

    @property
    def prompt_uid(self) -> int:
        return self.uid >> SAMPLE_BITS


class Engine(Protocol):
    """A group of rollout_tp ranks that generates. Every rank of the group makes the same calls in the same order."""

    policy_version: int

    def generate(self, prompts: list[Prompt], n: int, sampling: SamplingParams) -> list[Trajectory]:
        """n samples of each prompt; sample i of prompt p is at index p * n + i on every rank of the group."""

    def prefill_score(self, tokens: np.ndarray, sampling: SamplingParams,
                      support: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
        """Log-prob of tokens[1:] given what precedes each, float32 [len(tokens) - 1], by prefill.

        `support` is a CSR (offsets int64 [len(tokens)], ids int32) over tokens[1:], or None for the whole vocabulary.
        """
