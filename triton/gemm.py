"""Matrix products y[M, N] = x[M, K] w[N, K]^T: BF16 operands, FP32 sums, BF16 or FP32 results. Forward.

Layout: x, w and y are row-major. One program makes a BLOCK_M x BLOCK_N tile; M tiles of one group of N tiles are
neighbours in the launch order, so that a weight tile is read from memory once. Rows and columns beyond M and N read
the last row or column again and are not written, so that loads need no mask; where K has a tail, it reads as zero.
A configuration may swap the matrix unit's operands (w x^T, so that few rows of x fill it); no bit changes by that. Rows
beyond M read as zero there: every program would read the repeated row again, and it is much of what is loaded.

Reduction order, the same in every configuration:
  gfx942  K is cut in chunks of 1024. A chunk is one FP32 accumulator from +0, K ascending by MFMA 16x16x16 (in blocks
          of 32 whose elements the operand packing of kpack 2 interleaves). Chunk sums are added ascending.
  sm_90   one FP32 accumulator from +0 over all of K, ascending.
  leaves  K is cut in equal leaves, each as above; leaves are added in the tree ((0+1)+(2+3))+((4+5)+(6+7)).
One rounding at the end. Schedules: a program sums all of K (monolithic), or one chunk of one leaf (split), whose sum
goes to a workspace [leaves x chunks, M, N] that gemm_reduce.py adds up in that same order. Epilogues, where a program
has the whole sum: the BF16 residual added in FP32 before the rounding; or SwiGLU of a gate and an up tile, which the
program sums one after the other and rounds to BF16 each, as the product alone would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rlk.contract import GEMM_CHUNK
from rlk.kernels import gemm_reduce
from rlk.kernels.operands import check_multiple, check_tensor
from rlk.kernels.swiglu import silu_times
from rlk.kernels.variants import Variant, architecture

LEAVES = gemm_reduce.LEAVES
GROUP_N = tl.constexpr(8)  # N tiles that share a pass over the M tiles
UNBOUNDED = 1 << 31
FINISHES = {"bf16": ("round", "bf16"), "fp32": ("round", "fp32"), "residual": ("residual", "bf16"),
            "swiglu": ("swiglu", "bf16")}  # what a program may do with a whole sum -> (EPILOGUE, dtype of y)


@triton.jit
def tile_at(tiles_m, tiles_n):
    """(M tile, N tile) of this program."""
    tile_m, tile_n = 0, tl.program_id(0)
    if tiles_m > 1:  # else, in decode, the divisions would take as long as the first load
        first_n = tile_n // (GROUP_N * tiles_m) * GROUP_N
        in_group = tile_n % (GROUP_N * tiles_m)
        columns_in_group = min(tiles_n - first_n, GROUP_N)
        tile_m, tile_n = in_group // columns_in_group, first_n + in_group % columns_in_group
    return tile_m, tile_n


@triton.jit
def _product(operands, first, last, EVEN_K: tl.constexpr, SWAP: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr):
    """Sum over k in [first, last), from +0. operands: (a, b, offsets of their elements, which rows of x are there).

    With SWAP rows of x, then b's columns, that are not there read as zero.
    """
    tl.static_assert(EVEN_K or not SWAP)
    a, b, a_offsets, b_offsets, live = operands
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.range(first, last, BLOCK_K, loop_unroll_factor=UNROLL):
        if EVEN_K:
            a_tile = tl.load(a + k + a_offsets)
            if SWAP:
                b_tile = tl.load(b + k + b_offsets, mask=live[None, :], other=0.0)
            else:
                b_tile = tl.load(b + k + b_offsets)
        else:
            inside = tl.arange(0, BLOCK_K) < last - k
            a_tile = tl.load(a + k + a_offsets, mask=inside[None, :], other=0.0)
            b_tile = tl.load(b + k + b_offsets, mask=inside[:, None], other=0.0)
        acc = tl.dot(a_tile, b_tile, acc)
    return acc


@triton.jit
def _leaf(operands, first, leaf_k, CHUNK: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, ROWS: tl.constexpr,
          COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr):
    """Sum over k in [first, first + leaf_k), by chunks."""
    last = first + leaf_k
    if CHUNK == 0:
        total = _product(operands, first, last, EVEN_K, SWAP, ROWS, COLUMNS, BLOCK_K, UNROLL)
    else:
        total = tl.full((ROWS, COLUMNS), -0.0, tl.float32)  # -0 + a is a, for every a: the first chunk as it is
        for chunk in range(first, last, CHUNK):
            total += _product(operands, chunk, min(chunk + CHUNK, last), EVEN_K, SWAP, ROWS, COLUMNS, BLOCK_K, UNROLL)
    return total


@triton.jit(do_not_specialize=["M"])
def gemm(x, w, residual, y, M, N, K, leaf_k, TREE: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
         EPILOGUE: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr,
         BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr):
    """Grid (tiles, 1), TREE leaves in each program; or, split, (tiles, leaves x chunks) with y the FP32 workspace.

    EPILOGUE: "round" to y's dtype, "residual" (added first) or "swiglu" (w is gate then up; y has N/2 columns).
    """
    width = N // 2 if EPILOGUE == "swiglu" else N
    tile_m, tile_n = tile_at(tl.cdiv(M, BLOCK_M), tl.cdiv(width, BLOCK_N))
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    if SWAP:
        a, b, up_at = w, x, (width * K, 0)
        a_offsets = tl.minimum(columns, width - 1)[:, None] * K + depth[None, :]
        b_offsets = rows[None, :] * K + depth[:, None]
        y_offsets = rows[None, :] * width + columns[:, None]
        inside = (rows < M)[None, :] & (columns < width)[:, None]
    else:
        a, b, up_at = x, w, (0, width * K)
        a_offsets = tl.minimum(rows, M - 1)[:, None] * K + depth[None, :]
        b_offsets = tl.minimum(columns, width - 1)[None, :] * K + depth[:, None]
        y_offsets = rows[:, None] * width + columns[None, :]
        inside = (rows < M)[:, None] & (columns < width)[None, :]
    operands = (a, b, a_offsets, b_offsets, rows < M)
    ROWS: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    COLUMNS: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    if SPLIT:
        part = tl.program_id(1)
        if CHUNK == 0:
            first = part * leaf_k
            last = first + leaf_k
        else:
            chunks = tl.cdiv(leaf_k, CHUNK)
            leaf_first = part // chunks * leaf_k
            first = leaf_first + part % chunks * CHUNK
            last = min(first + CHUNK, leaf_first + leaf_k)
        total = _product(operands, first, last, EVEN_K, SWAP, ROWS, COLUMNS, BLOCK_K, UNROLL)
        y += part * M * N
    else:
        for leaf in tl.static_range(TREE):  # a binary counter: odd leaves close a pair, which may close a quad, ...
            total = _leaf(operands, leaf * leaf_k, leaf_k, CHUNK, EVEN_K, SWAP, ROWS, COLUMNS, BLOCK_K, UNROLL)
            if leaf % 2 == 0:
                single = total
            else:
                total = single + total
                if leaf % 4 == 1:
                    pair = total
                else:
                    total = pair + total
                    if leaf % 8 == 3:
                        quad = total
                    else:
                        total = quad + total
    if EPILOGUE == "residual":
        total = tl.load(residual + y_offsets, mask=inside, other=0.0).to(tl.float32) + total
    if EPILOGUE == "swiglu":
        up_operands = (a + up_at[0], b + up_at[1], a_offsets, b_offsets, rows < M)
        up = _leaf(up_operands, 0, leaf_k, CHUNK, EVEN_K, SWAP, ROWS, COLUMNS, BLOCK_K, UNROLL)
        total = silu_times(total.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32))
    tl.store(y + y_offsets, total.to(y.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Config:
    """One tile shape and the products that it serves: the first entry of the table that fits is taken."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    max_m: int = UNBOUNDED
    min_n: int = 0
    max_n: int = UNBOUNDED
    min_k: int = 0  # of a leaf
    max_k: int = UNBOUNDED
    leaves: tuple[int, ...] = (1,)
    split: bool = False
    tail: bool = False  # a leaf need not be a multiple of block_k
    unroll: int = 1  # K blocks per turn of the loop
    hint: str | None = None  # gfx942: the compiler's schedule_hint
    swap: bool = False  # w is the matrix unit's first operand

    def fits(self, M: int, N: int, leaf_k: int, leaves: int) -> bool:
        return (M <= self.max_m and self.min_n <= N <= self.max_n and self.min_k <= leaf_k <= self.max_k
                and self.sums(leaf_k, leaves))

    def sums(self, leaf_k: int, leaves: int) -> bool:
        """Whether the kernel is right for that depth."""
        return leaves in self.leaves and (self.tail or leaf_k % self.block_k == 0)

    def options(self, arch: str) -> dict:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        if arch == "gfx942":
            options["kpack"] = 2
            if self.block_m > 16:  # a tile of 16 rows gets the 16x16x16 instruction anyhow
                options["matrix_instr_nonkdim"] = 16
            if self.hint:
                options["schedule_hint"] = self.hint
        return options


