"""Norms, rotary embedding, SwiGLU and token embedding: values against float64, bits against any batch."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.ops import attention, embedding, norm, paged_rows, rope, swiglu
from rlk.ops.registry import registry
from tests.kernel_digest import raw

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
both_modes = pytest.mark.parametrize("mode", ["consistency", "native"])
FEW = settings(deadline=None, max_examples=15)


@pytest.fixture
def in_mode(mode):
    registry.set_mode(mode)
    yield
    registry.set_mode("consistency")


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(seed, *shape):
    w = draw(seed, *shape).requires_grad_()
    w.main_grad = torch.zeros(shape)
    return w


def close(got, want, dtype):
    tolerance = dict(rtol=2e-5, atol=2e-5) if dtype == torch.float32 else dict(rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(got.double(), want, **tolerance)


def rms_norm_64(x, w):
    x, w = x.double(), w.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w


def rotary_64(x, w, positions, theta):
    """Qwen3's rule in complex numbers: the pair (e, e + E/2) turns by position * theta^(-2e/E)."""
    y = rms_norm_64(x, w)
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(half, dtype=torch.float64), positions.double()[:, None, None] * frequency)
    turned = torch.complex(y[..., :half], y[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), -1)


@both_dtypes
@given(T=st.integers(1, 40), D=st.integers(1, 100), seed=st.integers(0, 99), data=st.data())
@FEW
def test_rms_norm_agrees_with_float64_and_rows_are_independent(dtype, T, D, seed, data):
    x, w = draw(seed, T, D, dtype=dtype), draw(seed + 1, D, dtype=dtype)
    y = norm.rms_norm(x, w, EPS)
    close(y, rms_norm_64(x, w), dtype)
    rows = data.draw(st.lists(st.integers(0, T - 1), min_size=1, max_size=9))
    assert raw(norm.rms_norm(x[rows], w, EPS)) == raw(y[rows])


def test_rms_norm_follows_the_written_rule_bit_by_bit():
    """On BF16 values an FMA is exact in double, so that plain NumPy can take the 16 partial sums and their tree."""
    x, w = draw(1, 200, 100, dtype=torch.bfloat16).float(), draw(2, 100)
    partial = np.zeros((200, 16), np.float32)
    for i, column in enumerate(x.double().numpy().T):
        partial[:, i % 16] = (partial[:, i % 16].astype(np.float64) + column * column).astype(np.float32)
    for half in (8, 4, 2, 1):
        partial[:, :half] += partial[:, half:2 * half]
    scale = np.float32(1) / np.sqrt(partial[:, :1] / np.float32(100) + np.float32(EPS))
    assert raw(norm.rms_norm(x, w, EPS)) == raw(torch.from_numpy(x.numpy() * scale * w.numpy()))


@both_dtypes
def test_the_fused_residual_addition_has_the_bits_of_its_steps(dtype):
    partial, residual, w = draw(1, 37, 50), draw(2, 37, 50, dtype=dtype), draw(3, 50, dtype=dtype)
    hidden, y = norm.add_rms_norm(partial, residual, w, EPS)
    assert raw(hidden) == raw((residual.float() + partial).to(dtype))
    assert raw(hidden) == raw(norm.residual_add(partial, residual))
    assert raw(y) == raw(norm.rms_norm(hidden, w, EPS))


@both_dtypes
@given(T=st.integers(1, 20), H=st.integers(1, 4), E=st.sampled_from([2, 16, 64, 128]), seed=st.integers(0, 99))
@FEW
def test_qk_norm_rope_agrees_with_float64_on_a_slice_of_the_fused_qkv(dtype, T, H, E, seed):
    qkv, w = draw(seed, T, H + 2, E, dtype=dtype), draw(seed + 1, E, dtype=dtype)
    positions = torch.randint(0, 1000, (T,), generator=torch.Generator().manual_seed(seed))
    cos, sin = (table[positions] for table in rope.rope_table(1000, E, 1e6))
    x = qkv[:, 1 : H + 1]
    y = norm.qk_norm_rope(x, w, cos, sin, EPS)
    close(y, rotary_64(x, w, positions, 1e6), dtype)
    assert raw(norm.qk_norm_rope(x.contiguous(), w, cos, sin, EPS)) == raw(y)
    last = slice(T - 1, T)
    assert raw(norm.qk_norm_rope(x[last], w, cos[last], sin[last], EPS)) == raw(y[last])


@both_modes
@pytest.mark.usefixtures("in_mode")
def test_norm_rotation_and_cache_write_in_one_have_the_bits_of_the_steps():
    qkv, q_weight, k_weight = draw(1, 4, 3 + 2 * 2, 16), draw(2, 16), draw(3, 16)
    cos, sin = (table[7:11] for table in rope.rope_table(16, 16, 1e4))
    caches, slots = draw(4, 2, 3, 2, 2, 16), torch.tensor([5, -1, 0, 3])
    expected = caches.clone()
    q = paged_rows.qk_norm_rope_write(qkv, q_weight, k_weight, cos, sin, EPS, caches[0], caches[1], slots)
    k = norm.qk_norm_rope(qkv[:, 3:5], k_weight, cos, sin, EPS)
    attention.write_kv(k, qkv[:, 5:], expected[0], expected[1], slots)
    assert raw(q) == raw(norm.qk_norm_rope(qkv[:, :3], q_weight, cos, sin, EPS))
    assert raw(caches) == raw(expected)
    with pytest.raises(ValueError, match="got 4 heads for pages .* expected at least 5"):
        paged_rows.qk_norm_rope_write(qkv[:, :4], q_weight, k_weight, cos, sin, EPS, caches[0], caches[1], slots)


