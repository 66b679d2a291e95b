"""The Triton GEMM on this GPU: right values, and one set of bits in every configuration, batch and schedule."""

import pytest
import torch

from rlk.kernels import gemm, norm, swiglu
from rlk.kernels.gemm import CONFIGS
from rlk.kernels.variants import architecture
from tests.gpu.operator_checks import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

K = 4096
CASES = [(arch, name) for arch, table in CONFIGS.items() for name in table]


def draw(seed, *shape):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)


def poison():
    """Leave NaN in the memory that the next calls will get."""
    torch.full((1 << 24,), float("nan"), device="cuda")


def fp32(x, w, leaves=1, config=None):
    poison()
    return gemm.linear(x, w, leaves, torch.float32, config=config)


def of_this_gpu(arch):
    if arch != architecture():
        pytest.skip(f"this GPU is {architecture()}")


@pytest.mark.parametrize(("arch", "name"), CASES)
@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
def test_every_configuration_gives_one_set_of_bits(arch, name, leaves):
    of_this_gpu(arch)
    if leaves not in CONFIGS[arch][name].leaves:
        pytest.skip(f"{name} is not for {leaves} leaves")
    for M, N in ((1, 1024), (3, 48), (17, 208), (64, 1040), (65, 336), (300, 528)):
        x, w = draw(M, 301, K), draw(N, N, K)
        expected = fp32(x, w, leaves)
        assert same(fp32(x[:M].contiguous(), w, leaves, name), expected[:M])


@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
@pytest.mark.parametrize("depth", [16, 48, 1072, 4096, 12288])
def test_a_row_has_the_same_bits_in_decode_prefill_and_training(depth, leaves):
    x, w = draw(1, 2048, depth * leaves), draw(2, 528, depth * leaves)
    together = fp32(x, w, leaves)
    for rows in (slice(0, 1), slice(7, 10), slice(100, 164), slice(40, 105), slice(1000, 1777)):
        assert same(fp32(x[rows].contiguous(), w, leaves), together[rows])


@pytest.mark.parametrize("M", [1, 8, 17, 65, 300])
@pytest.mark.parametrize("N", [32, 1536, 20000])
def test_products_agree_with_float64(M, N):
    x, w = draw(M, M, K), draw(N, N, K)
    exact, magnitude = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    total = fp32(x, w)
    assert bool(((total - exact).abs() <= magnitude * 2.0**-18).all())
    poison()
    rounded = gemm.linear(x, w)
    assert same(rounded, total.to(torch.bfloat16))


