"""The section "logprob" of bench/ops.py: the LM head with log-prob and entropy against the bare product of cuBLAS.

Qwen3-8B's head on 8192 tokens, called as the trainer calls it. cuBLAS is the faster of one product to BF16 and one to
FP32, and its output is the whole [tokens, vocabulary]. Keys; CASE is the whole vocabulary (no name), "nucleus" (about
300 ids a row) or "wide_nucleus" (about 90,000):

    logprob_[CASE_]over_gemm              forward over that product
    logprob_[CASE_]backward_over_gemm     dhidden and main_grad over cuBLAS's products of the same dlogits; the whole
                                          vocabulary's logits are computed again on both sides (.._over_two_products: on
                                          ours alone)
    logprob_[CASE_]peak_gib               most memory beside operands and retained sets; logprob_fp32_logits_gib: what
                                          [tokens, vocabulary] in FP32 would take
    logprob_[CASE_]over_floor             over FLOPs at the peak rate plus operands at copy bandwidth
    logprob_products_us, .._scoring_us    the forward's parts of the product, and the rest, each timed alone
    logprob_half_chunks_over_gemm         with half as many logits at a time

Shape legend: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import BANDWIDTH, PEAK, Arm, measure

from rlk.collectives import LocalCommunicator
from rlk.contract import VOCAB_TILES
from rlk.ops.gemm import linear_fp32
from rlk.ops.logprob import CHUNK_TOKENS, VOCAB_PARTS, ScoreRule, Support, score
from rlk.ops.registry import registry

T, D, V, VALID, TEMPERATURE = 8192, 4096, 151_936, 151_669, 0.7
CASES = {"": None, "nucleus_": 300, "wide_nucleus_": 90_000}  # name -> ids a row
LOCAL, GIB = LocalCommunicator(), float(1 << 30)


def figures() -> dict[str, float]:
    torch.manual_seed(0)
    hidden_TD = torch.randn(T, D, device="cuda", dtype=torch.bfloat16)
    head_VD = torch.empty(V, D, device="cuda", dtype=torch.bfloat16).normal_(std=3 / D**0.5)  # logits deviate by 3
    targets_T = torch.randint(VALID, (T,), device="cuda")
    made = {"logprob_fp32_logits_gib": T * V * 4 / GIB}
    for case, ids in CASES.items():
        support = retained_sets(targets_T, ids) if ids else None
        rule = ScoreRule(TEMPERATURE, VALID, support)
        made |= forward_figures(case, hidden_TD, head_VD, targets_T, rule)
        made |= backward_figures(case, hidden_TD, head_VD, targets_T, rule)
    made |= parts(hidden_TD, head_VD, targets_T)
    probes = [probe for probe in registry.probes if probe["n"] == V]
    for probe in probes:
        print(probe, flush=True)
    made["logprob_products_on_cublas"] = sum(probe["equal"] for probe in probes)
    made["logprob_products_on_own_kernels"] = sum(not probe["equal"] for probe in probes)
    return made


def retained_sets(targets_T: torch.Tensor, ids: int) -> Support:
    """About `ids` random ids a row, the target among them, as a CSR."""
    counts, parts_N = [torch.zeros(1, dtype=torch.int64, device="cuda")], []
    for part_T in targets_T.split(CHUNK_TOKENS):
        keep_TV = torch.rand(len(part_T), VALID, device="cuda") < ids / VALID
        keep_TV.scatter_(1, part_T[:, None], True)
        counts.append(keep_TV.sum(1))
        parts_N.append(keep_TV.nonzero()[:, 1].int())
    return torch.cat(counts).cumsum(0), torch.cat(parts_N)


def forward_figures(case: str, hidden_TD, head_VD, targets_T, rule: ScoreRule) -> dict[str, float]:
    def ours(chunk: int = CHUNK_TOKENS) -> None:
        score(hidden_TD, head_VD, targets_T, rule, LOCAL, chunk)

    arms = [Arm("bf16", lambda: torch.mm(hidden_TD, head_VD.t())),
            Arm("fp32", lambda: torch.mm(hidden_TD, head_VD.t(), out_dtype=torch.float32)), Arm("ours", ours)]
    if rule.support is None:
        arms.append(Arm("half chunks", lambda: ours(CHUNK_TOKENS // 2)))
    with torch.no_grad():
        times = measure(arms, graph=False)
        peak = peak_gib(ours)
    cublas = min(times["bf16"], times["fp32"])
    floor = 2.0 * T * D * V / PEAK * 1e6 + moved(hidden_TD, head_VD, targets_T, *(rule.support or ())) / BANDWIDTH * 1e6
    made = {f"logprob_{case}us": times["ours"], f"logprob_{case}over_gemm": times["ours"] / cublas,
            f"logprob_{case}over_floor": times["ours"] / floor, f"logprob_{case}peak_gib": peak}
    if rule.support is None:
        made |= {f"logprob_cublas_{name}_us": times[name] for name in ("bf16", "fp32")}
        made["logprob_cublas_faster_is_fp32"] = float(times["fp32"] < times["bf16"])
        made["logprob_half_chunks_over_gemm"] = times["half chunks"] / cublas
    print(f"{case}forward: " + ", ".join(f"{name} {value:.0f} us" for name, value in times.items())
          + f", floor {floor:.0f} us, peak {peak:.2f} GiB", flush=True)
    return made


def backward_figures(case: str, hidden_TD, head_VD, targets_T, rule: ScoreRule) -> dict[str, float]:
    hidden, head = hidden_TD.detach().requires_grad_(), head_VD.detach().requires_grad_()
    head.main_grad = torch.zeros(V, D, device="cuda")
    logprob_T, _ = score(hidden, head, targets_T, rule, LOCAL)
    grad_T, main_grad = torch.full_like(logprob_T, 1 / T), torch.zeros(V, D, device="cuda")

    def ours() -> None:  # main_grad is added to on the way
        torch.autograd.grad(logprob_T, hidden, grad_T, retain_graph=True)

    parts: list[torch.Tensor] = []
    with registry.override("gemm_dw", lambda dy_MN, *_: parts.append(dy_MN.clone())):
        ours()
    dlogits_TV = torch.cat(parts)  # zeros where ours has zeros: they take less power, and so time
    arms = [Arm("logits_bf16", lambda: torch.mm(hidden_TD, head_VD.t())),
            Arm("logits_fp32", lambda: torch.mm(hidden_TD, head_VD.t(), out_dtype=torch.float32)),
            Arm("dx", lambda: torch.mm(dlogits_TV, head_VD)),
            Arm("dw", lambda: torch.addmm(main_grad, dlogits_TV.t(), hidden_TD, out_dtype=torch.float32,
                                          out=main_grad)), Arm("ours", ours)]
    with torch.no_grad():
        times = measure(arms if rule.support is None else arms[2:], graph=False)
    peak = peak_gib(ours)
    two, products = times["dx"] + times["dw"], 2
    cublas = two
    if rule.support is None:
        cublas, products = two + min(times["logits_bf16"], times["logits_fp32"]), 3
    operands = moved(hidden, head, targets_T, *(rule.support or ()), hidden) + 2 * moved(main_grad)
    floor = products * 2.0 * T * D * V / PEAK * 1e6 + operands / BANDWIDTH * 1e6
    made = {f"logprob_{case}backward_us": times["ours"], f"logprob_{case}backward_over_gemm": times["ours"] / cublas,
            f"logprob_{case}backward_over_floor": times["ours"] / floor, f"logprob_{case}backward_peak_gib": peak}
    if rule.support is None:
        made["logprob_backward_over_two_products"] = times["ours"] / two
    print(f"{case}backward: " + ", ".join(f"{name} {value:.0f} us" for name, value in times.items())
          + f", floor {floor:.0f} us, peak {peak:.2f} GiB", flush=True)
    return made


def parts(hidden_TD, head_VD, targets_T) -> dict[str, float]:
    """The whole vocabulary's forward, taken apart: its products alone, and what reads their results, alone."""
    parts_VD = head_VD.chunk(VOCAB_PARTS)
    logits_TV = linear_fp32(hidden_TD, parts_VD[0])  # several times the L2 cache, so one part stands for all
    offsets, ids_T = torch.arange(T + 1, device="cuda"), targets_T.int()
    values_T, inv_t, tiles = logits_TV.new_empty(T), 1 / TEMPERATURE, VOCAB_TILES // VOCAB_PARTS

    def products() -> None:
        for part_VD in parts_VD:
            linear_fp32(hidden_TD, part_VD)

    def scoring() -> None:
        stats = []
        for _ in parts_VD:
            registry.call("pick_logits", logits_TV, logits_TV, offsets, ids_T, 0, values_T)
            stats.append(registry.call("tile_stats", logits_TV, logits_TV, tiles, 0, VALID, inv_t))
        stats_T = torch.cat(stats, 1)
        registry.call("merge_tiles", stats_T, stats_T, values_T, inv_t)

    with torch.no_grad():
        times = measure([Arm("products", products), Arm("scoring", scoring)], graph=False)
    read = T * V * 4 / BANDWIDTH * 1e6
    print(f"products {times['products']:.0f} us, scoring {times['scoring']:.0f} us, reading the logits {read:.0f} us",
          flush=True)
    return {"logprob_products_us": times["products"], "logprob_scoring_us": times["scoring"],
            "logprob_scoring_over_read": times["scoring"] / read}


def moved(*tensors: torch.Tensor) -> float:
    return float(sum(x.numel() * x.element_size() for x in tensors))


def peak_gib(call: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB
