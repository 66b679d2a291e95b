"""The section "attention" of bench/ops.py: Qwen3-8B's heads (32 queries, 8 keys, dimension 128) against the libraries.

Decode: a batch of 8 at contexts of 1k, 4k and 8k in pages of 16, one call for each of enough layers to exceed the L2
cache, in a CUDA graph. The peer is FlashAttention-3 as vLLM calls it, its schedule computed before the graph; where
vLLM is not installed, only the time to read the keys and values once is there to compare with.
Training: one causal sequence of 8192 tokens, forward and backward. The peer is the fastest of torch's
scaled_dot_product_attention kernels. Ours has its plan made before, as one serves all layers.
Every arm's result is first compared with ours, within BF16's rounding.
"""

from __future__ import annotations

import functools
import importlib

import torch
import torch.nn.functional as F
from timing import BANDWIDTH, PEAK, Arm, measure
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlk.kernels import attention, attention_backward
from rlk.kernels.attention_plan import decode_plan

H, G, E = 32, 8, 128
BATCH, CONTEXTS, PAGE = 8, {"1k": 1024, "4k": 4096, "8k": 8192}, 16
TOKENS = 8192
COLD_BYTES = 300 << 20  # keys and values that no cache holds
LARGEST_ERROR = 0.02  # between two BF16 results, relative to the norm
FA3_SPLITS = 32  # what vLLM allows in a captured graph


