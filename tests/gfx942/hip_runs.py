"""Runs the HIP kernels without a GPU: on the host's fibers, and as gfx942 code objects on the emulator.

Both have the operators' names and take numpy arrays, so that a test can compare their bytes. Retained sets are CSR, as
in rlk/ops/logprob.py; dtypes are named by the codes of hipkernels/abi.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path

import numpy as np

from rlk.build.code_object import read_code_object
from rlk.build.hip import build_hip
from rlk.build.host_fibers import build_host
from rlk.build.resources import demangle, kernel_and_configuration
from tests.gfx942.emulator import Device

WAVES, ORDERS, LANES = (32, 64), ("forward", "reverse"), 256
BAD_DTYPE, BAD_SHAPE, MISALIGNED, DEADLOCK = 1, 2, 5, 7  # enum Error
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # enum Dtype
STORED = {FLOAT32: np.dtype(np.float32), BFLOAT16: np.dtype(np.uint16), FLOAT16: np.dtype(np.float16)}
CPP_NAME = {FLOAT32: "float", BFLOAT16: "unsigned short", FLOAT16: "rlk::half"}

POINTER, INT, LONG, FLOAT, WORD = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_uint64
LAUNCHERS = {
    "find_targets": (POINTER, POINTER, POINTER, LONG, POINTER, POINTER),
    "pick_logits": (POINTER, LONG, LONG, POINTER, POINTER, LONG, POINTER, POINTER),
    "support_score": (POINTER, POINTER, POINTER, LONG, FLOAT, POINTER, POINTER),
    "support_score_backward": (*[POINTER] * 6, LONG, LONG, LONG, FLOAT, INT, POINTER, POINTER),
    "cumulative_sum": (POINTER, LONG, LONG, POINTER, POINTER, POINTER),
    "sampler_sizes": (POINTER, POINTER),
    "sampler_select": (POINTER, LONG, LONG, LONG, POINTER, INT, *[POINTER] * 4),
    "sampler_draw": (POINTER, LONG, LONG, LONG, *[POINTER] * 11),
    "sampler_greedy": (POINTER, LONG, LONG, LONG, *[POINTER] * 6),
    "sampler_record": (POINTER, LONG, LONG, *[POINTER] * 5, LONG, LONG, *[POINTER] * 6),
    "all_reduce": (POINTER, POINTER, INT, INT, INT, POINTER, POINTER, LONG, POINTER),
    "all_gather": (POINTER, POINTER, INT, INT, POINTER, POINTER, LONG, POINTER),
    "reduce_scatter": (POINTER, POINTER, INT, POINTER, INT, POINTER),
    "barrier": (POINTER, POINTER, POINTER),
    "all_reduce_rms_norm": (POINTER, POINTER, INT, INT, *[POINTER] * 5, LONG, LONG, FLOAT, POINTER),
    "close": (POINTER, POINTER),
    "collective_bytes": (LONG, LONG, LONG, INT, POINTER, POINTER, POINTER),
    "direct_offset": (LONG, LONG, INT, POINTER),
    "memory_create": (LONG, POINTER),
    "memory_free": (POINTER,),
    "pinned_create": (LONG, POINTER, POINTER),
    "pinned_free": (POINTER,),
    "ipc_export": (POINTER, POINTER),
    "ipc_open": (POINTER, POINTER),
    "ipc_close": (POINTER,),
    "can_access_peer": (INT, INT, POINTER),
}


class LaunchError(Exception):
    """A launcher refused its arguments, or a kernel ended badly; `code` is of enum Error."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code} of hipkernels/abi.h")
        self.code = code


@functools.cache
def host_library(wave: int) -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_host(wave)))
    for name, arguments in LAUNCHERS.items():
        if hasattr(library, f"rlk_gpu_{name}"):
            getattr(library, f"rlk_gpu_{name}").argtypes = arguments
    library.rlk_fibers_order.argtypes = (INT, WORD)
    return library


