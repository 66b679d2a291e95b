"""Retained sets for tests, with the log-probs that float64 gives for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

VOCAB = 5000
FIRST = 3  # the offset of the first row: chunks of rows start above 0
SIZES = (1, 2, 31, 64, 255, 256, 257, 700, 2049)
INV_T = float(np.float32(1 / 0.7))


@dataclass(frozen=True)
class Case:
    """Rows of logits and their retained sets, as CSR."""

    logits: np.ndarray  # FP32 [rows, VOCAB]
    offsets: np.ndarray  # int64 [rows + 1]
    ids: np.ndarray  # int32, ascending within a row
    values: np.ndarray  # FP32, unscaled logits
    targets: np.ndarray  # int64 [rows]
    index: np.ndarray  # int64 [rows], of the target among all entries
    grad: np.ndarray  # FP32 [rows]

    @property
    def rows(self) -> int:
        return len(self.targets)

    def row(self, r: int) -> slice:
        return slice(self.offsets[r], self.offsets[r + 1])

    def probabilities(self, r: int) -> np.ndarray:
        """float64, over the row's own set."""
        x = self.values[self.row(r)].astype(np.float64) * INV_T
        weights = np.exp(x - x.max())
        return weights / weights.sum()

    def scores(self) -> np.ndarray:
        """Log-prob, entropy, lse in float64 [3, rows]."""
        result = np.empty((3, self.rows))
        for r in range(self.rows):
            x = self.values[self.row(r)].astype(np.float64) * INV_T
            lse = x.max() + np.log(np.exp(x - x.max()).sum())
            result[:, r] = x[self.index[r] - self.offsets[r]] - lse, lse - self.probabilities(r) @ _finite(x), lse
        return result


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0)


@functools.cache
def make_case(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Case:
    """One row per size. A row of more than 30 ids holds two logits of minus infinity, which have no weight."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((len(sizes), VOCAB)) * 4).astype(np.float32)
    logits[0, ::7] = -0.0
    offsets = FIRST + np.concatenate([[0], np.cumsum(sizes)])
    ids, values = np.full(offsets[-1], -1, np.int32), np.full(offsets[-1], np.nan, np.float32)
    index = np.empty(len(sizes), np.int64)
    for r, size in enumerate(sizes):
        own = slice(offsets[r], offsets[r + 1])
        ids[own] = np.sort(rng.choice(VOCAB, size, replace=False))
        index[r] = offsets[r] + rng.integers(size)
        if size > 30:
            logits[r, ids[own][[5, 17]]] = -np.inf
            index[r] = offsets[r] + 9
        values[own] = logits[r, ids[own]]
    return Case(logits, offsets.astype(np.int64), ids, values, ids[index].astype(np.int64), index,
                rng.standard_normal(len(sizes)).astype(np.float32))
