"""The gradient does not depend on the layout of ranks, up to rounding: TP, CP and DP compute one and the same step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlk.model.weights import gather_full
from rlk.rollout.engine import SamplingParams, Trajectory
from rlk.topology import Topology, connect
from rlk.train.faults import Fault
from rlk.train.optimizer import ShardedAdamW
from rlk.train.trainer import Trainer
from tests.engines import VALID_VOCAB
from tests.models import random_model
from tests.spawn import run_ranks

# Under cp 2 the first has its one scored row on one rank, and the other rank scores nothing.
SHAPES = [(30, 1), (5, 9), (20, 20), (3, 30)]  # prompt and response tokens; packs of 40 hold one each


def trajectories() -> list[Trajectory]:
    draw = np.random.default_rng(4)
    return [Trajectory(i, draw.integers(0, VALID_VOCAB, p).astype(np.int32),
                       draw.integers(0, VALID_VOCAB, r).astype(np.int32), np.zeros(r, np.float32), None, None,
                       "length", 0) for i, (p, r) in enumerate(SHAPES)]


def weights_after_one_step(rank: int, world: int, tp: int, cp: int, recompute: bool) -> dict[str, np.ndarray]:
    topology = Topology.plan(world, rank, tp, cp)
    groups = connect(topology, "cpu", "consistency", 60.0)
    model = random_model(8, torch.float32, groups.tp, topology.leaves, shards=groups.grad.world)
    model.enable_training(recompute)
    # eps = 1 makes the step smooth in the gradient: plain AdamW's first step is its sign.
    optimizer = ShardedAdamW(model, groups.grad, groups.tp, lr=1.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0,
                             grad_clip=0.0)
    run = SimpleNamespace(topology=topology, groups=groups, policy=model, fault=Fault(""), valid_vocab=VALID_VOCAB,
                          sampling=SamplingParams(temperature=0.7), config=SimpleNamespace(max_tokens_per_gpu=40 // cp))
    trainer, samples = Trainer(run), trajectories()
    for pack in trainer.packs(samples, range(len(samples))):
        logprob_R, _ = trainer.score(model, pack)
        weight_R = torch.tensor([1.0 / len(samples[pack.samples[s]].tokens) for s in pack.sample_R])
        (logprob_R * weight_R).sum().backward()
    optimizer.step()
    weights = {name: tensor.numpy() for name, tensor in gather_full(model).items()}
    groups.close()
    return weights


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, weights_after_one_step, 1, 1, False)[0]


@pytest.mark.parametrize(("world", "tp", "cp"), [(2, 2, 1), (2, 1, 2), (2, 1, 1), (4, 2, 2), (4, 1, 2)])
def test_one_step_gives_the_same_weights_in_every_layout(alone, world, tp, cp):
    for weights in run_ranks(world, weights_after_one_step, tp, cp, world == 4):
        for name, expected in alone.items():
            np.testing.assert_allclose(weights[name], expected, rtol=1e-3, atol=2e-5, err_msg=name)


def test_the_step_is_large_enough_to_tell(alone):
    before = {name: tensor.numpy() for name, tensor in gather_full(random_model(8, torch.float32)).items()}
    assert all(np.abs(alone[name] - before[name]).max() > 1e-2 for name in before)
