"""The HIP kernels' gfx942 code objects, executed: the bytes of the host build, in both wave orders."""

import numpy as np
import pytest

from tests.gfx942.hip_runs import BFLOAT16, FLOAT32, ORDERS, STORED, Emulated, HostFibers
from tests.gfx942.numerics import same_bytes
from tests.gfx942.retained_sets import INV_T, VOCAB, make_case


@pytest.fixture
def host():
    return HostFibers(64)


@pytest.fixture(params=ORDERS)
def gfx942(request):
    return Emulated(request.param)


@pytest.fixture
def case():
    return make_case((1, 2, 64, 257, 700))


def test_score_has_the_bytes_of_the_host_build(gfx942, case, host):
    scores = gfx942.support_score(case.values, case.offsets, case.index, INV_T)
    assert same_bytes(scores, host.support_score(case.values, case.offsets, case.index, INV_T))
    np.testing.assert_allclose(scores, case.scores(), rtol=2e-6, atol=4e-6)


def test_targets_are_found(gfx942, case):
    targets = np.array([*case.targets[:3], -1, VOCAB])
    index = gfx942.find_targets(case.offsets, case.ids, targets)
    assert index.tolist() == [*case.index[:3], -1, -1]
    many = make_case((1,) * 300)
    assert same_bytes(gfx942.find_targets(many.offsets, many.ids, many.targets), many.index)


@pytest.mark.parametrize("first, columns", [(0, VOCAB), (1250, 1250)])
def test_logits_are_picked(gfx942, case, first, columns, host):
    logits = np.ascontiguousarray(case.logits[:, first:first + columns])
    picked, expected = (build.pick_logits(logits, case.offsets, case.ids, first, np.full_like(case.values, 77))
                    for build in (gfx942, host))
    assert same_bytes(picked, expected)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_gradient_has_the_bytes_of_the_host_build(gfx942, case, dtype, host):
    lse = case.scores()[2].astype(np.float32)
    for columns in (1251, 40):  # 1251: rows that start at no multiple of 16
        got, expected = (
            build.support_score_backward(case.values, case.offsets, case.ids, case.index, lse, case.grad, 1250, INV_T,
                                         dtype, np.full((case.rows, columns), 77, STORED[dtype]))
            for build in (gfx942, host))
        assert same_bytes(got, expected)