def test_rope_table_is_rounded_from_float64():
    cos, sin = rope.rope_table(4096, 64, 1e6)
    angle = 4095 * 1e6 ** (-2 * 3 / 64)
    assert (cos.shape, cos.dtype) == ((4096, 32), torch.float32)
    assert raw(torch.stack((cos[4095, 3], sin[4095, 3]))) == raw(torch.tensor([math.cos(angle), math.sin(angle)]))


@both_dtypes
def test_swiglu_agrees_with_float64_far_into_both_tails(dtype):
    gate_up = torch.cat((torch.linspace(-120, 120, 999).expand(2, -1), draw(1, 2, 999)), -1).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    y = swiglu.swiglu(gate_up)
    close(y, F.silu(gate) * up, dtype)
    assert raw(swiglu.swiglu(gate_up[1:])) == raw(y[1:])


@both_dtypes
def test_embedding_shards_sum_to_the_whole_table_bit_for_bit(dtype):
    table = draw(1, 10, 6, dtype=dtype)
    table[3] = -0.0
    tokens = torch.tensor([3, 9, 0, 4, 5, 3])
    whole = embedding.embedding(tokens, table, 0)
    shards = [embedding.embedding(tokens, part.contiguous(), first) for part, first in ((table[:5], 0), (table[5:], 5))]
    assert raw(whole) == raw(shards[0] + shards[1]) == raw(table[tokens] + 0.0)
    assert raw(whole[0]) == raw(torch.zeros(6, dtype=dtype))


def check_gradients(op, oracle, inputs, weights):
    """`op`'s gradients of `inputs` and the main_grad of `weights` equal those of `oracle` in float64.

    Runs twice: gradients of weights accumulate.
    """
    for _ in range(2):
        results = op(*inputs, *weights)
        results = results if isinstance(results, tuple) else (results,)
        upstream = [draw(90 + i, *r.shape).to(r.dtype) for i, r in enumerate(results)]
        got = torch.autograd.grad(results, inputs, upstream)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (*inputs, *weights)]
    outputs = oracle(*doubles)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    want = torch.autograd.grad(outputs, doubles, [u.double() for u in upstream])
    for mine, right in zip(got, want, strict=False):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)
    for w, right in zip(weights, want[len(inputs):], strict=True):
        torch.testing.assert_close(w.main_grad.double(), 2 * right, rtol=1e-4, atol=1e-4)


@both_modes
@pytest.mark.usefixtures("in_mode")
def test_norm_gradients_agree_with_float64():
    x, partial = draw(1, 30, 50).requires_grad_(), draw(2, 30, 50).requires_grad_()
    check_gradients(lambda x, w: norm.rms_norm(x, w, EPS), rms_norm_64, [x], [weight(3, 50)])
    check_gradients(
        lambda p, x, w: norm.add_rms_norm(p, x, w, EPS), lambda p, x, w: (p + x, rms_norm_64(p + x, w)), [partial, x],
        [weight(3, 50)],
    )
    check_gradients(norm.residual_add, torch.add, [partial, x], [])


@both_modes
@pytest.mark.usefixtures("in_mode")
def test_qk_norm_rope_gradients_agree_with_float64():
    positions = torch.arange(7, 27)
    cos, sin = (table[positions] for table in rope.rope_table(64, 16, 1e4))
    x = draw(1, 20, 3, 16).requires_grad_()
    check_gradients(
        lambda x, w: norm.qk_norm_rope(x, w, cos, sin, EPS), lambda x, w: rotary_64(x, w, positions, 1e4), [x],
        [weight(2, 16)],
    )


@both_modes
@pytest.mark.usefixtures("in_mode")
def test_swiglu_and_embedding_gradients_agree_with_float64():
    def silu_gate(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    check_gradients(swiglu.swiglu, silu_gate, [draw(1, 20, 60).requires_grad_()], [])
    tokens, table, dx = torch.tensor([3, 9, 0, 4, 4, 3]), weight(1, 5, 6), draw(2, 6, 6)
    embedding.embedding(tokens, table, 3).backward(dx)
    want = torch.zeros(5, 6).index_add_(0, torch.tensor([0, 1, 1, 0]), dx[[0, 3, 4, 5]])
    torch.testing.assert_close(table.main_grad, want)


@both_dtypes
def test_weight_gradients_have_the_same_bits_in_micro_batches(dtype):
    x, dy, w = draw(1, 60, 50, dtype=dtype), draw(2, 60, 50, dtype=dtype), draw(3, 50, dtype=dtype)
    whole, parts = torch.zeros(50), torch.zeros(50)
    norm.rms_norm_backward_cpu(dy, None, x, w, EPS, whole)
    norm.rms_norm_backward_cpu(dy[:13], None, x[:13], w, EPS, parts)
    norm.rms_norm_backward_cpu(dy[13:], None, x[13:], w, EPS, parts)
    assert raw(parts) == raw(whole)


def test_a_trainable_weight_without_main_grad_is_named():
    w = draw(1, 8).requires_grad_()
    with pytest.raises(ValueError, match=r"shape \(8,\) requires grad but has no main_grad"):
        norm.rms_norm(draw(2, 3, 8), w, EPS).sum().backward()
