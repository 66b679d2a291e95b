"""`rlk doctor`: is this machine ready, and if not, what to do.

Each check returns its finding in words, or raises UsageError with the remedy. Imports of torch and of what needs it
stand in the checks, so that a torch which does not load is one finding and not the end of the report.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlk.errors import UsageError

TORCH_VERSIONS = (2, 11), (2, 14)  # oldest and newest minor version that the tests run on
SHARED_MEMORY_BYTES = 128 << 20  # staging areas of the CPU collectives, all ranks together


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    ok: bool
    text: str


def diagnose(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Every check, in order; none stops the others."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("host", check_host),
        ("python", check_python),
        ("torch", check_torch),
        ("transformers", lambda: importlib.metadata.version("transformers")),
        ("CPU kernels", check_kernels),
        ("shared memory", check_shared_memory),
        *checks_of_gpus(),
        ("launch", lambda: check_rendezvous(environ)),
    ]
    findings = []
    for name, check in checks:
        try:
            findings.append(Finding(name, True, check()))
        except (UsageError, ImportError, OSError, RuntimeError) as error:  # RuntimeError: a GPU runtime that is broken
            findings.append(Finding(name, False, str(error)))
    return findings


def checks_of_gpus() -> list[tuple[str, Callable[[], str]]]:
    """The GPU checks; none where torch does not load, which the check of torch says."""
    try:
        from rlk.doctor_gpus import gpu_checks

        return gpu_checks()
    except (ImportError, OSError):
        return []


def check_host() -> str:
    from rlk.build.cpu import host_isa
    from rlk.plan import available_memory, gib

    return f"{platform.machine()} ({host_isa()}), {os.cpu_count()} cores, {gib(available_memory('cpu', 1))} free"


def check_python() -> str:
    return f"{platform.python_version()} at {sys.executable}"


def check_torch() -> str:
    import torch

    oldest, newest = TORCH_VERSIONS
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not oldest <= version <= newest:
        raise UsageError(f"torch {torch.__version__}, expected {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}: "
                         "pip install -r requirements.txt")
    return torch.__version__


def check_kernels() -> str:
    """Builds them if they are not built yet, which is the test of the compiler."""
    from rlk.build import source_fingerprint
    from rlk.ops.cpu_library import kernel_fingerprint

    if kernel_fingerprint() != source_fingerprint("cpu"):
        raise UsageError("the built kernels are not of these sources: remove build/cpu and run `make cpu`")
    return f"built, sources {kernel_fingerprint()[:16]}"


def check_shared_memory() -> str:
    free = shutil.disk_usage("/dev/shm").free
    if free < SHARED_MEMORY_BYTES:
        raise UsageError(f"/dev/shm has {free >> 20} MiB free, expected {SHARED_MEMORY_BYTES >> 20} MiB for the "
                         "collectives: in a container, start it with --shm-size=1g")
    return f"{free >> 20} MiB free in /dev/shm"


def check_rendezvous(environ: Mapping[str, str]) -> str:
    """Can ranks on several Slurm nodes find each other at MASTER_ADDR?

    Raises UsageError, with the right address, when a job of several nodes has none or one that means "this machine".
    """
    nodes = slurm_nodes(environ)
    address = environ.get("MASTER_ADDR", "")
    if nodes == 1:
        return "one node"
    if not address or means_this_machine(address):
        right = first_slurm_node(environ)
        raise UsageError(f"MASTER_ADDR is {address or 'not set'} in a Slurm job of {nodes} nodes, so each node would "
                         f"wait for itself: export MASTER_ADDR={right} in the task (see launch/slurm/two-nodes.sbatch)")
    return f"{nodes} Slurm nodes meet at {address}"


def slurm_nodes(environ: Mapping[str, str]) -> int:
    """Nodes of the Slurm job that this process is in; 1 outside of any."""
    return int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)


def means_this_machine(address: str) -> bool:
    """True for localhost and for whatever name resolves to a loopback address."""
    if address == "localhost" or address.startswith("127.") or address == "::1":
        return True
    try:
        return socket.gethostbyname(address).startswith("127.")
    except OSError:
        return False


def first_slurm_node(environ: Mapping[str, str]) -> str:
    """The first host of the job's node list, such as gpu[07-09,12],login1 -> gpu07."""
    node_list = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    if node_list and shutil.which("scontrol"):
        shown = subprocess.run(["scontrol", "show", "hostnames", node_list], capture_output=True, text=True)
        if shown.returncode == 0 and shown.stdout.strip():
            return shown.stdout.split()[0]
    first = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", node_list)
    return "".join(part or "" for part in first.groups()) if first else "<the first node's name>"
