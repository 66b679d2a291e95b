"""Runs a function on several ranks of this host: how tests get a process group without torchrun."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

LIMIT_S = 120.0
GRACE_S = 40.0  # after the first failure, the others may still report theirs

# New processes are forked from a server that has only imported these: no seconds of imports for each rank.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "torch.distributed", "pytest", "hypothesis"])


def run_ranks(world: int, function: Callable, *args, may_die: Collection[int] = (), limit_s: float = LIMIT_S) -> list:
    """Call function(rank, world, *args) in `world` new processes joined by gloo; returns the results in rank order.

    `function` is module-level, arguments and results picklable. Each process starts with one thread (a function may
    call torch.set_num_threads). The failure that happened first is raised again here, with its rank and traceback as a
    note. A rank in `may_die` may be killed: its result is None. Raises TimeoutError after `limit_s` seconds, and leaves
    no process behind.
    """
    with tempfile.TemporaryDirectory(prefix="rlk-ranks-") as folder:
        port = _free_port()
        processes = [_start(rank, world, port, folder, function, args, limit_s) for rank in range(world)]
        try:
            _join(processes, limit_s, set(may_die))
            _raise_first_failure(Path(folder))
            return [_result(Path(folder), rank, process, rank in may_die) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _start(rank: int, world: int, port: int, folder: str, function: Callable, args: tuple, limit_s: float):
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    environment = {**os.environ, **{key: str(value) for key, value in ranks.items()}}
    process = SERVER.Process(target=_child, args=(rank, world, environment, folder, function, args, limit_s))
    process.start()
    return process


def _child(rank: int, world: int, environment: dict, folder: str, function: Callable, args: tuple,
           limit_s: float) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
                                timeout=timedelta(seconds=limit_s))
        outcome = (True, function(rank, world, *args), "")
    except BaseException as error:
        outcome = (False, error, traceback.format_exc())
    # The file appears whole or not at all, and its time of change orders the failures.
    partial = Path(folder) / f"partial-{rank}"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(Path(folder) / f"result-{rank}")
    sys.stdout.flush()
    os._exit(0 if outcome[0] else 1)  # gloo's teardown would wait for ranks that failed


def _join(processes: list, limit_s: float, may_die: set[int]) -> None:
    """Return when all processes ended, or some time after one failed; TimeoutError at the limit."""
    deadline, failing = time.monotonic() + limit_s, False
    while alive := [process for process in processes if process.is_alive()]:
        failed = any(p.exitcode not in (None, 0) and rank not in may_die for rank, p in enumerate(processes))
        if failed and not failing:
            failing, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            if failing:
                return
            raise TimeoutError(f"ranks {[processes.index(p) for p in alive]} still run after {limit_s} s")
        wait([process.sentinel for process in alive], timeout=0.5)


def _raise_first_failure(folder: Path) -> None:
    """Raise the earliest failure among the result files of `folder`, if there is one."""
    for file in sorted(folder.glob("result-*"), key=lambda path: path.stat().st_mtime_ns):
        succeeded, error, trace = pickle.loads(file.read_bytes())
        if not succeeded:
            error.add_note(f"on rank {file.name.removeprefix('result-')}:\n{trace}")
            raise error


def _result(folder: Path, rank: int, process, may_die: bool):
    file = folder / f"result-{rank}"
    if file.exists():
        return pickle.loads(file.read_bytes())[1]
    if may_die:
        return None
    raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode} and no result")
