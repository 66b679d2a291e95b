"""Runs the collectives between GPUs without a GPU: groups of ranks on the host's fibers, and on the emulator.

A group queues one call per rank; `run` of a host group ends when all of them have. Calls are named as the C functions.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlk.collectives.failure import NO_SLOT, Failure
from rlk.collectives.ipc_library import LEAST_SLICE, MOST_GROUPS, MOST_PARTS, MOST_RANKS, SLOTS, Part, Ranks, Sizes
from tests.gfx942.emulator import Device, Launch
from tests.gfx942.hip_runs import (
    BFLOAT16,
    CPP_NAME,
    FLOAT16,
    FLOAT32,
    LANES,
    LONG,
    STORED,
    HostFibers,
    LaunchError,
    gfx942_kernels,
    host_library,
)
from tests.gfx942.numerics import from_bf16, to_bf16

LINE = 128  # kCacheLine
ONE_SHOT, TWO_SHOTS, PUSHED = 0, 1, 2
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BARRIER, NORM = range(5)  # enum Operation
READY, DONE, CALL, DATA = 0, 1, 3, 4  # enum Signal
NO_FAILURE, TIMED_OUT, PEER_CLOSED, MISMATCH, SLOT_REUSED = range(5)  # enum FailureKind
FAILURE = np.dtype(Failure)
GROUP_PROGRESS = np.dtype({"names": ["generation", "released", "pushes", "used_slot", "failure"],
                           "formats": [np.uint64, np.uint64, np.uint64, np.int64, FAILURE],
                           "offsets": [0, 8, 16, 24, 32], "itemsize": LINE})
EPS = 1e-6
ALONE = Sizes(LEAST_SLICE, 0, 0)


def round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def collective_bytes(sizes: Sizes, world: int) -> tuple[int, int, int]:
    """Bytes of a segment, of a rank's progress and of the host's failure record."""
    found = [LONG() for _ in range(3)]
    if code := host_library(32).rlk_gpu_collective_bytes(*sizes, world, *map(ctypes.byref, found)):
        raise LaunchError(code)
    return tuple(size.value for size in found)


def direct_offset(sizes: Sizes, slot: int) -> int:
    offset = LONG()
    if code := host_library(32).rlk_gpu_direct_offset(sizes.slice, sizes.direct, slot, ctypes.byref(offset)):
        raise LaunchError(code)
    return offset.value


def receive_offset(sizes: Sizes) -> int:
    """Where the receive areas begin."""
    return direct_offset(sizes, 1) + sizes.direct


def all_ranks(segments: Sequence[int], sizes: Sizes, timeout_s: float, records: Sequence[int]) -> list[Ranks]:
    """The view of each rank of a group whose segments and failure records lie at these addresses."""
    return [Ranks((ctypes.c_void_p * MOST_RANKS)(*segments), rank, len(segments), *sizes, int(timeout_s * 1e9),
                  records[rank]) for rank in range(len(segments))]


def group_progress(raw: np.ndarray) -> np.ndarray:
    """What each workgroup keeps, in the bytes of a rank's Progress."""
    return raw[LINE:].view(GROUP_PROGRESS)


