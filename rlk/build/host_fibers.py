"""Builds the GPU kernels (hipkernels/gpu) for the host, one fiber per lane: the tests run them without a GPU."""

from __future__ import annotations

from pathlib import Path

from rlk.build import BUILD
from rlk.build.cpu import build_host_object

WAVES = (32, 64)  # lanes of a wave: NVIDIA's and gfx942's


def build_host(wave: int, verbose: bool = False) -> Path:
    """build/host/librlk-wave<wave>-<fingerprint>.so for waves of 32 or 64 lanes; returns its path.

    Raises UsageError when there is no compiler or it fails.
    """
    if wave not in WAVES:
        raise ValueError(f"wave of {wave} lanes, expected one of {WAVES}")
    return build_host_object(BUILD / "host", f"librlk-wave{wave}", "host", [f"-DRLK_WAVE={wave}"],
                             ["-pthread", "-lrt"], verbose)
