"""Who does what: ranks -> (dp, cp, tp) for training and (engine, rollout_tp) for rollout.

Tensor parallelism is innermost, then context parallelism, then data parallelism:
rank = (dp_rank * cp + cp_rank) * tp + tp_rank. An engine is rollout_tp consecutive ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from rlk.collectives import Communicator
from rlk.collectives.factory import make_communicator
from rlk.contract import VOCAB_TILES
from rlk.errors import UsageError

PATIENCE_S = 1800.0  # how long groups wait whose ranks do different work between two calls


class ModelShape(Protocol):
    """What of a model tensor parallelism divides (whole-model counts)."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int


@dataclass(frozen=True)
class Topology:
    """The place of one rank. Rank lists hold global ranks, this one's among them, ascending."""

    world: int
    rank: int
    dp: int
    cp: int
    tp: int
    rollout_tp: int

    @classmethod
    def plan(cls, world: int, rank: int, tp: int, cp: int, rollout_tp: int = 0,
             shape: ModelShape | None = None) -> Topology:
        """Lay out `world` ranks (rollout_tp 0: as tp). Starts nothing. UsageError when the numbers do not fit."""
        rollout_tp = rollout_tp or tp
        _validate(world, tp, cp, rollout_tp, shape)
        return cls(world, rank, world // (tp * cp), cp, tp, rollout_tp)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def cp_rank(self) -> int:
        return self.rank // self.tp % self.cp

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.tp * self.cp)

    @property
    def rollout_tp_rank(self) -> int:
        return self.rank % self.rollout_tp

    @property
    def engine(self) -> int:
        return self.rank // self.rollout_tp

    @property
    def engines(self) -> int:
        return self.world // self.rollout_tp

    @property
    def leaves(self) -> int:
        """Equal parts of K in every row-parallel GEMM: what makes its bits independent of TP."""
        return max(self.tp, self.rollout_tp)

    @property
    def tp_ranks(self) -> list[int]:
        """The ranks that share this rank's tokens and hold the other shards of the model."""
        return _consecutive(self.rank, self.tp)

    @property
    def cp_ranks(self) -> list[int]:
        """The ranks with the same shard that hold other parts of the same sequences."""
        first = self.dp_rank * self.cp * self.tp + self.tp_rank
        return list(range(first, first + self.cp * self.tp, self.tp))

    @property
    def grad_ranks(self) -> list[int]:
        """All ranks with the same shard (dp x cp): gradients are summed and the optimizer is sharded over them."""
        return list(range(self.tp_rank, self.world, self.tp))

    @property
    def world_ranks(self) -> list[int]:
        return list(range(self.world))

    @property
    def engine_ranks(self) -> list[int]:
        return _consecutive(self.rank, self.rollout_tp)


@dataclass
class Groups:
    """This rank's communicators. Groups of the same ranks are one object: `rollout is tp` where their sizes agree."""

    tp: Communicator
    cp: Communicator
    grad: Communicator
    rollout: Communicator
    world: Communicator

    def check(self) -> None:
        """Wait for all calls so far and raise CheckFailed when one went wrong: what they gave may be used only then."""
        for communicator in self._all():
            communicator.check()

    def close(self) -> None:
        for communicator in self._all():
            communicator.close()

    def transports(self) -> dict[str, str]:
        """What carries each group's collectives: "local", "shm", "ipc" or "process_group"."""
        return {name: getattr(self, name).name for name in ("tp", "cp", "grad", "rollout", "world")}

    def _all(self) -> tuple[Communicator, ...]:
        return self.rollout, self.cp, self.grad, self.tp, self.world


def own_device(device: str) -> torch.device:
    """This rank's place: the CPU, or for "cuda" the GPU of torchrun's LOCAL_RANK, which becomes the current one.

    Raises UsageError where this node has no such GPU.
    """
    if device == "cpu":
        return torch.device("cpu")
    place, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if place >= gpus:
        remedy = "start fewer ranks on this node, or use --device cpu" if gpus else "use --device cpu"
        raise UsageError(f"--device cuda puts the rank with LOCAL_RANK {place} on GPU {place} of its node, but torch "
                         f"sees {gpus} GPUs there, expected at least {place + 1}: {remedy}")
    gpu = torch.device(device, place)
    torch.cuda.set_device(gpu)
    return gpu


def connect(topology: Topology, device: str, mode: str, timeout_s: float) -> Groups:
    """Join this rank's groups; every rank calls it. torch.distributed must have started unless there is one rank.

    Ranks of a TP, CP or engine group move in lockstep and wait timeout_s for each other. The gradient group and the
    world wait PATIENCE_S: another engine's long tail, or rank 0 hashing a checkpoint, is no failure.

    The groups are made one by one, not through a DeviceMesh, because a mesh cannot give its groups a time-out.
    """
    made: dict[tuple, Communicator] = {}  # groups with the same ranks and patience share one communicator

    def join(name: str, wait_s: float) -> Communicator:
        lists = _partition(topology, name)
        if (lists, wait_s) not in made:
            alone = len(lists[0]) == 1
            group = None if alone else dist.new_subgroups_by_enumeration(lists, timeout=timedelta(seconds=wait_s))[0]
            made[lists, wait_s] = make_communicator(group, device, mode, wait_s)
        return made[lists, wait_s]

    patient = max(timeout_s, PATIENCE_S)
    return Groups(join("tp_ranks", timeout_s), join("cp_ranks", timeout_s), join("grad_ranks", patient),
                  join("engine_ranks", timeout_s), join("world_ranks", patient))


def _partition(topology: Topology, name: str) -> tuple[tuple[int, ...], ...]:
    """Every rank's rank list of that name, each once: the groups into which it divides the world."""
    everyone = (Topology(topology.world, rank, topology.dp, topology.cp, topology.tp, topology.rollout_tp)
                for rank in range(topology.world))
    return tuple(sorted({tuple(getattr(one, name)) for one in everyone}))


def _consecutive(rank: int, size: int) -> list[int]:
    first = rank // size * size
    return list(range(first, first + size))


def _validate(world: int, tp: int, cp: int, rollout_tp: int, shape: ModelShape | None) -> None:
    for name, size in (("tp", tp), ("cp", cp), ("rollout-tp", rollout_tp)):
        if size < 1:
            raise UsageError(f"--{name} is {size}, expected at least 1")
    for name, size in (("tp", tp), ("rollout-tp", rollout_tp)):
        if size & (size - 1) or size > VOCAB_TILES:
            raise UsageError(f"--{name} is {size}, expected a power of two up to {VOCAB_TILES}: partial sums are added "
                             "in a balanced binary tree")
    if world % (tp * cp):
        raise UsageError(f"{world} ranks do not divide into --tp {tp} x --cp {cp}: start a multiple of {tp * cp} ranks")
    if world % rollout_tp:
        raise UsageError(f"{world} ranks do not divide into engines of --rollout-tp {rollout_tp}: start a multiple of "
                         f"{rollout_tp} ranks")
    if shape is None:
        return
    for name, size in (("tp", tp), ("rollout-tp", rollout_tp)):
        for what, count in (("attention heads", shape.num_heads), ("key/value heads", shape.num_kv_heads),
                            ("intermediate columns", shape.intermediate_size)):
            if count % size:
                raise UsageError(f"--{name} {size} does not divide the model's {count} {what}: choose a divisor")
