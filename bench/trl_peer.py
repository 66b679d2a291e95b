"""The peer of bench/cpu_step.py: TRL's GRPOTrainer on the same checkpoint, prompts and batch shape.

Run by cpu_step.py under an interpreter that has TRL (bench/requirements-trl.txt), alone or under torchrun. Prints one
JSON line: seconds and response tokens of every step, and the versions. TRL's defaults are kept except where they would
cost it time on a CPU: no gradient checkpointing, no bf16 autocast.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import trl
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer, TrainerCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option, kind in (("--model", str), ("--prompts", str), ("--steps", int), ("--batch", int), ("--samples", int),
                         ("--max-new", int), ("--temperature", float), ("--top-p", float), ("--kl", float),
                         ("--lr", float), ("--threads", int)):
        parser.add_argument(option, type=kind, required=True)
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(args.threads)
    disable_progress_bars()

    ends, tokens = [], []

    class StepClock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            ends.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    def digits(completions, completion_ids, **_):
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

    with open(args.prompts) as lines, tempfile.TemporaryDirectory() as scratch:
        data = Dataset.from_dict({"prompt": [json.loads(line)["prompt"] for line in lines]})
        config = trl.GRPOConfig(
            output_dir=scratch, use_cpu=True, max_steps=args.steps, num_generations=args.samples,
            per_device_train_batch_size=args.batch * args.samples // world, max_completion_length=args.max_new,
            temperature=args.temperature, top_p=args.top_p, learning_rate=args.lr, beta=args.kl,
            lr_scheduler_type="constant", warmup_steps=0, bf16=False, gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"}, ddp_backend="gloo" if world > 1 else None, save_strategy="no",
            report_to="none", disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False)
        trainer = trl.GRPOTrainer(model=args.model, reward_funcs=digits, args=config, train_dataset=data,
                                  processing_class=AutoTokenizer.from_pretrained(args.model), callbacks=[StepClock()])
        torch.set_num_threads(args.threads)  # the trainer's set-up resets it
        trainer.train()
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(dict(seconds=[b - a for a, b in zip(ends, ends[1:], strict=False)],
                              tokens=[n * world for n in tokens],
                              versions=dict(trl=trl.__version__, torch=torch.__version__))))


if __name__ == "__main__":
    main()
