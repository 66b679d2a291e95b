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


def test_every_operator_has_a_gpu_backend():
    assert unserved_operators("cuda", "consistency") == []


@pytest.mark.parametrize("backend", GPU_BACKENDS, ids=lambda backend: backend.op)
def test_a_gpu_backend_takes_the_arguments_of_the_cpu_backend(backend):
    (cpu,) = (b for b in registry._backends[backend.op] if b.name == "cpu")
    assert inspect.signature(backend.function) == inspect.signature(cpu.function)


def test_operators_need_no_triton_until_a_gpu_backend_is_called():
    code = ("import sys; sys.modules['triton'] = None\n"  # importing it would fail
            "from rlk.preflight import unserved_operators; unserved_operators('cuda', 'consistency')")
    subprocess.run([sys.executable, "-c", code], check=True)
