"""What a run is made of on one rank, and its dealings with the other ranks and the run directory.

`open_run` builds everything in the order in which it can fail: options and data, topology, contract, weights, evidence.
The algorithm is in trainer.py.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch

from rlk.audit.readback import make_readback
from rlk.audit.seal import source_digest
from rlk.audit.step_record import AuditRow, StepVerdict
from rlk.collectives.objects import all_gather_object
from rlk.config import RunConfig
from rlk.contract import Contract, agree, architecture_of, make_contract
from rlk.data.prompts import PromptStream
from rlk.data.rewards import RewardBatch, score_responses
from rlk.data.tokenizer import Tokenizer
from rlk.errors import CheckFailed
from rlk.model.qwen3 import Qwen3
from rlk.model.weights import load_model, reshard_into, save_model
from rlk.ops.kernel_objects import kernel_fingerprint
from rlk.ops.registry import registry
from rlk.plan import peak_memory
from rlk.preflight import preflight
from rlk.report.metrics import StepMetrics
from rlk.rollout.engine import Engine, SamplingParams, Trajectory
from rlk.rollout.paged.engine import PagedEngine
from rlk.topology import Groups, Topology, connect, own_device
from rlk.train.evidence import Evidence
from rlk.train.faults import Fault
from rlk.train.grpo import LossTerms
from rlk.train.optimizer import ShardedAdamW
from rlk.train.packing import Pack


class Clock:
    """Seconds of a step, by phase."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self.seconds["step"] = now - self._start
        self._last = now


@dataclass
class Figures:
    """One rank's sums over a step; added up over the gradient group for the report.

    What `add` was given is on the model's device until `settle` fetches all of it at once; a rank may have no packs.
    """

    loss: float = 0.0
    kl: float = 0.0
    clipped: int = 0
    entropy: float = 0.0
    tokens: int = 0
    grad_norm: float = 0.0  # of the last optimizer step, global already
    peak_memory: int = 0  # bytes, on a GPU
    waiting: list[torch.Tensor] = field(default_factory=list)  # float64 [4] of each micro-batch

    def add(self, terms: LossTerms, entropy_R: torch.Tensor) -> None:
        sums = terms.loss.detach(), terms.kl, terms.clipped, entropy_R.double().sum()
        self.waiting.append(torch.stack([x.double() for x in sums]))
        self.tokens += len(entropy_R)

    def settle(self, device: torch.device) -> None:
        self.peak_memory = peak_memory(device)
        sums = torch.stack(self.waiting).tolist() if self.waiting else []
        for loss, kl, clipped, entropy in sums:
            self.loss += loss
            self.kl += kl
            self.clipped += int(clipped)
            self.entropy += entropy
        self.waiting.clear()


@dataclass(frozen=True)
class Scored:
    """The recomputed log-probs of one pack's rows on one rank; the arrays have one entry per scored row."""

    samples: np.ndarray  # index of the trajectory
    offsets: np.ndarray  # position in its response
    logprobs: np.ndarray  # float32

    @classmethod
    def of(cls, pack: Pack, logprob_R: torch.Tensor) -> Scored:
        return cls(np.asarray(pack.samples)[pack.sample_R], pack.offset_R, logprob_R.detach().cpu().numpy().copy())


