"""The memory plan: what one rank will hold, item by item, before anything is allocated.

Legend: T tokens of a micro-batch on one rank, D hidden size, F intermediate, H query heads, G key/value heads (all of
this rank), E head dim, V padded vocabulary, S page size, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from rlk.collectives import routes
from rlk.collectives.ipc_library import SIZES, segment_bytes
from rlk.config import RunConfig
from rlk.errors import UsageError
from rlk.model.config import ModelConfig
from rlk.model.qwen3 import parameter_specs
from rlk.ops.logprob import CHUNK_TOKENS
from rlk.topology import PATIENCE_S, Topology

GIB = 1 << 30
PROCESS_BYTES = GIB // 2  # Python, torch and the kernels, resident in each rank (measured: 0.4 GiB on a CPU)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one rank needs, by item, and what it has."""

    items: dict[str, int]
    remedies: dict[str, str]  # of each item, what makes it smaller
    available: int
    kv_pages: int  # pages of the KV cache: all that the run can use, or as many as memory_fraction allows

    @property
    def total(self) -> int:
        return sum(self.items.values())

    def check(self) -> None:
        """Raise UsageError, with the sum, unless the plan fits."""
        if self.total > self.available:
            parts = " + ".join(f"{name} {gib(size)}" for name, size in self.items.items())
            largest = max(self.items, key=self.items.__getitem__)
            raise UsageError(
                f"does not fit in memory: {parts} = {gib(self.total)} on each rank, but {gib(self.available)} is "
                f"available; most goes to {largest}: {self.remedies[largest]}")


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def plan_memory(config: RunConfig, model: ModelConfig, topology: Topology, longest_prompt: int,
                available: int) -> MemoryPlan:
    """Plan one rank's memory; `available` is what it may use, in bytes, and `longest_prompt` is in tokens.

    Raises UsageError when not even one sequence of full length fits in the KV pages; `MemoryPlan.check` judges the sum.
    """
    width = 2 if config.dtype == "bfloat16" else 4
    parameters = local_parameters(model, topology.tp)
    longest = longest_prompt + config.max_response_len
    tokens = max(config.max_tokens_per_gpu, -(-longest // topology.cp))
    items = {
        "process": PROCESS_BYTES,
        "weights": parameters * width,
        "gradients (fp32)": parameters * 4,
        "optimizer (fp32 master, two moments)": 12 * -(-parameters // (topology.dp * topology.cp)),
    }
    if config.kl_coef > 0:
        items["reference model"] = parameters * width
    if config.engine_tp != topology.tp:
        items["engine's own weights"] = local_parameters(model, config.engine_tp) * width
    sequences = -(-config.rollout_batch_size // topology.engines) * config.samples_per_prompt
    running = min(sequences, config.max_running)
    prefilled = min(config.prefill_chunk, running * longest)
    trained = activation_bytes(config, model, topology, tokens, width)
    items["activations"] = max(trained, layer_bytes(model, config.engine_tp, prefilled + running, width))
    if config.device == "cuda" and config.mode == "consistency":
        items["collectives"] = sum(segment_bytes(SIZES, world) for world in _ipc_groups(config, topology))
    scored = min(tokens, CHUNK_TOKENS)
    rows = max(scored, running)
    items["logits"] = 4 * rows * 4 * model.padded_vocab  # fp32; the whole row is sorted in sampling, with its indices

    kv_heads = model.num_kv_heads // config.engine_tp
    page_bytes = 2 * model.num_layers * config.page_size * kv_heads * model.head_dim * width
    pages_of_one = -(-longest // config.page_size)
    wanted = pages_of_one * running
    allowed = int(available * config.memory_fraction) // page_bytes
    if allowed < pages_of_one:
        raise UsageError(
            f"one sequence of {longest} tokens needs {pages_of_one} KV pages of {page_bytes:,} bytes, but "
            f"--memory-fraction {config.memory_fraction} of {gib(available)} holds {allowed}; raise it, raise "
            "--rollout-tp, or lower --max-response-len")
    pages = min(wanted, allowed)
    items["KV pages"] = pages * page_bytes
    remedies = _remedies(config, items["activations"] > trained, running > scored, scored)
    return MemoryPlan(items, remedies, available, pages)


def _remedies(config: RunConfig, prefill_leads: bool, sampling_leads: bool, scored: int) -> dict[str, str]:
    """Of each item, what makes it smaller."""
    gpu = config.device == "cuda"
    fewer_weights = "raise --tp" if gpu else "take a smaller model or a larger host, whose memory all ranks share"
    less_training = "lower --max-tokens-per-gpu" + ("" if config.recompute else ", or give --recompute")
    return {
        "process": "use fewer ranks on this node",
        "weights": fewer_weights,
        "gradients (fp32)": fewer_weights,
        "optimizer (fp32 master, two moments)": "raise --tp or --nproc" if gpu else fewer_weights,
        "reference model": "set --kl-coef 0",
        "engine's own weights": "make --rollout-tp equal to --tp",
        "activations": "lower --prefill-chunk" if prefill_leads else less_training,
        "collectives": "use fewer ranks in a group",
        "logits": "lower --max-running" if sampling_leads else f"lower --max-tokens-per-gpu below {scored}",
        "KV pages": "lower --memory-fraction",
    }


def _ipc_groups(config: RunConfig, topology: Topology) -> list[int]:
    """Ranks of each of this rank's communicators that GPU IPC may serve: those that topology.connect makes."""
    patient = max(config.timeout, PATIENCE_S)
    groups = {(tuple(ranks), config.timeout) for ranks in (topology.tp_ranks, topology.cp_ranks, topology.engine_ranks)}
    groups |= {(tuple(ranks), patient) for ranks in (topology.grad_ranks, topology.world_ranks)}
    return [len(ranks) for ranks, _ in groups if len(ranks) in routes.WORLDS]


def local_parameters(model: ModelConfig, tp: int) -> int:
    """Elements of one tensor-parallel rank's shard."""
    return sum(math.prod(spec.local_shape(tp)) for spec in parameter_specs(model))


def activation_bytes(config: RunConfig, model: ModelConfig, topology: Topology, tokens: int, width: int) -> int:
    """What one micro-batch keeps for its backward pass, an upper estimate.

    Without recompute every layer keeps what `layer_bytes` counts; with it the residual and its norm, plus one whole
    layer at a time (twice: its gradients). Keys and values are gathered over cp.
    """
    layer = layer_bytes(model, topology.tp, tokens, width)
    layer += 2 * tokens * topology.cp * (model.num_kv_heads // topology.tp) * model.head_dim * width
    if config.recompute:
        return model.num_layers * tokens * 2 * model.hidden_size * width + 2 * layer
    return (model.num_layers + 1) * layer


def layer_bytes(model: ModelConfig, tp: int, tokens: int, width: int) -> int:
    """Bytes that one layer makes of so many tokens on one of `tp` ranks, `width` bytes an activation.

    Its norms' inputs and outputs, qkv, heads, attention output, gate-up and SwiGLU, and two FP32 partial sums.
    """
    D, F, E = model.hidden_size, model.intermediate_size // tp, model.head_dim
    H, G = model.num_heads // tp, model.num_kv_heads // tp
    return tokens * (width * (4 * D + 2 * (H + 2 * G) * E + H * E + 3 * F) + 4 * 2 * D)


def available_memory(device: str, ranks_here: int) -> int:
    """Bytes that one rank may use: its GPU's free memory, or its share of this host's (or container's) free RAM."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free = min(free, limit - used)
    return free // ranks_here


def peak_memory(device: torch.device) -> int:
    """The most bytes of tensors on this GPU so far, without the driver's and the collectives' own; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _number(path: Path) -> int | None:
    """A cgroup's figure; None where there is no such file or no limit ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
