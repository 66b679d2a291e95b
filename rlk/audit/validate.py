"""Repeats a run's verdict from its files alone.

Two things are checked. What the files say is computed again: every log-prob pair, count and token hash against
audit.json, the contract against its fingerprint and the readbacks, the seal before against the seal after. And the
bytes are those of the finished run: COMPLETE, written last, lists each file's SHA-256 in the format of `sha256sum`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rlk.audit.readback import readback_failures
from rlk.audit.seal import seal_differences
from rlk.audit.step_record import StepRecord, StepVerdict, judge, summarize
from rlk.contract import Contract
from rlk.errors import CheckFailed, UsageError
from rlk.files import hash_file


@dataclass
class Verdict:
    """What validation found: one line per thing checked or broken, in the order of the checks."""

    lines: list[str] = field(default_factory=list)
    ok: bool = True

    def good(self, line: str) -> None:
        self.lines.append(f"ok    {line}")

    def fail(self, line: str) -> None:
        self.lines.append(f"FAIL  {line}")
        self.ok = False

    @property
    def failures(self) -> list[str]:
        return [line.removeprefix("FAIL  ") for line in self.lines if line.startswith("FAIL")]

    @property
    def exit_status(self) -> int:
        return 0 if self.ok else CheckFailed.exit_status

    def __str__(self) -> str:
        return "\n".join([*self.lines, f"verdict: {'pass' if self.ok else 'fail'}"])


def validate_run(directory: str | Path) -> Verdict:
    """Judge a run directory. Damaged or missing files are failures with a line each; UsageError if there is no run."""
    directory = Path(directory)
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory; give the run directory that `rlk run` printed")
    verdict = check_evidence(directory)
    _check(verdict, "COMPLETE", lambda: _check_manifest(directory, verdict))
    return verdict


def check_evidence(directory: Path) -> Verdict:
    """Everything that the files say, without COMPLETE: what must hold before COMPLETE may be written."""
    verdict = Verdict()
    _check(verdict, "audit", lambda: _check_audit(directory, verdict))
    _check(verdict, "contract", lambda: _check_contract(directory, verdict))
    _check(verdict, "seal", lambda: _check_seals(directory, verdict))
    return verdict


def make_manifest(directory: Path) -> str:
    """One line 'SHA-256  path' per file of evidence: the content of COMPLETE; `sha256sum -c COMPLETE` reads it too."""
    return "".join(f"{hash_file(directory / name)}  {name}\n" for name in _evidence_names(directory))


def read_run_config(directory: Path) -> dict:
    """The resolved options that the run recorded, by name."""
    return tomllib.loads((directory / "config.toml").read_text())


def read_metrics(directory: Path) -> list[dict]:
    """The steps' metrics in order."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _check(verdict: Verdict, name: str, check: Callable[[], None]) -> None:
    try:
        check()
    except FileNotFoundError as error:
        verdict.fail(f"{name}: {Path(error.filename).name} is missing")
    except Exception as error:  # a damaged file may break its parser in any way; each is a finding, none a crash
        verdict.fail(f"{name}: a file is damaged ({type(error).__name__}: {error})")


def _check_audit(directory: Path, verdict: Verdict) -> None:
    config = read_run_config(directory)
    mode = config["mode"]
    recorded = _read_json(directory / "audit.json")
    step_verdicts = _judge_steps(directory, config, verdict)
    steps = [step.step for step in step_verdicts]
    if len(steps) != config["steps"] or steps != list(range(len(steps))):
        verdict.fail(f"audit: {len(steps)} steps are audited, expected all of the run's: 0 to "
                     f"{config['steps'] - 1}")
    summary = summarize(step_verdicts, mode, recorded["gates"])
    for line in summary["failures"]:
        verdict.fail(f"audit: {line}")
    for key in sorted(summary.keys() | recorded.keys()):
        if summary.get(key) != recorded.get(key):
            verdict.fail(f"audit.json: {key} is {recorded.get(key)!r}, the step files give {summary.get(key)!r}")
    _check_metrics(directory, step_verdicts, verdict)
    totals = "{steps} steps, {compared:,} log-probs compared, {unequal:,} unequal; with replicas {replicas_compared:,}"
    line = f"audit ({mode}): {totals}, {{replicas_unequal:,}} unequal".format(**summary)
    (verdict.good if verdict.ok else verdict.fail)(line)