class HostFibers:
    """The kernels built for the host. A `seed` leaves lanes behind at random."""

    def __init__(self, wave: int = 32, order: str = "forward", seed: int = 0) -> None:
        self.library, self.order = host_library(wave), (int(order == "reverse"), seed)

    def call(self, name: str, *args) -> None:
        """The launcher `name`; arrays travel as their addresses. Raises LaunchError."""
        self.library.rlk_fibers_order(*self.order)
        plain = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
        if code := getattr(self.library, f"rlk_gpu_{name}")(*plain):
            raise LaunchError(code)

    @contextlib.contextmanager
    def together(self):
        """The launches within run when it ends, the streams side by side. Raises LaunchError."""
        self.library.rlk_fibers_hold()
        try:
            yield
        finally:
            code = self.library.rlk_fibers_run()
        if code:
            raise LaunchError(code)

    def find_targets(self, offsets, ids, targets):
        index = np.full(len(targets), -7, np.int64)
        self.call("find_targets", offsets, ids, targets, len(targets), index, None)
        return index

    def pick_logits(self, logits, offsets, ids, first_id, values):
        self.call("pick_logits", logits, *logits.shape, offsets, ids, first_id, values, None)
        return values

    def support_score(self, values, offsets, index, inv_t):
        scores = np.full((3, len(index)), 77, np.float32)
        self.call("support_score", values, offsets, index, len(index), inv_t, scores, None)
        return scores

    def support_score_backward(self, values, offsets, ids, index, lse, grad, first_id, inv_t, dtype, dlogits):
        self.call("support_score_backward", values, offsets, ids, index, lse, grad, *dlogits.shape, first_id, inv_t,
                  dtype, dlogits, None)
        return dlogits


@functools.cache
def gfx942_kernels() -> dict[tuple[str, str], tuple[Path, str]]:
    """(kernel, template arguments) -> (code object, symbol)."""
    symbols = [(path, name) for path in build_hip().code_objects for name in read_code_object(path)]
    readable = demangle([name for _, name in symbols])
    return {kernel_and_configuration(name): symbol for name, symbol in zip(readable, symbols, strict=True)}


class Emulated:
    """The kernels' gfx942 code objects on the emulator."""

    def __init__(self, order: str = "forward", size: int = 1 << 24) -> None:
        self.device = Device(order, size)

    def launch(self, kernel: str, configuration: str, groups: int, *args, lanes: int = LANES) -> None:
        self.device.launch(*gfx942_kernels()[kernel, configuration], (groups, 1, 1), lanes, args)

    def _run(self, kernel, configuration, groups, args, result):
        """`args` with arrays copied in; `result` is one of them, and comes back."""
        addresses = {id(a): self.device.put(a) for a in args if isinstance(a, np.ndarray)}
        self.launch(kernel, configuration, groups, *(addresses.get(id(a), a) for a in args))
        return self.device.get(addresses[id(result)], result.shape, result.dtype)

    def find_targets(self, offsets, ids, targets):
        index, rows = np.full(len(targets), -7, np.int64), len(targets)
        return self._run("find_targets", "", -(-rows // LANES), [offsets, ids, targets, rows, index], index)

    def pick_logits(self, logits, offsets, ids, first_id, values):
        rows, columns = logits.shape
        return self._run("pick_logits", "", rows, [logits, columns, offsets, ids, first_id, values], values)

    def support_score(self, values, offsets, index, inv_t):
        scores, rows = np.full((3, len(index)), 77, np.float32), len(index)
        return self._run("support_score", "", rows, [values, offsets, index, rows, inv_t, scores], scores)

    def support_score_backward(self, values, offsets, ids, index, lse, grad, first_id, inv_t, dtype, dlogits):
        rows, columns = dlogits.shape
        return self._run("support_score_backward", CPP_NAME[dtype], rows,
                         [values, offsets, ids, index, lse, grad, columns, first_id, inv_t, dlogits], dlogits)
