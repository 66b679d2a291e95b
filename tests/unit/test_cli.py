"""The command line: help, exit status, and one clear line for every bad input (CASES 22-25)."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from rlk import cli, worker
from rlk.config import TYPES, RunConfig, flag, resolve
from rlk.errors import CheckFailed, UsageError
from rlk.model.tiny import CONFIG, write_tokenizer
from rlk.worker import decide, propose

ROOT = Path(__file__).resolve().parents[2]
ISSUE_OPTIONS = """--tp --cp --rollout-tp --rollout-cp --temperature --top-p --top-k --min-p --lr --weight-decay
    --kl-coef --max-response-len --max-tokens-per-gpu --steps --samples-per-prompt --global-batch-size
    --rollout-batch-size
    --grpo-std-normalization --no-grpo-std-normalization --mode --use-rollout-logprobs --seed --rollout-seed
    --rollout-engine --memory-fraction --run-dir --model --prompts""".split()


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command line in this process: (exit status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rlk", *arguments])
        status = cli.main()
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with everything that a run is checked for, but no weights."""
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    (model / "config.json").write_text(json.dumps(CONFIG.as_hugging_face("float32")))
    (model / "model.safetensors").touch()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "7+5=", "answer": "twelve"}\n')
    return tmp_path


def config_of(folder, **changes):
    return RunConfig(**dict(model=str(folder / "model"), prompts=str(folder / "prompts.jsonl"), max_response_len=8,
                            run_dir=str(folder / "run")) | changes)


def proposal(config, profile="cpu-tiny"):
    return {"profile": profile, "config": asdict(config), "sources": dict.fromkeys(TYPES, "default")}


def test_help_shows_every_command_and_option(call):
    status, text, _ = call("--help")
    assert status == 0 and all(name in text for name in ("run", "plan", "doctor", "validate", "init-model"))
    for command in ("run", "plan"):
        status, text, _ = call(command, "-h")
        assert status == 0 and "--profile" in text
        assert all(flag(name) in text for name in TYPES)
        assert all(name in text for name in ISSUE_OPTIONS)
    for command in ("doctor", "validate", "init-model"):
        assert call(command, "--help")[0] == 0


@pytest.mark.parametrize("arguments, message", [
    (["rum"], "No such command 'rum'"),
    (["run", "--temprature", "1"], "Did you mean '--temperature'"),
    (["run", "--tp", "two"], "'two' is not a valid integer"),
    (["plan", "--top-p", "1.5"], "--top-p is 1.5, expected above 0 and at most 1"),
    (["run", "--mode", "strict"], "--mode is 'strict', expected one of consistency, native"),
    (["run", "--rollout-cp", "2"], "--rollout-cp is 2"),
    (["run", "--rollout-engine", "vllm"], "not in this build"),
    (["run", "--profile", "gpu-tine"], "no profile gpu-tine (did you mean gpu-tiny?)"),
    (["run", "--global-batch-size", "100"], "--global-batch-size is 100, expected a divisor of 128"),
    (["validate"], "Missing argument 'DIRECTORY'"),
])
def test_wrong_usage_is_one_line_and_2(call, arguments, message):
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1 and err.startswith("error: ")


def test_a_wrong_environment_variable_is_one_line_and_2(call, monkeypatch):
    monkeypatch.setenv("RLK_TOPP", "0.9")
    status, _, err = call("plan")
    assert (status, err) == (2, "error: environment: unknown variable RLK_TOPP (did you mean RLK_TOP_P?); rename or "
                                "unset it\n")


def test_a_bad_value_is_named_where_it_was_given(call, monkeypatch, tmp_path):
    profile = tmp_path / "own.toml"
    profile.write_text("top_p = 3.0\n")
    bounds = "expected above 0 and at most 1\n"
    assert call("plan", "--profile", str(profile))[2] == f"error: {profile}: top_p is 3.0, {bounds}"
    monkeypatch.setenv("RLK_TOP_P", "2")
    assert call("plan")[2] == f"error: RLK_TOP_P is 2.0, {bounds}"
    monkeypatch.delenv("RLK_TOP_P")
    assert call("plan", "--top-p", "4")[2] == f"error: --top-p is 4.0, {bounds}"


