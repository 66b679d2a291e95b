"""The gradients' gfx942 code objects, executed: right values, and one set of bits in every configuration."""

import dataclasses

import numpy as np
import pytest

from rlk.kernels import gemm_backward
from rlk.kernels.gemm_backward import CONFIGS
from tests.gfx942.emulator import Device
from tests.gfx942.numerics import BF16_EPSILON, from_bf16, random_bf16, same_bytes, to_bf16
from tests.gfx942.test_gemm_executes import chain
from tests.gfx942.triton_runs import run_variant

ARCH = "gfx942"
VARIANTS = {variant.label: variant for variant in gemm_backward.variants(ARCH)}
DX, DW = list(CONFIGS[ARCH]["gemm_dx"]), list(CONFIGS[ARCH]["gemm_dw"])
GUARD = 512  # elements behind a result


def launch(kernel, name, grid_of, values, order="forward", **constants):
    config = CONFIGS[ARCH][kernel][name]
    variant = VARIANTS[f"{kernel}/{name}"]
    variant = dataclasses.replace(variant, constants=variant.constants | constants)
    return run_variant(Device(order), variant, gemm_backward.grid(config, *grid_of), values)


def input_gradient(name, dy, w, dy_stride=None, **options):
    """dx [M, K]; nothing is written behind it. dy_stride: dy [M, dy_stride] has more columns than w has rows."""
    M, (N, K) = len(dy), w.shape
    dx = np.full(M * K + GUARD, 0x7FC0, np.uint16)
    values = dict(dy=dy, w=w, dx=dx, M=M, N=N, K=K, dy_stride=dy_stride or N)
    after = launch("gemm_dx", name, (M, K), values, **options)["dx"]
    assert same_bytes(after[-GUARD:], dx[-GUARD:])
    return after[:-GUARD].reshape(M, K)


def weight_gradient(name, dy, x, main_grad, **options):
    """main_grad [N, K] afterwards; nothing is written behind it."""
    (M, K), (N, _) = x.shape, main_grad.shape
    padded = np.concatenate([main_grad.reshape(-1), np.full(GUARD, np.nan, np.float32)])
    values = dict(dy=dy, x=x, main_grad=padded, M=M, N=N, K=K, dy_stride=dy.shape[1])
    after = launch("gemm_dw", name, (N, K), values, **options)["main_grad"]
    assert same_bytes(after[-GUARD:], padded[-GUARD:])
    return after[:-GUARD].reshape(N, K)


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [random_bf16(rng, *shape) for shape in shapes]


def across(x):
    return np.ascontiguousarray(x.T)


@pytest.mark.parametrize("N", [16, 64, 144])
@pytest.mark.parametrize("name", DX)
def test_an_input_gradient_is_one_accumulator_with_n_ascending(name, N):
    dy, w = draw(1, (19, N), (N, 144))
    assert same_bytes(input_gradient(name, dy, w), to_bf16(chain(dy, across(w), 0, N)))


@pytest.mark.parametrize("M", [1, 19, 64, 131])
@pytest.mark.parametrize("name", DW)
def test_a_weight_gradient_adds_one_accumulator_with_rows_ascending_to_what_is_there(name, M):
    dy, x = draw(2, (M, 48), (M, 144))
    main_grad = np.random.default_rng(3).standard_normal((48, 144)).astype(np.float32)
    expected = main_grad + chain(across(dy), across(x), 0, M)
    assert same_bytes(weight_gradient(name, dy, x, main_grad), expected)


def test_gradients_agree_with_float64():
    dy, x, w = draw(4, (70, 96), (70, 80), (96, 80))
    exact = from_bf16(dy).astype(np.float64) @ from_bf16(w)
    magnitude = np.abs(from_bf16(dy)).astype(np.float64) @ np.abs(from_bf16(w))
    dx = from_bf16(input_gradient(DX[0], dy, w))
    assert np.all(np.abs(dx - exact) <= np.abs(exact) * BF16_EPSILON + magnitude * 2.0**-20)
    exact = from_bf16(dy).T.astype(np.float64) @ from_bf16(x)
    magnitude = np.abs(from_bf16(dy)).T.astype(np.float64) @ np.abs(from_bf16(x))
    dw = weight_gradient(DW[0], dy, x, np.zeros((96, 80), np.float32))
    assert np.all(np.abs(dw - exact) <= magnitude * 2.0**-20)


@pytest.mark.parametrize("kernel", ["gemm_dx", "gemm_dw"])
def test_many_tiles_have_the_same_bits_in_every_configuration_and_in_either_wave_order(kernel):
    """More than one group of column tiles, and edges in both directions."""
    dy, x, w = draw(5, (80, 80), (80, 592), (80, 592))
    if kernel == "gemm_dx":
        expected = to_bf16(chain(dy, across(w), 0, 80))
        results = [input_gradient(name, dy, w, order=order) for name in DX for order in ("forward", "reverse")]
    else:
        zeros = np.zeros((80, 592), np.float32)
        expected = chain(across(dy), across(x), 0, 80)
        results = [weight_gradient(name, dy, x, zeros, order=order) for name in DW for order in ("forward", "reverse")]
    assert all(same_bytes(result, expected) for result in results)


def test_rows_of_zeros_add_nothing_and_a_row_of_dx_does_not_know_its_neighbours():
    """What lets a product be padded to another number of rows."""
    dy, x, w = draw(6, (70, 48), (70, 64), (48, 64))
    padded = [np.concatenate([each, np.zeros((26, each.shape[1]), np.uint16)]) for each in (dy, x)]
    main_grad = np.full((48, 64), -0.0, np.float32)
    assert same_bytes(weight_gradient(DW[1], *padded, main_grad), weight_gradient(DW[1], dy, x, main_grad))
    assert same_bytes(input_gradient(DX[1], padded[0], w)[:70], input_gradient(DX[1], dy, w))
    assert same_bytes(input_gradient(DX[1], dy[33:35].copy(), w), input_gradient(DX[1], dy, w)[33:35])


def test_columns_of_a_wider_dy_are_read_by_its_stride():
    dy, w = draw(7, (5, 96), (48, 64))
    assert same_bytes(input_gradient(DX[1], dy, w, dy_stride=96), input_gradient(DX[1], dy[:, :48].copy(), w))


def test_the_comparison_catches_another_order():
    dy, x, w = draw(8, (80, 80), (80, 64), (80, 64))
    backwards = input_gradient(DX[0], dy[:, ::-1].copy(), w[::-1].copy())
    assert not same_bytes(backwards, input_gradient(DX[0], dy, w))
    zeros = np.zeros((80, 64), np.float32)
    expected = weight_gradient(DW[0], dy, x, zeros)
    halves = weight_gradient(DW[0], dy[40:].copy(), x[40:].copy(), weight_gradient(DW[0], dy[:40].copy(),
                                                                                  x[:40].copy(), zeros))
    for wrong in (halves, weight_gradient(DW[0], dy[::-1].copy(), x[::-1].copy(), zeros)):
        assert np.allclose(wrong, expected, atol=1e-3) and not same_bytes(wrong, expected)


QWEN3 = [(hidden, width) for hidden, widths in (  # a linear layer's K and N, for 0.6B, 8B and 32B
    (1024, (4096, 6144, 151936)), (4096, (6144, 24576, 151936)), (5120, (10240, 51200, 151936))) for width in widths]


@pytest.mark.parametrize("arch", list(CONFIGS))
def test_every_configuration_serves_some_product(arch):
    for kernel in ("gemm_dx", "gemm_dw"):
        results = {(48, 64)} | {(M, K) if kernel == "gemm_dx" else (N, K) for K, N in QWEN3
                                for M in (1, 512, 8192)}
        chosen = {gemm_backward.choose(arch, kernel, *result) for result in results}
        assert chosen == set(CONFIGS[arch][kernel])


def test_a_gradient_beyond_two_gibibytes_is_made_in_parts_that_meet():
    parts = gemm_backward._slices(151936, 4096)
    assert len(parts) > 1 and parts[0].start == 0 and parts[-1].stop == 151936
    assert all(a.stop == b.start for a, b in zip(parts, parts[1:], strict=False))
    assert all((part.stop - part.start) * 4096 * 4 < 1 << 31 and part.start % 128 == 0 for part in parts)
    assert gemm_backward._slices(6144, 4096) == [slice(0, 6144)]
