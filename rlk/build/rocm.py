"""Finds a compiler for gfx942: ROCm's hipcc, else clang 19 with the HIP headers and bitcode of the Triton wheel."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rlk.build import BUILD, build_lock, find_tool, triton_version
from rlk.errors import UsageError

CLANG = "clang++-19"  # reads the bitcode of Triton 3.6; Triton 3.9's needs clang 22
PACKAGES = "clang-19 lld-19 llvm-19 clang-tools-19"  # of Debian and Ubuntu
NO_COMPILER = (f"no compiler for gfx942: expected ROCm's hipcc (on PATH, in $ROCM_PATH/bin or /opt/rocm/bin) or "
               f"{CLANG} with its linker; install it with `apt-get install {PACKAGES}`")


@dataclass(frozen=True)
class Toolchain:
    """A compiler that makes gfx942 code objects."""

    command: tuple[str, ...]  # to which the flags are added
    name: str  # with its version, in one line


@functools.cache
def find_toolchain() -> Toolchain:
    """ROCm's hipcc where it is installed, else clang 19. Raises UsageError naming the packages when neither is."""
    if hipcc := find_hipcc():
        return Toolchain((hipcc,), f"hipcc, {_first_version_line(hipcc)}")
    clang = shutil.which(CLANG)
    if not clang or not shutil.which("ld.lld-19"):
        raise UsageError(NO_COMPILER)
    version = _first_version_line(clang)
    triton = triton_backend()
    # The shared object is linked without HIP's runtime, so that some of clang's own flags have nothing to do.
    return Toolchain((clang, f"--rocm-path={rocm_tree(triton, clang, version)}", "-Wno-unused-command-line-argument"),
                     f"{version}, HIP headers of Triton {triton_version()}")


def find_hipcc() -> str | None:
    """Path of hipcc: on PATH, under $ROCM_PATH or under /opt/rocm."""
    return find_tool("hipcc", os.environ.get("ROCM_PATH"), "/opt/rocm")


def triton_backend() -> Path:
    """The AMD backend's folder in the Triton wheel. Raises UsageError when Triton is not installed."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:  # no origin: a folder named triton and not the package
        raise UsageError("triton is not installed, and its wheel has the HIP headers: pip install -r requirements.txt")
    return Path(spec.origin).parent / "backends" / "amd"


def rocm_tree(triton: Path, clang: str, version: str) -> Path:
    """A folder for clang's --rocm-path, under build/rocm/; made at the first call for this Triton and this clang.

    The wheel has HIP's headers and the two large bitcode libraries, ocml and ockl. The small ones, which hold one
    constant each for what a flag chose, are compiled here.
    """
    key = hashlib.sha256(f"{triton} {triton_version()} {clang} {version}".encode()).hexdigest()[:12]
    tree = BUILD / "rocm" / key
    if tree.exists():
        return tree
    with build_lock(BUILD / "rocm"):
        if not tree.exists():
            partial = tree.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _fill_tree(partial, triton, clang)
            partial.replace(tree)
    return tree


def _fill_tree(tree: Path, triton: Path, clang: str) -> None:
    bitcode = tree / "amdgcn" / "bitcode"
    for folder in (tree / "include", tree / "bin", tree / "share" / "hip", bitcode):
        folder.mkdir(parents=True)
    (tree / "include" / "hip").symlink_to(triton / "include" / "hip")
    version = "".join(f"HIP_VERSION_{part}={number}\n" for part, number in _hip_version(triton).items())
    for name in ("bin/.hipVersion", "share/hip/version"):
        (tree / name).write_text(version)
    for name in ("ocml", "ockl"):
        shutil.copy(triton / "lib" / f"{name}.bc", bitcode)
    for name in ("opencl", "hip"):  # clang wants them to exist; nothing of ours calls into them
        _compile_bitcode(clang, "", bitcode / f"{name}.bc")
    constants = {"isa_version_942": ("int", "ISA_version", 9402)}
    constants |= {f"abi_version_{abi}": ("int", "ABI_version", abi) for abi in (400, 500, 600)}
    for value, state in ((1, "on"), (0, "off")):
        for file, symbol in (("correctly_rounded_sqrt", "correctly_rounded_sqrt32"), ("daz_opt", "daz_opt"),
                             ("finite_only", "finite_only_opt"), ("unsafe_math", "unsafe_math_opt"),
                             ("wavefrontsize64", "wavefrontsize64")):
            constants[f"{file}_{state}"] = ("char", symbol, value)
    for file, (type_name, symbol, value) in constants.items():
        source = (f'__attribute__((weak, visibility("protected"))) const __attribute__((address_space(4))) '
                  f"{type_name} __oclc_{symbol} = {value};")
        _compile_bitcode(clang, source, bitcode / f"oclc_{file}.bc")


def _hip_version(triton: Path) -> dict[str, str]:
    """Major, minor and patch number from the headers."""
    header = (triton / "include" / "hip" / "hip_version.h").read_text()
    words = [line.split() for line in header.splitlines() if line.startswith("#define HIP_VERSION_")]
    numbers = {word[1].removeprefix("HIP_VERSION_"): word[2] for word in words if len(word) == 3}
    return {part: numbers[part] for part in ("MAJOR", "MINOR", "PATCH")}


def _compile_bitcode(clang: str, source: str, output: Path) -> None:
    command = [clang, "-x", "c", "--target=amdgcn-amd-amdhsa", "-nogpulib", "-O1", "-c", "-emit-llvm",
               "-Xclang", "-mcode-object-version=none", "-", "-o", str(output)]
    if subprocess.run(command, input=source, text=True).returncode:
        raise UsageError(f"{clang} failed on {output.name}: see its messages above")


def _first_version_line(compiler: str) -> str:
    """What the compiler says of its version: the line that holds the word, else the first."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{compiler} --version failed: {done.stderr.strip() or 'no message'}; reinstall it")
    lines = done.stdout.splitlines() or ["unknown version"]
    return next((line for line in lines if "clang version" in line), lines[0]).strip()
