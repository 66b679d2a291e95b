"""Runs of the real command line on the tiny model, for the end-to-end tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("rollout_s", "train_s", "step_s", "reward_s", "peak_memory_bytes")


def rlk(*arguments: str, timeout: float = 200, **environment: str) -> subprocess.CompletedProcess:
    """`bin/rlk ...` to its end; stdout and stderr as text."""
    command = [sys.executable, str(ROOT / "bin" / "rlk"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | environment)


def run_options(tiny: Path, run_dir: Path, profile: str = "cpu-tiny", **options) -> list[str]:
    """Arguments of a short run of a profile; True and False are flags."""
    chosen = dict(model=tiny / "model", prompts=tiny / "prompts.jsonl", run_dir=run_dir, steps=2,
                  rollout_batch_size=4, samples_per_prompt=4, global_batch_size=16, save_model=False) | options
    arguments = ["run", "--profile", profile]
    for name, value in chosen.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def repeatable(run_dir: Path) -> list[dict]:
    """The metrics without what a clock or the process's history decides."""
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in metrics(run_dir)]


def audit(run_dir: Path) -> dict:
    return json.loads((run_dir / "audit.json").read_text())