DECODE = 64  # most rows of a decode step
CONFIGS: dict[str, dict[str, Config]] = {
    "gfx942": {
        # Decode reads the weight once: small tiles spread it over the compute units, splitting K spreads it further.
        "decode_16x128_w4": Config(16, 128, 64, 4, 2, max_m=DECODE, min_n=16384),
        "short_16x32_w2": Config(16, 32, 64, 2, 2, max_m=DECODE, max_k=1024),
        "qkv_32x64_w4_u4": Config(32, 64, 64, 4, 2, max_m=DECODE, max_n=2048, min_k=2048, split=True, unroll=4,
                                  hint="memory-bound-attention"),
        "down_16x32_w2_u4": Config(16, 32, 64, 2, 2, max_m=DECODE, max_n=5120, min_k=1025, leaves=LEAVES, split=True,
                                   unroll=4, hint="memory-bound-attention"),
        "decode_16x32_w2": Config(16, 32, 64, 2, 2, max_m=DECODE, leaves=LEAVES, split=True),
        "decode_tail_16x32_w2": Config(16, 32, 64, 2, 2, max_m=DECODE, leaves=LEAVES, split=True, tail=True),
        "prefill_64x64_w4": Config(64, 64, 64, 4, 2, max_m=512),
        "prefill_128x128_w8": Config(128, 128, 64, 8, 2),
        "prefill_64x128_w4": Config(64, 128, 64, 4, 2, leaves=(2, 4)),
        "prefill_tail_64x64_w4": Config(64, 64, 64, 4, 2, leaves=LEAVES, tail=True),
    },
    "sm_90": {
        # Decode reads the weight once. Few rows: w comes first, so that they fill the matrix unit's narrow side. Few
        # columns: one program for each multiprocessor, deep in K; many: two or three, each with fewer stages.
        "decode_8x32_w2": Config(8, 32, 256, 2, 5, max_m=8, max_n=5120, swap=True),
        "decode_8x64_w2_s6": Config(8, 64, 128, 2, 6, max_m=8, max_n=8191, swap=True),
        "decode_8x64_w2_s4": Config(8, 64, 128, 2, 4, max_m=8, swap=True),
        "decode_16x16_w2": Config(16, 16, 256, 2, 4, max_m=16, max_n=8191, swap=True),
        "decode_16x64_w4": Config(16, 64, 128, 4, 3, max_m=16, swap=True),
        "decode_32x64_w4_s8": Config(32, 64, 128, 4, 8, max_m=32, max_n=8191, swap=True),
        "decode_32x64_w4_s3": Config(32, 64, 128, 4, 3, max_m=32, swap=True),
        "decode_64x32_w4": Config(64, 32, 128, 4, 8, max_m=DECODE, max_n=5120),
        "decode_64x64_w4_s8": Config(64, 64, 64, 4, 8, max_m=DECODE, max_n=8191, swap=True),
        "decode_64x64_w4_s4": Config(64, 64, 64, 4, 4, max_m=DECODE, min_n=16384, max_n=65535, swap=True),
        "decode_64x128_w4": Config(64, 128, 128, 4, 4, max_m=DECODE, swap=True),
        "decode_leaves_16x32_w4": Config(16, 32, 128, 4, 5, max_m=DECODE, leaves=LEAVES[1:], split=True),
        "decode_tail_16x32_w4": Config(16, 32, 64, 4, 3, max_m=DECODE, leaves=LEAVES, split=True, tail=True),
        "prefill_64x64_w4": Config(64, 64, 64, 4, 4, max_m=512),
        "prefill_128x128_w8": Config(128, 128, 64, 8, 4),
        "prefill_leaves2_128x128_w8": Config(128, 128, 64, 8, 3, leaves=(2,)),
        "prefill_leaves_64x64_w4": Config(64, 64, 64, 4, 3, leaves=(4,)),  # a tree of 128 x 128 tiles would spill
        "prefill_tail_64x64_w8": Config(64, 64, 64, 8, 3, leaves=LEAVES, tail=True),
    },
}


