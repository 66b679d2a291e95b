"""Where a run's options come from, and which are refused."""

import dataclasses
import tomllib

import pytest

from rlk.config import PROFILES, TYPES, RunConfig, load_profile, profile_names, resolve
from rlk.errors import UsageError


def test_precedence_is_command_line_environment_profile_default(tmp_path):
    profile = tmp_path / "mine.toml"
    profile.write_text("tp = 2\ncp = 2\ntop_p = 0.9\n")
    config, sources = resolve(str(profile), {"tp": 8}, {"RLK_TP": "4", "RLK_CP": "4", "HOME": "/"})
    assert (config.tp, config.cp, config.top_p, config.temperature) == (8, 4, 0.9, 1.0)
    assert [sources[name] for name in ("tp", "cp", "top_p", "temperature")] == [
        "command line", "environment", f"profile {profile}", "default"]


def test_every_field_has_help_a_source_and_a_default_of_its_type():
    _, sources = resolve("", {}, {})
    for entry in dataclasses.fields(RunConfig):
        assert entry.metadata["help"].endswith("."), entry.name
        assert type(entry.default) is TYPES[entry.name], entry.name
        assert sources[entry.name] == "default"


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_are_valid(name):
    config, _ = resolve(name, {}, {})
    assert config.nproc % (config.tp * config.cp) == 0


def test_mi300x_profile_is_the_reference_workload():
    values = tomllib.loads((PROFILES / "mi300x-qwen3-8b.toml").read_text())
    expected = dict(nproc=8, tp=4, cp=2, rollout_tp=4, temperature=0.7, top_p=0.95, lr=5e-7, kl_coef=0.01,
                    max_response_len=6912, max_tokens_per_gpu=4096, samples_per_prompt=8, global_batch_size=8,
                    rollout_batch_size=1, memory_fraction=0.4, grpo_std_normalization=True)
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize("text, message", [
    ("temprature = 0.7\n", "unknown key temprature (did you mean temperature?)"),
    ("max-response-len = 7\n", "unknown key max-response-len (did you mean max_response_len?)"),
    ("tp = 2.0\n", "tp is 2.0, expected a whole number"),
    ("tp = true\n", "tp is True, expected a whole number"),
    ("recompute = 1\n", "recompute is 1, expected true or false"),
    ("tp = \n", "is not valid TOML"),
])
def test_bad_profile_names_file_and_key(tmp_path, text, message):
    profile = tmp_path / "bad.toml"
    profile.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_profile(str(profile))
    assert message in str(caught.value) and str(profile) in str(caught.value)


def test_a_profile_may_write_a_whole_number_for_a_float(tmp_path):
    (tmp_path / "p.toml").write_text("temperature = 1\n")
    assert load_profile(str(tmp_path / "p.toml"))["temperature"] == 1.0


def test_unknown_profile_and_variable_name_the_nearest():
    with pytest.raises(UsageError, match="did you mean cpu-tiny"):
        load_profile("cpu-tyni")
    with pytest.raises(UsageError, match="RLK_TEMPRATURE .did you mean RLK_TEMPERATURE"):
        resolve("", {}, {"RLK_TEMPRATURE": "1"})


@pytest.mark.parametrize("text, value", [("true", True), ("0", False), ("No", False)])
def test_booleans_from_the_environment(text, value):
    assert resolve("", {}, {"RLK_RECOMPUTE": text})[0].recompute is value


@pytest.mark.parametrize("values, message", [
    (dict(temperature=-0.1), "--temperature is -0.1, expected at least 0"),
    (dict(temperature=float("nan")), "--temperature is nan"),
    (dict(top_p=0.0), "--top-p is 0.0, expected above 0 and at most 1"),
    (dict(top_p=1.5), "--top-p is 1.5"),
    (dict(min_p=2.0), "--min-p is 2.0"),
    (dict(steps=0), "--steps is 0"),
    (dict(mode="strict"), "--mode is 'strict', expected one of consistency, native"),
    (dict(dtype="float16"), "--dtype is 'float16' (did you mean"),
    (dict(inject_fault="wieght-bit"), "did you mean weight-bit"),
    (dict(global_batch_size=3), "--global-batch-size is 3, expected a divisor of 8"),
    (dict(rollout_cp=2), "--rollout-cp is 2"),
    (dict(rollout_engine="vllm"), "not in this build"),
])
def test_bad_values_are_refused_with_the_option_and_what_is_expected(values, message):
    with pytest.raises(UsageError) as caught:
        RunConfig(**values)
    assert message in str(caught.value) and "\n" not in str(caught.value)
