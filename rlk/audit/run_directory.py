"""The run directory: new, append-only, and enough to judge the run by itself. Only rank 0 writes it.

    config.toml          every option as resolved, and where its value came from
    contract.json        the numerics contract and its fingerprint
    seal.before.json, seal.after.json    content hashes (audit/seal.py)
    readback/rank-*.json what each rank ran (audit/readback.py)
    metrics.jsonl        one line per step
    audit/step-*.npz     the log-prob pairs (audit/step_record.py), audit.json the totals and the verdict
    COMPLETE             SHA-256 of all of these, only after every check passed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rlk.audit.step_record import StepRecord
from rlk.audit.validate import check_evidence, make_manifest
from rlk.contract import Contract
from rlk.errors import CheckFailed, UsageError
from rlk.files import append_line, disk_errors, write_atomic


class RunDirectory:
    """Writes one run's evidence. No method replaces a file; a full disk is a UsageError and leaves whole files only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: str | Path) -> RunDirectory:
        """Make the directory. Raises UsageError when something is there already."""
        path = Path(path)
        require_new(path)
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / "audit").mkdir()
            (path / "readback").mkdir()
            (path / "metrics.jsonl").touch()  # so that a run which fails in its first step has metrics: none
        return cls(path)

    def write_config(self, options: Mapping[str, object], sources: Mapping[str, str]) -> None:
        """Write config.toml: `options` are the resolved values, `sources` say where each came from."""
        self._write("config.toml", to_toml(options, sources))

    def write_contract(self, contract: Contract) -> None:
        self._write_json("contract.json", {"fingerprint": contract.fingerprint, "contract": contract.as_dict()})

    def write_seal(self, when: str, seal: dict) -> None:
        """Write the seal taken `when`: "before" the first step or "after" the last."""
        self._write_json(f"seal.{when}.json", seal)

    def write_readback(self, readback: dict) -> None:
        self._write_json(f"readback/rank-{readback['rank']}.json", readback)

    def write_step(self, record: StepRecord) -> None:
        self._write(f"audit/{record.file_name}", record.to_npz())

    def write_audit(self, summary: dict) -> None:
        self._write_json("audit.json", summary)

    def append_metrics(self, metrics: dict) -> None:
        """Append one step's line to metrics.jsonl."""
        append_line(self.path / "metrics.jsonl", json.dumps(metrics, allow_nan=False))

    def complete(self) -> None:
        """Write COMPLETE. Raises CheckFailed, and writes nothing, when the evidence does not hold."""
        verdict = check_evidence(self.path)
        if not verdict.ok:
            more = f" (and {len(verdict.failures) - 1} more)" if len(verdict.failures) > 1 else ""
            raise CheckFailed(f"{verdict.failures[0]}{more}; see `rlk validate {self.path}`")
        self._write("COMPLETE", make_manifest(self.path))

    def _write_json(self, name: str, content: dict) -> None:
        self._write(name, json.dumps(content, indent=2) + "\n")

    def _write(self, name: str, data: str | bytes) -> None:
        path = self.path / name
        if path.exists():
            raise CheckFailed(f"{path} exists already; a run directory is append-only")
        write_atomic(path, data.encode() if isinstance(data, str) else data)


def require_new(path: Path) -> None:
    """Raise UsageError unless nothing is at `path`, or an empty directory."""
    with disk_errors(path):  # a name too long, or a parent that may not be read
        path.exists()
    if path.exists() and not path.is_dir():
        raise UsageError(f"run directory {path} is a file; give a new directory with --run-dir")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"run directory {path} is not empty; give a new one with --run-dir, nothing is overwritten")


def to_toml(options: Mapping[str, object], sources: Mapping[str, str]) -> str:
    """Flat TOML of str, int, float and bool values, each with its source as a comment."""
    lines = []
    for name, value in options.items():
        if isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, str):  # TOML's escapes are JSON's, plus the one for DEL
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        else:
            text = repr(value)
        source = "".join(c if c.isprintable() else "?" for c in sources.get(name, ""))
        lines.append(f"{name} = {text}" + (f"  # {source}" if source else ""))
    return "\n".join(lines) + "\n"
