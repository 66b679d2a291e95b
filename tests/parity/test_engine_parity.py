"""Engine prefill = engine decode = training forward, in bytes, however the engine goes about it.

The property test draws sampling parameters, dtype, page size, prefill chunk, batch width and page count; few pages
force preemption. Each response is compared with the same sample generated alone in a roomy engine.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.collectives import Communicator, LocalCommunicator
from rlk.collectives.factory import make_communicator
from rlk.ops.logprob import ScoreRule, score
from rlk.rollout.engine import Prompt, SamplingParams
from rlk.train.packing import PackContext, make_pack
from tests.engines import VALID_VOCAB, all_bytes, make_engine, make_prompts, response_by_prefill
from tests.models import random_model
from tests.spawn import run_ranks

DTYPES = [torch.float32, torch.bfloat16]
SAMPLINGS = [
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_tokens=16, seed=3)
    for temperature, top_p, top_k, min_p in [
        (0.0, 1.0, 0, 0.0), (1.0, 1.0, 0, 0.0), (0.7, 0.95, 0, 0.0), (1.8, 0.5, 20, 0.0), (1.0, 1e-6, 0, 0.0),
        (0.2, 1.0, 1, 0.0), (1.8, 1.0, 0, 0.05),
    ]
]

samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.8]),
    top_p=st.sampled_from([1e-6, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 20]),
    min_p=st.sampled_from([0.0, 0.1]),
    max_tokens=st.integers(1, 24),
    stop_token_ids=st.just(tuple(range(20))),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)


@functools.cache
def shared_model(dtype: torch.dtype):
    return random_model(seed=11, dtype=dtype)


def generate_alone(model, prompts: list[Prompt], n: int, sampling: SamplingParams) -> list:
    """One sequence after the other, each in one page that it shares with none."""
    return make_engine(model, max_running=1, page_size=128, prefill_chunk=1000).generate(prompts, n, sampling)


@settings(deadline=None, max_examples=25)
@given(dtype=st.sampled_from(DTYPES), sampling=samplings, lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
       shared=st.integers(0, 40), n=st.integers(1, 3), page_size=st.sampled_from([1, 3, 8, 16, 64]),
       prefill_chunk=st.sampled_from([1, 5, 16, 33, 200]), max_running=st.integers(1, 12),
       spare_pages=st.integers(0, 12), data_seed=st.integers(0, 1000))
def test_a_response_does_not_depend_on_the_engines_sizes_or_on_its_neighbours(
        dtype, sampling, lengths, shared, n, page_size, prefill_chunk, max_running, spare_pages, data_seed):
    model = shared_model(dtype)
    prompts = make_prompts(data_seed, *lengths, shared=min(shared, *lengths))
    num_pages = -(-(max(lengths) + sampling.max_tokens) // page_size) + spare_pages
    engine = make_engine(model, page_size=page_size, prefill_chunk=prefill_chunk, max_running=max_running,
                         num_pages=num_pages)
    trajectories = engine.generate(prompts, n, sampling)
    assert all_bytes(trajectories) == all_bytes(generate_alone(model, prompts, n, sampling))
    for trajectory in trajectories:
        assert response_by_prefill(engine, trajectory, sampling).tobytes() == trajectory.logprobs.tobytes()
    assert engine.pages.pool.available == num_pages


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_running", [1, 2, 7, 64])
def test_every_batch_width_gives_the_same_bits(dtype, max_running):
    model, prompts = shared_model(dtype), make_prompts(1, *range(1, 33))
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=6)
    trajectories = make_engine(model, max_running=max_running).generate(prompts, 2, sampling)
    assert all_bytes(trajectories) == all_bytes(widest_batch(dtype))


@functools.cache
def widest_batch(dtype: torch.dtype) -> list:
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=6)
    return make_engine(shared_model(dtype), max_running=256).generate(make_prompts(1, *range(1, 33)), 2, sampling)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_preemption_leaves_no_trace_in_the_bits(dtype):
    model, prompts = shared_model(dtype), make_prompts(2, 20, 33, 41, 17)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=40)
    roomy, tight = make_engine(model), make_engine(model, page_size=4, num_pages=30)
    assert all_bytes(tight.generate(prompts, 2, sampling)) == all_bytes(roomy.generate(prompts, 2, sampling))
    assert tight.work.preemptions > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_split_of_a_prefill_gives_the_same_bits(dtype):
    """A sequence longer than one attention chunk of 512 keys."""
    model, random = shared_model(dtype), np.random.default_rng(3)
    tokens, sampling = random.integers(0, VALID_VOCAB, 600), SamplingParams(temperature=0.7)
    whole = make_engine(model, prefill_chunk=1000).prefill_score(tokens, sampling)
    for chunk in (1, 63, 64, 65, 511, 512, 598):
        engine = make_engine(model, prefill_chunk=chunk, page_size=chunk % 50 + 1, num_pages=600)
        assert engine.prefill_score(tokens, sampling).tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"t{s.temperature}-p{s.top_p}-k{s.top_k}-m{s.min_p}")
def test_training_forward_has_the_bits_of_decode_and_of_prefill(dtype, sampling):
    model = shared_model(dtype)
    engine = make_engine(model, page_size=8, prefill_chunk=24)
    trajectories = engine.generate(make_prompts(4, 1, 9, 40, 26), 2, sampling)
    pack = make_pack(trajectories, list(range(len(trajectories))), cp=1, cp_rank=0)
    local = LocalCommunicator()
    with torch.no_grad():
        hidden_RD = model.hidden(pack.tokens_T, PackContext(pack, local))[pack.rows_R]
        rule = ScoreRule(sampling.score_temperature, VALID_VOCAB, pack.support)
        trained = score(hidden_RD, model.parameters["lm_head"], pack.targets_R, rule, local)[0].numpy()
    decoded = np.concatenate([t.logprobs for t in trajectories])
    prefilled = np.concatenate([response_by_prefill(engine, t, sampling) for t in trajectories])
    assert trained.tobytes() == decoded.tobytes() == prefilled.tobytes()


def test_the_number_of_threads_does_not_change_the_bits():
    prompts, sampling = make_prompts(5, 50, 3, 21), SamplingParams(temperature=1.0, top_p=0.95, max_tokens=10)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(all_bytes(make_engine(shared_model(torch.bfloat16)).generate(prompts, 3, sampling)))
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1]


def generate_on_two_leaves(comm: Communicator) -> list[tuple]:
    """Chunked prefill, prefix sharing and preemption, on a model cut in two leaves; as bytes."""
    model = random_model(seed=11, dtype=torch.bfloat16, comm=comm, leaves=2)
    engine = make_engine(model, page_size=4, num_pages=30, prefill_chunk=11)
    trajectories = engine.generate(make_prompts(6, 20, 33, 5), 2, SamplingParams(top_p=0.9, max_tokens=30))
    assert engine.work.preemptions > 0 and engine.work.shared > 0
    return all_bytes(trajectories)


def generate_on_a_rank(rank: int, world: int) -> list[tuple]:
    return generate_on_two_leaves(make_communicator(dist.group.WORLD, "cpu", "consistency", timeout_s=60))


def test_two_tensor_parallel_ranks_generate_what_one_does():
    assert run_ranks(2, generate_on_a_rank) == [generate_on_two_leaves(LocalCommunicator())] * 2
