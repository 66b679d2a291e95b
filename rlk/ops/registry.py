"""Which code runs for an operator, and the record of what ran (the readback).

Every operator has backends. In consistency mode only a backend that keeps the numerics contract may run; where there
is none, the run stops. In native mode the plain PyTorch `reference` runs. Both modes count calls in the same way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from rlk.errors import CheckFailed

MODES = ("consistency", "native")
FLOATS = (torch.float32, torch.bfloat16)
EVERYWHERE = ("cpu", "cuda")  # where plain PyTorch runs


@dataclass
class Backend:
    """One implementation of one operator."""

    op: str
    name: str
    function: Callable
    contract: bool  # keeps the numerics contract
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    guard: Callable[..., bool] | None = None  # whether it takes a call's arguments; without one it takes all
    calls: dict[tuple[str, torch.dtype], int] = field(default_factory=dict)

    def serves(self, device: str, dtype: torch.dtype) -> bool:
        return device in self.devices and dtype in self.dtypes


class Registry:
    """The operators' backends. One instance per process: `registry`."""

    def __init__(self) -> None:
        self.mode = "consistency"
        self.probes: list[dict] = []  # what start-up probes of library calls found, for the readback
        self._backends: dict[str, list[Backend]] = {}
        self._chosen: dict[tuple, list[Backend]] = {}
        self._overrides: dict[str, Backend] = {}

    def register(self, op: str, name: str, *, contract: bool, devices=("cpu",), dtypes=FLOATS,
                 guard: Callable[..., bool] | None = None) -> Callable:
        """Decorator: make a function a backend of `op`. Earlier registrations are preferred.

        `guard` gets a call's arguments; where it says no, the next backend is asked.
        """

        def add(function: Callable) -> Callable:
            self._backends.setdefault(op, []).append(Backend(op, name, function, contract, devices, dtypes, guard))
            self._chosen.clear()
            return function

        return add

    def set_mode(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, expected one of {MODES}")
        self.mode = mode
        self._chosen.clear()

    def call(self, op: str, like: torch.Tensor, *args, **kwargs):
        """Run `op` with the backend for `like`'s device and dtype, and count the call."""
        key = (op, like.device.type, like.dtype)
        backends = self._chosen.get(key)
        if backends is None:
            backends = self._chosen[key] = self._select(*key)
        backend = backends[0]
        if backend.guard is not None:
            backend = next(b for b in backends if b.guard is None or b.guard(*args, **kwargs))
        where = key[1:]
        backend.calls[where] = backend.calls.get(where, 0) + 1
        return backend.function(*args, **kwargs)

    def _select(self, op: str, device: str, dtype: torch.dtype) -> list[Backend]:
        """The backends to be asked in turn; one of them takes any arguments."""
        _load_backends(device)
        if op in self._overrides:
            return [self._overrides[op]]
        consistent = self.mode == "consistency"
        fitting = [b for b in self._backends.get(op, []) if b.serves(device, dtype) and b.contract == consistent]
        if any(b.guard is None for b in fitting):
            return fitting
        have = sorted({f"{b.name} ({'/'.join(b.devices)})" for b in self._backends.get(op, [])})
        raise CheckFailed(
            f"operator {op} has no {self.mode} backend for {dtype} on {device} (it has: {', '.join(have) or 'none'}); "
            f"run on a device it serves, or with --mode {'native' if consistent else 'consistency'}"
        )

    def unserved(self, device: str, mode: str) -> list[str]:
        """Operators that `call` would refuse on this device in that mode, whatever the dtype; sorted.

        One that no device serves in that mode is left out: it belongs to the other mode alone, as the backward of an
        operator that torch differentiates by itself.
        """
        _load_backends(device)
        consistent = mode == "consistency"
        missing = []
        for op, backends in self._backends.items():
            fitting = [b for b in backends if b.contract == consistent and b.devices]
            if fitting and not any(device in b.devices and b.guard is None for b in fitting):
                missing.append(op)
        return sorted(missing)

    @contextmanager
    def override(self, op: str, function: Callable) -> Iterator[None]:
        """Replace every backend of `op` for the time of the block: how negative controls break one link.

        Its calls stay in the readback, as calls outside the contract. A backend given here is asked no guard.
        """
        backend = next((b for b in self._backends[op] if b.function is function), None)
        if backend is None:
            backend = Backend(op, "override", function, contract=False, devices=())  # no device: never chosen otherwise
            self._backends[op].append(backend)
        self._overrides[op] = replace(backend, guard=None)  # its count of calls is the same
        self._chosen.clear()
        try:
            yield
        finally:
            del self._overrides[op]
            self._chosen.clear()

    def forget_calls(self) -> None:
        """Count from here on: for a second run in one process, whose readback would tell of the first."""
        for backend in (backend for backends in self._backends.values() for backend in backends):
            backend.calls.clear()

    def readback(self) -> list[dict]:
        """Rows {op, backend, device, dtype, contract, calls} for everything that ran, sorted."""
        rows = [
            dict(op=b.op, backend=b.name, device=device, dtype=str(dtype).removeprefix("torch."),
                 contract=b.contract, calls=calls)
            for backends in self._backends.values() for b in backends for (device, dtype), calls in b.calls.items()
        ]
        return sorted(rows, key=lambda row: (row["op"], row["backend"], row["device"], row["dtype"]))


def _load_backends(device: str) -> None:
    """The operators' own files register what runs on a CPU; the GPU's backends come when a GPU is first asked for."""
    if device == "cuda":
        importlib.import_module("rlk.ops.gpu")


registry = Registry()
