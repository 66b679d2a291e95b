"""Where trainer and audit meet: no log-prob goes unaudited, none leaks in, no weight changes before the verdict."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlk.audit.auditor import Auditor
from rlk.collectives import LocalCommunicator
from rlk.config import RunConfig
from rlk.errors import CheckFailed
from rlk.rollout.engine import Trajectory
from rlk.topology import Groups
from rlk.train.run import Figures, Run, Scored
from rlk.train.trainer import Trainer
from tests.evidence import make_row
from tests.thread_ranks import on_threads

ALONE = Groups(*[LocalCommunicator()] * 5)


def trajectory(uid: int, length: int = 3) -> Trajectory:
    row = make_row(uid, length=length)
    return Trajectory(uid, row.prompt_tokens, row.tokens, row.rollout, None, None, "length", 0)


def recomputed(trajectories: list[Trajectory]) -> Scored:
    """What a rank reports that recomputed every token with the sampled bits."""
    lengths = [len(t.tokens) for t in trajectories]
    return Scored(np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.arange(n) for n in lengths]),
                  np.concatenate([t.logprobs for t in trajectories]))


def audit(trajectories: list[Trajectory], scored: list[Scored], tp: int = 1, policy_version: int = 0):
    run = SimpleNamespace(policy=SimpleNamespace(policy_version=policy_version),
                          topology=SimpleNamespace(tp=tp, tp_rank=0), groups=ALONE,
                          evidence=SimpleNamespace(auditor=Auditor(None, "consistency")))
    return Run.audit(run, 0, trajectories, scored)


def test_a_collective_that_failed_ends_the_step_before_its_numbers_are_compared(monkeypatch):
    def check():
        raise CheckFailed("rank 1 never came")

    monkeypatch.setattr(ALONE.cp, "check", check, raising=True)
    with pytest.raises(CheckFailed, match="rank 1 never came"):
        audit([], [])


def test_samples_of_stale_weights_fail_the_audit_even_if_no_bit_differs():
    with pytest.raises(CheckFailed, match="policy version 0, training holds 1"):
        audit([trajectory(1)], [recomputed([trajectory(1)])], policy_version=1)


def test_every_token_recomputed_with_the_sampled_bits_passes():
    trajectories = [trajectory(1), trajectory(2)]
    verdict, tables = audit(trajectories, [recomputed(trajectories)])
    assert (verdict.compared, verdict.unequal, verdict.ok) == (6, 0, True)
    assert [table.tobytes() for table in tables] == [t.logprobs.tobytes() for t in trajectories]


@pytest.mark.parametrize("missing", range(6))
def test_a_token_that_no_rank_recomputed_fails_the_audit(missing):
    trajectories = [trajectory(1), trajectory(2)]
    whole, keep = recomputed(trajectories), np.arange(6) != missing
    with pytest.raises(CheckFailed, match=f"position {missing % 3} .*train 0x7fc00000"):
        audit(trajectories, [Scored(whole.samples[keep], whole.offsets[keep], whole.logprobs[keep])])


def test_a_tensor_parallel_rank_that_reports_nothing_fails_the_audit():
    trajectories = [trajectory(1)]
    with pytest.raises(CheckFailed, match=r"sample 1 \(tp1\), position 0"):
        audit(trajectories, [recomputed(trajectories)], tp=2)


def test_a_token_recomputed_twice_does_not_hide_the_first_value():
    trajectories = [trajectory(1), trajectory(2)]
    wrong = recomputed(trajectories)
    wrong.logprobs[4] -= 1
    with pytest.raises(CheckFailed, match="recomputed twice"):
        audit(trajectories, [wrong, recomputed(trajectories)])


@pytest.mark.parametrize("field", ["tokens", "logprobs"])
def test_ranks_of_one_engine_that_disagree_in_one_bit_stop_the_run(field):
    def share(comm):
        mine = [trajectory(1), trajectory(2)]
        if comm.rank == 1:
            getattr(mine[1], field).view(np.uint32)[2] ^= 1
        run = SimpleNamespace(topology=SimpleNamespace(rollout_tp=2), groups=SimpleNamespace(world=comm))
        with pytest.raises(CheckFailed, match="ranks 0 and 1 of one engine disagree on sample 2"):
            Run.share_trajectories(run, mine)
        return True

    assert on_threads(2, share) == [True, True]


# ---- the trainer's order


class Rank:
    """The least of a Run that Trainer.learn calls; notes what it was asked for, in order."""

    reference = None

    def __init__(self, unequal: bool = False, **options) -> None:
        self.config = dataclasses.replace(RunConfig(), rollout_batch_size=1, samples_per_prompt=4,
                                          **({"global_batch_size": 4} | options))
        self.policy, self.unequal, self.calls = SimpleNamespace(device=torch.device("cpu")), unequal, []
        self.groups = ALONE
        self.optimizer = SimpleNamespace(step=lambda: self.calls.append("optimizer") or 0.0)

    def audit(self, step, trajectories, scored):
        self.calls.append("audit")
        if self.unequal:
            raise CheckFailed("audit: unequal")
        return "verdict", [np.full(len(t.tokens), -1, np.float32) for t in trajectories]


def learn(run: Rank, logprob: float):
    """Trainer.learn on samples whose sampled log-probs are all `logprob`, while training computes -1."""
    class OnePack(Trainer):
        def packs(self, trajectories, chosen):
            counts = [len(trajectories[i].tokens) for i in chosen]
            return [SimpleNamespace(samples=list(chosen), sample_R=np.repeat(np.arange(len(counts)), counts),
                                    offset_R=np.concatenate([np.arange(n) for n in counts]))]

        def score(self, model, pack):
            return torch.full((len(pack.sample_R),), -1.0, requires_grad=True), torch.zeros(len(pack.sample_R))

    trajectories = [trajectory(i) for i in range(4)]
    for t in trajectories:
        t.logprobs[:] = logprob
    return OnePack(run).learn(0, trajectories, np.ones(4, np.float32), np.ones(4, bool))[1]


def test_a_rank_without_packs_reports_its_memory_too(monkeypatch):
    monkeypatch.setattr("rlk.train.run.peak_memory", lambda device: 7 << 20 if device.type == "cuda" else 0)
    figures = Figures()
    figures.settle(torch.device("cuda", 1))
    assert (figures.peak_memory, figures.loss, figures.tokens) == (7 << 20, 0.0, 0)


@pytest.mark.parametrize("global_batch_size, order", [(4, ["audit", "optimizer"]),
                                                      (2, ["audit", "optimizer", "optimizer"])])
def test_the_audit_comes_before_any_weight_has_changed(global_batch_size, order):
    run = Rank(global_batch_size=global_batch_size)
    learn(run, -1.0)
    assert run.calls == order
    run = Rank(unequal=True, global_batch_size=global_batch_size)
    with pytest.raises(CheckFailed, match="unequal"):
        learn(run, -1.0)
    assert run.calls == ["audit"]


@pytest.mark.parametrize("global_batch_size", [4, 2])
def test_the_loss_reads_sampled_logprobs_only_when_asked_to(global_batch_size):
    assert learn(Rank(global_batch_size=global_batch_size), float("nan")).loss == pytest.approx(-4 / global_batch_size)
    asked = Rank(global_batch_size=global_batch_size, use_rollout_logprobs=True)
    assert np.isnan(learn(asked, float("nan")).loss)
