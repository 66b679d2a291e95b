"""Checkpoints in and out, and resharding, by the bytes of the weights."""

import errno
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlk.collectives import LocalCommunicator
from rlk.errors import UsageError
from rlk.model import weights
from rlk.model.config import ModelConfig
from rlk.model.qwen3 import Qwen3
from rlk.model.weights import gather_full, load_model, reshard_into, save_model, storage_checksum
from tests.models import TINY_SHAPE, TOKENS_T, bits, logits_of, random_model
from tests.thread_ranks import on_threads

FOUR_HEADS = dict(num_heads=8, num_kv_heads=4, tie_embeddings=True)


def save(tmp_path, model, name="saved"):
    save_model(model, tmp_path / name, LocalCommunicator())
    return tmp_path / name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_model_comes_back_byte_for_byte(tmp_path, dtype, tied):
    model = random_model(0, dtype, tie_embeddings=tied)
    loaded = load_model(save(tmp_path, model), dtype)
    assert bits(loaded.storage) == bits(model.storage)
    assert loaded.config == model.config


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_model_loads_in_transformers_with_the_same_logits(tmp_path, tied):
    model = random_model(1, tie_embeddings=tied)
    twin = AutoModelForCausalLM.from_pretrained(save(tmp_path, model), dtype=torch.float32).eval()
    with torch.no_grad():
        theirs_TV = twin(TOKENS_T[None]).logits[0]
    torch.testing.assert_close(logits_of(model)[:, :500], theirs_TV, rtol=1e-4, atol=1e-4)
    assert twin.generation_config.eos_token_id == [1, 2]


def test_a_checkpoint_that_transformers_wrote_loads_with_the_same_logits(tmp_path):
    exported = save(tmp_path, random_model(2))
    twin = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    twin.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    ours, theirs = load_model(exported, torch.float32), load_model(tmp_path / "theirs", torch.float32)
    assert theirs.config == ours.config
    assert bits(theirs.storage) == bits(ours.storage)


def test_a_large_export_is_cut_into_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MAX_FILE_BYTES", 100_000)
    model = random_model(0)
    directory = save(tmp_path, model)
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in gather_full(model).values())
    for name, file in index["weight_map"].items():
        assert name in load_file(directory / file)
    assert bits(load_model(directory, torch.float32).storage) == bits(model.storage)


@given(world=st.sampled_from([2, 4]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=4, deadline=None)
def test_each_rank_reads_its_shard_and_the_group_gathers_the_whole(tmp_path_factory, world, dtype):
    tmp_path = tmp_path_factory.mktemp("weights")
    whole = random_model(3, dtype, leaves=4, **FOUR_HEADS)
    directory = save(tmp_path, whole)

    def one_rank(comm):
        loaded = load_model(directory, dtype, "cpu", comm, leaves=4)
        cut = random_model(3, dtype, comm, leaves=4, **FOUR_HEADS)
        return bits(loaded.storage) == bits(cut.storage), gather_full(loaded)

    expected = gather_full(whole)
    for equal, full in on_threads(world, one_rank):
        assert equal
        assert full.keys() == expected.keys()
        assert all(bits(full[name]) == bits(expected[name]) for name in full)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
def test_resharding_gives_the_rollout_ranks_shards_with_version_and_checksum(tp, rollout_tp):
    class RolloutRank:
        def __init__(self, rank):
            self.rank, self.world = rank, rollout_tp

    leaves = max(tp, rollout_tp)

    def one_rank(comm):
        source = random_model(4, torch.bfloat16, comm, leaves, **FOUR_HEADS)
        source.policy_version = 5
        target = Qwen3(source.config, torch.bfloat16, "cpu", RolloutRank(comm.rank % rollout_tp), leaves)
        reshard_into(target, source)
        return target

    for target in on_threads(tp, one_rank):
        expected = random_model(4, torch.bfloat16, RolloutRank(target.tp_comm.rank), leaves, **FOUR_HEADS)
        assert bits(target.storage) == bits(expected.storage)
        assert target.policy_version == 5
        assert target.checksum == storage_checksum(expected)


def test_only_rank_0_writes_and_carries_the_tokenizer_over(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 1], "top_k": 20}')
    (source / "unrelated.txt").write_text("x")
    on_threads(2, lambda comm: save_model(random_model(0, comm=comm, leaves=2), tmp_path / "saved", comm, source))
    saved = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert saved == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert ModelConfig.from_pretrained(tmp_path / "saved").eos_token_ids == (2, 1)
    assert bits(load_model(tmp_path / "saved", torch.float32).storage) == bits(random_model(0).storage)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "source"]


