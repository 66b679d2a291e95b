"""The launcher: one exit status from many ranks, signals, what ranks inherit; and the sbatch files (CASES 12, 13)."""

import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest

from rlk import launcher
from rlk.config import LAUNCH, ROOT
from rlk.errors import UsageError
from rlk.launcher import launch, rank_environment

RANK = """
import os, signal, sys, time
what, folder, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
if what == "term":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if what == "interrupted":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
open(f"{folder}/{rank}-of-{os.environ['WORLD_SIZE']}", "w").close()
if what == "ok":
    sys.exit(0)
if rank == 1 and what.isdigit():
    sys.exit(int(what))
if rank == 1 and what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Stand-ins for ranks; returns the folder where each leaves its name."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    monkeypatch.setattr(launcher, "RANK_COMMAND", [sys.executable, str(script)])
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.3)
    started = tmp_path / "started"
    started.mkdir()
    return started


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_all_good_is_0(ranks):
    assert launch(["ok", str(ranks)], 3, "cpu") == 0
    assert names(ranks) == ["0-of-3", "1-of-3", "2-of-3"]


@pytest.mark.parametrize("status", [1, 2, 143])
def test_the_first_failing_ranks_status_is_ours_and_the_others_are_stopped(ranks, status):
    start = time.monotonic()
    assert launch([str(status), str(ranks)], 2, "cpu") == status
    assert time.monotonic() - start < 30


def test_a_killed_rank_takes_the_others_down_and_is_named(ranks, capsys):
    assert launch(["killed", str(ranks)], 2, "cpu") == 128 + signal.SIGKILL
    assert capsys.readouterr().err == "error: rank 1 was ended by SIGKILL; stopping the others\n"


def test_sigterm_reaches_every_rank_and_their_status_is_ours(ranks):
    def send_when_started():
        while len(names(ranks)) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send_when_started, daemon=True).start()
    assert launch(["term", str(ranks)], 2, "cpu") == 143


def test_an_interrupt_of_the_launcher_alone_reaches_the_ranks(ranks, monkeypatch, capsys):
    """Ctrl-C reaches them by itself; `kill -INT` of the launcher does not."""
    monkeypatch.setattr(launcher, "INTERRUPT_SECONDS", 0.1)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # also where these tests run in the background

    def send_when_started():
        while len(names(ranks)) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send_when_started, daemon=True).start()
    try:
        assert launch(["interrupted", str(ranks)], 2, "cpu") == 130
    finally:
        signal.signal(signal.SIGINT, previous)
    assert capsys.readouterr().err == "error: interrupted\n"


def test_an_interrupted_rank_is_named(ranks, capsys):
    assert launch(["130", str(ranks)], 2, "cpu") == 130
    assert capsys.readouterr().err == "error: rank 1 was ended by SIGINT; stopping the others\n"


def test_an_ignored_interrupt_stays_ignored(ranks, monkeypatch):
    """A shell starts its background jobs so, and the ranks inherit it: passing it on would end nothing."""
    handlers, watch = [], launcher.supervise
    monkeypatch.setattr(launcher, "supervise", lambda *given: (handlers.append(signal.getsignal(signal.SIGINT)),
                                                               watch(*given))[1])
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert launch(["ok", str(ranks)], 2, "cpu") == 0
        assert handlers == [signal.SIG_IGN] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_what_a_rank_inherits():
    ours = rank_environment({"HF_HUB_OFFLINE": "0", "RLK_TP": "2"}, 2, "cpu")
    assert ours["HF_HUB_OFFLINE"] == "0" and ours["RLK_TP"] == "2" and ours["TOKENIZERS_PARALLELISM"] == "false"
    assert int(ours["OMP_NUM_THREADS"]) >= 1 and ours["WORLD_SIZE"] == "2" and ours["MASTER_ADDR"] == "127.0.0.1"
    assert rank_environment({"OMP_NUM_THREADS": "7"}, 2, "cpu")["OMP_NUM_THREADS"] == "7"


def test_an_installed_package_has_the_environment_files():
    """They are data, which setuptools leaves out unless pyproject.toml names them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["rlk.launch"]
    assert {path for pattern in patterns for path in LAUNCH.glob(pattern)} == set((LAUNCH / "env").iterdir())


def test_places_on_the_second_of_two_slurm_nodes():
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "gpu07"}
    ours = rank_environment(slurm, 8, "cuda")
    assert (ours["WORLD_SIZE"], ours["GROUP_RANK"], ours["MASTER_ADDR"]) == ("16", "1", "gpu07")


def test_localhost_on_two_slurm_nodes_starts_nothing(ranks, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-08]")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(UsageError, match="MASTER_ADDR=gpu07 "):
        launch(["ok", str(ranks)], 2, "cpu")
    assert names(ranks) == []


def test_sbatch_reads_its_variables_in_the_task(tmp_path):
    """The submitting host has another node list than the task; the task's must win."""
    for name, text in (("srun", 'SLURM_JOB_NODELIST="task1 task2" exec "$@"'),
                       ("scontrol", 'printf "%s\\n" $3'),
                       ("bin/rlk", 'echo "$MASTER_ADDR: $*"')):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "submit1 submit2",
                                "MASTER_ADDR": "localhost"}
    shown = subprocess.run(["bash", str(LAUNCH / "slurm/two-nodes.sbatch"), "--steps", "3"], cwd=tmp_path, text=True,
                           env=environment, capture_output=True, check=True).stdout
    assert shown == "task1: run --profile mi300x-qwen3-8b --steps 3\n"


@pytest.mark.parametrize("path", sorted((LAUNCH / "slurm").glob("*.sbatch")), ids=lambda path: Path(path).name)
def test_sbatch_files_are_valid_bash(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
