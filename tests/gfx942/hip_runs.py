"""Runs the HIP kernels without a GPU: on the host's fibers, and as gfx942 code objects on the emulator.

Both have the operators' names and take numpy arrays, so that a test can compare their bytes. Retained sets are CSR, as
in rlk/ops/logprob.py; dtypes are named by the codes of hipkernels/abi.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlk.build.code_object import read_code_object
from rlk.build.hip import build_hip
from rlk.build.host_fibers import build_host
from rlk.build.resources import demangle, kernel_and_configuration
from tests.gfx942.emulator import Device, Launch
from tests.gfx942.numerics import from_bf16, to_bf16

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
    "draw": (POINTER, POINTER, POINTER, LONG, FLOAT, WORD, POINTER, POINTER, POINTER, POINTER),
    "all_reduce": (POINTER, POINTER, INT, POINTER, POINTER, LONG, POINTER),
    "collective_bytes": (LONG, POINTER, POINTER),
    "close": (POINTER, POINTER),
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

    def draw(self, values, offsets, ids, inv_t, seed, uids, positions):
        tokens = np.full(len(uids), -7, np.int64)
        self.call("draw", values, offsets, ids, len(uids), inv_t, seed, uids, positions, tokens, None)
        return tokens


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

    def draw(self, values, offsets, ids, inv_t, seed, uids, positions):
        tokens, rows = np.full(len(uids), -7, np.int64), len(uids)
        return self._run("draw", "", rows, [values, offsets, ids, inv_t, seed, uids, positions, tokens], tokens)


# ---- collectives ----

MOST_RANKS, MOST_GROUPS = 8, 64
ALL_REDUCE = 0  # enum Operation
READY, DONE = 0, 1  # enum Signal
NO_FAILURE, TIMED_OUT, PEER_CLOSED, MISMATCH = range(4)  # enum FailureKind
CALL = np.dtype([("operation", np.int32), ("dtype", np.int32), ("count", np.uint64)])
FAILURE = np.dtype([("kind", np.int32), ("peer", np.int32), ("signal", np.int32), ("reserved", np.int32),
                    ("generation", np.uint64), ("seen", np.uint64), ("mine", CALL), ("theirs", CALL)])
PROGRESS = np.dtype({"names": ["generation", "failure"], "formats": [np.uint64, FAILURE], "offsets": [0, 8],
                     "itemsize": 128})


class Ranks(ctypes.Structure):
    """struct Ranks of hipkernels/gpu/all_reduce.cpp: the group as one rank sees it."""

    _fields_ = [("segment", WORD * MOST_RANKS), ("rank", ctypes.c_int32), ("world", ctypes.c_int32),
                ("slice_bytes", WORD), ("timeout_ns", WORD)]


def groups_of(count: int, dtype: int, slice_bytes: int) -> int:
    """Workgroups of an all-reduce of `count` elements."""
    return min(max(math.ceil(count * STORED[dtype].itemsize / slice_bytes), 1), MOST_GROUPS)


def collective_bytes(slice_bytes: int) -> tuple[int, int]:
    """Bytes of a segment and of a rank's progress."""
    segment, progress = LONG(), LONG()
    if code := host_library(32).rlk_gpu_collective_bytes(slice_bytes, ctypes.byref(segment), ctypes.byref(progress)):
        raise LaunchError(code)
    return segment.value, progress.value


def all_ranks(segments: Sequence[int], slice_bytes: int, timeout_s: float) -> list[Ranks]:
    """The view of each rank of a group whose segments lie at these addresses."""
    return [Ranks((WORD * MOST_RANKS)(*segments), rank, len(segments), slice_bytes, int(timeout_s * 1e9))
            for rank in range(len(segments))]


def aligned_zeros(size: int) -> np.ndarray:
    """`size` zero bytes at a multiple of 128, the alignment of the protocol's cache lines."""
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start:start + size]


