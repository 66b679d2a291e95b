"""cuBLAS behind its trial: padding changes no bit, and what has not given our bits does not run. No GPU is needed: the
C++ operators stand for the GPU's, and for cuBLAS."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlk.ops import cublas, gemm
from rlk.ops.registry import registry
from tests.kernel_digest import raw

BF16, FP32 = torch.bfloat16, torch.float32
M, N, K = 515, 48, 128  # 253 rows short of the next product


def draw(seed, *shape, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def placed(x, offset):
    """A copy of x that begins `offset` bytes after a multiple of 256."""
    room = torch.empty(x.nbytes + 512, dtype=torch.uint8)
    first = -room.data_ptr() % 256 + offset
    return room[first:first + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


def product(a, b, out_dtype=BF16):
    return gemm._linear_cpu(a.contiguous(), b.t().contiguous(), 1, out_dtype)


class FakeCublas:
    """torch.mm and torch.addmm as a GPU has them, in the order of one accumulator; `split` halves the depth."""

    def __init__(self):
        self.calls, self.split, self.refuses = [], False, None

    def mm(self, a, b, out_dtype=BF16, out=None):
        self.calls.append((tuple(a.shape), tuple(b.shape)))
        if self.refuses:
            raise self.refuses
        y = self.sum(a, b).to(out_dtype)
        return y if out is None else out.copy_(y)

    def addmm(self, c, a, b, out_dtype, out):
        self.calls.append((tuple(a.shape), tuple(b.shape)))
        if self.refuses:
            raise self.refuses
        return out.copy_(c + self.sum(a, b))

    def sum(self, a, b):
        if not self.split:
            return product(a, b, FP32)
        half = a.shape[1] // 2
        return product(a[:, :half], b[:half], FP32) + product(a[:, half:], b[half:], FP32)


def weight_gradient(dy, x, main_grad):
    main_grad += product(dy.t(), x, FP32)


@pytest.fixture
def library(monkeypatch):
    fake = FakeCublas()
    kernels = SimpleNamespace(linear=gemm._linear_cpu, input_gradient=gemm.gemm_dx_cpu, weight_gradient=weight_gradient)
    monkeypatch.setattr(cublas, "_kernels", lambda name: kernels)
    monkeypatch.setattr(cublas, "_equal", {})
    monkeypatch.setattr(registry, "probes", [])
    monkeypatch.setattr(torch, "mm", fake.mm)
    monkeypatch.setattr(torch, "addmm", fake.addmm)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [512, M])
def test_padded_rows_and_leaves_by_their_tree_have_the_bits_of_our_kernel(library, rows, leaves):
    x, w = draw(1, rows, K), draw(2, N, K)
    y = cublas.linear(x, w, leaves, FP32)
    assert y.is_contiguous() and raw(y) == raw(gemm.linear_leaves(x, w, leaves))
    assert library.calls == [((-(-rows // 256) * 256, K // leaves), (K // leaves, N))] * leaves


def test_results_have_the_dtype_and_the_leading_dimensions_asked_for(library):
    x, w = draw(1, 2, 260, K), draw(2, N, K)
    y = cublas.linear(x, w, 1, BF16)
    assert y.shape == (2, 260, N) and raw(y) == raw(gemm.linear(x, w))
    assert cublas.gemm_dx(draw(3, 2, 260, N), w).shape == (2, 260, K)


def test_padded_gradients_have_the_bits_of_our_kernels(library):
    dy, x, w = draw(3, M, N), draw(1, M, K), draw(2, N, K)
    assert raw(cublas.gemm_dx(dy, w)) == raw(gemm.gemm_dx(dy, w))
    ours, theirs = draw(4, N, K, dtype=FP32), draw(4, N, K, dtype=FP32)
    weight_gradient(dy, x, ours)
    cublas.gemm_dw(dy, x, theirs)
    assert raw(ours) == raw(theirs)


def questions():
    dy, x, w, main_grad = draw(3, M, N), draw(1, M, K), draw(2, N, K), draw(4, N, K, dtype=FP32)
    return {"linear": lambda: cublas.serves_linear(x, w, 2, FP32), "gemm_dx": lambda: cublas.serves_dx(dy, w),
            "gemm_dw": lambda: cublas.serves_dw(dy, x, main_grad)}


@pytest.mark.parametrize("op", list(questions()))
def test_a_product_is_tried_once_and_serves_where_the_bits_are_equal(library, op):
    serves = questions()[op]
    assert serves() and (tried := len(library.calls)) and serves() and len(library.calls) == tried
    (found,) = registry.probes
    assert found.pop("torch") == torch.__version__ and found == dict(
        library="cublas none", gpu="a GPU", op=op, rows=768, n=N, k=K, leaves=2 if op == "linear" else 1,
        out="bfloat16" if op == "gemm_dx" else "float32", equal=True, unequal=0, error="")


@pytest.mark.parametrize("op", list(questions()))
def test_a_library_that_splits_the_depth_does_not_serve_and_the_record_counts_what_differs(library, op):
    library.split = True
    assert not questions()[op]() and not questions()[op]()
    (found,) = registry.probes
    assert not found["equal"] and found["unequal"] > 0


@pytest.mark.parametrize("op", list(questions()))
def test_a_trial_in_slices_finds_the_same(library, monkeypatch, op):
    monkeypatch.setattr(cublas, "SLICE_BYTES", 1)
    monkeypatch.setattr(cublas, "ROW_STEP", 16)
    assert questions()[op]()
    library.split = True
    monkeypatch.setattr(cublas, "_equal", {})
    assert not questions()[op]() and registry.probes[-1]["unequal"] > 0


@pytest.mark.parametrize("refusal", [
    NotImplementedError("no such overload\nat a line"), ValueError("K of another size"),
    TypeError("addmm() received an invalid combination of arguments"),
    RuntimeError("out_dtype must be the same as input dtype"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"),
])
@pytest.mark.parametrize("op", list(questions()))
def test_a_form_that_is_refused_does_not_serve_and_the_record_says_why(library, op, refusal):
    library.refuses = refusal
    assert not questions()[op]()
    assert [(found["equal"], found["unequal"], found["error"]) for found in registry.probes] == [
        (False, None, str(refusal).splitlines()[0])]
    library.refuses = None
    assert not questions()[op]() and len(registry.probes) == 1


@pytest.mark.parametrize("full", [torch.OutOfMemoryError("CUDA"), RuntimeError("Triton Error [CUDA]: out of memory"),
                                  RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")])
def test_a_trial_without_memory_is_repeated_at_the_next_call(library, full):
    library.refuses = full
    assert not questions()["linear"]() and registry.probes == []
    library.refuses = None
    assert questions()["linear"]() and [found["equal"] for found in registry.probes] == [True]


@pytest.mark.parametrize("broken", [RuntimeError("CUDA error: an illegal memory access was encountered"),
                                    RuntimeError("Triton Error [CUDA]: invalid argument"), TypeError("a NoneType")])
def test_an_error_that_is_no_refusal_is_passed_on(library, broken):
    library.refuses = broken
    with pytest.raises(type(broken), match=str(broken)[-10:]):
        questions()["linear"]()
    assert registry.probes == []


def test_nothing_is_tried_while_a_graph_is_captured_but_what_was_tried_serves(library, monkeypatch):
    serves = questions()["linear"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not serves() and registry.probes == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert serves()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert serves()


def test_another_setting_of_torch_is_another_product(library, monkeypatch):
    assert questions()["linear"]()
    monkeypatch.setattr(cublas, "_settings", lambda: ("another", "_BlasBackend.Cublas"))
    library.split = True
    assert not questions()["linear"]() and len(registry.probes) == 2


@pytest.mark.parametrize("backend, offset, serves", [
    ("_BlasBackend.Cublas", 16, True), ("_BlasBackend.Cublaslt", 0, True), ("_BlasBackend.Cublaslt", 128, False)])
def test_cublaslt_gets_no_operand_that_is_aligned_less_than_those_of_the_trial(library, monkeypatch, backend, offset,
                                                                              serves):
    monkeypatch.setattr(cublas, "_settings", lambda: ("True", backend))
    dy, x, w = (placed(x, 0) for x in (draw(3, M, N), draw(1, M, K), draw(2, N, K)))
    main_grad = placed(draw(4, N, K, dtype=FP32), 0)
    for change in range(3):
        moved = [placed(t, offset if i == change else 0) for i, t in enumerate((dy, x, main_grad))]
        assert cublas.serves_dw(*moved) == serves
    for moved in ((x, placed(w, offset)), (placed(x, offset), w)):
        assert cublas.serves_linear(*moved, 1, FP32) == serves
    for moved in ((dy, placed(w, offset)), (placed(dy, offset), w)):
        assert cublas.serves_dx(*moved) == serves


def test_operands_of_another_form_are_left_to_our_kernel(library):
    x, w = draw(1, M, K), draw(2, N, K)
    off = draw(1, M * K + 4)[4:].view(M, K)  # eight bytes from a boundary
    for other in ((draw(1, 511, K), w), (x.float(), w), (off, w), (draw(1, K, M).t(), w), (x, draw(2, N, 120)),
                  (draw(1, M, 120), draw(2, N, 120))):
        assert not cublas.serves_linear(*other, 1, FP32)
    assert not cublas.serves_dw(draw(3, M, N), x, draw(4, N, K))  # a gradient in BF16
    assert registry.probes == []
