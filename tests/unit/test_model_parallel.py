"""The model on two tensor-parallel ranks against the same model on one."""

import pytest
import torch
import torch.distributed as dist

from rlk.collectives.factory import make_communicator
from tests.models import TOKENS_T, OneSequence, bits, logits_of, random_model
from tests.spawn import run_ranks

DTYPES = (torch.float32, torch.bfloat16)


def backward(model, ranks=1):
    """Gradients of a loss that every one of `ranks` ranks computes a share of; summed where they are partial."""
    model.enable_training(recompute=True)
    hidden_TD = model.hidden(TOKENS_T, OneSequence(len(TOKENS_T)))
    (hidden_TD.float().square().sum() / ranks).backward()
    for weight in model.parameters.values():
        if weight.tp_partial:
            weight.main_grad.copy_(model.tp_comm.all_reduce(weight.main_grad))
    return {spec.name: model.parameters[spec.name].main_grad for spec in model.specs}


def one_rank(rank, world):
    """Logit bytes by dtype, and FP32 gradients."""
    comm = make_communicator(dist.group.WORLD, "cpu", "consistency", timeout_s=60)
    logits = {dtype: bits(logits_of(random_model(0, dtype, comm, leaves=2))) for dtype in DTYPES}
    return logits, backward(random_model(0, torch.float32, comm, leaves=2), world)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, one_rank)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_parallelism_changes_no_bit_of_the_logits(ranks, dtype):
    alone = bits(logits_of(random_model(0, dtype, leaves=2)))
    assert [logits[dtype] == alone for logits, _ in ranks] == [True, True]


def test_the_leaves_are_part_of_the_contract():
    one, two = (bits(logits_of(random_model(0, leaves=leaves))) for leaves in (1, 2))
    assert one != two


def test_tensor_parallel_gradients_are_shards_of_those_of_one_rank(ranks):
    model = random_model(0, torch.float32, leaves=2)
    expected = backward(model)
    for spec in model.specs:
        full_row = local_row = 0
        for part in spec.parts:
            local_rows = part.local_shape(2)[0]
            shards = [gradients[spec.name][local_row:local_row + local_rows] for _, gradients in ranks]
            got = torch.cat(shards, part.split) if spec.tp_sharded else shards[0]
            full = expected[spec.name][full_row:full_row + part.padded_shape[0]]
            torch.testing.assert_close(got, full, rtol=1e-3, atol=1e-4 * full.abs().max().item(),
                                       msg=lambda text, name=part.hf_name: f"{name}: {text}")
            full_row, local_row = full_row + part.padded_shape[0], local_row + local_rows
