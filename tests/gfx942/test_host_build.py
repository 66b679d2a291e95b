"""The HIP kernels on the host, one fiber per lane: right values, and one set of bits for all waves and orders."""

import ctypes
import subprocess

import numpy as np
import pytest
import torch

from rlk.build import FLAGS, SOURCES
from rlk.build.cpu import host_compiler
from rlk.ops import logprob
from tests.gfx942.hip_runs import (
    BAD_DTYPE,
    BAD_SHAPE,
    BFLOAT16,
    DEADLOCK,
    FLOAT16,
    FLOAT32,
    ORDERS,
    STORED,
    WAVES,
    HostFibers,
    LaunchError,
)
from tests.gfx942.numerics import same_bytes
from tests.gfx942.retained_sets import INV_T, VOCAB, make_case

BUILDS = [(wave, order, seed) for wave in WAVES for order in ORDERS for seed in (0, 7)]
BACKWARD = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}


@pytest.fixture(params=BUILDS, ids=lambda build: f"wave{build[0]}-{build[1]}{'-uneven' if build[2] else ''}")
def fibers(request):
    return HostFibers(*request.param)


@pytest.fixture
def case():
    return make_case()


def tensors(*arrays):
    return [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in arrays]


# ---- retained sets ----


def test_score_of_a_retained_set_agrees_with_float64_and_has_one_set_of_bits(fibers, case):
    scores = fibers.support_score(case.values, case.offsets, case.index, INV_T)
    assert same_bytes(scores, HostFibers().support_score(case.values, case.offsets, case.index, INV_T))
    np.testing.assert_allclose(scores, case.scores(), rtol=2e-6, atol=4e-6)
    cpu = torch.stack(logprob.support_score_cpu(*tensors(case.values, case.offsets, case.index, INV_T)))
    np.testing.assert_allclose(scores, cpu.numpy(), rtol=2e-6, atol=2e-5)  # entropy cancels: both round numbers of 20


def test_score_does_not_depend_on_the_other_rows(case):
    together = HostFibers().support_score(case.values, case.offsets, case.index, INV_T)
    for r in range(case.rows):
        alone = HostFibers().support_score(case.values, case.offsets[r:r + 2].copy(), case.index[r:r + 1].copy(), INV_T)
        assert alone[:, 0].tobytes() == together[:, r].tobytes()


def test_score_of_a_set_of_one_is_zero_and_of_a_missing_target_is_nan():
    case = make_case((1, 4))
    scores = HostFibers().support_score(case.values, case.offsets, np.array([case.index[0], -1]), INV_T)
    assert scores[:2, 0].tolist() == [0, 0]
    assert np.isnan(scores[0, 1]) and np.isfinite(scores[1:, 1]).all()


def test_targets_are_found_as_on_the_cpu(fibers, case):
    absent = np.setdiff1d(np.arange(VOCAB), case.ids[case.row(8)])[[0, 40, -1]]
    for targets in (case.targets, np.array([*case.targets[:8], absent[0]]), np.array([*case.targets[:8], absent[-1]]),
                    np.full(case.rows, -1), np.full(case.rows, VOCAB)):
        cpu = logprob.find_targets_cpu(*tensors(case.offsets, case.ids, targets))
        assert same_bytes(fibers.find_targets(case.offsets, case.ids, targets), cpu.numpy())
    many = make_case((1,) * 300)  # more rows than one workgroup takes
    assert same_bytes(fibers.find_targets(many.offsets, many.ids, many.targets), many.index)


@pytest.mark.parametrize("first, columns", [(0, VOCAB), (1250, 1250), (4999, 1)])
def test_logits_are_picked_as_on_the_cpu(fibers, case, first, columns):
    logits = np.ascontiguousarray(case.logits[:, first:first + columns])
    picked = fibers.pick_logits(logits, case.offsets, case.ids, first, np.full_like(case.values, 77))
    cpu = torch.full((len(picked),), 77.0)
    logprob.pick_logits_cpu(*tensors(logits, case.offsets, case.ids, first), cpu)
    assert same_bytes(picked, cpu.numpy())


