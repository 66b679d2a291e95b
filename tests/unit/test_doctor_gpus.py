"""`rlk doctor` on GPU hosts, with a stand-in for torch.cuda."""

from types import SimpleNamespace

import pytest
import torch

from rlk import doctor, doctor_gpus
from rlk.errors import UsageError

MI300X = SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
MI250X = SimpleNamespace(name="AMD Instinct MI250X", gcnArchName="gfx90a:sramecc+:xnack-", major=9, minor=0)
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
A100 = SimpleNamespace(name="NVIDIA A100", major=8, minor=0)


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A function that makes this a host with those GPUs: under ROCm when `hip` is its version, else under CUDA."""
    def become(*gpus, hip=None, cuda="13.0", blocked=(), triton="3.6.0"):
        for name, value in {
            "is_available": lambda: bool(gpus), "device_count": lambda: len(gpus),
            "get_device_properties": lambda device: gpus[device],
            "can_device_access_peer": lambda one, other: (one, other) not in blocked,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", None if hip else cuda)
        monkeypatch.setattr("rlk.build.triton_version", lambda: triton)

    monkeypatch.setattr(doctor_gpus, "KFD", tmp_path / "kfd")
    monkeypatch.setattr(doctor_gpus, "DRIVER_VERSION", tmp_path / "version")
    return become


def findings(names):
    return {name: check() for name, check in doctor_gpus.gpu_checks() if name in names}


def test_a_rocm_host_is_described(host, tmp_path, monkeypatch):
    (tmp_path / "version").write_text("6.16.6\n")
    host(*[MI300X] * 8, hip="7.1.25424")
    monkeypatch.setattr("rlk.build.rocm.find_hipcc", lambda: "/opt/rocm/bin/hipcc")
    assert findings({"GPUs", "GPU software", "GPU peers"}) == {
        "GPUs": "8 x AMD Instinct MI300X (gfx942:sramecc+:xnack-)",
        "GPU software": "ROCm 7.1.25424, driver 6.16.6, /opt/rocm/bin/hipcc, Triton 3.6.0",
        "GPU peers": "all 8 reach each other",
    }


def test_a_cuda_host_is_described(host, monkeypatch):
    host(H200)
    monkeypatch.setattr("rlk.build.cuda.find_nvcc", lambda: None)
    assert findings({"GPUs", "GPU software", "GPU peers"}) == {
        "GPUs": "1 x NVIDIA H200 (compute capability 9.0)", "GPU software": "CUDA 13.0, no nvcc, Triton 3.6.0",
        "GPU peers": "one GPU"}


@pytest.mark.parametrize("gpus, hip, message", [
    ((MI300X, MI250X), "7.1.0", r"GPU 1 \(AMD Instinct MI250X\) is gfx90a.*expected gfx942.*HIP_VISIBLE_DEVICES"),
    ((A100,), None, r"GPU 0 \(NVIDIA A100\) is compute capability 8.0, expected 9.0 .*CUDA_VISIBLE_DEVICES"),
])
def test_another_architecture_is_named_with_the_device(host, gpus, hip, message):
    host(*gpus, hip=hip)
    with pytest.raises(UsageError, match=message):
        doctor_gpus.check_architecture()


@pytest.mark.parametrize("hip, remedy", [("7.1.0", "iommu=pt"), (None, "nvidia-smi topo -p2p r")])
def test_gpus_that_do_not_reach_each_other_are_named(host, hip, remedy):
    host(*[MI300X if hip else H200] * 4, hip=hip, blocked={(2, 3)})
    with pytest.raises(UsageError, match=f"GPU 2 has no access to the memory of GPU 3.*{remedy}"):
        doctor_gpus.check_peers()


def test_a_torch_for_another_rocm_is_refused_with_both_versions(host):
    host(MI300X, hip="6.4.43482")
    with pytest.raises(UsageError, match=r"is built for ROCm 6.4.43482, expected 7.x"):
        doctor_gpus.check_software()


@pytest.mark.parametrize("version, message", [
    ("none", "triton is not installed"), ("3.5.1+rocm7", r"triton 3.5.1\+rocm7, expected 3.6 or newer"),
])
def test_a_missing_or_old_triton_is_refused_with_the_remedy(host, version, message):
    host(MI300X, hip="7.1.0", triton=version)
    with pytest.raises(UsageError, match=message):
        doctor_gpus.check_software()


def test_a_torch_for_rocm_that_sees_no_gpu_is_told_why(host, tmp_path):
    host(hip="7.1.0")
    with pytest.raises(UsageError, match="kfd is missing, so load the amdgpu driver.*--device=/dev/kfd"):
        findings({"GPUs"})
    (tmp_path / "kfd").touch()
    with pytest.raises(UsageError, match="groups render and video"):
        findings({"GPUs"})


def test_a_cpu_torch_is_fine_and_hears_of_the_amd_gpu_beside_it(host, tmp_path):
    host(cuda=None)
    assert findings({"GPUs"}) == {"GPUs": "none that torch can use; the CPU profile runs"}
    (tmp_path / "kfd").touch()
    assert "install ROCm's torch" in findings({"GPUs"})["GPUs"]


def test_the_object_is_loaded_and_its_fingerprint_shown(host, monkeypatch):
    host(MI300X, hip="7.1.0")
    monkeypatch.setattr("rlk.ops.gpu_library.kernel_fingerprint", lambda: "0123456789abcdef" * 4)
    assert doctor_gpus.check_objects() == "built for gfx942, sources 0123456789abcdef"


def test_each_gpu_check_is_a_line_of_the_report(host, monkeypatch):
    host(MI300X, MI250X, hip="7.1.0", blocked={(0, 1)})
    monkeypatch.setattr("rlk.ops.gpu_library.kernel_fingerprint", lambda: "0123456789abcdef" * 4)
    monkeypatch.setattr(doctor, "check_kernels", lambda: "built")
    report = {finding.name: finding.ok for finding in doctor.diagnose({}) if finding.name.startswith("GPU")}
    assert report == {"GPUs": False, "GPU software": True, "GPU peers": False, "GPU kernels": True}
