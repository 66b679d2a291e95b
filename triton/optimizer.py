"""AdamW on flat FP32 masters, and the sum of squares for the gradient norm.

Layout: flat arrays; one program makes BLOCK neighbouring elements (adamw), or STEPS blocks of them (sum_squares). The
launchers cut what is longer than MOST_ELEMENTS in parts, at multiples of a program's elements.

AdamW is elementwise, each operation rounded to FP32 once, in the order of hipkernels/cpu/optimizer.cpp: the same bits.
Reduction order of the sum of squares, in FP64, where a square of FP32 is exact: element i of a block onto lane sum i,
the blocks of one program ascending; the lane sums by tl.sum; program p's sum onto accumulator p % BLOCK, ascending;
those by tl.sum. All of it is fixed by the length alone.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk.kernels.operands import check_multiple, check_tensor
from rlk.kernels.variants import Variant, architecture

MOST_ELEMENTS = 1 << 28  # of one launch: 1 GiB in FP32


@triton.jit
def _square_root(x):
    """sqrt(x) rounded correctly, for denormal x too, of which gfx942's instruction alone makes NaN."""
    tiny = x < 2.0**-96
    root = tl.sqrt_rn(tl.where(tiny, x * 2.0**64, x))
    return tl.where(tiny, root * 2.0**-32, root)


@triton.jit
def adamw_elements(master, moment1, moment2, grad, weight, n, grad_scale, lr, beta1, beta2, eps, decay, bias1, bias2,
                   BLOCK: tl.constexpr):
    """Grid (n / BLOCK, rounded up). weight may be master itself."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    zero = tl.zeros((BLOCK,), tl.float32)
    g = tl.load(grad + place, mask=inside, other=0.0) * grad_scale
    m = tl.fma(tl.load(moment1 + place, mask=inside, other=0.0), zero + beta1, (1.0 - beta1) * g)
    v = tl.fma(tl.load(moment2 + place, mask=inside, other=0.0), zero + beta2, ((1.0 - beta2) * g) * g)
    update = tl.div_rn(tl.div_rn(m, zero + bias1), _square_root(tl.div_rn(v, zero + bias2)) + eps)
    w = tl.load(master + place, mask=inside, other=0.0) * (1.0 - lr * decay)
    w = tl.fma(update, zero - lr, w)
    tl.store(moment1 + place, m, mask=inside)
    tl.store(moment2 + place, v, mask=inside)
    tl.store(master + place, w, mask=inside)
    tl.store(weight + place, w.to(weight.dtype.element_ty), mask=inside)


@triton.jit
def sum_squares_blocks(x, sums, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Grid (n / (BLOCK STEPS), rounded up): one FP64 sum per program."""
    begin = tl.program_id(0) * BLOCK * STEPS
    total = tl.zeros((BLOCK,), tl.float64)
    for step in range(STEPS):
        place = begin + step * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + place, mask=place < n, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit(do_not_specialize=["count"])
def sum_squares_total(sums, result, count, BLOCK: tl.constexpr):
    """Grid (1,)."""
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.load(sums + place, mask=place < count, other=0.0)
    tl.store(result, tl.sum(total, 0))


CONFIGS = {  # eight elements per lane in two 128-bit loads
    "gfx942": {"block_1024": {"BLOCK": 1024, "num_warps": 2}},
    "sm_90": {"block_1024": {"BLOCK": 1024, "num_warps": 4}},
}
SUM_CONFIGS = {  # elements of a block, blocks of a program, warps
    "gfx942": {"block_2048x8": (2048, 8, 4)},
    "sm_90": {"block_2048x8": (2048, 8, 8)},
}
TOTAL_CONFIGS = {"gfx942": {"block_1024": (1024, 4)}, "sm_90": {"block_1024": (1024, 8)}}


def choose(arch: str) -> dict:
    return CONFIGS[arch]["block_1024"]


def _options(num_warps: int) -> dict:
    return {"num_warps": num_warps, "enable_fp_fusion": False}


def _check_flat(op: str, n: int, **flat: tuple[torch.Tensor, torch.dtype]) -> None:
    if n:
        check_multiple(op, n=n)
    for name, (tensor, dtype) in flat.items():
        if tensor.numel() != n or not tensor.is_contiguous():
            raise ValueError(f"{op} got {name} {tuple(tensor.shape)} with strides {tensor.stride()}, expected {n} "
                             "contiguous elements")
        check_tensor(op, name, tensor.view(-1)[:1], dtype)


