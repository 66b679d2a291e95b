"""The seal: content hashes of everything that decides a run, taken before the first step and again after the last."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rlk.build import ROOT, triton_version
from rlk.files import hash_file

SOURCE_FOLDERS = ("rlk", "bin", "hipkernels", "triton", "launch")
PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors")


def make_seal(model_dir: Path, prompts: Path, objects: Iterable[Path]) -> dict:
    """Hash the sources, the built kernel objects, every file of the model directory and the prompt file.

    Returns {"sources", "objects", "model", "prompts": {name: SHA-256}, "versions", "hardware": {name: text}}. Nothing
    in it changes while a run goes on, so the seals before and after must be equal.
    """
    return {
        "sources": hash_sources(),
        "objects": _hash_named({path.name: path for path in objects}),
        "model": _hash_named(_files_under(model_dir, model_dir)),
        "prompts": _hash_named({prompts.name: prompts}),
        "versions": software_versions(),
        "hardware": describe_hardware(),
    }


def hash_sources() -> dict[str, str]:
    """SHA-256 of every source file by its path in the project (of the package alone when installed)."""
    folders = SOURCE_FOLDERS if (ROOT / "Makefile").exists() else ("rlk",)
    files: dict[str, Path] = {}
    for folder in folders:
        files |= _files_under(ROOT / folder, ROOT)
    return _hash_named(files)


def source_digest() -> str:
    """One SHA-256 over `hash_sources`: equal on every rank that runs the same code."""
    return hashlib.sha256(json.dumps(hash_sources()).encode()).hexdigest()


def seal_differences(before: dict, after: dict) -> list[str]:
    """One line per entry that is not the same in both seals: its name and both values."""
    differences = []
    for part in sorted(before.keys() | after.keys()):
        old, new = before.get(part, {}), after.get(part, {})
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                differences.append(f"{part} {name}: {old.get(name, 'absent')} before the run, "
                                   f"{new.get(name, 'absent')} after it")
    return differences


def software_versions() -> dict[str, str]:
    """Versions of what computes, and the git commit of the checkout ('none' outside one)."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    compiler = os.environ.get("CXX") or "g++"
    versions["triton"] = triton_version()
    versions["compiler"] = _first_line([compiler, "--version"])
    versions["git_commit"] = _first_line(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    return versions


def describe_hardware() -> dict[str, str]:
    """Processor, cores, memory and accelerators of this host."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"processor": _processor_name(), "cores": str(os.cpu_count()), "memory_gib": f"{memory / 2**30:.1f}",
            "gpus": ", ".join(gpus) or "none"}


def _files_under(folder: Path, root: Path) -> dict[str, Path]:
    """Every file below `folder` by its path from `root`; caches and hidden files decide nothing and are left out."""
    return {
        name.as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and (name := path.relative_to(root)) and path.suffix != ".pyc"
        and not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
    }


def _hash_named(files: dict[str, Path]) -> dict[str, str]:
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock; a model is gigabytes
        return dict(zip(sorted(files), pool.map(hash_file, (files[name] for name in sorted(files))), strict=True))


def _first_line(command: list[str]) -> str:
    """First line that a command prints, 'none' when it cannot run or fails."""
    if not shutil.which(command[0]):
        return "none"
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.partition("\n")[0] if done.returncode == 0 else "none"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