@pytest.mark.parametrize("leaves", [2, 4, 8])
@pytest.mark.parametrize("M", [3, 100])
def test_leaves_are_added_in_a_balanced_tree(M, leaves):
    x, w = draw(3, M, 512 * leaves), draw(4, 96, 512 * leaves)
    parts = [fp32(a.contiguous(), b.contiguous()) for a, b in zip(x.chunk(leaves, 1), w.chunk(leaves, 1), strict=True)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert same(fp32(x, w, leaves), parts[0])


@pytest.mark.parametrize("M", [1, 17, 300])
@pytest.mark.parametrize("leaves", [1, 4])
def test_a_fused_epilogue_has_the_bits_of_the_kernels_one_after_the_other(M, leaves):
    x, w, residual = draw(5, M, K), draw(6, 1536, K), draw(7, M, 1536)
    apart = norm.residual_add(fp32(x, w, leaves), residual)
    poison()
    assert same(gemm.linear(x, w, leaves, residual_MN=residual), apart)
    assert same(gemm.linear(x, w, swiglu=True), swiglu.swiglu(gemm.linear(x, w)))


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_every_configuration_fuses_the_same_bits(arch, name):
    of_this_gpu(arch)
    if 1 not in CONFIGS[arch][name].leaves:
        pytest.skip(f"{name} is for leaves")
    for M, N in ((1, 1024), (17, 224), (70, 1056)):
        x, w, residual = draw(M, M, K), draw(N, N, K), draw(7, M, N)
        poison()
        assert same(gemm.linear(x, w, residual_MN=residual, config=name), norm.residual_add(fp32(x, w), residual))
        assert same(gemm.linear(x, w, swiglu=True, config=name), swiglu.swiglu(gemm.linear(x, w)))
        assert same(gemm.linear(x, w, config=name), fp32(x, w).to(torch.bfloat16))


@pytest.mark.parametrize("M", [17, 70])
@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
def test_every_reduction_finishes_with_the_bits_of_the_sum(leaves, M):
    """At a depth with a tail: one sum of each leaf goes through the reduction, whatever the rows."""
    depth = 272 * leaves
    x, w, residual = draw(12, M, depth), draw(13, 1056, depth), draw(14, M, 1056)
    total = fp32(x, w, leaves)
    poison()
    assert same(gemm.linear(x, w, leaves), total.to(torch.bfloat16))
    assert same(gemm.linear(x, w, leaves, residual_MN=residual), norm.residual_add(total, residual))
    if leaves == 1:
        assert same(gemm.linear(x, w, swiglu=True), swiglu.swiglu(total.to(torch.bfloat16)))


CANDIDATES = [gemm.Config(8, 32, 128, 4, 4, swap=True), gemm.Config(8, 64, 128, 4, 4, swap=True),
              gemm.Config(64, 64, 64, 4, 4, swap=True)]


@pytest.mark.parametrize("config", CANDIDATES, ids=lambda config: f"{config.block_m}x{config.block_n}_swap")
def test_swapped_operands_change_no_bit(config):
    """In a graph of products that feed each other."""
    of_this_gpu("sm_90")
    D, layers = 2048, [draw(20 + i, 2048, 2048) * 2.0**-5 for i in range(6)]
    x = draw(19, 64, D)

    def chain(x, config=None):
        for w in layers:
            x = gemm.linear(x, w, config=config)
        return x

    for M in (1, 7, 16, 64):
        some = x[:M].contiguous()
        chain(some, config)  # compiles before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain(some, config)
        for seed in range(5):
            some.copy_(draw(seed, M, D))
            graph.replay()
            assert same(y, chain(some)), (M, seed)


def test_the_comparison_catches_another_order():
    x, w = draw(8, 70, K), draw(9, 528, K)
    expected = fp32(x, w)
    backwards = fp32(x.flip(1).contiguous(), w.flip(1).contiguous())
    halves = fp32(x, w, leaves=2)
    for wrong in (backwards, halves):
        assert torch.allclose(wrong, expected, atol=1e-2) and not same(wrong, expected)


@pytest.mark.parametrize("M", [1, 8, 100])
def test_a_captured_graph_replays_the_eager_bits_with_changing_inputs(M):
    x, w = draw(10, M, K), draw(11, 1536, K)
    gemm.linear(x, w, 2, torch.float32)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemm.linear(x, w, 2, torch.float32)
    for seed in range(3):
        x.copy_(draw(seed, M, K))
        graph.replay()
        assert same(y, fp32(x, w, 2))


def test_no_rows_give_an_empty_result():
    assert gemm.linear(draw(1, 0, 64), draw(2, 32, 64)).shape == (0, 32)


def test_operands_that_do_not_fit_are_refused_with_what_was_got():
    x, w = draw(1, 3, 64), draw(2, 32, 64)
    for refused, message in (
        (lambda: gemm.linear(x, draw(3, 32, 80)), r"x \(3, 64\) and w \(32, 80\)"),
        (lambda: gemm.linear(x, w, 3), "3 leaves for K = 64"),
        (lambda: gemm.linear(x, draw(3, 30, 64)), "N = 30, expected a positive multiple of 16"),
        (lambda: gemm.linear(x.float(), w), "torch.float32"),
        (lambda: gemm.linear(x.cpu(), w), "expected a GPU"),
        (lambda: gemm.linear(draw(3, 3 * 64 + 1)[1:].view(3, 64), w), "multiple of 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
