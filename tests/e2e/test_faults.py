"""Negative controls: each broken link makes the audit fail and name what it saw."""

from __future__ import annotations

import re

import pytest

from rlk.config import FAULTS
from tests.e2e.runs import audit, rlk, run_options

NAMED = re.compile(r"step 0, sample \d+ \(tp\d\), position \d+ \(token \d+\): "
                   r"rollout (0x[0-9a-f]{8})[^,]*, train (0x[0-9a-f]{8})")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_link_fails_the_audit_with_step_sample_position_and_both_bit_patterns(tiny, tmp_path, fault):
    done = rlk(*run_options(tiny, tmp_path / "run", steps=1, inject_fault=fault))
    assert done.returncode == 1, done.stdout + done.stderr
    found = NAMED.search(done.stderr)
    assert found, done.stderr
    assert found[1] != found[2]
    summary = audit(tmp_path / "run")
    assert summary["verdict"] == "fail" and summary["unequal"] + summary["replicas_unequal"] > 0
    assert summary["first_unequal"]["rollout_bits"] == found[1]
    assert not (tmp_path / "run" / "COMPLETE").exists()
    assert rlk("validate", str(tmp_path / "run")).returncode == 1