def _judge_steps(directory: Path, config: dict, verdict: Verdict) -> list[StepVerdict]:
    """Judge every step's file that can be read; one that cannot is a failure."""
    step_verdicts = []
    for path in sorted(directory.glob("audit/step-*.npz")):

        def judge_file(path: Path = path) -> None:
            record, damaged = StepRecord.load(path)
            for line in damaged:
                verdict.fail(line)
            if path.name != record.file_name:
                verdict.fail(f"{path.name} holds step {record.step}")
            _check_coverage(record, config, verdict)
            step_verdicts.append(judge(record, config["mode"]))

        _check(verdict, path.name, judge_file)
    return step_verdicts


def _check_coverage(record: StepRecord, config: dict, verdict: Verdict) -> None:
    """The step has as many samples and replicas as the options ask for: its own list of them proves nothing."""
    samples = config["rollout_batch_size"] * config["samples_per_prompt"]
    if len(set(record.expected_uids)) != samples:
        verdict.fail(f"step {record.step}: {len(set(record.expected_uids))} samples were drawn, the options ask for "
                     f"{samples}")
    replicas, expected = {row.replica for row in record.rows}, {f"tp{rank}" for rank in range(config["tp"])}
    if replicas != expected:
        verdict.fail(f"step {record.step}: replicas {sorted(replicas)} were audited, expected {sorted(expected)}")


def _check_metrics(directory: Path, step_verdicts: list[StepVerdict], verdict: Verdict) -> None:
    keys = ("step", "compared", "unequal")
    logged = [tuple(line[key] for key in keys) for line in read_metrics(directory)]
    audited = [(step.step, step.compared, step.unequal) for step in step_verdicts]
    for got, expected in zip(logged, audited, strict=False):
        if got != expected:
            verdict.fail(f"metrics.jsonl: {keys} is {got}, the step file gives {expected}")
    if len(logged) != len(audited):
        verdict.fail(f"metrics.jsonl has {len(logged)} steps, the audit has {len(audited)}")


def _check_contract(directory: Path, verdict: Verdict) -> None:
    recorded = _read_json(directory / "contract.json")
    fingerprint = Contract(**recorded["contract"]).fingerprint
    if recorded["fingerprint"] != fingerprint:
        verdict.fail(f"contract.json: fingerprint is {recorded['fingerprint']}, its content gives {fingerprint}")
    readbacks = [_read_json(path) for path in sorted(directory.glob("readback/rank-*.json"))]
    failures = readback_failures(readbacks, fingerprint, read_run_config(directory)["mode"])
    for line in failures:
        verdict.fail(line)
    if not failures:
        calls = sum(row["calls"] for record in readbacks for row in record["calls"])
        fallbacks = sum(record["fallbacks"] for record in readbacks)
        verdict.good(f"contract {fingerprint[:12]}: {len(readbacks)} ranks, {calls:,} operator calls, "
                     f"{fallbacks:,} outside the contract")


def _check_seals(directory: Path, verdict: Verdict) -> None:
    before, after = (_read_json(directory / f"seal.{when}.json") for when in ("before", "after"))
    differences = seal_differences(before, after)
    for line in differences:
        verdict.fail(f"seal: {line}")
    if not differences:
        verdict.good(f"seal: {len(before['sources'])} sources, {len(before['objects'])} objects, "
                     f"{len(before['model'])} model files unchanged by the run")


def _check_manifest(directory: Path, verdict: Verdict) -> None:
    listed = {}
    for line in (directory / "COMPLETE").read_text().splitlines(keepends=True):
        match = re.fullmatch(r"([0-9a-f]{64})  (\S+)\n", line)
        if not match:
            verdict.fail(f"COMPLETE: line {line!r} is damaged; expected 'SHA-256  path'")
            continue
        listed[match[2]] = match[1]
    there = _evidence_names(directory)
    for name in sorted(listed.keys() | set(there)):
        if name not in listed:
            verdict.fail(f"COMPLETE: {name} is not listed; it came after the run")
        elif name not in there:
            verdict.fail(f"COMPLETE: {name} is listed and missing")
        elif (found := hash_file(directory / name)) != listed[name]:
            verdict.fail(f"COMPLETE: {name} has SHA-256 {found}, expected {listed[name]}: it was changed after the run")
    if verdict.ok:
        verdict.good(f"COMPLETE: the bytes of all {len(there)} files are those of the finished run")


def _evidence_names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*")
                  if path.is_file() and path.name != "COMPLETE")


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text())
