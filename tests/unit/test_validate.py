"""`rlk validate` repeats the verdict from the files, and finds any single flipped bit in them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.audit.readback import readback_failures
from rlk.audit.validate import make_manifest, validate_run
from rlk.errors import CheckFailed, UsageError
from tests.evidence import CONTRACT, finished_run, make_readback, write_run

STEP = "audit/step-00001.npz"
SAMPLE = 1 << 16 | 1  # the second sample of step 1


@pytest.fixture(scope="module")
def good_run(tmp_path_factory) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs") / "good").path


@pytest.fixture
def run(good_run, tmp_path) -> Path:
    return Path(shutil.copytree(good_run, tmp_path / "run"))


def edit_arrays(run: Path, **changes) -> None:
    """Write the step's file again with some arrays changed in place, under an honest-looking COMPLETE."""
    with np.load(run / STEP) as file:
        arrays = dict(file)
    for name, change in changes.items():
        change(arrays[name])
    np.savez(run / STEP, **arrays)
    (run / "COMPLETE").write_text(make_manifest(run))


def edit_json(run: Path, name: str, *keys, value) -> None:
    content = json.loads((run / name).read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (run / name).write_text(json.dumps(content))
    (run / "COMPLETE").write_text(make_manifest(run))


def failures_of(run: Path) -> str:
    verdict = validate_run(run)
    assert not verdict.ok and verdict.exit_status == 1 and str(verdict).endswith("verdict: fail")
    return "\n".join(verdict.failures)


def test_a_good_run_passes_with_its_counts(good_run):
    verdict = validate_run(good_run)
    assert verdict.ok and verdict.exit_status == 0
    assert str(verdict) == "\n".join([
        "ok    audit (consistency): 2 steps, 12 log-probs compared, 0 unequal; with replicas 24, 0 unequal",
        f"ok    contract {CONTRACT.fingerprint[:12]}: 2 ranks, 14 operator calls, 0 outside the contract",
        "ok    seal: 1 sources, 1 objects, 1 model files unchanged by the run",
        "ok    COMPLETE: the bytes of all 10 files are those of the finished run",
        "verdict: pass",
    ])


@given(st.sampled_from(["rollout_bits", "train_bits"]), st.integers(0, 11), st.integers(0, 31))
@settings(deadline=None, max_examples=25)
def test_one_flipped_bit_of_a_logprob_is_named(good_run, tmp_path_factory, side, index, bit):  # CASES 29
    run = Path(shutil.copytree(good_run, tmp_path_factory.mktemp("flip") / "run"))
    before = np.load(run / STEP)
    edit_arrays(run, **{side: lambda a: a.__setitem__(index, a[index] ^ np.uint32(1 << bit))})
    after = np.load(run / STEP)
    row, position = divmod(index, 3)
    sample, replica = before["uids"][row], before["replicas"][row]
    text = failures_of(run)
    assert f"the first at step 1, sample {sample} ({replica}), position {position}" in text
    for name, shown in (("rollout_bits", "rollout"), ("train_bits", "train")):
        assert f"{shown} 0x{after[name][index]:08x}" in text


def test_one_flipped_bit_in_the_file_itself_is_named_past_the_zip_checksum(run):  # CASES 29
    logprob = np.load(run / STEP)["train_bits"][10:11].tobytes()  # sample 1 of step 1 on tp1, position 1
    data = bytearray((run / STEP).read_bytes())
    where = data.rindex(logprob, 0, data.index(b"sequence_sha256.npy"))
    old = int.from_bytes(data[where:where + 4], "little")
    data[where] ^= 1
    (run / STEP).write_bytes(data)
    text = failures_of(run)
    assert f"the first at step 1, sample {SAMPLE} (tp1), position 1" in text
    assert f"0x{old:08x}" in text and f"0x{old ^ 1:08x}" in text
    assert f"COMPLETE: {STEP} has SHA-256" in text


EVIDENCE_FILES = ["config.toml", "contract.json", "seal.before.json", "seal.after.json", "metrics.jsonl", "audit.json",
                  "audit/step-00000.npz", STEP, "readback/rank-0.json", "readback/rank-1.json", "COMPLETE"]


@given(st.sampled_from(EVIDENCE_FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
@settings(deadline=None, max_examples=150)
def test_any_flipped_bit_of_any_file_fails_without_a_crash(good_run, tmp_path_factory, name, where, bit):
    run = Path(shutil.copytree(good_run, tmp_path_factory.mktemp("flip") / "run"))
    data = bytearray((run / name).read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    (run / name).write_bytes(data)
    assert failures_of(run)


@given(st.sampled_from(["tokens", "prompt_tokens", "uids", "lengths", "sequence_sha256", "expected_uids", "step"]),
       st.integers(0, 10**6), st.integers(0, 7))
@settings(deadline=None, max_examples=40)
def test_a_flipped_bit_of_tokens_ids_or_lengths_fails_under_an_honest_manifest(
        good_run, tmp_path_factory, name, where, bit):
    run = Path(shutil.copytree(good_run, tmp_path_factory.mktemp("flip") / "run"))

    def flip(array):
        flat = array.reshape(-1).view(np.uint8)
        flat[where % flat.size] ^= 1 << bit

    edit_arrays(run, **{name: flip})
    assert failures_of(run)


@pytest.mark.parametrize("key", ["steps", "compared", "unequal", "replicas_compared", "replicas_unequal", "not_finite"])
@pytest.mark.parametrize("bit", [0, 3, 20])
def test_a_changed_count_fails_under_an_honest_manifest(run, key, bit):
    value = json.loads((run / "audit.json").read_text())[key] ^ (1 << bit)
    edit_json(run, "audit.json", key, value=value)
    assert f"audit.json: {key} is {value}" in failures_of(run)


@pytest.mark.parametrize("name, keys, value, message", [
    ("audit.json", ["verdict"], "fail", "verdict is 'fail', the step files give 'pass'"),
    ("audit.json", ["gates", "every step ran"], False, "gate not passed: every step ran"),
    ("audit.json", ["mode"], "native", "mode is 'native'"),
    ("contract.json", ["contract", "leaves"], 3, "its content gives"),
    ("contract.json", ["contract", "software", "torch"], "2.13.1", "its content gives"),
    ("contract.json", ["fingerprint"], "0" * 64, "fingerprint is 0000"),
    ("contract.json", ["contract", "gemm"], "k descending", "readback of rank 1: contract"),
    ("seal.after.json", ["model", "model.safetensors"], "f" * 64, "model model.safetensors: 3333"),
    ("seal.before.json", ["versions", "torch"], "2.12", "versions torch: 2.12 before the run, 2.13.0 after it"),
    ("readback/rank-0.json", ["rank"], 1, "readbacks are of ranks [1, 1]"),
    ("readback/rank-0.json", ["calls", 0, "contract"], False, "backend cpu, which is outside the contract"),
    ("readback/rank-0.json", ["calls"], [], "no operator ran"),
    ("readback/rank-0.json", ["mode"], "native", "mode native, the run's is consistency"),
    ("readback/rank-0.json", ["fallbacks"], 1, "1 fallbacks are counted"),
])
def test_a_changed_record_is_named_under_an_honest_manifest(run, name, keys, value, message):
    edit_json(run, name, *keys, value=value)
    assert message in failures_of(run)


@pytest.mark.parametrize("name", EVIDENCE_FILES)
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    assert Path(name).name in failures_of(run)


@pytest.mark.parametrize("name", EVIDENCE_FILES)
@pytest.mark.parametrize("content", [b"", b"\xff\x00garbage", b"[]", b"{}\n", b"PK\x03\x04"])
def test_a_damaged_file_is_a_line_and_no_traceback(run, name, content):
    (run / name).write_bytes(content)
    assert "Traceback" not in failures_of(run)


def test_a_file_added_after_the_run_is_found(run):
    shutil.copy(run / STEP, run / "audit/step-00002.npz")
    text = failures_of(run)
    assert "step-00002.npz holds step 1" in text
    assert "COMPLETE: audit/step-00002.npz is not listed" in text


def test_the_last_step_cut_off_on_both_sides_is_found(run):
    (run / STEP).unlink()
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines(keepends=True)[0])
    (run / "COMPLETE").write_text(make_manifest(run))
    assert "audit.json: steps is 2, the step files give 1" in failures_of(run)


@pytest.mark.parametrize("option, message", [
    ("steps = 3", "2 steps are audited, expected all of the run's: 0 to 2"),
    ("samples_per_prompt = 3", "step 0: 2 samples were drawn, the options ask for 3"),
    ("tp = 4", "step 1: replicas ['tp0', 'tp1'] were audited, expected ['tp0', 'tp1', 'tp2', 'tp3']"),
])
def test_a_run_that_audited_less_than_its_options_ask_for_is_found(run, option, message):
    lines = (run / "config.toml").read_text().splitlines()
    name = option.partition(" =")[0]
    (run / "config.toml").write_text("\n".join(option if line.startswith(f"{name} =") else line for line in lines))
    (run / "COMPLETE").write_text(make_manifest(run))
    assert message in failures_of(run)


def test_a_metrics_line_that_tells_another_count_is_found(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[1]["compared"] = 7
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "('step', 'compared', 'unequal') is (1, 7, 0), the step file gives (1, 6, 0)" in failures_of(run)


def test_a_run_that_failed_stays_failed(tmp_path):
    run = write_run(tmp_path / "run", unequal=1)
    text = failures_of(run.path)
    assert "step 0, sample 0 (tp0), position 0" in text and "COMPLETE: COMPLETE is missing" in text
    assert "audit.json: verdict" not in text  # the record says "fail" itself


def test_a_native_run_reports_its_unequal_logprobs_and_passes(tmp_path):
    run = finished_run(tmp_path / "run", "native", unequal=2)
    verdict = validate_run(run.path)
    assert verdict.ok
    assert verdict.lines[0].endswith("2 steps, 12 log-probs compared, 4 unequal; with replicas 24, 8 unequal")
    assert "14 outside the contract" in verdict.lines[1]


def test_a_missing_rank_is_named():
    (line,) = readback_failures([make_readback(1)], CONTRACT.fingerprint, "consistency")
    assert line == "readbacks are of ranks [1] of worlds [2]; expected one of each rank"


def test_no_directory_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="is no directory"):
        validate_run(tmp_path / "absent")


def test_an_empty_directory_fails_and_cannot_be_completed(tmp_path):
    assert "audit: config.toml is missing" in failures_of(tmp_path)
    run = write_run(tmp_path / "run")
    (run.path / "seal.after.json").unlink()
    with pytest.raises(CheckFailed, match="seal.after.json is missing"):
        run.complete()
