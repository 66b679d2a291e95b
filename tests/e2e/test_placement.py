"""Whole runs on a GPU of host memory (tests/pretend_gpu.py): no operation meets tensors of two places.

The CPU's kernels stand in for the GPU's, so the run must leave the evidence of a CPU run, byte for byte.
"""

from __future__ import annotations

import os

import pytest
import torch

import rlk.topology
from rlk.audit.validate import validate_run
from rlk.config import RunConfig
from rlk.errors import CheckFailed
from rlk.model.tiny import create_tiny
from rlk.ops.registry import registry
from rlk.train.trainer import run
from tests.e2e.runs import metrics, repeatable
from tests.pretend_gpu import GpuCommunicator, PlacementError, pretend_gpu
from tests.spawn import run_ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that the GPU operators serve."""
    directory = tmp_path_factory.mktemp("tiny")
    create_tiny(directory, head_dim=64)
    return directory


@pytest.fixture(autouse=True)
def as_it_was():
    registry.forget_calls()
    yield
    torch.use_deterministic_algorithms(False)


def run_on(device, model, run_dir, **options):
    chosen = dict(steps=2, rollout_batch_size=2, samples_per_prompt=4, global_batch_size=8, max_response_len=8,
                  top_p=0.95, lr=6e-4, kl_coef=0.01, save_model=False) | options
    run(RunConfig(model=str(model / "model"), prompts=str(model / "prompts.jsonl"), run_dir=str(run_dir),
                  device=device, **chosen))
    return repeatable(run_dir)


@pytest.mark.parametrize("options", [
    {},
    dict(top_p=1.0, global_batch_size=4, use_rollout_logprobs=True, recompute=False, save_model=True),
    dict(temperature=0.0, samples_per_prompt=2, global_batch_size=2, prefill_chunk=3, max_running=3, page_size=4),
], ids=["nucleus", "vocabulary", "greedy"])
def test_a_run_on_a_gpu_mixes_no_places_and_gives_what_the_kernels_give(model, tmp_path, monkeypatch, options):
    here = run_on("cpu", model, tmp_path / "cpu", **options)
    with pretend_gpu(monkeypatch):
        there = run_on("cuda", model, tmp_path / "gpu", **options)
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory  # a write of every result
    assert [line["peak_memory_bytes"] for line in metrics(tmp_path / "gpu")] == [3 << 20] * 2
    assert here == there
    for name in ("step-00000.npz", "step-00001.npz"):
        assert (tmp_path / "cpu" / "audit" / name).read_bytes() == (tmp_path / "gpu" / "audit" / name).read_bytes()
    assert validate_run(tmp_path / "gpu").ok


def test_the_native_arm_mixes_no_places(model, tmp_path, monkeypatch):
    run_on("cpu", model, tmp_path / "cpu", mode="native", dtype="float32", steps=1)
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    with pretend_gpu(monkeypatch):
        there = run_on("cuda", model, tmp_path / "gpu", mode="native", dtype="float32", min_p=0.05, top_k=9)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert [line["compared"] for line in there] == [line["response_tokens"] for line in there]


@pytest.mark.parametrize("layout", [dict(tp=2), dict(tp=1), dict(tp=1, cp=2), dict(tp=1, rollout_tp=2)],
                         ids=["tp2", "dp2", "cp2", "rollout-tp2"])
def test_two_ranks_mix_no_places(model, tmp_path, layout):
    finished = run_ranks(2, two_ranks, model, tmp_path / "run", layout)
    assert finished == [True, True] and validate_run(tmp_path / "run").ok


def two_ranks(rank, world, model, run_dir, layout):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
    patches = pytest.MonkeyPatch()
    make = rlk.topology.make_communicator

    def make_on_gpu(group, device, mode, timeout_s):
        made = make(group, "cpu", mode, timeout_s)
        return made if made.world == 1 else GpuCommunicator(made)

    patches.setattr(rlk.topology, "make_communicator", make_on_gpu)
    with pretend_gpu(patches):
        run_on("cuda", model, run_dir, nproc=world, steps=1, **layout)
    return True


@pytest.mark.parametrize("fault", ["weight-bit", "kernel-order", "crossing-token"])
def test_a_broken_link_is_found_there_too(model, tmp_path, monkeypatch, fault):
    with pytest.raises(CheckFailed, match=r"audit: .* step 0, sample \d+ \(tp0\)"), pretend_gpu(monkeypatch):
        run_on("cuda", model, tmp_path / "run", inject_fault=fault, steps=1)


def test_a_host_tensor_in_a_gpu_operation_is_found(monkeypatch):
    with pretend_gpu(monkeypatch):
        there = torch.ones(3, device="cuda:0")
        with pytest.raises(PlacementError, match="add of GPU tensors and a host tensor"):
            there + torch.ones(3)
        for mixed in (lambda: torch.ones(3)[there.long()], lambda: there.index_put_((there.long(),), torch.ones(3)),
                      lambda: torch.ones(3).index_put_((torch.zeros(3).long(),), there)):
            with pytest.raises(PlacementError, match=r"index.* on the other"):
                mixed()
        taken = there[torch.zeros(2).long()]  # torch takes host indices to the GPU
        taken[torch.zeros(2).long()] = torch.tensor(2.0)  # and a single value
        assert taken.is_cuda and taken.cpu().tolist() == [2, 1]
        with pytest.raises(PlacementError, match="numpy"):
            there.numpy()
        weight = torch.ones(3, device="cuda:0").requires_grad_(True)
        (weight.double() ** 2).sum().backward()
        assert weight.grad.is_cuda and (weight + 1).cpu().numpy().tolist() == [2, 2, 2]
