"""Reads a gfx942 code object (ELF): each kernel's metadata, descriptor and disassembly, through LLVM's own tools.

Sources: the AMDGPU back end's user guide, sections "Code Object V5 Metadata" and "Kernel Descriptor".
"""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rlk.errors import UsageError

VGPR_GRANULE = 8  # registers of a lane are allocated by so many
LLVM_VERSIONS = ("-19", "-20", "-21", "-18", "")  # suffixes of the tools' names, as Debian gives them


@dataclass(frozen=True)
class Argument:
    """One kernel argument in the kernarg segment."""

    offset: int  # bytes
    size: int  # bytes
    kind: str  # "by_value", "global_buffer", "hidden_block_count_x", ...


@dataclass(frozen=True)
class Kernel:
    """What one kernel of a code object needs and does."""

    name: str
    arguments: tuple[Argument, ...]
    kernarg_size: int  # bytes
    lds: int  # bytes, static; Triton's kernels have theirs in metadata.shared
    scratch: int  # bytes per lane
    vgprs: int  # VGPRs and AGPRs together: gfx942 has one file for both
    allocated_vgprs: int  # what a wave gets, by the descriptor: more than vgprs where waves_per_eu asks for fewer waves
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    max_workgroup: int  # lanes
    wave_size: int
    user_sgprs: int  # SGPRs that the dispatch fills, the workgroup ids follow
    preload_length: int  # how many of them hold the first words of the kernarg segment
    properties: int  # kernel_code_properties of the descriptor: which pointers the user SGPRs hold
    workgroup_ids: tuple[bool, bool, bool]  # which of x, y, z follow the user SGPRs
    packed_lanes: int  # 0: v0 is x; 1 and 2: y and z too. gfx942 packs them in v0, 10 bits each
    float_mode: int  # 8 bits: rounding of FP32 and FP64/FP16, then which denormals are kept; 0xF0 is what IEEE 754 says
    ieee_clamped: bool  # quiet NaNs as IEEE 754 says, and a NaN clamps to 0
    instructions: tuple[tuple[int, str], ...]  # (address, text without encoding), ascending


@functools.cache
def llvm_tool(name: str) -> str:
    """Path of llvm-NAME. Raises UsageError when there is none."""
    for suffix in LLVM_VERSIONS:
        if found := shutil.which(f"llvm-{name}{suffix}"):
            return found
    if found := shutil.which(f"llvm-{name}", path="/opt/rocm/llvm/bin"):
        return found
    raise UsageError(f"llvm-{name} is not on PATH: install it with `apt-get install llvm-19`, or put ROCm's llvm/bin "
                     "on PATH")


def read_code_object(path: Path | str) -> dict[str, Kernel]:
    """Every kernel of the code object at `path`, by name. Raises UsageError when it is not one."""
    notes = _run("readelf", "--notes", str(path))
    text = _disassemble(path)
    descriptors = _descriptors(path)
    kernels = {}
    blocks = re.split(r"^  - (?=\.)", notes, flags=re.M)[1:]
    for block in blocks:
        fields = dict(re.findall(r"^    \.(\w+):[ \t]+'?([^'\n]+?)'?$", "    " + block, re.M))
        if "name" not in fields:
            continue
        name = fields["name"]
        descriptor = descriptors[name]
        rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIHH", descriptor, 48)
        kernels[name] = Kernel(
            name=name, arguments=_arguments(block), kernarg_size=int(fields["kernarg_segment_size"]),
            lds=int(fields["group_segment_fixed_size"]), scratch=int(fields["private_segment_fixed_size"]),
            vgprs=int(fields["vgpr_count"]), allocated_vgprs=((rsrc1 & 63) + 1) * VGPR_GRANULE,
            agprs=int(fields.get("agpr_count", 0)), sgprs=int(fields["sgpr_count"]),
            vgpr_spills=int(fields["vgpr_spill_count"]), sgpr_spills=int(fields["sgpr_spill_count"]),
            max_workgroup=int(fields["max_flat_workgroup_size"]), wave_size=int(fields["wavefront_size"]),
            user_sgprs=rsrc2 >> 1 & 31, preload_length=preload & 127, properties=properties,
            workgroup_ids=tuple(bool(rsrc2 >> bit & 1) for bit in (7, 8, 9)), packed_lanes=rsrc2 >> 11 & 3,
            float_mode=rsrc1 >> 12 & 0xFF, ieee_clamped=rsrc1 >> 21 & rsrc1 >> 23 & 1 == 1,
            instructions=tuple(text[name]))
    if not kernels:
        raise UsageError(f"{path} holds no AMDGPU kernel: expected a gfx942 code object; build it with `make hip` or "
                         "`make triton-aot`")
    return kernels


def _arguments(block: str) -> tuple[Argument, ...]:
    listed = re.search(r"\.args:\n(.*?)(?=^    \.)", block, re.M | re.S)
    entries = re.split(r"^      - ", listed[1], flags=re.M)[1:] if listed else []
    return tuple(Argument(*(int(re.search(rf"\.{key}:\s+(\d+)", entry)[1]) for key in ("offset", "size")),
                          re.search(r"\.value_kind:\s+(\w+)", entry)[1]) for entry in entries)


def _disassemble(path) -> dict[str, list[tuple[int, str]]]:
    functions: dict[str, list[tuple[int, str]]] = {}
    for line in _run("objdump", "-d", "--mcpu=gfx942", str(path)).splitlines():
        if found := re.match(r"[0-9a-f]+ <(.+)>:", line):
            current = functions.setdefault(found[1], [])
        elif found := re.match(r"\t(.*?)\s*// ([0-9A-F]+):", line):
            current.append((int(found[2], 16), found[1]))
    return functions


def _descriptors(path) -> dict[str, bytes]:
    """The 64 bytes at each symbol NAME.kd, which lies in .rodata."""
    raw = Path(path).read_bytes()
    sections = _run("readelf", "-S", "--wide", str(path))
    found = re.search(r"\.rodata\s+PROGBITS\s+([0-9a-f]+)\s+([0-9a-f]+)", sections)
    if not found:
        raise UsageError(f"{path} has no .rodata section: expected a gfx942 code object")
    address, offset = (int(x, 16) for x in found.groups())
    symbols = re.findall(r"([0-9a-f]{16})\s+64 OBJECT\s+\S+\s+\S+\s+\S+\s+(\S+)\.kd$", _run(
        "readelf", "-s", "--wide", str(path)), re.M)
    return {name: raw[offset + int(at, 16) - address:][:64] for at, name in symbols}


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([llvm_tool(tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"llvm-{tool} {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout
