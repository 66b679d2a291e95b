"""The gradients of matrix products on this GPU: right values, one set of bits in every configuration and every run."""

import pytest
import torch

from rlk.kernels import gemm_backward
from rlk.kernels.gemm_backward import CONFIGS
from tests.gpu.test_triton_gemm import draw, of_this_gpu, poison, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

CASES = [(arch, kernel, name) for arch, tables in CONFIGS.items() for kernel, table in tables.items() for name in table]
SHAPES = [(1, 48, 64), (17, 208, 1040), (64, 1040, 336), (300, 528, 512), (1023, 2064, 784)]


def input_gradient(dy, w, config=None):
    poison()
    return gemm_backward.input_gradient(dy, w, config)


def weight_gradient(dy, x, start=None, config=None):
    """main_grad after one call; `start`: before it, else zeros."""
    main_grad = torch.zeros(dy.shape[1], x.shape[1], device="cuda") if start is None else start.clone()
    gemm_backward.weight_gradient(dy, x, main_grad, config)
    return main_grad


@pytest.mark.parametrize(("arch", "kernel", "name"), CASES)
def test_every_configuration_gives_one_set_of_bits(arch, kernel, name):
    of_this_gpu(arch)
    for M, N, K in SHAPES:
        dy, x, w, start = draw(M, M, N), draw(N, M, K), draw(K, N, K), draw(4, N, K).float()
        if kernel == "gemm_dx":
            assert same(input_gradient(dy, w, name), input_gradient(dy, w))
        else:
            assert same(weight_gradient(dy, x, start, name), weight_gradient(dy, x, start))


@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_gradients_agree_with_float64(M, N, K):
    dy, x, w, start = draw(1, M, N), draw(2, M, K), draw(3, N, K), draw(4, N, K).float()
    exact, magnitude = dy.double() @ w.double(), dy.double().abs() @ w.double().abs()
    dx = input_gradient(dy, w).double()
    assert bool(((dx - exact).abs() <= exact.abs() * 2.0**-8 + magnitude * 2.0**-18).all())
    exact = start.double() + dy.double().T @ x.double()
    magnitude = start.double().abs() + dy.double().abs().T @ x.double().abs()
    assert bool(((weight_gradient(dy, x, start).double() - exact).abs() <= magnitude * 2.0**-18).all())


def test_a_row_s_gradient_does_not_know_its_neighbours():
    dy, w = draw(1, 2048, 6144), draw(2, 6144, 1024)
    together = input_gradient(dy, w)
    for rows in (slice(0, 1), slice(7, 10), slice(100, 164), slice(1000, 1777)):
        assert same(input_gradient(dy[rows].contiguous(), w), together[rows])


def test_a_weight_gradient_adds_its_sum_once_and_rows_of_zeros_add_nothing():
    dy, x, start = draw(1, 1000, 528), draw(2, 1000, 784), draw(3, 528, 784).float()
    total = weight_gradient(dy, x)
    assert same(weight_gradient(dy, x, start), start + total)
    zeros = [torch.cat([each, each.new_zeros(24, each.shape[1])]) for each in (dy, x)]
    assert same(weight_gradient(*zeros, start), start + total)


def test_a_vocabulary_s_gradient_beyond_two_gibibytes_has_the_bits_of_its_parts():
    N, K = 151936, 4096
    dy, x = draw(1, 70, N), draw(2, 70, K)
    whole = weight_gradient(dy, x)
    for rows in (slice(0, 256), slice(130944, 131200), slice(N - 64, N)):
        assert same(whole[rows], weight_gradient(dy[:, rows].contiguous(), x))


def test_every_run_gives_the_same_bits():
    dy, x, w = draw(1, 3001, 4096), draw(2, 3001, 4096), draw(3, 4096, 4096)
    dx, dw = input_gradient(dy, w), weight_gradient(dy, x)
    for _ in range(20):
        assert same(input_gradient(dy, w), dx) and same(weight_gradient(dy, x), dw)


def test_a_captured_graph_replays_the_eager_bits_with_changing_inputs():
    dy, x, w = draw(1, 300, 528), draw(2, 300, 784), draw(3, 528, 784)
    main_grad = torch.zeros(528, 784, device="cuda")
    gemm_backward.input_gradient(dy, w), gemm_backward.weight_gradient(dy, x, main_grad)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = gemm_backward.input_gradient(dy, w)
        gemm_backward.weight_gradient(dy, x, main_grad)
    for seed in range(3):
        dy.copy_(draw(seed, 300, 528))
        before = main_grad.clone()
        graph.replay()
        assert same(dx, input_gradient(dy, w)) and same(main_grad, weight_gradient(dy, x, before))


def test_the_comparison_catches_another_order():
    dy, x, w = draw(1, 600, 512), draw(2, 600, 784), draw(3, 512, 784)
    dx, dw = input_gradient(dy, w), weight_gradient(dy, x)
    backwards = input_gradient(dy.flip(1).contiguous(), w.flip(0).contiguous())
    assert torch.allclose(backwards, dx, atol=0.5, rtol=0.02) and not same(backwards, dx)
    halves = weight_gradient(dy[300:].contiguous(), x[300:].contiguous(),
                             weight_gradient(dy[:300].contiguous(), x[:300].contiguous()))
    assert torch.allclose(halves, dw, atol=1e-2) and not same(halves, dw)


def test_no_rows_change_nothing():
    main_grad = torch.ones(48, 64, device="cuda")
    gemm_backward.weight_gradient(draw(1, 0, 48), draw(2, 0, 64), main_grad)
    assert bool((main_grad == 1).all())
    assert gemm_backward.input_gradient(draw(1, 0, 48), draw(2, 48, 64)).shape == (0, 64)
