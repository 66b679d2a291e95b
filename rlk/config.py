"""RunConfig: every option of a run, and where each value came from.

The dataclass below is the one table: a field is a command-line option (`max_response_len` is `--max-response-len`), an
environment variable (`RLK_MAX_RESPONSE_LEN`) and a profile's key (`max_response_len`), with the help text beside it.
Precedence: command line > environment > profile > default. An unknown key fails with the nearest known one.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from rlk.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "launch" if (ROOT / "launch").is_dir() else Path(__file__).resolve().parent / "launch"
PROFILES = LAUNCH / "profiles"

INTERRUPTED = 130  # exit status after SIGINT, as in a shell

# Variables with the options' prefix that are none: the first chooses the profile, the second the kernels' build.
OTHER_VARIABLES = ("RLK_PROFILE", "RLK_CPU_ISA")

# Negative controls: each breaks one link between rollout and training on purpose, so the audit must fail.
FAULTS = {
    "weight-bit": "flip one bit of one weight on the last rank, between rollout and training",
    "kernel-order": "training sums K in another order in the lm_head GEMM",
    "crossing-token": "training scores without the least likely token of each retained set (it crossed top-p)",
    "temperature": "training scores at 1.25 x the sampling temperature",
    "shift": "training's log-probs are one token late",
}


def option(default: Any, help: str, *, section: str = "", choices: Iterable[str] = (), least: float | None = None,
           above: float | None = None, most: float | None = None, below: float | None = None) -> Any:
    """A field of RunConfig: its default, help text and good values (least <= value, above < value, value <= most,
    value < below; a float must be finite).

    `section` opens a section of `--help`; the fields after it belong to it too.
    """
    meta = dict(help=help, section=section, choices=tuple(choices), least=least, above=above, most=most,
                below=below)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class RunConfig:
    """One run. A bad value raises UsageError."""

    model: str = option("build/tiny/model", "Hugging Face checkpoint directory of a dense Qwen3.",
                        section="What is trained on what")
    prompts: str = option("build/tiny/prompts.jsonl", "Prompt file: JSON lines, one prompt and its answer each.")
    prompt_key: str = option("prompt", "Key of the prompt in each line: a text, or a list of chat messages.")
    answer_key: str = option("answer", "Key of the right answer in each line.")
    reward: str = option("exact", "How a response is scored: exact (equal text), math (equal number or \\boxed{} "
                         "value), or your own package.module:function(response, answer) -> float.")
    run_dir: str = option("", "Directory for the run's evidence; must be new or empty. "
                          "Default: runs/<date>-<time>-<profile>.")
    mode: str = option("consistency", "consistency: batch-invariant operators, one unequal log-prob fails the run. "
                       "native: plain torch operators, mismatches are only counted.",
                       choices=("consistency", "native"))
    dtype: str = option("bfloat16", "Of weights and activations (master weights and sums are always float32).",
                        choices=("bfloat16", "float32"))
    device: str = option("cpu", "cpu, or cuda for NVIDIA and AMD GPUs alike.", choices=("cpu", "cuda"))
    seed: int = option(0, "Seed of the data order and of training.", least=0, most=2**63 - 1)
    rollout_seed: int = option(0, "Seed of the sampling noise.", least=0, most=2**63 - 1)
    steps: int = option(1, "Steps: each is one rollout and the training on it.", least=1)

    nproc: int = option(1, "Ranks (processes) on this node. Training: ranks = dp x cp x tp. "
                        "Rollout: ranks = engines x rollout-tp.", least=1, section="Which rank does what")
    tp: int = option(1, "Tensor-parallel ranks in training; a power of two that divides the heads.", least=1)
    cp: int = option(1, "Context-parallel ranks in training: they share one pack of sequences.", least=1)
    rollout_tp: int = option(0, "Tensor-parallel ranks of one rollout engine; 0 is as tp, which shares the weights.",
                             least=0)
    rollout_cp: int = option(1, "Context-parallel ranks of one rollout engine; the paged engine serves 1.", least=1)
    rollout_engine: str = option("paged", "paged: the built-in engine, on the trainer's own weights.",
                                 choices=("paged", "vllm"))

    temperature: float = option(1.0, "Divides the logits, in sampling and in scoring; 0 is greedy.", least=0,
                                section="Sampling")
    top_p: float = option(1.0, "Sample from the smallest set of tokens with this much probability; 1 is off.",
                          above=0, most=1)
    top_k: int = option(0, "Sample from the k likeliest tokens; 0 is off.", least=0)
    min_p: float = option(0.0, "Drop tokens below this fraction of the likeliest one's probability; 0 is off.",
                          least=0, most=1)
    max_response_len: int = option(1024, "Longest response, in tokens.", least=1)
    ignore_eos: bool = option(False, "Sample every response to its full length (for benchmarks).")

    samples_per_prompt: int = option(8, "Responses to each prompt: one GRPO group.", least=1, most=1 << 16,
                                     section="Batches")
    rollout_batch_size: int = option(1, "Prompts per step.", least=1)
    global_batch_size: int = option(8, "Samples per optimizer step; divides rollout-batch-size x samples-per-prompt.",
                                    least=1)
    max_tokens_per_gpu: int = option(4096, "Tokens of one packed micro-batch on one rank; bounds training memory.",
                                     least=1)

    lr: float = option(1e-6, "AdamW learning rate.", least=0, section="GRPO and AdamW")
    weight_decay: float = option(0.0, "AdamW weight decay (norm weights are left out).", least=0)
    adam_beta1: float = option(0.9, "AdamW decay of the first moment.", least=0, below=1)
    adam_beta2: float = option(0.98, "AdamW decay of the second moment.", least=0, below=1)
    adam_eps: float = option(1e-8, "AdamW epsilon.", above=0)
    grad_clip: float = option(1.0, "Largest global gradient norm; 0 is off.", least=0)
    kl_coef: float = option(0.0, "Weight of the k3 KL to the initial model; above 0 a second copy of it is held.",
                            least=0)
    clip_low: float = option(0.2, "The policy ratio is clipped at 1 - clip-low.", least=0, most=1)
    clip_high: float = option(0.2, "The policy ratio is clipped at 1 + clip-high.", least=0)
    grpo_std_normalization: bool = option(True, "Divide a group's advantages by the rewards' standard deviation.")
    mask_truncated: bool = option(False, "Leave responses that were cut off at max-response-len out of the loss.")
    use_rollout_logprobs: bool = option(False, "Old log-probs of the ratio from rollout, not from recomputation.")

    memory_fraction: float = option(0.4, "Most of a rank's memory (of its GPU, or its share of RAM) for KV pages.",
                                    above=0, most=1, section="Memory")
    page_size: int = option(16, "Tokens of one KV page.", least=1)
    prefill_chunk: int = option(512, "Most prompt tokens in one engine step.", least=1)
    max_running: int = option(64, "Most sequences in one engine step.", least=1)
    recompute: bool = option(True, "Recompute activations in the backward pass, layer by layer, to save memory.")

    save_model: bool = option(True, "Write the trained model to <run-dir>/model at the end.",
                              section="Evidence and failure")
    timeout: float = option(30.0, "Seconds that a collective waits for a peer before the run stops.", above=0)
    inject_fault: str = option("", "Negative control: break one link on purpose, so that the audit must fail. "
                               + "; ".join(f"{name}: {what}" for name, what in FAULTS.items()) + ".",
                               choices=("", *FAULTS))

    def __post_init__(self) -> None:
        for entry in fields(self):
            _check_range(entry, getattr(self, entry.name), flag(entry.name))
        samples = self.rollout_batch_size * self.samples_per_prompt
        if samples % self.global_batch_size:
            raise UsageError(
                f"--global-batch-size is {self.global_batch_size}, expected a divisor of {samples} "
                f"(--rollout-batch-size {self.rollout_batch_size} x --samples-per-prompt {self.samples_per_prompt})")
        if self.rollout_engine != "paged":
            raise UsageError(f"--rollout-engine {self.rollout_engine} is not in this build; use --rollout-engine paged")
        if self.rollout_cp != 1:
            raise UsageError(f"--rollout-cp is {self.rollout_cp}, but the paged engine serves only 1: "
                             "split long rollouts with --rollout-tp")

    @property
    def engine_tp(self) -> int:
        """Tensor-parallel ranks of one rollout engine, with the 0 of rollout_tp resolved."""
        return self.rollout_tp or self.tp


TYPES: dict[str, type] = get_type_hints(RunConfig)
FIELDS: dict[str, Field] = {entry.name: entry for entry in fields(RunConfig)}


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)', or the empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def profile_names() -> list[str]:
    """The shipped profiles, sorted."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_profile(name: str) -> dict[str, Any]:
    """The values of a profile: a name under launch/profiles, or the path of a TOML file."""
    path = Path(name) if name.endswith(".toml") else PROFILES / f"{name}.toml"
    if not path.is_file():
        raise UsageError(f"no profile {name}{nearest(name, profile_names())}: expected a .toml file or one of "
                         f"{', '.join(profile_names())}")
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    for key, value in values.items():
        if key not in TYPES:
            raise UsageError(f"{path}: unknown key {key}{nearest(key, TYPES)}; `rlk run --help` lists the options")
        values[key] = _typed(key, value, f"{path}: {key}")
        _check_range(FIELDS[key], values[key], f"{path}: {key}")
    return values


