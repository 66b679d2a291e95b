"""cuBLAS for large matrix products, where it gives the bits of our own kernels (triton/gemm.py, gemm_backward.py).

cuBLAS picks a kernel by shape, layout and version, and some of them split the depth, which is another order of sums.
So each product is tried once in a process, at its first use, on random data: equal bits, and cuBLAS serves it; else our
kernel does, which is what ran in the comparison. A trial that runs out of memory says nothing: the next call tries
again. Rows (tokens) are padded to a multiple of ROW_STEP, so that there are few products to try: a row's bits do not
depend on the rows beside it, and rows of zeros add nothing to a weight gradient. Padding copies the operands: callers
that can should bring a multiple of ROW_STEP rows.

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
LT_ALIGNMENT = 256  # bytes: cuBLASLt is told the alignment of each operand up to here
SEED = 5
SLICE_BYTES = 1 << 28  # of FP32: most of our kernel's result that a trial holds at once, beside all of cuBLAS's
REFUSALS = ("out_dtype", "self dtype must match", "invalid combination of arguments", "unexpected keyword",
            "not supported", "not implemented", "CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE")
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


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
        main_grad_NK.dtype == torch.float32 and main_grad_NK.data_ptr() % _alignment() == 0
        and tuple(main_grad_NK.shape) == (dy_MN.shape[-1], x_MK.shape[-1]))
    return bool(fit) and _tried("gemm_dw", rows, *main_grad_NK.shape, 1, torch.float32, x_MK)


def _fit(*operands: torch.Tensor) -> bool:
    alignment = _alignment()
    return all(x.dtype == torch.bfloat16 and x.is_contiguous() and x.data_ptr() % alignment == 0
               and x.shape[-1] % ALIGNMENT == 0 for x in operands)


def _alignment() -> int:
    """Of operands, in bytes: that of a trial's, as far as the choice of a kernel depends on it."""
    return LT_ALIGNMENT if "cublaslt" in _settings()[1].lower() else ALIGNMENT


def _tried(op: str, rows: int, N: int, K: int, leaves: int, out_dtype: torch.dtype, like: torch.Tensor) -> bool:
    product = Product(op, rows, N, K, leaves, out_dtype, like.device, _settings())
    equal = _equal.get(product)
    if equal is not None:
        return equal
    if torch.version.hip or torch.cuda.is_current_stream_capturing():  # a graph would hold the trial
        return False
    equal = probe(product)
    if equal is None:
        return False
    _equal[product] = equal
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
def probe(product: Product) -> bool | None:
    """Whether cuBLAS gives our kernel's bits for `product` on random data; None: there was no memory to try it.

    Adds what it found to registry.probes. An error that is no refusal of the product is passed on.
    """
    unequal, error = None, ""
    try:
        unequal = _unequal(product)
    except (RuntimeError, ValueError, TypeError) as raised:
        if _says(raised, OUT_OF_MEMORY) or isinstance(raised, torch.OutOfMemoryError):
            return None
        # A form that this torch does not have, or a shape that our kernel does not take.
        if not isinstance(raised, (NotImplementedError, ValueError)) and not _says(raised, REFUSALS):
            raise
        error = str(raised).splitlines()[0]
    registry.probes.append(dict(
        library=f"cublas {version()}", torch=torch.__version__, gpu=torch.cuda.get_device_name(product.device),
        op=product.op, rows=product.rows, n=product.N, k=product.K, leaves=product.leaves,
        out=str(product.out_dtype).removeprefix("torch."), equal=unequal == 0, unequal=unequal, error=error))
    return unequal == 0


def _says(raised: Exception, texts: tuple[str, ...]) -> bool:
    return any(text.lower() in str(raised).lower() for text in texts)


def _unequal(product: Product) -> int:
    """Elements in which cuBLAS's result differs from our kernel's, of the same random operands.

    Our kernel makes its result in slices of rows: they have the bits of the whole, and little room is taken.
    """
    M, N, K = product.rows, product.N, product.K

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = SEED) -> torch.Tensor:
        generator = torch.Generator(product.device).manual_seed(seed)
        return torch.empty(shape, dtype=dtype, device=product.device).normal_(generator=generator)

    if product.op == "linear":
        x, w = draw(M, K), draw(N, K, seed=SEED + 1)
        theirs = linear(x, w, product.leaves, product.out_dtype)

        def own(rows: slice) -> torch.Tensor:
            return _kernels("gemm").linear(x[rows], w, product.leaves, product.out_dtype)
    elif product.op == "gemm_dx":
        dy, w = draw(M, N), draw(N, K, seed=SEED + 1)
        theirs = gemm_dx(dy, w)

        def own(rows: slice) -> torch.Tensor:
            return _kernels("gemm_backward").input_gradient(dy[rows], w)
    else:
        dy, x = draw(M, N), draw(M, K, seed=SEED + 1)

        def main_grad(rows: slice) -> torch.Tensor:
            return draw(rows.stop - rows.start, K, dtype=torch.float32, seed=SEED + 2 + rows.start)

        def own(rows: slice) -> torch.Tensor:
            part = main_grad(rows)
            _kernels("gemm_backward").weight_gradient(dy[:, rows], x, part)
            return part

        theirs = torch.empty((N, K), dtype=torch.float32, device=product.device)
        for rows in _slices(theirs):
            theirs[rows] = main_grad(rows)
        gemm_dw(dy, x, theirs)
    return sum(int((_bits(own(rows)) != _bits(theirs[rows])).sum()) for rows in _slices(theirs))


def _slices(result: torch.Tensor) -> list[slice]:
    """The rows of a result in slices of about SLICE_BYTES."""
    count, width = result.shape
    step = max(SLICE_BYTES // (4 * width) // ROW_STEP, 1) * ROW_STEP
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


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
