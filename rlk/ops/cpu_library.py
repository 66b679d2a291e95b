"""Loads the C++ kernels and gives their functions to the operators (plain C ABI through ctypes)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from rlk.build.cpu import build_cpu

POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1}  # enum Dtype in hipkernels/abi.h


def _share_openmp_runtime() -> None:
    """Make torch's own OpenMP runtime visible, so that both use one thread pool; else the system's."""
    with open("/proc/self/maps") as maps:
        loaded = [line.split()[-1] for line in maps if "gomp" in line and ".so" in line]
    ctypes.CDLL(loaded[0] if loaded else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


@functools.cache
def library() -> ctypes.CDLL:
    """The shared object for this host, built first if it is missing or stale."""
    _share_openmp_runtime()
    return ctypes.CDLL(str(build_cpu()))


@functools.cache
def kernel_fingerprint() -> str:
    """SHA-256 of the sources the loaded object was built from, as the object itself reports it."""
    function = library().rlk_fingerprint
    function.restype = ctypes.c_char_p
    return function().decode()


def function(name: str, *argtypes) -> Callable:
    """The C function `name`, loaded at its first call. It returns 0, or raises RuntimeError with its code."""
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
    """Address of a contiguous tensor's first element (None for None)."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous tensor, got strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    return tensor.data_ptr()