def aligned_zeros(size: int) -> np.ndarray:
    """`size` zero bytes at a multiple of 128, the alignment of the protocol's cache lines."""
    raw = np.zeros(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start:start + size]


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 128."""
    room = aligned_zeros(max(array.nbytes, 1))
    room[:array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return room[:array.nbytes].view(array.dtype).reshape(array.shape)


class HostGroup:
    """The ranks of a group on the host's fibers, each with a stream of its own."""

    def __init__(self, fibers: HostFibers, world: int, slice_bytes: int = 256, direct_bytes: int = 0,
                 timeout_s: float = 20, push_bytes: int = LEAST_SLICE) -> None:
        self.fibers, self.world, self.sizes = fibers, world, Sizes(slice_bytes, direct_bytes, push_bytes)
        segment, progress, _ = collective_bytes(self.sizes, world)
        self.segments = [aligned_zeros(segment) for _ in range(world)]
        self.raw_progress = [aligned_zeros(progress) for _ in range(world)]
        self.records = np.zeros(world, FAILURE)
        self.ranks = all_ranks([s.ctypes.data for s in self.segments], self.sizes, timeout_s,
                               [self.records[rank:].ctypes.data for rank in range(world)])
        # Groups of one, whose all-gather copies in stream order: it stands for the kernel that fills a slot.
        self._alone = [(aligned_zeros(collective_bytes(ALONE, 1)[0]), aligned_zeros(progress)) for _ in range(world)]
        self._kept = []  # what queued calls read and write

    def call(self, rank: int, name: str, *args) -> None:
        arguments = (ctypes.addressof(self.ranks[rank]), self.raw_progress[rank], *args)
        self.fibers.call(name, *arguments[:1 if name == "close" else None], rank + 1)

    def fill_slot(self, rank: int, slot: int, x: np.ndarray) -> None:
        """On the rank's stream."""
        address = self.segments[rank].ctypes.data + direct_offset(self.sizes, slot)
        segment, progress = self._alone[rank]
        ranks = all_ranks([segment.ctypes.data], ALONE, 60, [0])[0]
        self.fibers.call("all_gather", ctypes.addressof(ranks), progress, 1, 0, x, address, x.nbytes, rank + 1)

    def progress(self, rank: int) -> np.ndarray:
        return group_progress(self.raw_progress[rank])

    def queue(self, rank: int, job: Job) -> list[np.ndarray]:
        """Queue this rank's call. Returns what will hold its results."""
        xs = [aligned(x) for x in job.inputs[rank]]
        outs = [aligned(np.full_like(out, 77)) for out in job.expected[rank]]
        if job.in_place:
            outs = [job.alias(rank, x) for x in xs]
        if job.slot != NO_SLOT:
            self.fill_slot(rank, job.slot, xs[0])
        self._kept += [xs, outs]
        self.call(rank, *job.arguments(xs, outs))
        return outs

    def run(self, *jobs: Job) -> list[list[list[np.ndarray]]]:
        """The results of every job, rank by rank."""
        with self.fibers.together():
            results = [[self.queue(rank, job) for rank in range(self.world)] for job in jobs]
        self._kept.clear()
        return results


class EmulatedGroup:
    """The ranks of a group as launches that take turns on one emulated memory."""

    def __init__(self, world: int, order: str = "forward", slice_bytes: int = 256, direct_bytes: int = 0,
                 timeout_s: float = 60, size: int = 1 << 22, push_bytes: int = 512) -> None:
        self.world, self.sizes = world, Sizes(slice_bytes, direct_bytes, push_bytes)
        segment, progress, record = collective_bytes(self.sizes, world)
        self.device = Device(order, size + world * (segment + progress))  # `size` is for the calls' own tensors
        self.segments, self.progresses, self.records = (
            [self.device.put(np.zeros(each, np.uint8)) for _ in range(world)] for each in (segment, progress, record))
        self.ranks = all_ranks(self.segments, self.sizes, timeout_s, self.records)
        self.cut: tuple[int, int] | None = None  # of an all-reduce, in place of what the C function chooses

    def progress(self, rank: int) -> np.ndarray:
        size = collective_bytes(self.sizes, self.world)[1]
        return group_progress(self.device.get(self.progresses[rank], (size,), np.uint8))

    def record(self, rank: int) -> np.ndarray:
        return self.device.get(self.records[rank], (1,), FAILURE)[0]

    def close_launch(self, rank: int) -> Launch:
        return Launch(*gfx942_kernels()["close_segment", ""], (self.world, 1, 1), 64, (bytes(self.ranks[rank]),))

    def launch(self, rank: int, job: Job) -> tuple[Launch, list[int]]:
        """This rank's call, and the addresses of its results."""
        xs = [self.device.put(x) for x in job.inputs[rank]]
        outs = [self.device.put(np.full_like(out, 77)) for out in job.expected[rank]]
        if job.in_place:
            outs = [x + job.alias_offset(rank) for x in xs]
        if job.slot != NO_SLOT:
            offset = self.segments[rank] + direct_offset(self.sizes, job.slot)
            data = job.inputs[rank][0].reshape(-1).view(np.uint8)
            self.device.memory.bytes[offset:offset + len(data)] = data
        kernel, configuration, groups, lanes, args = job.kernel_launch(self, xs, outs)
        path, name = gfx942_kernels()[kernel, configuration]
        return Launch(path, name, (groups, 1, 1), lanes, (bytes(self.ranks[rank]), self.progresses[rank], *args)), outs

    def run(self, job: Job) -> list[list[np.ndarray]]:
        """The results of one job, rank by rank."""
        launches, addresses = zip(*(self.launch(rank, job) for rank in range(self.world)), strict=True)
        self.device.launch_together(list(launches))
        return [[self.device.get(at, out.shape, out.dtype) for at, out in zip(row, job.expected[rank], strict=True)]
                for rank, row in enumerate(addresses)]


