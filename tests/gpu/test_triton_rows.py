"""The Triton row kernels and the log-prob on this GPU: right values, and bits that no neighbour can change."""

import pytest
import torch

from rlk.kernels import logprob, norm, rope, swiglu
from tests.gpu.operator_checks import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

EPS = 1e-6
ONE_ROUNDING = 1.02 * 2.0**-8  # to BF16, and the FP32 errors before it
ROWS = (slice(0, 1), slice(3, 10), slice(60, 131))
TILES = 64


def draw(seed, *shape, scale=1.0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def close(got, exact, slack=0.0):
    return bool(((got.double() - exact).abs() <= exact.abs() * ONE_ROUNDING + slack).all())


def normalised(x, w):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w.double()


@pytest.mark.parametrize("D", [48, 512, 1024, 1040, 2560, 4096, 5120, 8192])
def test_norms_agree_with_float64_and_with_each_other(D):
    x, w, partial = draw(D, 200, D), draw(D + 1, D), draw(D + 2, 200, D, dtype=torch.float32)
    assert close(norm.rms_norm(x, w, EPS), normalised(x, w))
    hidden, y = norm.add_rms_norm(partial, x, w, EPS)
    assert same(hidden, (x.float() + partial).to(torch.bfloat16)) and same(hidden, norm.residual_add(partial, x))
    assert same(y, norm.rms_norm(hidden, w, EPS))
    for rows in ROWS:
        assert same(norm.rms_norm(hidden[rows].contiguous(), w, EPS), y[rows])


@pytest.mark.parametrize("E", [64, 128])
@pytest.mark.parametrize(("q_heads", "k_heads"), [(32, 8), (8, 2), (4, 1), (17, 9)])
def test_rotary_heads_agree_with_float64_and_do_not_depend_on_the_launch(E, q_heads, k_heads):
    qkv, q_weight, k_weight = draw(E, 200, q_heads + 2 * k_heads, E), draw(1, E), draw(2, E)
    angle = torch.rand(200, E // 2, device="cuda") * 6
    cos, sin = angle.cos(), angle.sin()
    q, k = rope.qkv_norm_rope(qkv, q_heads, k_heads, q_weight, k_weight, cos, sin, EPS)
    for got, heads, weight in ((q, qkv[:, :q_heads], q_weight), (k, qkv[:, q_heads : q_heads + k_heads], k_weight)):
        assert same(rope.qk_norm_rope(heads, weight, cos, sin, EPS), got)
        first, second = normalised(heads, weight).chunk(2, -1)
        c, s = cos[:, None].double(), sin[:, None].double()
        exact = torch.cat([first * c - second * s, second * c + first * s], -1)
        assert close(got, exact, float(exact.abs().max()) * 2.0**-20)
        for rows in ROWS:
            assert same(rope.qk_norm_rope(heads[rows].contiguous(), weight, cos[rows].contiguous(),
                                          sin[rows].contiguous(), EPS), got[rows])


@pytest.mark.parametrize("F", [16, 48, 3072, 12288])
def test_swiglu_agrees_with_float64(F):
    gate_up = draw(F, 200, 2 * F, scale=4.0)
    gate, up = gate_up.double().chunk(2, -1)
    y = swiglu.swiglu(gate_up)
    assert close(y, gate * torch.sigmoid(gate) * up, 1e-37)
    for rows in ROWS:
        assert same(swiglu.swiglu(gate_up[rows].contiguous()), y[rows])


def scores(logits, targets, valid, inv_t, ranks=1):
    """logprob, entropy, lse, [3, T], each of `ranks` ranks owning its part of the vocabulary."""
    V = logits.shape[1] // ranks
    stats = [logprob.tile_stats(logits[:, r * V : r * V + V].contiguous(), TILES // ranks, r * V, valid, inv_t)
             for r in range(ranks)]
    picked = logits.gather(1, targets[:, None])[:, 0]
    return torch.stack(logprob.merge_tiles(torch.cat(stats, 1), picked, inv_t))


@pytest.mark.parametrize(("V", "valid"), [(151936, 151669), (152064, 151669), (64 * 129, 64 * 129), (64 * 3, 100),
                                         (64 * 2700, 64 * 2700 - 5)])  # the last's tiles do not stay in registers
@pytest.mark.parametrize("inv_t", [1.0, 1 / 0.7, 5.0])
def test_log_probs_agree_with_float64_and_do_not_depend_on_batch_or_rank(V, valid, inv_t):
    logits = draw(V, 150, V, scale=4.0, dtype=torch.float32)
    logits[:, valid:] = 1e4
    targets = torch.randint(0, valid, (150,), device="cuda")
    got = scores(logits, targets, valid, inv_t)
    x = logits[:, :valid].double() * inv_t
    lse = x.logsumexp(-1)
    p = (x - lse[:, None]).exp()
    exact = torch.stack([x.gather(1, targets[:, None])[:, 0] - lse, lse - (p * x).sum(-1), lse])
    assert torch.allclose(got.double(), exact, rtol=2e-6, atol=5e-5)
    for ranks in (2, 4, 8):
        assert same(scores(logits, targets, valid, inv_t, ranks), got)
    for rows in ROWS:
        assert same(scores(logits[rows].contiguous(), targets[rows], valid, inv_t), got[:, rows].contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [151936, 2102, 1027])
def test_the_gradient_agrees_with_float64(V, dtype):
    logits, grad = draw(V, 9, V, scale=4.0, dtype=torch.float32), draw(1, 9, dtype=torch.float32)
    first_id, valid, inv_t = 1000, 1000 + V - 30, 1 / 0.7
    targets = torch.randint(0, V - 30, (9,), device="cuda") + first_id
    targets[4] = 7  # another rank's
    x = logits[:, : V - 30].double() * inv_t
    lse = x.logsumexp(-1)
    hit = torch.arange(V - 30, device="cuda") + first_id == targets[:, None]
    exact = grad.double()[:, None] * inv_t * (hit.double() - (x - lse[:, None]).exp())
    dlogits = torch.full_like(logits, float("nan"), dtype=dtype)
    logprob.tile_stats_backward(logits, targets, lse.float(), grad, first_id, valid, inv_t, dlogits)
    rounding = 2.0**-8 if dtype is torch.bfloat16 else 0.0
    assert bool((dlogits[:, V - 30 :] == 0).all())
    assert bool(((dlogits[:, : V - 30].double() - exact).abs() <= exact.abs() * (rounding + 2e-5) + 1e-7).all())


def test_the_merge_is_ascending_and_the_comparison_catches_another_order():
    stats = torch.zeros(40, TILES, 3, device="cuda")
    stats[..., 1:] = torch.rand(40, TILES, 1, device="cuda") * 2 / TILES  # the log of a sum near 1 hides no bit of it
    total = torch.zeros(40, device="cuda")
    for tile in range(TILES):
        total += stats[:, tile, 1]
    single = torch.zeros_like(stats)
    single[..., 0] = -torch.inf
    single[:, 5] = torch.stack([torch.zeros_like(total), total, total], -1)
    zero = torch.zeros(40, device="cuda")
    expected = torch.stack(logprob.merge_tiles(single, zero, 1.0))
    assert same(torch.stack(logprob.merge_tiles(stats, zero, 1.0)), expected)
    assert not same(torch.stack(logprob.merge_tiles(stats.flip(1).contiguous(), zero, 1.0)), expected)


def test_operands_that_do_not_fit_are_refused_with_what_was_got():
    x, w = draw(1, 4, 64), draw(2, 64)
    for refused, message in (
        (lambda: norm.rms_norm(x, w[:48].contiguous(), EPS), r"expected torch.bfloat16 \(64,\)"),
        (lambda: norm.rms_norm(draw(1, 4, 40), draw(2, 40), EPS), "D = 40, expected a positive multiple of 16"),
        (lambda: norm.add_rms_norm(x, x, w, EPS), "got partial torch.bfloat16"),
        (lambda: norm.rms_norm(draw(3, 257)[1:].view(4, 64), w, EPS), "multiple of 16 bytes"),
        (lambda: swiglu.swiglu(draw(1, 4, 40)), "half_a_row = 20"),
        (lambda: logprob.tile_stats(draw(1, 4, 65, dtype=torch.float32), 64, 0, 65, 1.0), "do not split into 64"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
