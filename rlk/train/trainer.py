"""The GRPO loop: generate, reward, recompute, audit, learn.

Every rank runs this file. Simplifications, on purpose: the whole batch is generated before it is trained on, and every
rank sees every trajectory (they are a few integers per token).

Legend: N samples of the step, T a pack's rows on this rank, R its rows that score a response token, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import torch

from rlk.config import RunConfig
from rlk.errors import CheckFailed, UsageError
from rlk.ops.logprob import ScoreRule, score
from rlk.rollout.engine import Prompt, Trajectory
from rlk.train.grpo import LossTerms, group_advantages, grpo_loss, sample_weights
from rlk.train.packing import Pack, PackContext, balance, first_fit, make_pack
from rlk.train.run import Clock, Figures, Run, Scored, open_run


def run(config: RunConfig, sources: dict[str, str] | None = None) -> None:
    """Train for `config.steps` steps on this rank. `sources` say where each option's value came from.

    Raises UsageError or CheckFailed; rank 0 has then written audit.json with the verdict "fail" if the run had begun.
    """
    with ExitStack() as stack:
        run = open_run(config, sources or {}, stack)
        try:
            trainer = Trainer(run)
            for step in range(config.steps):
                trainer.step(step)
        except (CheckFailed, UsageError):
            if run.evidence:
                run.evidence.conclude({"every step done": False})
            raise
        run.finish()


class Trainer:
    """One rank's view of the run. `step` and `learn` are the whole algorithm."""

    def __init__(self, run: Run):
        self.run, self.config = run, run.config

    def step(self, step: int) -> None:
        """From a batch of prompts to policy version + 1."""
        run, config, clock = self.run, self.config, Clock()

        prompts, answers = run.prompts.batch(step, config.rollout_batch_size)
        trajectories = self.rollout(prompts)
        clock.lap("rollout")

        rewards = run.reward(trajectories, dict(zip((p.uid for p in prompts), answers, strict=True)))
        use_N = ~rewards.error_mask
        advantage_N = group_advantages(rewards.rewards, np.array([t.prompt_uid for t in trajectories]), use_N,
                                       config.grpo_std_normalization)
        if config.mask_truncated:
            use_N = use_N & np.array([t.stop_reason != "length" for t in trajectories])
        clock.lap("reward")

        run.fault.after_rollout(run.policy, last_rank=run.topology.rank == run.topology.world - 1)
        verdict, figures = self.learn(step, trajectories, advantage_N, use_N)
        clock.lap("train")
        run.report(step, trajectories, rewards, use_N, verdict, figures, clock)

    def rollout(self, prompts: list[Prompt]) -> list[Trajectory]:
        """All samples in order of uid, the same on every rank; each engine generates its share of the prompts."""
        engine, topology = self.run.engine_for_current_weights(), self.run.topology
        with torch.no_grad():
            mine = engine.generate(prompts[topology.engine::topology.engines], self.config.samples_per_prompt,
                                   self.run.sampling)
        self.run.groups.check()
        return self.run.share_trajectories(mine)

    def learn(self, step: int, trajectories: list[Trajectory], advantage_N: np.ndarray, use_N: np.ndarray):
        """Recompute, audit, and take the optimizer steps; returns the audit's verdict and the step's figures.

        With one optimizer step, its own forward pass is the recomputation. With several, the log-probs of all samples
        are recomputed first, under the weights that sampled them. Either way the audit, which raises CheckFailed on one
        unequal bit in consistency mode, comes before any weight has changed.
        """
        run, figures, old_N = self.run, Figures(), None
        batches = np.array_split(np.arange(len(trajectories)), len(trajectories) // self.config.global_batch_size)
        if len(batches) > 1:
            with torch.no_grad():
                scored = [Scored.of(pack, self.score(run.policy, pack)[0])
                          for pack in self.packs(trajectories, range(len(trajectories)))]
            verdict, old_N = run.audit(step, trajectories, scored)
        if self.config.use_rollout_logprobs:
            old_N = [t.logprobs for t in trajectories]

        for batch in batches:
            weight_N = np.zeros(len(trajectories), np.float32)
            weight_N[batch] = sample_weights(np.array([len(trajectories[i].tokens) for i in batch]), use_N[batch])
            scored = []
            for pack in self.packs(trajectories, batch):
                logprob_R, entropy_R = self.score(run.policy, pack)
                scored.append(Scored.of(pack, logprob_R))
                terms = self.loss(pack, logprob_R, old_N, advantage_N, weight_N)
                terms.loss.backward()
                figures.add(terms, entropy_R)
            if len(batches) == 1:
                verdict, _ = run.audit(step, trajectories, scored)
            figures.grad_norm = run.optimizer.step()
            run.groups.check()
        figures.settle(run.policy.device)
        return verdict, figures

    def loss(self, pack: Pack, logprob_R: torch.Tensor, old_N: list[np.ndarray] | None, advantage_N: np.ndarray,
             weight_N: np.ndarray) -> LossTerms:
        """The pack's loss. `old_N`: each sample's log-probs before this step; None: the recomputed ones themselves."""
        config = self.config
        sample_R = np.asarray(pack.samples)[pack.sample_R]
        old_R = logprob_R.detach()
        if old_N is not None:
            old_R = torch.tensor([old_N[i][offset] for i, offset in zip(sample_R, pack.offset_R, strict=True)])
        old_R, advantage_R, weight_R = (x.to(logprob_R.device) for x in (
            old_R, torch.from_numpy(advantage_N[sample_R]), torch.from_numpy(weight_N[sample_R])))
        return grpo_loss(logprob_R, old_R, self.reference_logprob(pack), advantage_R, weight_R, config.clip_low,
                         config.clip_high, config.kl_coef)

    def packs(self, trajectories: list[Trajectory], chosen) -> Iterator[Pack]:
        """This rank's part of the chosen samples, as packs of at most max_tokens_per_gpu x cp tokens on its device."""
        topology = self.run.topology
        length = {i: len(trajectories[i].prompt_tokens) + len(trajectories[i].tokens) for i in map(int, chosen)}
        samples = list(length)
        mine = [samples[j] for j in balance([length[i] for i in samples], topology.dp)[topology.dp_rank]]
        packs = first_fit([length[i] for i in mine], self.config.max_tokens_per_gpu * topology.cp)
        for pack in packs:
            samples = sorted(mine[j] for j in pack)
            yield make_pack(trajectories, samples, topology.cp, topology.cp_rank).to(self.run.policy.device)

    def score(self, model, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy (FP32 [R]) of the pack's response tokens, from tokens and retained sets only."""
        run, head_VD = self.run, model.parameters["lm_head"]
        fault = run.fault if model is run.policy else run.no_fault
        hidden_RD = model.hidden(pack.tokens_T, PackContext(pack, run.groups.cp))[pack.rows_R]
        support = fault.support(pack.support, hidden_RD, model, run.groups.tp, pack.targets_R)
        rule = ScoreRule(fault.temperature(run.sampling.score_temperature), run.valid_vocab, support)
        with fault.kernels():
            logprob_R, entropy_R = score(hidden_RD, head_VD, pack.targets_R, rule, run.groups.tp)
        return fault.logprobs(logprob_R), entropy_R

    def reference_logprob(self, pack: Pack) -> torch.Tensor | None:
        """The initial policy's log-probs of the pack, FP32 [R]; None when there is no KL term."""
        if self.run.reference is None:
            return None
        with torch.no_grad():
            return self.score(self.run.reference, pack)[0]
