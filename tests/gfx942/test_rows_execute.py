"""The Triton row kernels' gfx942 code objects, executed: norms, rotary embedding, SwiGLU."""

import math

import numpy as np
import pytest

from rlk.kernels import norm, rope, swiglu
from tests.gfx942.emulator import Device
from tests.gfx942.numerics import BF16_EPSILON, from_bf16, random_bf16, same_bytes, to_bf16
from tests.gfx942.triton_runs import run_variant

ARCH = "gfx942"
EPS = 1e-6
VARIANTS = {variant.label: variant for module in (norm, rope, swiglu) for variant in module.variants(ARCH)}
WIDTHS = [48, 512, 688, 1040, 4096, 5120, 8192]  # each bucket, full and not; 5120 is Qwen3-14B's
ONE_ROUNDING = 1.02 * BF16_EPSILON  # and the FP32 errors before it


def poison(*shape):
    return np.full(shape, 0x7FC0, np.uint16)


def rms_norm(x, w, order="forward"):
    D = x.shape[1]
    variant = VARIANTS[f"rms_norm/{norm.choose(ARCH, D)}"]
    return run_variant(Device(order), variant, (len(x),), dict(x=x, w=w, y=poison(*x.shape), D=D, eps=EPS))["y"]


def add_rms_norm(partial, residual, w):
    D = residual.shape[1]
    variant = VARIANTS[f"add_rms_norm/{norm.choose(ARCH, D)}"]
    values = dict(partial=partial, residual=residual, w=w, hidden=poison(*residual.shape), y=poison(*residual.shape),
                  D=D, eps=EPS)
    after = run_variant(Device(), variant, (len(residual),), values)
    return after["hidden"], after["y"]


def residual_add(partial, residual):
    T, D = residual.shape
    values = dict(partial=partial, residual=residual, hidden=poison(T, D), D=D)
    return run_variant(Device(), VARIANTS["residual_add/block_1024"], (T, math.ceil(D / 1024)), values)["hidden"]


def qk_norm_rope(x, q_heads, k_heads, weights, cosine, sine, order="forward"):
    """x [T, heads, E], heads of queries, keys and others."""
    T, heads, E = x.shape
    _, per_program, _ = rope.CONFIGS[ARCH][f"head_{E}"]
    grid = (T, math.ceil(q_heads / per_program) + math.ceil(k_heads / per_program))
    values = dict(x=x, x_stride=heads * E, q_weight=weights[0], k_weight=weights[1], cosine=cosine, sine=sine,
                  q=poison(T, q_heads, E), k=poison(T, max(k_heads, 1), E), q_heads=q_heads, k_heads=k_heads, eps=EPS)
    after = run_variant(Device(order), VARIANTS[f"qk_norm_rope/head_{E}"], grid, values)
    return after["q"], after["k"]


def apply_swiglu(gate_up):
    T, F = len(gate_up), gate_up.shape[1] // 2
    values = dict(gate_up=gate_up, y=poison(T, F), F=F)
    return run_variant(Device(), VARIANTS["swiglu/block_1024"], (T, math.ceil(F / 1024)), values)["y"]


def normalised(x, w):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * from_bf16(w)


def draw(seed, *shapes, scale=1.0):
    rng = np.random.default_rng(seed)
    return [random_bf16(rng, *shape, scale=scale) for shape in shapes]


@pytest.mark.parametrize("D", WIDTHS)
def test_rms_norm_agrees_with_float64(D):
    x, w = draw(D, (2, D), (D,), scale=3.0)
    exact = normalised(from_bf16(x), w)
    assert np.all(np.abs(from_bf16(rms_norm(x, w)) - exact) <= np.abs(exact) * ONE_ROUNDING)


@pytest.mark.parametrize("D", WIDTHS)
def test_the_norm_behind_the_residual_has_the_bits_of_the_two_alone(D):
    residual, w = draw(D + 1, (2, D), (D,))
    partial = np.random.default_rng(D).standard_normal((2, D)).astype(np.float32)
    hidden, y = add_rms_norm(partial, residual, w)
    assert same_bytes(hidden, to_bf16(from_bf16(residual) + partial))
    assert same_bytes(hidden, residual_add(partial, residual))
    assert same_bytes(y, rms_norm(hidden, w))


def test_a_row_has_the_same_bits_in_any_batch_and_in_either_wave_order():
    x, w = draw(11, (5, 1040), (1040,))
    together = rms_norm(x, w)
    assert same_bytes(rms_norm(x[3:4], w), together[3:4])
    assert same_bytes(rms_norm(x[::-1].copy(), w, order="reverse"), together[::-1].copy())


