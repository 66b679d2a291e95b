"""Times candidate configurations of the attention kernels on Qwen3-8B's heads, on one GPU of sm_90.

For each kernel its candidates, on the cases of ops_attention.py, beside the peers: every candidate must first give the
bits of the configuration in the table. Then other chunk widths, whose bits differ: for the contract's constant. Prints;
what it finds goes into CONFIGS of triton/attention.py and attention_backward.py by hand.

    python bench/tune_attention.py [decode forward dkdv dq chunks]
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from record import ROOT

HERE = ROOT.name  # `record` makes rlk importable for what follows

import ops_attention
from ops_attention import CONTEXTS, Decode, Training, fa3_arms
from timing import Arm, measure
from triton.runtime.errors import OutOfResources

from rlk.kernels import attention, attention_backward, attention_plan
from rlk.kernels.attention import Config

COMPILERS = 8  # processes; each holds a context of the GPU for that time
SHOWN = 6
TILES = ("BLOCK_M", "BLOCK_N", "WHOLE", "num_warps", "num_stages")
CANDIDATES: dict[str, tuple[str, tuple[str, ...], tuple[tuple, ...]]] = {
    "forward": ("attention_hopper", ("STAGES",), ((2,), (3,), (4,))),
    "dkdv": ("attention_dkdv", TILES, (
        (64, 128, True, 8, 2), (64, 128, True, 8, 3), (64, 128, False, 8, 2), (64, 128, False, 8, 3),
        (32, 128, True, 8, 2), (32, 128, True, 8, 3), (32, 128, True, 8, 4), (64, 64, True, 4, 2),
        (64, 64, False, 4, 2), (32, 64, True, 4, 2), (32, 64, False, 4, 3))),
    "dq": ("attention_dq", TILES, (
        (128, 64, True, 8, 2), (128, 64, True, 8, 3), (128, 64, False, 8, 2), (128, 64, False, 8, 3),
        (128, 128, True, 8, 2), (128, 128, False, 8, 2), (128, 32, True, 8, 4), (64, 64, True, 4, 2),
        (64, 64, False, 4, 2), (64, 32, True, 4, 3), (64, 128, False, 4, 2))),
    "split": ("attention_split", ("num_warps", "num_stages"), tuple(itertools.product((1, 2, 4, 8), (2, 3, 4, 5)))),
    "merge": ("attention_merge", ("num_warps", "UNROLL"), tuple(itertools.product((1, 2, 4), (2, 4, 8, 16)))),
}
CHUNKS = (256, 512, 1024, 2048)


@contextlib.contextmanager
def table(kernel: str, values: dict) -> Iterator[None]:
    """The table with these constants and options in every configuration of `kernel`, for the time of the block."""
    replaced = [(module.CONFIGS["sm_90"], name, old) for module in (attention, attention_backward)
                for name, old in module.CONFIGS["sm_90"].items() if old.kernel == kernel]
    for configs, name, old in replaced:
        constants = {key: values.get(key, value) for key, value in old.constants.items()}
        options = old.options | {key: value for key, value in values.items() if key not in constants}
        configs[name] = Config(kernel, constants, options, old.most_programs)
    try:
        yield
    finally:
        for configs, name, old in replaced:
            configs[name] = old


@contextlib.contextmanager
def chunk_width(width: int) -> Iterator[None]:
    """Another width of the contract's chunks, for the time of the block."""
    old = attention.ATTENTION_CHUNK
    attention.ATTENTION_CHUNK = attention_plan.ATTENTION_CHUNK = width
    try:
        yield
    finally:
        attention.ATTENTION_CHUNK = attention_plan.ATTENTION_CHUNK = old


def compile_ahead(names: list[str]) -> None:
    """Fill Triton's cache in several processes: one alone would spend minutes."""
    jobs = [(name, number, None) for name in names if name != "chunks" for number in range(len(CANDIDATES[name][2]))]
    if "chunks" in names:
        jobs += [("", 0, width) for width in CHUNKS]
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True)))


def _compile(name: str, number: int, width: int | None) -> None:
    with contextlib.suppress(OutOfResources, RuntimeError):  # `tune` says so
        if width:
            with chunk_width(width):
                Training(128)
                Decode(64).ours()
            return
        kernel, keys, candidates = CANDIDATES[name]
        with table(kernel, dict(zip(keys, candidates[number], strict=True))):
            Decode(64).ours() if name in ("split", "merge") else Training(128).backward()


