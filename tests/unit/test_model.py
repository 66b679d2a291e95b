"""The model against transformers' Qwen3ForCausalLM.

Shape legend: T tokens, H query heads, G key/value heads, E head dim, D hidden, V vocabulary.
"""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlk.errors import UsageError
from rlk.model.config import ModelConfig
from rlk.model.qwen3 import ALIGNMENT, Qwen3, parameter_specs
from rlk.model.weights import gather_full
from tests.models import TINY_SHAPE, TOKENS_T, OneSequence, bits, logits_of, random_model

# Qwen3 as published: hidden, intermediate, layers, heads, key/value heads, tied, and parameters in all.
PUBLISHED = {
    "0.6B": (1024, 3072, 28, 16, 8, True, 596_049_920),
    "1.7B": (2048, 6144, 28, 16, 8, True, 1_720_574_976),
    "4B": (2560, 9728, 36, 32, 8, True, 4_022_468_096),
    "8B": (4096, 12288, 36, 32, 8, False, 8_190_735_360),
    "14B": (5120, 17408, 40, 40, 8, False, 14_768_307_200),
    "32B": (5120, 25600, 64, 64, 8, False, 32_762_123_264),
}


def published_config(name):
    hidden, intermediate, layers, heads, kv_heads, tied, _ = PUBLISHED[name]
    return ModelConfig(hidden, intermediate, layers, heads, kv_heads, 128, 151936, 40960, tie_embeddings=tied)


def transformers_twin(model):
    """transformers' model with the same weights, FP32."""
    config = Qwen3Config.from_dict(model.config.as_hugging_face("float32"))
    twin = Qwen3ForCausalLM(config).eval()
    missing, unexpected = twin.load_state_dict({k: v.float() for k, v in gather_full(model).items()}, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected  # tied weights are loaded once
    twin.tie_weights()
    return twin


def transformers_logits(model):
    with torch.no_grad():
        return transformers_twin(model)(TOKENS_T[None]).logits[0]


@pytest.mark.parametrize("shape", [
    dict(),
    dict(tie_embeddings=True),
    dict(head_dim=32, num_heads=6, num_kv_heads=3, num_layers=3, rms_norm_eps=1e-5),
], ids=["untied", "tied", "head_dim is not hidden / heads"])
def test_logits_are_those_of_transformers(shape):
    model = random_model(0, **shape)
    torch.testing.assert_close(logits_of(model)[:, :500], transformers_logits(model), rtol=1e-4, atol=1e-4)


def test_bf16_logits_are_near_those_of_transformers_in_fp32():
    model = random_model(0, torch.bfloat16)
    ours_TV, theirs_TV = logits_of(model)[:, :500], transformers_logits(model)
    error = (ours_TV - theirs_TV).norm() / theirs_TV.norm()
    assert error < 0.03, error  # a handful of roundings to 8 bits each


def test_logits_of_vocabulary_padding_are_zero():
    assert model_padding(logits_of(random_model(0))).count_nonzero() == 0


def model_padding(logits_TV):
    assert logits_TV.shape == (len(TOKENS_T), 512)
    return logits_TV[:, 500:]


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_transformers(recompute):
    model = random_model(3, tie_embeddings=True)
    twin = transformers_twin(model)
    model.enable_training(recompute)
    weight_TD = torch.randn(len(TOKENS_T), 64, generator=torch.Generator().manual_seed(1))
    (model.hidden(TOKENS_T, OneSequence(len(TOKENS_T))) * weight_TD).sum().backward()
    (twin.model(TOKENS_T[None]).last_hidden_state[0] * weight_TD).sum().backward()
    theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for spec in model.specs:
        row = 0
        for part in spec.parts:
            rows = part.shape[0]
            ours = model.parameters[spec.name].main_grad[row:row + rows]
            expected = theirs[part.hf_name]
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item(),
                                       msg=lambda text, name=part.hf_name: f"{name}: {text}")
            row += rows


def test_recompute_changes_no_bit_of_the_gradients():
    flat = []
    for recompute in (False, True):
        model = random_model(4, torch.bfloat16)
        model.enable_training(recompute)
        model.hidden(TOKENS_T, OneSequence(len(TOKENS_T))).float().square().sum().backward()
        flat.append(bits(model.grads))
    assert flat[0] == flat[1]


def test_training_and_inference_forwards_have_the_same_bits():
    model = random_model(5, torch.bfloat16)
    expected = logits_of(model)
    model.enable_training(recompute=True)
    hidden_TD = model.hidden(TOKENS_T, OneSequence(len(TOKENS_T)))
    assert hidden_TD.requires_grad
    assert bits(model.logits(hidden_TD.detach())) == bits(expected)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_transformers_tensors_and_parameter_counts(name):
    config = published_config(name)
    parts = {part.hf_name: part.shape for spec in parameter_specs(config) for part in spec.parts}
    assert sum(torch.Size(shape).numel() for shape in parts.values()) == PUBLISHED[name][-1]
    with torch.device("meta"):
        twin = Qwen3ForCausalLM(Qwen3Config.from_dict(config.as_hugging_face("bfloat16")))
    assert parts == {key: tuple(parameter.shape) for key, parameter in twin.named_parameters()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_laid_out_for_eight_ranks(name):
    class RankThree:
        rank, world = 3, 8

    config = published_config(name)
    model = Qwen3(config, torch.bfloat16, "meta", RankThree(), leaves=8)
    sharded = sum(w.numel() for key, w in model.parameters.items() if w.tp_sharded and model.spans.get(key))
    whole = sum(w.numel() for w in model.parameters.values() if not w.tp_sharded)
    assert 8 * sharded + whole == PUBLISHED[name][-1]
    assert model.layers[0].qkv.shape == ((config.num_heads + 2 * 8) // 8 * 128, config.hidden_size)
    assert model.first_row == 3 * 151936 // 8


def test_parameters_are_aligned_views_of_one_storage():
    model = Qwen3(ModelConfig(**TINY_SHAPE), torch.bfloat16, shards=3)
    assert len(model.storage) % (3 * ALIGNMENT) == 0
    for name, span in model.spans.items():
        assert span.start % ALIGNMENT == 0
        assert model.parameters[name].data_ptr() == model.storage[span].data_ptr()
    assert not model.parameters["norm"].decay and model.parameters["layers.1.down"].decay
    assert model.parameters["layers.0.q_norm"].tp_partial and not model.parameters["layers.0.input_norm"].tp_partial


def test_a_model_that_cannot_be_cut_is_refused_with_the_numbers():
    class Rank:
        rank, world = 0, 4

    with pytest.raises(UsageError, match="num_key_value_heads is 2, expected a multiple of 4"):
        Qwen3(ModelConfig(**TINY_SHAPE), torch.float32, "cpu", Rank(), leaves=4)
    with pytest.raises(UsageError, match="leaves is 2, expected a power of two that tp .4. divides"):
        Qwen3(ModelConfig(**TINY_SHAPE), torch.float32, "cpu", Rank(), leaves=2)
    with pytest.raises(UsageError, match="intermediate_size is 98"):
        Qwen3(ModelConfig(**(TINY_SHAPE | dict(intermediate_size=98))), torch.float32, leaves=4)
