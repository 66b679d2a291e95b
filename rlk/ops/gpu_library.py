"""Loads the HIP C++ kernels of this process's GPU and gives their launchers to the operators (C ABI through ctypes).

A launcher queues its kernel on the stream it is given (`stream()`) and returns an error code (hipkernels/abi.h).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from rlk.build import source_fingerprint
from rlk.build.cuda import build_cuda
from rlk.build.hip import build_hip, library_path
from rlk.errors import UsageError

POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
HIP_RUNTIME = "libamdhip64.so"


def target() -> str:
    """What is built for this torch: "gfx942" under ROCm, "sm_90a" under CUDA. Raises UsageError for a CPU torch."""
    if torch.version.hip:
        return "gfx942"
    if torch.version.cuda:
        return "sm_90a"
    raise UsageError(f"torch {torch.__version__} has neither ROCm nor CUDA: install a GPU host's torch, or use the CPU "
                     "profile")


def object_path() -> Path:
    """The shared object of this torch's GPU, built first if it is missing or stale. A built one needs no compiler."""
    if target() == "sm_90a":
        return build_cuda()
    built = library_path(source_fingerprint("gfx942"))
    return built if built.exists() else build_hip().library


def share_hip_runtime() -> None:
    """Make the HIP runtime that torch loaded visible to the object, else the system's; a second one would not know
    torch's streams and memory. Raises UsageError when there is none.
    """
    with open("/proc/self/maps") as maps:
        loaded = [line.split()[-1] for line in maps if f"/{HIP_RUNTIME}" in line]
    try:
        ctypes.CDLL(loaded[0] if loaded else HIP_RUNTIME, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise UsageError(f"no HIP runtime ({error}): install ROCm and a torch built for it, see `rlk doctor`") from None


def load(path: Path, built_for: str) -> ctypes.CDLL:
    """The object at `path`. Raises UsageError when it does not load, or is not of these sources and flags."""
    if built_for == "gfx942":
        share_hip_runtime()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise UsageError(f"{path} does not load: {error}; remove it and build it again on this host") from None
    found, expected = _fingerprint(loaded), source_fingerprint(built_for)
    if found != expected:
        raise UsageError(f"{path} was built from other sources: its fingerprint is {found[:16]}, expected "
                         f"{expected[:16]}; remove it and build it again")
    return loaded


@functools.cache
def library() -> ctypes.CDLL:
    """The shared object for this process's GPU."""
    return load(object_path(), target())


@functools.cache
def kernel_fingerprint() -> str:
    """SHA-256 of the sources the loaded object was built from, as the object itself reports it."""
    return _fingerprint(library())


def _fingerprint(loaded: ctypes.CDLL) -> str:
    if not hasattr(loaded, "rlk_gpu_fingerprint"):
        return "none"
    loaded.rlk_gpu_fingerprint.restype = ctypes.c_char_p
    return loaded.rlk_gpu_fingerprint().decode()


def function(name: str, *argtypes) -> Callable:
    """The launcher `name`, loaded at its first call. It returns 0, or raises RuntimeError with its code."""
    loaded = None

    def call(*args):
        nonlocal loaded
        if loaded is None:
            loaded = getattr(library(), name)
            loaded.argtypes, loaded.restype = argtypes, ctypes.c_int
        if code := loaded(*args):
            raise RuntimeError(f"{name} failed with code {code}: see enum Error in hipkernels/abi.h")

    return call


def ptr(tensor: torch.Tensor | None) -> int | None:
    """Address of a contiguous GPU tensor's first element (None for None)."""
    if tensor is None:
        return None
    if not tensor.is_cuda or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous GPU tensor, got one on {tensor.device} with strides "
                         f"{tensor.stride()} for shape {tuple(tensor.shape)}")
    return tensor.data_ptr()


def stream() -> int:
    """Handle of torch's current stream: a hipStream_t or cudaStream_t."""
    return torch.cuda.current_stream().cuda_stream
