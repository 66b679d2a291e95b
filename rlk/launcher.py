"""Starts one process per rank on this node, and turns their ends into one exit status.

It does for `rlk run` what torchrun does on one node, with two differences that torchrun cannot be told: the status of
the first rank that failed becomes ours (torchrun makes every failure 1), and a rank gets SIGTERM only when somebody
sent it to us, so that 143 means that the job was told to stop. When a rank fails, the others get some seconds to say
what they saw, then they are killed. `torchrun bin/rlk.py` works as well.

On several nodes, start it once on each under Slurm (launch/slurm/two-nodes.sbatch).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from rlk.config import INTERRUPTED, LAUNCH, ROOT
from rlk.doctor import check_rendezvous, slurm_nodes

RANK_COMMAND = [sys.executable, "-m", "rlk.cli"]
GRACE_SECONDS = 5.0  # from the first rank's failure until the others are killed
INTERRUPT_SECONDS = 2.0  # that ranks have to end by a Ctrl-C of their own
POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MASTER_PORT = "29500"  # on several nodes, unless the environment has one; on one node a free port is taken


def launch(arguments: Sequence[str], ranks_here: int, device: str) -> int:
    """Run `rlk <arguments>` in `ranks_here` processes; returns the first failure's exit status, or 0.

    A rank that a signal ended counts as 128 + signal, as in a shell.
    """
    check_rendezvous(os.environ)
    common = rank_environment(os.environ, ranks_here, device)
    first_rank = int(common["GROUP_RANK"]) * ranks_here
    places = [{"RANK": str(first_rank + i), "LOCAL_RANK": str(i)} for i in range(ranks_here)]
    ranks = [subprocess.Popen([*RANK_COMMAND, *arguments], env=common | place, preexec_fn=_end_with_launcher)
             for place in places]

    def forward(number: int, _frame: object) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    interrupted = threading.Event()

    def interrupt(number: int, _frame: object) -> None:
        interrupted.set()
        # The terminal sends Ctrl-C to the ranks itself; one that was sent to us alone is passed on.
        passing_on = threading.Timer(INTERRUPT_SECONDS, forward, (number, None))
        passing_on.daemon = True
        passing_on.start()

    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, forward)}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as for a shell's job in the background; so do the ranks
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        return supervise(ranks, first_rank, interrupted)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_with_launcher() -> None:
    """In a rank, before it runs: the kernel ends it when the launcher is killed and can stop nobody any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def supervise(ranks: Sequence[subprocess.Popen], first_rank: int, interrupted: threading.Event) -> int:
    """Wait for all processes, or for GRACE_SECONDS after the first failure; returns its status, or 0.

    Speaks for a rank that a signal ended. `interrupted`: SIGINT came to us.
    """
    status, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        failed = [i for i, code in enumerate(codes) if code]
        if failed and not status:
            status, deadline = codes[failed[0]], time.monotonic() + GRACE_SECONDS
            killed, rank = status < 0, first_rank + failed[0]
            status = 128 - status if killed else status
            if status == INTERRUPTED and interrupted.is_set():
                print("error: interrupted", file=sys.stderr, flush=True)
            elif killed or status == INTERRUPTED:
                print(f"error: rank {rank} was ended by {signal.Signals(status - 128).name}; stopping the others",
                      file=sys.stderr, flush=True)
        if None not in codes:
            break
        time.sleep(POLL_SECONDS)
    return status


def rank_environment(environ: Mapping[str, str], ranks_here: int, device: str) -> dict[str, str]:
    """What every rank on this node inherits: torch's rendezvous, threads, and the device's launch/env file.

    Whatever the user has set stays as it is, except for the ranks' own places.
    """
    nodes = slurm_nodes(environ)
    defaults = load_env_file(device)
    # Ranks share the cores; more threads than cores would wait for each other.
    defaults["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks_here))
    path = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    if nodes == 1:
        places = {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    else:
        places = {"GROUP_RANK": environ["SLURM_NODEID"], "MASTER_PORT": environ.get("MASTER_PORT", MASTER_PORT)}
    places |= {"WORLD_SIZE": str(nodes * ranks_here), "LOCAL_WORLD_SIZE": str(ranks_here)}
    return defaults | dict(environ) | {"PYTHONPATH": path} | places


def load_env_file(device: str) -> dict[str, str]:
    """NAME=value lines of launch/env/<device>.env; # begins a comment."""
    lines = (LAUNCH / "env" / f"{device}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
