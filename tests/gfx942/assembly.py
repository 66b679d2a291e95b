"""Hand-written gfx942 code for the emulator's tests: single instructions on a wave, and whole kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np

from rlk.build.code_object import llvm_tool
from rlk.errors import UsageError
from tests.gfx942.emulator.instruction import parse
from tests.gfx942.emulator.memory import LocalMemory, Memory
from tests.gfx942.emulator.table import decode, decoder_of, known_mnemonics
from tests.gfx942.emulator.wave import Wave

TARGET = ("-triple=amdgcn-amd-amdhsa", "-mcpu=gfx942")
ODD_LANES = 0x8000_F00F_1234_5679  # an exec mask that leaves out lanes everywhere


def make_wave(exec_mask: int | None = None, memory: int = 1 << 16, lds: int = 1 << 14) -> Wave:
    """A wave whose vector registers hold random bits."""
    wave = Wave(Memory(memory), LocalMemory(lds))
    wave.vector[:] = np.random.default_rng(7).integers(0, 1 << 32, wave.vector.shape, np.uint32)
    if exec_mask is not None:
        wave.exec = exec_mask
    return wave


def run(wave: Wave, *lines: str) -> None:
    """Run instructions, written as the disassembler prints them."""
    with np.errstate(all="ignore"):
        for line in lines:
            decode(0, line)(wave)


def mnemonics_in(lines) -> set[str]:
    return {parse(0, line).mnemonic for line in lines}


def mnemonics_of(file: str) -> set[str]:
    """The mnemonics that one of the emulator's files decodes."""
    return {name for name in known_mnemonics() if decoder_of(name).__module__.rsplit(".", 1)[1] == file}


def printed(lines) -> list[str]:
    """The lines as LLVM's assembler reads and prints them again, comments and encodings left out."""
    done = subprocess.run([llvm_tool("mc"), *TARGET], input="\n".join(lines), capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return [" ".join(line.split("//")[0].split()) for line in done.stdout.splitlines() if line.strip()
            and not line.strip().startswith(".")]


def assemble(text: str, folder: Path, name: str = "kernels") -> Path:
    """A code object from assembly text."""
    source, made = folder / f"{name}.s", folder / f"{name}.o"
    source.write_text(text)
    subprocess.run([llvm_tool("mc"), *TARGET, "--filetype=obj", source, "-o", made], check=True)
    linker = shutil.which("ld.lld-19") or shutil.which("ld.lld") or shutil.which("ld.lld", path="/opt/rocm/llvm/bin")
    if not linker:
        raise UsageError("ld.lld is not on PATH: install it with `apt-get install lld-19`")
    subprocess.run([linker, "-shared", made, "-o", made.with_suffix(".hsaco")], check=True)
    return made.with_suffix(".hsaco")


def kernel(name: str, body: str, pointers: int, block: int = 256, lds: int = 0, ids: str = "x", lanes: int = 0,
           dispatch: bool = False, preload: int = 0) -> tuple[str, str]:
    """(Assembly with the descriptor, metadata) of one kernel that takes `pointers` arguments of eight bytes each.

    The kernel finds the kernarg address in s[0:1] (behind the dispatch pointer, if it wants that), then `preload` words
    of the arguments, then the workgroup ids `ids`; v0 holds the lane, with y and z packed in when `lanes` is 1 or 2.
    """
    descriptor = {
        "group_segment_fixed_size": lds, "kernarg_size": 8 * pointers, "user_sgpr_count": 2 + 2 * dispatch + preload,
        "user_sgpr_kernarg_segment_ptr": 1, "user_sgpr_dispatch_ptr": int(dispatch),
        "user_sgpr_kernarg_preload_length": preload, "system_vgpr_workitem_id": lanes, "next_free_vgpr": 64,
        "next_free_sgpr": 64, "accum_offset": 64,
        **{f"system_sgpr_workgroup_id_{axis}": int(axis in ids) for axis in "xyz"}}
    arguments = "\n".join(f"      - {{ .offset: {8 * k}, .size: 8, .value_kind: by_value }}" for k in range(pointers))
    return f"""
    .text
    .globl {name}
    .p2align 8
    .type {name},@function
{name}:
{body}
    s_endpgm
.Lend_of_{name}:
    .size {name}, .Lend_of_{name}-{name}
    .section .rodata,"a",@progbits
    .p2align 6
    .amdhsa_kernel {name}
      .amdhsa_float_denorm_mode_32 3
{chr(10).join(f"      .amdhsa_{key} {value}" for key, value in descriptor.items())}
    .end_amdhsa_kernel
""", f"""  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: {8 * pointers}
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .wavefront_size: 64
    .sgpr_count: 64
    .vgpr_count: 64
    .agpr_count: 0
    .sgpr_spill_count: 0
    .vgpr_spill_count: 0
    .max_flat_workgroup_size: {block}
    .args:
{arguments}
"""


def module(*kernels: tuple[str, str]) -> str:
    """The assembly file of several kernels."""
    return '.amdgcn_target "amdgcn-amd-amdhsa--gfx942"\n.amdhsa_code_object_version 5\n' + "".join(
        code for code, _ in kernels) + ".amdgpu_metadata\n---\namdhsa.version: [1, 2]\namdhsa.kernels:\n" + "".join(
        metadata for _, metadata in kernels) + "...\n.end_amdgpu_metadata\n"
