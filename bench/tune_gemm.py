"""Times candidate configurations of the decode GEMM on the shapes of Qwen3-8B, and the chain with the best of them.

For each product of a rank and each M: the candidates on enough weights to exceed the L2 cache, in a graph; a candidate
must first give the bits of the table's configuration. Results are FP32 in all of them. Then the whole chain with each
product's best candidate, with the table's, and with cuBLAS. It prints; what it finds goes into CONFIGS of
triton/gemm.py by hand.

    python bench/tune_gemm.py [M ...]          default: 8 64
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from record import ROOT

HERE = ROOT.name  # `record` makes rlk importable for what follows

import ops_gemm
from ops_gemm import Role, draw
from timing import Arm, measure
from triton.runtime.errors import OutOfResources

from rlk.kernels import gemm
from rlk.kernels.gemm import CONFIGS, Config

COLD_BYTES = 300 << 20  # weights that no cache holds
MOST_SHARED = 227 << 10
COMPILERS = 8  # processes; each holds a context of the GPU for that time
SHOWN = 6
ROWS = (8, 16, 32, 64)  # of a tile; the smallest that holds M
LEAST_ROWS = 16  # of a tile that is not swapped: what the matrix unit takes
COLUMNS, DEPTHS, WARPS = (16, 32, 64, 128, 256), (64, 128, 256, 512), (1, 2, 4, 8)
LEAST_IN_FLIGHT = 24 << 10  # bytes of a weight that one program's stages hold; less cannot hide the memory's latency


def candidates(M: int) -> dict[str, Config]:
    """By name: tiles that hold M rows with one to four programs' stages in the shared memory of a multiprocessor."""
    found = {}
    held = next(rows for rows in ROWS if rows >= M)
    for swap, n, k, warps in itertools.product((True, False), COLUMNS, DEPTHS, WARPS):
        block_m = held if swap else max(held, LEAST_ROWS)
        if not 64 <= block_m * n // warps <= 2048:  # of the tile's sums, in a warp
            continue
        stage = (block_m + n) * k * 2
        for programs in (1, 2, 3, 4):
            stages = min(MOST_SHARED // programs // stage, 8)
            if stages >= 3 and (stages - 1) * n * k * 2 >= LEAST_IN_FLIGHT / programs * 2:
                name = f"{block_m}x{n}x{k} w{warps} s{stages}{' swap' if swap else ''}"
                found[name] = Config(block_m, n, k, warps, stages, swap=swap)
    return found


def compile_ahead(configs: list[Config]) -> None:
    """Fill Triton's cache in several processes: one alone would spend minutes."""
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, configs, chunksize=4))


def _compile(config: Config) -> None:
    with contextlib.suppress(OutOfResources, RuntimeError):  # `usable` says so
        gemm.linear(draw(8, 2048), draw(128, 2048), 1, torch.float32, config=config)


def usable(name: str, config: Config, x: torch.Tensor, w: torch.Tensor, role: Role, expected: torch.Tensor) -> bool:
    """Whether the candidate compiles, fits the GPU and gives the table's bits; says so where it does not."""
    if role.K % config.block_k:
        return False
    try:
        y = gemm.linear(x, w, 1, torch.float32, config=config)
    except (OutOfResources, RuntimeError) as error:
        print(f"   {name}: {str(error).splitlines()[0]}", flush=True)
        return False
    if not torch.equal(y.view(torch.int32), expected.view(torch.int32)):
        print(f"   {name}: OTHER BITS", flush=True)
        return False
    return True


def tune(role: Role, M: int) -> tuple[str, Config]:
    """The fastest candidate, the table's own among them."""
    weights = [draw(role.N, role.K) for _ in range(COLD_BYTES // (2 * role.N * role.K) + 2)]
    x = draw(M, role.K)
    expected = gemm.linear(x, weights[0], 1, torch.float32)
    table = gemm.choose("sm_90", M, role.N, role.K)
    tried = {name: config for name, config in candidates(M).items()
             if usable(name, config, x, weights[0], role, expected)}
    tried[f"table: {table}"] = CONFIGS["sm_90"][table]

    def calls(config: Config):
        return lambda: [gemm.linear(x, w, 1, torch.float32, config=config) for w in weights]

    arms = [Arm("cublas", lambda: [torch.mm(x, w.t()) for w in weights])]
    arms += [Arm(name, calls(config)) for name, config in tried.items()]
    times = {name: value / len(weights) for name, value in measure(arms, graph=True, samples=4, rounds=1).items()}
    floor = role.N * role.K * 2 / ops_gemm.BANDWIDTH * 1e6
    order = sorted(tried, key=times.get)
    print(f"{role.name} N={role.N} K={role.K} M={M}: floor {floor:.1f} us, cuBLAS {times['cublas']:.1f}", flush=True)
    for name in dict.fromkeys([*order[:SHOWN], f"table: {table}"]):
        print(f"   {times[name]:7.2f} us  {name}", flush=True)
    return order[0], tried[order[0]]


def main() -> None:
    if not torch.cuda.is_available() or torch.version.hip:
        sys.exit("error: this times sm_90 candidates; run it on a machine with an NVIDIA GPU")
    print(f"in {HERE}, on {torch.cuda.get_device_name()}")
    rows = [int(M) for M in sys.argv[1:]] or [8, 64]
    compile_ahead(list({config for M in rows for config in candidates(M).values()}))
    for M, tp in itertools.product(rows, (1, 2)):
        best = {role.name: tune(role, M) for role in [*ops_gemm.layer_roles(tp), ops_gemm.head_role(tp)]}
        torch.cuda.empty_cache()
        roles = ops_gemm.chain_roles(tp)
        weights, inputs = [draw(role.N, role.K) for role in roles], {role.K: draw(M, role.K) for role in roles}
        times = measure([
            Arm("cublas", ops_gemm.cublas_chain(roles, weights, inputs)),
            Arm("table", ops_gemm.chain(roles, weights, inputs)),
            Arm("best", ops_gemm.chain(roles, weights, inputs, {name: config for name, (_, config) in best.items()})),
        ], graph=True)
        floor = sum(w.numel() for w in weights) * 2 / ops_gemm.BANDWIDTH * 1e6
        print(f"CHAIN TP{tp} M={M}: floor {floor:.0f} us; " + ", ".join(
            f"{name} {value:.0f} ({value / times['cublas']:.3f})" for name, value in times.items()))
        print("   " + "; ".join(f"{name}: {label}" for name, (label, _) in best.items()), flush=True)
        del weights


if __name__ == "__main__":
    main()
