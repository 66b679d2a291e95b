"""One rank of a run: agree with the others on what to do, then train.

The ranks meet at the store of torch.distributed's env:// rendezvous (torchrun's, or rank 0's). Rank 0 checks the input
and everybody hears its verdict, so bad input is one line and not one per rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlk.config import RunConfig, resolve
from rlk.doctor import check_rendezvous
from rlk.errors import CheckFailed, UsageError
from rlk.launcher import load_env_file
from rlk.ops.kernel_objects import kernel_objects
from rlk.preflight import check_layout, preflight
from rlk.profiles import default_profile

JOIN_TIMEOUT = timedelta(minutes=10)  # rank 0 may be creating the tiny model, or tokenizing a long prompt file
REPORT_SECONDS = 1.0  # ranks that fail together wait this long to hear what the others report
DEMOS = {"build/tiny": 16, "build/tiny-gpu": 64}  # the demos' directories and head dims, of the *-tiny profiles
USAGE_KEY = "rlk/usage-error"  # in the store once a rank reported bad input


def run_rank(profile: str, command_line: Mapping[str, Any]) -> int:
    """The whole life of this rank; returns its exit status. Errors of ours become one line on stderr."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        check_rendezvous(os.environ)
    except UsageError as error:
        if os.environ.get("LOCAL_RANK") == "0":
            print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=JOIN_TIMEOUT))
    try:
        mine = propose(profile, command_line, world)
        if "config" in mine:  # under torchrun nobody else has; CUDA and NCCL read them when they start
            os.environ |= load_env_file(mine["config"]["device"]) | os.environ
        config, sources = agree(store, rank, world, mine)
        if os.environ.get("LOCAL_RANK") == "0":
            kernel_objects(config.device)  # of this host: rank 0 may be on another. The others wait in the next line
        backend = "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.PrefixStore("run", store), rank=rank, world_size=world)
        from rlk.train.trainer import run  # here: bad input is answered without waiting for what training imports

        run(config, sources)
        dist.destroy_process_group()  # NCCL asks for it
        return 0
    except (UsageError, CheckFailed) as error:
        return report(store, rank, world, error)


def propose(profile: str, command_line: Mapping[str, Any], world: int) -> dict[str, Any]:
    """This rank's reading of the options: {profile, config, sources}, or {error}."""
    try:
        name = profile or default_profile()
        config, sources = resolve(name, command_line)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if config.nproc != here:
            config, sources = replace(config, nproc=here), sources | {"nproc": "torchrun"}
        if not profile and world % config.tp and sources["tp"].startswith("profile"):
            # `torchrun --nproc-per-node 1 bin/rlk.py`: the profile is ours to fit, since nobody asked for it.
            config, sources = replace(config, tp=1), sources | {"tp": f"fits {world} ranks"}
    except UsageError as error:
        return {"error": str(error)}
    return {"profile": name, "config": asdict(config), "sources": sources}


def agree(store: dist.Store, rank: int, world: int, mine: dict[str, Any]) -> tuple[RunConfig, dict[str, str]]:
    """Every rank's configuration, checked by rank 0. Raises rank 0's UsageError on every rank."""
    store.set(f"rlk/proposal/{rank}", json.dumps(mine))
    if rank == 0:
        try:
            verdict = decide([json.loads(store.get(f"rlk/proposal/{i}")) for i in range(world)])
        except UsageError as error:
            verdict = {"error": str(error)}
        store.set("rlk/verdict", json.dumps(verdict))
    verdict = json.loads(store.get("rlk/verdict"))
    if "error" in verdict:
        raise UsageError(verdict["error"])
    return RunConfig(**verdict["config"]), verdict["sources"]


def decide(proposals: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's part: compare the ranks, name the run directory, make what is missing, check all input."""
    first = proposals[0]
    for rank, other in enumerate(proposals):
        if "error" in other:
            raise UsageError(other["error"])
        for name, value in first["config"].items():
            if other["config"][name] != value:
                raise UsageError(f"rank {rank} has {name} = {other['config'][name]!r}, but rank 0 has {value!r}: give "
                                 "every node the same options, profile and RLK_* variables")
    config, sources = RunConfig(**first["config"]), first["sources"]
    if not config.run_dir:
        name = time.strftime("%Y%m%d-%H%M%S-") + Path(first["profile"]).stem
        config, sources = replace(config, run_dir=f"runs/{name}"), sources | {"run_dir": "date, time, profile"}
    check_layout(config, len(proposals), config.nproc)
    create_demo_input(config)
    preflight(config, len(proposals), config.nproc)
    kernel_objects(config.device)  # built here, if at all on this host; other hosts build when they hear the verdict
    return {"config": asdict(config), "sources": sources}


def create_demo_input(config: RunConfig) -> None:
    """Make the tiny model and its prompts when they are asked for by the demos' names and are not there yet."""
    directory = Path(config.model).parent
    head_dim = DEMOS.get(directory.as_posix())
    demo = (config.model, config.prompts) == (f"{directory}/model", f"{directory}/prompts.jsonl")
    if head_dim and demo and not Path(config.model).exists():
        from rlk.model.tiny import create_tiny

        print(f"creating a tiny Qwen3 and its prompts in {directory} (once, under a minute)", flush=True)
        create_tiny(directory, head_dim=head_dim)


def report(store: dist.Store, rank: int, world: int, error: UsageError | CheckFailed) -> int:
    """Print the error unless another rank has printed the same words; returns the exit status.

    A rank that merely lost a peer to that peer's own bad input (its disk is full, say) leaves the word to it.
    """
    if isinstance(error, CheckFailed) and _soon(lambda: store.check([USAGE_KEY])):
        return UsageError.exit_status
    text = f"error: {error}" if isinstance(error, UsageError) else f"check failed: {error}"
    key = "rlk/error/" + hashlib.sha256(text.encode()).hexdigest()
    try:
        first = store.add(key, 1) == 1
        if isinstance(error, UsageError):
            store.set(USAGE_KEY, text)
    except RuntimeError:  # the store went away with rank 0
        first = True
    if first:
        print(text, file=sys.stderr, flush=True)
    if rank == 0:  # the store may live in this process
        _soon(lambda: store.add(key, 0) == world)
    return error.exit_status


def _soon(happened: Callable[[], bool]) -> bool:
    """Whether it happens within REPORT_SECONDS; a store that went away has nothing more to tell."""
    deadline = time.monotonic() + REPORT_SECONDS
    try:
        while not (done := happened()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return done
    except RuntimeError:
        return False
