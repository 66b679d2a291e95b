"""Builds the kernels: `python -m rlk.build TARGET`, the Makefile's targets and the loaders all come here.

Everything goes under build/ of a checkout (or the user's cache when installed). A built file's name or manifest holds
the fingerprint of the sources and flags it was made from, so that nothing stale is ever loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rlk.errors import UsageError

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent
SOURCES = ROOT / "hipkernels" if (ROOT / "hipkernels").is_dir() else PACKAGE / "hipkernels"
KERNELS = PACKAGE / "kernels" if SOURCES.parent == PACKAGE else ROOT / "triton"  # the Triton sources
BUILD = ROOT / "build" if (ROOT / "Makefile").exists() else Path(
    os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlk"

# -ffp-contract=off and explicit FMAs leave the compilers no freedom in the arithmetic; -fmad=false is nvcc's word.
_HOST = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden",
         "-Wall", "-Wextra", "-Werror"]
FLAGS = {
    "cpu": ["-O3", "-fopenmp", *_HOST],
    "host": ["-O2", "-pthread", "-DRLK_HOST_FIBERS", *_HOST],
    "gfx942": ["-x", "hip", "--offload-arch=gfx942", "-O3", *_HOST],
    "sm_90a": ["-x", "cu", "-arch=sm_90a", "-O3", "-std=c++17", "-fmad=false", "-Werror", "all-warnings",
               "-Xcompiler", "-fPIC,-ffp-contract=off,-fvisibility=hidden,-Wall,-Wextra"],
}
GPU_TARGETS = ("host", "gfx942", "sm_90a")  # built from hipkernels/gpu; "cpu" from hipkernels/cpu


def source_folder(target: str) -> Path:
    """The folder that holds the translation units of `target`, a key of FLAGS."""
    return SOURCES / ("gpu" if target in GPU_TARGETS else "cpu")


def translation_units(target: str) -> list[Path]:
    """The C++ files of `target`, sorted by name. Raises UsageError when there is none."""
    units = sorted(source_folder(target).glob("*.cpp"))
    if not units:
        raise UsageError(f"no kernel sources: expected *.cpp in {source_folder(target)}; is the checkout complete?")
    return units


def source_fingerprint(target: str = "cpu") -> str:
    """SHA-256 over the flags of `target` and the names and bytes of its sources: the shared headers and its folder.

    "gpu" names no object but all that runs on a GPU, HIP C++ and Triton: what a result measured there belongs to.
    """
    if target == "gpu":
        return fingerprint(KERNELS.glob("*.py"), KERNELS, contract_constants(), *map(source_fingerprint, GPU_TARGETS))
    paths = [*SOURCES.glob("*.h"), *(p for p in source_folder(target).rglob("*") if p.suffix in (".h", ".cpp"))]
    return fingerprint(paths, SOURCES, *FLAGS[target])


def contract_constants() -> str:
    """What the Triton kernels take from the contract, as text."""
    from rlk import contract  # here: the contract imports this package

    return f"{contract.GEMM_CHUNK} {contract.ATTENTION_BLOCK} {contract.ATTENTION_CHUNK} {contract.VOCAB_TILES}"


def fingerprint(paths: Iterable[Path], root: Path, *more: str) -> str:
    """SHA-256 over the texts `more` and the names below `root` and the bytes of the files."""
    digest = hashlib.sha256(" ".join(more).encode())
    for path in sorted(paths):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def triton_version() -> str:
    """Version of the installed Triton, whatever name its wheel goes by; "none" without one."""
    for name in ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def find_tool(name: str, *roots: str | None) -> str | None:
    """Path of the program `name`: on PATH, else in bin/ of the first root that has it (None and "" are passed over)."""
    places = [None, *(f"{root}/bin" for root in roots if root)]
    return next(filter(None, (shutil.which(name, path=place) for place in places)), None)


@contextlib.contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Hold `folder` (made if missing) for this process: torchrun's ranks arrive together, one builds, others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_compiler(command: Sequence[str | Path], what: str, verbose: bool = False) -> None:
    """Run a compiler, its messages on stderr. Raises UsageError naming `what` when it fails."""
    words = [str(word) for word in command]
    if verbose:
        print(" ".join(words), flush=True)
    if subprocess.run(words, stdout=sys.stderr).returncode:
        raise UsageError(f"{words[0]} failed on {what}: see its messages above")
