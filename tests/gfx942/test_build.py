"""The builds: they cover every kernel, end at once when nothing changed, and say what is missing."""

import ast
import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from rlk import build
from rlk.build import BUILD, KERNELS, ROOT, SOURCES, cuda, hip, rocm, source_fingerprint
from rlk.build.__main__ import main
from rlk.build.cpu import build_cpu
from rlk.build.host_fibers import build_host
from rlk.build.resources import hip_resources, kernel_and_configuration
from rlk.build.triton_aot import TARGETS, all_variants, compile_variant
from rlk.build.triton_build import make_triton
from rlk.errors import UsageError

SECONDS_WHEN_NOTHING_CHANGED = 5.0


def no_compiler(*_):
    raise AssertionError("a compiler was started, and nothing had changed")


@pytest.fixture
def other_sources(tmp_path, monkeypatch):
    """A copy of hipkernels/ to change."""
    copy = tmp_path / "hipkernels"
    shutil.copytree(SOURCES, copy)
    monkeypatch.setattr(build, "SOURCES", copy)
    return copy


def append(path, text="// changed\n"):
    path.write_text(path.read_text() + text)


def test_an_edit_of_a_gpu_kernel_leaves_the_cpu_library_alone(other_sources):
    before = {target: source_fingerprint(target) for target in build.FLAGS}
    append(other_sources / "gpu" / "retained_set.cpp")
    assert {target for target in before if source_fingerprint(target) != before[target]} == set(build.GPU_TARGETS)


def test_an_edit_of_a_shared_header_changes_every_library(other_sources):
    before = {target: source_fingerprint(target) for target in build.FLAGS}
    append(other_sources / "collective_protocol.h")
    assert all(source_fingerprint(target) != before[target] for target in before)


def test_an_edit_of_a_cpu_kernel_leaves_the_gpu_libraries_alone(other_sources):
    before = {target: source_fingerprint(target) for target in build.FLAGS}
    append(other_sources / "cpu" / "fingerprint.cpp")
    assert {target for target in before if source_fingerprint(target) != before[target]} == {"cpu"}


def test_every_hip_kernel_builds_for_gfx942_and_passes_its_gates():
    built = hip.build_hip()
    kernels = {kernel.kernel for kernel in hip_resources(built.code_objects)}
    assert {"support_score", "all_reduce"} <= kernels
    sources = {path.stem for path in (SOURCES / "gpu").glob("*.cpp") if "__global__" in path.read_text()}
    assert {path.stem for path in built.code_objects} == sources


def test_the_shared_object_embeds_the_very_code_objects_that_the_gates_read():
    built = hip.build_hip()
    library = built.library.read_bytes()
    assert built.code_objects and all(path.read_bytes() in library for path in built.code_objects)


def test_builds_start_no_compiler_when_nothing_changed(monkeypatch):
    builds = [hip.build_hip, build_cpu, lambda: build_host(32), lambda: build_host(64)]
    if cuda.find_nvcc():
        builds.append(cuda.build_cuda)
    first = [each() for each in builds]
    for module in ("hip", "cpu", "cuda"):
        monkeypatch.setattr(f"rlk.build.{module}.run_compiler", no_compiler)
    start = time.monotonic()
    assert [each() for each in builds] == first
    assert time.monotonic() - start < SECONDS_WHEN_NOTHING_CHANGED


@pytest.mark.parametrize("wave", [32, 64])
def test_a_host_object_reports_the_fingerprint_of_the_sources(wave):
    reported = ctypes.CDLL(str(build_host(wave))).rlk_gpu_fingerprint
    reported.restype = ctypes.c_char_p
    assert reported().decode() == source_fingerprint("host")


@pytest.mark.skipif(not cuda.find_nvcc(), reason="needs nvcc")
def test_the_cuda_object_reports_the_fingerprint_of_the_sources():
    reported = ctypes.CDLL(str(cuda.build_cuda())).rlk_gpu_fingerprint
    reported.restype = ctypes.c_char_p
    assert reported().decode() == source_fingerprint("sm_90a")


def test_another_compiler_builds_the_code_objects_again(monkeypatch, tmp_path):
    hip.build_hip()
    shutil.copytree(hip.FOLDER, tmp_path / "gfx942", ignore=shutil.ignore_patterns("triton", "tmp"))
    monkeypatch.setattr(hip, "FOLDER", tmp_path / "gfx942")
    assert hip.build_hip().library.is_relative_to(tmp_path)
    other = replace(rocm.find_toolchain(), name="another compiler")
    monkeypatch.setattr(hip, "find_toolchain", lambda: other)
    monkeypatch.setattr(hip, "run_compiler", no_compiler)
    with pytest.raises(AssertionError, match="a compiler was started"):
        hip.build_hip()


def test_without_a_compiler_the_packages_to_install_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ROCM_PATH", raising=False)
    monkeypatch.setattr(rocm, "find_hipcc", lambda: None)
    with pytest.raises(UsageError, match="apt-get install clang-19 lld-19 llvm-19 clang-tools-19"):
        rocm.find_toolchain.__wrapped__()


