"""The console line, the final table and the picture say what metrics.jsonl and audit.json hold."""

import json
import math

import pytest

from rlk.audit.validate import read_metrics
from rlk.report.metrics import StepMetrics
from rlk.report.plots import plot_run
from rlk.report.tables import format_table, reward_change, verdict_table
from tests.evidence import finished_run, write_run


def test_the_console_line_has_one_fixed_form():
    line = StepMetrics(3, 3, 0.421, 612, 612, 0, 0.41, 0.77, 1.2).console_line(40)
    assert line == ("step  3/40  reward 0.42  tokens 612  unequal 0/612  rollout 0.41s  train 0.77s  step 1.20s")


def test_metrics_are_flat_json_also_when_a_value_is_not_finite():
    row = StepMetrics(0, 0, math.nan, 1, 1, 0, 0.1, 0.1, 0.2, {"loss": math.inf, "kl": 0.5}).as_dict()
    text = json.dumps(row, allow_nan=False)
    assert (json.loads(text)["reward"], row["loss"], row["kl"]) == (None, None, 0.5)


def test_a_table_is_aligned():
    assert format_table([("a", 1), ("long", 22)], ("name", "n")) == "name  n\n----  --\na     1\nlong  22"
    assert format_table([]) == ""


def test_the_reward_change_compares_both_ends():
    assert reward_change([{"reward": r / 10} for r in range(10)]) == "0.20 (first 5 steps) -> 0.70 (last 5)"
    assert reward_change([{"reward": None}]) == "none"


def test_the_verdict_table_of_a_good_and_of_a_failed_run(tmp_path):
    good, bad = finished_run(tmp_path / "good").path, write_run(tmp_path / "bad", unequal=1).path
    table = verdict_table(str(good), json.loads((good / "audit.json").read_text()), read_metrics(good))
    assert "log-probs      12 compared, 0 unequal" in table and table.endswith("verdict        PASS")
    table = verdict_table(str(bad), json.loads((bad / "audit.json").read_text()), read_metrics(bad))
    assert "first unequal  step 0, sample 0, position 0: rollout 0x" in table and table.endswith("verdict        FAIL")


def test_the_verdict_table_names_the_fullest_gpu_of_the_worst_step(tmp_path):
    run = finished_run(tmp_path / "run").path
    summary, steps = json.loads((run / "audit.json").read_text()), read_metrics(run)
    assert "peak memory" not in verdict_table("run", summary, steps)
    steps = [line | {"peak_memory_bytes": size << 20} for line, size in zip(steps, (1536, 512), strict=False)]
    assert "peak memory    1.50 GiB of tensors, on the fullest GPU" in verdict_table("run", summary, steps)


@pytest.mark.parametrize("mode, unequal", [("consistency", 0), ("native", 2)])
def test_the_picture_is_drawn_and_leaves_the_evidence_valid(tmp_path, mode, unequal):
    run = finished_run(tmp_path / "run", mode, unequal=unequal)
    path = plot_run(run.path)
    assert path == run.path / "report.png" and path.read_bytes().startswith(b"\x89PNG")
    assert not list(run.path.glob("*.partial"))


def test_a_run_without_a_finished_step_still_has_a_picture(tmp_path):
    run = write_run(tmp_path / "run", steps=0)
    assert read_metrics(run.path) == [] and plot_run(run.path).exists()
