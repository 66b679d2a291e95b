"""The numerics contract as one frozen object with a fingerprint.

The contract fixes everything that decides the bits of a log-prob on one architecture: reduction orders, block sizes,
the sampling noise, and the software that matters. Ranks all-gather the fingerprint before step 0 and stop when two
differ (`agree`). docs/numerics.md explains each rule; the rule itself stands beside the operator's code.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field

import torch

from rlk.build import triton_version
from rlk.errors import CheckFailed

ATTENTION_BLOCK = 64  # keys per online-softmax block, at absolute positions
ATTENTION_CHUNK = 512  # keys per chunk; chunk states are merged ascending
VOCAB_TILES = 64  # equal vocabulary tiles of the log-prob; tensor-parallel ranks own whole tiles

# Per architecture: what one output element of a matrix product is the sum of, and in which order.
GEMM_CHUNK = {"cpu": 0, "gfx942": 1024, "sm_90": 0}  # K per accumulator, their sums added ascending; 0: all of K
GEMM_RULE = {
    "cpu": "fma, one fp32 accumulator per output element, k ascending, one rounding",
    "gfx942": "mfma 16x16x16 bf16 in fp32, kpack 2, k ascending in chunks, chunk sums ascending, one rounding",
    "sm_90": "mma/wgmma bf16, one fp32 accumulator per output element, k ascending, one rounding",
}


@dataclass(frozen=True)
class Contract:
    """What must be equal on every rank, on both sides of the audit, for the zero to mean anything."""

    architecture: str  # "cpu", "gfx942" or "sm_90"
    dtype: str  # "float32" or "bfloat16": the dtype of weights and activations
    leaves: int  # equal parts of K in a row-parallel GEMM: max(train_tp, rollout_tp)
    gemm: str
    gemm_chunk: int
    row_parallel: str = "leaves in a balanced binary tree, fp32; residual added in fp32; one rounding"
    attention_block: int = ATTENTION_BLOCK
    attention_chunk: int = ATTENTION_CHUNK
    vocab_tiles: int = VOCAB_TILES
    nucleus: str = "temperature, min-p, top-k, top-p; ascending (value, id); drop while cumsum <= 1-p"
    rng: str = "philox4x32-10(seed; sample uid, position)"
    software: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict:
        return asdict(self)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the contract's canonical JSON, in hexadecimal."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def architecture_of(device: str) -> str:
    """The architecture whose bits `device` gives: "cpu"; for "cuda" that of the GPUs torch is built for."""
    if device == "cpu":
        return "cpu"
    return "gfx942" if torch.version.hip else "sm_90"


def make_contract(architecture: str, dtype: torch.dtype, leaves: int, kernels: str, sources: str) -> Contract:
    """Build this rank's contract from the fingerprints of the kernel objects it loaded and of its source files."""
    software = {"torch": torch.__version__, "python": platform.python_version(), "kernels": kernels, "sources": sources}
    if architecture != "cpu":
        software["triton"] = triton_version()  # it compiles half of the kernels
    return Contract(architecture, str(dtype).removeprefix("torch."), leaves, GEMM_RULE[architecture],
                    GEMM_CHUNK[architecture], software=software)


def agree(mine: Contract, all_contracts: list[dict]) -> None:
    """Stop unless every rank's contract equals this one; names the first rank, key and both values that differ.

    `all_contracts` holds every rank's `as_dict()` in rank order (from an all-gather).
    """
    own = mine.as_dict()
    for rank, other in enumerate(all_contracts):
        for key in own:
            if own[key] != other.get(key):
                raise CheckFailed(
                    f"rank {rank} runs under another contract: {key} is {other.get(key)!r} there and "
                    f"{own[key]!r} here; give every rank the same software, kernels and options"
                )
