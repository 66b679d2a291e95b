"""Builds the GPU kernels (hipkernels/gpu) for sm_90a with nvcc: one shared object to load."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlk.build import BUILD, FLAGS, SOURCES, build_lock, find_tool, run_compiler, source_fingerprint, translation_units
from rlk.build.cpu import remove_others
from rlk.errors import UsageError

FOLDER = BUILD / "sm_90a"


def find_nvcc() -> str | None:
    """Path of nvcc: on PATH, under $CUDA_HOME or under /usr/local/cuda."""
    return find_tool("nvcc", os.environ.get("CUDA_HOME"), "/usr/local/cuda")


def build_cuda(verbose: bool = False) -> Path:
    """Compile every unit for sm_90a unless an object of these very sources exists; returns its path.

    Raises UsageError when there is no nvcc or it fails (its messages go to stderr).
    """
    digest = source_fingerprint("sm_90a")
    library = FOLDER / f"librlk-sm_90a-{digest[:16]}.so"
    if library.exists():
        return library
    nvcc = find_nvcc()
    if not nvcc:
        raise UsageError("no nvcc: expected the CUDA toolkit's compiler on PATH, in $CUDA_HOME/bin or "
                         "/usr/local/cuda/bin; install the toolkit of the CUDA version that torch names")
    with build_lock(FOLDER):
        if library.exists():
            return library
        work = FOLDER / "tmp"
        work.mkdir(exist_ok=True)
        command = [nvcc, *FLAGS["sm_90a"], f'-DRLK_FINGERPRINT="{digest}"', "-I", str(SOURCES)]

        def compile_one(unit: Path) -> Path:
            run_compiler([*command, "-c", unit, "-o", work / f"{unit.stem}.o"], str(unit), verbose)
            return work / f"{unit.stem}.o"

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, translation_units("sm_90a")))
        run_compiler([nvcc, "-arch=sm_90a", "-shared", *objects, "-o", work / library.name], f"linking {library}",
                     verbose)
        (work / library.name).replace(library)
        shutil.rmtree(work)
        remove_others(library, "librlk-sm_90a-*.so")
    return library
