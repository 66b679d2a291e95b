"""cuBLAS in the place of our kernels: whatever its trials found, the operators give our kernels' bits."""

import pytest
import torch

from rlk.kernels import gemm as kernels
from rlk.kernels import gemm_backward
from rlk.ops import cublas
from rlk.ops import gemm as ops
from rlk.ops.registry import registry
from tests.gpu.test_triton_gemm import draw, poison, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="needs a CUDA GPU")

QWEN3_8B = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
HALVES = [(3072, 4096), (4096, 2048), (12288, 4096), (4096, 6144)]  # of two ranks


def verdicts(op):
    return [probe for probe in registry.probes if probe["op"] == op]


@pytest.mark.parametrize("M", [1, 300, 512, 1000, 4096, 5000])
@pytest.mark.parametrize(("N", "K"), QWEN3_8B + HALVES)
def test_products_have_our_kernel_s_bits_at_any_number_of_rows(N, K, M):
    x, w = draw(M, M, K), draw(N, N, K)
    poison()
    assert same(ops.linear(x, w), kernels.linear(x, w))
    assert same(ops.linear_fp32(x, w), kernels.linear(x, w, out_dtype=torch.float32))
    assert same(ops.linear_swiglu(x, w), kernels.linear(x, w, swiglu=True))
    for leaves in (1, 2, 4, 8):
        poison()
        assert same(ops.linear_leaves(x, w, leaves), kernels.linear(x, w, leaves, torch.float32))


@pytest.mark.parametrize("M", [1, 300, 512, 1000, 4096, 5000])
@pytest.mark.parametrize(("N", "K"), QWEN3_8B + HALVES)
def test_gradients_have_our_kernels_bits_at_any_number_of_rows(N, K, M):
    dy, x, w = draw(1, M, N), draw(2, M, K), draw(3, N, K)
    ours, theirs = draw(4, N, K).float(), draw(4, N, K).float()
    poison()
    assert same(ops.gemm_dx(dy, w), gemm_backward.input_gradient(dy, w))
    poison()
    ops.gemm_dw(dy, x, theirs)
    gemm_backward.weight_gradient(dy, x, ours)
    assert same(theirs, ours)


def test_the_head_s_product_and_gradients_have_our_kernels_bits():
    M, N, K = 1000, 151936, 4096
    dy, x, w = draw(1, M, N), draw(2, M, K), draw(3, N, K)
    assert same(ops.linear_fp32(x, w), kernels.linear(x, w, out_dtype=torch.float32))
    assert same(ops.gemm_dx(dy, w), gemm_backward.input_gradient(dy, w))
    ours, theirs = torch.zeros(N, K, device="cuda"), torch.zeros(N, K, device="cuda")
    ops.gemm_dw(dy, x, theirs)
    gemm_backward.weight_gradient(dy, x, ours)
    assert same(theirs, ours)


def test_the_readback_names_cublas_and_what_each_trial_found():
    """On the H200 with torch 2.11, cuBLAS gave one accumulator's bits for every layer at 4096 rows."""
    for N, K in QWEN3_8B:
        ops.linear(draw(1, 4096, K), draw(2, N, K))
    found = [probe for probe in verdicts("linear") if (probe["rows"], probe["leaves"]) == (4096, 1)]
    assert {(probe["n"], probe["k"]) for probe in found} >= set(QWEN3_8B)
    assert all(probe["equal"] for probe in found if probe["out"] == "bfloat16"), found
    assert all(probe["library"] != "cublas none" and probe["error"] == "" for probe in registry.probes), registry.probes
    assert any(row["op"] == "linear" and row["backend"] == "cublas" and row["contract"] for row in registry.readback())


def test_a_trial_catches_a_library_in_another_order(monkeypatch):
    """Two halves of K, each one accumulator, as a split product adds them."""
    def split(x_MK, w_NK, leaves, out_dtype):
        return kernels.linear(x_MK, w_NK, 2, out_dtype)

    monkeypatch.setattr(cublas, "linear", split)
    product = cublas.Product("linear", 1024, 4096, 4096, 1, torch.bfloat16, torch.device("cuda", 0))
    before = list(registry.probes)
    assert not cublas.probe(product) and registry.probes[-1]["unequal"] > 1000
    registry.probes[:] = before


def test_a_captured_graph_replays_the_eager_bits():
    x, w = draw(1, 1000, 4096), draw(2, 6144, 4096)
    ops.linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, w)
    for seed in range(3):
        x.copy_(draw(seed, 1000, 4096))
        graph.replay()
        assert same(y, kernels.linear(x, w))


def test_autograd_gives_the_operators_gradients():
    x, w = draw(1, 1000, 4096).requires_grad_(), draw(2, 6144, 4096).requires_grad_()
    w.main_grad = torch.zeros(6144, 4096, device="cuda")
    dy = draw(3, 1000, 6144)
    ops.linear(x, w).backward(dy)
    main_grad = torch.zeros_like(w.main_grad)
    gemm_backward.weight_gradient(dy, x.detach(), main_grad)
    assert same(x.grad, gemm_backward.input_gradient(dy, w.detach())) and same(w.main_grad, main_grad)
