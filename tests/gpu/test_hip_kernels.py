"""The HIP kernels of retained sets on this GPU: the bytes of the host build. Collectives: test_communicator.py."""

import numpy as np
import pytest
import torch

from rlk.ops import gpu_library
from tests.gfx942.hip_runs import BFLOAT16, FLOAT32, LAUNCHERS, STORED, WAVES, HostFibers
from tests.gfx942.numerics import same_bytes
from tests.gfx942.retained_sets import INV_T, VOCAB, make_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")


def launch(name, *args):
    """The launcher `name` on torch's current stream; tensors travel as their addresses."""
    plain = [gpu_library.ptr(a) if isinstance(a, torch.Tensor) else a for a in args]
    gpu_library.function(f"rlk_gpu_{name}", *LAUNCHERS[name])(*plain, gpu_library.stream())


def on_gpu(array, device="cuda:0"):
    return torch.from_numpy(array.view({2: np.int16}.get(array.itemsize, array.dtype))).to(device)


def from_gpu(tensor, like):
    return tensor.cpu().numpy().view(like.dtype)


class Gpu:
    """The operators of hip_runs.HostFibers on the GPU."""

    def _run(self, name, args, result):
        tensors = {id(a): on_gpu(a) for a in args if isinstance(a, np.ndarray)}
        launch(name, *(tensors.get(id(a), a) for a in args))
        return from_gpu(tensors[id(result)], result)

    def find_targets(self, offsets, ids, targets):
        index = np.full(len(targets), -7, np.int64)
        return self._run("find_targets", [offsets, ids, targets, len(targets), index], index)

    def pick_logits(self, logits, offsets, ids, first_id, values):
        return self._run("pick_logits", [logits, *logits.shape, offsets, ids, first_id, values], values)

    def support_score(self, values, offsets, index, inv_t):
        scores = np.full((3, len(index)), 77, np.float32)
        return self._run("support_score", [values, offsets, index, len(index), inv_t, scores], scores)

    def support_score_backward(self, values, offsets, ids, index, lse, grad, first_id, inv_t, dtype, dlogits):
        return self._run("support_score_backward", [values, offsets, ids, index, lse, grad, *dlogits.shape, first_id,
                                                    inv_t, dtype, dlogits], dlogits)


def results(run):
    """What `run` gives on the GPU and on both host builds."""
    return [run(build) for build in (Gpu(), *map(HostFibers, WAVES))]


def all_same(arrays):
    return all(same_bytes(arrays[0], other) for other in arrays[1:])


@pytest.mark.parametrize("sizes", [(1, 2, 31, 64, 255, 256, 257, 700, 2049, VOCAB), (9,) * 600])
def test_score_has_the_bytes_of_the_host_build(sizes):
    case = make_case(sizes)
    scores = results(lambda build: build.support_score(case.values, case.offsets, case.index, INV_T))
    assert all_same(scores)
    np.testing.assert_allclose(scores[0], case.scores(), rtol=2e-6, atol=4e-6)


def test_targets_are_found_and_logits_picked():
    case = make_case()
    for targets in (case.targets, np.full(case.rows, -1), np.full(case.rows, VOCAB)):
        assert all_same(results(lambda build, t=targets: build.find_targets(case.offsets, case.ids, t)))
    for first, columns in ((0, VOCAB), (1250, 1250)):
        logits = np.ascontiguousarray(case.logits[:, first:first + columns])
        assert all_same(results(lambda build, x=logits, first=first: build.pick_logits(
            x, case.offsets, case.ids, first, np.full_like(case.values, 77))))


@pytest.mark.parametrize("columns", [VOCAB, 1251])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_gradient_has_the_bytes_of_the_host_build(dtype, columns):
    case = make_case()
    lse = case.scores()[2].astype(np.float32)
    assert all_same(results(lambda build: build.support_score_backward(
        case.values, case.offsets, case.ids, case.index, lse, case.grad, 0, INV_T, dtype,
        np.full((case.rows, columns), 77, STORED[dtype]))))
