"""Writes bench/results/NAME.json: what every script here ends with."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rlk.audit.seal import describe_hardware, software_versions
from rlk.build import source_fingerprint


def write_result(name: str, command: str, figures: dict[str, float], software: dict[str, str] | None = None,
                 target: str = "cpu") -> None:
    """Record and print `figures`; `software` adds to the versions of what RLK itself runs on.

    `target`: whose kernels' sources the figures belong to, "cpu" or "gpu".
    """
    software = software_versions() | (software or {})
    if subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet", "HEAD"], capture_output=True).returncode:
        software["git_commit"] += " and changes"
    record = dict(name=name, date=date.today().isoformat(), hardware=describe_hardware(),
                  software=software, command=command,
                  source_fingerprint=source_fingerprint(target), figures=figures)
    (ROOT / "bench" / "results" / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
