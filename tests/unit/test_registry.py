"""The registry: only contract code runs in consistency mode, and the readback tells what ran."""

from __future__ import annotations

import pytest
import torch

from rlk.errors import CheckFailed
from rlk.ops.registry import Registry

X = torch.zeros(1)


def registry_with(**backends: bool) -> Registry:
    """One operator "op" whose backends return their names; keywords say whether each keeps the contract."""
    registry = Registry()
    for name, contract in backends.items():
        registry.register("op", name, contract=contract)(lambda name=name: name)
    return registry


@pytest.mark.parametrize("mode, contract, other", [("consistency", False, "native"), ("native", True, "consistency")])
def test_an_operator_without_a_backend_of_the_mode_stops_and_runs_nothing(mode, contract, other):
    registry = registry_with(only=contract)
    registry.set_mode(mode)
    with pytest.raises(CheckFailed, match=f"op has no {mode} backend for torch.float32 on cpu.*--mode {other}"):
        registry.call("op", X)
    assert registry.readback() == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_a_dtype_that_no_contract_backend_serves_stops(dtype):
    with pytest.raises(CheckFailed, match="no consistency backend"):
        registry_with(reference=False, cpu=True).call("op", X.to(dtype))


def test_the_mode_chooses_the_backend_and_the_readback_counts_it():
    registry = registry_with(reference=False, cpu=True)
    assert [registry.call("op", X), registry.call("op", X)] == ["cpu", "cpu"]
    registry.set_mode("native")
    assert registry.call("op", X) == "reference"
    assert [(row["backend"], row["contract"], row["calls"]) for row in registry.readback()] == [
        ("cpu", True, 2), ("reference", False, 1)]


def test_what_ran_in_place_of_an_operator_is_in_the_readback_outside_the_contract():
    registry = registry_with(reference=False, cpu=True)
    for _ in range(2):
        with registry.override("op", fake):
            assert registry.call("op", X) == "fake"
    assert registry.call("op", X) == "cpu"
    assert [(row["backend"], row["contract"], row["calls"]) for row in registry.readback()] == [
        ("cpu", True, 1), ("override", False, 2)]


def test_a_backend_with_a_guard_runs_where_it_agrees_and_the_next_one_elsewhere():
    registry = Registry()
    registry.register("op", "library", contract=True, guard=lambda n: n > 4)(lambda n: "library")
    registry.register("op", "own", contract=True)(lambda n: "own")
    assert [registry.call("op", X, n) for n in (9, 1, 5)] == ["library", "own", "library"]
    assert [(row["backend"], row["calls"]) for row in registry.readback()] == [("library", 2), ("own", 1)]


def test_an_operator_whose_only_backend_has_a_guard_stops():
    registry = Registry()
    registry.register("op", "library", contract=True, guard=lambda: True)(lambda: "library")
    with pytest.raises(CheckFailed, match="op has no consistency backend"):
        registry.call("op", X)


def test_a_backend_with_a_guard_that_is_put_in_the_operator_s_place_takes_all_arguments():
    registry = Registry()
    registry.register("op", "library", contract=True, guard=lambda n: n > 4)(library := lambda n: "library")
    registry.register("op", "own", contract=True)(lambda n: "own")
    with registry.override("op", library):
        assert [registry.call("op", X, n) for n in (1, 9)] == ["library", "library"]
    assert registry.call("op", X, 1) == "own"
    assert [(row["backend"], row["calls"]) for row in registry.readback()] == [("library", 2), ("own", 1)]


def test_an_operator_is_served_where_a_backend_takes_all_arguments():
    registry = Registry()
    for op, guard in (("guarded", bool), ("own", None)):
        registry.register(op, "library", contract=True, guard=bool)(lambda: "library")
        registry.register(op, "second", contract=True, guard=guard)(lambda: "second")
    registry.register("elsewhere", "reference", contract=False)(lambda: "reference")
    assert registry.unserved("cpu", "consistency") == ["guarded"]
    assert registry.unserved("cpu", "native") == []


def fake() -> str:
    return "fake"
