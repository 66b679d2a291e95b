"""Times the row operators on one GPU: at 4096 rows against the copy bandwidth, at 8 rows in microseconds.

Every figure is the median over replays of one captured graph of many calls, so that no launch is in it. At 4096 rows
the calls go round operands that do not fit in the L2 cache together. Keys: rows_NAME_of_copy (1: as fast as a copy of
as many bytes) and rows_NAME_us_at_8. `PYTHONPATH=. python bench/ops_rows.py` prints them.

Shape legend: T tokens, D hidden, F intermediate, H query heads, G kv heads, E head dim: those of Qwen3-8B.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import torch

from rlk.kernels import (
    embedding,
    norm,
    norm_backward,
    optimizer,
    paged_cache,
    rope,
    rope_backward,
    swiglu,
    swiglu_backward,
)

D, F, H, G, E, VOCABULARY, EPS = 4096, 12288, 32, 8, 128, 151936, 1e-6
ROUND_BYTES = 256 << 20  # of operands that the calls of one graph go round: several times the L2 cache
REPLAYS = 15
Call = Callable[[], object]


class Case(NamedTuple):
    """One call on operands of its own."""

    call: Call
    moved: int  # bytes that it has to read and write
    written: tuple[torch.Tensor, ...] = ()  # what it changes in place


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _fp32(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def cases(T: int) -> dict[str, Callable[[], Case]]:
    """Name -> what makes one case of T rows. Weights are shared: a row kernel finds them in the cache."""
    w_D, w_E, grad_D, grad_E = _bf16(D), _bf16(E), _fp32(D), _fp32(E)
    cos, sin = _fp32(T, E // 2), _fp32(T, E // 2)
    row, wide, heads = 2 * T * D, 2 * T * F, 2 * T * E
    tables = 8 * T * (E // 2)

    def rms_norm():
        x = _bf16(T, D)
        return Case(lambda: norm.rms_norm(x, w_D, EPS), 2 * row)

    def add_rms_norm():
        partial, residual = _fp32(T, D), _bf16(T, D)
        return Case(lambda: norm.add_rms_norm(partial, residual, w_D, EPS), 5 * row)

    def residual_add():
        partial, residual = _fp32(T, D), _bf16(T, D)
        return Case(lambda: norm.residual_add(partial, residual), 4 * row)

    def apply_swiglu():
        gate_up = _bf16(T, 2 * F)
        return Case(lambda: swiglu.swiglu(gate_up), 3 * wide)

    def qkv_norm_rope():
        qkv = _bf16(T, H + 2 * G, E)
        return Case(lambda: rope.qkv_norm_rope(qkv, H, G, w_E, w_E, cos, sin, EPS), 2 * (H + G) * heads + tables)

    def qk_norm_rope_write():
        qkv, (k_cache, v_cache), slots = _bf16(T, H + 2 * G, E), _pages(T), _slots(T)
        return Case(lambda: paged_cache.qk_norm_rope_write(qkv, w_E, w_E, cos, sin, EPS, k_cache, v_cache, slots),
                    2 * (H + 2 * G) * heads + tables, (k_cache, v_cache))

    def write_kv():
        k, v, (k_cache, v_cache), slots = _bf16(T, G, E), _bf16(T, G, E), _pages(T), _slots(T)
        return Case(lambda: paged_cache.write_kv(k, v, k_cache, v_cache, slots), 4 * G * heads, (k_cache, v_cache))

    table = _bf16(VOCABULARY, D)

    def embed():
        tokens = torch.randint(0, VOCABULARY, (T,), device="cuda")
        return Case(lambda: embedding.embedding(tokens, table, 0), 2 * row)

    def rms_norm_backward():
        dy, dhidden, x = _bf16(T, D), _bf16(T, D), _bf16(T, D)
        return Case(lambda: norm_backward.rms_norm_backward(dy, dhidden, x, w_D, EPS, grad_D), 4 * row, (grad_D,))

    def qk_norm_rope_backward():
        dy, x = _bf16(T, H, E), _bf16(T, H, E)
        return Case(lambda: rope_backward.qk_norm_rope_backward(dy, x, w_E, cos, sin, EPS, grad_E),
                    3 * H * heads + tables, (grad_E,))

    def k_norm_rope_backward():
        dy, x = _bf16(T, G, E), _bf16(T, H + 2 * G, E)[:, H : H + G]
        return Case(lambda: rope_backward.qk_norm_rope_backward(dy, x, w_E, cos, sin, EPS, grad_E),
                    3 * G * heads + tables, (grad_E,))

    def apply_swiglu_backward():
        gate_up, dy = _bf16(T, 2 * F), _bf16(T, F)
        return Case(lambda: swiglu_backward.swiglu_backward(dy, gate_up), 5 * wide)

    return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "residual_add": residual_add, "swiglu": apply_swiglu,
            "qkv_norm_rope": qkv_norm_rope, "qk_norm_rope_write": qk_norm_rope_write, "write_kv": write_kv,
            "embedding": embed, "rms_norm_backward": rms_norm_backward,
            "qk_norm_rope_backward": qk_norm_rope_backward, "k_norm_rope_backward": k_norm_rope_backward,
            "swiglu_backward": apply_swiglu_backward}


def _pages(T: int) -> torch.Tensor:
    return _bf16(2, T // 16 + 1, 16, G, E)


def _slots(T: int) -> torch.Tensor:
    return torch.randperm(T, device="cuda")


def _flat_cases(n: int) -> dict[str, Callable[[], Case]]:
    def adamw():
        state, weight = [_fp32(n).abs_() for _ in range(4)], _bf16(n)
        return Case(lambda: optimizer.adamw(*state, weight, 1.0, 1e-6, 0.9, 0.95, 1e-8, 0.0, 0.1, 0.05), 30 * n)

    def sum_squares():
        x = _fp32(n)
        return Case(lambda: optimizer.sum_squares(x), 4 * n)

    return {"adamw": adamw, "sum_squares": sum_squares}


def _graph_seconds(calls: list[Call]) -> float:
    """Median time of one of `calls`, all captured in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # else all would write into one result, which the L2 cache holds
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    del kept
    return statistics.median(times) / len(calls)


