"""Drawing the next token, and the log-prob it was drawn with.

The rule, in vLLM's order, on x = logit / temperature in FP32 with ids >= valid_vocab left out:
    min-p   keep x - max >= ln(min_p), that is exp(x - max) >= min_p
    top-k   drop x below the k-th largest value; ties with it stay
    top-p   sort what is left ascending by (value, id); softmax; cumulative sum in double, rounded to FP32 at each step
            (torch.cumsum's rule on a CPU); drop while it is <= 1 - top_p; the last always stays
The retained set is complete (no cap) and its log-prob is ops.logprob's, over exactly that set. The token is drawn by
inverse CDF over the retained ids, ascending, with one uniform number that depends on (seed, sample uid, position) and
on nothing else. Temperature 0 takes the largest logit, the lowest id of a tie.

Shape legend: B sequences, V vocabulary (padded), N entries of the retained sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlk.errors import CheckFailed
from rlk.ops.cpu_library import FLOAT, LONG, POINTER, function, ptr
from rlk.ops.cumulative_sum import cumulative_sum
from rlk.ops.logprob import ScoreRule, score_logits
from rlk.ops.registry import EVERYWHERE, registry
from rlk.rollout.engine import SamplingParams


@dataclass(frozen=True)
class SampleResult:
    """One token per sequence, with the log-prob that training has to recompute."""

    tokens: torch.Tensor  # int64 [B]
    logprobs: torch.Tensor  # FP32 [B]
    support_offsets: torch.Tensor | None  # int64 [B+1], CSR over support_ids; None: the whole vocabulary
    support_ids: torch.Tensor | None  # int32 [N], ascending within a sequence


def sample(logits_BV: torch.Tensor, params: SamplingParams, uids_B: torch.Tensor, positions_B: torch.Tensor,
           valid_vocab: int) -> SampleResult:
    """Draw one token per row of full FP32 logits. `uids_B` and `positions_B` (int64) key the noise of each row.

    `positions_B` is the absolute position that the new token will have. Raises CheckFailed for a row with a NaN, a
    +inf, or no finite logit.
    """
    if uids_B.dtype != torch.int64 or positions_B.dtype != torch.int64 or not 0 < valid_vocab <= logits_BV.shape[1]:
        raise ValueError(f"got {uids_B.dtype} uids, {positions_B.dtype} positions and {valid_vocab} valid ids over "
                         f"{logits_BV.shape[1]} logits, expected int64, int64 and 1 to all of the ids")
    tokens, support = registry.call("draw", logits_BV, logits_BV, params, uids_B, positions_B, valid_vocab)
    if tokens.numel() and int(tokens.min()) < 0:
        row = int((tokens < 0).nonzero()[0])
        raise CheckFailed(f"the logits of row {row} (sample uid {int(uids_B[row])}, position {int(positions_B[row])}) "
                          "hold a NaN, a +inf or nothing finite, expected finite numbers; the weights or the "
                          "activations overflowed")
    rule = ScoreRule(params.score_temperature, valid_vocab, support)
    logprobs, _ = score_logits(logits_BV, tokens, rule)
    return SampleResult(tokens, logprobs, *(support or (None, None)))


# ---- the noise ----

LOW_WORD = 0xFFFFFFFF


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., SC 2011): counters uint32 [n, 4], key uint32 [2] -> random words uint32 [n, 4].

    The readable twin of hipkernels/philox.h.
    """
    c0, c1, c2, c3 = counter.T.astype(np.uint64)  # 64 bits, because products of two words are split into words
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (b >> 32) ^ c1 ^ np.uint64(k0), (a >> 32) ^ c3 ^ np.uint64(k1)
        c1, c3 = b & LOW_WORD, a & LOW_WORD
        k0, k1 = (k0 + 0x9E3779B9) & LOW_WORD, (k1 + 0xBB67AE85) & LOW_WORD
    return np.stack([c0, c1, c2, c3], 1).astype(np.uint32)


