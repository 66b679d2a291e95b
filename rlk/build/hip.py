"""Builds the GPU kernels (hipkernels/gpu) for gfx942: code objects to look at, and one shared object to load."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlk.build import (
    BUILD,
    FLAGS,
    SOURCES,
    build_lock,
    run_compiler,
    source_fingerprint,
    translation_units,
)
from rlk.build.cpu import remove_others
from rlk.build.gates import check_all, hip_gates, hip_gates_fingerprint, require
from rlk.build.resources import hip_resources
from rlk.build.rocm import find_toolchain

FOLDER = BUILD / "gfx942"
# For the code object alone.
DEVICE_ONLY = ["--cuda-device-only", "--no-gpu-bundle-output"]


@dataclass(frozen=True)
class HipBuild:
    """What a build left: the shared object with the kernels embedded, and each unit's kernels as a code object."""

    library: Path
    code_objects: tuple[Path, ...]
    compiler: str  # its name and version


def library_path(digest: str) -> Path:
    """Where the shared object of the sources with this fingerprint lies or will lie."""
    return FOLDER / f"librlk-gfx942-{digest[:16]}.so"


def build_hip(verbose: bool = False) -> HipBuild:
    """Compile every unit for gfx942 and check the gates, unless this compiler did so with these sources.

    Raises UsageError when there is no compiler or it fails (its messages go to stderr), and CheckFailed naming every
    gate that failed; then nothing is left to load.
    """
    toolchain, digest = find_toolchain(), source_fingerprint("gfx942")
    library = library_path(digest)
    units = translation_units("gfx942")
    with_kernels = [unit for unit in units if "__global__" in unit.read_text()]
    code_objects = tuple(FOLDER / f"{unit.stem}.hsaco" for unit in with_kernels)
    result, manifest = HipBuild(library, code_objects, toolchain.name), FOLDER / "manifest.json"
    made = {"library": library.name, "code_objects": [path.name for path in code_objects], "compiler": toolchain.name,
            "gates": hip_gates_fingerprint()}
    with build_lock(FOLDER):
        if _up_to_date(result, manifest, made):
            return result
        manifest.unlink(missing_ok=True)
        work = FOLDER / "tmp"
        work.mkdir(exist_ok=True)
        command = [*toolchain.command, *FLAGS["gfx942"], f'-DRLK_FINGERPRINT="{digest}"', "-I", str(SOURCES)]
        jobs = [(unit, [], ".o") for unit in units] + [(unit, DEVICE_ONLY, ".hsaco") for unit in with_kernels]

        def compile_one(job: tuple[Path, list[str], str]) -> None:
            unit, more, suffix = job
            # The unit's own id: clang's is drawn from the output's name, and the two code objects would differ.
            run_compiler([*command, *more, f"-cuid={unit.stem}", "-c", unit, "-o", work / f"{unit.stem}{suffix}"],
                         str(unit), verbose)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, jobs))
        # -no-hip-rt: the runtime must be the one torch already loaded (see ops/gpu_library.py).
        objects = [work / f"{unit.stem}.o" for unit in units]
        run_compiler([*toolchain.command, "-shared", "-no-hip-rt", *objects, "-o", work / library.name],
                     f"linking {library}", verbose)
        require(check_all(hip_resources(work / path.name for path in code_objects), hip_gates()))
        for name in made["code_objects"] + [library.name]:
            (work / name).replace(FOLDER / name)
        shutil.rmtree(work)
        remove_others(library, "librlk-gfx942-*.so")
        for stale in FOLDER.glob("*.hsaco"):
            if stale not in code_objects:
                stale.unlink()
        manifest.write_text(json.dumps(made, indent=2) + "\n")
    return result


def _up_to_date(build: HipBuild, manifest: Path, made: dict) -> bool:
    if not all(path.exists() for path in (manifest, build.library, *build.code_objects)):
        return False
    return json.loads(manifest.read_text()) == made