class HostGroup:
    """The ranks of a group on the host's fibers, each with a stream of its own."""

    def __init__(self, fibers: HostFibers, world: int, slice_bytes: int = 256, timeout_s: float = 60) -> None:
        segment, progress = collective_bytes(slice_bytes)
        self.fibers, self.slice_bytes = fibers, slice_bytes
        self.segments = [aligned_zeros(segment) for _ in range(world)]
        self.raw_progress = [aligned_zeros(progress) for _ in range(world)]
        self.ranks = all_ranks([s.ctypes.data for s in self.segments], slice_bytes, timeout_s)

    def all_reduce(self, rank: int, dtype: int, x: np.ndarray, out: np.ndarray) -> None:
        self.fibers.call("all_reduce", ctypes.addressof(self.ranks[rank]), self.raw_progress[rank], dtype, x, out,
                         x.size, rank + 1)

    def close(self, rank: int) -> None:
        self.fibers.call("close", ctypes.addressof(self.ranks[rank]), rank + 1)

    def run(self, dtype: int, inputs: Sequence[np.ndarray], in_place: bool = False) -> list[np.ndarray]:
        """One all-reduce of every rank."""
        xs = [x.copy() for x in inputs]
        outs = xs if in_place else [np.full_like(x, 77) for x in xs]
        with self.fibers.together():
            for rank, (x, out) in enumerate(zip(xs, outs, strict=True)):
                self.all_reduce(rank, dtype, x, out)
        return outs

    def progress(self, rank: int) -> np.ndarray:
        return self.raw_progress[rank].view(PROGRESS)


class EmulatedGroup:
    """The ranks of a group as launches that take turns on one emulated memory."""

    def __init__(self, world: int, order: str = "forward", slice_bytes: int = 256, timeout_s: float = 60) -> None:
        segment, progress = collective_bytes(slice_bytes)
        self.device, self.slice_bytes = Device(order), slice_bytes
        segments = [self.device.put(np.zeros(segment, np.uint8)) for _ in range(world)]
        self.progresses = [self.device.put(np.zeros(progress, np.uint8)) for _ in range(world)]
        self.ranks = all_ranks(segments, slice_bytes, timeout_s)

    def launch(self, rank: int, dtype: int, x: int, out: int, count: int) -> Launch:
        path, name = gfx942_kernels()["all_reduce", f"{CPP_NAME[dtype]}, {len(self.ranks)}"]
        return Launch(path, name, (groups_of(count, dtype, self.slice_bytes), 1, 1), LANES,
                      (bytes(self.ranks[rank]), self.progresses[rank], x, out, count))

    def close_launch(self, rank: int) -> Launch:
        return Launch(*gfx942_kernels()["close_segment", ""], (MOST_GROUPS, 1, 1), 64, (bytes(self.ranks[rank]),))

    def run(self, dtype: int, inputs: Sequence[np.ndarray], in_place: bool = False) -> list[np.ndarray]:
        """One all-reduce of every rank."""
        xs = [self.device.put(x) for x in inputs]
        outs = xs if in_place else [self.device.put(np.full_like(x, 77)) for x in inputs]
        self.device.launch_together([self.launch(rank, dtype, x, out, inputs[rank].size)
                                     for rank, (x, out) in enumerate(zip(xs, outs, strict=True))])
        return [self.device.get(out, x.shape, x.dtype) for out, x in zip(outs, inputs, strict=True)]

    def progress(self, rank: int) -> np.ndarray:
        return self.device.get(self.progresses[rank], (MOST_GROUPS,), PROGRESS)


WIDEN: dict[int, Callable] = {FLOAT32: np.float32, BFLOAT16: from_bf16, FLOAT16: np.float32}
ROUND: dict[int, Callable] = {FLOAT32: np.float32, BFLOAT16: to_bf16, FLOAT16: np.float16}


def tree(terms: Sequence[np.ndarray]) -> np.ndarray:
    """((0+1)+(2+3))+.. in FP32, for a power of two of terms."""
    return terms[0] if len(terms) == 1 else tree(terms[:len(terms) // 2]) + tree(terms[len(terms) // 2:])


def expected_sum(dtype: int, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """What every rank must get, by numpy."""
    with np.errstate(over="ignore"):
        return ROUND[dtype](tree([np.asarray(WIDEN[dtype](x), np.float32) for x in inputs])).astype(STORED[dtype])


def draw_inputs(rng: np.random.Generator, dtype: int, world: int, count: int) -> list[np.ndarray]:
    """Inputs of very different size, so that the order of the additions shows; zeros of both signs among them."""
    xs = rng.standard_normal((world, count)).astype(np.float32) * np.exp2(rng.integers(-12, 12, (world, count)))
    xs[rng.random((world, count)) < 0.05] = -0.0
    return [ROUND[dtype](x.astype(np.float32)).astype(STORED[dtype]) for x in xs]
