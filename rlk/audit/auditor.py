"""The auditor: compares every recomputed log-prob with the sampled one, step by step, and keeps the evidence."""

from __future__ import annotations

from rlk.audit.run_directory import RunDirectory
from rlk.audit.step_record import AuditRow, StepRecord, StepVerdict, judge, summarize


class Auditor:
    """Judges the rows of all ranks on rank 0. With `run_directory` None it judges and writes nothing."""

    def __init__(self, run_directory: RunDirectory | None, mode: str) -> None:
        self.run_directory = run_directory
        self.mode = mode
        self.verdicts: list[StepVerdict] = []

    def add_step(self, step: int, policy_version: int, rows: list[AuditRow], expected_uids: list[int]) -> StepVerdict:
        """Write the step's evidence and judge it; `expected_uids` are the samples that rollout drew.

        The first row of a uid is its distinct row, later ones are replicas. Raises nothing for unequal bits: stop on
        `not verdict.ok` with CheckFailed(verdict.message), after `finish` has written audit.json.
        """
        record = StepRecord(step, policy_version, list(expected_uids), rows)
        if self.run_directory:
            self.run_directory.write_step(record)
        verdict = judge(record, self.mode)
        self.verdicts.append(verdict)
        return verdict

    def finish(self, passed_gates: dict[str, bool]) -> dict:
        """Write audit.json and return its content. The verdict is "pass" only if all steps and all gates passed."""
        summary = summarize(self.verdicts, self.mode, passed_gates)
        if self.run_directory:
            self.run_directory.write_audit(summary)
        return summary
