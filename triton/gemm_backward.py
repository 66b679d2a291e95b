"""Gradients of matrix products: dx[M, K] = dy[M, N] w[N, K], and main_grad[N, K] += dy[M, N]^T x[M, K]. BF16 operands.

Layout: everything is row-major; dy's rows may lie further apart than N. One program makes one tile of the result; the
launch order is that of gemm.py. Rows and columns beyond the edge read other ones that exist and are not written.

Reduction order, the same in every configuration and on both architectures: one FP32 accumulator from +0 per element.
  gemm_dx  N ascending, then one rounding to BF16
  gemm_dw  rows (tokens) ascending; the sum is then added to main_grad, once per call, in FP32
Inside a block of 32 on gfx942 the operand packing of kpack 2 interleaves, as in gemm.py. What is left of the depth
behind the last whole block reads as zero, which changes no sum: a depth padded with zeros gives the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rlk.kernels.gemm import tile_at
from rlk.kernels.operands import MOST_BYTES, check_multiple, check_tensor
from rlk.kernels.variants import Variant, architecture

RUN = tl.constexpr(16)  # neighbouring columns that exist together: every width is a multiple of it


@triton.jit
def _columns(tile, width, BLOCK: tl.constexpr):
    """(columns of the tile, ones that exist instead of those beyond `width`, in runs that a wide load can take)."""
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    return columns, tl.max_contiguous(tl.multiple_of(columns % width, RUN), RUN)


@triton.jit(do_not_specialize=["M"])
def gemm_dx(dy, w, dx, M, N, K, dy_stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr):
    """Grid (tiles of dx)."""
    tile_m, tile_k = tile_at(tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K))
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns, existing = _columns(tile_k, K, BLOCK_K)
    depth = tl.arange(0, DEPTH)
    dy_offsets = tl.minimum(rows, M - 1)[:, None] * dy_stride + depth[None, :]
    w_offsets = depth[:, None] * K + existing[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    whole = N // DEPTH * DEPTH
    for n in range(0, whole, DEPTH):
        acc = tl.dot(tl.load(dy + n + dy_offsets), tl.load(w + n * K + w_offsets), acc)
    for n in tl.range(whole, N, DEPTH, num_stages=1):  # at most once
        inside = depth < N - n
        dy_tile = tl.load(dy + n + dy_offsets, mask=inside[None, :], other=0.0)
        acc = tl.dot(dy_tile, tl.load(w + n * K + w_offsets, mask=inside[:, None], other=0.0), acc)
    tl.store(dx + rows[:, None] * K + columns[None, :], acc.to(tl.bfloat16),
             mask=(rows < M)[:, None] & (columns < K)[None, :])


@triton.jit(do_not_specialize=["M"])
def gemm_dw(dy, x, main_grad, M, N, K, dy_stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr):
    """Grid (tiles of main_grad)."""
    tile_n, tile_k = tile_at(tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K))
    rows, existing_rows = _columns(tile_n, N, BLOCK_N)
    columns, existing = _columns(tile_k, K, BLOCK_K)
    depth = tl.arange(0, DEPTH)
    dy_offsets = existing_rows[:, None] + depth[None, :] * dy_stride
    x_offsets = depth[:, None] * K + existing[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    whole = M // DEPTH * DEPTH
    for m in range(0, whole, DEPTH):
        acc = tl.dot(tl.load(dy + m * dy_stride + dy_offsets), tl.load(x + m * K + x_offsets), acc)
    for m in tl.range(whole, M, DEPTH, num_stages=1):  # at most once
        inside = depth < M - m
        dy_tile = tl.load(dy + m * dy_stride + dy_offsets, mask=inside[None, :], other=0.0)
        acc = tl.dot(dy_tile, tl.load(x + m * K + x_offsets, mask=inside[:, None], other=0.0), acc)
    at = main_grad + rows[:, None] * K + columns[None, :]
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + acc, mask=inside)


@dataclass(frozen=True)
class Config:
    """One tile shape and the results that it serves: the first entry of a table that fits is taken."""

    rows: int  # of a tile of the result
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    min_tiles: int = 0  # of the result: fewer would leave the GPU idle

    def fits(self, rows: int, columns: int) -> bool:
        return math.ceil(rows / self.rows) * math.ceil(columns / self.columns) >= self.min_tiles

    def options(self, arch: str) -> dict:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        return options | ({"kpack": 2, "matrix_instr_nonkdim": 16} if arch == "gfx942" else {})


CONFIGS: dict[str, dict[str, dict[str, Config]]] = {
    "gfx942": {
        "gemm_dx": {"tile_128x128_w8": Config(128, 128, 64, 8, 2, min_tiles=200),
                    "tile_64x64_w4": Config(64, 64, 64, 4, 2)},
        "gemm_dw": {"tile_128x128_w8": Config(128, 128, 64, 8, 2, min_tiles=200),
                    "tile_64x64_w4": Config(64, 64, 64, 4, 2)},
    },
    "sm_90": {
        "gemm_dx": {"tile_128x256_w8": Config(128, 256, 64, 8, 3, min_tiles=120),
                    "tile_128x128_w8": Config(128, 128, 64, 8, 4, min_tiles=100),
                    "tile_64x64_w4": Config(64, 64, 64, 4, 4)},
        "gemm_dw": {"tile_128x128_w8": Config(128, 128, 64, 8, 4, min_tiles=100),
                    "tile_64x64_w4": Config(64, 64, 64, 4, 4)},
    },
}


def choose(arch: str, kernel: str, rows: int, columns: int) -> str:
    """Name of the configuration of "gemm_dx" or "gemm_dw" for a result of that shape."""
    return next(name for name, config in CONFIGS[arch][kernel].items() if config.fits(rows, columns))


def grid(config: Config, rows: int, columns: int) -> tuple[int]:
    return (math.ceil(rows / config.rows) * math.ceil(columns / config.columns),)


def constants(kernel: str, config: Config) -> dict:
    return {"BLOCK_M" if kernel == "gemm_dx" else "BLOCK_N": config.rows, "BLOCK_K": config.columns,
            "DEPTH": config.depth}


def input_gradient(dy_MN: torch.Tensor, w_NK: torch.Tensor, config: str | None = None) -> torch.Tensor:
    """dy w on the GPU, BF16 [M, K]. dy BF16 [M, N], w BF16 [N, K]; N and K multiples of 16; else ValueError.

    `config` names an entry of CONFIGS instead of the one that fits.
    """
    if dy_MN.dim() != 2 or w_NK.dim() != 2 or dy_MN.shape[1] != w_NK.shape[0]:
        raise ValueError(f"gemm_dx got dy {tuple(dy_MN.shape)} and w {tuple(w_NK.shape)}, expected [M, N] and [N, K]")
    (M, N), K = dy_MN.shape, w_NK.shape[1]
    check_multiple("gemm_dx", N=N, K=K)
    dy_MN = dy_MN.contiguous()
    check_tensor("gemm_dx", "dy", dy_MN, torch.bfloat16)
    check_tensor("gemm_dx", "w", w_NK, torch.bfloat16)
    _check_rows("gemm_dx", "w", w_NK)
    dx_MK = dy_MN.new_empty((M, K))
    if M:
        check_tensor("gemm_dx", "room for the result", dx_MK, torch.bfloat16)
        arch = architecture()
        chosen = CONFIGS[arch]["gemm_dx"][config or choose(arch, "gemm_dx", M, K)]
        gemm_dx[grid(chosen, M, K)](dy_MN, w_NK, dx_MK, M, N, K, N, **constants("gemm_dx", chosen),
                                    **chosen.options(arch))
    return dx_MK


def weight_gradient(dy_MN: torch.Tensor, x_MK: torch.Tensor, main_grad_NK: torch.Tensor,
                    config: str | None = None) -> None:
    """main_grad += dy^T x on the GPU, in place. dy BF16 [M, N], x BF16 [M, K], main_grad FP32 [N, K], contiguous.

    N and K multiples of 16, M any number; else ValueError. `config` as in `input_gradient`.
    """
    N, K = main_grad_NK.shape
    M = x_MK.shape[0]
    if tuple(dy_MN.shape) != (M, N) or tuple(x_MK.shape) != (M, K):
        raise ValueError(f"gemm_dw got dy {tuple(dy_MN.shape)} and x {tuple(x_MK.shape)} for a gradient of {(N, K)}, "
                         f"expected [M, {N}] and [M, {K}]")
    check_multiple("gemm_dw", N=N, K=K)
    dy_MN, x_MK = dy_MN.contiguous(), x_MK.contiguous()
    check_tensor("gemm_dw", "dy", dy_MN, torch.bfloat16)
    check_tensor("gemm_dw", "x", x_MK, torch.bfloat16)
    _check_rows("gemm_dw", "main_grad", main_grad_NK)
    if not M:
        return
    arch = architecture()
    for rows in _slices(N, K):
        part_NK, part_MN = main_grad_NK[rows], dy_MN[:, rows]
        check_tensor("gemm_dw", "main_grad", part_NK, torch.float32)
        check_tensor("gemm_dw", "dy", part_MN, torch.bfloat16)
        count = part_NK.shape[0]
        chosen = CONFIGS[arch]["gemm_dw"][config or choose(arch, "gemm_dw", count, K)]
        gemm_dw[grid(chosen, count, K)](part_MN, x_MK, part_NK, M, count, K, N, **constants("gemm_dw", chosen),
                                        **chosen.options(arch))


def _slices(N: int, K: int) -> list[slice]:
    """Rows of main_grad in parts below 2 GiB (a vocabulary's gradient is larger), each a multiple of 128 long."""
    most = (MOST_BYTES - 1) // (4 * K) // 128 * 128
    if most == 0:
        raise ValueError(f"gemm_dw got K = {K}, expected 128 FP32 rows of it below {MOST_BYTES} bytes")
    return [slice(start, min(start + most, N)) for start in range(0, N, most)]


def _check_rows(op: str, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{op} got {name} with strides {tensor.stride()}, expected contiguous rows")


def variants(arch: str) -> list[Variant]:
    """Every kernel that `input_gradient` and `weight_gradient` can launch on `arch`."""
    made = {"gemm_dx": (gemm_dx, {"dy": "*bf16", "w": "*bf16", "dx": "*bf16"}),
            "gemm_dw": (gemm_dw, {"dy": "*bf16", "x": "*bf16", "main_grad": "*fp32"})}
    return [
        Variant(kernel=kernel, name=name, function=function,
                signature=pointers | {"M": "i32", "N": "i32", "K": "i32", "dy_stride": "i32"},
                constants=constants(kernel, config), options=config.options(arch),
                divisible=(*pointers, "N", "K", "dy_stride"), small=tuple(pointers))
        for kernel, (function, pointers) in made.items() for name, config in CONFIGS[arch][kernel].items()
    ]
