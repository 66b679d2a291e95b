"""spin proves the generation protocol (hipkernels/collective_protocol.pml) and finds what is wrong with broken ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rlk.build import SOURCES

MODEL = SOURCES / "collective_protocol.pml"
TOOLS = ("spin", "gcc")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]

pytestmark = pytest.mark.skipif(bool(MISSING) and os.environ.get("CI") != "true",
                                reason=f"no {' and no '.join(MISSING)} here (Debian packages of these names)")

# What spin prints: of an assertion, its text after the macros.
TORN = r"assertion violated whole "  # half-written, or already of another generation
WENT_WRONG = r"assertion violated \(\(why==0\)&&\(calls=="  # a rank failed though all make the same calls
NO_MISMATCH = r"assertion violated \(\(calls==odd\)&&\(why=="  # a rank missed that the calls differ
GONE_MEMORY = r"assertion violated  ?!\(freed\["  # a peer's memory was used after it was freed
HANGS = r"invalid end state \("  # a rank waits for ever

MUST_FAIL = {
    "NO_FIRST_DONE_WAIT": TORN,
    "NO_PIECE_DONE_WAIT": TORN,
    "READY_FIRST": TORN,
    "NO_READY_WAIT": TORN,
    "DONE_FIRST": TORN,
    "CALL_LATE": WENT_WRONG,
    "NO_SECOND_LOOK": WENT_WRONG,
    "SLOT_REUSE": TORN,
    "IMPATIENT LATE_SLOT": TORN,
    "FREE_AT_ONCE": GONE_MEMORY,
    "MISMATCH FREE_WHEN_STOPPED": GONE_MEMORY,
    "STEP_IN_PLACE": TORN,
    "COMPARE_AGAIN": WENT_WRONG,
    "DONE_OF_LAST": HANGS,
    "ONE_AREA": HANGS,
    "EARLY_PUSH": HANGS,
    "CALL_WORDS_OF_ONE_PARITY": WENT_WRONG,
    "MISMATCH DATA_FIRST": HANGS,
    "MISMATCH NO_LOOK_AT_CALL": NO_MISMATCH,
    "MISMATCH CLOSED_AGAIN": NO_MISMATCH,
}


def check(folder: Path, ranks: int, calls: int, flags: str) -> str:
    """What the verifier says of the model with these flags, having looked at every state."""
    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
        return done.stdout

    defines = [f"-DRANKS={ranks}", f"-DCALLS={calls}", *(f"-D{flag}" for flag in flags.split())]
    run("spin", *defines, "-a", str(MODEL))
    optimise = "-O1" if ranks > 2 and "PUSHED" in flags else "-O0"  # where it saves more time than it takes
    run("gcc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000", "-o", "pan", "pan.c")
    report = run("./pan", "-m100000")
    assert "Search not completed" not in report or re.search(f"assertion violated|{HANGS}", report), report
    assert "max search depth too small" not in report, report
    return report


def calls_for(ranks: int, signals: str, scenario: str) -> int:
    """As many as a few seconds allow. One call has up to two generations; three use a direct slot twice."""
    if ranks == 2 or not scenario:
        return 3
    return 1 if signals and scenario == "IMPATIENT" else 2


@pytest.mark.parametrize("signals", ["", "PUSHED"], ids=["pulled", "pushed"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("scenario", ["", "MISMATCH", "LEAVES", "DIES", "IMPATIENT"])
def test_protocol_neither_hangs_nor_tears_data(tmp_path, signals, ranks, scenario):
    report = check(tmp_path, ranks, calls_for(ranks, signals, scenario), f"{signals} {scenario}")
    assert "errors: 0" in report, report


@pytest.mark.parametrize("variant", MUST_FAIL)
def test_broken_protocol_is_found(tmp_path, variant):
    report = check(tmp_path, 2, 3, f"PUSHED {variant}")
    assert re.search(MUST_FAIL[variant], report), report
