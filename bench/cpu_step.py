"""One GRPO step on a CPU: consistency against native, and against TRL, on the same shapes, in one run, both orders.

    .venv/bin/python bench/cpu_step.py --trl-python VENV/bin/python   (VENV: pip install -r bench/requirements-trl.txt)

8 prompts x 8 samples x 64 new tokens, 4 layers, hidden 256, vocabulary 512, FP32, KL 0.01, temperature 0.7, top-p 0.95.
Every arm is a process of its own that runs some steps; the first are warm-up and do not count. The arms run in turn,
then in reverse order; the figure of an arm is the median over all its counted steps. Ratios below 1 mean that the first
named is faster. `--trl-python ""` leaves the peer out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from record import ROOT, write_result

from rlk.model.config import ModelConfig
from rlk.model.tiny import write_tokenizer

PROMPTS, SAMPLES, NEW_TOKENS, TEMPERATURE, TOP_P, KL, LR = 8, 8, 64, 0.7, 0.95, 0.01, 1e-4
SHAPE = dict(vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
             head_dim=32, intermediate_size=768, max_position_embeddings=1024, tie_word_embeddings=False)
CORES = len(os.sched_getaffinity(0))


def make_input(directory: Path) -> None:
    """A random Qwen3 of SHAPE and 256 prompts, made by transformers, so that neither arm made its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, eos_token_id=1, pad_token_id=0)).save_pretrained(directory / "model")
    write_tokenizer(directory / "model")
    assert ModelConfig.from_pretrained(directory / "model").num_layers == SHAPE["num_hidden_layers"]
    draw = random.Random(0)
    rows = [{"prompt": f"{draw.randint(10, 99)}+{draw.randint(10, 99)}=", "answer": "0"} for _ in range(256)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_rlk(inputs: Path, mode: str, steps: int) -> dict:
    """Our loop on CORES data-parallel ranks of one thread each."""
    with tempfile.TemporaryDirectory() as scratch:
        options = dict(model=inputs / "model", prompts=inputs / "prompts.jsonl", run_dir=f"{scratch}/run", mode=mode,
                       dtype="float32", steps=steps, nproc=CORES, tp=1, rollout_batch_size=PROMPTS,
                       samples_per_prompt=SAMPLES, global_batch_size=PROMPTS * SAMPLES, max_response_len=NEW_TOKENS,
                       temperature=TEMPERATURE, top_p=TOP_P, kl_coef=KL, lr=LR, max_tokens_per_gpu=4096)
        flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, str(ROOT / "bin" / "rlk"), "run", "--profile", "cpu-tiny", "--ignore-eos",
                   "--no-recompute", "--no-save-model", *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{mode} failed:\n{done.stdout}{done.stderr}")
        lines = [json.loads(line) for line in Path(scratch, "run", "metrics.jsonl").read_text().splitlines()]
    return dict(seconds=[line["step_s"] for line in lines], tokens=[line["response_tokens"] for line in lines],
                rollout=[line["rollout_s"] for line in lines], train=[line["train_s"] for line in lines],
                compared=sum(line["compared"] for line in lines), unequal=sum(line["unequal"] for line in lines))


def run_trl(inputs: Path, python: str, steps: int) -> dict:
    """The peer in one process with all cores, the faster of its two layouts here (the other: DDP over gloo)."""
    options = dict(model=inputs / "model", prompts=inputs / "prompts.jsonl", steps=steps, batch=PROMPTS,
                   samples=SAMPLES, max_new=NEW_TOKENS, temperature=TEMPERATURE, top_p=TOP_P, kl=KL, lr=LR,
                   threads=CORES)
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run([python, str(ROOT / "bench" / "trl_peer.py"), *flags], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the peer failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="an interpreter that has TRL, or '' for no peer")
    parser.add_argument("--steps", type=int, default=8, help="steps of each process")
    parser.add_argument("--warm-up", type=int, default=2, help="of these, not counted")
    args = parser.parse_args()

    counted: dict[str, list[float]] = {}
    results: dict[str, list[dict]] = {}
    arms = ["consistency", "native"] + (["trl"] if args.trl_python else [])
    with tempfile.TemporaryDirectory() as scratch:
        inputs = Path(scratch)
        make_input(inputs)
        for arm in arms + arms[::-1]:
            result = (run_trl(inputs, args.trl_python, args.steps) if arm == "trl"
                      else run_rlk(inputs, arm, args.steps))
            results.setdefault(arm, []).append(result)
            counted.setdefault(arm, []).extend(result["seconds"][args.warm_up:])
            print(f"{arm:12} median {statistics.median(result['seconds'][args.warm_up:]):.3f} s a step, "
                  f"{statistics.median(result['tokens']):.0f} response tokens", flush=True)

    median = {arm: statistics.median(seconds) for arm, seconds in counted.items()}
    ours = results["consistency"]
    figures = {
        "consistency_over_native": median["consistency"] / median["native"],
        "consistency_compared": sum(r["compared"] for r in ours),
        "consistency_unequal": sum(r["unequal"] for r in ours),
        "native_compared": sum(r["compared"] for r in results["native"]),
        "native_unequal": sum(r["unequal"] for r in results["native"]),
        "cores": CORES,
    }
    if args.trl_python:
        figures["trl_over_consistency"] = median["trl"] / median["consistency"]
    for arm in arms:
        figures[f"{arm}_step_s"] = median[arm]
        figures[f"{arm}_response_tokens"] = statistics.median(n for r in results[arm] for n in r["tokens"])
    for part in ("rollout", "train"):
        for arm in ("consistency", "native"):
            figures[f"{arm}_{part}_s"] = statistics.median(s for r in results[arm] for s in r[part][args.warm_up:])
    write_result("cpu_step", f"python bench/cpu_step.py --trl-python VENV/bin/python --steps {args.steps} "
                             f"--warm-up {args.warm_up}", figures, results.get("trl", [{}])[0].get("versions"))


if __name__ == "__main__":
    main()
