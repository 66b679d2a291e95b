"""A GPU made of host memory, to find tensors that are in the wrong place where there is no GPU.

A tensor that was asked for on "cuda" is a `GpuTensor`: it lies on the host and computes there, but says that it is on
cuda:0, so that the registry picks GPU backends for it (here the CPU's kernels stand in) and numpy refuses it. An
operation that mixes it with a host tensor raises PlacementError, as torch does on a GPU. In consistency mode the GPU
backends' launchers are called too, with kernels that do nothing: they refuse what they would refuse there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime.jit import JITFunction

from rlk.build.cpu import build_cpu
from rlk.ops import gpu_library, gpu_sampler
from rlk.ops.registry import Registry
from tests.fake_gpu import FakeStream

GPU = torch.device("cuda", 0)
HOST_TABLES = ("segments", "key_starts")  # what attention cuts its tiles by may lie on the host
COPIES = {"_to_copy", "copy_"}  # torch takes both places there
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # and there host indices of a GPU tensor


class PlacementError(AssertionError):
    """Tensors of two places met in one operation."""


class GpuTensor(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda = GPU, True

    def cpu(self):
        return host(self).clone()

    def to(self, *args, **kwargs):
        place = [x for x in (*args, kwargs.get("device")) if isinstance(x, (str, torch.device))]
        if place and torch.device(place[0]).type == "cpu":
            return self.cpu()
        moved = super().to(*[x for x in args if x not in place],
                           **{name: x for name, x in kwargs.items() if name != "device"})
        return moved if isinstance(moved, GpuTensor) else gpu(moved)

    def numpy(self, *args, **kwargs):
        raise PlacementError("numpy() of a GPU tensor: call cpu() first")


def gpu(x: torch.Tensor) -> torch.Tensor:
    """x as a GPU tensor over the same memory."""
    return torch.Tensor._make_subclass(GpuTensor, x)


def host(x):
    """A GPU tensor as a host tensor over the same memory; anything else as it is."""
    return torch.Tensor._make_subclass(torch.Tensor, x) if isinstance(x, GpuTensor) else x


def wrapped(x):
    return gpu(x) if isinstance(x, torch.Tensor) and not isinstance(x, GpuTensor) else x


class _Factories(TorchFunctionMode):
    """What is asked for on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        if target is None and function is torch.Tensor.to:
            target = next((x for x in args[1:] if isinstance(x, (str, torch.device))), None)
        if target is None or torch.device(target).type != "cuda":
            return function(*args, **kwargs)
        if torch.device(target).index not in (None, 0):
            raise PlacementError(f"{function.__name__} on {target}, this rank's GPU is {GPU}")
        if function is torch.Tensor.to:
            moved = args[0].to(*[x for x in args[1:] if x is not target])
            return gpu(moved.clone() if moved is args[0] else moved)
        return gpu(function(*args, **kwargs | {"device": "cpu"}))