def load_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The values that RLK_<OPTION> variables give."""
    values = {}
    for variable, text in environ.items():
        if not variable.startswith("RLK_") or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix("RLK_").lower()
        if name not in TYPES:
            known = [f"RLK_{known.upper()}" for known in TYPES]
            raise UsageError(f"environment: unknown variable {variable}{nearest(variable, known)}; rename or unset it")
        values[name] = _parsed(name, text, variable)
        _check_range(FIELDS[name], values[name], variable)
    return values


def resolve(profile: str, command_line: Mapping[str, Any], environ: Mapping[str, str] = os.environ,
            ) -> tuple[RunConfig, dict[str, str]]:
    """The run's configuration, and for each field the source of its value: what `plan` shows.

    `command_line` holds the fields that were given there, already typed; `profile` may be empty (none).
    """
    layers = [(f"profile {profile}", load_profile(profile) if profile else {}),
              ("environment", load_environment(environ)),
              ("command line", dict(command_line))]
    values, sources = {}, dict.fromkeys(TYPES, "default")
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    return replace(RunConfig(), **values), sources


def _typed(name: str, value: Any, where: str) -> Any:
    """A TOML value as its field's type; an integer may stand for a float, nothing else is converted."""
    wanted = TYPES[name]
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise UsageError(f"{where} is {value!r}, expected {_describe(wanted)}")
    return value


