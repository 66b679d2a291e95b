"""A tiny Qwen3 with its tokenizer and prompts, for the demo and for tests: nothing is downloaded.

The task is to add two digits and write the sum in words: "7+5=" -> "twelve". The weights come from a short supervised
warm start with the trainer's own packs, operators and optimizer. It teaches sums in words and in figures ("12") alike,
and stops as soon as a sample would be right about four times in ten. What is left for reinforcement learning is to
find out that only words count, and to become surer of the sums.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rlk.collectives import LocalCommunicator
from rlk.errors import UsageError
from rlk.files import disk_errors
from rlk.model.config import MOST_HEAD_DIM, ModelConfig, serves_head_dim
from rlk.model.qwen3 import Qwen3
from rlk.model.weights import gather_full, write_checkpoint
from rlk.ops.logprob import ScoreRule, score
from rlk.rollout.engine import Trajectory
from rlk.train.optimizer import ShardedAdamW
from rlk.train.packing import PackContext, make_pack

SPECIAL_TOKENS = ("<pad>", "<eos>", "<end>", "<unk>")
PAD, EOS, END = 0, 1, 2  # two ids end a response, as in Qwen3's own generation_config.json
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
VOCABULARY = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
                "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen")

CONFIG = ModelConfig(hidden_size=64, intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
                     vocab_size=512, max_position=1024, rope_theta=1e4, tie_embeddings=True,
                     eos_token_ids=(EOS, END), pad_token_id=PAD)

RIGHT_SHARE = 0.4  # mean probability of the whole right answer at which the warm start stops
MOST_STEPS = 200  # of the warm start; it takes about a third of them
LEARNING_RATE = 1e-3


def create_tiny(directory: str | Path, seed: int = 0, head_dim: int = CONFIG.head_dim) -> None:
    """Write <directory>/model (a Hugging Face checkpoint in FP32) and <directory>/prompts.jsonl.

    head_dim: elements of an attention head; GPUs serve 64 and 128, a CPU all that ModelConfig allows.
    Takes some seconds of one core. The same seed gives the same bytes. Raises UsageError when <directory>/model is
    there already.
    """
    directory = Path(directory)
    model_directory = directory / "model"
    if model_directory.exists():
        raise UsageError(f"{model_directory} exists already; choose another directory or remove it")
    if not serves_head_dim(head_dim):
        raise UsageError(f"--head-dim is {head_dim}, expected a multiple of 16 up to {MOST_HEAD_DIM}")
    config = replace(CONFIG, head_dim=head_dim)
    model = Qwen3(config, torch.float32)
    _random_weights(model, seed)
    _warm_start(model)
    partial = directory / ".model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with disk_errors(directory):
        partial.mkdir(parents=True)
        write_tokenizer(partial)
        write_checkpoint(partial, config, gather_full(model))
        lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in sums()]
        (directory / "prompts.jsonl").write_text("".join(lines))
        partial.rename(model_directory)


def sums() -> list[tuple[str, str]]:
    """Every (prompt, answer) of the task."""
    return [(f"{a}+{b}=", NUMBER_WORDS[a + b]) for a in range(10) for b in range(10)]


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json: one token for each printable ASCII character."""
    special = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "<unk>"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>",
                "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "model_max_length": CONFIG.max_position}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _random_weights(model: Qwen3, seed: int) -> None:
    """Norm weights one, matrices normal with variance 1 / (columns)."""
    generator = torch.Generator().manual_seed(seed)
    for spec in model.specs:
        weight = model.parameters[spec.name]
        if weight.dim() == 1:
            weight.fill_(1)
        else:
            weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)


def _warm_start(model: Qwen3) -> None:
    """Supervised steps, each on all prompts with their answers, until the answers are likely enough."""
    model.enable_training()
    alone = LocalCommunicator()
    optimizer = ShardedAdamW(model, alone, alone, lr=LEARNING_RATE, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.0,
                             grad_clip=1.0)
    rule = ScoreRule(temperature=1.0, valid_vocab=len(VOCABULARY))
    examples = [_example(prompt, answer) for prompt, answer in sums()]
    examples += [_example(prompt, str(NUMBER_WORDS.index(answer))) for prompt, answer in sums()]
    pack = make_pack(examples, list(range(len(examples))), cp=1, cp_rank=0)
    sample_R = torch.from_numpy(pack.sample_R)
    for _ in range(MOST_STEPS):
        hidden_TD = model.hidden(pack.tokens_T, PackContext(pack, alone))
        logprob_R, _ = score(hidden_TD[pack.rows_R], model.parameters["lm_head"], pack.targets_R, rule, alone)
        answer_logprob_N = torch.zeros(len(examples)).index_add(0, sample_R, logprob_R.detach())
        if answer_logprob_N[:len(sums())].exp().mean() >= RIGHT_SHARE:
            return
        (-logprob_R.mean()).backward()
        optimizer.step()


def _example(prompt: str, answer: str) -> Trajectory:
    """A prompt with its answer, as the trainer takes samples."""
    response = np.array([*encode(answer), EOS], np.int32)
    return Trajectory(0, np.array(encode(prompt), np.int32), response, np.zeros(len(response), np.float32), None, None,
                      "eos", 0)


def encode(text: str) -> list[int]:
    """What the tokenizer gives for printable text."""
    return [VOCABULARY[character] for character in text]
