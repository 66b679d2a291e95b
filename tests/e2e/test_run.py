"""Whole runs: the verdict, the evidence, repeatability, the modes, and what happens when a rank dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.e2e.runs import ROOT, audit, metrics, repeatable, rlk, run_options


def test_a_run_passes_and_validates_and_its_model_loads_elsewhere(tiny, tmp_path):
    done = rlk(*run_options(tiny, tmp_path / "run", save_model=True))
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stdout and (tmp_path / "run" / "COMPLETE").exists()
    summary = audit(tmp_path / "run")
    assert summary["verdict"] == "pass" and summary["unequal"] == 0 and summary["steps"] == 2
    assert summary["compared"] == sum(line["response_tokens"] for line in metrics(tmp_path / "run"))
    assert summary["replicas_compared"] == 2 * summary["compared"]  # two tensor-parallel ranks
    assert (tmp_path / "run" / "report.png").stat().st_size > 10_000
    again = rlk("validate", str(tmp_path / "run"))
    assert again.returncode == 0, again.stdout

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "model")) == 100


def test_one_flipped_bit_of_the_evidence_is_found_and_named(tiny, tmp_path):
    run_dir = tmp_path / "run"
    assert rlk(*run_options(tiny, run_dir, steps=1)).returncode == 0
    file = run_dir / "audit" / "step-00000.npz"
    arrays = dict(np.load(file))
    arrays["train_bits"][3] ^= 1
    np.savez(file, **arrays)
    done = rlk("validate", str(run_dir))
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if "position" in line)
    assert "step 0" in line and "sample" in line and f"0x{arrays['train_bits'][3]:08x}" in line


@pytest.mark.parametrize("options", [
    dict(nproc=2, tp=2),
    dict(nproc=2, tp=1, cp=2, dtype="float32"),
    dict(nproc=2, tp=1, rollout_tp=2, global_batch_size=8, temperature=0.7, top_p=0.9, top_k=12),
    dict(nproc=1, tp=1, use_rollout_logprobs=True, recompute=False, top_p=1.0),
])
def test_the_same_command_twice_gives_the_same_tokens_losses_and_weights(tiny, tmp_path, options):
    for name in ("a", "b"):
        done = rlk(*run_options(tiny, tmp_path / name, save_model=True, **options))
        assert done.returncode == 0, done.stderr
    assert repeatable(tmp_path / "a") == repeatable(tmp_path / "b")
    for file in ("audit/step-00000.npz", "audit/step-00001.npz", "model/model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    assert metrics(tmp_path / "a")[-1]["grad_norm"] > 0


def test_native_mode_runs_the_same_loop_and_reports_its_mismatch(tiny, tmp_path):
    done = rlk(*run_options(tiny, tmp_path / "run", mode="native", dtype="float32"))
    assert done.returncode == 0, done.stderr
    summary = audit(tmp_path / "run")
    assert summary["mode"] == "native" and summary["compared"] > 100
    assert summary["unequal"] > 0  # plain torch operators: decode and the packed forward differ in bits


def test_responses_that_are_all_cut_and_masked_give_loss_zero_and_a_warning(tiny, tmp_path):
    done = rlk(*run_options(tiny, tmp_path / "run", steps=1, max_response_len=1, ignore_eos=True, mask_truncated=True))
    assert done.returncode == 0, done.stderr
    (line,) = metrics(tmp_path / "run")
    assert line["loss"] == 0.0 and line["grad_norm"] == 0.0 and line["samples_in_loss"] == 0
    assert line["mean_response_tokens"] == 1.0 and line["truncated_fraction"] == 1.0
    assert "warning" in done.stdout


def test_torchrun_without_a_command_runs_the_profile_that_fits(tiny, tmp_path):
    environment = dict(RLK_MODEL=str(tiny / "model"), RLK_PROMPTS=str(tiny / "prompts.jsonl"), RLK_STEPS="1",
                       RLK_RUN_DIR=str(tmp_path / "run"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "bin/rlk.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stdout and (tmp_path / "run" / "COMPLETE").exists()


def heed_interrupts():
    """In a child: as from a terminal, though tests in the background inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def training(tiny, run_dir):
    """(launcher, process ids of its two ranks) of a long run, once it trains; in a session of its own."""
    arguments = run_options(tiny, run_dir, steps=10_000)
    launcher = subprocess.Popen([sys.executable, str(ROOT / "bin" / "rlk"), *arguments], stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_interrupts)
    try:
        deadline = time.monotonic() + 100
        while not (run_dir / "metrics.jsonl").exists() or not metrics(run_dir):
            assert time.monotonic() < deadline and launcher.poll() is None, launcher.stderr.read()
            time.sleep(0.1)
        children = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(launcher.pid)], capture_output=True,
                                  text=True)
        ranks = [int(line.split()[0]) for line in children.stdout.splitlines() if "rlk.cli" in line]
        assert len(ranks) == 2
        yield launcher, ranks
        assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in ranks)
    finally:
        launcher.kill()
    assert not (run_dir / "COMPLETE").exists()


def test_a_killed_rank_takes_the_others_down_and_nothing_is_called_complete(tiny, tmp_path):
    with training(tiny, tmp_path / "run") as (launcher, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        assert launcher.wait(timeout=30) == 128 + signal.SIGKILL
        assert time.monotonic() - killed < 30
    assert "rank 1" in launcher.stderr.read()


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["Ctrl-C", "to the launcher alone"])
def test_an_interrupted_run_ends_with_one_line_and_130(send, tiny, tmp_path):
    with training(tiny, tmp_path / "run") as (launcher, _):
        send(launcher.pid, signal.SIGINT)
        assert launcher.wait(timeout=30) == 128 + signal.SIGINT
    said = [line for line in launcher.stderr.read().splitlines() if "error" in line.lower() or "Traceback" in line]
    assert said == ["error: interrupted"]


def test_input_that_fails_on_rank_0_after_the_start_is_one_line_and_exit_2(tiny, tmp_path):
    done = rlk(*run_options(tiny, tmp_path / "run", reward="json:loads", answer_key="answer", lr=0.0, steps=1))
    assert done.returncode == 0 and "rewards failed" in done.stdout  # the reward's own failure is no bad input
    (tmp_path / "file").write_text("in the way")
    done = rlk(*run_options(tiny, tmp_path / "file" / "run", steps=1))
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if line.strip()] == [done.stderr.strip()]
