"""One response in the making: its tokens so far, and how many of them are in the KV cache.

Shape legend: P prompt tokens, R response tokens.
"""

from __future__ import annotations

import hashlib

import numpy as np

from rlk.rollout.engine import SamplingParams, Trajectory


class Sequence:
    """A prompt and what was sampled after it.

    `tokens` has room for the whole response; the first `length` are known and the first `computed` of those are in the
    KV cache. A sequence that lost its pages has computed = 0 and keeps what it sampled.
    """

    __slots__ = ("uid", "tokens", "logprobs", "supports", "prompt_length", "length", "limit", "computed", "lane",
                 "pages", "digests", "stop_reason")

    def __init__(self, uid: int, prompt: np.ndarray, max_tokens: int) -> None:
        self.uid = uid  # of the sample (rlk.rollout.engine)
        self.prompt_length = self.length = len(prompt)
        self.limit = len(prompt) + max_tokens  # tokens, the prompt included
        self.tokens = np.empty(self.limit, np.int32)
        self.tokens[:len(prompt)] = prompt
        self.logprobs = np.empty(max_tokens, np.float32)
        self.supports: list[np.ndarray] = []  # one int32 array of retained ids per response token
        self.computed = 0
        self.lane = -1  # row of the block table while running
        self.pages: list[int] = []
        self.digests: list[bytes] = []  # of the whole pages of known tokens, as far as they were asked for
        self.stop_reason = ""

    def page_digests(self, page_size: int) -> list[bytes]:
        """A digest for each whole page of known tokens; it covers that page's tokens and all before them."""
        digests = self.digests
        while len(digests) < self.length // page_size:
            start = len(digests) * page_size
            before = digests[-1] if digests else b""
            page = self.tokens[start:start + page_size].tobytes()
            digests.append(hashlib.blake2b(before + page, digest_size=16).digest())
        return digests

    def append(self, token: int, logprob: np.float32, support: np.ndarray | None, stops: frozenset[int]) -> bool:
        """Take one sampled token; returns True, with `stop_reason` set, when it was the last."""
        self.tokens[self.length] = token
        self.logprobs[self.length - self.prompt_length] = logprob
        if support is not None:
            self.supports.append(support)
        self.length += 1
        if token in stops:
            self.stop_reason = "eos"
        elif self.length == self.limit:
            self.stop_reason = "length"
        return self.stop_reason != ""

    def trajectory(self, sampling: SamplingParams, policy_version: int) -> Trajectory:
        """The finished response as training takes it."""
        offsets = ids = None
        if not sampling.full_vocabulary:
            offsets = np.zeros(len(self.supports) + 1, np.int64)
            np.cumsum([len(support) for support in self.supports], out=offsets[1:])
            ids = np.concatenate(self.supports)
        return Trajectory(
            uid=self.uid,
            prompt_tokens=self.tokens[:self.prompt_length].copy(),
            tokens=self.tokens[self.prompt_length:self.length].copy(),
            logprobs=self.logprobs[:self.length - self.prompt_length].copy(),
            support_offsets=offsets, support_ids=ids,
            stop_reason=self.stop_reason, policy_version=policy_version,
        )
