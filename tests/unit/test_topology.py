"""Which rank does what, and which numbers are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.collectives import LocalCommunicator
from rlk.collectives.process_group import ProcessGroupCommunicator
from rlk.collectives.shm import ShmCommunicator
from rlk.errors import UsageError
from rlk.topology import Topology, connect, own_device
from tests.collective_cases import mixed_calls
from tests.spawn import run_ranks

SIZES = st.sampled_from([1, 2, 4, 8])


@settings(deadline=None, max_examples=60)
@given(dp=st.integers(1, 3), cp=st.integers(1, 3), tp=SIZES, rollout_tp=SIZES, data=st.data())
def test_coordinates_and_rank_lists_agree(dp, cp, tp, rollout_tp, data):
    world = dp * cp * tp * rollout_tp
    rank = data.draw(st.integers(0, world - 1))
    one = Topology.plan(world, rank, tp, cp, rollout_tp)
    assert (one.dp_rank * cp + one.cp_rank) * tp + one.tp_rank == rank
    assert one.engine * rollout_tp + one.rollout_tp_rank == rank
    assert one.dp * cp * tp == world and one.engines * rollout_tp == world
    assert one.tp_ranks[one.tp_rank] == one.cp_ranks[one.cp_rank] == rank
    assert one.grad_ranks[one.dp_rank * cp + one.cp_rank] == one.engine_ranks[one.rollout_tp_rank] == rank
    assert [len(ranks) for ranks in (one.tp_ranks, one.cp_ranks, one.grad_ranks)] == [tp, cp, one.dp * cp]
    for peer in one.cp_ranks:
        other = Topology.plan(world, peer, tp, cp, rollout_tp)
        assert (other.tp_rank, other.dp_rank, other.cp_ranks) == (one.tp_rank, one.dp_rank, one.cp_ranks)
    assert one.leaves == max(tp, rollout_tp)


def test_eight_ranks_of_the_reference_workload():
    one = Topology.plan(world=8, rank=6, tp=4, cp=2, rollout_tp=4)
    assert (one.dp, one.dp_rank, one.cp_rank, one.tp_rank) == (1, 0, 1, 2)
    assert (one.tp_ranks, one.cp_ranks, one.grad_ranks) == ([4, 5, 6, 7], [2, 6], [2, 6])
    assert (one.engine, one.engine_ranks, one.leaves) == (1, [4, 5, 6, 7], 4)


def test_rollout_tp_defaults_to_tp():
    assert Topology.plan(4, 0, tp=2, cp=1).rollout_tp == 2


SHAPE = SimpleNamespace(num_heads=8, num_kv_heads=2, intermediate_size=96)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"world": 6, "tp": 2, "cp": 2}, "6 ranks do not divide into --tp 2 x --cp 2"),
    ({"world": 6, "tp": 2, "cp": 1, "rollout_tp": 4}, "engines of --rollout-tp 4"),
    ({"world": 3, "tp": 3, "cp": 1}, "--tp is 3, expected a power of two"),
    ({"world": 6, "tp": 2, "cp": 1, "rollout_tp": 3}, "--rollout-tp is 3, expected a power of two"),
    ({"world": 128, "tp": 128, "cp": 1}, "--tp is 128, expected a power of two up to 64"),
    ({"world": 2, "tp": 0, "cp": 1}, "--tp is 0, expected at least 1"),
    ({"world": 2, "tp": 1, "cp": -1}, "--cp is -1, expected at least 1"),
    ({"world": 4, "tp": 4, "cp": 1, "shape": SHAPE}, "--tp 4 does not divide the model's 2 key/value heads"),
    ({"world": 4, "tp": 1, "cp": 1, "rollout_tp": 4, "shape": SHAPE}, "--rollout-tp 4 does not divide"),
    ({"world": 2, "tp": 2, "cp": 1, "shape": SimpleNamespace(num_heads=7, num_kv_heads=7, intermediate_size=8)},
     "the model's 7 attention heads"),
    ({"world": 2, "tp": 2, "cp": 1, "shape": SimpleNamespace(num_heads=8, num_kv_heads=2, intermediate_size=9)},
     "the model's 9 intermediate columns"),
])
def test_numbers_that_do_not_fit_are_refused_in_one_line(arguments, message):
    with pytest.raises(UsageError) as caught:
        Topology.plan(rank=0, **arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def _connected(rank, world, tp, cp, rollout_tp):
    topology = Topology.plan(world, rank, tp, cp, rollout_tp)
    groups = connect(topology, "cpu", "consistency", 30.0)
    for name, ranks in (("tp", topology.tp_ranks), ("cp", topology.cp_ranks), ("grad", topology.grad_ranks),
                        ("rollout", topology.engine_ranks), ("world", list(range(world)))):
        comm = getattr(groups, name)
        assert comm.all_gather(torch.tensor([rank])).flatten().tolist() == ranks, name
        assert isinstance(comm, LocalCommunicator if len(ranks) == 1 else ShmCommunicator)
        mixed_calls(comm, rounds=5)
    assert (groups.rollout is groups.tp) == (rollout_tp == tp)
    groups.close()
    native = connect(topology, "cpu", "native", 30.0)
    assert isinstance(native.world, ProcessGroupCommunicator)
    native.world.all_reduce(torch.ones(3))


@pytest.mark.parametrize(("world", "tp", "cp", "rollout_tp"), [(2, 2, 1, 2), (4, 2, 2, 2), (4, 2, 1, 1), (4, 1, 2, 2),
                                                               (4, 4, 1, 2), (6, 2, 3, 2)])
def test_groups_hold_the_planned_ranks(world, tp, cp, rollout_tp):
    run_ranks(world, _connected, tp, cp, rollout_tp)


def test_a_rank_takes_the_gpu_of_its_place_on_the_node(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("cpu") == torch.device("cpu") and taken == []
    assert own_device("cuda") == torch.device("cuda", 3) and taken == [torch.device("cuda", 3)]


@pytest.mark.parametrize(("gpus", "remedy"), [(0, "use --device cpu"), (3, "start fewer ranks on this node, or use")])
def test_a_rank_whose_node_lacks_its_gpu_is_refused_in_one_line(monkeypatch, gpus, remedy):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(UsageError, match=f"sees {gpus} GPUs there, expected at least 4: {remedy}") as caught:
        own_device("cuda")
    assert "\n" not in str(caught.value)


def test_one_rank_needs_no_process_group():
    groups = connect(Topology.plan(1, 0, tp=1, cp=1), "cpu", "consistency", 30.0)
    assert groups.rollout is groups.tp and groups.grad is groups.world
    mixed_calls(groups.world, rounds=5)
