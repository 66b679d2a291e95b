"""The folder triton/ of the checkout never stands before the triton package, however Python is started."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlk.build import ROOT

PROBE = """
import triton
import rlk.kernels.gemm
print("probe", triton.__version__ != "", "site-packages" in triton.__file__, rlk.kernels.gemm.__file__)
"""
OURS = str(ROOT / "triton" / "gemm.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run(command, cwd=ROOT, **environ):
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True,
                          env=os.environ | ONE_THREAD | environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("probe ")[2] for line in (done.stdout + done.stderr).splitlines() if "probe " in line]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "probe.py"
    path.write_text(PROBE)
    return path


def test_under_python_c_from_the_root():
    assert run([sys.executable, "-c", PROBE]) == [f"True True {OURS}"]


def test_under_python_m_from_the_root():
    """`python -m` puts the working directory first."""
    assert run([sys.executable, "-m", "timeit", "-n", "1", "-r", "1", PROBE]) == [f"True True {OURS}"]


def test_under_pytest():
    """The root stands first on the path by pyproject.toml."""
    import triton

    import rlk.kernels.gemm

    assert "site-packages" in triton.__file__ and triton.__version__
    assert rlk.kernels.gemm.__file__ == OURS


def test_under_torchrun_with_a_script_and_the_root_on_the_path(script):
    lines = run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script],
                PYTHONPATH=str(ROOT))
    assert lines == [f"True True {OURS}"] * 2


def test_under_the_launcher_s_own_ranks():
    """bin/rlk starts ranks as `python -m rlk.cli` in the environment of rank_environment."""
    from rlk.launcher import RANK_COMMAND, rank_environment

    environ = rank_environment(os.environ, 1, "cpu")
    probe = f"import runpy; runpy.run_module({RANK_COMMAND[-1]!r}, run_name='not main')\n" + PROBE
    lines = run([RANK_COMMAND[0], "-c", probe], **environ)
    assert lines == [f"True True {OURS}"]


def test_under_mpirun(script):
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if not mpirun:
        pytest.skip("needs mpirun: pip install -r requirements.txt")
    lines = run([mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, script],
                PYTHONPATH=str(ROOT))
    assert lines == [f"True True {OURS}"] * 2


@pytest.mark.parametrize("found", ["None", "types.ModuleType('triton')"], ids=["nothing", "the folder alone"])
def test_the_operators_need_no_triton_on_a_cpu(found):
    """Without the package, `import triton` fails, or, from the root, gives an empty package that is the folder."""
    hidden = f"""
import importlib.machinery, sys, types
sys.modules["triton"] = found = {found}
if found:
    found.__path__ = [{str(ROOT / "triton")!r}]
    found.__spec__ = importlib.machinery.ModuleSpec("triton", None, is_package=True)
import torch
import rlk.cli, rlk.ops.attention, rlk.ops.gemm, rlk.ops.gpu, rlk.preflight, rlk.train.run
x = torch.ones(2, 64, requires_grad=True)
rlk.ops.gemm.linear(x, torch.ones(3, 64)).sum().backward()
print("probe", x.grad.shape[0])
"""
    assert run([sys.executable, "-c", hidden]) == ["2"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with rlk as pip installs it, without what it needs."""
    pytest.importorskip("setuptools", minversion="77", reason="pip builds the wheel with the setuptools that is here")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("rlk", "hipkernels", "triton", "launch"):  # a copy: setuptools writes beside what it builds
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index",
         "--no-build-isolation", "--target", target, source])
    return target


def test_installed_every_source_and_gate_is_there(installed):
    for folder, name in (("hipkernels", "hipkernels"), ("triton", "kernels"), ("launch", "launch")):
        ours = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*")
                if path.suffix in (".h", ".cpp", ".py", ".toml", ".env")}
        missing = [str(path) for path in ours if not (installed / "rlk" / name / path).exists()]
        assert ours and not missing
    assert (installed / "rlk" / "build" / "gates.py").exists()


def test_installed_it_finds_its_sources_and_compiles_a_variant(installed, tmp_path):
    script = PROBE + """
from rlk.build import KERNELS, SOURCES, source_fingerprint
from rlk.build.gates import hip_gates, triton_gates
from rlk.build.triton_aot import compile_variant, sources_fingerprint
import rlk.kernels.swiglu as swiglu
compiled = compile_variant(swiglu.variants("gfx942")[0], "gfx942")
print("probe", KERNELS, SOURCES, len(source_fingerprint("gfx942") + sources_fingerprint()), compiled.path.exists(),
      "gemm" in triton_gates(), "support_score" in hip_gates())
"""
    lines = run([sys.executable, "-c", script], cwd=tmp_path, PYTHONPATH=str(installed), XDG_CACHE_HOME=str(tmp_path))
    assert lines == [f"True True {installed}/rlk/kernels/gemm.py",
                     f"{installed}/rlk/kernels {installed}/rlk/hipkernels 128 True True True"]
    assert not (installed / "triton").exists()
