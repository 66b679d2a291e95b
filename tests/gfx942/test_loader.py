"""The loader against a stand-in for the HIP runtime, each time in a fresh process: the object loads, registers its
kernels with the runtime that torch loaded, and launches what it should."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlk.build import ROOT, source_fingerprint
from rlk.build.cpu import host_compiler
from rlk.build.hip import build_hip
from rlk.build.resources import hip_resources

AS_UNDER_ROCM = """
import ctypes, torch
torch.version.hip = "7.1.25424"
from rlk.ops import gpu_library
from rlk.ops.gpu_library import FLOAT, LONG, POINTER
score = gpu_library.function("rlk_gpu_support_score", POINTER, POINTER, POINTER, LONG, FLOAT, POINTER, POINTER)
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """Path of the stand-in, built as libamdhip64.so."""
    path = tmp_path_factory.mktemp("hip") / "libamdhip64.so"
    source = Path(__file__).with_name("stub_hip_runtime.c")
    subprocess.run([host_compiler(), "-x", "c", "-shared", "-fPIC", "-fvisibility=hidden", source, "-o", path],
                   check=True)
    build_hip()
    return path


def run(script, runtime_folder=""):
    """Lines that the script prints in a process whose library path is `runtime_folder`."""
    done = subprocess.run([sys.executable, "-c", AS_UNDER_ROCM + textwrap.dedent(script)], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {"LD_LIBRARY_PATH": str(runtime_folder)})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def session(stub):
    """What one process prints, by the name of its part: (name, lines)."""
    lines = run("""
        def part(name):
            print("part", name, flush=True)

        part("load")
        library = gpu_library.library()
        part("launch")
        score(1 << 20, 1 << 20, 1 << 20, 5, 1.0, 1 << 20, 0x5000)
        part("no row")
        score(0, 0, 0, 0, 1.0, 0, 0)
        part("refused")
        ctypes.CDLL("libamdhip64.so").stub_fail_next(98)
        try:
            score(1 << 20, 1 << 20, 1 << 20, 5, 1.0, 1 << 20, 0)
        except RuntimeError as error:
            print(error)
        part("fingerprint")
        print(gpu_library.kernel_fingerprint())
    """, stub.parent)
    parts = {}
    for line in lines:
        if line.startswith("part "):
            current = parts.setdefault(line.removeprefix("part "), [])
        else:
            current.append(line)
    return parts


def test_every_kernel_of_the_code_objects_is_registered(session):
    registered = [line.removeprefix("register ") for line in session["load"] if line.startswith("register ")]
    code_objects = build_hip().code_objects
    assert sorted(registered) == sorted(kernel.code.name for kernel in hip_resources(code_objects))
    assert session["load"].count("module 48495046") == len(code_objects)  # "HIPF", in the order of an integer


def test_a_launcher_launches_its_kernel_with_one_workgroup_a_row(session):
    assert session["launch"] == ["launch support_score grid 5 1 1 block 256 1 1 shared 0 stream 0x5000"]


def test_no_row_launches_nothing(session):
    assert session["no row"] == []


def test_a_refused_launch_raises_with_the_launcher_s_name(session):
    assert session["refused"][-1].startswith("rlk_gpu_support_score failed with code 6")  # kLaunchFailed


def test_the_loaded_object_reports_the_fingerprint_of_the_sources(session):
    assert session["fingerprint"] == [source_fingerprint("gfx942")]


def test_the_runtime_that_torch_loaded_is_the_one_used(stub):
    lines = run(f"""
        ctypes.CDLL({str(stub)!r})  # as torch does: not visible to others
        gpu_library.library()
    """)
    assert [line for line in lines if line.startswith("register ")]
