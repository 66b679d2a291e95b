"""Runs tests/gpu on this machine's GPUs and keeps the outcome in bench/results/gpu-tests-<architecture>-x<gpus>.json.

The result carries the fingerprint of the GPU kernels' sources: it is stale when `python -m rlk.build fingerprint gpu`
prints another. CI has no GPU, so this file is how anyone sees what last passed on one. Most of the time goes into
compiling Triton kernels on the host, so a few processes run a file of tests each; six minutes on two H200.

    python bench/gpu_tests.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from record import ROOT, write_result

from rlk.doctor_gpus import check_architecture
from rlk.kernels.variants import architecture
from rlk.ops import gpu_library

FOLDER = ROOT / "tests" / "gpu"
# Kernels that wait for each other on a GPU, and whole runs: no other process may take turns with them.
ALONE = ("test_hip_collectives.py", "test_communicator.py", "test_run.py")
PROCESSES = min(6, max((os.cpu_count() or 1) // 2, 1))
LIMIT_S = 900  # of one file
NO_TESTS = 5  # pytest's status when every test of a file was left out


def run(path: Path, reports: Path) -> tuple[int, dict[str, int]]:
    """One file in a process of its own: (pytest's status, outcomes by name). Prints what it printed."""
    report, environment = reports / f"{path.stem}.xml", os.environ | {"RLK_UNLAUNCHED": str(reports)}
    try:
        done = _pytest(path, report, environment)
    except subprocess.TimeoutExpired as error:
        print(f"== {path.name}: not done after {error.timeout:.0f} s\n{error.stdout}", flush=True)
        return 1, {"passed": 0, "failed": 1, "skipped": 0}
    print(f"== {path.name}\n{done.stdout}{done.stderr}", flush=True)
    if not report.exists():  # the process died
        return done.returncode or 1, {"passed": 0, "failed": 1, "skipped": 0}
    suite = next(ET.parse(report).iter("testsuite")).attrib
    failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
    return done.returncode, {"passed": int(suite["tests"]) - failed - skipped, "failed": failed, "skipped": skipped}


def _pytest(path: Path, report: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}",
               str(path.relative_to(ROOT))]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
                          timeout=LIMIT_S)


def unlaunched(reports: Path) -> set[str]:
    """The configurations of the dispatch that no process launched."""
    of_processes = [set(path.read_text().split()) for path in reports.glob("*.unlaunched")]
    return set.intersection(*of_processes) if of_processes else {"anything"}


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU here; run this on a machine with one")
    print(check_architecture())
    gpu_library.object_path()  # built once, and not by several processes
    files = sorted(FOLDER.glob("test_*.py"))
    with TemporaryDirectory() as folder:
        reports = Path(folder)
        together = [path for path in files if path.name not in ALONE]
        with ThreadPoolExecutor(PROCESSES) as pool:
            results = list(pool.map(lambda path: run(path, reports), together))
        results += [run(path, reports) for path in files if path.name in ALONE]
        if not torch.version.hip and (names := unlaunched(reports)):  # gfx942 has forms for keys of 2 GiB and more
            print(f"error: no test launched {', '.join(sorted(names))}; give each a case in tests/gpu", flush=True)
            results.append((1, {"passed": 0, "failed": len(names), "skipped": 0}))
    outcomes = {name: sum(counts[name] for _, counts in results) for name in ("passed", "failed", "skipped")}
    write_result(f"gpu-tests-{architecture()}-x{torch.cuda.device_count()}", "python bench/gpu_tests.py", outcomes,
                 target="gpu")
    return 0 if all(status in (0, NO_TESTS) for status, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
