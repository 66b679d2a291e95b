"""Runs the sampler's and the scan's kernels without a GPU, and torch's scan as numpy.

`on_fibers` lets rlk.ops.gpu_sampler itself run on host tensors; `Emulated*` launch the gfx942 code objects one by one.
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from rlk.ops import cumulative_sum, gpu_sampler
from rlk.rollout.engine import SamplingParams
from tests.gfx942.hip_runs import Emulated, HostFibers

SEGMENT = 4096
COPIES = 8  # kCopies of sampler_draw.cpp


def on_fibers(monkeypatch, fibers: HostFibers) -> None:
    """Until the test ends, the GPU's launchers run on host fibers and take host tensors."""
    for module, names in ((gpu_sampler, ("select", "draw", "greedy", "record", "sizes")), (cumulative_sum, ("sum",))):
        monkeypatch.setattr(module, "ptr", lambda tensor: None if tensor is None else tensor.data_ptr())
        monkeypatch.setattr(module, "stream", lambda: None)
        for name in names:
            launcher, attribute = ((f"sampler_{name}", f"_{name}") if module is gpu_sampler
                                   else ("cumulative_sum", "_cumulative_sum"))
            monkeypatch.setattr(module, attribute, lambda *args, launcher=launcher: fibers.call(launcher, *args))