@pytest.mark.parametrize("first, columns", [(0, VOCAB), (1250, 1251)])  # 1251: rows that start at no multiple of 16
@pytest.mark.parametrize("dtype", BACKWARD)
def test_gradient_has_the_bits_of_the_cpu(fibers, case, dtype, first, columns):
    lse = case.scores()[2].astype(np.float32)
    dlogits = np.full((case.rows, columns), 77, STORED[dtype])
    fibers.support_score_backward(case.values, case.offsets, case.ids, case.index, lse, case.grad, first, INV_T, dtype,
                                  dlogits)
    cpu = torch.empty(case.rows, columns, dtype=BACKWARD[dtype])
    logprob.support_score_backward_cpu(*tensors(case.values, case.offsets, case.ids, case.index, lse, case.grad, first,
                                                INV_T), cpu)
    assert dlogits.tobytes() == cpu.view(torch.uint8).numpy().tobytes()


def test_no_rows_are_no_work_and_wrong_arguments_are_refused(case):
    fibers, none = HostFibers(), np.zeros(0, np.int64)
    assert fibers.find_targets(case.offsets[:1], case.ids, none).size == 0
    assert fibers.support_score(case.values, case.offsets[:1], none, INV_T).shape == (3, 0)
    nothing = [None] * 6
    with pytest.raises(LaunchError) as caught:
        fibers.call("support_score_backward", *nothing, 1, 8, 0, 1.0, FLOAT16, None, None)
    assert caught.value.code == BAD_DTYPE
    with pytest.raises(LaunchError) as caught:
        fibers.call("pick_logits", None, -1, 8, None, None, 0, None, None)
    assert caught.value.code == BAD_SHAPE


# ---- the fibers themselves ----

KERNELS = """
#include "gpu/gpu.h"
using namespace rlk;
__global__ void last_writer(int* out) { *out = lane_index(); }
__global__ void shuffled(int* out, int lanes) { out[lane_index()] = shuffle_down(100 + lane_index(), lanes); }
__global__ void unwritten(uint32_t* out) {
  RLK_SHARED(uint32_t, word);
  if (lane_index() == 0) out[group_index()] = word;
  __syncthreads();
  word = 1;
}
__global__ void missing_barrier(int lanes) { if (lane_index() >= lanes) __syncthreads(); }
RLK_EXPORT int run_last_writer(int* out) { return RLK_LAUNCH(last_writer, 2, 100, nullptr, out); }
RLK_EXPORT int run_shuffled(int* out, int lanes) { return RLK_LAUNCH(shuffled, 1, 96, nullptr, out, lanes); }
RLK_EXPORT int run_unwritten(uint32_t* out) { return RLK_LAUNCH(unwritten, 3, 64, nullptr, out); }
RLK_EXPORT int run_missing_barrier(int lanes) { return RLK_LAUNCH(missing_barrier, 2, 100, nullptr, lanes); }
"""


@pytest.fixture(scope="module", params=WAVES)
def small_kernels(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"wave{request.param}")
    (folder / "kernels.cpp").write_text(KERNELS)
    subprocess.run([host_compiler(), *FLAGS["host"], f"-DRLK_WAVE={request.param}", "-I", SOURCES, "-shared",
                    folder / "kernels.cpp", "-o", folder / "kernels.so"], check=True)
    return request.param, ctypes.CDLL(str(folder / "kernels.so"))


def test_the_order_of_lanes_shows_in_a_race(small_kernels):
    _, library = small_kernels
    out = ctypes.c_int()
    for reverse, last in ((0, 99), (1, 0)):
        library.rlk_fibers_order(reverse, ctypes.c_uint64(0))
        assert library.run_last_writer(ctypes.byref(out)) == 0 and out.value == last


@pytest.mark.parametrize("lanes", [0, 1, 16, 31])
def test_a_shuffle_stays_within_the_wave(small_kernels, lanes):
    wave, library = small_kernels
    out = (ctypes.c_int * 96)()
    assert library.run_shuffled(out, lanes) == 0
    width = [min(wave, 96 - lane // wave * wave) for lane in range(96)]
    assert list(out) == [100 + lane + (lanes if lane % wave + lanes < width[lane] else 0) for lane in range(96)]


def test_lds_is_each_workgroups_own_and_starts_as_a_pattern(small_kernels):
    out = (ctypes.c_uint32 * 3)()
    assert small_kernels[1].run_unwritten(out) == 0
    assert list(out) == [0xA5A5A5A5] * 3


def test_a_barrier_that_some_lanes_never_reach_is_reported(small_kernels, capfd):
    library = small_kernels[1]
    assert library.run_missing_barrier(0) == 0
    assert library.run_missing_barrier(30) == DEADLOCK
    assert "of its 100 lanes 70 wait at a barrier, 0 in a shuffle, 30 ended" in capfd.readouterr().err
    assert library.run_missing_barrier(0) == 0  # it can be used again
