"""The built kernels that a run on one device loads: for the seal and for the contract."""

from __future__ import annotations

from pathlib import Path

from rlk.build.cpu import build_cpu
from rlk.ops import cpu_library, gpu_library


def kernel_objects(device: str) -> list[Path]:
    """The shared objects for "cpu" or "cuda", built if they are missing. Triton's kernels are sealed as sources."""
    return [build_cpu()] if device == "cpu" else [build_cpu(), gpu_library.object_path()]


def kernel_fingerprint(device: str) -> str:
    """SHA-256 of the sources that the loaded objects were built from, as they report it; the GPU's behind the CPU's."""
    own = cpu_library.kernel_fingerprint()
    return own if device == "cpu" else f"{own}+{gpu_library.kernel_fingerprint()}"
