"""The log-probs of training and rollout in bytes, over every layout of ranks.

Each layout generates with its engines, recomputes with its training ranks, and both must agree. Layouts with the same
number of leaves must agree with each other too: same tokens, same log-probs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlk.collectives.objects import all_gather_object
from rlk.model.weights import reshard_into
from rlk.rollout.engine import SamplingParams
from rlk.rollout.paged.engine import PagedEngine
from rlk.topology import Topology, connect
from rlk.train.faults import Fault
from rlk.train.trainer import Trainer
from tests.engines import VALID_VOCAB, make_prompts
from tests.models import random_model
from tests.spawn import run_ranks

# leaves -> the layouts (world, tp, cp, rollout_tp) that have it
LAYOUTS = {
    1: [(1, 1, 1, 1), (2, 1, 2, 1), (4, 1, 2, 1)],
    2: [(2, 2, 1, 2), (4, 2, 2, 2), (2, 2, 1, 1), (2, 1, 1, 2), (4, 1, 2, 2)],
    4: [(4, 4, 1, 2), (4, 2, 1, 4), (4, 4, 1, 4)],
}
SAMPLINGS = [
    SamplingParams(temperature=0.7, top_p=0.95, max_tokens=12, seed=5),
    SamplingParams(temperature=1.0, max_tokens=12, seed=5),
    SamplingParams(temperature=0.0, max_tokens=12, seed=5),
    SamplingParams(temperature=1.8, top_p=0.5, top_k=20, max_tokens=12, seed=5),
]


def generate_and_recompute(rank: int, world: int, tp: int, cp: int, rollout_tp: int, dtype: torch.dtype,
                           max_tokens: int, recompute: bool) -> list[dict]:
    """For each of SAMPLINGS: uid -> (tokens, rollout log-prob bytes, recomputed log-prob bytes), over all ranks."""
    topology = Topology.plan(world, rank, tp, cp, rollout_tp)
    groups = connect(topology, "cpu", "consistency", 60.0)
    shape = dict(num_kv_heads=4, num_heads=8)
    policy = random_model(21, dtype, groups.tp, topology.leaves, **shape)
    policy.enable_training(recompute=recompute)
    engine_model = policy
    if tp != rollout_tp:
        engine_model = random_model(22, dtype, groups.rollout, topology.leaves, **shape)  # reshard must overwrite it
        reshard_into(engine_model, policy)
    engine = PagedEngine(engine_model, valid_vocab=VALID_VOCAB, page_size=8, num_pages=64, prefill_chunk=16,
                         max_running=5)
    prompts = make_prompts(2, 5, 30, 19, 11, shared=4)
    results = []
    for sampling in SAMPLINGS:
        mine = engine.generate(prompts[topology.engine::topology.engines], 3, sampling)
        everyone = all_gather_object(groups.world, mine)
        trajectories = sorted((t for r in range(0, world, rollout_tp) for t in everyone[r]), key=lambda t: t.uid)
        run = SimpleNamespace(topology=topology, groups=groups, policy=policy, sampling=sampling, fault=Fault(""),
                              valid_vocab=VALID_VOCAB, config=SimpleNamespace(max_tokens_per_gpu=max_tokens))
        trainer = Trainer(run)
        scored = []
        for pack in trainer.packs(trajectories, range(len(trajectories))):
            logprob_R, _ = trainer.score(policy, pack)
            bits = logprob_R.detach().view(torch.int32).tolist()
            scored += zip([pack.samples[s] for s in pack.sample_R], pack.offset_R.tolist(), bits, strict=True)
        recomputed = {}
        for tp_rank, pieces in all_gather_object(groups.world, (topology.tp_rank, scored)):
            for i, offset, bits in pieces:
                recomputed.setdefault((i, tp_rank), {})[offset] = bits
        table = {}
        for i, t in enumerate(trajectories):
            sampled = t.logprobs.view("int32").tolist()
            for tp_rank in range(tp):
                by_offset = recomputed[i, tp_rank]
                assert [by_offset[o] for o in range(len(t.tokens))] == sampled, (i, tp_rank, sampling)
            table[t.uid] = (t.tokens.tobytes(), t.logprobs.tobytes())
        results.append(table)
    groups.close()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leaves", LAYOUTS)
def test_rollout_and_training_agree_in_bytes_within_and_across_layouts(leaves, dtype):
    tables = []
    for i, (world, tp, cp, rollout_tp) in enumerate(LAYOUTS[leaves]):
        max_tokens, recompute = (64, 48, 300)[i % 3], bool(i % 2)
        ranks = run_ranks(world, generate_and_recompute, tp, cp, rollout_tp, dtype, max_tokens, recompute)
        assert all(result == ranks[0] for result in ranks)
        tables.append(ranks[0])
    assert len(tables[0][0]) == 12
    for layout, table in zip(LAYOUTS[leaves], tables, strict=True):
        assert table == tables[0], f"layout {layout} differs from {LAYOUTS[leaves][0]}"
