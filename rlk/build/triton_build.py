"""The Triton kernels as `make triton-aot` leaves them: compiled, their gates checked, listed in a manifest."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from rlk.build import BUILD, build_lock
from rlk.build.code_object import read_code_object
from rlk.build.gates import Failure, check_all, require, triton_gates
from rlk.build.options import check_options, variants_without
from rlk.build.resources import Resources
from rlk.build.triton_aot import all_variants, artifact, compile_all, compile_variant, sources_fingerprint

if TYPE_CHECKING:
    from rlk.kernels.variants import Variant


def make_triton(arch: str) -> Path:
    """Compile every variant for `arch` and check the gates (sm_90: those of the options alone).

    Returns the manifest, build/<arch>/triton/manifest.json.

    The manifest is written when all gates passed: {"fingerprint", "kernels": {"kernel/configuration": file}}. Raises
    CheckFailed naming every gate that failed.
    """
    folder, fingerprint = BUILD / arch / "triton", sources_fingerprint()
    manifest = folder / "manifest.json"
    with build_lock(folder):
        if _is_current(manifest, fingerprint):
            return manifest
        variants = compile_all(arch, variants_without)
        failures = check_options(variants, arch)
        if arch == "gfx942":
            failures += check_triton(variants)
        require(failures)
        files = {variant.label: artifact(variant, arch) for variant in variants}
        _remove_stale(folder, [*files.values(), *(artifact(without, arch) for variant in variants
                                                  for without in variants_without(variant, arch).values())])
        described = {"fingerprint": fingerprint,
                     "kernels": {label: path.relative_to(folder).as_posix() for label, path in files.items()}}
        partial = manifest.with_suffix(".partial")
        partial.write_text(json.dumps(described, indent=2) + "\n")
        partial.replace(manifest)
    return manifest


def check_triton(variants: list[Variant]) -> list[Failure]:
    """The gates that these variants do not pass on gfx942."""
    return check_all(triton_resources(variants), triton_gates())


def triton_resources(variants: list[Variant] | None = None) -> list[Resources]:
    """What these variants (all of them when not given) take on gfx942."""
    variants = all_variants("gfx942") if variants is None else variants
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(resources_of, variants))


def resources_of(variant: Variant) -> Resources:
    """What `variant` takes on gfx942."""
    compiled = compile_variant(variant, "gfx942")
    code = read_code_object(compiled.path)[compiled.metadata.name]
    lanes = compiled.metadata.num_warps * compiled.metadata.warp_size
    return Resources(variant.kernel, variant.name, code, compiled.metadata.shared, lanes)


def _is_current(manifest: Path, fingerprint: str) -> bool:
    if not manifest.exists():
        return False
    described = json.loads(manifest.read_text())
    return described["fingerprint"] == fingerprint and all(
        (manifest.parent / name).exists() for name in described["kernels"].values())


def _remove_stale(folder: Path, kept: list[Path]) -> None:
    """Delete the files of kernels and configurations that are no more."""
    stems = {path.with_suffix("") for path in kept}
    for path in folder.rglob("*.json"):
        if path.parent != folder and path.with_suffix("") not in stems:
            for stale in path.parent.glob(f"{path.stem}.*"):
                stale.unlink()