class EmulatedSampler:
    """One step on the emulator, kernel by kernel as the launchers do; the workspace stays in `states`."""

    def __init__(self, order: str, logits: np.ndarray, params: list[SamplingParams], valid: int,
                 state_bytes: int) -> None:
        self.run = Emulated(order)
        self.rows, self.columns = logits.shape
        self.segments = -(-valid // SEGMENT)
        self.valid, self.params = valid, params
        put = self.run.device.put
        self.states_at = put(np.zeros(self.rows * state_bytes, np.uint8))
        self.state_bytes = state_bytes
        self.step_at = put(np.array([-1]))
        self.rules_at = put(gpu_sampler.rules_of(params).view(np.uint8))
        self.row_args = (put(logits), self.columns, valid, self.segments, self.rules_at, self.states_at)

    def launch(self, kernel: str, *args, rows_only: bool = False) -> None:
        self.run.launch(kernel, "", self.rows if rows_only else self.rows * self.segments, *args)

    @property
    def states(self) -> np.ndarray:
        return self.run.device.get(self.states_at, (self.rows, self.state_bytes), np.uint8)

    def select(self, stages: int) -> None:
        candidates = self.run.device.put(np.zeros(self.rows * self.segments * SEGMENT, np.uint64))
        self.launch("sampler_max", *self.row_args, self.step_at)
        for stage in (0, 1):
            if not stages >> stage & 1:
                continue
            if stage == 1:
                self.launch("sampler_norm", *self.row_args)
            self.launch("sampler_histogram", *self.row_args, stage)
            self.launch("sampler_gather", *self.row_args, candidates, stage)
            self.launch("sampler_resolve", self.segments, self.rules_at, self.states_at, candidates, stage,
                        rows_only=True)

    def draw(self, uids: np.ndarray, positions: np.ndarray, sets: bool) -> dict[str, np.ndarray]:
        """tokens, index, values and, with sets, offsets, ids and masks."""
        put, rows = self.run.device.put, self.rows
        made = {"tokens": np.full(rows, -7), "index": np.full(rows, -7),
                "values": np.full(rows * self.valid if sets else rows, 77, np.float32)}
        if sets:
            made |= {"offsets": np.full(rows + 1, -7), "ids": np.full(rows * self.valid, -7, np.int32),
                     "masks": np.full(rows * self.segments * SEGMENT // 32, 7, np.uint32)}
        self.at = {name: put(array) for name, array in made.items()}
        self.launch("sampler_count", *self.row_args)
        self.launch("sampler_write", *self.row_args, put(uids), put(positions),
                    *(self.at.get(name, 0) for name in ("tokens", "index", "offsets", "ids", "values", "masks")))
        return {name: self.run.device.get(self.at[name], array.shape, array.dtype) for name, array in made.items()}

    def greedy(self) -> dict[str, np.ndarray]:
        made = {"tokens": np.full(self.rows, -7), "index": np.full(self.rows, -7),
                "values": np.full(self.rows, 77, np.float32)}
        at = {name: self.run.device.put(array) for name, array in made.items()}
        self.launch("sampler_greedy", *self.row_args, at["tokens"], at["index"], at["values"], rows_only=True)
        return {name: self.run.device.get(at[name], array.shape, array.dtype) for name, array in made.items()}

    def record(self, logprobs: np.ndarray, steps: int, words: int) -> dict[str, np.ndarray]:
        """After `draw` with sets: the log's arrays."""
        made = {"cursors": np.zeros(steps + 1, np.int64), "counts": np.full(steps * self.rows, -7, np.int32),
                "tokens": np.full(steps * self.rows, -7, np.int32),
                "logprobs": np.full(steps * self.rows, 77, np.float32), "words": np.full(words, 7, np.uint32)}
        at = {name: self.run.device.put(array) for name, array in made.items()}
        log = struct.pack("<8q", self.step_at, steps, words, *at.values())
        self.run.launch("sampler_record", "", self.rows * COPIES, log, self.segments, -(-self.valid // 32),
                        self.at["tokens"], self.run.device.put(logprobs), self.at["offsets"], self.at["ids"],
                        self.at["masks"])
        return {name: self.run.device.get(at[name], array.shape, array.dtype) for name, array in made.items()}


def emulated_sum(order: str, x: np.ndarray) -> np.ndarray:
    """The scan's three kernels on the emulator."""
    run, (rows, columns) = Emulated(order), x.shape
    tiles = -(-columns // cumulative_sum.TILE)
    at, out = run.device.put(x), run.device.put(np.full_like(x, 77))
    runs = run.device.put(np.full((rows, tiles, cumulative_sum.RUNS), 77, np.float32))
    run.launch("scan_subtrees", "", rows * tiles, at, columns, tiles, out, runs)
    run.launch("scan_spine", "", rows, tiles, runs)
    run.launch("scan_prefixes", "", rows * tiles, columns, tiles, runs, out)
    return run.device.get(out, x.shape, np.float32)


def torch_scan(x: np.ndarray, lanes: int = 512) -> np.ndarray:
    """What torch's GPU kernel does with a row for each workgroup: 2 * lanes columns at a time, carry in the first."""
    out, carry = np.empty_like(x), np.zeros(len(x), np.float32)
    with np.errstate(all="ignore"):
        for first in range(0, x.shape[1], 2 * lanes):
            part = x[:, first:first + 2 * lanes]
            tile = np.zeros((len(x), 2 * lanes), np.float32)
            tile[:, :part.shape[1]] = part
            tile[:, 0] = tile[:, 0] + carry
            thread = np.arange(lanes)
            for level in range(int(np.log2(2 * lanes))):
                base = thread >> level << (level + 1) | 1 << level
                target = base + thread % (1 << level)
                tile[:, target] = tile[:, target] + tile[:, base - 1]
            out[:, first:first + 2 * lanes] = tile[:, :part.shape[1]]
            carry = tile[:, -1]
    return out


def scan_rows(rows: int, columns: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of several kinds, FP32 [rows, columns]."""
    rng = np.random.default_rng(seed)
    uniform, normal = rng.random((rows, columns)), rng.standard_normal((rows, columns))
    peaked = np.exp(normal * 8 - (normal * 8).max(1, keepdims=True))
    special = normal.copy()
    special[:, columns // 3] = np.inf
    special[0, columns // 2] = -np.inf
    special[-1, columns // 5] = np.nan
    zeros = np.where(uniform < 0.5, -0.0, uniform)
    zeros[:, :7] = -0.0
    kinds = {"uniform": uniform, "normal": normal, "peaked": peaked / peaked.sum(1, keepdims=True),
             "sorted": np.sort(peaked / peaked.sum(1, keepdims=True)), "denormal": uniform * 1e-42, "special": special,
             "negative zero": zeros, "large": normal * 3e38}
    with np.errstate(over="ignore"):
        return {name: values.astype(np.float32) for name, values in kinds.items()}


def same_sums(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits; a NaN's payload is the processor's own, so there only the place counts."""
    nan = np.isnan(a)
    return bool((nan == np.isnan(b)).all()) and a[~nan].tobytes() == b[~nan].tobytes()


def sampling_case(rows: int, columns: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    """Logits FP32 [rows, columns]: the second row has ties, the third holes of minus infinity."""
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    logits[1::3] = (logits[1::3] * 2).round() / 2
    logits[2::3, ::3] = -torch.inf
    return logits


def keys(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(uids, positions), int64 [rows]."""
    return torch.arange(rows) + (5 << 40), torch.arange(rows) * 3 + 7
