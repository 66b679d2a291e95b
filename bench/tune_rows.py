"""Times candidate configurations of the row kernels on Qwen3-8B's shapes at 4096 rows, on one GPU of sm_90.

For each kernel its candidates, on the cases of ops_rows.py. A candidate must first give the bits of the configuration
in the table; one that regroups the sums of a weight's gradient is marked so, and timed for comparison. Prints shares of
a copy's bandwidth; what it finds goes into the tables of triton/ by hand.

    python bench/tune_rows.py [embedding blocks heads norm_backward heads_backward]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from record import ROOT

HERE = ROOT.name  # `record` makes rlk importable for what follows

import ops_rows
from ops_rows import Case
from timing import Arm, measure
from triton.runtime.errors import OutOfResources

from rlk.kernels import embedding, norm_backward, rope, rope_backward, row_launch

COMPILERS = 8  # processes; each holds a context of the GPU for that time


@dataclass(frozen=True)
class Tuned:
    """A table's entry `name`, and what could stand there; `order`: which of its numbers the gradients' sums follow."""

    table: dict[str, tuple[int, ...]]
    name: str
    cases: tuple[str, ...]
    candidates: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] = ()

    @contextlib.contextmanager
    def set_to(self, config: tuple[int, ...]) -> Iterator[None]:
        before = self.table[self.name]
        self.table[self.name] = config
        try:
            yield
        finally:
            self.table[self.name] = before


TUNED = {
    "embedding": Tuned(  # tokens, columns, warps
        embedding.CONFIGS["sm_90"], "rows_4x1024", ("embedding",),
        ((1, 512, 2), (1, 1024, 4), (1, 4096, 8), (2, 1024, 4), (4, 512, 4), (4, 1024, 4), (4, 1024, 8), (8, 512, 8))),
    "blocks": Tuned(  # columns, warps
        row_launch.BLOCKS["sm_90"], "block_1024", ("write_kv", "residual_add", "swiglu", "swiglu_backward"),
        ((512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8))),
    "heads": Tuned(  # head dimension, heads per program, warps
        rope.CONFIGS["sm_90"], "head_128", ("qkv_norm_rope", "qk_norm_rope_write"),
        ((128, 4, 1), (128, 8, 1), (128, 8, 2), (128, 16, 2), (128, 16, 4), (128, 32, 4))),
    "norm_backward": Tuned(  # columns, rows per program, warps, stages
        norm_backward.CONFIGS["sm_90"], "block_4096", ("rms_norm_backward",),
        ((4096, 16, 8, 1), (4096, 16, 8, 2), (4096, 16, 8, 3), (4096, 16, 8, 4), (4096, 8, 8, 3), (4096, 32, 8, 3)),
        order=(1,)),
    "heads_backward": Tuned(  # head dimension, rows of a tile, tiles per program, warps
        rope_backward.CONFIGS["sm_90"], "head_128", ("qk_norm_rope_backward", "k_norm_rope_backward"),
        ((128, 16, 8, 4), (128, 16, 4, 4), (128, 16, 16, 4), (128, 8, 8, 2), (128, 8, 16, 2), (128, 32, 4, 8)),
        order=(1, 2)),
}


def compile_ahead(names: list[str]) -> None:
    """Fill Triton's cache in several processes: one alone would spend minutes."""
    jobs = [(name, case, config) for name in names for case in TUNED[name].cases for config in TUNED[name].candidates]
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, jobs, chunksize=len(jobs) // COMPILERS + 1))


def _compile(job: tuple[str, str, tuple[int, ...]]) -> None:
    name, case, config = job
    with TUNED[name].set_to(config), contextlib.suppress(OutOfResources, RuntimeError):  # `usable` says so
        ops_rows.cases(16)[case]().call()


def written_by(case: Case) -> list[torch.Tensor]:
    """Everything that the call writes, as bytes."""
    for tensor in case.written:
        tensor.zero_()
    result = case.call()
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in (*results, *case.written)]


def usable(tuned: Tuned, config: tuple[int, ...], case: Case, expected: list[torch.Tensor]) -> str | None:
    """What to print beside a candidate that may be timed; None where it cannot, or gives bits that it must not."""
    try:
        with tuned.set_to(config):
            got = written_by(case)
    except (OutOfResources, RuntimeError) as error:
        print(f"   {config}: {str(error).splitlines()[0]}", flush=True)
        return None
    if all(map(torch.equal, got, expected)):
        return "table" if config == tuned.table[tuned.name] else ""
    if any(config[k] != tuned.table[tuned.name][k] for k in tuned.order):
        return "sums the gradient in other groups"
    print(f"   {config}: OTHER BITS", flush=True)
    return None


def tune(tuned: Tuned, name: str, copy: float) -> None:
    """Print the share of a copy's bandwidth of every candidate on the case `name`, the fastest first."""
    made = list(ops_rows.cold(ops_rows.cases(4096)[name]))
    expected = written_by(made[0])
    notes = {config: note for config in tuned.candidates
             if (note := usable(tuned, config, made[0], expected)) is not None}

    def arm(config: tuple[int, ...]) -> Arm:
        def call() -> list:
            with tuned.set_to(config):
                return [case.call() for case in made]  # all kept: else all would write into one result in the L2 cache
        return Arm(str(config), call)

    times = measure([arm(config) for config in notes], graph=True)
    print(f"{name} ({tuned.name}):", flush=True)
    for config in sorted(notes, key=lambda config: times[str(config)]):
        us = times[str(config)] / len(made)
        print(f"   {made[0].moved / us * 1e6 / copy:6.3f} of copy {us:7.2f} us  {config} {notes[config]}", flush=True)


def main() -> None:
    if not torch.cuda.is_available() or torch.version.hip:
        sys.exit("error: this times sm_90 candidates; run it on a machine with an NVIDIA GPU")
    names = sys.argv[1:] or list(TUNED)
    if unknown := set(names) - TUNED.keys():
        sys.exit(f"error: got {', '.join(sorted(unknown))}; expected some of {', '.join(TUNED)}")
    compile_ahead(names)
    copy = ops_rows.copy_bandwidth()
    print(f"in {HERE}, on {torch.cuda.get_device_name()}: a copy moves {copy * 1e-12:.2f} TB/s", flush=True)
    for name in names:
        for case in TUNED[name].cases:
            tune(TUNED[name], case, copy)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
