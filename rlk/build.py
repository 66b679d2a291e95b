"""Builds the C++ kernels with the host compiler; `make cpu` and the loader both come here.

One shared object per instruction set, named by it, under build/cpu/ of a checkout (or the user's cache when
installed), each holding the fingerprint of the sources it was made from. All give the same bits: -ffp-contract=off and
explicit FMAs leave the compiler no freedom in the arithmetic.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlk.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "hipkernels" if (ROOT / "hipkernels").is_dir() else Path(__file__).resolve().parent / "hipkernels"
BUILD = ROOT / "build" if (ROOT / "Makefile").exists() else Path(
    os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlk"

FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
         "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]


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


def source_fingerprint() -> str:
    """SHA-256 over the names and bytes of every kernel source and of the compile flags."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(p for p in SOURCES.rglob("*") if p.suffix in (".h", ".cpp")):
        digest.update(str(path.relative_to(SOURCES)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build_cpu(isa: str | None = None, verbose: bool = False) -> Path:
    """Compile hipkernels/cpu/*.cpp for `isa` unless an object of these very sources exists; returns its path.

    Raises UsageError when there is no compiler or it fails (its messages go to stderr).
    """
    isa = isa or host_isa()
    fingerprint = source_fingerprint()
    folder = BUILD / "cpu"
    target = folder / f"librlk-{isa}-{fingerprint[:16]}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise UsageError("no C++ compiler: expected g++ (or CXX) on PATH; install it with `apt-get install g++`")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # torchrun's ranks arrive together: one builds, the others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        work = folder / f"{isa}.tmp"
        work.mkdir(exist_ok=True)
        flags = [*FLAGS, f"-march={isa}", f'-DRLK_FINGERPRINT="{fingerprint}"', "-I", str(SOURCES)]

        def compile_one(source: Path) -> str:
            obj = str(work / f"{source.stem}.o")
            command = [compiler, *flags, "-c", str(source), "-o", obj]
            if verbose:
                print(" ".join(command), flush=True)
            if subprocess.run(command, stdout=sys.stderr).returncode:
                raise UsageError(f"{compiler} failed on {source}: see its messages above")
            return obj

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sorted((SOURCES / "cpu").glob("*.cpp"))))
        # No -fopenmp here: the OpenMP runtime must be the one torch already loaded (see ops/cpu_library.py), so that a
        # process has one pool of threads.
        partial = target.with_suffix(".partial")
        if subprocess.run([compiler, "-shared", *objects, "-lrt", "-o", str(partial)], stdout=sys.stderr).returncode:
            raise UsageError(f"{compiler} failed to link {target}: see its messages above")
        partial.replace(target)
        shutil.rmtree(work)
        for stale in folder.glob(f"librlk-{isa}-*.so"):
            if stale != target:
                stale.unlink()
    return target


if __name__ == "__main__":
    try:
        print(build_cpu(*sys.argv[1:2], verbose=True))
    except UsageError as error:
        sys.exit(f"error: {error}")