# ---- what is called ----

WIDEN: dict[int, Callable] = {FLOAT32: np.float32, BFLOAT16: from_bf16, FLOAT16: np.float32}
ROUND: dict[int, Callable] = {FLOAT32: np.float32, BFLOAT16: to_bf16, FLOAT16: np.float16}


def tree(terms: Sequence[np.ndarray]) -> np.ndarray:
    """((0+1)+(2+3))+.. in FP32, for a power of two of terms."""
    return terms[0] if len(terms) == 1 else tree(terms[:len(terms) // 2]) + tree(terms[len(terms) // 2:])


def expected_sum(dtype: int, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """What every rank must get, by numpy."""
    with np.errstate(over="ignore", invalid="ignore"):
        return ROUND[dtype](tree([np.asarray(WIDEN[dtype](x), np.float32) for x in inputs])).astype(STORED[dtype])


def draw_inputs(rng: np.random.Generator, dtype: int, world: int, count: int) -> list[np.ndarray]:
    """Inputs of very different size, so that the order of the additions shows; zeros of both signs among them."""
    xs = rng.standard_normal((world, count)).astype(np.float32) * np.exp2(rng.integers(-12, 12, (world, count)))
    xs[rng.random((world, count)) < 0.05] = -0.0
    return [ROUND[dtype](x.astype(np.float32)).astype(STORED[dtype]) for x in xs]


def cut_message(size: int, most: int) -> tuple[int, int]:
    """Bytes of a slice, and workgroups: cut_message of hipkernels/gpu/segment.h."""
    cut = min(max(round_up(math.ceil(size / MOST_GROUPS), LINE), LEAST_SLICE), most)
    return cut, min(max(math.ceil(size / cut), 1), MOST_GROUPS)


@dataclass
class Job:
    """One call on every rank: inputs and expected results, rank by rank, each several arrays."""

    operation: int
    inputs: list[list[np.ndarray]]
    expected: list[list[np.ndarray]]
    dtype: int = FLOAT32
    route: int = ONE_SHOT
    slot: int = NO_SLOT
    in_place: bool = False
    shape: tuple[int, int] = (0, 0)  # rows and columns, of the norm
    world: int = field(init=False)

    def __post_init__(self) -> None:
        self.world = len(self.inputs)

    @property
    def size(self) -> int:
        """Elements of a rank's (first) input."""
        return self.inputs[0][0].size if self.inputs[0] else 0

    def alias_offset(self, rank: int) -> int:
        """Where in its input a rank's result lies when the call is in place."""
        if self.operation == REDUCE_SCATTER:
            return rank * self.expected[rank][0].nbytes
        return 0

    def alias(self, rank: int, x: np.ndarray) -> np.ndarray:
        start = self.alias_offset(rank) // x.itemsize
        return x[start:start + self.expected[rank][0].size]

    def arguments(self, xs: list, outs: list) -> tuple:
        """The C function and what it takes between progress and stream."""
        if self.operation == ALL_REDUCE:
            return "all_reduce", self.dtype, self.route, self.slot, xs[0], outs[0], self.size
        if self.operation == ALL_GATHER:
            return "all_gather", xs[0].itemsize, self.dtype, xs[0], outs[0], self.size
        if self.operation == REDUCE_SCATTER:
            parts = [Part(address_of(x), address_of(out), expected.size)
                     for x, out, expected in zip(xs, outs, self.expected[0], strict=True)]
            return "reduce_scatter", self.dtype, (Part * len(parts))(*parts), len(parts)
        if self.operation == NORM:
            return "all_reduce_rms_norm", self.route, self.slot, *xs, *outs, *self.shape, EPS
        return ("barrier",)

    def kernel_launch(self, group: EmulatedGroup, xs: list[int], outs: list[int]) -> tuple:
        """Kernel, configuration, workgroups, lanes, and arguments after ranks and progress: as the C functions do."""
        slice_bytes, itemsize = group.sizes.slice, STORED[self.dtype].itemsize
        slices = direct_offset(group.sizes, 0) - MOST_GROUPS * slice_bytes
        receive, pushed = receive_offset(group.sizes), self.route == PUSHED and self.world > 1

        def area(piece):
            if self.slot == NO_SLOT:
                return np.array([slices, slice_bytes], np.uint64).tobytes()
            return np.array([direct_offset(group.sizes, self.slot), piece], np.uint64).tobytes()

        if self.operation == ALL_REDUCE and pushed:
            size = self.size * itemsize
            return ("all_reduce_pushed", f"{CPP_NAME[self.dtype]}, {self.world}", cut_message(size, LEAST_SLICE)[1],
                    LANES + 64, (self.slot, receive, xs[0], outs[0], size))
        if self.operation == ALL_REDUCE:
            size = self.size * itemsize
            cut, groups = group.cut or cut_message(size, slice_bytes if self.slot == NO_SLOT else size + LINE)
            kernel = "all_reduce_in_two" if self.route == TWO_SHOTS and self.world > 1 else "all_reduce"
            return (kernel, f"{CPP_NAME[self.dtype]}, {self.world}", groups, LANES,
                    (self.slot, area(cut), cut, xs[0], outs[0], size))
        if self.operation == ALL_GATHER:
            size = self.inputs[0][0].nbytes
            cut, groups = cut_message(size, slice_bytes)
            return ("all_gather", str(self.world), groups, LANES,
                    (self.dtype, self.size, area(cut), cut, xs[0], outs[0], size))
        if self.operation == REDUCE_SCATTER:
            counts = [out.size for out in self.expected[0]]
            vectors = [math.ceil(count * itemsize / 16) for count in counts]
            table = np.zeros(4 * MOST_PARTS + 1, np.uint64)
            for start, values in zip(range(0, 49, MOST_PARTS), (xs, outs, counts, [0]), strict=True):
                table[start:start + len(values)] = values
            table[49:] = sum(vectors)
            table[49:49 + len(counts)] = list(itertools.accumulate(vectors))
            cut, groups = cut_message(sum(vectors) * 16, slice_bytes // self.world // 16 * 16)
            return ("reduce_scatter", f"{CPP_NAME[self.dtype]}, {self.world}", groups, LANES,
                    (table.tobytes(), self.world * sum(counts), 0, area(cut), cut))
        if self.operation == NORM:
            T, D = self.shape
            block = max(512, 1 << (D - 1).bit_length())
            lanes, groups = min(64 * 8, block // 8), min(max(T, 1), MOST_GROUPS)
            if pushed:
                return ("all_reduce_norm_pushed", str(self.world), groups, lanes + 64,
                        (self.slot, receive, *xs, *outs, T, D, EPS, lanes))
            rows = slice_bytes // (D * 4) if self.slot == NO_SLOT else T // groups + 1
            return ("all_reduce_norm", str(self.world), groups, lanes,
                    (self.slot, area(0), *xs, *outs, T, D, EPS, lanes, rows))
        return "barrier", "", 1, 64, ()


def address_of(array) -> int:
    """Of a numpy array or a torch tensor."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


def all_reduce(rng, world: int, dtype: int, count: int, route: int = ONE_SHOT, slot: int = NO_SLOT,
               in_place: bool = False) -> Job:
    inputs = draw_inputs(rng, dtype, world, count)
    return Job(ALL_REDUCE, [[x] for x in inputs], [[expected_sum(dtype, inputs)]] * world, dtype, route, slot, in_place)


def all_gather(rng, world: int, dtype: int, count: int) -> Job:
    inputs = draw_inputs(rng, dtype, world, count)
    return Job(ALL_GATHER, [[x] for x in inputs], [[np.stack(inputs)]] * world, dtype)


def reduce_scatter(rng, world: int, dtype: int, counts: Sequence[int], in_place: bool = False) -> Job:
    parts = [draw_inputs(rng, dtype, world, world * count) for count in counts]
    sums = [expected_sum(dtype, part).reshape(world, -1) for part in parts]
    return Job(REDUCE_SCATTER, [[part[rank] for part in parts] for rank in range(world)],
               [[s[rank].copy() for s in sums] for rank in range(world)], dtype, in_place=in_place)


def barrier(world: int) -> Job:
    return Job(BARRIER, [[]] * world, [[]] * world)


def norm(rng, world: int, wave: int, T: int, D: int, slot: int = NO_SLOT, route: int = ONE_SHOT) -> Job:
    """The bits are those for waves of `wave` lanes."""
    partials = [x.reshape(T, D) for x in draw_inputs(rng, FLOAT32, world, T * D)]
    residual, weight = (to_bf16(rng.standard_normal(shape)) for shape in ((T, D), (D,)))
    hidden = to_bf16(from_bf16(residual) + expected_sum(FLOAT32, partials))
    return Job(NORM, [[partial, residual, weight] for partial in partials],
               [[hidden, rms_norm(hidden, weight, wave)]] * world, route=route, slot=slot, shape=(T, D))


def rms_norm(hidden: np.ndarray, weight: np.ndarray, wave: int) -> np.ndarray:
    """y with the bits of the kernels for waves of `wave` lanes."""
    y = np.empty_like(hidden)
    for row, x in enumerate(from_bf16(hidden)):
        mean = sum_of_squares(x, wave) / np.float32(x.size)
        scale = np.float32(1) / np.sqrt(mean + np.float32(EPS))
        y[row] = to_bf16(x * scale * from_bf16(weight))
    return y


def sum_of_squares(x: np.ndarray, wave: int) -> np.float32:
    """In the order of hipkernels/gpu/all_reduce_norm.cpp."""
    block = max(512, 1 << (x.size - 1).bit_length())
    waves = min(8, block // (wave * 8))
    squares = np.zeros(block, np.float32)
    squares[:x.size] = x * x
    lanes = np.zeros(waves * wave, np.float32)
    for round_of in squares.reshape(-1, waves * wave, 8):
        for column in range(8):
            lanes += round_of[:, column]
    lanes, number = lanes.reshape(waves, wave), np.arange(wave)
    for distance in (8, 4, 2, 1, 16, 32) if wave == 64 else (16, 8, 4, 2, 1):
        lanes = lanes + lanes[:, number ^ distance]
    of_wave = np.zeros(8, np.float32)
    of_wave[:waves] = lanes[:, 0]
    for distance in (4, 2, 1):
        of_wave = of_wave + of_wave[np.arange(8) ^ distance]
    return of_wave[0]


def random_job(rng, world: int, wave: int, previous_slot: int, sizes: Sizes, most_rows: int = MOST_GROUPS) -> Job:
    """Any call that may follow one in `previous_slot`. most_rows: of a norm, each a workgroup of every rank."""
    dtype = int(rng.choice(list(STORED)))
    most = sizes.direct // 4
    count = int(rng.choice([0, 1, 5, 16, int(rng.integers(1, most))]))
    slot = int(rng.choice([s for s in (NO_SLOT, *range(SLOTS)) if s == NO_SLOT or s != previous_slot]))
    kind = int(rng.integers(6))
    if kind == 0:
        return all_gather(rng, world, dtype, count)
    if kind == 1:
        counts = [int(rng.integers(0, 70)) for _ in range(int(rng.integers(1, 6)))]
        return reduce_scatter(rng, world, dtype, counts)
    if kind == 2:
        return barrier(world)
    if kind == 3:
        D = int(rng.integers(1, min(sizes.slice, sizes.push) // 64 + 1)) * 16
        T = int(rng.integers(0, min(sizes.direct // (4 * D), most_rows) + 1))
        return norm(rng, world, wave, T, D, slot, int(rng.choice([ONE_SHOT, PUSHED])))
    return all_reduce(rng, world, dtype, count, int(rng.integers(3)), slot, in_place=bool(rng.integers(2)))
