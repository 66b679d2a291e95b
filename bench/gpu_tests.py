"""Runs tests/gpu on this machine's GPUs and keeps the outcome in bench/results/gpu-tests-<architecture>-x<gpus>.json.

The result carries the fingerprint of the GPU kernels' sources: it is stale when `python -m rlk.build fingerprint gpu`
prints another. CI has no GPU, so this file is how anyone sees what last passed on one.

    python bench/gpu_tests.py
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from record import ROOT, write_result

from rlk.doctor_gpus import check_architecture
from rlk.kernels.variants import architecture


class Count:
    """A pytest plugin that counts outcomes by test."""

    def __init__(self) -> None:
        self.outcomes = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1


def main() -> int:
    # Before CUDA starts: ranks on one GPU are streams that wait for each other, each in a hardware queue of its own.
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "GPU_MAX_HW_QUEUES": "16"}
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU here; run this on a machine with one")
    print(check_architecture())
    os.chdir(ROOT)
    count = Count()
    status = pytest.main(["-q", "-p", "no:cacheprovider", "tests/gpu"], plugins=[count])
    gpus = torch.cuda.device_count()
    write_result(f"gpu-tests-{architecture()}-x{gpus}", "python bench/gpu_tests.py", count.outcomes, target="gpu")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
