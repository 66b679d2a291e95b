"""What the row kernels share: how an elementwise one cuts its rows into programs, and the options of every launch."""

from __future__ import annotations

BLOCKS = {  # columns of a program, warps: eight elements per lane, 128-bit loads
    "gfx942": {"block_1024": (1024, 2)},
    "sm_90": {"block_1024": (1024, 4)},
}


def choose_block(arch: str) -> tuple[int, int]:
    """(columns of a program, warps) of the elementwise row kernels on `arch`."""
    return BLOCKS[arch]["block_1024"]


def options(num_warps: int) -> dict:
    """The compiler's options of a row kernel; no product and sum are contracted to one rounding."""
    return {"num_warps": num_warps, "enable_fp_fusion": False}
