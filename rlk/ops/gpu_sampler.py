"""Drawing tokens on a GPU: the kernels of hipkernels/gpu/sampler_*.cpp, for one call (`draw`) and for graphs.

The rule is that of ops/sampler.py. A row's set and token depend on its own logits and rule alone. Against the CPU they
can differ where a cumulative sum meets its limit within rounding: top-p's sum is exact in multiples of 2**-62 here, a
double there; a token's in multiples of 2**-44. The exponentials are the same.

`GpuSampler` allocates once, so that a step can be captured in a CUDA graph, and nothing of it waits for the host:
tokens, log-probs and retained sets pile up in a log on the device, which the host reads at the end of a request. A set
goes there as its ids, or as a bit mask of the vocabulary where that is shorter: at most one bit an id, row and step.

Shape legend: B rows, V columns (padded vocabulary), S steps, N entries of retained sets.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlk.contract import VOCAB_TILES
from rlk.errors import CheckFailed
from rlk.ops.gpu_library import INT, LONG, POINTER, function, ptr, stream
from rlk.ops.logprob import Support
from rlk.ops.registry import registry
from rlk.rollout.engine import SamplingParams

RULE = np.dtype([("inv_t", "<f4"), ("min_p", "<f4"), ("top_k", "<i8"), ("drop_limit", "<u8"), ("seed", "<u8")])
PROBABILITY_BITS = 62  # kProbabilityBits in hipkernels/gpu/sampler.h
MOST_IDS = 64 * 4096  # kMostSegments * kSegment
TOP_K, TOP_P = 1, 2  # what rlk_gpu_sampler_select is asked for

_sizes = function("rlk_gpu_sampler_sizes", POINTER, POINTER)
_select = function("rlk_gpu_sampler_select", POINTER, LONG, LONG, LONG, POINTER, INT, *[POINTER] * 4)
_draw = function("rlk_gpu_sampler_draw", POINTER, LONG, LONG, LONG, *[POINTER] * 11)
_greedy = function("rlk_gpu_sampler_greedy", POINTER, LONG, LONG, LONG, *[POINTER] * 6)
_record = function("rlk_gpu_sampler_record", POINTER, LONG, LONG, *[POINTER] * 5, LONG, LONG, *[POINTER] * 6)


# ---- the rules of rows ----


@functools.cache
def drop_limit(top_p: float) -> int:
    """The largest sum of probabilities, times 2**62, that top-p drops: FP32(sum) <= 1 - top_p. 0: top-p is off."""
    drop_up_to = np.float32(1) - np.float32(top_p)
    if drop_up_to <= 0:
        return 0
    low, high = 0, 1 << PROBABILITY_BITS  # dropped, kept
    while high - low > 1:
        middle = (low + high) // 2
        dropped = np.float32(middle * 2.0**-PROBABILITY_BITS) <= drop_up_to
        low, high = (middle, high) if dropped else (low, middle)
    return low


def rules_of(params: Sequence[SamplingParams]) -> np.ndarray:
    """The kernels' rule of each row, RULE [B]."""
    rules = np.zeros(len(params), RULE)
    for rule, row in zip(rules, params, strict=True):
        rule["inv_t"] = 1.0 if row.greedy else 1.0 / row.temperature
        rule["min_p"], rule["top_k"], rule["drop_limit"] = row.min_p, row.top_k, drop_limit(row.top_p)
        rule["seed"] = row.seed & 0xFFFFFFFFFFFFFFFF
    return rules


@functools.lru_cache(maxsize=64)
def _device_rules(params: SamplingParams, rows: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rules_of([params]).repeat(rows).view(np.uint8)).to(device)


def _stages(params: Sequence[SamplingParams]) -> int:
    return (TOP_K if any(row.top_k for row in params) else 0) | (TOP_P if any(drop_limit(row.top_p) for row in params)
                                                                 else 0)


# ---- one call ----


