"""The matrix products: their bits depend on nothing but a row and the weight, and their values are right."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.build import ROOT
from rlk.build.cpu import host_isa
from rlk.ops import gemm
from rlk.ops.registry import registry
from rlk.ops.swiglu import swiglu
from tests.kernel_digest import digest, raw

DTYPES = [torch.float32, torch.bfloat16]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
FEW = settings(deadline=None, max_examples=15)


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fma_chain(x_MK, w_NK):
    """The rule itself, slowly, on BF16 values: their products have 16 bits, so that the sum with an FP32 accumulator
    is exact in double, and rounding it to FP32 is the one rounding of a fused multiply-add."""
    acc = np.zeros((x_MK.shape[0], w_NK.shape[0]), np.float32)
    for k in range(x_MK.shape[1]):
        product = np.outer(x_MK[:, k].double().numpy(), w_NK[:, k].double().numpy())
        acc = (acc.astype(np.float64) + product).astype(np.float32)
    return torch.from_numpy(acc)


@pytest.mark.parametrize("M", [1, 3, 4, 6, 40, 130])
def test_every_element_is_one_fma_chain_with_k_ascending(M):
    x, w = draw(1, M, 300, dtype=torch.bfloat16), draw(2, 21, 300, dtype=torch.bfloat16)
    assert raw(gemm.linear_fp32(x, w)) == raw(fma_chain(x, w))
    assert raw(gemm.linear_fp32(x.float(), w.float())) == raw(fma_chain(x, w))


@both_dtypes
@given(M=st.integers(1, 150), N=st.integers(1, 60), K=st.integers(1, 700), seed=st.integers(0, 99), data=st.data())
@FEW
def test_a_row_has_the_same_bits_in_any_batch_at_any_position(dtype, M, N, K, seed, data):
    x, w = draw(seed, M, K, dtype=dtype), draw(seed + 1, N, K, dtype=dtype)
    rows = data.draw(st.lists(st.integers(0, M - 1), min_size=1, max_size=30))
    columns = slice(data.draw(st.integers(0, N - 1)), N)
    some = gemm.linear(x[rows], w[columns].contiguous())
    assert raw(some) == raw(gemm.linear(x, w)[rows][:, columns])


@both_dtypes
@given(M=st.integers(1, 200), N=st.integers(1, 40), K=st.integers(1, 600), seed=st.integers(0, 99))
@FEW
def test_products_agree_with_float64(dtype, M, N, K, seed):
    x, w, dy = draw(seed, M, K, dtype=dtype), draw(seed + 1, N, K, dtype=dtype), draw(seed + 2, M, N, dtype=dtype)
    grad = draw(seed + 3, N, K)
    want_grad = grad + dy.double().t() @ x.double()
    gemm.gemm_dw(dy, x, grad)
    close = dict(rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(gemm.linear_fp32(x, w).double(), x.double() @ w.double().t(), **close)
    torch.testing.assert_close(grad.double(), want_grad, **close)
    rounded = close if dtype == torch.float32 else dict(rtol=2**-8, atol=2e-4)
    torch.testing.assert_close(gemm.linear(x, w).double(), x.double() @ w.double().t(), **rounded)
    torch.testing.assert_close(gemm.gemm_dx(dy, w).double(), dy.double() @ w.double(), **rounded)


@pytest.mark.parametrize("split", [1, 37, 150])
def test_a_weight_gradient_has_the_same_bits_in_one_batch_or_in_micro_batches(split):
    x, dy, whole = draw(1, 1200, 40), draw(2, 1200, 30), draw(3, 30, 40)
    parts = whole.clone()
    gemm.gemm_dw(dy, x, whole)
    gemm.gemm_dw(dy[:split], x[:split], parts)
    gemm.gemm_dw(dy[split:], x[split:], parts)
    assert raw(parts) == raw(whole)


@both_dtypes
@pytest.mark.parametrize("M", [1, 5, 140])
def test_leaves_are_added_in_a_balanced_tree(dtype, M):
    x, w = draw(1, M, 128, dtype=dtype), draw(2, 30, 128, dtype=dtype)
    parts = [gemm.linear_fp32(a, b.contiguous()) for a, b in zip(x.chunk(4, 1), w.chunk(4, 1), strict=True)]
    assert raw(gemm.linear_leaves(x, w, 4)) == raw((parts[0] + parts[1]) + (parts[2] + parts[3]))
    halves = [gemm.linear_leaves(a, b.contiguous(), 2) for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]
    assert raw(gemm.linear_leaves(x, w, 4)) == raw(halves[0] + halves[1])  # two tensor-parallel ranks


def test_bits_do_not_depend_on_the_thread_count():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = digest(), raw(gemm.linear(draw(1, 300, 256), draw(2, 500, 256)))
        torch.set_num_threads(2)
        two = digest(), raw(gemm.linear(draw(1, 300, 256), draw(2, 500, 256)))
    finally:
        torch.set_num_threads(before)
    assert one == two


@pytest.mark.timeout(300)  # the first run compiles the kernels for the other instruction set
@pytest.mark.parametrize("isa", [isa for isa in ("x86-64-v2", "x86-64-v3", "x86-64-v4") if isa != host_isa()])
def test_bits_do_not_depend_on_the_instruction_set(isa):
    host = host_isa()
    if not host.startswith("x86-64") or isa > host:
        pytest.skip(f"this host runs {host}, not {isa}")
    environment = {**os.environ, "RLK_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernel_digest"]
    other = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == digest()


def test_an_accumulator_starts_at_positive_zero():
    zero = gemm.linear(torch.tensor([[-0.0, 0.0]]), torch.tensor([[1.0, -1.0]]))
    assert raw(zero) == raw(torch.zeros(1, 1))


@pytest.mark.parametrize("mode", ["consistency", "native"])
@pytest.mark.parametrize("leaves", [None, 2])
def test_gradients_agree_with_autograd(mode, leaves):
    x = draw(1, 3, 5, 16).requires_grad_()
    w, dy = draw(2, 12, 16).requires_grad_(), draw(3, 3, 5, 12)
    w.main_grad = torch.ones(12, 16)
    registry.set_mode(mode)
    try:
        y = gemm.linear(x, w) if leaves is None else gemm.linear_leaves(x, w, leaves)
        y.backward(dy)
    finally:
        registry.set_mode("consistency")
    dx, dw = torch.autograd.grad(torch.nn.functional.linear(x, w), (x, w), dy)
    assert w.grad is None
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(w.main_grad, dw + 1)


def test_no_rows_give_no_rows():
    x, w, grad = draw(1, 0, 8), draw(2, 6, 8), torch.ones(6, 8)
    assert gemm.linear(x, w).shape == (0, 6)
    assert gemm.gemm_dx(x[:, :6], w).shape == (0, 8)
    gemm.gemm_dw(x[:, :6], x, grad)
    assert raw(grad) == raw(torch.ones(6, 8))


def test_a_frozen_weight_gets_no_gradient():
    x, w = draw(1, 4, 8).requires_grad_(), draw(2, 6, 8)
    gemm.linear(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(4, 8))


def test_shapes_and_dtypes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"x \(2, 8\) torch.float32 and w \(4, 9\)"):
        gemm.linear(draw(1, 2, 8), draw(2, 4, 9))
    with pytest.raises(ValueError, match="one dtype"):
        gemm.linear(draw(1, 2, 8), draw(2, 4, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="3 leaves for K = 9"):
        gemm.linear_leaves(draw(1, 2, 9), draw(2, 4, 9), 3)


@both_dtypes
def test_a_fused_swiglu_has_the_bits_and_the_gradient_of_the_two_operators(dtype):
    x, w = draw(1, 7, 40, dtype=dtype), draw(2, 24, 40, dtype=dtype)
    apart = swiglu(gemm.linear(x, w))
    assert raw(gemm.linear_swiglu(x, w)) == raw(apart)
    gradients = []
    for fused in (True, False):
        x_MK = x.clone().requires_grad_()
        y = gemm.linear_swiglu(x_MK, w) if fused else swiglu(gemm.linear(x_MK, w))
        y.backward(torch.ones_like(y))
        gradients.append(raw(x_MK.grad))
    assert raw(y.detach()) == raw(apart) and gradients[0] == gradients[1]
