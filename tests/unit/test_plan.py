"""The memory plan (CASES 7)."""

import dataclasses
import re

import pytest
import torch

from rlk.collectives.ipc_library import SIZES, segment_bytes
from rlk.config import RunConfig, resolve
from rlk.errors import UsageError
from rlk.model.config import ModelConfig
from rlk.model.qwen3 import Qwen3
from rlk.plan import (
    GIB,
    activation_bytes,
    available_memory,
    layer_bytes,
    local_parameters,
    plan_memory,
)
from rlk.report.plan import memory_table
from rlk.topology import Topology

SMALL = ModelConfig(hidden_size=64, intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
                    vocab_size=500, max_position=1024)
QWEN3_8B = ModelConfig(hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8,
                       head_dim=128, vocab_size=151936, max_position=40960)


def plan(config, model=SMALL, world=1, available=64 * GIB, longest_prompt=20):
    topology = Topology.plan(world, 0, config.tp, config.cp, config.engine_tp, model)
    return plan_memory(config, model, topology, longest_prompt, available)


@pytest.mark.parametrize("tie", [False, True])
def test_parameters_are_the_models(tie):
    model = dataclasses.replace(SMALL, tie_embeddings=tie)
    built = Qwen3(model, torch.float32)
    assert local_parameters(model, 1) == sum(built.parameters[spec.name].numel() for spec in built.specs)


def test_8b_has_the_published_number_of_parameters():
    assert local_parameters(QWEN3_8B, 1) == 8_190_735_360
    assert 4 * local_parameters(QWEN3_8B, 4) == pytest.approx(8_190_735_360, rel=1e-3)


def test_what_does_not_fit_is_refused_with_the_sum_item_by_item():
    memory = plan(RunConfig(kl_coef=0.01), QWEN3_8B, available=24 * GIB)
    with pytest.raises(UsageError) as caught:
        memory.check()
    text = str(caught.value)
    for name, size in memory.items.items():
        assert f"{name} {size / GIB:.2f} GiB" in text
    assert f"= {memory.total / GIB:.2f} GiB on each rank, but 24.00 GiB is available" in text and "\n" not in text


@pytest.mark.parametrize("options, largest, advice, followed", [
    (dict(device="cuda"), "optimizer (fp32 master, two moments)", "raise --tp or --nproc", dict(tp=2)),
    (dict(max_tokens_per_gpu=1 << 20), "activations", "lower --max-tokens-per-gpu", dict(max_tokens_per_gpu=1 << 18)),
    (dict(max_tokens_per_gpu=1 << 16, recompute=False), "activations", "or give --recompute", dict(recompute=True)),
    (dict(prefill_chunk=1 << 20, max_response_len=30000, rollout_batch_size=8), "activations", "lower --prefill-chunk",
     dict(prefill_chunk=1 << 18)),
    (dict(max_running=1 << 16, rollout_batch_size=1 << 13), "logits", "lower --max-running", dict(max_running=64)),
    (dict(max_response_len=40000, memory_fraction=1.0, rollout_batch_size=1 << 8), "KV pages",
     "lower --memory-fraction", dict(memory_fraction=0.5)),
])
def test_what_to_do_is_said_of_the_largest_item_and_makes_it_smaller(options, largest, advice, followed):
    memory = plan(RunConfig(**options), QWEN3_8B, available=100 * GIB)
    with pytest.raises(UsageError, match=re.escape(f"most goes to {largest}: ") + ".*" + re.escape(advice)):
        memory.check()
    other = RunConfig(**options | followed)
    assert plan(other, QWEN3_8B, other.tp, 100 * GIB).items[largest] < memory.items[largest]


def test_every_item_has_a_remedy():
    everything = plan(RunConfig(kl_coef=0.1, tp=2, rollout_tp=1, device="cuda"), world=2)
    assert everything.items.keys() == everything.remedies.keys()


def test_ranks_of_a_cpu_host_are_no_remedy():
    memory = plan(RunConfig(), QWEN3_8B, available=24 * GIB)
    with pytest.raises(UsageError, match="smaller model or a larger host"):
        memory.check()


