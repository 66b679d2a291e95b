"""cuBLAS for large matrix products, where it gives the bits of our own kernels (triton/gemm.py, gemm_backward.py).

cuBLAS picks a kernel by shape, layout and version, and some of them split the depth, which is another order of sums.
So each product is tried once in a process, at its first use, on random data: equal bits, and cuBLAS serves it; else our
kernel does, which is what ran in the comparison. Rows (tokens) are padded to a multiple of ROW_STEP, so that there are
few products to try: a row's bits do not depend on the rows beside it, and rows of zeros add nothing to a weight
gradient. Padding copies the operands: callers that can should bring a multiple of ROW_STEP rows.

Shape legend: M rows (tokens), N output features, K input features. Everything is BF16 but main_grad and FP32 results.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlk.ops.registry import registry

ROW_STEP = 256
FEWEST_ROWS = 512  # below, cuBLAS often splits the depth, and our kernels are no slower
MOST_ROWS = 65536
ALIGNMENT = 16  # bytes, and elements of each width: what the choice of a kernel may depend on
SEED = 5


@dataclass(frozen=True)
class Product:
    """One matrix product as cuBLAS is asked for it: what decides its choice of a kernel."""

    op: str  # "linear", "gemm_dx" or "gemm_dw"
    rows: int
    N: int
    K: int
    leaves: int = 1
    out_dtype: torch.dtype = torch.bfloat16
    device: torch.device | None = None
    settings: tuple[str, ...] = ()  # torch's, that change what it asks of cuBLAS


_equal: dict[Product, bool] = {}  # what was tried


def padded_rows(M: int) -> int:
    """The rows that a product of M rows runs with; 0 where it is not for cuBLAS."""
    return -(-M // ROW_STEP) * ROW_STEP if FEWEST_ROWS <= M <= MOST_ROWS else 0


# ---- guards: whether cuBLAS serves these arguments. The first call of a product tries it ----


def serves_linear(x_MK: torch.Tensor, w_NK: torch.Tensor, leaves: int, out_dtype: torch.dtype) -> bool:
    """Whether `linear` below gives our kernel's bits for these operands."""
    rows = padded_rows(x_MK.shape[:-1].numel())
    if not rows or not _fit(x_MK, w_NK) or x_MK.shape[-1] != w_NK.shape[1] or w_NK.shape[1] % (leaves * ALIGNMENT):
        return False
    return _tried("linear", rows, *w_NK.shape, leaves, out_dtype, w_NK)


def serves_dx(dy_MN: torch.Tensor, w_NK: torch.Tensor) -> bool:
    """Whether `gemm_dx` below gives our kernel's bits for these operands."""
    rows = padded_rows(dy_MN.shape[:-1].numel())
    if not rows or not _fit(dy_MN, w_NK) or dy_MN.shape[-1] != w_NK.shape[0]:
        return False
    return _tried("gemm_dx", rows, *w_NK.shape, 1, torch.bfloat16, w_NK)


def serves_dw(dy_MN: torch.Tensor, x_MK: torch.Tensor, main_grad_NK: torch.Tensor) -> bool:
    """Whether `gemm_dw` below gives our kernel's bits for these operands."""
    rows = padded_rows(x_MK.shape[:-1].numel())
    fit = rows and _fit(dy_MN, x_MK) and dy_MN.shape[:-1] == x_MK.shape[:-1] and main_grad_NK.is_contiguous() and (
        main_grad_NK.dtype == torch.float32 and main_grad_NK.data_ptr() % ALIGNMENT == 0
        and tuple(main_grad_NK.shape) == (dy_MN.shape[-1], x_MK.shape[-1]))
    return bool(fit) and _tried("gemm_dw", rows, *main_grad_NK.shape, 1, torch.float32, x_MK)


def _fit(*operands: torch.Tensor) -> bool:
    return all(x.dtype == torch.bfloat16 and x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
               and x.shape[-1] % ALIGNMENT == 0 for x in operands)


def _tried(op: str, rows: int, N: int, K: int, leaves: int, out_dtype: torch.dtype, like: torch.Tensor) -> bool:
    product = Product(op, rows, N, K, leaves, out_dtype, like.device, _settings())
    equal = _equal.get(product)
    if equal is not None:
        return equal
    if torch.version.hip or torch.cuda.is_current_stream_capturing():  # a graph would hold the trial
        return False
    _equal[product] = equal = probe(product)
    return equal


