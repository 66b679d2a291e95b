"""These tests compile for gfx942: without the compilers they are skipped, in CI (CI=true) they fail.

When all of them ran, every HIP kernel and every Triton variant must have been executed, in ten minutes.
"""

import os
import time
from pathlib import Path

import pytest

from rlk.build.code_object import llvm_tool, read_code_object
from rlk.build.hip import build_hip
from rlk.build.rocm import find_toolchain
from rlk.build.triton_aot import all_variants, artifact
from rlk.errors import UsageError
from tests.gfx942.emulator.device import launched

HERE = Path(__file__).parent
MOST_SECONDS = 600
CI = os.environ.get("CI") == "true"


@pytest.fixture(scope="package", autouse=True)
def compilers():
    try:
        find_toolchain()
        for tool in ("readelf", "objdump", "cxxfilt", "mc"):
            llvm_tool(tool)
    except UsageError as error:
        if CI:
            pytest.fail(f"continuous integration has to have the compilers: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="package", autouse=True)
def everything_was_executed(compilers, request):
    start = time.monotonic()
    yield
    collected = {item.path for item in request.session.items}
    partial = request.config.option.keyword or not set(HERE.glob("test_*.py")) <= collected
    if partial or request.session.testsfailed:
        return
    wanted = {(artifact(variant, "gfx942"), variant.label) for variant in all_variants("gfx942")}
    paths = {path for path, _ in launched}
    missing = sorted(label for path, label in wanted if path not in paths)
    missing += sorted(name for path in build_hip().code_objects for name in read_code_object(path)
                      if (path, name) not in launched)
    assert not missing, f"no test executes {', '.join(missing)}"
    seconds = time.monotonic() - start
    assert not CI or seconds <= MOST_SECONDS, f"tests/gfx942 took {seconds:.0f} s, expected at most {MOST_SECONDS}"