def equal_bits(a, b) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def tune(what: str, name: str, run: Callable[[], object], peers: list[Arm], scale: int = 1, graph: bool = False,
         plan: Callable[[], None] = lambda: None) -> dict:
    """Times `run` under every candidate of `name` that gives the table's bits; prints, and returns the fastest."""
    kernel, keys, candidates = CANDIDATES[name]
    expected, times = run(), {}
    for values in candidates:
        chosen = dict(zip(keys, values, strict=True))
        label = " ".join(f"{key}={value}" for key, value in chosen.items())
        with table(kernel, chosen):
            plan()
            try:
                same = equal_bits(run(), expected)
            except (OutOfResources, RuntimeError) as error:
                print(f"   {label}: {str(error).splitlines()[0]}", flush=True)
                continue
            if not same:
                print(f"   {label}: OTHER BITS", flush=True)
                continue
            times[label] = chosen, measure([Arm(label, run)], graph, samples=6)[label] / scale
    plan()
    ordered = sorted(times, key=lambda label: times[label][1])
    others = {key: round(value / scale, 1) for key, value in measure([Arm("table", run), *peers], graph).items()}
    print(f"{what} {name}: {others}", flush=True)
    for label in ordered[:SHOWN]:
        print(f"   {times[label][1]:9.2f} us  {label}", flush=True)
    return times[ordered[0]][0]


def tune_decode() -> None:
    for name, context in CONTEXTS.items():
        case = Decode(context)
        peers = fa3_arms(case, case.ours()[0])
        print(f"decode at {name}: floor {case.floor_us:.1f} us", flush=True)
        best = tune(f"decode {name}", "split", case.ours, peers, case.layers, graph=True)
        with table("attention_split", best):
            tune(f"decode {name}", "merge", case.ours, [], case.layers, graph=True)


def tune_training(names: list[str]) -> None:
    case = Training()
    forward, backward = case.sdpa_arms()
    for name in names:
        run, peers = (case.forward, forward) if name == "forward" else (case.backward, backward)
        tune("training", name, run, peers, plan=case.plan)
    pieces(case)


def pieces(case: Training) -> None:
    """The backward's kernels one by one."""
    times = {}
    for skipped in attention_backward.FUNCTIONS:
        kernel = getattr(attention_backward, skipped)
        setattr(attention_backward, skipped, _Nothing())
        try:
            times[f"without {skipped}"] = measure([Arm("", case.backward)], graph=False)[""]
        finally:
            setattr(attention_backward, skipped, kernel)
    whole = measure([Arm("", case.backward)], graph=False)[""]
    print(f"backward {whole:.0f} us;", {name: round(value) for name, value in times.items()}, flush=True)


class _Nothing:
    """Stands for a kernel and launches none."""

    def __getitem__(self, grid):
        return lambda *_, **__: None


def tune_chunks() -> None:
    for width in CHUNKS:
        with chunk_width(width):
            case = Training()
            line = {"forward": round(measure([Arm("", case.forward)], graph=False)[""])}
            for name, context in CONTEXTS.items():
                decode = Decode(context)
                line[f"decode {name}"] = round(measure([Arm("", decode.ours)], graph=True)[""] / decode.layers, 1)
        print(f"chunks of {width}: {line}", flush=True)


def main() -> None:
    if not torch.cuda.is_available() or torch.version.hip:
        sys.exit("error: this times sm_90 candidates; run it on a machine with an NVIDIA GPU")
    chosen = sys.argv[1:] or ["forward", "dkdv", "dq", "decode", "chunks"]
    if unknown := set(chosen) - {"forward", "dkdv", "dq", "decode", "chunks"}:
        sys.exit(f"error: no kernel {', '.join(sorted(unknown))}; expected some of decode forward dkdv dq chunks")
    print(f"in {HERE}, on {torch.cuda.get_device_name()}, {ops_attention.TOKENS} tokens in training", flush=True)
    compile_ahead([part for name in chosen for part in (("split", "merge") if name == "decode" else (name,))])
    if training := [name for name in ("forward", "dkdv", "dq") if name in chosen]:
        tune_training(training)
    if "decode" in chosen:
        tune_decode()
    if "chunks" in chosen:
        tune_chunks()


if __name__ == "__main__":
    main()
