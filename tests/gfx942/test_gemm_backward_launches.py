"""The launchers of the products' gradients, without a GPU: they launch gated variants, and right values come out."""

import pytest
import torch

from rlk.kernels import gemm_backward
from tests.gfx942.test_launchers import draw, stand_in


@pytest.fixture
def launched(monkeypatch, request):
    arch, execute = request.param
    return stand_in(monkeypatch, [gemm_backward], gemm_backward.variants(arch), arch, execute)


@pytest.mark.parametrize("launched", [("gfx942", True)], indirect=True, ids=["gfx942"])
@pytest.mark.parametrize("M", [1, 70])
def test_gradients_agree_with_torch(launched, M, monkeypatch):
    dy, x, w = draw(1, M, 144), draw(2, M, 80), draw(3, 144, 80)
    exact = dy.double() @ w.double()
    assert torch.allclose(gemm_backward.input_gradient(dy, w).double(), exact, rtol=2.0**-7, atol=1e-3)
    main_grad = draw(4, 144, 80, dtype=torch.float32)
    exact = main_grad.double() + dy.double().T @ x.double()
    whole, parts = main_grad.clone(), main_grad.clone()
    gemm_backward.weight_gradient(dy, x, whole)
    assert torch.allclose(whole.double(), exact, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(gemm_backward, "_slices", lambda N, K: [slice(0, 64), slice(64, 144)])
    gemm_backward.weight_gradient(dy, x, parts)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("launched", [("gfx942", False), ("sm_90", False)], indirect=True, ids=["gfx942", "sm_90"])
def test_every_variant_is_launched_by_some_gradient_and_no_other(launched, request):
    arch, _ = request.node.callspec.params["launched"]
    for M, N, K in ((1, 48, 64), (600, 6144, 4096), (8192, 6144, 4096)):
        dy, x, w = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((M, N), (M, K), (N, K)))
        gemm_backward.input_gradient(dy, w)
        gemm_backward.weight_gradient(dy, x, torch.empty(N, K))
    assert set(launched) == {variant.label for variant in gemm_backward.variants(arch)}


@pytest.mark.parametrize("launched", [("gfx942", False)], indirect=True, ids=["gfx942"])
def test_no_rows_launch_nothing(launched):
    main_grad = torch.ones(48, 64)
    gemm_backward.weight_gradient(draw(1, 0, 48), draw(2, 0, 64), main_grad)
    assert gemm_backward.input_gradient(draw(1, 0, 48), draw(3, 48, 64)).shape == (0, 64)
    assert launched == [] and torch.equal(main_grad, torch.ones(48, 64))


def test_operands_that_do_not_fit_are_refused_with_what_was_got():
    dy, x, w, main_grad = draw(1, 3, 48), draw(2, 3, 64), draw(3, 48, 64), torch.zeros(48, 64)
    for refused, message in (
        (lambda: gemm_backward.input_gradient(dy, draw(3, 64, 48)), r"dy \(3, 48\) and w \(64, 48\), expected"),
        (lambda: gemm_backward.input_gradient(draw(1, 3, 40), draw(3, 40, 64)), "N = 40, expected a positive multiple"),
        (lambda: gemm_backward.input_gradient(dy, w), "dy on cpu, expected a GPU"),
        (lambda: gemm_backward.weight_gradient(dy, x[:2], main_grad), r"x \(2, 64\) for a gradient of \(48, 64\)"),
        (lambda: gemm_backward._check_rows("gemm_dw", "main_grad", main_grad.t()), "expected contiguous rows"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