@pytest.mark.parametrize("places, said", [
    ({}, "error: interrupted\n"),
    ({"RANK": "0", "LOCAL_RANK": "0"}, ""),  # the launcher says it
    ({"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, "error: interrupted\n"),
    ({"RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, ""),
])
def test_an_interrupt_is_130_and_said_once_a_host(call, monkeypatch, places, said):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "run_rank" if places else "propose", interrupted)
    if not places:
        monkeypatch.setattr(cli, "resolve", interrupted)
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    previous = signal.getsignal(signal.SIGINT)
    try:
        status, out, err = call("run")
        assert (status, out, err.lstrip("\n")) == (130, "", said)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a second one must not end the interpreter
    finally:
        signal.signal(signal.SIGINT, previous)


def test_plan_shows_values_sources_places_and_memory(call, checkpoint, monkeypatch):
    monkeypatch.setenv("RLK_TEMPERATURE", "0.7")
    status, out, err = call("plan", "--profile", "cpu-tiny", "--model", str(checkpoint / "model"),
                            "--prompts", str(checkpoint / "prompts.jsonl"), "--cp", "2", "--nproc", "4")
    rows = [line.split(maxsplit=2) for line in out.splitlines()]
    assert status == 0 and err == ""
    assert ["--cp", "2", "command line"] in rows and ["--temperature", "0.7", "environment"] in rows
    assert ["--tp", "2", "profile cpu-tiny"] in rows and ["--top-k", "0", "default"] in rows
    assert "4 ranks: training dp 1 x cp 2 x tp 2; rollout 2 engines x tp 2; 2 leaves" in out
    assert "KV pages" in out and "available" in out


def test_plan_refuses_what_run_would_refuse(call, checkpoint):
    (checkpoint / "prompts.jsonl").write_text("")
    status, out, err = call("plan", "--profile", "cpu-tiny", "--model", str(checkpoint / "model"),
                            "--prompts", str(checkpoint / "prompts.jsonl"))
    assert status == 2 and "has no prompts" in err and err.count("\n") == 1
    assert "--temperature" in out


def test_good_input_is_accepted_and_the_run_directory_named(checkpoint):
    config = replace(config_of(checkpoint), run_dir="")
    decided = decide([proposal(config), proposal(config)])
    assert decided["config"]["run_dir"].startswith("runs/") and decided["config"]["run_dir"].endswith("-cpu-tiny")
    assert decided["config"] | {"run_dir": ""} == asdict(config)


def test_bad_input_is_refused_before_anything_is_written(checkpoint, tmp_path):
    def edit(name, **changes):
        path = checkpoint / "model" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def filled_run_dir():
        (checkpoint / "run").mkdir()
        (checkpoint / "run" / "old").touch()

    config_file = (checkpoint / "model" / "config.json").read_text()
    prompts = checkpoint / "prompts.jsonl"
    cases = [
        (lambda: None, dict(model="nowhere"), "no model at nowhere: expected a Hugging Face checkpoint directory; "
         "`rlk init-model build/tiny` makes"),
        (lambda: None, dict(prompts="nowhere.jsonl"), "no prompt file nowhere.jsonl"),
        (lambda: None, dict(tp=8, nproc=8), "--tp 8 does not divide the model's 4 attention heads"),
        (lambda: None, dict(tp=3, nproc=3), "--tp is 3, expected a power of two"),
        (lambda: None, dict(cp=2), "1 ranks do not divide into --tp 1 x --cp 2"),
        (lambda: None, dict(max_response_len=1024), "--max-response-len is 1024, but the model's context is 1024"),
        (lambda: None, dict(reward="mth"), "--reward is 'mth'"),
        (lambda: None, dict(answer_key="label"), "line 1 has no column 'label'"),
        (lambda: None, dict(steps=10**9), "disk too small"),
        (lambda: None, dict(steps=10**9), "choose another --run-dir, or lower --steps"),
        (lambda: prompts.write_text("{\n"), {}, "line 1 is not valid JSON"),
        (lambda: edit("config.json", model_type="llama"), {}, "only dense Qwen3 models are served"),
        (lambda: edit("config.json", hidden_size=16384, num_hidden_layers=80, vocab_size=151936), {},
         "does not fit in memory: process"),
        (lambda: edit("config.json", vocab_size=64), {}, "the tokenizer has"),
        (lambda: (checkpoint / "model" / "model.safetensors").unlink(), {}, "lacks model.safetensors"),
        (lambda: prompts.write_text('{"prompt": "' + "7" * 1020 + '", "answer": "1"}\n'), {}, "1020 tokens"),
        (lambda: None, dict(max_response_len=100, max_tokens_per_gpu=64), "a pack holds 64"),
        (lambda: edit("config.json", num_key_value_heads=0), {}, "num_kv_heads = 0, expected a whole number"),
        (lambda: edit("config.json", hidden_size="64"), {}, "hidden_size = '64'"),
        (lambda: edit("config.json", head_dim=24), {}, "head_dim is 24, expected a multiple of 16"),
        (lambda: edit("config.json", eos_token_id=[1, "x"]), {}, "eos_token_id is [1, 'x']"),
        (filled_run_dir, {}, "is not empty; give a new one"),
    ]
    for prepare, changes, message in cases:
        (checkpoint / "model" / "config.json").write_text(config_file)
        (checkpoint / "model" / "model.safetensors").touch()
        prompts.write_text('{"prompt": "7+5=", "answer": "twelve"}\n')
        prepare()
        before = sorted(tmp_path.rglob("*"))
        config = config_of(checkpoint, **changes)
        with pytest.raises(UsageError) as caught:
            decide([proposal(config)] * config.nproc)
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert sorted(tmp_path.rglob("*")) == before


def test_without_a_gpu_nothing_is_made_for_one(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(checkpoint, model="build/tiny-gpu/model", prompts="build/tiny-gpu/prompts.jsonl", device="cuda")
    with pytest.raises(UsageError, match="--device cuda needs a GPU for each of the 1 ranks here, torch sees 0: use "):
        decide([proposal(config)])
    assert not (tmp_path / "build").exists()


def test_the_tiny_model_for_a_gpu_has_heads_that_gpus_serve(checkpoint, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("rlk.preflight.check_architecture", lambda: None)
    with pytest.raises(UsageError, match="`rlk init-model build/tiny --head-dim 64` makes"):
        decide([proposal(config_of(checkpoint, model="nowhere", device="cuda"))])


def test_consistency_on_a_device_without_contract_operators_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("rlk.preflight.unserved_operators", lambda device, mode: ["draw"])
    with pytest.raises(UsageError, match="no consistency backend on cuda"):
        decide([proposal(config_of(checkpoint, device="cuda"))])


@pytest.mark.parametrize("changes, options, message", [
    ({}, {}, "head_dim is 16, .* expect 64 or 128: .*init-model DIR --head-dim 64"),
    (dict(head_dim=64), dict(dtype="float32"), "--dtype is float32, .* use --dtype bfloat16, --device cpu, or --mode"),
    (dict(head_dim=64, hidden_size=72), {}, "hidden_size is 72, .* expect a multiple of 16 up to 8192"),
    (dict(head_dim=64, hidden_size=8208), {}, "hidden_size is 8208, .* expect a multiple of 16 up to 8192"),
    (dict(head_dim=64, intermediate_size=176), dict(rollout_tp=2, nproc=2), "is 176, .* a multiple of 16 x 2 leaves"),
    (dict(head_dim=64, num_attention_heads=16, num_key_value_heads=16, vocab_size=448, intermediate_size=2048),
     dict(tp=8, nproc=8), "the vocabulary in whole tiles is 448, .* a multiple of 16 x 8 tensor-parallel ranks"),
    (dict(head_dim=64, num_attention_heads=16, num_key_value_heads=16, vocab_size=1024, intermediate_size=2048),
     dict(tp=16, nproc=16), "the number of leaves .* is 16, .* one of 1, 2, 4, 8"),
    (dict(head_dim=64, hidden_size=8192, vocab_size=131072), {},
     "rank's part of .*embed_tokens with --tp 1 = 2,147,483,648, .* at most 2,147,483,647: raise --tp"),
    (dict(head_dim=64, hidden_size=8192, intermediate_size=65536), dict(tp=2, nproc=2, rollout_tp=1),
     "rank's part of layers.*gate_up with --rollout-tp 1 = 2,147,483,648, .*: raise --rollout-tp"),
    (dict(head_dim=64, intermediate_size=4096), dict(max_tokens_per_gpu=1 << 17),
     "widest activation, 131072 tokens x 16384 = 2,147,483,648, .*: lower --max-tokens-per-gpu, or raise --tp"),
    (dict(head_dim=64, vocab_size=131072), dict(max_running=4096, rollout_batch_size=512, samples_per_prompt=8),
     "sampler's logits, 4096 sequences x 131072 ids x 4 = 2,147,483,648, .*: lower --max-running"),
    (dict(head_dim=64), dict(page_size=1 << 16),
     "page size x positions, 65536 x 65536 = 4,294,967,296, .* at most 1,073,741,824: lower --page-size"),
])
def test_what_the_gpu_operators_do_not_serve_is_refused_with_what_they_do(checkpoint, monkeypatch, changes, options,
                                                                         message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 16)
    monkeypatch.setattr("rlk.preflight.check_architecture", lambda: "")
    path = checkpoint / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    config = config_of(checkpoint, device="cuda", **(dict(dtype="bfloat16") | options))
    with pytest.raises(UsageError, match=message):
        decide([proposal(config)] * config.nproc)


def test_a_machine_without_triton_is_told_so(checkpoint, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("rlk.preflight.check_architecture", lambda: "")
    monkeypatch.setattr("rlk.build.triton_version", lambda: "none")
    with pytest.raises(UsageError, match="triton is not installed, and the GPU operators need it"):
        decide([proposal(config_of(checkpoint, device="cuda", dtype="bfloat16"))])


@pytest.mark.parametrize("profile, head_dim", [("cpu-tiny", 16), ("gpu-tiny", 64)])
def test_the_demos_input_is_made_once_and_nothing_else_is(tmp_path, monkeypatch, profile, head_dim):
    made = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlk.model.tiny.create_tiny", lambda directory, head_dim: made.append((directory, head_dim)))
    config, _ = resolve(profile, {}, {})
    worker.create_demo_input(config)
    assert made == [(Path(config.model).parent, head_dim)]
    worker.create_demo_input(replace(config, prompts="mine.jsonl"))
    worker.create_demo_input(replace(config, model="elsewhere/model", prompts="elsewhere/prompts.jsonl"))
    Path(config.model).mkdir(parents=True)
    worker.create_demo_input(config)
    assert len(made) == 1


def test_ranks_with_different_options_stop_with_both_values(checkpoint):
    config = config_of(checkpoint)
    with pytest.raises(UsageError, match="rank 1 has top_p = 0.5, but rank 0 has 1.0"):
        decide([proposal(config), proposal(replace(config, top_p=0.5))])


def test_torchrun_sets_the_number_of_ranks_and_an_unnamed_profile_fits_them(monkeypatch):
    monkeypatch.setattr(worker, "default_profile", lambda: "cpu-tiny")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = propose("", {}, 1)
    assert (alone["config"]["nproc"], alone["config"]["tp"]) == (1, 1)
    assert alone["sources"]["tp"] == "fits 1 ranks" and alone["sources"]["nproc"] == "torchrun"
    assert propose("cpu-tiny", {}, 1)["config"]["tp"] == 2  # asked for: refused later, not changed
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert propose("", {}, 4)["config"]["tp"] == 2


def test_the_same_error_of_several_ranks_is_printed_once(capsys):
    store = dist.HashStore()
    for rank in (1, 0):
        worker.report(store, rank, 2, CheckFailed("step 3 sample 7"))
    worker.report(store, 1, 2, CheckFailed("another"))
    assert capsys.readouterr().err == "check failed: step 3 sample 7\ncheck failed: another\n"


@pytest.mark.parametrize("command", [["bin/rlk", "run", "--profile", "cpu-tiny"],
                                     ["-m", "torch.distributed.run", "--nproc-per-node", "2", "bin/rlk.py"]],
                         ids=["bin/rlk", "torchrun"])
def test_bad_input_on_two_ranks_is_reported_once(command):
    environment = os.environ | {"RLK_MODEL": "nowhere", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, text=True, env=environment, capture_output=True)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith("error: no model at nowhere")
    if command[0] == "bin/rlk":  # torchrun makes every failure 1, and adds its own report
        assert ended.returncode == 2 and ended.stderr == lines[0] + "\n"


def test_help_does_not_wait_for_torch():
    program = ("import sys, rlk.cli\nsys.argv = ['rlk', 'run', '--help']\n"
               "rlk.cli.main()\nsys.exit('torch' in sys.modules)")
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)


def test_resolve_reads_the_process_environment_by_default(monkeypatch):
    monkeypatch.setenv("RLK_STEPS", "7")
    assert resolve("cpu-tiny", {})[0].steps == 7
