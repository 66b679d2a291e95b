"""Everything about a run that can be checked before weights are loaded or anything is written.

Bad input ends here, with one line. `rlk plan` prints the outcome; `rlk run` does the same checks on rank 0.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from rlk.audit.run_directory import require_new
from rlk.config import RunConfig
from rlk.data.prompts import Example, load_prompts
from rlk.data.rewards import find_reward
from rlk.data.tokenizer import Tokenizer
from rlk.doctor import check_rendezvous
from rlk.doctor_gpus import check_architecture, check_triton
from rlk.errors import UsageError
from rlk.model.config import ModelConfig
from rlk.model.qwen3 import parameter_specs
from rlk.model.weights import weight_files
from rlk.ops.registry import registry
from rlk.plan import MemoryPlan, available_memory, local_parameters, plan_memory
from rlk.topology import Topology

OPERATORS = ("adamw", "attention", "embedding", "gemm", "logprob", "norm", "paged_rows", "sampler", "swiglu")
EVIDENCE_BYTES_PER_TOKEN = 32  # an audited log-prob: id, both bit patterns, replicas


@dataclass(frozen=True)
class Preflight:
    """What the checks read on the way."""

    model: ModelConfig
    topology: Topology
    tokenizer: Tokenizer
    examples: list[Example]
    memory: MemoryPlan


def preflight(config: RunConfig, world: int, ranks_here: int) -> Preflight:
    """Check a run of `world` ranks, `ranks_here` of them on this node; raises UsageError at the first fault.

    In the order of cost: paths, shapes, software, data, memory, disk.
    """
    check_layout(config, world, ranks_here)
    if not Path(config.model).is_dir():
        heads = " --head-dim 64" if config.device == "cuda" else ""
        raise UsageError(f"no model at {config.model}: expected a Hugging Face checkpoint directory; "
                         f"`rlk init-model build/tiny{heads}` makes a tiny one")
    model = ModelConfig.from_pretrained(config.model)
    check_weight_files(Path(config.model))
    topology = Topology.plan(world, 0, config.tp, config.cp, config.engine_tp, model)
    find_reward(config.reward)
    tokenizer = Tokenizer(config.model)
    if len(tokenizer) > model.padded_vocab:
        raise UsageError(f"{config.model}: the tokenizer has {len(tokenizer)} tokens, but the model only "
                         f"{model.vocab_size}; they are not of one checkpoint")
    if (config.device, config.mode) == ("cuda", "consistency"):
        check_gpu_sizes(config, model, topology, len(tokenizer))
    room = model.max_position - config.max_response_len
    if room < 1:
        raise UsageError(f"--max-response-len is {config.max_response_len}, but the model's context is "
                         f"{model.max_position} tokens: lower it below that")
    examples = load_prompts(config.prompts, tokenizer, config.prompt_key, config.answer_key, longest=room)
    longest_prompt = max(len(example.tokens) for example in examples)
    capacity, longest = config.max_tokens_per_gpu * config.cp, longest_prompt + config.max_response_len
    if longest > capacity:
        raise UsageError(f"a sample may have {longest} tokens (prompt {longest_prompt} + --max-response-len "
                         f"{config.max_response_len}), but a pack holds {capacity} (--max-tokens-per-gpu x --cp): "
                         "raise either, or lower --max-response-len")
    memory = plan_memory(config, model, topology, longest_prompt, available_memory(config.device, ranks_here))
    memory.check()
    check_disk(config, model)
    return Preflight(model, topology, tokenizer, examples, memory)


def check_layout(config: RunConfig, world: int, ranks_here: int) -> None:
    """What needs no file of the model: where ranks meet and on what, how they divide, where the evidence goes."""
    check_rendezvous(os.environ)
    Topology.plan(world, 0, config.tp, config.cp, config.engine_tp)
    if config.run_dir:
        require_new(Path(config.run_dir))
    check_operators(config.device, config.mode, ranks_here)


def check_weight_files(directory: Path) -> None:
    """The checkpoint has its weight file, or every file that its index names."""
    names = weight_files(directory)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UsageError(f"{directory} lacks {missing[0]} ({len(missing)} of {len(names)} weight files are missing): "
                         "fetch the checkpoint again")


def check_operators(device: str, mode: str, ranks_here: int) -> None:
    """The device is there, once for each rank, and every operator serves it in this mode."""
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if gpus < ranks_here:
            remedy = "lower --nproc, or use --device cpu" if gpus else "use --device cpu"
            raise UsageError(f"--device cuda needs a GPU for each of the {ranks_here} ranks here, torch sees {gpus}: "
                             f"{remedy}")
    if missing := unserved_operators(device, mode):
        raise UsageError(f"this build has no {mode} backend on {device} for {len(missing)} operators "
                         f"({missing[0]}, ...): use --device cpu")
    if device == "cuda":
        check_architecture()


def check_gpu_sizes(config: RunConfig, model: ModelConfig, topology: Topology, valid_vocab: int) -> None:
    """The GPU operators of the contract serve this dtype and these sizes: their limits, before any of them is called.

    The native arm's plain PyTorch serves all.
    """
    check_triton()
    from rlk.kernels import attention, gemm, norm, operands  # here: they need Triton, which a CPU run does not
    from rlk.ops.gpu_sampler import MOST_IDS

    if config.dtype != "bfloat16":
        raise UsageError(f"--dtype is {config.dtype}, but on a GPU the operators of consistency mode are for bfloat16 "
                         "alone: use --dtype bfloat16, --device cpu, or --mode native")
    D, E, step = model.hidden_size, model.head_dim, operands.MULTIPLE
    leaves = topology.leaves  # the most tensor-parallel ranks as well
    for what, got, good, expected in (
        ("head_dim", E, E in attention.HEAD_DIMS, " or ".join(map(str, attention.HEAD_DIMS))),
        ("hidden_size", D, D % step == 0 and D <= norm.MOST_COLUMNS,
         f"a multiple of {step} up to {norm.MOST_COLUMNS}"),
        ("intermediate_size", model.intermediate_size, model.intermediate_size % (step * leaves) == 0,
         f"a multiple of {step} x {leaves} leaves"),
        ("the vocabulary in whole tiles", model.padded_vocab, model.padded_vocab % (step * leaves) == 0,
         f"a multiple of {step} x {leaves} tensor-parallel ranks"),
        ("the tokenizer's size", valid_vocab, valid_vocab <= MOST_IDS, f"at most {MOST_IDS}"),
        ("the number of leaves (the larger of --tp and --rollout-tp)", leaves, leaves in gemm.LEAVES,
         f"one of {', '.join(map(str, gemm.LEAVES))}"),
    ):
        if not good:
            raise UsageError(f"{what} is {got}, but on a GPU the operators of consistency mode expect {expected}: use "
                             "another model or layout (a tiny model for GPUs: `rlk init-model DIR --head-dim 64`), "
                             "--device cpu, or --mode native")
    for what, size, most, remedy in _gpu_reaches(config, model, topology, operands.MOST_BYTES - 1,
                                                 attention.MOST_PAGED):
        if size > most:
            raise UsageError(f"{what} = {size:,}, but on a GPU the operators of consistency mode expect at most "
                             f"{most:,}: {remedy}")


def _gpu_reaches(config: RunConfig, model: ModelConfig, topology: Topology, most_bytes: int,
                 most_paged: int) -> list[tuple[str, int, int, str]]:
    """(what, size, most, what to do) of all that a kernel addresses in 32 bits and that can be too large.

    The embedding's kernels take a table of any size, but with tied embeddings it is the LM head too.
    """
    D, F, E, page = model.hidden_size, model.intermediate_size, model.head_dim, config.page_size
    matrices = [spec for spec in parameter_specs(model) if spec.name != "embed_tokens" or model.tie_embeddings]

    def weight(tp: int, option: str):
        size, name = max((2 * math.prod(spec.local_shape(tp)), spec.name) for spec in matrices)
        return f"bytes of a rank's part of {name} with {option} {tp}", size, most_bytes, f"raise {option}"

    def activation(tp: int, tokens: int, remedy: str):  # gate and up, q, k and v, or an FP32 partial sum
        width = max(2 * 2 * F // tp, 2 * (model.num_heads + 2 * model.num_kv_heads) * E // tp, 4 * D)
        return f"bytes of the widest activation, {tokens} tokens x {width}", tokens * width, most_bytes, remedy

    sequences = -(-config.rollout_batch_size // topology.engines) * config.samples_per_prompt
    rows, positions = min(config.max_running, sequences), -(-model.max_position // page) * page
    return [
        weight(config.tp, "--tp"),
        weight(config.engine_tp, "--rollout-tp"),
        activation(config.tp, config.max_tokens_per_gpu, "lower --max-tokens-per-gpu, or raise --tp"),
        activation(config.engine_tp, config.prefill_chunk + rows,
                   "lower --prefill-chunk or --max-running, or raise --rollout-tp"),
        # The sampler takes whole rows, whatever the tensor-parallel size.
        (f"bytes of the sampler's logits, {rows} sequences x {model.padded_vocab} ids x 4",
         4 * rows * model.padded_vocab, most_bytes, "lower --max-running"),
        (f"page size x positions, {page} x {positions}", page * positions, most_paged, "lower --page-size"),
    ]


def unserved_operators(device: str, mode: str) -> list[str]:
    """Operators without a backend for the device in this mode."""
    for name in OPERATORS:
        importlib.import_module(f"rlk.ops.{name}")
    return registry.unserved(device, mode)


def check_disk(config: RunConfig, model: ModelConfig) -> None:
    """Room for the evidence, and for the trained model if it is to be saved."""
    tokens = config.steps * config.rollout_batch_size * config.samples_per_prompt * config.max_response_len
    needed = tokens * EVIDENCE_BYTES_PER_TOKEN
    if config.save_model:
        needed += local_parameters(model, 1) * (2 if config.dtype == "bfloat16" else 4)
    folder = Path(config.run_dir or "runs").absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        remedy = "lower --steps" if tokens * EVIDENCE_BYTES_PER_TOKEN > free else "give --no-save-model"
        raise UsageError(f"disk too small: up to {needed >> 20:,} MiB will be written below {folder}, where "
                         f"{free >> 20:,} MiB is free; choose another --run-dir, or {remedy}")
