"""A run directory is new, append-only, and whole also when the disk fills up."""

import errno
import json
import os
import subprocess
import tomllib
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlk.files
from rlk.audit.run_directory import RunDirectory, to_toml
from rlk.audit.seal import hash_sources, make_seal, seal_differences
from rlk.config import RunConfig
from rlk.errors import CheckFailed, UsageError
from rlk.files import append_line, atomic_path, write_atomic
from tests.evidence import CONTRACT, finished_run, write_run


def test_a_directory_that_is_not_empty_is_refused_and_untouched(tmp_path):  # CASES 25
    (tmp_path / "precious").write_text("data")
    with pytest.raises(UsageError, match="is not empty; give a new one"):
        RunDirectory.create(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"] and (tmp_path / "precious").read_text() == "data"


def test_a_finished_run_cannot_be_run_over(tmp_path):  # CASES 25
    finished_run(tmp_path / "run")
    with pytest.raises(UsageError, match="not empty"):
        RunDirectory.create(tmp_path / "run")


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory.create(tmp_path / "run")


def test_an_impossible_place_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        RunDirectory.create(tmp_path / "file" / "run")


def test_no_file_is_written_twice(tmp_path):
    run = write_run(tmp_path / "run")
    with pytest.raises(CheckFailed, match="append-only"):
        run.write_contract(CONTRACT)


def test_complete_comes_only_after_the_evidence_holds(tmp_path):
    run = write_run(tmp_path / "run", unequal=1)
    with pytest.raises(CheckFailed, match="step 0, sample 0 .tp0., position 0"):
        run.complete()
    assert not (run.path / "COMPLETE").exists()


def test_complete_is_readable_by_sha256sum(tmp_path):
    run = finished_run(tmp_path / "run")
    done = subprocess.run(["sha256sum", "-c", "--strict", "COMPLETE"], cwd=run.path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") == 10


def test_the_resolved_config_reads_back(tmp_path):
    config = RunConfig(model='odd "name"\n\x7f é', lr=5e-7, mask_truncated=True, top_k=20)
    run = RunDirectory.create(tmp_path / "run")
    run.write_config(asdict(config), {"lr": "profile cpu-tiny.toml", "top_k": "--top-k"})
    text = (run.path / "config.toml").read_text()
    assert RunConfig(**tomllib.loads(text)) == config
    assert "lr = 5e-07  # profile cpu-tiny.toml\n" in text


@given(st.one_of(st.booleans(), st.integers(-2**63, 2**63 - 1), st.floats(allow_nan=False), st.text()), st.text())
@settings(deadline=None, max_examples=60)
def test_every_value_reads_back_whatever_its_source(value, source):
    read = tomllib.loads(to_toml({"before": 1, "value": value, "after": 2}, {"value": source}))
    assert read == {"before": 1, "value": value, "after": 2} and type(read["value"]) is type(value)


def fail_after(count: int):
    """A raw write that takes `count` more bytes, then finds the disk full."""

    def write_all(file, data):
        file.write(data[:count])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return write_all


@pytest.mark.parametrize("taken", [0, 1, 1000])
def test_a_full_disk_leaves_the_last_good_file(tmp_path, monkeypatch, taken):  # CASES 27
    target = tmp_path / "checkpoint"
    write_atomic(target, b"last good")
    monkeypatch.setattr(rlk.files, "_write_all", fail_after(taken))
    with pytest.raises(UsageError, match=r"disk full writing .*checkpoint: [\d,]+ bytes free"):
        write_atomic(target, b"new " * 1000)
    assert target.read_bytes() == b"last good" and os.listdir(tmp_path) == ["checkpoint"]


def test_a_full_disk_leaves_whole_metric_lines(tmp_path, monkeypatch):  # CASES 27
    path = tmp_path / "metrics.jsonl"
    append_line(path, '{"step": 0}')
    with monkeypatch.context() as patch:
        patch.setattr(rlk.files, "_write_all", fail_after(4))
        with pytest.raises(UsageError, match="disk full"):
            append_line(path, '{"step": 1}')
    append_line(path, '{"step": 1}')
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


def test_a_library_that_reports_a_full_disk_in_words_is_understood(tmp_path):
    with pytest.raises(UsageError, match="disk full"), atomic_path(tmp_path / "model.safetensors"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")


def test_other_errors_pass_unchanged_and_leave_nothing(tmp_path):
    with pytest.raises(KeyError), atomic_path(tmp_path / "x") as temporary:
        temporary.write_text("half")
        raise KeyError("unrelated")
    assert not os.listdir(tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 128 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here (needs root)")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_a_disk_that_really_fills_up_stops_the_run_with_whole_files_only(small_disk):  # CASES 27
    run = RunDirectory.create(small_disk / "run")
    written = 0
    with pytest.raises(UsageError, match=r"disk full writing .*: [\d,]+ bytes free"):
        for written in range(100):
            run.append_metrics({"step": written})
            run.write_readback({"rank": written, "filler": "x" * 20_000})
    assert 0 < written < 100
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) in (written, written + 1)
    files = sorted((run.path / "readback").iterdir())
    assert len(files) == written and all(len(json.loads(f.read_text())["filler"]) == 20_000 for f in files)
    assert not (run.path / "COMPLETE").exists()


def test_the_seal_covers_sources_objects_model_prompts_and_versions(tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("model/config.json", "prompts.jsonl", "librlk.so"):
        (tmp_path / name).write_text("{}")
    files = tmp_path / "model", tmp_path / "prompts.jsonl", [tmp_path / "librlk.so"]
    before = make_seal(*files)
    assert seal_differences(before, json.loads(json.dumps(before))) == []
    assert {"rlk/audit/seal.py", "rlk/config.py"} <= before["sources"].keys()
    assert not [name for name in before["sources"] if "__pycache__" in name]
    (tmp_path / "model/config.json").write_text("{ }")
    (difference,) = seal_differences(before, make_seal(*files))
    assert difference.startswith("model config.json: 44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a")


def test_a_file_that_appears_or_vanishes_is_a_difference():
    a, b = {"sources": {"x.py": "1"}}, {"sources": {"y.py": "1"}}
    assert seal_differences(a, b) == ["sources x.py: 1 before the run, absent after it",
                                      "sources y.py: absent before the run, 1 after it"]


def test_source_hashes_are_of_content_and_in_a_stable_order():
    first = hash_sources()
    assert list(first) == sorted(first) and all(len(digest) == 64 for digest in first.values())
