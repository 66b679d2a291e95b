"""`make hip-report`: what each kernel takes of an MI300X, as a table on the console and as docs/gfx942.md."""

from __future__ import annotations

from pathlib import Path

from rlk.build import ROOT, triton_version
from rlk.build.hip import build_hip
from rlk.build.resources import Resources, hip_resources
from rlk.build.rocm import find_toolchain
from rlk.build.triton_build import triton_resources

PAGE = ROOT / "docs" / "gfx942.md"
COLUMNS = ("configuration", "lanes", "VGPR", "AGPR", "allocated", "SGPR", "LDS", "spills", "scratch", "waves/SIMD",
           "matrix instructions", "loads")
COMPILERS = "Compilers: "  # begins the line that says whose code the figures describe

TEXT = """\
# Kernels on gfx942

Written by `make hip-report`; a test compares it with the code that the same compilers make now.

{compilers}

What each kernel takes of an MI300X, read from the code objects under build/gfx942/ that `make hip` and
`make triton-aot` build without a GPU. The same commands check the gates beside the kernels (triton/gates/*.toml,
hipkernels/gpu/gates.toml).

- **lanes**: of a workgroup; for a HIP kernel the most that it may be launched with.
- **VGPR**: registers of a lane, the AGPRs among them (**AGPR**): gfx942 has one file of 512 for both.
  **allocated**: what a wave gets of it, a multiple of 8; more where a configuration asks for few waves (waves_per_eu).
- **LDS**: bytes of a workgroup, with what the launch adds.
- **spills**: registers of either kind that did not fit; **scratch**: bytes of memory per lane. The gates hold both
  at 0.
- **waves/SIMD**: what registers, LDS (64 KiB per compute unit) and whole workgroups allow, at most 8. Below 1, some
  SIMDs of a compute unit have no wave.
- **matrix instructions**, **loads**: how often each stands in the code (not how often it runs). A load's width is in
  bits per lane; 128 is the widest.

## On the hardware

1. `rlk doctor` says whether the driver, torch and the built objects fit together.
2. `rocprofv3 --kernel-trace --output-format csv -- python SCRIPT` lists, for each dispatch, `VGPR_Count`,
   `Accum_VGPR_Count`, `SGPR_Count`, `LDS_Block_Size` and `Scratch_Size`. VGPR_Count + Accum_VGPR_Count is
   **allocated**, LDS_Block_Size our LDS rounded up to a multiple of 512, and Scratch_Size must be 0. Triton
   compiles for itself at the first launch: another Triton than the one named above gives other figures, and then
   `make hip-report` there writes the table to compare with.
3. Occupancy: `rocprofv3 --pmc MeanOccupancyPerCU` divided by 4 is at most waves/SIMD; far below it, the grid is too
   small for the 304 compute units, and not the kernel too large.
4. `--pmc SQ_INSTS_VALU_MFMA_MOPS_BF16` counts the matrix work done, in units of 512 operations: 2 M N K / 512 for a
   GEMM whose sizes are whole tiles.

## Triton kernels

{triton}

## HIP kernels

{hip}
"""


def write_report(page: Path = PAGE) -> str:
    """Build what is missing, write the page, return the tables. Raises UsageError when there is no compiler."""
    tables = {"triton": markdown(triton_resources()), "hip": markdown(hip_resources(build_hip().code_objects))}
    page.write_text(TEXT.format(compilers=compilers(), **tables))
    return f"{compilers()}\n\n{tables['triton']}\n\n{tables['hip']}\n\nwritten to {page}"


def compilers() -> str:
    """The line that names the compilers in use."""
    return f"{COMPILERS}{find_toolchain().name} (HIP); Triton {triton_version()}."


def markdown(kernels: list[Resources]) -> str:
    """A table per kernel, one row per configuration, columns padded to one width."""
    parts = []
    for kernel in dict.fromkeys(each.kernel for each in kernels):
        rows = [COLUMNS, *(row(each) for each in kernels if each.kernel == kernel)]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
                 for cells in rows]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        parts.append(f"### {kernel}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def row(kernel: Resources) -> tuple[str, ...]:
    """The cells of COLUMNS."""
    code = kernel.code
    matrix = ", ".join(f"{count} x {name}" for name, count in sorted(kernel.matrix.items()))
    loads = ", ".join(f"{count} x {bits}" for bits, count in sorted(kernel.loads.items(), reverse=True))
    numbers = (kernel.workgroup, code.vgprs, code.agprs, code.allocated_vgprs, code.sgprs, kernel.lds,
               code.vgpr_spills + code.sgpr_spills, code.scratch)
    return (kernel.configuration or "-", *map(str, numbers), f"{kernel.occupancy:g}", matrix or "-", loads or "-")
