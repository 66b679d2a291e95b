"""Embedding, its gradient, the pages of the cache and the optimizer through their launchers, on the emulator."""

import math

import pytest
import torch

from rlk.kernels import embedding, optimizer, paged_cache, rope
from rlk.ops import adamw as adamw_ops
from rlk.ops import attention as attention_ops
from rlk.ops import embedding as embedding_ops
from tests.gfx942.test_launchers import stand_in

ARCH = "gfx942"
MODULES = (embedding, optimizer, paged_cache, rope)
EPS = 1e-6


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    variants = [variant for module in MODULES for variant in module.variants(ARCH)]
    return stand_in(monkeypatch, MODULES, variants, ARCH, execute=True)


def draw(seed, *shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8),
                                                                     b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("V", "D"), [(7, 16), (5, 528), (3, 1024)])
def test_an_embedding_is_the_row_plus_zero_and_zeros_for_another_rank_s_token(V, D):
    table, tokens = draw(1, V, D), torch.tensor([10, 9, 10 + V, 10, 9 + V, 10 + V - 1, 2**40, -1, 11])
    table[0, :3] = -0.0
    got = embedding.embedding(tokens, table, 10)
    assert same(got, embedding_ops.embedding_cpu(tokens, table, 10))
    assert same(got[0], table[0] + 0.0) and not got[[1, 2, 6, 7]].any()


@pytest.mark.parametrize("D", [16, 528])
def test_the_gradient_of_the_embedding_has_the_bits_of_the_cpu(D):
    """Tokens in runs of 1 and of more than one turn of the loop, some of another rank; -0.0 in the gradient so far."""
    tokens = torch.tensor([4, 6, 4, 3, 9, 4] + [6] * 18 + [4, 2, 3, -1])
    dx, grad = draw(1, len(tokens), D, scale=100.0), draw(2, 6, D, dtype=torch.float32)
    grad[:2] = -0.0
    dx[1] = -0.0
    expected = grad.clone()
    embedding.embedding_backward(dx, tokens, grad, 3)
    embedding_ops.embedding_backward_cpu(dx, tokens, expected, 3)
    assert same(grad, expected)
    late = dx.flip(0)
    embedding_ops.embedding_backward_cpu(late, tokens.flip(0), expected.copy_(draw(2, 6, D, dtype=torch.float32)), 3)
    assert not same(grad, expected)  # another order has other bits


@pytest.mark.parametrize(("G", "E"), [(1, 16), (2, 64), (9, 128)])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(G, E):
    qkv = draw(1, 5, 3 * G, E)
    k, v = qkv[:, G : 2 * G], qkv[:, 2 * G :]
    caches = draw(2, 2, 3, 4, G, E)
    expected = caches.clone()
    slots = torch.tensor([7, -1, 0, 11, 3])
    paged_cache.write_kv(k, v, caches[0], caches[1], slots)
    attention_ops.write_kv_cpu(k, v, expected[0], expected[1], slots)
    assert same(caches, expected)
    paged_cache.write_kv(k[:1].contiguous(), v[:1], caches[0], caches[1], torch.tensor([12]))  # the cache has 12 slots
    assert same(caches, expected)