@functools.cache
def _state_bytes() -> tuple[int, int]:
    """Bytes of a row's workspace, and ids of a segment."""
    sizes = ctypes.c_int64(), ctypes.c_int64()
    _sizes(*(ctypes.addressof(size) for size in sizes))
    return sizes[0].value, sizes[1].value


def _segments(valid_vocab: int) -> int:
    return -(-valid_vocab // _state_bytes()[1])


class _Workspace:
    """What the kernels need beside their results, for so many rows."""

    def __init__(self, rows: int, valid_vocab: int, stages: int, device: torch.device) -> None:
        state_bytes, segment = _state_bytes()
        self.states = torch.empty(rows * state_bytes, dtype=torch.uint8, device=device)
        # Pairs of what lies in the bin of the cut: at worst the whole row.
        self.candidates = torch.empty(rows * _segments(valid_vocab) * segment if stages else 0, dtype=torch.int64,
                                      device=device)


def _check(logits_BV: torch.Tensor, uids_B: torch.Tensor, positions_B: torch.Tensor, valid_vocab: int) -> None:
    shape = tuple(logits_BV.shape)
    if logits_BV.dtype != torch.float32 or len(shape) != 2 or not 0 < valid_vocab <= min(shape[1], MOST_IDS):
        raise ValueError(f"got {logits_BV.dtype} logits {shape} with {valid_vocab} valid ids, expected FP32 "
                         f"[rows, ids] and 1 to all of the ids, at most {MOST_IDS}")
    for name, keys in (("uids", uids_B), ("positions", positions_B)):
        if keys.dtype != torch.int64 or keys.shape != logits_BV.shape[:1] or keys.device != logits_BV.device:
            raise ValueError(f"got {name} {keys.dtype} {tuple(keys.shape)} on {keys.device}, expected int64 "
                             f"{tuple(logits_BV.shape[:1])} on {logits_BV.device}")


def draw(logits_BV: torch.Tensor, params: SamplingParams, uids_B: torch.Tensor, positions_B: torch.Tensor,
         valid_vocab: int) -> tuple[torch.Tensor, Support | None]:
    """(tokens int64 [B], retained sets | None) of full FP32 logits on the GPU, as the operator `draw` on the CPU.

    Where there are sets the host waits once, for their size.
    """
    _check(logits_BV, uids_B, positions_B, valid_vocab)
    rows, device = logits_BV.shape[0], logits_BV.device
    rules, sets = _device_rules(params, rows, device), not params.full_vocabulary
    stages = _stages([params]) if sets else 0
    work = _Workspace(rows, valid_vocab, stages, device)
    tokens, index = torch.empty_like(uids_B), torch.empty_like(uids_B)
    capacity = rows * valid_vocab if sets else rows
    values_N = torch.empty(capacity, device=device)
    row_args = ptr(logits_BV), *logits_BV.shape, valid_vocab, ptr(rules)
    _select(*row_args, stages, ptr(work.states), ptr(work.candidates), None, stream())
    if params.greedy:
        _greedy(*row_args, ptr(work.states), ptr(tokens), ptr(index), ptr(values_N), stream())
        return tokens, None
    offsets = uids_B.new_zeros(rows + 1) if sets else None
    ids_N = torch.empty(capacity, dtype=torch.int32, device=device) if sets else None
    _draw(*row_args, ptr(work.states), ptr(uids_B), ptr(positions_B), ptr(tokens), ptr(index), ptr(offsets),
          ptr(ids_N), ptr(values_N), None, stream())
    return tokens, (offsets, ids_N[:int(offsets[-1])].clone()) if sets else None


# ---- graphs: everything allocated once, results in a log ----


@dataclass(frozen=True)
class SampledSteps:
    """What `GpuSampler.read` found: S steps of B rows, on the host."""

    tokens: np.ndarray  # int32 [S, B]
    logprobs: np.ndarray  # float32 [S, B]
    sets: list[list[np.ndarray]] | None  # [S][B] int32 ids, ascending; None: the whole vocabulary


class GpuSampler:
    """Samples a fixed batch step after step, without the host.

    rows         B
    columns      V, of the logits
    valid_vocab  ids from here on do not exist
    params       one for all rows, or one a row: they may differ in top_p, top_k, min_p and seed
    steps        most steps between two `reset`s
    log_words    32-bit words of the log of retained sets; `steps_left` says how many steps are sure to fit
    """

    def __init__(self, rows: int, columns: int, valid_vocab: int, params: SamplingParams | Sequence[SamplingParams], *,
                 steps: int, log_words: int, device: torch.device) -> None:
        if not 0 < valid_vocab <= min(columns, MOST_IDS) or rows < 1 or steps < 1:
            raise ValueError(f"got {rows} rows, {steps} steps and {valid_vocab} valid ids over {columns}, expected at "
                             f"least one row and step, and 1 to all of the ids, at most {MOST_IDS}")
        each = [params] * rows if isinstance(params, SamplingParams) else list(params)
        self.greedy, self.sets = each[0].greedy, not each[0].full_vocabulary
        self.temperature = each[0].score_temperature
        self.stages = _stages(each) if self.sets else 0
        self.rows, self.columns, self.valid_vocab, self.steps, self.device = rows, columns, valid_vocab, steps, device
        self.mask_words = -(-valid_vocab // 32)
        self._rules = torch.empty(rows * RULE.itemsize, dtype=torch.uint8, device=device)
        self.set_params(each)
        self._work = _Workspace(rows, valid_vocab, self.stages, device)

        def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        entries = rows * valid_vocab if self.sets else rows
        self._tokens, self._index = empty(rows, torch.int64), empty(rows, torch.int64)
        self._values_N = empty(entries, torch.float32)
        self._offsets = self._ids_N = self._masks = None
        if self.sets:
            self._offsets = torch.zeros(rows + 1, dtype=torch.int64, device=device)
            self._ids_N = empty(entries, torch.int32)
            self._masks = empty(rows * _segments(valid_vocab) * _state_bytes()[1] // 32, torch.int32)
        self._step = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._cursors = torch.zeros(steps + 1, dtype=torch.int64, device=device)
        self._counts, self._tokens_log = empty(steps * rows, torch.int32), empty(steps * rows, torch.int32)
        self._logprobs_log, self._words = empty(steps * rows, torch.float32), empty(log_words, torch.int32)

    def set_params(self, params: Sequence[SamplingParams]) -> None:
        """The rows' rules from the next step on, captured steps included. Raises ValueError where that cannot be."""
        kinds = {(row.greedy, row.full_vocabulary, row.score_temperature) for row in params}
        if len(params) != self.rows or kinds != {(self.greedy, not self.sets, self.temperature)} or (
                self.sets and _stages(params) & ~self.stages):
            raise ValueError(f"got {len(params)} rows of (greedy, whole vocabulary, temperature) {sorted(kinds)} with "
                             f"stages {_stages(params)}, expected {self.rows} of "
                             f"{(self.greedy, not self.sets, self.temperature)} with stages within {self.stages}; "
                             "make another sampler for them")
        self._rules.copy_(torch.from_numpy(rules_of(params).view(np.uint8)))

    def step(self, logits_BV: torch.Tensor, uids_B: torch.Tensor,
             positions_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queues one step: (tokens int64 [B], log-probs FP32 [B]), on the device and overwritten by the next step.

        uids_B and positions_B (int64) key the noise, as in ops/sampler.py. A token is -1 for a row that holds a NaN, a
        +inf or nothing finite, until `read` raises for it. A log-prob has the bits of ops.logprob.score.
        """
        _check(logits_BV, uids_B, positions_B, self.valid_vocab)
        if logits_BV.shape != (self.rows, self.columns):
            raise ValueError(f"got logits {tuple(logits_BV.shape)}, expected {(self.rows, self.columns)}")
        row_args = ptr(logits_BV), self.rows, self.columns, self.valid_vocab, ptr(self._rules)
        results = ptr(self._tokens), ptr(self._index)
        _select(*row_args, self.stages, ptr(self._work.states), ptr(self._work.candidates), ptr(self._step), stream())
        if self.greedy:
            _greedy(*row_args, ptr(self._work.states), *results, ptr(self._values_N), stream())
        else:
            _draw(*row_args, ptr(self._work.states), ptr(uids_B), ptr(positions_B), *results, ptr(self._offsets),
                  ptr(self._ids_N), ptr(self._values_N), ptr(self._masks), stream())
        logprobs_B = self._score(logits_BV)
        _record(ptr(self._step), self.steps, self._words.numel(), ptr(self._cursors), ptr(self._counts),
                ptr(self._tokens_log), ptr(self._logprobs_log), ptr(self._words), self.rows, self.valid_vocab,
                ptr(self._tokens), ptr(logprobs_B), ptr(self._offsets), ptr(self._ids_N), ptr(self._masks), stream())
        return self._tokens, logprobs_B

    def _score(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """The scorer's own operators; sampler_write has picked the logits."""
        inv_temperature = 1.0 / self.temperature
        if self.sets:
            return registry.call("support_score", self._values_N, self._values_N, self._offsets, self._index,
                                 inv_temperature)[0]
        stats = registry.call("tile_stats", logits_BV, logits_BV, VOCAB_TILES, 0, self.valid_vocab, inv_temperature)
        return registry.call("merge_tiles", stats, stats, self._values_N, inv_temperature)[0]

    def steps_left(self) -> int:
        """Steps that are sure to fit into the log; waits for the device."""
        done = int(self._step) + 1
        if not self.sets:
            return self.steps - done
        free = self._words.numel() - int(self._cursors[min(done, self.steps)])
        return min(self.steps - done, free // (self.rows * self.mask_words))

    def read(self) -> SampledSteps:
        """All steps since the last `reset`; waits for the device.

        Raises CheckFailed where the log was too small, or a row could not be sampled.
        """
        done = int(self._step) + 1
        used = int(self._cursors[min(done, self.steps)])
        if done > self.steps or used > self._words.numel():
            raise CheckFailed(f"the sampler's log holds {self.steps} steps and {self._words.numel()} words, and {done} "
                              f"steps took {used} words or more; read and reset it while steps_left() is above 0")
        shape, entries = (done, self.rows), done * self.rows
        tokens_SB, logprobs_SB, counts_SB = (log[:entries].cpu().numpy().reshape(shape) for log in (
            self._tokens_log, self._logprobs_log, self._counts))
        if (tokens_SB < 0).any():
            step, row = (int(i) for i in np.argwhere(tokens_SB < 0)[0])
            raise CheckFailed(f"the logits of row {row} at step {step} hold a NaN, a +inf or nothing finite, expected "
                              "finite numbers; the weights or the activations overflowed")
        sets = self._sets(counts_SB, self._words[:used].cpu().numpy()) if self.sets else None
        return SampledSteps(tokens_SB, logprobs_SB, sets)

    def reset(self) -> None:
        """Empty the log; queued on the current stream."""
        self._step.fill_(-1)

    def _sets(self, counts_SB: np.ndarray, words: np.ndarray) -> list[list[np.ndarray]]:
        if not counts_SB.size:
            return []
        ends = np.minimum(counts_SB, self.mask_words).cumsum()
        pieces = np.split(words, ends[:-1])
        sets = [piece if count <= self.mask_words
                else np.unpackbits(piece.view(np.uint8), bitorder="little").nonzero()[0].astype(np.int32)
                for piece, count in zip(pieces, counts_SB.reshape(-1).tolist(), strict=True)]
        return [sets[start:start + self.rows] for start in range(0, len(sets), self.rows)]
