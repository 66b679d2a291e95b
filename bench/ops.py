"""Times the GPU operators against the libraries' and writes bench/results/ops.json.

A section per area is a module bench/ops_<section>.py with `figures() -> dict[str, float]`. Without arguments every
section that is there runs, in one process; with names, those run, and the result is bench/results/ops-<names>.json.

    python bench/ops.py [gemm attention rows logprob sampler]
"""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path

import torch
from record import write_result

SECTIONS = ("gemm", "attention", "rows", "logprob", "sampler")


def main() -> None:
    present = [name for name in SECTIONS if (Path(__file__).parent / f"ops_{name}.py").exists()]
    chosen = sys.argv[1:] or present
    if unknown := [name for name in chosen if name not in present]:
        sys.exit(f"error: no section {', '.join(unknown)}; expected some of {', '.join(present)}")
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU here; run this on a machine with one")
    figures: dict[str, float] = {}
    for name in chosen:
        print(f"-- {name}", flush=True)
        figures |= importlib.import_module(f"ops_{name}").figures()
        gc.collect()  # a section's weights, before the next one's
        torch.cuda.empty_cache()
    result = "ops" if chosen == present else "-".join(["ops", *chosen])
    write_result(result, " ".join(["python bench/ops.py", *sys.argv[1:]]),
                 {name: round(value, 4) for name, value in figures.items()}, target="gpu")


if __name__ == "__main__":
    main()
