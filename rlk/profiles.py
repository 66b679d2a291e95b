"""Which profile fits this machine when none is named."""

from __future__ import annotations

from pathlib import Path

GPU_DEVICE_FILES = "/dev/kfd", "/dev/nvidiactl"


def default_profile() -> str:
    """A GPU profile where there is a GPU that torch can use; cpu-tiny anywhere else."""
    if not any(Path(name).exists() for name in GPU_DEVICE_FILES):
        return "cpu-tiny"  # without waiting for torch
    import torch

    if not torch.cuda.is_available():
        return "cpu-tiny"
    return "mi300x-qwen3-8b" if torch.version.hip else "h200-qwen3-8b"
