"""Which profile fits this machine when none is named."""

from __future__ import annotations

from pathlib import Path

GPU_DEVICE_FILES = "/dev/kfd", "/dev/nvidiactl"


def default_profile(own_model: bool = False) -> str:
    """A GPU profile where there is a GPU that torch can use; else the demo's, or none ("") for a model of one's own."""
    without_gpu = "" if own_model else "cpu-tiny"
    if not any(Path(name).exists() for name in GPU_DEVICE_FILES):
        return without_gpu  # without waiting for torch
    import torch

    if not torch.cuda.is_available():
        return without_gpu
    return "mi300x-qwen3-8b" if torch.version.hip else "h200-qwen3-8b"