@pytest.mark.parametrize(("T", "H", "G", "E"), [(3, 9, 3, 64), (3, 9, 3, 128), (1, 32, 17, 64), (2, 4, 1, 128)])
def test_norm_rotation_and_cache_write_in_one_have_the_bits_of_the_steps(T, H, G, E):
    wide, q_weight, k_weight = draw(1, T, H + 2 * G + 1, E), draw(2, E), draw(3, E)
    qkv = wide[:, : H + 2 * G]
    angle = torch.rand(T, E // 2, generator=torch.Generator().manual_seed(4)) * 6
    cos, sin = angle.cos(), angle.sin()
    caches = draw(5, 2, 2, 3, G, E)
    expected, slots = caches.clone(), torch.tensor([4, -1, 2])[:T]
    q = paged_cache.qk_norm_rope_write(qkv, q_weight, k_weight, cos, sin, EPS, caches[0], caches[1], slots)
    plain_q, k = rope.qkv_norm_rope(qkv, H, G, q_weight, k_weight, cos, sin, EPS)
    paged_cache.write_kv(k, qkv[:, H + G :], expected[0], expected[1], slots)
    assert same(q, plain_q) and same(caches, expected)
    late = paged_cache.qk_norm_rope_write(qkv, k_weight, k_weight, cos, sin, EPS, caches[0], caches[1], slots)
    assert not same(late, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [48, 1024, 2064])
def test_an_adamw_update_has_the_bits_of_the_cpu(dtype, n):
    state = [draw(seed, n, dtype=torch.float32) for seed in range(4)]
    state[2].square_()
    state[3][:8] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 1e-20, 1.0])
    state[2][:8] = torch.tensor([0.0, 0.0, 0.0, 1e-42, 1.0, 3e38, 1e-38, 0.0])
    ours, cpu = [x.clone() for x in state], [x.clone() for x in state]
    weights = [x[0] if dtype == torch.float32 else torch.empty(n, dtype=dtype) for x in (ours, cpu)]
    scalars = (0.37, 5e-7, 0.9, 0.999, 1e-8, 0.1, 1 - 0.9**3, 1 - 0.999**3)
    optimizer.adamw(*ours, weights[0], *scalars)
    adamw_ops.adamw_cpu(*cpu, weights[1], *scalars)
    assert all(same(a, b) for a, b in zip([*ours, weights[0]], [*cpu, weights[1]], strict=True))
    assert not same(ours[0][8:], state[0][8:])


def test_a_long_update_in_parts_has_the_same_bits(monkeypatch, launched):
    whole, parts = ([draw(seed, 1120, dtype=torch.float32).abs_() for seed in range(4)] for _ in range(2))
    scalars = (1.0, 1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 0.05)
    optimizer.adamw(*whole, whole[0], *scalars)
    monkeypatch.setattr(optimizer, "MOST_ELEMENTS", 512)
    optimizer.adamw(*parts, parts[0], *scalars)
    assert launched == ["adamw/block_1024_fp32"] * 4 and all(map(same, whole, parts))


@pytest.mark.parametrize("n", [16, 16384, 40016])
def test_a_sum_of_squares_agrees_with_float64_and_does_not_depend_on_parts(monkeypatch, n):
    x = draw(n, n, dtype=torch.float32, scale=1e20)
    got = float(optimizer.sum_squares(x))
    block, steps, _ = optimizer.SUM_CONFIGS[ARCH]["block_2048x8"]
    assert got == pytest.approx(math.fsum(value * value for value in x.tolist()), rel=1e-14)
    monkeypatch.setattr(optimizer, "MOST_ELEMENTS", 2 * block * steps)
    assert float(optimizer.sum_squares(x)) == got


def test_the_sum_of_squares_of_nothing_is_zero():
    assert float(optimizer.sum_squares(torch.empty(0))) == 0.0


def test_operands_that_do_not_fit_are_refused_with_what_was_got():
    flat, pages = draw(1, 40, dtype=torch.float32), draw(2, 2, 3, 1, 64)
    for refused, message in (
        (lambda: optimizer.sum_squares(flat), "n = 40, expected a positive multiple of 16; pad it"),
        (lambda: optimizer.adamw(*[flat] * 4, flat.double(), *[0.0] * 8), "got weight torch.float64"),
        (lambda: embedding.embedding(torch.zeros(2, 2, dtype=torch.int64), draw(1, 3, 16), 0), r"tokens \(2, 2\)"),
        (lambda: embedding.embedding(torch.zeros(2, dtype=torch.int64), draw(1, 32, 3).mT, 0), r"strides \(1, 3\)"),
        (lambda: paged_cache.write_kv(pages[0], pages[0], pages, pages[:1], torch.zeros(3, dtype=torch.int64)),
         r"v_cache \(1, 3, 1, 64\)"),
        (lambda: paged_cache.qk_norm_rope_write(draw(1, 3, 2, 64), *[None] * 4, EPS, pages, pages, None),
         "got 2 heads of 64 for pages .* expected at least 3 heads of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
