"""The paged rollout engine: generates with the very weights that training trains.

Shape legend: T tokens, B sequences that sample, V padded vocabulary.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from rlk.errors import CheckFailed, UsageError
from rlk.model.qwen3 import Qwen3
from rlk.model.weights import storage_checksum
from rlk.ops.logprob import ScoreRule, score_logits
from rlk.ops.sampler import sample
from rlk.rollout.engine import SAMPLE_BITS, Prompt, SamplingParams, Trajectory
from rlk.rollout.paged.kv_cache import PageTable
from rlk.rollout.paged.runner import Runner
from rlk.rollout.paged.scheduler import Scheduler, Work, sampling_rows
from rlk.rollout.paged.sequence import Sequence


class PagedEngine:
    """Continuous batching over a paged KV cache; implements rlk.rollout.engine.Engine.

    One instance per rank of the model's tensor-parallel group. A response's tokens and log-prob bits depend on the
    weights, its prompt, its uid and the sampling parameters alone: not on the sizes given here, nor on its neighbours.

    valid_vocab    len(tokenizer): ids from here on are never sampled
    page_size      tokens of a KV page
    num_pages      KV pages of this rank
    prefill_chunk  most prompt tokens in one step
    max_running    most sequences in one step
    """

    def __init__(self, model: Qwen3, *, valid_vocab: int, page_size: int, num_pages: int, prefill_chunk: int,
                 max_running: int) -> None:
        for name, value in (("page_size", page_size), ("num_pages", num_pages), ("prefill_chunk", prefill_chunk),
                            ("max_running", max_running)):
            if value < 1:
                raise UsageError(f"{name} is {value}, expected at least 1")
        if not 1 <= valid_vocab <= model.config.vocab_size:
            raise UsageError(f"the tokenizer has {valid_vocab} tokens and the model {model.config.vocab_size}; "
                             "use the tokenizer that belongs to the model")
        self.model = model
        self.valid_vocab = valid_vocab
        self.num_pages, self.prefill_chunk, self.max_running = num_pages, prefill_chunk, max_running
        longest = min(model.config.max_position, num_pages * page_size)
        self.pages = PageTable(num_pages, page_size, max_running, longest)
        self.runner = Runner(model, self.pages)
        self.work = Work()  # of the latest generate()
        self._cached_version = model.policy_version

    @property
    def policy_version(self) -> int:
        return self.model.policy_version

    @torch.no_grad()
    def generate(self, prompts: list[Prompt], n: int, sampling: SamplingParams) -> list[Trajectory]:
        """n samples of each prompt; sample i of prompt p is at index p * n + i.

        Raises UsageError for a prompt that cannot be served, CheckFailed if the weights are not those that were
        stamped when the trainer's were copied here.
        """
        self._check_weights()
        sequences = [self._new_sequence((prompt.uid << SAMPLE_BITS) | i, prompt.tokens, sampling.max_tokens)
                     for prompt in prompts for i in range(n)]
        scheduler = Scheduler(self.pages, self.prefill_chunk, self.max_running, sequences)
        stops = frozenset(() if sampling.ignore_eos else sampling.stop_token_ids)
        try:
            while scheduler.unfinished:
                self._step(scheduler, sampling, stops)
        except BaseException:
            scheduler.abandon()
            raise
        self.work = scheduler.work
        return [sequence.trajectory(sampling, self.policy_version) for sequence in sequences]

    @torch.no_grad()
    def prefill_score(self, tokens: np.ndarray, sampling: SamplingParams,
                      support: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
        """Log-prob of tokens[1:] given what precedes each, float32 [T - 1]; see rlk.rollout.engine.Engine."""
        self._check_weights()
        sequence = self._new_sequence(0, tokens[:-1], 1)
        self.pages.admit(sequence, share=False)
        try:
            scores = []
            for start in range(0, sequence.length, self.prefill_chunk):
                end = min(start + self.prefill_chunk, sequence.length)
                hidden_TD = self.runner.hidden([(sequence, end - start)])
                sequence.computed = end
                device = hidden_TD.device
                rows = support and tuple(part.to(device) for part in _support_rows(*support, start, end))
                rule = ScoreRule(sampling.score_temperature, self.valid_vocab, rows)
                targets_T = torch.from_numpy(np.asarray(tokens[start + 1:end + 1], np.int64)).to(device)
                scores.append(score_logits(self.model.logits(hidden_TD), targets_T, rule)[0].cpu().numpy())
            return np.concatenate(scores)
        finally:
            self.pages.release(sequence)

    def _step(self, scheduler: Scheduler, sampling: SamplingParams, stops: frozenset[int]) -> None:
        """One forward pass and, where a sequence's last known token was in it, the next token."""
        batch = scheduler.schedule()
        sequences, rows = sampling_rows(batch)
        hidden_TD = self.runner.hidden(batch)
        finished = []
        if sequences:
            finished = self._sample(sequences, self.runner.logits(hidden_TD, rows), sampling, stops)
        scheduler.commit(batch, finished)

    def _check_weights(self) -> None:
        """Drop what was cached under other weights; stop if a copy of the trainer's weights has changed since."""
        if self._cached_version != self.policy_version:
            self.pages.pool.forget()
            self._cached_version = self.policy_version
        if self.model.checksum is not None and (found := storage_checksum(self.model)) != self.model.checksum:
            raise CheckFailed(f"the engine's weights at policy version {self.policy_version} have checksum {found}, "
                              f"expected {self.model.checksum}: something wrote to them after they were copied")

    def _new_sequence(self, uid: int, prompt: np.ndarray | tuple[int, ...], max_tokens: int) -> Sequence:
        """A sequence that is certain to finish: the response ends at the model's last position, and all fits."""
        tokens = np.asarray(prompt, np.int32)
        name, most = f"prompt {uid >> SAMPLE_BITS}", self.model.config.max_position
        if not len(tokens):
            raise UsageError(f"{name} is empty, expected at least one token")
        if len(tokens) >= most:
            raise UsageError(f"{name} has {len(tokens)} tokens, and the model {most} positions, of which the response "
                             "needs at least one; shorten the prompt")
        if tokens.min() < 0 or tokens.max() >= self.valid_vocab:
            raise UsageError(f"{name} has token ids from {tokens.min()} to {tokens.max()}, expected 0 to "
                             f"{self.valid_vocab - 1}; use the tokenizer that belongs to the model")
        sequence = Sequence(uid, tokens, min(max_tokens, most - len(tokens)))
        needed = self.pages.pages_for(sequence.limit - 1)  # the last token sampled is never computed
        if needed > self.num_pages:
            raise UsageError(f"{name} with its response needs {needed} KV pages of {self.pages.page_size} tokens, and "
                             f"there are {self.num_pages}; raise --memory-fraction or lower --max-response-len")
        return sequence

    def _sample(self, sequences: list[Sequence], logits_BV: torch.Tensor, sampling: SamplingParams,
                stops: frozenset[int]) -> list[Sequence]:
        """Append one token to each of the sequences; returns those that ended."""
        device = logits_BV.device
        uids_B = torch.tensor([sequence.uid for sequence in sequences], device=device)
        positions_B = torch.tensor([sequence.length for sequence in sequences], device=device)
        drawn = sample(logits_BV, sampling, uids_B, positions_B, self.valid_vocab)
        supports = [None] * len(sequences)
        if drawn.support_ids is not None:
            ids, ends = drawn.support_ids.cpu().numpy(), drawn.support_offsets.tolist()
            supports = [ids[start:end] for start, end in itertools.pairwise(ends)]
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.cpu().numpy()
        return [sequence for sequence, *step in zip(sequences, tokens, logprobs, supports, strict=True)
                if sequence.append(*step, stops)]


def _support_rows(offsets: np.ndarray, ids: np.ndarray, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows start..end of a CSR, as a CSR of their own."""
    first, last = int(offsets[start]), int(offsets[end])
    return torch.from_numpy(offsets[start:end + 1] - first), torch.from_numpy(ids[first:last])