def philox_uniform(seed: int, uids_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) per (seed, uid, position), float64 [B]: 53 bits under counter (position, uid, 0)."""
    uids, positions = (t.cpu().numpy().astype(np.uint64) for t in (uids_B, positions_B))
    counter = np.stack([positions & LOW_WORD, uids & LOW_WORD, uids >> 32, np.zeros_like(uids)], 1)
    words = philox4x32(counter, np.array([seed & LOW_WORD, seed >> 32 & LOW_WORD])).astype(np.uint64)
    return torch.from_numpy((words[:, 0] >> 5 << 26 | words[:, 1] >> 6) * 2.0**-53).to(uids_B.device)


# ---- backend "cpu": hipkernels/cpu/sampler.cpp ----

_argmax = function("rlk_argmax", POINTER, LONG, LONG, LONG, POINTER)
_retained_cut = function("rlk_retained_cut", POINTER, LONG, LONG, LONG, FLOAT, FLOAT, LONG, FLOAT, POINTER, POINTER)
_draw = function("rlk_draw", POINTER, LONG, LONG, LONG, FLOAT, LONG, POINTER, POINTER, POINTER, POINTER, POINTER,
                 POINTER)


@registry.register("draw", "cpu", contract=True, dtypes=(torch.float32,))
def draw_cpu(logits_BV, params, uids_B, positions_B, valid_vocab):
    tokens = torch.empty_like(uids_B)
    rows = (ptr(logits_BV), *logits_BV.shape, valid_vocab)
    if params.greedy:
        _argmax(*rows, ptr(tokens))
        return tokens, None
    inv_temperature = 1.0 / params.temperature
    cuts = offsets = ids_N = None
    if not params.full_vocabulary:
        cuts = torch.empty_like(uids_B)
        offsets = uids_B.new_zeros(uids_B.numel() + 1)
        _retained_cut(*rows, inv_temperature, params.top_p, params.top_k, params.min_p, ptr(cuts), ptr(offsets[1:]))
        torch.cumsum(offsets, 0, out=offsets)
        ids_N = torch.empty(int(offsets[-1]), dtype=torch.int32)
    _draw(*rows, inv_temperature, params.seed, ptr(uids_B), ptr(positions_B), ptr(cuts), ptr(offsets), ptr(ids_N),
          ptr(tokens))
    return tokens, None if ids_N is None else (offsets, ids_N)


# ---- backend "reference": plain PyTorch as vLLM does it; the oracle, and the native arm's code ----


@registry.register("draw", "reference", contract=False, devices=EVERYWHERE)
def draw_reference(logits_BV, params, uids_B, positions_B, valid_vocab):
    """(tokens int64 [B], support | None); a token is -1 where the row's logits hold a NaN, a +inf or nothing finite."""
    logits = logits_BV[:, :valid_vocab]
    top = logits.amax(-1)
    if params.greedy:
        return logits.argmax(-1).where(top.isfinite(), -1), None
    x = logits / params.temperature
    support = None
    if not params.full_vocabulary:
        x = _retain(x, params)
        kept = x > -torch.inf
        offsets = torch.nn.functional.pad(kept.sum(-1).cumsum(0), (1, 0))
        support = offsets, kept.nonzero()[:, 1].to(torch.int32)
    cdf = x.softmax(-1).double().cumsum(-1)
    uniforms = philox_uniform(params.seed, uids_B, positions_B)
    tokens = torch.searchsorted(cdf, (uniforms * cdf[:, -1]).unsqueeze(1), right=True)[:, 0]
    return tokens.where(top.isfinite(), -1), support


def _retain(x_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """x with minus infinity for every id outside the retained set."""
    if params.min_p > 0:
        probs = x_BV.softmax(-1)
        x_BV = x_BV.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if params.top_k == 0 and params.top_p >= 1:
        return x_BV
    ascending, order = x_BV.sort(dim=-1, stable=True)
    if 0 < params.top_k < x_BV.shape[1]:
        ascending = ascending.masked_fill(ascending < ascending[:, -params.top_k, None], -torch.inf)
    if params.top_p < 1:
        drop = cumulative_sum(ascending.softmax(-1)) <= 1 - torch.tensor(params.top_p)
        drop[:, -1] = False
        ascending = ascending.masked_fill(drop, -torch.inf)
    return torch.empty_like(x_BV).scatter_(-1, order, ascending)
