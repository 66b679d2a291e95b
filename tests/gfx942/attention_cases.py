"""Batches for the attention kernels' tests, and the forward rule row by row in numpy."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlk.kernels import attention
from tests.gfx942.numerics import from_bf16, random_bf16, to_bf16

f32 = np.float32


@dataclasses.dataclass
class Batch:
    """Queries, keys in rows (source after source), and segments (row_start, row_count, position_start, source)."""

    q: np.ndarray  # [T, H, E]
    k: np.ndarray  # [U, G, E]
    v: np.ndarray
    segments: np.ndarray
    lengths: list[int]  # keys of each source

    @property
    def starts(self):
        return np.cumsum([0, *self.lengths[:-1]]).astype(np.int32)

    @property
    def group(self):
        return self.q.shape[1] // self.k.shape[1]


def draw(seed, segments, lengths, group, G, E):
    rng = np.random.default_rng(seed)
    segments = np.array(segments, np.int32)
    T, U = segments[:, 1].sum(), sum(lengths)
    return Batch(random_bf16(rng, T, group * G, E, scale=1.5), random_bf16(rng, U, G, E, scale=1.5),
                 random_bf16(rng, U, G, E), segments, lengths)


def rows_of(batch):
    """(query row, kv head, head, the key rows it sees) of every query row and head."""
    for row_start, count, position, source in batch.segments:
        for row in range(count):
            for head in range(batch.q.shape[1]):
                keys = slice(batch.starts[source], batch.starts[source] + position + row + 1)
                yield row_start + row, head // batch.group, head, keys


def exp2(x):
    """v_exp_f32, which gives zero instead of subnormals."""
    y = np.exp2(x.astype(float)).astype(f32)
    return np.where(y < np.finfo(f32).tiny, f32(0), y)


def fma(a, b, c):
    return (a.astype(float) * b + c).astype(f32)


def accumulate(weights, values, start):
    """start + the sum of weights[i] values[i], i ascending, each sum rounded to FP32."""
    for weight, value in zip(weights, values, strict=True):
        start = (start + weight * value).astype(f32)
    return start


def rule(batch, block=64, chunk=512):
    """(o, lse) by the rule at the top of triton/attention_rule.py, row by row."""
    o, lse = np.zeros(batch.q.shape, np.uint16), np.zeros(batch.q.shape[:2], f32)
    E = batch.q.shape[2]
    scale = f32(attention.logit_scale(E))
    empty = f32(-np.inf), np.zeros(E + 1, f32)  # the maximum; the sums of v and, last, of ones
    for row, kv_head, head, keys in rows_of(batch):
        q, k, v = (from_bf16(x) for x in (batch.q[row, head], batch.k[keys, kv_head], batch.v[keys, kv_head]))
        products = accumulate(q, k.T, np.zeros(len(k), f32))
        v = np.concatenate([v, np.ones((len(v), 1), f32)], 1)
        total = empty
        for first in range(0, len(k), chunk):
            m, sums = empty
            for start in range(first, min(first + chunk, len(k)), block):
                part = slice(start, min(start + block, first + chunk))
                higher = np.maximum(m, products[part].max() * scale)
                p = from_bf16(to_bf16(exp2(fma(products[part], scale, -higher))))
                sums = accumulate(p, v[part], sums * exp2(m - higher))
                m = higher
            higher = np.maximum(total[0], m)
            total = higher, fma(sums, exp2(m - higher), total[1] * exp2(total[0] - higher))
        m, sums = total
        o[row, head], lse[row, head] = to_bf16((sums[:-1] + f32(0)) / sums[-1]), m + np.log2(sums[-1])
    return o, lse
