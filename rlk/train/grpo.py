"""GRPO: advantages within a group of samples, and the loss of one packed micro-batch.

Formulas: Shao et al. 2024, "DeepSeekMath", equations 3 and 4 (clipped surrogate, k3 KL estimator, mean over the tokens
of a response and then over responses). Legend: N samples, G groups, R scored tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

ADVANTAGE_EPS = 1e-6  # keeps a group whose rewards nearly agree from being blown up


def group_advantages(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray,
                     std_normalization: bool) -> np.ndarray:
    """Reward minus its group's mean, divided by the group's standard deviation if asked; float32 [N].

    A group whose valid rewards are all equal (one sample included) gets exactly 0, and so does an invalid sample.
    rewards_N float32, groups_N any integer id, valid_N bool (False: the reward failed, leave the sample out).
    """
    advantages_N = np.zeros(len(rewards_N), np.float32)
    for group in np.unique(groups_N):
        members = np.flatnonzero((groups_N == group) & valid_N)
        rewards = rewards_N[members].astype(np.float64)
        if len(members) == 0 or np.all(rewards == rewards[0]):
            continue
        centred = rewards - rewards.mean()
        if std_normalization:
            centred /= rewards.std(ddof=1) + ADVANTAGE_EPS
        advantages_N[members] = centred
    return advantages_N


def sample_weights(lengths_N: np.ndarray, use_N: np.ndarray) -> np.ndarray:
    """Each token's weight in the loss by sample, float32 [N]: 1 / (response length x samples in use); 0 if unused.

    Summed over all tokens the weights give 1, or 0 when no sample is in use (every response masked).
    """
    in_use = max(int(use_N.sum()), 1)
    return np.where(use_N, 1.0 / (np.maximum(lengths_N, 1) * in_use), 0.0).astype(np.float32)


@dataclass
class LossTerms:
    """One micro-batch's sums, where it was computed; over micro-batches and ranks they give the batch's figures."""

    loss: torch.Tensor  # scalar FP32, differentiable
    kl: torch.Tensor  # scalar FP32: weighted sum of the k3 estimate
    clipped: torch.Tensor  # scalar int64: tokens whose ratio was clipped


def grpo_loss(logprob_R: torch.Tensor, old_logprob_R: torch.Tensor, reference_logprob_R: torch.Tensor | None,
              advantage_R: torch.Tensor, weight_R: torch.Tensor, clip_low: float, clip_high: float,
              kl_coef: float) -> LossTerms:
    """Clipped surrogate plus KL to the reference, weighted per token. All FP32 [R]; only logprob_R has a gradient."""
    # A weight of 0 silences a token before anything can overflow: 0 x inf would be NaN, in the gradient too.
    active_R = weight_R > 0
    ratio_R = torch.exp(torch.where(active_R, logprob_R - old_logprob_R, 0.0))
    clipped_R = ratio_R.clamp(1 - clip_low, 1 + clip_high)
    surrogate_R = torch.minimum(ratio_R * advantage_R, clipped_R * advantage_R)
    per_token_R = -surrogate_R
    kl = logprob_R.new_zeros(())
    if reference_logprob_R is not None:
        log_ratio_R = torch.where(active_R, reference_logprob_R - logprob_R, 0.0)
        kl_R = torch.exp(log_ratio_R) - log_ratio_R - 1  # k3: unbiased for KL(policy || reference), never negative
        per_token_R = per_token_R + kl_coef * kl_R
        kl = (kl_R.detach() * weight_R).sum()
    return LossTerms((per_token_R * weight_R).sum(), kl, (ratio_R != clipped_R).sum())