def cold(make: Callable[[], Case]) -> Iterator[Case]:
    """Cases until they move ROUND_BYTES, at least three."""
    moved, made = 0, 0
    while moved < ROUND_BYTES or made < 3:
        case = make()
        moved, made = moved + case.moved, made + 1
        yield case


def copy_bandwidth() -> float:
    """Bytes per second that a plain copy of 256 MiB reads and writes."""
    pairs = [(torch.empty(ROUND_BYTES, dtype=torch.uint8, device="cuda"),
              torch.zeros(ROUND_BYTES, dtype=torch.uint8, device="cuda")) for _ in range(3)]
    return 2 * ROUND_BYTES / _graph_seconds([lambda a=a, b=b: a.copy_(b) for a, b in pairs])


def _bandwidth(make: Callable[[], Case]) -> float:
    made = list(cold(make))
    return made[0].moved / _graph_seconds([case.call for case in made])


def _embedding_backward_ms(T: int) -> float:
    """Eager, the sort and launches included: tokens as in text, some far more frequent than most."""
    grad, dx = torch.zeros(VOCABULARY, D, device="cuda"), _bf16(T, D)
    tokens = (torch.rand(T, device="cuda") ** 6 * VOCABULARY).long()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        embedding.embedding_backward(dx, tokens, grad, 0)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def figures() -> dict[str, float]:
    """Every figure of this file by its key."""
    copy = copy_bandwidth()
    found = {"rows_copy_tb_s": copy * 1e-12}
    for name, make in (cases(4096) | _flat_cases(1 << 26)).items():
        found[f"rows_{name}_of_copy"] = _bandwidth(make) / copy
        torch.cuda.empty_cache()
    for name, make in cases(8).items():
        if "backward" not in name:
            calls = [case.call for case in islice(cold(make), 50)]
            found[f"rows_{name}_us_at_8"] = _graph_seconds(calls * 2) * 1e6
    found["rows_embedding_backward_ms_at_4096"] = _embedding_backward_ms(4096)
    return {key: round(value, 4) for key, value in found.items()}


if __name__ == "__main__":
    print(json.dumps(figures(), indent=2))