def choose(arch: str, M: int, N: int, K: int, leaves: int = 1) -> str:
    """Name of the configuration for a product of that shape, K being all of the leaves."""
    return next(name for name, config in CONFIGS[arch].items() if config.fits(M, N, K // leaves, leaves))


def parts(arch: str, K: int, leaves: int = 1) -> tuple[int, int]:
    """(leaves, chunks in each): the partial sums of one output element."""
    chunk = GEMM_CHUNK[arch]
    return leaves, math.ceil(K // leaves / chunk) if chunk else 1


def grid(config: Config, arch: str, M: int, N: int, K: int, leaves: int = 1) -> tuple[int, int]:
    tiles = math.ceil(M / config.block_m) * math.ceil(N / config.block_n)
    return tiles, math.prod(parts(arch, K, leaves)) if config.split else 1


def constants(config: Config, arch: str, tree: int, epilogue: str = "round") -> dict:
    """The constexpr arguments; `tree`: the leaves that one program adds up."""
    return dict(TREE=tree, SPLIT=config.split, CHUNK=GEMM_CHUNK[arch], EPILOGUE=epilogue, EVEN_K=not config.tail,
                SWAP=config.swap, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
                BLOCK_K=config.block_k, UNROLL=config.unroll)


def linear(x_MK: torch.Tensor, w_NK: torch.Tensor, leaves: int = 1, out_dtype: torch.dtype = torch.bfloat16,
           residual_MN: torch.Tensor | None = None, swiglu: bool = False,
           config: str | Config | None = None, out_MN: torch.Tensor | None = None) -> torch.Tensor:
    """x w^T on the GPU, [M, N].

    x BF16 [M, K], w BF16 [N, K]; N and each leaf of K multiples of 16. `leaves` 1, 2, 4 or 8. out_dtype BF16 or FP32.
    residual BF16 [M, N]: the FP32 sum is added to it before the one rounding. swiglu: w holds gate then up rows; the
    result is silu(gate) * up [M, N/2], with the bits of the SwiGLU kernel behind the plain product. `config` (an entry
    of CONFIGS, or a candidate to be timed) instead of the one that fits. out: contiguous, of out_dtype, takes the
    result (a communicator's staging area, which peers read without a copy). Raises ValueError for anything else.
    """
    arch = architecture()
    M, N, K, x_MK = _checked(x_MK, w_NK, leaves, out_dtype, residual_MN, swiglu)
    name = config or choose(arch, max(M, 1), N, K, leaves)
    config = name if isinstance(name, Config) else CONFIGS[arch].get(name)
    if config is None or not config.sums(K // leaves, leaves):
        raise ValueError(f"linear got {leaves} leaves of {K // leaves} for the configuration {name}, expected one of "
                         f"{list(CONFIGS[arch])} that serves them; leave the choice to the dispatch")
    partial_counts = parts(arch, K, leaves) if config.split else (1, 1)
    count = math.prod(partial_counts)
    plain = not swiglu and residual_MN is None
    direct = not config.split and (leaves == 1 or (plain and out_dtype == torch.float32))  # without a workspace
    width = N // 2 if swiglu else N
    if out_MN is not None:
        check_tensor("linear", "out", out_MN, out_dtype, (M, width))
        if not out_MN.is_contiguous():
            raise ValueError(f"linear got out with strides {out_MN.stride()}, expected contiguous rows of {width}")
    whole = direct or (count == 1 and plain and out_dtype == torch.float32)  # what the kernel writes is the result
    if whole and out_MN is not None:
        y = out_MN
    else:
        y = x_MK.new_empty((M, width) if whole else (count, M, N), dtype=out_dtype if direct else torch.float32)
    if M == 0:
        return y.new_empty((0, width), dtype=out_dtype)
    check_tensor("linear", "room for the result" if whole else "a workspace", y, out_dtype if whole else torch.float32)
    epilogue = "round" if plain or not direct else "swiglu" if swiglu else "residual"
    if epilogue == "residual":  # else the reduction checks it
        residual_MN = residual_MN.contiguous()
        check_tensor("linear", "the residual", residual_MN, torch.bfloat16, (M, N))
    gemm[grid(config, arch, M, width if direct else N, K, leaves)](
        x_MK, w_NK, residual_MN if epilogue == "residual" else x_MK, y, M, N, K, K // leaves,
        **constants(config, arch, 1 if config.split else leaves, epilogue), **config.options(arch))
    return y if whole else gemm_reduce.reduce(y, partial_counts, out_dtype, residual_MN, swiglu, out_MN)


def _checked(x_MK, w_NK, leaves, out_dtype, residual_MN, swiglu):
    if x_MK.dim() != 2 or w_NK.dim() != 2 or x_MK.shape[1] != w_NK.shape[1]:
        raise ValueError(f"linear got x {tuple(x_MK.shape)} and w {tuple(w_NK.shape)}, expected [M, K] and [N, K]")
    (M, K), N = x_MK.shape, w_NK.shape[0]
    if leaves not in LEAVES or K % leaves:
        raise ValueError(f"linear got {leaves} leaves for K = {K}, expected one of {LEAVES} that divides K")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"linear got out_dtype {out_dtype}, expected torch.bfloat16 or torch.float32")
    residual = residual_MN is not None
    if (swiglu or residual) and (out_dtype != torch.bfloat16 or (swiglu and (residual or leaves != 1))):
        raise ValueError(f"linear got swiglu {swiglu}, a residual {residual}, {leaves} leaves and {out_dtype}, "
                         "expected at most one of the two, SwiGLU with one leaf, and torch.bfloat16")
    check_multiple("linear", N=N, leaf_of_K=K // leaves, **({"half_of_N": N // 2} if swiglu else {}))
    x_MK = x_MK.contiguous()
    check_tensor("linear", "x", x_MK, torch.bfloat16)
    check_tensor("linear", "w", w_NK, torch.bfloat16)
    if not w_NK.is_contiguous():
        raise ValueError(f"linear got w with strides {w_NK.stride()}, expected contiguous rows of K = {K}")
    return M, N, K, x_MK


def variants(arch: str) -> list[Variant]:
    """Every kernel that `linear` can launch on `arch`."""
    found = []
    for name, config in CONFIGS[arch].items():
        for tree in (1,) if config.split else config.leaves:
            for finish in ("fp32",) if config.split or tree > 1 else FINISHES:
                epilogue, out = FINISHES[finish]
                label = name + (f"_leaves{tree}" if tree > 1 else "") + ("" if config.split else f"_{finish}")
                found.append(Variant(
                    kernel="gemm", name=label, function=gemm,
                    signature={"x": "*bf16", "w": "*bf16", "residual": "*bf16", "y": f"*{out}", "M": "i32", "N": "i32",
                               "K": "i32", "leaf_k": "i32"},
                    constants=constants(config, arch, tree, epilogue), options=config.options(arch),
                    divisible=("x", "w", "residual", "y", "N", "K", "leaf_k"), small=("x", "w", "residual", "y")))
    return found + gemm_reduce.variants(arch)
