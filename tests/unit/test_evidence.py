"""The evidence that rank 0 closes: what changed during the run is no pass."""

from __future__ import annotations

import pytest

import rlk.train.evidence
from rlk.config import RunConfig
from rlk.errors import CheckFailed
from rlk.report.metrics import StepMetrics
from rlk.train.evidence import Evidence
from tests.evidence import CONTRACT, make_readback, make_row, make_seal


def test_a_source_that_changed_during_the_run_is_no_pass_and_never_complete(tmp_path, monkeypatch):
    changed = make_seal() | {"sources": {"rlk/a.py": "f" * 64}}
    seals = iter([make_seal(), changed])
    monkeypatch.setattr(rlk.train.evidence, "make_seal", lambda *_: next(seals))
    evidence = Evidence(RunConfig(run_dir=str(tmp_path / "run"), steps=1, rollout_batch_size=1, samples_per_prompt=1,
                                  global_batch_size=1), {}, CONTRACT)
    verdict = evidence.auditor.add_step(0, 0, [make_row(1)], [1])
    figures = {"samples_in_loss": 1, "reward_errors": 0}
    evidence.step(StepMetrics(0, 0, 0.5, 3, verdict.compared, verdict.unequal, 0.1, 0.1, 0.2, figures))
    with pytest.raises(CheckFailed, match="seal"):
        evidence.close([make_readback(0), make_readback(1)], finite_weights=True)
    assert '"seal": false' in (tmp_path / "run" / "audit.json").read_text()
    assert not (tmp_path / "run" / "COMPLETE").exists()