def draw(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def on_gpu(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def check(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    assert error < LARGEST_ERROR, f"{name}: relative error {error:.4f}, expected below {LARGEST_ERROR}"


# ---- decode


class Decode:
    """One step's attention in every layer: a query row of each of BATCH sequences with `context` keys."""

    def __init__(self, context: int):
        self.context, pages = context, BATCH * context // PAGE
        self.bytes = 2 * BATCH * context * G * E * 2  # of a layer's keys and values
        layers = COLD_BYTES // self.bytes + 2
        self.q = draw(layers, BATCH, H, E)
        self.k, self.v = draw(layers, pages, PAGE, G, E), draw(layers, pages, PAGE, G, E)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        self.block_table = order.reshape(BATCH, -1).to(torch.int32).cuda()
        self.plan = decode_plan(on_gpu([(i, 1, context - 1, i) for i in range(BATCH)]), context)
        self.floor_us = self.bytes / BANDWIDTH * 1e6

    @property
    def layers(self) -> int:
        return len(self.q)

    def ours(self) -> list[torch.Tensor]:
        return [attention.attention_paged(q, k, v, self.plan, self.block_table)
                for q, k, v in zip(self.q, self.k, self.v, strict=True)]

    def fa3(self, scheduled: bool) -> list[torch.Tensor]:
        library, common = _fa3(), self._fa3_arguments
        extra = dict(scheduler_metadata=self._schedule, num_splits=FA3_SPLITS) if scheduled else {}
        return [library.flash_attn_varlen_func(q, k, v, **common, **extra)
                for q, k, v in zip(self.q, self.k, self.v, strict=True)]

    @functools.cached_property
    def _fa3_arguments(self) -> dict:
        return dict(max_seqlen_q=1, cu_seqlens_q=on_gpu(list(range(BATCH + 1))), max_seqlen_k=self.context,
                    seqused_k=on_gpu([self.context] * BATCH), causal=True, block_table=self.block_table, fa_version=3)

    @functools.cached_property
    def _schedule(self) -> torch.Tensor:
        return _fa3().get_scheduler_metadata(
            batch_size=BATCH, max_seqlen_q=1, max_seqlen_k=self.context, num_heads_q=H, num_heads_kv=G, headdim=E,
            cache_seqlens=on_gpu([self.context] * BATCH), qkv_dtype=torch.bfloat16,
            cu_seqlens_q=on_gpu(list(range(BATCH + 1))), page_size=PAGE, causal=True, num_splits=FA3_SPLITS)


@functools.cache
def _fa3():
    """vLLM's wrapper of FlashAttention-3, or None."""
    try:
        library = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    except (ImportError, OSError) as error:
        print(f"no FlashAttention-3 here ({error}): decode is compared with the bandwidth floor alone", flush=True)
        return None
    return library if library.FA3_AVAILABLE else None


def fa3_arms(case: Decode, expected: torch.Tensor) -> list[Arm]:
    """The ways to call FlashAttention-3 that run here."""
    arms = []
    for name, scheduled in (("fa3", True), ("fa3 by itself", False)):
        if _fa3() is None:
            continue
        try:
            check(name, case.fa3(scheduled)[0], expected)
        except (RuntimeError, TypeError) as error:
            print(f"{name} does not run: {str(error).splitlines()[0]}", flush=True)
            continue
        arms.append(Arm(name, functools.partial(case.fa3, scheduled)))
    return arms


def decode_figures() -> dict[str, float]:
    made, ratios = {}, []
    for name, context in CONTEXTS.items():
        case = Decode(context)
        arms = [Arm("ours", case.ours), *fa3_arms(case, case.ours()[0])]
        times = {arm: value / case.layers for arm, value in measure(arms, graph=True).items()}
        ours = times.pop("ours")
        made[f"decode_attention_{name}_us"] = ours
        made[f"decode_attention_{name}_over_floor"] = ours / case.floor_us
        if times:
            made[f"decode_attention_{name}_over_fa3"] = ours / min(times.values())
            ratios.append(ours / min(times.values()))
        print(f"decode {name}: ours {ours:.1f} us, floor {case.floor_us:.1f}", times, flush=True)
    if ratios:
        made["decode_attention_over_fa3"] = max(ratios)
    return made


# ---- training


class Training:
    """One causal sequence, as the trainer has it: q and k from their norms, v in the fused projection."""

    def __init__(self, tokens: int = TOKENS):
        self.q, self.k, self.do = draw(tokens, H, E), draw(tokens, G, E), draw(tokens, H, E)
        self.v = draw(tokens, H + 2 * G, E)[:, H + G :]
        self.segments, self.starts = torch.tensor([(0, tokens, 0, 0)], dtype=torch.int32), on_gpu([0])
        self.flops = 2 * tokens * tokens * H * E  # of the forward: two products of a triangle
        self.plan()
        self.o, self.lse = self.forward()
        heads_first = (x.transpose(0, 1)[None].contiguous() for x in (self.q, self.k, self.v, self.do))
        *self.leaves, self.do_sdpa = heads_first
        for leaf in self.leaves:
            leaf.requires_grad_()

    def plan(self) -> None:
        """Again after the configurations changed."""
        sizes = (G, len(self.starts), len(self.k))
        self.forward_plan = attention.make_plan(self.segments, self.q, *sizes)
        self.backward_plan = attention_backward.make_plan(self.segments, self.q, *sizes)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return attention.attention_varlen(self.q, self.k, self.v, self.forward_plan, self.starts)

    def backward(self) -> tuple[torch.Tensor, ...]:
        return attention_backward.attention_varlen_backward(self.do, self.q, self.k, self.v, self.o, self.lse,
                                                            self.backward_plan, self.starts)

    def sdpa(self, backend: SDPBackend | None) -> torch.Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(*self.leaves, is_causal=True, enable_gqa=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*self.leaves, is_causal=True, enable_gqa=True)

    def sdpa_arms(self) -> tuple[list[Arm], list[Arm]]:
        """Forward and backward arms of torch's kernels that run here."""
        forward, backward, gradients = [], [], self.backward()
        for name, backend in (("sdpa", None), ("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
                              ("sdpa flash", SDPBackend.FLASH_ATTENTION)):
            try:
                out = self.sdpa(backend)
                grads = torch.autograd.grad(out, self.leaves, self.do_sdpa, retain_graph=True)
            except RuntimeError as error:
                print(f"{name} does not run: {str(error).splitlines()[0]}", flush=True)
                continue
            for what, got, expected in zip(("o", "dq", "dk", "dv"), (out.detach(), *grads), (self.o, *gradients),
                                           strict=True):
                check(f"{name} {what}", got[0].transpose(0, 1), expected)
            forward.append(Arm(name, functools.partial(self._sdpa_forward, backend)))
            backward.append(Arm(name, functools.partial(torch.autograd.grad, out, self.leaves, self.do_sdpa,
                                                        retain_graph=True)))
        return forward, backward

    def _sdpa_forward(self, backend: SDPBackend | None) -> torch.Tensor:
        with torch.no_grad():
            return self.sdpa(backend)


def training_figures() -> dict[str, float]:
    made, case = {}, Training()
    for name, ours, peers, products in zip(("forward", "backward"), (case.forward, case.backward), case.sdpa_arms(),
                                           (1, 2.5), strict=True):
        times = measure([Arm("ours", ours), *peers], graph=False)
        mine = times.pop("ours")
        made[f"varlen_{name}_us"] = mine
        made[f"varlen_{name}_tflops"] = products * case.flops / mine * 1e-6
        made[f"varlen_{name}_over_floor"] = mine / (products * case.flops / PEAK * 1e6)
        made[f"varlen_{name}_over_sdpa"] = mine / min(times.values())
        print(f"{name}: ours {mine:.0f} us", times, flush=True)
    return made


def figures() -> dict[str, float]:
    """Microseconds, and our time over the peer's and over the floor; decode_attention_over_fa3 is the worst context."""
    return training_figures() | decode_figures()  # in this order: vLLM turns some of torch's attention kernels off
