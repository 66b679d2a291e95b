"""Log-prob from hidden states on this GPU: rollout's bits, float64's values and gradients, and one chunk's room."""

import pytest
import torch

from rlk.collectives import LocalCommunicator
from rlk.errors import CheckFailed
from rlk.ops.gemm import linear_fp32
from rlk.ops.logprob import CHUNK_TOKENS, ScoreRule, score, score_logits
from tests.gpu.operator_checks import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

LOCAL = LocalCommunicator()
T, D, V, VALID = 2600, 256, 64 * 130, 8300
KINDS = ("whole", "nucleus")


def problem(kind):
    """Hidden states, head, targets and rule; a nucleus holds about a tenth of the ids."""
    generator = torch.Generator("cuda").manual_seed(7)
    hidden_TD = torch.randn(T, D, generator=generator, device="cuda").bfloat16()
    head_VD = (torch.randn(V, D, generator=generator, device="cuda") * 3 / D**0.5).bfloat16()
    targets_T = torch.randint(VALID, (T,), generator=generator, device="cuda")
    keep_TV = torch.rand(T, V, generator=generator, device="cuda") < (0.1 if kind == "nucleus" else 2.0)
    keep_TV[:, VALID:] = False
    keep_TV.scatter_(1, targets_T[:, None], True)
    offsets = torch.nn.functional.pad(keep_TV.sum(1).cumsum(0), (1, 0))
    support = (offsets, keep_TV.nonzero()[:, 1].int()) if kind == "nucleus" else None
    return hidden_TD, head_VD, targets_T, keep_TV, ScoreRule(0.7, VALID, support)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [100, 1024, 4096])
def test_training_recomputes_rollouts_bits_whatever_the_chunk(kind, chunk):
    hidden_TD, head_VD, targets_T, _, rule = problem(kind)
    rollout = score_logits(linear_fp32(hidden_TD, head_VD), targets_T, rule)
    for trained, sampled in zip(score(hidden_TD, head_VD, targets_T, rule, LOCAL, chunk), rollout, strict=True):
        assert same(trained, sampled)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_float64_and_repeat_their_bits(kind):
    hidden_TD, head_VD, targets_T, keep_TV, rule = problem(kind)
    upstream_T = torch.linspace(-1, 1, T, device="cuda")
    seen = []
    for _ in range(2):
        hidden, head = hidden_TD.clone().requires_grad_(), head_VD.clone().requires_grad_()
        head.main_grad = torch.ones(V, D, device="cuda")
        score(hidden, head, targets_T, rule, LOCAL, 512)[0].backward(upstream_T)  # groups of 2048 and 512, 40 left
        seen.append((hidden.grad, head.main_grad))
    assert all(same(one, other) for one, other in zip(*seen, strict=True))
    hidden, head = hidden_TD.double().requires_grad_(), head_VD.double().requires_grad_()
    logp_TV = (hidden @ head.T / rule.temperature).masked_fill(~keep_TV, -torch.inf).log_softmax(-1)
    exact = torch.autograd.grad(logp_TV.gather(1, targets_T[:, None])[:, 0], (hidden, head), upstream_T.double())
    for got, wanted in zip((seen[0][0].double(), seen[0][1].double() - 1), exact, strict=True):
        assert (got - wanted).norm() <= 2.0**-8 * wanted.norm()  # dlogits are rounded to BF16, and so is dhidden


def test_the_logits_of_a_chunk_are_the_most_that_exists():
    hidden_TD = torch.randn(8192, 1024, device="cuda").bfloat16().requires_grad_()
    head_VD = (torch.randn(151936, 1024, device="cuda") / 32).bfloat16().requires_grad_()
    head_VD.main_grad = torch.zeros(head_VD.shape, device="cuda")
    targets_T = torch.randint(151669, (8192,), device="cuda")
    of_a_chunk = 4 * CHUNK_TOKENS * 151936
    for _ in range(2):  # the first tries the products
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logprob_T, _ = score(hidden_TD, head_VD, targets_T, ScoreRule(1.0, 151669), LOCAL)
        forward = torch.cuda.max_memory_allocated() - before
        logprob_T.sum().backward()
        backward = torch.cuda.max_memory_allocated() - before
    assert of_a_chunk <= forward < 1.1 * of_a_chunk
    assert backward < 3.2 * of_a_chunk  # those, and dlogits in the room of two


@pytest.mark.parametrize("row", [0, T - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_target_is_named_wherever_it_stands_and_the_next_call_is_good(kind, row):
    hidden_TD, head_VD, targets_T, _, rule = problem(kind)
    bad_T, good = targets_T.clone(), score(hidden_TD, head_VD, targets_T, rule, LOCAL, 512)
    bad_T[row] = VALID
    logits_TV, leaf_TD = linear_fp32(hidden_TD, head_VD), hidden_TD.clone().requires_grad_()
    for call in (lambda: score(hidden_TD, head_VD, bad_T, rule, LOCAL, 512),
                 lambda: score(leaf_TD, head_VD, bad_T, rule, LOCAL, 512),
                 lambda: score_logits(logits_TV, bad_T, rule)):
        with pytest.raises(CheckFailed, match=f"row {row}: target {VALID}"):
            call()
    assert all(map(same, score(hidden_TD, head_VD, targets_T, rule, LOCAL, 512), good))