def test_a_row_of_zeros_is_normalised_to_zeros():
    x, w = np.zeros((1, 64), np.uint16), draw(12, (64,))[0]
    assert np.all(from_bf16(rms_norm(x, w)) == 0)


def rotated(x, weight, cosine, sine):
    x = normalised(from_bf16(x), weight)
    first, second = np.split(x, 2, axis=-1)
    c, s = cosine[:, None].astype(np.float64), sine[:, None].astype(np.float64)
    return np.concatenate([first * c - second * s, second * c + first * s], -1)


def rope_case(seed, T, heads, E):
    x, *weights = draw(seed, (T, heads, E), (E,), (E,))
    angle = np.random.default_rng(seed).uniform(0, 6, (T, E // 2))
    return x, weights, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@pytest.mark.parametrize("E", [64, 128])
@pytest.mark.parametrize(("q_heads", "k_heads"), [(1, 1), (8, 2), (17, 9), (32, 8)])
def test_norm_and_rotation_of_queries_and_keys_agree_with_float64(E, q_heads, k_heads):
    x, weights, cosine, sine = rope_case(E + q_heads, 3, q_heads + 2 * k_heads, E)
    q, k = qk_norm_rope(x, q_heads, k_heads, weights, cosine, sine)
    for got, heads, weight in ((q, x[:, :q_heads], weights[0]), (k, x[:, q_heads : q_heads + k_heads], weights[1])):
        exact = rotated(heads, weight, cosine, sine)
        size = np.abs(exact).max(-1, keepdims=True)  # a difference of two products may be far smaller than both
        assert np.all(np.abs(from_bf16(got) - exact) <= np.abs(exact) * ONE_ROUNDING + size * 2.0**-20)


@pytest.mark.parametrize("E", [64, 128])
def test_a_head_has_the_same_bits_alone_fused_and_in_either_wave_order(E):
    x, weights, cosine, sine = rope_case(E, 3, 24, E)
    q, k = qk_norm_rope(x, 17, 5, weights, cosine, sine)
    assert same_bytes(qk_norm_rope(x, 17, 5, weights, cosine, sine, order="reverse")[1], k)
    keys = x[:, 17:22].copy()
    assert same_bytes(qk_norm_rope(keys, 5, 0, weights[::-1], cosine, sine)[0], k)
    last = x[2:, 16:17].copy()
    assert same_bytes(qk_norm_rope(last, 1, 0, weights, cosine[2:], sine[2:])[0], q[2:, 16:17].copy())


def test_the_comparison_of_heads_catches_a_rotation_by_the_next_position():
    x, weights, cosine, sine = rope_case(3, 3, 2, 128)
    q, _ = qk_norm_rope(x, 2, 0, weights, cosine, sine)
    late, _ = qk_norm_rope(x, 2, 0, weights, np.roll(cosine, 1, 0), np.roll(sine, 1, 0))
    assert not same_bytes(q, late)


@pytest.mark.parametrize("F", [16, 48, 1024, 1536])
def test_swiglu_agrees_with_float64(F):
    (gate_up,) = draw(F, (3, 2 * F), scale=4.0)
    gate, up = from_bf16(gate_up[:, :F]).astype(np.float64), from_bf16(gate_up[:, F:]).astype(np.float64)
    exact = gate / (1 + np.exp(-gate)) * up
    y = apply_swiglu(gate_up)
    assert np.all(np.abs(from_bf16(y) - exact) <= np.abs(exact) * ONE_ROUNDING + 1e-37)
    assert same_bytes(apply_swiglu(gate_up[1:2]), y[1:2])


def test_swiglu_at_the_ends_of_the_range():
    gate = to_bf16(np.array([-3e38, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 3e38] * 2))
    y = from_bf16(apply_swiglu(np.concatenate([gate, to_bf16(np.ones(16))])[None]))[0, :8]
    assert np.all(np.abs(y[:3]) <= 1e-35) and np.all(y[3:5] == 0) and np.all(y[5:] == from_bf16(gate[5:8]))


def test_rows_longer_than_the_largest_block_are_refused():
    with pytest.raises(ValueError, match="rows of 8208 elements, expected at most 8192"):
        norm.choose(ARCH, 8208)
    with pytest.raises(ValueError, match="heads of 96 elements, expected 64 or 128"):
        rope.choose(ARCH, 96)
