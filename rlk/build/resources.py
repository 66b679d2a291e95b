"""What a kernel takes of an MI300X, read from its code object: occupancy, matrix instructions, load widths.

The gates check it and the report prints it.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlk.build.code_object import Kernel, llvm_tool, read_code_object
from rlk.errors import UsageError

# LLVM's AMDGPUBaseInfo.cpp and GCNSubtarget for gfx90a and gfx942, and AMD's "CDNA3 ISA" guide, section 3.6. The VGPRs
# of a lane and its AGPRs come from one file.
SIMDS = 4  # per compute unit
WAVE = 64  # lanes
MAX_WAVES = 8  # per SIMD
VGPRS = 512  # per lane and SIMD
MAX_WORKGROUPS = 16  # per compute unit, of those with more than one wave
LDS_BYTES = 64 << 10  # per compute unit
SGPRS_FOR_ALL_WAVES = 100  # a wave with more leaves room for one wave fewer

LOAD_BITS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "ushort": 16, "sshort": 16, "short_d16": 16,
             "ubyte": 8, "sbyte": 8, "ubyte_d16": 8, "sbyte_d16": 8}


@dataclass(frozen=True)
class Resources:
    """One kernel in one configuration, as it will run."""

    kernel: str
    configuration: str
    code: Kernel
    lds: int  # bytes, with what a launch adds
    workgroup: int  # lanes

    @property
    def occupancy(self) -> float:
        return occupancy(self.code.allocated_vgprs, self.code.sgprs, self.lds, self.workgroup)

    @property
    def matrix(self) -> Counter[str]:
        """Matrix instructions and how often each stands in the code."""
        return Counter(word for word in self.mnemonics if word.startswith(("v_mfma_", "v_smfmac_")))

    @property
    def loads(self) -> Counter[int]:
        """Bits per lane of the vector loads from memory, and how often each stands in the code."""
        found = (re.match(r"(?:global|buffer|flat)_load_(?:lds_)?(\w+)", word) for word in self.mnemonics)
        return Counter(LOAD_BITS[match[1].removesuffix("_hi")] for match in found if match)

    @property
    def mnemonics(self) -> list[str]:
        return [text.split()[0] for _, text in self.code.instructions]


def occupancy(allocated_vgprs: int, sgprs: int, lds: int, workgroup: int) -> float:
    """Waves that one SIMD holds: VGPRs with AGPRs per lane, `lds` bytes and `workgroup` lanes per workgroup.

    It is the smallest of what registers, LDS and the workgroup slots allow. Whole workgroups are placed, spread over
    the four SIMDs of a compute unit, so that it can be a fraction: 0.5 is two waves on four SIMDs.
    """
    by_registers = min(MAX_WAVES, VGPRS // allocated_vgprs)
    if sgprs > SGPRS_FOR_ALL_WAVES:
        by_registers = min(by_registers, MAX_WAVES - 1)
    waves = -(-workgroup // WAVE)
    workgroups = SIMDS * by_registers // waves
    if waves > 1:
        workgroups = min(workgroups, MAX_WORKGROUPS)
    if lds:
        workgroups = min(workgroups, LDS_BYTES // lds)
    return workgroups * waves / SIMDS


def hip_resources(code_objects: Iterable[Path]) -> list[Resources]:
    """What the kernels of these code objects take. A template's arguments are its configuration: "float, 4"."""
    kernels = [code for path in code_objects for code in read_code_object(path).values()]
    names = demangle([code.name for code in kernels])
    return [Resources(*kernel_and_configuration(name), code, code.lds, code.max_workgroup)
            for name, code in zip(names, kernels, strict=True)]


def demangle(names: list[str]) -> list[str]:
    """C++ names as they were written, with their types."""
    done = subprocess.run([llvm_tool("cxxfilt")], input="\n".join(names), capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"llvm-cxxfilt failed: {done.stderr.strip()}")
    return done.stdout.splitlines()


def kernel_and_configuration(name: str) -> tuple[str, str]:
    """"void rlk::scale<float, 4>(float*)" -> ("scale", "float, 4")."""
    found = re.match(r"(?:void )?(?:[\w ()]+::)*(\w+)(?:<(.*?)>)?(?:\(|$)", name)
    if not found:
        raise ValueError(f"expected a kernel's name, got {name!r}")
    return found[1], found[2] or ""
