"""Prompt files (CASES 22, 23), their order, and the tokenizer."""

import json

import pytest

from rlk.data.prompts import Example, PromptStream, load_prompts
from rlk.data.tokenizer import Tokenizer
from rlk.errors import UsageError
from rlk.model.tiny import EOS, encode, write_tokenizer

GOOD = {"prompt": "7+5=", "answer": "12"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory)
    return Tokenizer(directory)


def test_tokenizer_round_trip(tokenizer):
    assert tokenizer.encode("7+5=") == encode("7+5=")
    assert tokenizer.decode([*tokenizer.encode("a b , c"), EOS]) == "a b , c"
    assert len(tokenizer) == max(encode("~")) + 1


def test_missing_tokenizer(tmp_path):
    with pytest.raises(UsageError, match="no tokenizer at"):
        Tokenizer(tmp_path / "nothing")
    with pytest.raises(UsageError, match="has no tokenizer, expected tokenizer.json or vocab.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="has no tokenizer that transformers can load"):
        Tokenizer(tmp_path)


def test_load_keeps_order_and_answers(tmp_path, tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps({"prompt": "1+1=", "answer": 2, "extra": None}) + "\n")
    assert load_prompts(path, tokenizer) == [Example(tuple(encode("7+5=")), "12"),
                                             Example(tuple(encode("1+1=")), "2")]


@pytest.mark.parametrize("line, message", [
    ('{"prompt": "1"', "line 2 is not valid JSON"),
    ('["1", "2"]', "line 2 is list, expected an object"),
    ('{"prompt": "1", "anwser": "1"}', "line 2 has no column 'answer' (did you mean anwser?); it has 'prompt', "
                                       "'anwser'"),
    ('{"answer": "1"}', "line 2 has no column 'prompt'"),
    ('{"prompt": 1, "answer": "1"}', "prompt is int, expected a text or a list of chat messages"),
    ('{"prompt": ["1"], "answer": "1"}', "prompt is list, expected a text or a list of chat messages"),
    ('{"prompt": "1", "answer": null}', "answer is NoneType, expected a text or a number"),
    ('{"prompt": "", "answer": "1"}', "line 2: the prompt is empty"),
    ('{"prompt": "123456789", "answer": "1"}', "the prompt has 9 tokens, but the model's context leaves 8"),
    ('{"prompt": [{"role": "user", "content": "1"}], "answer": "1"}', "the tokenizer has no chat template"),
])
def test_bad_line_is_named(tmp_path, tokenizer, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(UsageError) as caught:
        load_prompts(path, tokenizer, longest=8)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file(tmp_path, tokenizer, content):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(UsageError, match="has no prompts"):
        load_prompts(tmp_path / "p.jsonl", tokenizer)


def test_missing_file_and_binary_file(tmp_path, tokenizer):
    with pytest.raises(UsageError, match="no prompt file"):
        load_prompts(tmp_path / "p.jsonl", tokenizer)
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read the prompt file"):
        load_prompts(tmp_path / "p.jsonl", tokenizer)


def test_messages_go_through_the_chat_template(tmp_path):
    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = ("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
                                 "{% if add_generation_prompt %}go:{% endif %}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "p.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}\n')
    assert load_prompts(tmp_path / "p.jsonl", Tokenizer(tmp_path))[0].tokens == tuple(encode("user:1+1;go:"))


def examples(n):
    return [Example((i,), str(i)) for i in range(n)]


def test_every_epoch_has_every_prompt_once_in_its_own_order():
    stream = PromptStream(examples(10), seed=3)
    answers = [answer for step in range(6) for answer in stream.batch(step, 5)[1]]
    epochs = [answers[:10], answers[10:20], answers[20:]]
    assert all(sorted(epoch) == sorted(map(str, range(10))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_depends_on_seed_and_step_alone():
    fresh = PromptStream(examples(7), seed=1).batch(5, 4)
    used = PromptStream(examples(7), seed=1)
    for step in (9, 0, 5, 1):
        used.batch(step, 4)
    assert used.batch(5, 4) == fresh
    assert PromptStream(examples(7), seed=2).batch(5, 4)[1] != fresh[1]


def test_prompt_uids_never_repeat_and_a_batch_may_be_larger_than_the_file():
    stream = PromptStream(examples(3), seed=0)
    prompts = [prompt for step in range(4) for prompt in stream.batch(step, 8)[0]]
    assert [prompt.uid for prompt in prompts] == list(range(32))