@dataclass
class Run:
    """Everything one rank holds for the length of a run."""

    config: RunConfig
    topology: Topology
    groups: Groups
    contract: Contract
    policy: Qwen3
    reference: Qwen3 | None  # the initial policy, when there is a KL term
    engine: Engine
    engine_model: Qwen3  # the policy itself when training and rollout are sharded alike
    optimizer: ShardedAdamW
    tokenizer: Tokenizer
    prompts: PromptStream
    sampling: SamplingParams
    fault: Fault
    evidence: Evidence | None  # rank 0 only
    no_fault: Fault = field(default_factory=lambda: Fault(""))

    @property
    def valid_vocab(self) -> int:
        return len(self.tokenizer)

    def engine_for_current_weights(self) -> Engine:
        """The engine; its own weights are refilled first if it has a storage of its own and that is stale."""
        if self.engine_model is not self.policy and self.engine_model.policy_version != self.policy.policy_version:
            reshard_into(self.engine_model, self.policy)
        return self.engine

    def share_trajectories(self, mine: list[Trajectory]) -> list[Trajectory]:
        """All engines' trajectories on every rank, in order of uid.

        Every rank of an engine sends its own: one whose tokens or log-prob bits differ from those of its engine's first
        rank stops the run.
        """
        shared = []
        everyone = all_gather_object(self.groups.world, mine)
        for rank, trajectories in enumerate(everyone):
            leader = rank - rank % self.topology.rollout_tp
            if rank == leader:
                shared += trajectories
            for a, b in zip(trajectories, everyone[leader], strict=True):
                if a.tokens.tobytes() != b.tokens.tobytes() or a.logprobs.tobytes() != b.logprobs.tobytes():
                    raise CheckFailed(f"ranks {leader} and {rank} of one engine disagree on sample {a.uid}: "
                                      "their weights or kernels differ")
        return sorted(shared, key=lambda t: t.uid)

    def reward(self, trajectories: list[Trajectory], answers: dict[int, str]) -> RewardBatch:
        """Rewards by sample, from rank 0: a reward's deadline may pass on one rank and not on another.

        `answers` maps a prompt's uid to its right answer.
        """
        batch = None
        if self.evidence:
            texts = [self.tokenizer.decode(t.tokens) for t in trajectories]
            batch = score_responses(self.config.reward, texts, [answers[t.prompt_uid] for t in trajectories])
        return all_gather_object(self.groups.world, batch)[0]

    def audit(self, step: int, trajectories: list[Trajectory],
              scored: list[Scored]) -> tuple[StepVerdict, list[np.ndarray]]:
        """Compare the raw bits of all ranks' recomputed log-probs with rollout's, and keep both as evidence.

        Returns the verdict and the recomputed log-probs by sample (tensor-parallel rank 0's). Raises CheckFailed on
        every rank when the verdict is bad: in consistency mode for one unequal bit.
        """
        self.groups.check()
        for t in trajectories:
            if t.policy_version != self.policy.policy_version:
                raise CheckFailed(f"audit: step {step}, sample {t.uid} was drawn under policy version "
                                  f"{t.policy_version}, training holds {self.policy.policy_version}: stale weights")
        tables = [[np.full(len(t.tokens), np.nan, np.float32) for t in trajectories] for _ in range(self.topology.tp)]
        everyone = all_gather_object(self.groups.world, (self.topology.tp_rank, scored))
        for tp_rank, pieces in everyone:
            for piece in pieces:
                for i in np.unique(piece.samples):
                    rows = piece.samples == i
                    offsets = piece.offsets[rows]
                    if len(set(offsets)) < len(offsets) or not np.isnan(tables[tp_rank][i][offsets]).all():
                        raise CheckFailed(f"audit: step {step}, sample {trajectories[i].uid} (tp{tp_rank}) was "
                                          "recomputed twice; each token belongs to one pack of one rank")
                    tables[tp_rank][i][offsets] = piece.logprobs[rows]
        verdict = None
        if self.evidence:
            rows = [AuditRow(t.uid, f"tp{tp_rank}", t.prompt_tokens, t.tokens, t.logprobs, recomputed)
                    for tp_rank, table in enumerate(tables) for t, recomputed in zip(trajectories, table, strict=True)]
            verdict = self.evidence.auditor.add_step(step, trajectories[0].policy_version, rows,
                                                     [t.uid for t in trajectories])
        verdict = all_gather_object(self.groups.world, verdict)[0]
        if not verdict.ok:
            raise CheckFailed(verdict.message)
        return verdict, tables[0]

    def report(self, step: int, trajectories: list[Trajectory], rewards: RewardBatch, use_N: np.ndarray,
               verdict: StepVerdict, figures: Figures, clock: Clock) -> None:
        """One line of metrics on rank 0."""
        parts = all_gather_object(self.groups.world, (self.topology.tp_rank, figures))
        peak = max(part.peak_memory for _, part in parts)
        parts = [part for tp_rank, part in parts if tp_rank == 0]
        if not self.evidence:
            return
        tokens = max(sum(part.tokens for part in parts), 1)
        lengths = np.array([len(t.tokens) for t in trajectories])
        valid = ~rewards.error_mask
        self.evidence.step(StepMetrics(
            step=step, policy_version=trajectories[0].policy_version,
            reward=float(rewards.rewards[valid].mean()) if valid.any() else float("nan"),
            response_tokens=int(lengths.sum()), compared=verdict.compared, unequal=verdict.unequal,
            rollout_s=clock.seconds["rollout"], train_s=clock.seconds["train"], step_s=clock.seconds["step"],
            extra=dict(
                reward_s=clock.seconds["reward"], loss=sum(part.loss for part in parts),
                kl=sum(part.kl for part in parts), entropy=sum(part.entropy for part in parts) / tokens,
                clipped_fraction=sum(part.clipped for part in parts) / tokens, grad_norm=figures.grad_norm,
                mean_response_tokens=float(lengths.mean()), max_response_tokens=int(lengths.max()),
                truncated_fraction=float(np.mean([t.stop_reason == "length" for t in trajectories])),
                reward_errors=rewards.errors, samples_in_loss=int(use_N.sum()),
                **({"peak_memory_bytes": peak} if peak else {}),
            )), rewards.first_error)

    def finish(self) -> None:
        """Save the model, close the evidence, and print the verdict. Raises CheckFailed when a gate does not pass."""
        finite = all(all_gather_object(self.groups.world, bool(torch.isfinite(self.policy.storage).all())))
        if self.config.save_model:
            directory = all_gather_object(self.groups.world, self.evidence and self.evidence.path / "model")[0]
            save_model(self.policy, directory, self.groups.world, self.config.model)
        readbacks = all_gather_object(self.groups.world, make_readback(
            registry, self.topology.rank, self.topology.world, self.contract.architecture, self.contract.fingerprint,
            self.groups.transports()))
        if self.evidence:
            self.evidence.close(readbacks, finite)


