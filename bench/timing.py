"""Times alternatives against each other on one GPU: medians, in both orders, in graphs where the engine has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

BANDWIDTH, PEAK = 4.3e12, 790e12  # of floors: bytes/s, just above what a copy reaches; FLOP/s of dense BF16
WARM_UP, SAMPLES, ROUNDS = 3, 8, 2  # two rounds of two orders: 32 samples an arm


@dataclass
class Arm:
    """One alternative. `call` runs it once; a graph holds `repeats` of them."""

    name: str
    call: Callable[[], object]
    graph: torch.cuda.CUDAGraph | None = None


def measure(arms: Sequence[Arm], graph: bool, repeats: int = 1, samples: int = SAMPLES,
            rounds: int = ROUNDS) -> dict[str, float]:
    """Median microseconds of one call, by name of the arm. Every round times the arms forwards, then backwards."""
    for arm in arms:
        for _ in range(WARM_UP):
            arm.call()
        if graph:
            torch.cuda.synchronize()
            arm.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(arm.graph):
                for _ in range(repeats):
                    arm.call()
    times: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(rounds):
        for order in (arms, arms[::-1]):
            for arm in order:
                times[arm.name] += _samples(arm, repeats, samples)
    for arm in arms:
        arm.graph = None
    return {name: median(values) for name, values in times.items()}


def _samples(arm: Arm, repeats: int, samples: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
              for _ in range(WARM_UP + samples)]
    for begin, end in events:  # queued without a wait in between, so that the host's time does not show
        begin.record()
        if arm.graph is not None:
            arm.graph.replay()
        else:
            for _ in range(repeats):
                arm.call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / repeats for begin, end in events[WARM_UP:]]
