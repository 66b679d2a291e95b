"""The contract's fingerprint, and ranks that do not run under the same one (CASE 28)."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk.collectives.factory import make_communicator
from rlk.collectives.objects import all_gather_object
from rlk.contract import Contract, agree, make_contract
from rlk.errors import CheckFailed
from rlk.model.config import MOST_HEAD_DIM
from rlk.ops.cpu_library import POINTER, function
from tests.spawn import run_ranks

MINE = make_contract("cpu", torch.bfloat16, 2, kernels="aa" * 32, sources="cc" * 32)


@pytest.mark.parametrize(("change", "named"), [
    (dict(leaves=4), ("leaves", "4", "2")),
    (dict(dtype="float32"), ("dtype", "'float32'", "'bfloat16'")),
    (dict(attention_chunk=256), ("attention_chunk", "256", "512")),
    (dict(software=MINE.software | {"torch": "0.0"}), ("software", "'0.0'", torch.__version__)),
    (dict(software=MINE.software | {"kernels": "bb" * 32}), ("software", "bb" * 32, "aa" * 32)),
])
def test_another_contract_stops_the_run_with_rank_key_and_both_values(change, named):
    with pytest.raises(CheckFailed) as caught:
        agree(MINE, [MINE.as_dict(), replace(MINE, **change).as_dict()])
    assert "rank 1" in str(caught.value)
    for word in named:
        assert word in str(caught.value)
    assert replace(MINE, **change).fingerprint != MINE.fingerprint


def test_equal_contracts_agree_and_have_one_fingerprint():
    again = make_contract("cpu", torch.bfloat16, 2, kernels="aa" * 32, sources="cc" * 32)
    agree(MINE, [again.as_dict()] * 3)
    assert again.fingerprint == MINE.fingerprint


@given(st.sampled_from(["torch", "python", "kernels"]), st.text(min_size=1, max_size=5))
def test_the_fingerprint_depends_on_every_software_entry(name, value):
    other = replace(MINE, software=MINE.software | {name: MINE.software[name] + value})
    assert isinstance(other, Contract) and other.fingerprint != MINE.fingerprint


def test_the_kernels_were_built_with_the_contracts_constants():
    built = (ctypes.c_int * 3)()
    function("rlk_attention_constants", POINTER)(ctypes.addressof(built))
    assert list(built) == [MINE.attention_block, MINE.attention_chunk, MOST_HEAD_DIM]


def _disagree(rank: int, world: int) -> str:
    import torch.distributed as dist
    comm = make_communicator(dist.group.WORLD, "cpu", "consistency", 30.0)
    mine = replace(MINE, software=MINE.software | {"kernels": f"object-{rank}"})
    try:
        agree(mine, all_gather_object(comm, mine.as_dict()))
    except CheckFailed as error:
        return str(error)
    return ""


def test_every_rank_stops_when_one_loaded_other_kernels():
    messages = run_ranks(2, _disagree)
    assert all("object-0" in message and "object-1" in message for message in messages)