def test_an_existing_directory_is_not_overwritten(tmp_path):
    (tmp_path / "saved").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        save(tmp_path, random_model(0))


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(UsageError, match="disk full"):
        save(tmp_path, random_model(0))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(tmp_path):
    directory = save(tmp_path, random_model(0))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 64)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UsageError, match=r"layers.1.mlp.up_proj.weight has shape \(95, 64\), expected \(96, 64\)"):
        load_model(directory, torch.float32)


def test_a_missing_and_an_unknown_tensor_are_named(tmp_path):
    directory = save(tmp_path, random_model(0))
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, directory / "model.safetensors")
    with pytest.raises(UsageError, match="model.layers.0.self_attn.q_proj.bias"):
        load_model(directory, torch.float32)
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UsageError, match=r"no tensor lm_head.weight.*tie_word_embeddings"):
        load_model(directory, torch.float32)


def test_a_broken_checkpoint_file_is_named(tmp_path):
    directory = save(tmp_path, random_model(0))
    (directory / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(UsageError, match="model.safetensors cannot be read"):
        load_model(directory, torch.float32)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="model.safetensors cannot be read"):
        load_model(directory, torch.float32)


@pytest.mark.parametrize("change, message", [
    (dict(architectures=["LlamaForCausalLM"], model_type="llama"), "the model is LlamaForCausalLM, expected Qwen3"),
    (dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe"), "Qwen3MoeForCausalLM"),
    (dict(attention_bias=True), "attention_bias = True"),
    (dict(use_sliding_window=True), "use_sliding_window = True"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "use_sliding_window = True"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type = 'yarn'"),
    (dict(rope_parameters=dict(rope_type="linear", rope_theta=1e6)), "rope_type = 'linear'"),
    (dict(num_experts=8), "num_experts = 8"),
    (dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
    (dict(num_key_value_heads=3), "num_attention_heads is 4, expected a multiple of num_key_value_heads .3."),
])
def test_another_kind_of_model_is_refused(tmp_path, change, message):
    config = ModelConfig(**TINY_SHAPE).as_hugging_face("float32") | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        ModelConfig.from_pretrained(tmp_path)


def test_a_missing_or_incomplete_config_is_refused(tmp_path):
    with pytest.raises(UsageError, match="config.json does not exist"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read as JSON"):
        ModelConfig.from_pretrained(tmp_path)
    config = ModelConfig(**TINY_SHAPE).as_hugging_face("float32")
    del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="lacks 'head_dim'"):
        ModelConfig.from_pretrained(tmp_path)


def test_eos_ids_of_the_generation_config_win_and_rope_theta_is_found_in_either_place():
    config = ModelConfig(**TINY_SHAPE).as_hugging_face("float32") | dict(eos_token_id=151645)
    assert ModelConfig.from_dict(config, {}).eos_token_ids == (151645,)
    both = ModelConfig.from_dict(config, dict(eos_token_id=[151645, 151643]))
    assert both.eos_token_ids == (151645, 151643)
    del config["rope_theta"]
    config["rope_parameters"] = dict(rope_theta=5e5, rope_type="default")
    assert ModelConfig.from_dict(config, {}).rope_theta == 5e5


def test_loading_in_bf16_rounds_and_pads_the_vocabulary_with_zeros(tmp_path):
    model = random_model(5)
    loaded = load_model(save(tmp_path, model), torch.bfloat16, shards=5)
    for name, weight in model.parameters.items():
        assert bits(loaded.parameters[name]) == bits(weight.bfloat16())
    assert loaded.parameters["lm_head"].shape[0] == 512
    assert loaded.parameters["lm_head"][500:].count_nonzero() == 0
    assert len(loaded.storage) % 5 == 0