def _settings() -> tuple[str, ...]:
    return (str(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
            str(torch.backends.cuda.preferred_blas_library()))


# ---- the products ----


@torch.no_grad()
def linear(x_MK: torch.Tensor, w_NK: torch.Tensor, leaves: int, out_dtype: torch.dtype) -> torch.Tensor:
    """x w^T in out_dtype; FP32 where there is more than one leaf. Leading dimensions as x has them."""
    *lead, K = x_MK.shape
    M, N = math.prod(lead), w_NK.shape[0]
    rows = padded_rows(M)
    y_MN = x_MK.new_empty((rows, N), dtype=out_dtype)
    x_MK = _padded(x_MK.reshape(M, K), rows)
    if leaves > 1:
        _sum_leaves(x_MK, w_NK, 0, leaves, K // leaves, y_MN)
    elif out_dtype == torch.bfloat16:
        torch.mm(x_MK, w_NK.t(), out=y_MN)
    else:
        torch.mm(x_MK, w_NK.t(), out_dtype=out_dtype, out=y_MN)
    return y_MN[:M].reshape(*lead, N)


def _sum_leaves(x_MK, w_NK, first: int, count: int, leaf_k: int, y_MN) -> None:
    """y = the tree sum of `count` leaves from `first` on. A pair's second leaf is added by the product's epilogue."""
    if count <= 2:
        for leaf in range(first, first + count):
            k = slice(leaf * leaf_k, (leaf + 1) * leaf_k)
            if leaf == first:
                torch.mm(x_MK[:, k], w_NK[:, k].t(), out_dtype=torch.float32, out=y_MN)
            else:
                torch.addmm(y_MN, x_MK[:, k], w_NK[:, k].t(), out_dtype=torch.float32, out=y_MN)
        return
    half = count // 2
    _sum_leaves(x_MK, w_NK, first, half, leaf_k, y_MN)
    other_MN = torch.empty_like(y_MN)
    _sum_leaves(x_MK, w_NK, first + half, half, leaf_k, other_MN)
    y_MN += other_MN


@torch.no_grad()
def gemm_dx(dy_MN: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """dy w in BF16."""
    *lead, N = dy_MN.shape
    M, K = math.prod(lead), w_NK.shape[1]
    rows = padded_rows(M)
    return torch.mm(_padded(dy_MN.reshape(M, N), rows), w_NK)[:M].reshape(*lead, K)


@torch.no_grad()
def gemm_dw(dy_MN: torch.Tensor, x_MK: torch.Tensor, main_grad_NK: torch.Tensor) -> None:
    """main_grad += dy^T x in FP32, added by the product's epilogue."""
    N, K = main_grad_NK.shape
    rows = padded_rows(x_MK.numel() // K)
    dy_MN, x_MK = _padded(dy_MN.reshape(-1, N), rows, True), _padded(x_MK.reshape(-1, K), rows, True)
    torch.addmm(main_grad_NK, dy_MN.t(), x_MK, out_dtype=torch.float32, out=main_grad_NK)


def _padded(x_MK: torch.Tensor, rows: int, zeros: bool = False) -> torch.Tensor:
    """x with `rows` rows; those that are new hold zeros, or anything."""
    M, K = x_MK.shape
    if M == rows:
        return x_MK
    padded = x_MK.new_empty((rows, K))
    padded[:M] = x_MK
    if zeros:
        padded[M:] = 0
    return padded


# ---- the trial ----


@torch.no_grad()
def probe(product: Product) -> bool:
    """Whether cuBLAS gives our kernel's bits for `product` on random data. Adds what it found to registry.probes."""
    unequal, error = None, ""
    try:
        ours, theirs = _both(product)
        unequal = int((_bits(ours) != _bits(theirs)).sum())
    except (RuntimeError, ValueError) as refused:  # a form this torch does not have, a shape that ours does not take
        error = str(refused).splitlines()[0]
    registry.probes.append(dict(
        library=f"cublas {version()}", torch=torch.__version__, gpu=torch.cuda.get_device_name(product.device),
        op=product.op, rows=product.rows, n=product.N, k=product.K, leaves=product.leaves,
        out=str(product.out_dtype).removeprefix("torch."), equal=unequal == 0, unequal=unequal, error=error))
    return unequal == 0


def _both(product: Product) -> tuple[torch.Tensor, torch.Tensor]:
    """(our kernel's result, cuBLAS's) of the same random operands."""
    generator = torch.Generator(product.device).manual_seed(SEED)
    M, N, K = product.rows, product.N, product.K

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=product.device).normal_(generator=generator)

    if product.op == "linear":
        x, w = draw(M, K), draw(N, K)
        own = _kernels("gemm").linear(x, w, product.leaves, product.out_dtype)
        return own, linear(x, w, product.leaves, product.out_dtype)
    if product.op == "gemm_dx":
        dy, w = draw(M, N), draw(N, K)
        return _kernels("gemm_backward").input_gradient(dy, w), gemm_dx(dy, w)
    dy, x, own = draw(M, N), draw(M, K), draw(N, K, dtype=torch.float32)
    theirs = own.clone()
    _kernels("gemm_backward").weight_gradient(dy, x, own)
    gemm_dw(dy, x, theirs)
    return own, theirs


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def _kernels(name: str):
    return importlib.import_module(f"rlk.kernels.{name}")


@functools.cache
def version() -> str:
    """Version of the cuBLAS that this process has loaded; "none" without one."""
    with open("/proc/self/maps") as maps:
        loaded = [line.split()[-1] for line in maps if "/libcublas.so" in line]
    if not loaded:
        return "none"
    get: Callable[..., int] = ctypes.CDLL(loaded[0]).cublasGetProperty
    numbers = [ctypes.c_int() for _ in range(3)]  # major, minor, patch
    for which, number in enumerate(numbers):
        get(which, ctypes.byref(number))
    return ".".join(str(number.value) for number in numbers)