def open_run(config: RunConfig, sources: dict[str, str], stack: ExitStack) -> Run:
    """Build this rank's run from torchrun's environment; `stack` closes what must be closed.

    Raises UsageError for what the user can mend and CheckFailed when the ranks disagree.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    fault = Fault(config.inject_fault)
    registry.set_mode(config.mode)
    torch.manual_seed(config.seed)
    # Some plain PyTorch operators of the native arm have no deterministic form on a GPU. (use_deterministic_algorithms
    # does the same, and imports torch's compiler for three seconds.)
    torch.set_deterministic_debug_mode("warn" if (config.device, config.mode) == ("cuda", "native") else "error")
    # Or torch fills every torch.empty, one more write of each result. tests/gpu poisons memory itself.
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = own_device(config.device)  # before anything else of this rank is on a GPU
    ready = preflight(config, world, ranks_here)
    topology = Topology.plan(world, rank, config.tp, config.cp, config.engine_tp, ready.model)
    groups = connect(topology, config.device, config.mode, config.timeout)
    stack.callback(groups.close)

    dtype = getattr(torch, config.dtype)
    contract = make_contract(architecture_of(config.device), dtype, topology.leaves, kernel_fingerprint(config.device),
                             source_digest())
    agree(contract, all_gather_object(groups.world, contract.as_dict()))

    def load(comm, shards: int = 1) -> Qwen3:
        return load_model(config.model, dtype, device, comm, topology.leaves, shards=shards)

    policy = load(groups.tp, shards=groups.grad.world)
    policy.enable_training(recompute=config.recompute)
    shared = topology.rollout_tp == topology.tp
    engine_model = policy if shared else Qwen3(policy.config, dtype, device, groups.rollout, topology.leaves)
    if not shared:
        reshard_into(engine_model, policy)
    # Ranks of one engine schedule alike only with equal pages, and each saw other free memory.
    num_pages = min(all_gather_object(groups.world, ready.memory.kv_pages))
    engine = PagedEngine(engine_model, valid_vocab=len(ready.tokenizer), page_size=config.page_size,
                         num_pages=num_pages, prefill_chunk=config.prefill_chunk, max_running=config.max_running)
    optimizer = ShardedAdamW(policy, groups.grad, groups.tp, lr=config.lr, beta1=config.adam_beta1,
                             beta2=config.adam_beta2, eps=config.adam_eps, weight_decay=config.weight_decay,
                             grad_clip=config.grad_clip)
    sampling = SamplingParams(config.temperature, config.top_p, config.top_k, config.min_p, config.max_response_len,
                              tuple(policy.config.eos_token_ids), config.ignore_eos, config.rollout_seed)
    run = Run(
        config=config, topology=topology, groups=groups, contract=contract, policy=policy,
        reference=load(groups.tp) if config.kl_coef > 0 else None, engine=engine, engine_model=engine_model,
        optimizer=optimizer, tokenizer=ready.tokenizer, prompts=PromptStream(ready.examples, config.seed),
        sampling=sampling, fault=fault, evidence=Evidence(config, sources, contract) if rank == 0 else None)
    groups.world.barrier()  # rank 0 hashed the model meanwhile; the lockstep groups' time-out is too short for that
    return run
