"""The section "gemm" of bench/ops.py: the decode chain and the training products of Qwen3-8B against cuBLAS.

Decode: all matrix products of a step (36 layers and the LM head, each with its own weights) in one CUDA graph, for a
rank of TP1 and of TP2. Ours gives o, down and the head in FP32, as the contract wants them; cuBLAS gives BF16.
Training: each layer's product, its input's and its weight's gradient, and the head's on a chunk of tokens, by the
operators as the trainer calls them (the trials' time left out), against the same calls of cuBLAS; and our own kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from timing import BANDWIDTH, PEAK, Arm, measure

from rlk.kernels import gemm, gemm_backward
from rlk.ops import gemm as ops

LAYERS, HIDDEN, INTERMEDIATE, QKV, HEADS, VOCABULARY = 36, 4096, 12288, 6144, 4096, 151936
DECODE_ROWS = (4, 8, 64)
TRAIN_ROWS, RAGGED_ROWS, HEAD_ROWS = 8192, 8000, 1024


@dataclass(frozen=True)
class Role:
    """One product of a rank: y[M, N] = x[M, K] w[N, K]^T, in FP32 where others add to it or score it."""

    name: str
    N: int
    K: int
    fp32: bool = False

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.fp32 else torch.bfloat16


def layer_roles(tp: int) -> list[Role]:
    return [Role("qkv", QKV // tp, HIDDEN), Role("o", HIDDEN, HEADS // tp, True),
            Role("gate_up", 2 * INTERMEDIATE // tp, HIDDEN), Role("down", HIDDEN, INTERMEDIATE // tp, True)]


def head_role(tp: int) -> Role:
    return Role("lm_head", VOCABULARY // tp, HIDDEN, True)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def chain_roles(tp: int) -> list[Role]:
    return [*layer_roles(tp) * LAYERS, head_role(tp)]


def chain(roles: list[Role], weights: list[torch.Tensor], inputs: dict[int, torch.Tensor], configs=None):
    """A call that runs every product with our kernel; configs: name of a role -> the configuration to take."""
    def call() -> None:
        for role, w in zip(roles, weights, strict=True):
            gemm.linear(inputs[role.K], w, 1, role.out_dtype, config=(configs or {}).get(role.name))

    return call


def cublas_chain(roles: list[Role], weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]):
    def call() -> None:
        for role, w in zip(roles, weights, strict=True):
            torch.mm(inputs[role.K], w.t())

    return call


def decode_figures(tp: int) -> dict[str, float]:
    roles = chain_roles(tp)
    weights = [draw(role.N, role.K) for role in roles]
    floor = sum(w.numel() for w in weights) * 2 / BANDWIDTH * 1e6
    made = {}
    for M in DECODE_ROWS:
        inputs = {role.K: draw(M, role.K) for role in roles}
        times = measure([Arm("cublas", cublas_chain(roles, weights, inputs)),
                         Arm("ours", chain(roles, weights, inputs))], graph=True)
        made |= {f"gemm_chain_tp{tp}_m{M}_us": times["ours"], f"gemm_chain_tp{tp}_m{M}_cublas_us": times["cublas"],
                 f"gemm_chain_tp{tp}_m{M}_over_cublas": times["ours"] / times["cublas"],
                 f"gemm_chain_tp{tp}_m{M}_over_floor": times["ours"] / floor}
        print(f"decode TP{tp} M={M}: ours {times['ours']:.0f} us, cuBLAS {times['cublas']:.0f}, floor {floor:.0f}",
              flush=True)
    return made


def training_arms(role: Role, M: int) -> dict[str, list[Arm]]:
    """Kind of product -> (cuBLAS, the operator, our own kernel) on the same operands."""
    x, w, dy, main_grad = draw(M, role.K), draw(role.N, role.K), draw(M, role.N), draw(role.N, role.K,
                                                                                       dtype=torch.float32)

    def cublas_forward():
        return torch.mm(x, w.t(), out_dtype=torch.float32) if role.fp32 else torch.mm(x, w.t())

    def ours_forward():
        return ops.linear_fp32(x, w) if role.fp32 else ops.linear(x, w)

    return {
        "forward": [Arm("cublas", cublas_forward), Arm("ours", ours_forward),
                    Arm("own", lambda: gemm.linear(x, w, 1, role.out_dtype))],
        "dx": [Arm("cublas", lambda: torch.mm(dy, w)), Arm("ours", lambda: ops.gemm_dx(dy, w)),
               Arm("own", lambda: gemm_backward.input_gradient(dy, w))],
        "dw": [Arm("cublas", lambda: torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)),
               Arm("ours", lambda: ops.gemm_dw(dy, x, main_grad)),
               Arm("own", lambda: gemm_backward.weight_gradient(dy, x, main_grad))],
    }


def training_figures(M: int, tag: str) -> dict[str, float]:
    """Sums over a layer's products and the head's chunk of HEAD_ROWS, by kind and together."""
    sums: dict[str, dict[str, float]] = {}
    work = 0.0
    for role, rows in [(role, M) for role in layer_roles(1)] + [(head_role(1), HEAD_ROWS * M // TRAIN_ROWS)]:
        for kind, arms in training_arms(role, rows).items():
            times = measure(arms, graph=False, repeats=3)
            work += 2.0 * rows * role.N * role.K
            print(f"training {role.name} {kind} M={rows}: "
                  + ", ".join(f"{name} {value:.0f} us" for name, value in times.items()), flush=True)
            kept = sums.setdefault(kind, dict.fromkeys(times, 0.0))
            for name, value in times.items():
                kept[name] += value
    total = {name: sum(kept[name] for kept in sums.values()) for name in ("cublas", "ours", "own")}
    made = {f"{tag}_over_cublas": total["ours"] / total["cublas"],
            f"{tag}_own_over_cublas": total["own"] / total["cublas"],
            f"{tag}_over_floor": total["ours"] / (work / PEAK * 1e6)}
    for kind, kept in sums.items():
        made |= {f"{tag}_{kind}_over_cublas": kept["ours"] / kept["cublas"],
                 f"{tag}_{kind}_own_over_cublas": kept["own"] / kept["cublas"]}
    return made


def figures() -> dict[str, float]:
    """The chain's headline at M is the larger ratio of TP1 and TP2."""
    with torch.no_grad():
        made = decode_figures(1) | decode_figures(2)
        for M in DECODE_ROWS:
            made[f"gemm_chain_m{M}_over_cublas"] = max(made[f"gemm_chain_tp{tp}_m{M}_over_cublas"] for tp in (1, 2))
        made |= training_figures(TRAIN_ROWS, "train_gemm") | training_figures(RAGGED_ROWS, "train_gemm_ragged")
        made["train_gemm_products_on_cublas"] = sum(probe["equal"] for probe in ops.registry.probes)
        made["train_gemm_products_on_own_kernels"] = sum(not probe["equal"] for probe in ops.registry.probes)
    for probe in ops.registry.probes:
        print(probe, flush=True)
    return made
