"""Advantages and the loss: the formulas, and the groups and batches that break them (CASES 17, 18)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.train.grpo import group_advantages, grpo_loss, sample_weights

rewards = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=16)


@given(rewards, st.booleans())
@settings(deadline=None, max_examples=50)
def test_a_group_whose_rewards_agree_has_advantage_exactly_zero(values, normalize):
    same = np.full(len(values), values[0], np.float32)
    advantages = group_advantages(same, np.zeros(len(same), int), np.ones(len(same), bool), normalize)
    assert advantages.tobytes() == np.zeros(len(same), np.float32).tobytes()


@given(rewards)
@settings(deadline=None, max_examples=50)
def test_advantages_are_centred_and_keep_the_order_of_rewards(values):
    values = np.array(values, np.float32)
    advantages = group_advantages(values, np.zeros(len(values), int), np.ones(len(values), bool), True)
    assert abs(advantages.sum(dtype=np.float64)) < 1e-4
    order = np.argsort(values, kind="stable")
    assert np.all(np.diff(advantages[order]) >= 0)


def test_std_normalization_agrees_with_float64():
    values = np.array([0.0, 1.0, 1.0, 0.25], np.float32)
    advantages = group_advantages(values, np.zeros(4, int), np.ones(4, bool), True)
    expected = (values.astype(np.float64) - values.mean()) / np.std(values.astype(np.float64), ddof=1)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_groups_do_not_mix_and_failed_rewards_count_for_nothing():
    values = np.array([1, 0, 7, 5, 3], np.float32)
    groups = np.array([4, 4, 4, 9, 9])
    valid = np.array([True, True, False, True, True])
    advantages = group_advantages(values, groups, valid, False)
    np.testing.assert_array_equal(advantages, np.array([0.5, -0.5, 0.0, 1.0, -1.0], np.float32))


def test_token_weights_sum_to_one_over_the_samples_in_use():
    lengths = np.array([3, 5, 8])
    weights = sample_weights(lengths, np.array([True, False, True]))
    assert weights[1] == 0
    assert (weights * lengths).sum() == pytest.approx(1.0)


def test_a_batch_of_masked_responses_has_loss_zero_and_no_nan():
    weights = sample_weights(np.array([4, 4]), np.array([False, False]))
    assert not weights.any()
    logprob = torch.randn(8, requires_grad=True)
    # A masked token may be arbitrarily far from the reference: its term overflows and must still not count.
    terms = grpo_loss(logprob, logprob.detach() - 200, torch.full((8,), 200.0), torch.ones(8), torch.zeros(8), 0.2, 0.2,
                      0.1)
    terms.loss.backward()
    assert float(terms.loss.detach()) == 0.0
    assert torch.equal(logprob.grad, torch.zeros(8))


def test_on_policy_gradient_is_minus_weighted_advantage():
    logprob = torch.randn(6, requires_grad=True)
    advantage, weight = torch.randn(6), torch.rand(6)
    grpo_loss(logprob, logprob.detach(), None, advantage, weight, 0.2, 0.2, 0.0).loss.backward()
    torch.testing.assert_close(logprob.grad, -advantage * weight)


def test_the_ratio_is_clipped_on_the_side_that_the_advantage_pushes():
    old = torch.zeros(4)
    logprob = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    terms = grpo_loss(logprob, old, None, torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.ones(4), 0.2, 0.2, 0.0)
    terms.loss.backward()
    assert terms.clipped == 4
    assert (logprob.grad != 0).tolist() == [False, True, True, False]


def test_kl_is_the_k3_estimate_against_float64():
    logprob, reference = torch.randn(50, requires_grad=True), torch.randn(50)
    terms = grpo_loss(logprob, logprob.detach(), reference, torch.zeros(50), torch.full((50,), 0.02), 0.2, 0.2, 0.3)
    delta = (reference - logprob.detach()).double()
    expected = (delta.exp() - delta - 1).mean()
    assert terms.kl == pytest.approx(float(expected), rel=1e-5)
    assert float(terms.loss.detach()) == pytest.approx(0.3 * float(expected), rel=1e-5)