def test_rocm_s_own_compiler_is_taken_where_it_is_installed(monkeypatch, tmp_path):
    hipcc = tmp_path / "bin" / "hipcc"
    hipcc.parent.mkdir()
    hipcc.write_text("#!/bin/sh\necho 'HIP version: 7.1.0'; echo 'AMD clang version 20.0.0'\n")
    hipcc.chmod(hipcc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    found = rocm.find_toolchain.__wrapped__()
    assert found.command == (str(hipcc),) and found.name == "hipcc, AMD clang version 20.0.0"


def test_a_unit_that_does_not_compile_is_named(other_sources, tmp_path, monkeypatch, capfd):
    for unit in (other_sources / "gpu").glob("*.cpp"):
        if unit.stem != "fingerprint":
            unit.unlink()
    append(other_sources / "gpu" / "fingerprint.cpp", "int broken = ;\n")
    monkeypatch.setattr(hip, "FOLDER", tmp_path / "gfx942")
    monkeypatch.setattr(hip, "SOURCES", other_sources)
    with pytest.raises(UsageError, match="failed on .*fingerprint.cpp"):
        hip.build_hip()
    assert "expected expression" in capfd.readouterr().err


@pytest.mark.parametrize("arch", TARGETS)
def test_every_triton_variant_is_compiled_and_passes_its_gates(arch):
    manifest = make_triton(arch)
    kernels = json.loads(manifest.read_text())["kernels"]
    assert kernels.keys() == {variant.label for variant in all_variants(arch)}
    start = time.monotonic()
    assert make_triton(arch) == manifest
    assert time.monotonic() - start < SECONDS_WHEN_NOTHING_CHANGED


def test_no_triton_kernel_escapes_the_build():
    """Every jitted function is a variant's kernel, on some architecture, or is called by another jitted function."""
    jitted, called = set(), set()
    for path in KERNELS.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list):
                jitted.add(function.name)
                called |= {ast.unparse(node).rpartition(".")[2] for node in ast.walk(function)
                           if isinstance(node, ast.Name | ast.Attribute)}
    kernels = {variant.function.__name__ for arch in TARGETS for variant in all_variants(arch)}
    assert jitted and jitted - called <= kernels


def test_a_variant_is_compiled_once_and_again_when_a_constant_changes(monkeypatch):
    variant = all_variants("gfx942")[0]
    first = compile_variant(variant, "gfx942")
    monkeypatch.setattr("rlk.build.triton_aot._compile", no_compiler)
    assert compile_variant(variant, "gfx942") == first
    assert first.path.is_relative_to(BUILD) and first.asm.count(first.metadata.name)
    name = next(iter(variant.constants))
    with pytest.raises(AssertionError, match="a compiler was started"):
        compile_variant(replace(variant, constants=variant.constants | {name: 4242}), "gfx942")


def test_a_variant_that_forgets_an_argument_is_refused_with_both_lists():
    variant = all_variants("gfx942")[0]
    argument = next(iter(variant.signature))
    short = replace(variant, signature={name: kind for name, kind in variant.signature.items() if name != argument})
    with pytest.raises(ValueError, match=f"expected the kernel's arguments .*'{argument}'"):
        compile_variant(short, "gfx942")


@pytest.mark.parametrize("written, kernel, configuration", [
    ("support_score", "support_score", ""), ("flag(unsigned int*)", "flag", ""),
    ("void rlk::scale<float, 4>(float*)", "scale", "float, 4"),
    ("void (anonymous namespace)::sum<8>(A<int>, int*)", "sum", "8"),
])
def test_a_template_s_arguments_are_its_configuration(written, kernel, configuration):
    assert kernel_and_configuration(written) == (kernel, configuration)


def test_help_lists_every_target():
    targets = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"cpu", "hip", "cuda", "triton-aot", "hip-report"} <= {line.split()[0] for line in targets.splitlines()}


def test_an_unknown_target_is_refused_with_the_known_ones():
    done = subprocess.run([sys.executable, "-m", "rlk.build", "hpi"], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ)
    assert done.returncode == 2 and "no target 'hpi'; expected one of cpu, host, hip, cuda" in done.stderr


def test_the_fingerprint_of_all_gpu_sources_follows_hip_and_triton_alike(other_sources, tmp_path, monkeypatch, capsys):
    shutil.copytree(KERNELS, tmp_path / "triton")
    monkeypatch.setattr(build, "KERNELS", tmp_path / "triton")
    shown = set()
    for path in (None, tmp_path / "triton" / "gemm.py", other_sources / "gpu" / "gpu.h"):
        if path:
            append(path, "\n")
        assert main(["fingerprint", "gpu"]) == 0
        shown.add(capsys.readouterr().out)
    assert len(shown) == 3 and main(["fingerprint", "nosuch"]) == 2
