"""The CPU GEMM against torch's (MKL), and the rate at which one core reads weights.

    OMP_NUM_THREADS=1 .venv/bin/python bench/cpu_gemm.py

FP32, one thread, the five weight shapes of bench/cpu_step.py's model. Sixteen copies of each weight are used in
turn, so that none is still near from the call before, as in a decode step. Ours and torch's alternate call by call,
each order in half of the rounds, and never use the copy that the other has just read. Figures are medians;
`..._over_torch` is our time over torch's: below 1 we are faster.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F
from record import write_result

from rlk.ops.gemm import linear

SHAPES = [(1024, 256), (256, 256), (1536, 256), (256, 768), (512, 256)]  # N, K: qkv, o, gate-up, down, lm_head
ROUNDS = 64


def alternate(*calls) -> list[float]:
    """Median seconds of each call over ROUNDS rounds, after two rounds of warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(ROUNDS + 2):
        order = list(zip(calls, times, strict=True))
        for call, spent in order if i % 2 else order[::-1]:
            start = time.perf_counter()
            call(i)
            spent.append(time.perf_counter() - start)
    return [statistics.median(spent[2:]) for spent in times]


def main() -> None:
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for M in (1, 8, 32, 64, 2208):
        ours = theirs = work = 0.0
        for N, K in SHAPES:
            x = torch.randn(M, K)
            weights = [torch.randn(N, K) for _ in range(16)]
            mine, its = alternate(lambda i, x=x, w=weights: linear(x, w[i % 16]),
                                  lambda i, x=x, w=weights: F.linear(x, w[(i + 8) % 16]))
            ours, theirs, work = ours + mine, theirs + its, work + 2 * M * N * K
        figures[f"gemm_m{M}_over_torch"] = ours / theirs
        figures[f"gemm_m{M}_gflops"] = work / ours / 1e9
        figures[f"torch_m{M}_gflops"] = work / theirs / 1e9
    far = torch.randn(64 << 20)  # 256 MiB, beyond every cache
    figures["read_gb_per_s"] = far.nbytes / alternate(lambda _: far.sum())[0] / 1e9
    write_result("cpu_gemm", "OMP_NUM_THREADS=1 python bench/cpu_gemm.py", figures)


if __name__ == "__main__":
    main()
