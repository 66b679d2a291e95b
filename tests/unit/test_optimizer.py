"""Sharded AdamW against torch.optim.AdamW, and its bits across ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.collectives import LocalCommunicator
from rlk.ops.adamw import adamw_reference, sum_squares
from rlk.ops.registry import registry
from rlk.train.optimizer import ShardedAdamW
from tests.models import random_model
from tests.spawn import run_ranks

OPTIONS = dict(lr=1e-2, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1, grad_clip=1.0)


def optimizer_for(model, grad_comm=None, **options) -> ShardedAdamW:
    model.enable_training()
    return ShardedAdamW(model, grad_comm or LocalCommunicator(), LocalCommunicator(), **(OPTIONS | options))


def fill_gradients(model, step: int, part: int = 0, parts: int = 1) -> None:
    """Gradients that add up to the same whole however many ranks share them (halves and quarters are exact)."""
    generator = torch.Generator().manual_seed(step)
    for span in model.spans.values():
        model.grads[span] = torch.randn(span.stop - span.start, generator=generator) / parts


def test_five_steps_agree_with_torch_adamw():
    model = random_model(0, torch.float32)
    optimizer = optimizer_for(model)
    copies = {name: torch.nn.Parameter(p.detach().double().clone()) for name, p in model.parameters.items()}
    groups = [dict(params=[copies[n] for n in copies if model.parameters[n].decay == d], weight_decay=0.1 * d)
              for d in (True, False)]
    oracle = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-8)
    for step in range(5):
        fill_gradients(model, step)
        for name, copy in copies.items():
            copy.grad = model.grads[model.spans[name]].view(copy.shape).double() if name in model.spans else None
        norm = torch.nn.utils.clip_grad_norm_([c for c in copies.values() if c.grad is not None], 1.0)
        oracle.step()
        assert optimizer.step() == pytest.approx(float(norm), rel=1e-6)
        assert not model.grads.any()
    for name in model.spans:
        torch.testing.assert_close(model.parameters[name].detach().double(), copies[name].detach(), rtol=1e-5,
                                   atol=1e-6)
    assert model.policy_version == 5


@given(st.integers(1, 20_000), st.integers(0, 2**31))
@settings(deadline=None, max_examples=20)
def test_sum_of_squares_has_the_same_bits_for_any_thread_count(n, seed):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    torch.set_num_threads(1)
    one = sum_squares(x)
    torch.set_num_threads(2)
    two = sum_squares(x)
    torch.set_num_threads(1)
    assert one == two
    assert one == pytest.approx(float(x.double().square().sum()), rel=1e-12)


def test_cpu_update_agrees_with_the_reference():
    tensors = torch.randn(4, 1000)
    tensors[2].abs_()
    ours, plain = tensors.clone(), tensors.clone()
    weight = torch.empty(1000, dtype=torch.bfloat16)
    numbers = (0.7, 1e-2, 0.9, 0.98, 1e-8, 0.1, 0.1, 0.02)
    registry.call("adamw", ours[0], ours[0], ours[1], ours[2], ours[3], weight, *numbers)
    adamw_reference(plain[0], plain[1], plain[2], plain[3], plain[0], *numbers)
    torch.testing.assert_close(ours, plain, rtol=2e-6, atol=1e-7)
    assert torch.equal(weight, ours[0].bfloat16())


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = random_model(0, torch.float32)
    optimizer = optimizer_for(model)
    before = model.storage.clone()
    model.grads.fill_(float("nan"))
    optimizer.step()
    assert torch.equal(model.storage, before) and model.policy_version == 0


def _sharded_steps(rank: int, world: int, dtype: torch.dtype) -> bytes:
    import torch.distributed as dist

    from rlk.collectives.factory import make_communicator
    comm = make_communicator(dist.group.WORLD if world > 1 else None, "cpu", "consistency", 60.0)
    model = random_model(3, dtype, shards=4)
    optimizer = optimizer_for(model, comm, grad_clip=0.0)
    for step in range(3):
        fill_gradients(model, step, rank, world)
        optimizer.step()
    comm.close()
    return model.storage.detach().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_same_bytes_on_every_rank_however_many_share_the_optimizer(dtype):
    alone = _sharded_steps(0, 1, dtype)
    pair = run_ranks(2, _sharded_steps, dtype)
    assert pair[0] == pair[1] == alone