def _parts(n: int, *tensors: torch.Tensor):
    """The tensors, flat, in parts of at most MOST_ELEMENTS, each told how far a kernel reaches."""
    for begin in range(0, n, MOST_ELEMENTS):
        parts = [tensor.view(-1)[begin : begin + MOST_ELEMENTS] for tensor in tensors]
        for part in parts:
            check_tensor("optimizer", "a part", part, part.dtype)
        yield parts


def adamw(master: torch.Tensor, moment1: torch.Tensor, moment2: torch.Tensor, grad: torch.Tensor,
          weight: torch.Tensor, grad_scale: float, lr: float, beta1: float, beta2: float, eps: float, decay: float,
          bias1: float, bias2: float) -> None:
    """One AdamW update on the GPU, in place: FP32 [n] master and moments from FP32 grad x grad_scale.

    weight, BF16 or FP32 [n], gets the rounded master; it may be master itself. bias1, bias2: 1 - beta^step. n is a
    multiple of 16; else ValueError.
    """
    n = master.numel()
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"adamw got weight {weight.dtype}, expected bfloat16 or float32")
    _check_flat("adamw", n, master=(master, torch.float32), moment1=(moment1, torch.float32),
                moment2=(moment2, torch.float32), grad=(grad, torch.float32), weight=(weight, weight.dtype))
    config = choose(architecture())
    scalars = [float(x) for x in (grad_scale, lr, beta1, beta2, eps, decay, bias1, bias2)]
    for parts in _parts(n, master, moment1, moment2, grad, weight):
        adamw_elements[math.ceil(len(parts[0]) / config["BLOCK"]),](
            *parts, len(parts[0]), *scalars, BLOCK=config["BLOCK"], **_options(config["num_warps"]))


def sum_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum of squares of FP32 [n] on the GPU, FP64 [1] there; n is a multiple of 16, else ValueError."""
    n, arch = x.numel(), architecture()
    if not n:
        return x.new_zeros(1, dtype=torch.float64)
    _check_flat("sum_squares", n, x=(x, torch.float32))
    block, steps, num_warps = SUM_CONFIGS[arch]["block_2048x8"]
    sums = x.new_empty(math.ceil(n / (block * steps)), dtype=torch.float64)
    done = 0
    for (part,) in _parts(n, x):
        programs = math.ceil(len(part) / (block * steps))
        sum_squares_blocks[programs,](part, sums[done : done + programs], len(part), BLOCK=block, STEPS=steps,
                                      **_options(num_warps))
        done += programs
    result = x.new_empty(1, dtype=torch.float64)
    block, num_warps = TOTAL_CONFIGS[arch]["block_1024"]
    check_tensor("sum_squares", "the sums", sums, torch.float64)
    check_tensor("sum_squares", "the result", result, torch.float64)
    sum_squares_total[1,](sums, result, len(sums), BLOCK=block, **_options(num_warps))
    return result


def variants(arch: str) -> list[Variant]:
    """Every kernel that the launchers above can launch on `arch`."""
    found = []
    for out in ("bf16", "fp32"):
        pointers = {"master": "*fp32", "moment1": "*fp32", "moment2": "*fp32", "grad": "*fp32", "weight": f"*{out}"}
        scalars = dict.fromkeys(("grad_scale", "lr", "beta1", "beta2", "eps", "decay", "bias1", "bias2"), "fp32")
        found += [Variant(kernel="adamw", name=f"{name}_{out}", function=adamw_elements,
                          signature={**pointers, "n": "i32", **scalars}, constants={"BLOCK": config["BLOCK"]},
                          options=_options(config["num_warps"]), divisible=(*pointers, "n"), small=tuple(pointers))
                  for name, config in CONFIGS[arch].items()]
    for name, (block, steps, num_warps) in SUM_CONFIGS[arch].items():
        found.append(Variant(kernel="sum_squares", name=name, function=sum_squares_blocks,
                             signature={"x": "*fp32", "sums": "*fp64", "n": "i32"},
                             constants={"BLOCK": block, "STEPS": steps}, options=_options(num_warps),
                             divisible=("x", "sums", "n"), small=("x", "sums")))
    for name, (block, num_warps) in TOTAL_CONFIGS[arch].items():
        found.append(Variant(kernel="sum_squares_total", name=name, function=sum_squares_total,
                             signature={"sums": "*fp64", "result": "*fp64", "count": "i32"}, constants={"BLOCK": block},
                             options=_options(num_warps), divisible=("sums", "result"), small=("sums", "result")))
    return found
