"""The gradients of norms, rotary embedding and SwiGLU through their launchers, the emulator in the GPU's place."""

import pytest
import torch

from rlk.kernels import norm, norm_backward, rope, rope_backward, swiglu, swiglu_backward
from rlk.ops import norm as norm_ops
from rlk.ops import swiglu as swiglu_ops
from tests.gfx942.test_launchers import stand_in

ARCH = "gfx942"
MODULES = (norm, norm_backward, rope, rope_backward, swiglu, swiglu_backward)
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


def close(got, exact):
    """Within the rounding of got's dtype, and FP32's errors of the row's largest value."""
    size = exact.abs().amax(-1, keepdim=True)
    step = 1.02 * 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-20
    return bool(((got.double() - exact).abs() <= exact.abs() * step + size * 2.0**-18).all())


def weight(seed, *shape):
    """A weight, and a gradient that it already has."""
    return draw(seed, *shape), draw(seed + 100, *shape, dtype=torch.float32)


def gradient_of_the_norm(T, D, add, with_weight):
    """(got, exact) of x, and of the weight if wanted."""
    x, dy, beside, (w, before) = draw(1, T, D, scale=3.0), draw(2, T, D), draw(3, T, D), weight(4, D)
    beside, grad, exact_grad = (beside if add else None), before.clone(), before.double()
    dx = norm_backward.rms_norm_backward(dy, beside, x, w, EPS, grad if with_weight else None)
    exact = norm_ops.rms_norm_backward_reference(dy.double(), beside, x.double(), w.double(), EPS, exact_grad)
    alone = norm_backward.rms_norm_backward(dy[1:2], None if beside is None else beside[1:2], x[1:2], w, EPS, None)
    assert same(alone, dx[1:2])
    return (dx, exact), (grad, exact_grad)


@pytest.mark.parametrize("add", [False, True], ids=["alone", "dhidden"])
@pytest.mark.parametrize(("T", "D"), [(35, 48), (3, 512), (17, 688)])
def test_the_gradients_of_the_norm_agree_with_float64(T, D, add):
    for got, exact in gradient_of_the_norm(T, D, add, with_weight=True):
        assert close(got, exact)


@pytest.mark.parametrize("add", [False, True], ids=["alone", "dhidden"])
@pytest.mark.parametrize("D", [2048, 4096, 5120])
def test_the_gradient_of_long_rows_agrees_with_float64(D, add):
    assert close(*gradient_of_the_norm(2, D, add, with_weight=False)[0])


def test_partial_sums_of_the_weight_gradient_are_added_in_the_order_that_is_written():
    count, D = 1300, 32
    partials, grad = draw(1, count, D, dtype=torch.float32), draw(2, D, dtype=torch.float32)
    before = grad.clone()
    norm_backward.add_partials("test", partials, grad)
    sums = torch.zeros(256, D)
    for first in range(0, count, 256):
        part = partials[first : first + 256]
        sums[: len(part)] += part
    assert torch.allclose(grad, before + sums.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    # Values that cancel in one accumulator show which partials share one.
    spread = torch.zeros(count, D)
    spread[5], spread[5 + 256], spread[5 + 1024], spread[6] = 2.0**60, 1.0, -(2.0**60), 4.0
    grad.zero_()
    norm_backward.add_partials("test", spread, grad)
    assert bool((grad == 4.0).all())


def rotation(seed, T, E):
    angle = torch.rand(T, E // 2, generator=torch.Generator().manual_seed(seed)) * 6
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(("T", "H", "E"), [(1, 1, 128), (3, 9, 128), (70, 2, 128), (3, 9, 64), (66, 2, 64)])
def test_the_gradient_of_rotated_heads_agrees_with_float64_on_a_slice_of_the_fused_qkv(T, H, E):
    qkv, dy, (w, before), (cos, sin) = draw(1, T, H + 3, E), draw(2, T, H, E), weight(3, E), rotation(4, T, E)
    x, grad = qkv[:, 1 : H + 1], before.clone()
    dx = rope_backward.qk_norm_rope_backward(dy, x, w, cos, sin, EPS, grad)
    exact_grad = before.double()
    exact = norm_ops.qk_norm_rope_backward_reference(dy.double(), x.double(), w.double(), cos.double(), sin.double(),
                                                     EPS, exact_grad)
    assert close(dx, exact) and close(grad, exact_grad)
    last = slice(T - 1, T)
    assert same(rope_backward.qk_norm_rope_backward(dy[last], x[last], w, cos[last], sin[last], EPS, None), dx[last])


def test_the_comparison_catches_a_rotation_that_is_not_turned_back():
    x, dy, w, (cos, sin) = draw(1, 3, 2, 128), draw(2, 3, 2, 128), draw(3, 128), rotation(4, 3, 128)
    forward = rope_backward.qk_norm_rope_backward(dy, x, w, cos, -sin, EPS, None)
    exact = norm_ops.qk_norm_rope_backward_reference(dy.double(), x.double(), w.double(), cos.double(), sin.double(),
                                                     EPS, None)
    assert not close(forward, exact)


@pytest.mark.parametrize("F", [16, 1024, 1536])
def test_the_gradient_of_swiglu_agrees_with_float64(F):
    gate_up, dy = draw(1, 3, 2 * F, scale=4.0), draw(2, 3, F)
    got = swiglu_backward.swiglu_backward(dy, gate_up)
    exact = swiglu_ops.swiglu_backward_reference(dy.double(), gate_up.double())
    assert bool(((got.double() - exact).abs() <= exact.abs() * 1.02 * 2.0**-8 + 1e-6).all())
    assert same(swiglu_backward.swiglu_backward(dy[1:2], gate_up[1:2]), got[1:2])


def test_no_rows_give_no_gradient():
    grad = draw(1, 64, dtype=torch.float32)
    before, none = grad.clone(), draw(2, 0, 64)
    assert norm_backward.rms_norm_backward(none, None, none, draw(3, 64), EPS, grad).shape == (0, 64)
    heads, angles = none.view(0, 1, 64), torch.empty(0, 32)
    assert rope_backward.qk_norm_rope_backward(heads, heads, draw(3, 64), angles, angles, EPS, grad).shape == (0, 1, 64)
    assert swiglu_backward.swiglu_backward(none, draw(4, 0, 128)).shape == (0, 128)
    assert same(grad, before)


def test_shapes_without_a_configuration_are_refused():
    x = draw(1, 2, 8208)
    with pytest.raises(ValueError, match="rows of 8208 elements, expected at most 8192"):
        norm_backward.rms_norm_backward(x, None, x, draw(2, 8208), EPS, None)
    heads = draw(1, 2, 2, 96)
    with pytest.raises(ValueError, match="heads of 96 elements, expected 64 or 128"):
        rope_backward.qk_norm_rope_backward(heads, heads, draw(2, 96), *rotation(3, 2, 96), EPS, None)
