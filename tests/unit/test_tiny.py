"""The demo's model, tokenizer and prompts."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rlk.errors import UsageError
from rlk.model import tiny
from rlk.model.config import ModelConfig
from rlk.model.weights import load_model
from tests.models import OneSequence


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny.create_tiny(path, seed=0)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory / "model", local_files_only=True)


def answer_probability(model, prompt, answer):
    tokens_T = torch.tensor([*tiny.encode(prompt), *tiny.encode(answer), tiny.EOS])
    with torch.no_grad():
        logits_TV = model.logits(model.hidden(tokens_T[:-1], OneSequence(len(tokens_T) - 1)))
    logprob_TV = torch.log_softmax(logits_TV[:, :len(tiny.VOCABULARY)], dim=-1)
    rows = torch.arange(len(prompt) - 1, len(tokens_T) - 1)
    return float(logprob_TV[rows, tokens_T[1:][rows]].sum().exp())


def test_the_warm_start_leaves_every_answer_possible_and_most_of_the_task_to_learn(directory):
    model = load_model(directory / "model", torch.float32)
    right = np.array([answer_probability(model, prompt, answer) for prompt, answer in tiny.sums()])
    assert 0.35 < right.mean() < 0.5, right.mean()
    assert right.min() > 0.05, right.min()
    figures = answer_probability(model, "7+5=", "12")
    assert figures > 0.2, figures  # the other spelling, which the reward does not count


def test_the_heads_may_be_those_that_gpus_serve(monkeypatch, tmp_path):
    monkeypatch.setattr(tiny, "MOST_STEPS", 1)
    tiny.create_tiny(tmp_path, head_dim=64)
    assert ModelConfig.from_pretrained(tmp_path / "model").head_dim == 64
    assert load_model(tmp_path / "model", torch.float32).parameters["layers.0.qkv"].shape == (8 * 64, 64)


def test_the_tokenizer_has_one_token_for_each_character_and_restores_the_text(tokenizer):
    text = "7+5= twelve, ~{}\n  two  spaces\\"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == tiny.encode(text)
    assert tokenizer.decode([*ids, tiny.EOS, tiny.PAD], skip_special_tokens=True) == text
    assert tokenizer.encode("é", add_special_tokens=False) == [tiny.VOCABULARY["<unk>"]]


def test_the_tokenizer_knows_fewer_ids_than_the_model(directory, tokenizer):
    config = ModelConfig.from_pretrained(directory / "model")
    assert len(tokenizer) == len(tiny.VOCABULARY) < config.vocab_size
    assert config.eos_token_ids == (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end>"))
    assert config.pad_token_id == tokenizer.pad_token_id


def test_the_prompts_are_all_sums_of_two_digits(directory):
    lines = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    assert len(lines) == 100
    assert {"prompt": "7+5=", "answer": "twelve"} in lines


def test_the_same_seed_gives_the_same_files_and_another_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "MOST_STEPS", 2)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        tiny.create_tiny(tmp_path / name, seed)
    for file in ("model/model.safetensors", "model/config.json", "model/tokenizer.json", "prompts.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in "ac"]
    assert weights[0] != weights[1]


def test_an_existing_model_is_not_overwritten(directory):
    with pytest.raises(UsageError, match="exists already"):
        tiny.create_tiny(directory)