class _Places(TorchDispatchMode):
    """Every operation: one place for its operands, and the same for its results."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):  # in a backward pass, of which _Factories sees the call alone
            return tree_map(wrapped, function(*map(host, args), **kwargs | {"device": torch.device("cpu")}))
        name = function.overloadpacket.__name__
        if name == "_pin_memory":  # needs a driver
            return args[0]
        tensors = _tensors(args, kwargs)
        on_gpu = any(isinstance(x, GpuTensor) for x in tensors)
        if name in COPIES | INDEXING:
            on_gpu = isinstance(args[0], GpuTensor)
        if name in INDEXING:
            values = _tensors(*args[2:3])
            astray = [x for x in _tensors(args[1]) if isinstance(x, GpuTensor) and not on_gpu]
            astray += [x for x in values if isinstance(x, GpuTensor) != on_gpu and x.dim()]
            if astray:
                raise PlacementError(f"{name} of a tensor {tuple(args[0].shape)} on the {'GPU' if on_gpu else 'host'} "
                                     f"with one of {tuple(astray[0].shape)} on the other")
        elif name not in COPIES and on_gpu:
            strangers = [x for x in tensors if not isinstance(x, GpuTensor) and x.dim()]
            if strangers:
                raise PlacementError(f"{name} of GPU tensors and a host tensor {tuple(strangers[0].shape)}")
        result = function(*args, **kwargs)
        return tree_map(wrapped, result) if on_gpu else result


def _tensors(*operands) -> list[torch.Tensor]:
    return [x for x in tree_flatten(operands)[0] if isinstance(x, torch.Tensor)]


def _on_host(op: str, function: Callable, launcher: Callable | None) -> Callable:
    """A CPU backend that takes and gives GPU tensors, after the GPU's launcher had a look at them."""

    def call(*args, **kwargs):
        args = list(args)
        for place, (name, x) in enumerate(zip(function.__code__.co_varnames, args, strict=False)):
            astray = isinstance(x, torch.Tensor) and not isinstance(x, GpuTensor) and name not in HOST_TABLES
            # Autograd makes the gradient of what nobody used, zeros, where it takes the tensor to be: on the host.
            if astray and (torch._C._current_graph_task_id() < 0 or x.any()):
                raise PlacementError(f"{op} got {name} {tuple(x.shape)} on the host, expected the GPU")
            args[place] = gpu(x) if astray else x
        launched = launcher and launcher(*args, **kwargs)
        result = function(*map(host, args), **{name: host(x) for name, x in kwargs.items()})
        if launcher and op != "draw" and _described(launched) != _described(result):
            raise PlacementError(f"{op}: the GPU gives {_described(launched)}, the CPU {_described(result)}")
        return tree_map(wrapped, result)

    return call


def _described(results) -> list:
    return [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in tree_flatten(results)[0]]


class _NoKernels:
    """A library whose launchers do nothing."""

    def __getattr__(self, name: str) -> Callable:
        def launch(*args):
            return 0

        setattr(self, name, launch)
        return launch


class GpuCommunicator:
    """A communicator of host tensors as one of GPU tensors."""

    name, device = "pretend", GPU

    def __init__(self, inner) -> None:
        self.rank, self.world = inner.rank, inner.world
        self.barrier, self.check, self.close = inner.barrier, inner.check, inner.close
        self.all_reduce, self.all_gather, self.reduce_scatter = (
            self._on_gpu(call) for call in (inner.all_reduce, inner.all_gather, inner.reduce_scatter))

    def _on_gpu(self, call: Callable) -> Callable:
        def moved(x, out=None):
            for tensor in (x,) if out is None else (x, out):
                if not isinstance(tensor, GpuTensor):
                    raise PlacementError(f"a collective of a host tensor {tuple(tensor.shape)}, expected the GPU")
            result = call(host(x), None if out is None else host(out))
            return gpu(result) if out is None else out

        return moved


@contextlib.contextmanager
def pretend_gpu(monkeypatch) -> Iterator[None]:
    """Within the block "cuda" is such a GPU, in this thread; the monkeypatch outlasts it."""
    select = Registry._select

    def select_for_gpu(self, op, device, dtype):
        found = select(self, op, "cpu" if device == "cuda" else device, dtype)
        if device != "cuda" or op in self._overrides or op == "all_reduce_add_rms_norm":
            return found
        ours = select(self, op, device, dtype)[-1].function if self.mode == "consistency" else None
        return [dataclasses.replace(b, function=_on_host(op, b.function, ours)) for b in found]

    monkeypatch.setattr(Registry, "_select", select_for_gpu)
    for name, stand_in in {"_lazy_init": lambda: None, "set_device": lambda device: None, "device_count": lambda: 2,
                           "mem_get_info": lambda: (1 << 35, 1 << 35), "current_device": lambda: 0,
                           "get_device_name": lambda i: "pretended",
                           "current_stream": lambda: FakeStream(0), "is_current_stream_capturing": lambda: False,
                           "max_memory_allocated": lambda device: 3 << 20}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr("rlk.preflight.check_architecture", lambda: "")
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: None)
    monkeypatch.setattr(gpu_library, "library", _NoKernels)
    monkeypatch.setattr(gpu_sampler, "_state_bytes", lambda: (1024, 4096))
    monkeypatch.setattr(gpu_library, "object_path", build_cpu)
    monkeypatch.setattr(gpu_library, "kernel_fingerprint", lambda: "pretended")
    with _Factories(), _Places():
        yield