@pytest.mark.parametrize("profile, gpu_bytes", [("mi300x-qwen3-8b", 191 * GIB), ("h200-qwen3-8b", 139 * GIB)])
def test_the_gpu_profiles_fit_their_gpus(profile, gpu_bytes):
    config, _ = resolve(profile, {}, {})
    memory = plan(config, QWEN3_8B, config.nproc, gpu_bytes, longest_prompt=1024)
    memory.check()
    assert memory.kv_pages == 8 * (1024 + 6912) // config.page_size


def test_weights_are_held_again_for_a_reference_and_for_another_rollout_tp():
    weights = local_parameters(SMALL, 1) * 2
    alone = plan(RunConfig())
    assert alone.items["weights"] == weights
    assert "reference model" not in alone.items and "engine's own weights" not in alone.items
    assert plan(RunConfig(kl_coef=0.1)).items["reference model"] == weights
    assert plan(RunConfig(rollout_tp=2), world=2).items["engine's own weights"] == local_parameters(SMALL, 2) * 2


def test_communicators_of_gpus_are_counted_as_they_are_made():
    """The patient groups have their own, even of the same ranks; groups that GPU IPC does not serve have none."""
    def collectives(world, **options):
        return plan(RunConfig(device="cuda", dtype="bfloat16", **options), world=world).items["collectives"]

    pair, four = segment_bytes(SIZES, 2), segment_bytes(SIZES, 4)
    assert "collectives" not in plan(RunConfig(tp=2), world=2).items
    assert collectives(1) == 0 and collectives(3) == 0
    assert collectives(2, tp=2) == 2 * pair  # tp and engine; world
    assert collectives(4, tp=2, cp=2) == 3 * pair + four  # tp and engine, cp, gradients; world


def test_optimizer_is_sharded_over_dp_and_cp():
    item = "optimizer (fp32 master, two moments)"
    shared = plan(RunConfig(cp=2), world=4).items[item]
    assert shared == pytest.approx(plan(RunConfig()).items[item] / 4, abs=12)


def test_kv_pages_are_what_the_run_can_use_or_what_the_fraction_allows():
    config = RunConfig(max_response_len=44, page_size=16, rollout_batch_size=2, samples_per_prompt=4)
    assert plan(config).kv_pages == 4 * 8
    assert plan(dataclasses.replace(config, max_running=3)).kv_pages == 4 * 3
    page = 2 * SMALL.num_layers * 16 * SMALL.num_kv_heads * SMALL.head_dim * 2
    assert plan(dataclasses.replace(config, memory_fraction=1.0), available=10 * page).kv_pages == 10


def test_room_for_less_than_one_sequence_is_refused():
    with pytest.raises(UsageError, match="needs 4 KV pages of .* holds 3"):
        page = 2 * SMALL.num_layers * 16 * SMALL.num_kv_heads * SMALL.head_dim * 2
        plan(RunConfig(max_response_len=44, memory_fraction=1.0), available=3 * page)


def test_recompute_lowers_the_activations():
    topology = Topology.plan(1, 0, 1, 1)
    kept = activation_bytes(RunConfig(recompute=False), QWEN3_8B, topology, 4096, 2)
    assert activation_bytes(RunConfig(), QWEN3_8B, topology, 4096, 2) < kept / 3


def test_a_large_prefill_chunk_is_counted_up_to_what_there_is_to_prefill():
    def activations(chunk):
        return plan(RunConfig(max_response_len=44, max_tokens_per_gpu=64, prefill_chunk=chunk)).items["activations"]

    assert activations(16) == activations(64) < activations(400)
    assert activations(10**9) == activations(512) == layer_bytes(SMALL, 1, 8 * 64 + 8, 2)


def test_ranks_share_the_memory_of_a_host():
    assert available_memory("cpu", 4) == pytest.approx(available_memory("cpu", 1) / 4, rel=0.2)


def test_the_table_has_every_item_and_the_sum():
    memory = plan(RunConfig())
    shown = memory_table(memory)
    assert all(name in shown for name in memory.items) and f"{memory.total / GIB:.2f} GiB" in shown
