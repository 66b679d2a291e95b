"""These tests compile for gfx942: without the compilers they are skipped, in CI (CI=true) they fail."""

import os

import pytest

from rlk.build.code_object import llvm_tool
from rlk.build.rocm import find_toolchain
from rlk.errors import UsageError


@pytest.fixture(scope="session", autouse=True)
def compilers():
    try:
        find_toolchain()
        for tool in ("readelf", "objdump", "cxxfilt", "mc"):
            llvm_tool(tool)
    except UsageError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"continuous integration has to have the compilers: {error}")
        pytest.skip(str(error))
