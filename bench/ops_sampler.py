"""Times the sampler and the cumulative scan on one GPU, in CUDA graphs.

    scan_speedup_b4        torch.cumsum's time over ours, 4 rows of 152,064
    sampler_ms_b8          logits to token, log-prob and retained set in the log; 8 rows of 151,936, T 0.7, top-p 0.95
    sampler_KIND_ms_b8     the same for flat logits (most of the vocabulary retained), top-k and top-p, the whole
                           vocabulary, and greedy
"""

from __future__ import annotations

import torch
from timing import Arm, measure

from rlk.ops import cumulative_sum
from rlk.ops.gpu_sampler import GpuSampler
from rlk.rollout.engine import SamplingParams

VOCABULARY, VALID = 151_936, 151_669
NUCLEUS = SamplingParams(temperature=0.7, top_p=0.95)
KINDS = {  # name -> parameters, standard deviation of the logits
    "": (NUCLEUS, 3.0),
    "flat_": (NUCLEUS, 1.0),
    "top_k_": (SamplingParams(temperature=0.7, top_k=20, top_p=0.95), 3.0),
    "whole_": (SamplingParams(temperature=1.0), 3.0),
    "greedy_": (SamplingParams(temperature=0.0), 3.0),
}


def figures() -> dict[str, float]:
    found = {f"scan_speedup_b{rows}": _scan(rows) for rows in (2, 4, 7)}
    for rows in (1, 8, 64):
        for kind, (params, deviation) in KINDS.items():
            if rows == 8 or not kind:
                found[f"sampler_{kind}ms_b{rows}"] = _sampler(rows, params, deviation) / 1e3
    return found


def _scan(rows: int) -> float:
    x_BV = (torch.randn(rows, 152_064, device="cuda") * 3).softmax(1).sort(1).values
    times = measure([Arm("torch", lambda: torch.cumsum(x_BV, 1)),
                     Arm("ours", lambda: cumulative_sum.cumulative_sum_tiled(x_BV))], graph=True, repeats=10)
    print(f"scan of {rows} rows: torch {times['torch']:.1f} us, ours {times['ours']:.1f} us")
    return times["torch"] / times["ours"]


def _sampler(rows: int, params: SamplingParams, deviation: float) -> float:
    """Microseconds of a step."""
    logits_BV = torch.randn(rows, VOCABULARY, device="cuda") * deviation
    uids_B, positions_B = torch.arange(rows, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
    sampler = GpuSampler(rows, VOCABULARY, VALID, params, steps=2, log_words=2 * rows * (VOCABULARY // 32),
                         device=logits_BV.device)

    def step():
        sampler.reset()
        sampler.step(logits_BV, uids_B, positions_B)

    time = measure([Arm("ours", step)], graph=True, repeats=10)["ours"]
    sets = sampler.read().sets
    retained = f", {len(sets[0][0])} ids retained in the first row" if sets else ""
    print(f"sampler, {rows} rows, {params}: {time:.1f} us{retained}")
    return time
