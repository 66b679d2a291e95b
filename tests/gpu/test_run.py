"""Whole runs on GPUs: the audit's verdict, the evidence, repeatability, and the controls that must fail.

Runs on one GPU are in this process, so that conftest.py sees which kernels they launched; those on two are started as a
user starts them, by `rlk run` and by torchrun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from rlk.audit.validate import validate_run
from rlk.config import FAULTS, resolve
from rlk.errors import CheckFailed
from rlk.ops.registry import registry
from rlk.train.trainer import run
from tests.e2e.runs import ROOT, audit, metrics, repeatable, rlk, run_options

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

GPU_BACKENDS = {"triton", "hip", "cublas", "communicator"}
LIMIT_S = 300.0  # the first run on a machine compiles the kernels


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory with model/, whose heads the GPU kernels serve, and prompts.jsonl."""
    directory = tmp_path_factory.mktemp("tiny")
    done = rlk("init-model", str(directory), "--head-dim", "64", timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """As launch/env/cuda.env has it for ranks; and afterwards as it was."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    registry.forget_calls()
    yield
    torch.use_deterministic_algorithms(False)


def run_here(tiny, run_dir, **options) -> None:
    chosen = dict(model=str(tiny / "model"), prompts=str(tiny / "prompts.jsonl"), run_dir=str(run_dir), steps=3,
                  save_model=False) | options
    run(*resolve("gpu-tiny", chosen, {}))


def check_passed(run_dir, replicas: int = 1) -> None:
    """PASS with no unequal bit, every response token compared on each of `replicas`, on GPU backends alone."""
    summary, steps = audit(run_dir), metrics(run_dir)
    assert (summary["verdict"], summary["unequal"], summary["replicas_unequal"]) == ("pass", 0, 0)
    assert summary["compared"] == sum(line["response_tokens"] for line in steps) > 500
    assert summary["replicas_compared"] == replicas * summary["compared"]
    assert (run_dir / "COMPLETE").exists()
    verdict = validate_run(run_dir)
    assert verdict.ok, verdict
    for line in steps:
        assert line["peak_memory_bytes"] > 1 << 20
    for path in (run_dir / "readback").iterdir():
        for call in json.loads(path.read_text())["calls"]:
            assert (call["device"], call["contract"]) == ("cuda", True) and call["backend"] in GPU_BACKENDS, call


def test_a_run_passes_validates_and_gives_the_same_bytes_again(tiny, tmp_path):
    for name in ("a", "b"):
        run_here(tiny, tmp_path / name, save_model=True)
        check_passed(tmp_path / name)
        assert all(line["grad_norm"] > 0 for line in metrics(tmp_path / name))
    assert repeatable(tmp_path / "a") == repeatable(tmp_path / "b")
    for name in ("audit/step-00000.npz", "audit/step-00002.npz", "model/model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize("options", [
    dict(top_p=1.0, global_batch_size=64, recompute=False, kl_coef=0.0),
    dict(temperature=0.7, top_k=12, min_p=0.01, prefill_chunk=8, max_running=9, page_size=4, max_tokens_per_gpu=64),
    dict(temperature=0.0, use_rollout_logprobs=True),
], ids=["vocabulary", "small sizes", "greedy"])
def test_other_ways_through_the_loop_keep_the_bits(tiny, tmp_path, options):
    run_here(tiny, tmp_path / "run", steps=2, **options)
    check_passed(tmp_path / "run")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_link_fails_the_audit(tiny, tmp_path, fault):
    with pytest.raises(CheckFailed, match=r"audit: .* step 0, sample \d+ \(tp0\), position \d+ .*: rollout 0x"):
        run_here(tiny, tmp_path / "run", steps=1, inject_fault=fault)
    assert audit(tmp_path / "run")["verdict"] == "fail" and not validate_run(tmp_path / "run").ok


@pytest.mark.parametrize("torchrun, options, replicas", [(False, dict(nproc=2, tp=2), 2), (True, dict(tp=1), 1)],
                         ids=["tp2", "dp2 by torchrun"])
def test_two_gpus_keep_the_bits(tiny, tmp_path, torchrun, options, replicas):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there are {torch.cuda.device_count()}")
    arguments = run_options(tiny, tmp_path / "run", "gpu-tiny", steps=3, rollout_batch_size=16, samples_per_prompt=8,
                            global_batch_size=128, **options)
    if torchrun:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "bin/rlk.py"]
        environment = {name: x for name, x in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
        done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S,
                              env=environment)
    else:
        done = rlk(*arguments, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    check_passed(tmp_path / "run", replicas)
    for path in (tmp_path / "run" / "readback").iterdir():  # the collectives are the GPUs' own
        assert set(json.loads(path.read_text())["collectives"].values()) <= {"local", "ipc"}
