"""The GPU backends stand in the registry beside the CPU's, with the same arguments, and need no GPU to be named."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from rlk.ops.registry import registry
from rlk.preflight import unserved_operators

unserved_operators("cuda", "consistency")  # imports every operator
GPU_BACKENDS = [b for op in registry._backends.values() for b in op if b.devices == ("cuda",)]


def test_gpu_backends_cover_the_forward_pass_and_say_what_is_missing():
    served = {backend.op for backend in GPU_BACKENDS}
    assert {"linear", "linear_fp32", "linear_leaves", "rms_norm", "add_rms_norm", "residual_add", "qk_norm_rope",
            "swiglu", "attention_varlen", "attention_paged", "tile_stats", "merge_tiles", "find_targets",
            "pick_logits", "support_score"} <= served
    assert not served & set(unserved_operators("cuda", "consistency"))


@pytest.mark.parametrize("backend", GPU_BACKENDS, ids=lambda backend: backend.op)
def test_a_gpu_backend_takes_the_arguments_of_the_cpu_backend(backend):
    (cpu,) = (b for b in registry._backends[backend.op] if b.name == "cpu")
    assert inspect.signature(backend.function) == inspect.signature(cpu.function)


def test_operators_need_no_triton_until_a_gpu_backend_is_called():
    code = ("import sys; sys.modules['triton'] = None\n"  # importing it would fail
            "from rlk.preflight import unserved_operators; unserved_operators('cuda', 'consistency')")
    subprocess.run([sys.executable, "-c", code], check=True)
