"""What a Triton kernel's dispatch can choose, as data: the launchers, the ahead-of-time build and the gates read it.

On a GPU host Triton compiles what a launcher asks for by itself, from the same sources, constants and options; the
ahead-of-time objects are for the gates and the emulator. tests/gpu holds that no other form of a kernel ever runs.

Importing this needs no GPU; it does need the triton package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import triton

from rlk.contract import architecture_of

ARCHITECTURES = ("gfx942", "sm_90")


@dataclass(frozen=True)
class Variant:
    """One kernel in one configuration."""

    kernel: str  # names its section of the gates
    name: str  # the configuration, unique within the kernel
    function: triton.JITFunction
    signature: dict[str, str]  # run-time argument -> Triton type ("*bf16", "i32", "fp32"), in the kernel's order
    constants: dict[str, Any]  # tl.constexpr arguments
    options: dict[str, Any]  # num_warps, num_stages, and what the compiler of one architecture understands
    divisible: tuple[str, ...] = field(default=())  # arguments that are multiples of 16, pointers among them
    small: tuple[str, ...] = field(default=())  # pointers to less than 2 GiB: gfx942 reads them by buffer loads

    @property
    def label(self) -> str:
        return f"{self.kernel}/{self.name}"


def architecture() -> str:
    """The architecture of this process's GPU: "gfx942" under ROCm, else "sm_90"."""
    return architecture_of("cuda")
