"""The paged engine: stopping, prefix cache, checks of what it is given, and its work."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from rlk.errors import CheckFailed, UsageError
from rlk.model.weights import storage_checksum
from rlk.ops.registry import registry
from rlk.rollout.engine import Prompt, SamplingParams
from tests.engines import VALID_VOCAB, all_bytes, make_engine, make_prompts, response_by_prefill
from tests.models import random_model

NUCLEUS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=12, seed=5)


@pytest.fixture
def model():
    return random_model(seed=1)


def test_samples_come_in_the_order_of_the_prompts_with_a_uid_each(model):
    prompts = make_prompts(0, 7, 3)
    trajectories = make_engine(model).generate(prompts, 3, NUCLEUS)
    assert [t.uid for t in trajectories] == [(p.uid << 16) | i for p in prompts for i in range(3)]
    assert [t.prompt_uid for t in trajectories] == [100, 100, 100, 101, 101, 101]
    for trajectory, prompt in zip(trajectories, [p for p in prompts for _ in range(3)], strict=True):
        assert trajectory.prompt_tokens.tolist() == list(prompt.tokens)
        assert len(trajectory.tokens) == len(trajectory.logprobs) == len(trajectory.support_offsets) - 1 == 12
        assert trajectory.stop_reason == "length" and trajectory.policy_version == 0
        rows = itertools.pairwise(trajectory.support_offsets)
        for token, (start, end) in zip(trajectory.tokens, rows, strict=True):
            retained = trajectory.support_ids[start:end].tolist()
            assert token in retained and retained == sorted(set(retained)) and retained[-1] < VALID_VOCAB
    assert len({t.tokens.tobytes() for t in trajectories}) == 6, "every sample has its own noise"


def test_no_prompts_give_no_trajectories(model):
    assert make_engine(model).generate([], 4, NUCLEUS) == []


def test_an_id_without_a_token_is_never_sampled(model):
    """CASES 4: the head favours ids past the tokenizer."""
    model.parameters["lm_head"][300:] *= 20
    hot = SamplingParams(temperature=1.8, max_tokens=20)
    for sampling in (hot, SamplingParams(temperature=0.0, max_tokens=20), NUCLEUS):
        for trajectory in make_engine(model, valid_vocab=300).generate(
                [Prompt(1, (5, 6, 7)), Prompt(2, (8,))], 4, sampling):
            assert trajectory.tokens.max() < 300


def test_a_prompt_has_the_same_bits_cold_and_from_the_prefix_cache(model):
    """CASES 6."""
    engine, prompts = make_engine(model), make_prompts(2, 70)
    cold = engine.generate(prompts, 1, NUCLEUS)
    assert engine.work.shared == 0 and engine.work.prefilled == 70
    hit = engine.generate(prompts, 1, NUCLEUS)
    assert engine.work.shared == 64 and engine.work.prefilled == 6
    assert all_bytes(hit) == all_bytes(cold)


def test_the_prefix_cache_does_not_outlive_the_weights(model):
    engine, prompts = make_engine(model), make_prompts(2, 70)
    engine.generate(prompts, 1, NUCLEUS)
    model.storage.mul_(1.01)
    model.policy_version = 1
    after = engine.generate(prompts, 1, NUCLEUS)
    assert engine.work.shared == 0
    assert after[0].policy_version == 1
    assert all_bytes(after) == all_bytes(make_engine(model).generate(prompts, 1, NUCLEUS))


def test_the_samples_of_a_prompt_prefill_it_once(model):
    engine = make_engine(model, prefill_chunk=20)
    engine.generate(make_prompts(3, 100), 8, NUCLEUS)
    assert engine.work.prefilled == 100 + 7 * 4
    assert engine.work.shared == 7 * 96


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_response_ends_at_the_first_of_several_eos_ids(model, ignore_eos):
    """CASES 19."""
    prompts, free = make_prompts(4, 9, 5), SamplingParams(temperature=1.0, max_tokens=40)
    whole = make_engine(model).generate(prompts, 2, free)
    stops = (int(whole[0].tokens[17]), int(whole[1].tokens[8]))
    stopping = SamplingParams(temperature=1.0, max_tokens=40, stop_token_ids=stops, ignore_eos=ignore_eos)
    for trajectory, full in zip(make_engine(model).generate(prompts, 2, stopping), whole, strict=True):
        ends = np.flatnonzero(np.isin(full.tokens, stops))
        length = 40 if ignore_eos or not len(ends) else ends[0] + 1
        assert trajectory.tokens.tobytes() == full.tokens[:length].tobytes()
        assert trajectory.logprobs.tobytes() == full.logprobs[:length].tobytes()
        assert trajectory.stop_reason == ("length" if length == 40 and (ignore_eos or not len(ends)) else "eos")


def test_a_response_ends_at_the_last_position_of_the_model():
    model = random_model(seed=1, max_position=32)
    trajectory = make_engine(model).generate(make_prompts(5, 25), 1, SamplingParams(max_tokens=50))[0]
    assert len(trajectory.tokens) == 7 and trajectory.stop_reason == "length"


@pytest.mark.parametrize("tokens, message", [
    ((), "prompt 100 is empty"),
    (tuple(range(32)), "prompt 100 has 32 tokens, and the model 32 positions"),
    ((4, 495), f"prompt 100 has token ids from 4 to 495, expected 0 to {VALID_VOCAB - 1}"),
    ((4, -1), "prompt 100 has token ids from -1 to 4"),
    (tuple(range(21)), "prompt 100 with its response needs 8 KV pages of 4 tokens, and there are 7"),
])
def test_a_prompt_that_cannot_be_served_is_refused(tokens, message):
    engine = make_engine(random_model(seed=1, max_position=32), page_size=4, num_pages=7)
    with pytest.raises(UsageError, match=message):
        engine.generate([Prompt(99, (1, 2)), Prompt(100, tokens)], 2, SamplingParams(max_tokens=12))
    assert engine.pages.pool.available == 7


@pytest.mark.parametrize("name", ["page_size", "num_pages", "prefill_chunk", "max_running"])
def test_a_size_below_one_is_refused(model, name):
    with pytest.raises(UsageError, match=f"{name} is 0"):
        make_engine(model, **{name: 0})


def test_a_tokenizer_larger_than_the_model_is_refused(model):
    with pytest.raises(UsageError, match="501 tokens and the model 500"):
        make_engine(model, valid_vocab=501)


def test_weights_that_changed_after_they_were_stamped_are_refused(model):
    engine = make_engine(model)
    model.checksum = storage_checksum(model)
    engine.generate(make_prompts(6, 4), 1, NUCLEUS)
    model.storage[1000] += 1
    with pytest.raises(CheckFailed, match="checksum"):
        engine.generate(make_prompts(6, 4), 1, NUCLEUS)


def test_a_failed_step_leaves_nothing_behind(model, monkeypatch):
    engine, prompts = make_engine(model), make_prompts(7, 40, 50)
    expected = all_bytes(make_engine(model).generate(prompts, 2, NUCLEUS))

    def fail(*_):
        raise CheckFailed("a peer is gone")

    with monkeypatch.context() as broken, pytest.raises(CheckFailed, match="a peer is gone"):
        broken.setattr(engine.runner, "logits", fail)
        engine.generate(prompts, 2, NUCLEUS)
    assert engine.pages.pool.available == 512
    assert all_bytes(engine.generate(prompts, 2, NUCLEUS)) == expected


def test_pages_that_a_failed_step_was_to_write_are_not_shared(model, monkeypatch):
    engine, prompts = make_engine(model, prefill_chunk=32), make_prompts(7, 70)
    expected = all_bytes(make_engine(model).generate(prompts, 1, NUCLEUS))
    real, calls = engine.runner.hidden, []

    def fail_in_the_second_chunk(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise CheckFailed("a peer is gone")  # nothing of this chunk is in its pages, which are registered already
        return real(batch)

    with monkeypatch.context() as broken, pytest.raises(CheckFailed, match="a peer is gone"):
        broken.setattr(engine.runner, "hidden", fail_in_the_second_chunk)
        engine.generate(prompts, 1, NUCLEUS)
    assert all_bytes(engine.generate(prompts, 1, NUCLEUS)) == expected
    assert engine.work.shared == 0


def test_generating_records_no_gradient(model):
    model.enable_training()
    engine = make_engine(model)
    trajectory = engine.generate(make_prompts(8, 6), 1, NUCLEUS)[0]
    response_by_prefill(engine, trajectory, NUCLEUS)
    assert torch.is_grad_enabled() and not model.grads.any()


def test_the_native_operators_serve_the_same_engine(model):
    prompts, greedy = make_prompts(9, 30, 5, 12), SamplingParams(temperature=0.0, max_tokens=8)
    expected = make_engine(model).generate(prompts, 2, greedy)
    registry.set_mode("native")
    try:
        native = make_engine(model).generate(prompts, 2, greedy)
        for sampling in (greedy, NUCLEUS):
            engine = make_engine(model, page_size=4, prefill_chunk=7)
            for trajectory in engine.generate(prompts, 2, sampling):
                scored = response_by_prefill(engine, trajectory, sampling)
                np.testing.assert_allclose(scored, trajectory.logprobs, atol=1e-3)
    finally:
        registry.set_mode("consistency")
    for ours, theirs in zip(expected, native, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-3)
