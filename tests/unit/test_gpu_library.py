"""What the loader of the GPU kernels refuses; tests/gfx942/test_loader.py has what it does."""

import ctypes
import subprocess

import pytest
import torch

from rlk.build import source_fingerprint
from rlk.build.cpu import host_compiler
from rlk.errors import UsageError
from rlk.ops import gpu_library


@pytest.fixture
def stale(tmp_path):
    """An object that says it was built from other sources."""
    path, source = tmp_path / "stale.so", tmp_path / "stale.c"
    source.write_text('const char* rlk_gpu_fingerprint(void) { return "0123456789abcdef0123"; }\n')
    subprocess.run([host_compiler(), "-x", "c", "-shared", "-fPIC", source, "-o", path], check=True)
    return path


def test_an_object_of_other_sources_is_refused_with_both_fingerprints(stale):
    expected = source_fingerprint("sm_90a")[:16]
    with pytest.raises(UsageError, match=f"its fingerprint is 0123456789abcdef, expected {expected}"):
        gpu_library.load(stale, "sm_90a")


def test_an_object_that_does_not_load_is_named(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not an object")
    with pytest.raises(UsageError, match=r"broken.so does not load: .*build it again on this host"):
        gpu_library.load(broken, "sm_90a")


def test_a_cpu_torch_has_no_gpu_kernels(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError, match="neither ROCm nor CUDA"):
        gpu_library.target()


@pytest.mark.parametrize("hip, cuda, target", [("7.1.2", None, "gfx942"), (None, "13.0", "sm_90a")])
def test_the_target_is_torch_s_own(monkeypatch, hip, cuda, target):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert gpu_library.target() == target


def test_without_a_hip_runtime_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gpu_library, "HIP_RUNTIME", "librlk-no-such-runtime.so")
    with pytest.raises(UsageError, match="no HIP runtime .*install ROCm and a torch built for it"):
        gpu_library.share_hip_runtime()


def test_a_launcher_that_fails_raises_with_its_name_and_code(monkeypatch):
    class Library:
        refuse = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 6)

    monkeypatch.setattr(gpu_library, "library", Library)
    with pytest.raises(RuntimeError, match="refuse failed with code 6"):
        gpu_library.function("refuse")()


def test_an_address_is_of_a_contiguous_gpu_tensor():
    with pytest.raises(ValueError, match="contiguous GPU tensor, got one on cpu"):
        gpu_library.ptr(torch.zeros(2))
    assert gpu_library.ptr(None) is None
