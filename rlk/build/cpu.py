"""Builds the CPU kernels (hipkernels/cpu) with the host compiler.

One shared object per instruction set, named by it. All give the same bits: -ffp-contract=off and explicit FMAs leave
the compiler no freedom in the arithmetic.
"""

from __future__ import annotations

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlk.build import BUILD, FLAGS, SOURCES, build_lock, run_compiler, source_fingerprint, translation_units
from rlk.errors import UsageError


def host_isa() -> str:
    """The widest instruction set this host runs: 'x86-64-v4', 'x86-64-v3', or 'native' on anything else.

    RLK_CPU_ISA overrides it (the test that compares them does so).
    """
    if chosen := os.environ.get("RLK_CPU_ISA"):
        return chosen
    if platform.machine() != "x86_64":
        return "native"
    try:
        flags = set(next(line for line in open("/proc/cpuinfo") if line.startswith("flags")).split())
    except (OSError, StopIteration):
        return "native"
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        return "x86-64-v4"
    return "x86-64-v3" if {"avx2", "fma", "bmi2", "f16c"} <= flags else "native"


def host_compiler() -> str:
    """The C++ compiler: $CXX, g++ or clang++. Raises UsageError when there is none."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise UsageError("no C++ compiler: expected g++ (or CXX) on PATH; install it with `apt-get install g++`")
    return compiler


def build_cpu(isa: str | None = None, verbose: bool = False) -> Path:
    """Compile hipkernels/cpu/*.cpp for `isa` unless an object of these very sources exists; returns its path.

    Raises UsageError when there is no compiler or it fails (its messages go to stderr).
    """
    isa = isa or host_isa()
    # No -fopenmp when linking: the OpenMP runtime must be the one torch already loaded (see ops/cpu_library.py), so
    # that a process has one pool of threads.
    return build_host_object(BUILD / "cpu", f"librlk-{isa}", "cpu", [f"-march={isa}"], ["-lrt"], verbose)


def build_host_object(folder: Path, stem: str, target: str, flags: list[str], link_flags: list[str],
                      verbose: bool = False) -> Path:
    """folder/<stem>-<fingerprint>.so from the sources of `target` with the host compiler, unless it exists.

    Older objects of the same stem are deleted.
    """
    digest = source_fingerprint(target)
    shared_object = folder / f"{stem}-{digest[:16]}.so"
    if shared_object.exists():
        return shared_object
    compiler = host_compiler()
    with build_lock(folder):
        if shared_object.exists():
            return shared_object
        work = folder / f"{stem}.tmp"
        work.mkdir(exist_ok=True)
        command = [compiler, *FLAGS[target], *flags, f'-DRLK_FINGERPRINT="{digest}"', "-I", str(SOURCES)]

        def compile_one(unit: Path) -> Path:
            run_compiler([*command, "-c", unit, "-o", work / f"{unit.stem}.o"], str(unit), verbose)
            return work / f"{unit.stem}.o"

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, translation_units(target)))
        partial = shared_object.with_suffix(".partial")
        run_compiler([compiler, "-shared", *objects, *link_flags, "-o", partial], f"linking {shared_object}", verbose)
        partial.replace(shared_object)
        shutil.rmtree(work)
        remove_others(shared_object, f"{stem}-*.so")
    return shared_object


def remove_others(kept: Path, pattern: str) -> None:
    """Delete what matches `pattern` beside `kept`: objects of older sources."""
    for stale in kept.parent.glob(pattern):
        if stale != kept:
            stale.unlink()
