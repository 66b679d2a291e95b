"""The GPU checks of `rlk doctor`: architecture, software, access between the GPUs, and the built kernels.

Each returns its finding in words, or raises UsageError with the remedy. All but the first need a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from rlk.errors import UsageError

ROCM_MAJOR = 7  # of the HIP headers that the kernels are built with; its libraries' interface goes by it
OLDEST_TRITON = 3, 6
CAPABILITY = 9, 0  # Hopper
KFD = Path("/dev/kfd")  # there when the amdgpu driver is loaded
DRIVER_VERSION = Path("/sys/module/amdgpu/version")


def gpu_checks() -> list[tuple[str, Callable[[], str]]]:
    """The checks that this host's torch allows, with their names."""
    import torch

    if not torch.cuda.is_available():
        return [("GPUs", check_present)]
    return [("GPUs", check_architecture), ("GPU software", check_software), ("GPU peers", check_peers),
            ("GPU kernels", check_objects)]


def check_present() -> str:
    """What to say when torch sees no GPU. Raises UsageError when a torch for ROCm reaches none."""
    import torch

    if torch.version.hip:
        raise UsageError("this torch is for ROCm and sees no GPU: " + (
            "add the user to the groups render and video, and look at HIP_VISIBLE_DEVICES" if KFD.exists() else
            f"{KFD} is missing, so load the amdgpu driver (modprobe amdgpu), or in a container pass --device=/dev/kfd "
            "--device=/dev/dri"))
    if KFD.exists():
        return "an AMD GPU that this torch is not built for (install ROCm's torch to use it); the CPU profile runs"
    return "none that torch can use; the CPU profile runs"


def check_architecture() -> str:
    """gfx942 under ROCm, compute capability 9.0 under CUDA, on every GPU."""
    import torch

    devices = range(torch.cuda.device_count())
    properties = [torch.cuda.get_device_properties(device) for device in devices]
    for device, found in zip(devices, properties, strict=True):
        if torch.version.hip:
            got, good = found.gcnArchName, found.gcnArchName.split(":")[0] == "gfx942"
            expected, variable = "gfx942 (MI300A, MI300X, MI325X)", "HIP_VISIBLE_DEVICES"
        else:
            got = f"compute capability {found.major}.{found.minor}"
            good = (found.major, found.minor) == CAPABILITY
            expected, variable = "9.0 (H100, H200)", "CUDA_VISIBLE_DEVICES"
        if not good:
            raise UsageError(f"GPU {device} ({found.name}) is {got}, expected {expected}: leave it out with "
                             f"{variable}, or use the CPU profile")
    kind = properties[0].gcnArchName if torch.version.hip else "compute capability 9.0"
    return f"{len(properties)} x {properties[0].name} ({kind})"


def check_software() -> str:
    """ROCm's or CUDA's version, the driver's and Triton's."""
    import torch

    triton = check_triton()
    if not torch.version.hip:
        from rlk.build.cuda import find_nvcc

        return f"CUDA {torch.version.cuda}, {'nvcc ' + where if (where := find_nvcc()) else 'no nvcc'}, Triton {triton}"
    if int(torch.version.hip.split(".")[0]) != ROCM_MAJOR:
        raise UsageError(f"torch {torch.__version__} is built for ROCm {torch.version.hip}, expected {ROCM_MAJOR}.x: "
                         f"install a torch for ROCm {ROCM_MAJOR}")
    driver = DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.exists() else "of the kernel"
    from rlk.build.rocm import find_hipcc

    compiler = find_hipcc() or "no hipcc (clang 19 serves)"
    return f"ROCm {torch.version.hip}, driver {driver}, {compiler}, Triton {triton}"


def check_triton() -> str:
    """Triton's version. Raises UsageError when it is missing or too old."""
    from rlk.build import triton_version

    version = triton_version()
    if version == "none":
        raise UsageError("triton is not installed, and the GPU operators need it: pip install -r requirements.txt, or "
                         "the one that belongs to this torch")
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < OLDEST_TRITON:
        raise UsageError(f"triton {version}, expected {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or newer: install the "
                         "torch that brings it (2.11 or newer)")
    return version


def check_peers() -> str:
    """Every GPU must read and write every other's memory: the collectives do."""
    import torch

    count = torch.cuda.device_count()
    for one, other in itertools.permutations(range(count), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            remedy = ("boot with iommu=pt and look at `rocm-smi --showtopo`" if torch.version.hip else
                      "look at `nvidia-smi topo -p2p r`, and switch PCIe ACS off where there is no NVLink")
            raise UsageError(f"GPU {one} has no access to the memory of GPU {other}, which the collectives need: "
                             f"{remedy}, or leave one out")
    return f"all {count} reach each other" if count > 1 else "one GPU"


def check_objects() -> str:
    """Builds the kernels if they are not built yet, and loads them."""
    from rlk.ops.gpu_library import kernel_fingerprint, target

    return f"built for {target()}, sources {kernel_fingerprint()[:16]}"