def _parsed(name: str, text: str, where: str) -> Any:
    """The text of an environment variable as its field's type."""
    wanted = TYPES[name]
    try:
        if wanted is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        return wanted(text)
    except (KeyError, ValueError):
        raise UsageError(f"{where} is {text!r}, expected {_describe(wanted)}") from None


def _describe(wanted: type) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[wanted]


def _check_range(entry: Field, value: Any, where: str) -> None:
    """Raise UsageError unless `value`, which `where` gives, is a good one."""
    meta = entry.metadata
    if meta["choices"] and value not in meta["choices"]:
        names = [name for name in meta["choices"] if name]
        raise UsageError(f"{where} is {value!r}{nearest(value, names)}, expected one of {', '.join(names)}")
    bounds = [(words, holds, bound) for words, holds, bound in (
        ("at least", operator.ge, meta["least"]), ("above", operator.gt, meta["above"]),
        ("at most", operator.le, meta["most"]), ("below", operator.lt, meta["below"])) if bound is not None]
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} is {value}, expected a finite number")
    # Not `value < bound`: a NaN has to fail too.
    if not all(holds(value, bound) for _, holds, bound in bounds):
        wanted = " and ".join(f"{words} {bound}" for words, _, bound in bounds)
        raise UsageError(f"{where} is {value}, expected {wanted}")
