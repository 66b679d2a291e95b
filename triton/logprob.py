"""Log-prob and entropy over the whole vocabulary, from FP32 logits: ops/logprob.py has the rule. Forward and backward.

Layout: logits [T, V] FP32, row-major; column j of this rank is id first_id + j. The row is cut in equal tiles (64 over
the whole vocabulary; a tensor-parallel rank holds whole ones), and a tile's state is (max, sum e, sum e * x) with
x = logit / temperature and e = exp(x - max), in stats [T, tiles, 3]. One program makes one tile of one row; in the
merge a lane makes a row.

Reduction order: element i of a tile goes to partial sum i % LANES, i ascending (e by an add, e * x by an FMA); tl.sum
adds the partials, and one configuration per tile width serves all callers. Tiles are merged in ascending order, with
scale_i = exp(max_i - max) and sum = fma(sum_i, scale_i, sum), by an explicit loop.
    lse = max + log(sum),  logprob = x[target] - lse,  entropy = lse - (sum e * x) / sum
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk.contract import VOCAB_TILES
from rlk.kernels.operands import check_tensor
from rlk.kernels.variants import Variant, architecture

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of the finite FP32 numbers


@triton.jit
def scaled(logit, inv_t):
    """x = logit / temperature; -0 becomes +0, as it does when ranks add up the logits that each of them picked."""
    return (logit + 0.0) * inv_t


@triton.jit
def scaled_lanes(logits, first, width, count, inv_t, LANES: tl.constexpr):
    """x of a tile's elements first .. first + LANES - 1; minus infinity from `count` on. A zero keeps its sign."""
    lane = tl.arange(0, LANES)
    x = tl.load((logits + lane) + first, mask=first + lane < width) * inv_t  # what is masked is replaced below
    return tl.where(first + lane < count, x, float("-inf"))


@triton.jit
def add_lanes(x, shift, total, weighted):
    """(total + e, weighted + e * x). The lowest finite number stands for minus infinity, so that 0 * x is a zero."""
    e = tl.exp(x - shift)
    return total + e, tl.fma(e, tl.maximum(x, LOWEST), weighted)


@triton.jit(do_not_specialize=["units", "tiles", "valid"])
def tile_stats_rows(logits, stats, units, tiles, valid, inv_t, UNIT: tl.constexpr, LANES: tl.constexpr,
                    HELD: tl.constexpr):
    """Grid (tiles, T). A tile has units * UNIT logits; columns >= valid count as minus infinity.

    The first HELD elements of each partial stay in registers between the two passes; a wider tile's others are read
    twice.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    width = units * UNIT
    logits += (row * tiles + tile) * width
    count = min(max(valid - tile * width, 0), width)
    held = ()
    for block in tl.static_range(HELD):  # all are loaded before the first is needed
        held += (scaled_lanes(logits, block * LANES, width, count, inv_t, LANES),)
    top = tl.full((LANES,), float("-inf"), tl.float32)
    for block in tl.static_range(HELD):
        top = tl.maximum(top, held[block])
    for first in range(HELD * LANES, width, LANES):
        top = tl.maximum(top, scaled_lanes(logits, first, width, count, inv_t, LANES))
    highest = tl.max(top, 0) + 0.0  # zeros of either sign may meet in it, and -0 becomes +0
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # no finite logit: every e is zero, not exp(NaN)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    for block in tl.static_range(HELD):
        total, weighted = add_lanes(held[block], shift, total, weighted)
    for first in range(HELD * LANES, width, LANES):
        total, weighted = add_lanes(scaled_lanes(logits, first, width, count, inv_t, LANES), shift, total, weighted)
    stats += (row * tiles + tile) * 3
    tl.store(stats, highest)
    tl.store(stats + 1, tl.sum(total, 0))
    tl.store(stats + 2, tl.sum(weighted, 0))


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["target_logits"])
def merge_tiles_rows(stats, target_logits, scores, T, inv_t, TILES: tl.constexpr, AHEAD: tl.constexpr,
                     ROWS: tl.constexpr):
    """Grid (T / ROWS,). scores is [3, T]: logprob, entropy, lse."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < T
    stats += row * (TILES * 3)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    for first in range(0, TILES, AHEAD):  # AHEAD tiles are loaded before the first is needed
        for tile in tl.static_range(AHEAD):
            highest = tl.maximum(highest, tl.load(stats + (first + tile) * 3, mask=inside, other=0.0))
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    for first in range(0, TILES, AHEAD):
        for tile in tl.static_range(AHEAD):
            state = stats + (first + tile) * 3
            scale = tl.exp(tl.load(state, mask=inside, other=0.0) - highest)
            total = tl.fma(tl.load(state + 1, mask=inside, other=0.0), scale, total)
            weighted = tl.fma(tl.load(state + 2, mask=inside, other=0.0), scale, weighted)
    lse = highest + tl.log(total)
    x = scaled(tl.load(target_logits + row, mask=inside, other=0.0), inv_t)
    tl.store(scores + row, x - lse, mask=inside)
    tl.store(scores + T + row, lse - tl.div_rn(weighted, total), mask=inside)
    tl.store(scores + 2 * T + row, lse, mask=inside)


@triton.jit(do_not_specialize=["units", "first_id", "valid"],
            do_not_specialize_on_alignment=["targets", "lse", "grad"])
def tile_stats_backward_rows(logits, targets, lse, grad, dlogits, units, first_id, valid, inv_t, UNIT: tl.constexpr,
                             BLOCK: tl.constexpr):
    """Grid (V / BLOCK, T), V = units * UNIT. dlogits = grad / temperature * (1[id = target] - exp(x - lse))."""
    row = tl.program_id(1)
    V = units * UNIT
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    scale = tl.load(grad + row) * inv_t
    target = tl.load(targets + row) - first_id
    x = scaled(tl.load(logits + row * V + column, mask=inside, other=0.0), inv_t)
    weight = scale * tl.exp(x - tl.load(lse + row))
    value = tl.where(column == target, scale - weight, -weight)
    value = tl.where(column < valid, value, 0.0)
    tl.store(dlogits + row * V + column, value.to(dlogits.dtype.element_ty), mask=inside)


UNITS = (4, 2, 1)  # logits that are loaded at once, by the largest of these that divides the tile's width
CONFIGS = {
    "gfx942": {"stats": {"LANES": 1024, "HELD": 3, "num_warps": 4}, "merge": {"AHEAD": 16, "ROWS": 64, "num_warps": 1},
               "backward": {"BLOCK": 2048, "num_warps": 4}},
    "sm_90": {"stats": {"LANES": 256, "HELD": 10, "num_warps": 2}, "merge": {"AHEAD": 16, "ROWS": 32, "num_warps": 1},
              "backward": {"BLOCK": 2048, "num_warps": 4}},
}


def choose(width: int) -> int:
    """Logits to load at once from rows or tiles of `width` logits."""
    return next(unit for unit in UNITS if width % unit == 0)


def _split(config: dict) -> tuple[dict, dict]:
    """(constants, compile options) of a configuration."""
    return ({key: value for key, value in config.items() if key.isupper()},
            {key: value for key, value in config.items() if not key.isupper()} | {"enable_fp_fusion": False})


def tile_stats(logits_TV: torch.Tensor, tiles: int, first_id: int, valid_vocab: int,
               inv_temperature: float) -> torch.Tensor:
    """States FP32 [T, tiles, 3] of contiguous FP32 logits [T, V] on the GPU; `tiles` must divide V, else ValueError."""
    T, V = logits_TV.shape
    if tiles < 1 or V % tiles:
        raise ValueError(f"{V} logits a row do not split into {tiles} equal tiles; pad the vocabulary to a multiple of "
                         f"{VOCAB_TILES}")
    _check_logits("tile_stats", logits_TV)
    stats = logits_TV.new_empty((T, tiles, 3))
    width, valid = V // tiles, min(max(valid_vocab - first_id, 0), V)
    constants, options = _split(CONFIGS[architecture()]["stats"])
    unit = choose(width)
    if T:
        tile_stats_rows[tiles, T](logits_TV, stats, width // unit, tiles, valid, inv_temperature, UNIT=unit,
                                  **constants, **options)
    return stats


def merge_tiles(stats: torch.Tensor, target_logits_T: torch.Tensor,
                inv_temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob, entropy, lse), FP32 [T] each, from states [T, 64, 3] and the targets' unscaled logits [T]."""
    T = stats.shape[0]
    stats = stats.contiguous()
    check_tensor("merge_tiles", "stats", stats, torch.float32, (T, VOCAB_TILES, 3))
    target_logits_T = target_logits_T.contiguous()
    check_tensor("merge_tiles", "target logits", target_logits_T, torch.float32, (T,), aligned=False)
    scores = stats.new_empty((3, T))
    constants, options = _split(CONFIGS[architecture()]["merge"])
    if T:
        merge_tiles_rows[math.ceil(T / constants["ROWS"]),](stats, target_logits_T, scores, T, inv_temperature,
                                                            TILES=VOCAB_TILES, **constants, **options)
    return scores.unbind()


def tile_stats_backward(logits_TV: torch.Tensor, targets_T: torch.Tensor, lse_T: torch.Tensor, grad_T: torch.Tensor,
                        first_id: int, valid_vocab: int, inv_temperature: float, dlogits_TV: torch.Tensor) -> None:
    """dlogits [T, V], BF16 or FP32: grad / temperature * (1[id = target] - exp(x - lse)); 0 for ids >= valid_vocab."""
    op, (T, V) = "tile_stats_backward", logits_TV.shape
    _check_logits(op, logits_TV)
    if dlogits_TV.dtype not in (torch.bfloat16, torch.float32) or not dlogits_TV.is_contiguous():
        raise ValueError(f"{op} got dlogits {dlogits_TV.dtype} with strides {dlogits_TV.stride()}, expected contiguous "
                         "torch.bfloat16 or torch.float32")
    check_tensor(op, "dlogits", dlogits_TV, dlogits_TV.dtype, (T, V))
    targets_T, lse_T, grad_T = targets_T.contiguous(), lse_T.contiguous(), grad_T.contiguous()
    for name, tensor, dtype in (("targets", targets_T, torch.int64), ("lse", lse_T, torch.float32),
                                ("grad", grad_T, torch.float32)):
        check_tensor(op, name, tensor, dtype, (T,), aligned=False)
    constants, options = _split(CONFIGS[architecture()]["backward"])
    unit, valid = choose(V), min(max(valid_vocab - first_id, 0), V)
    if T:
        tile_stats_backward_rows[math.ceil(V / constants["BLOCK"]), T](
            logits_TV, targets_T, lse_T, grad_T, dlogits_TV, V // unit, first_id, valid, inv_temperature, UNIT=unit,
            **constants, **options)


def _check_logits(op: str, logits_TV: torch.Tensor) -> None:
    check_tensor(op, "logits", logits_TV, torch.float32)
    if not logits_TV.is_contiguous():
        raise ValueError(f"{op} got logits with strides {logits_TV.stride()}, expected them contiguous")


def variants(arch: str) -> list[Variant]:
    """Every kernel that the launchers above can launch on `arch`."""
    config = {name: _split(entry) for name, entry in CONFIGS[arch].items()}
    found = [Variant(kernel="tile_stats", name=f"unit{unit}", function=tile_stats_rows,
                     signature={"logits": "*fp32", "stats": "*fp32", "units": "i32", "tiles": "i32", "valid": "i32",
                                "inv_t": "fp32"},
                     constants={"UNIT": unit, **config["stats"][0]}, options=config["stats"][1],
                     divisible=("logits", "stats"), small=("logits", "stats")) for unit in UNITS]
    found.append(Variant(kernel="merge_tiles", name="tiles64", function=merge_tiles_rows,
                         signature={"stats": "*fp32", "target_logits": "*fp32", "scores": "*fp32", "T": "i32",
                                    "inv_t": "fp32"},
                         constants={"TILES": VOCAB_TILES, **config["merge"][0]}, options=config["merge"][1],
                         divisible=("stats", "scores"), small=("stats", "target_logits", "scores")))
    pointers = {"logits": "*fp32", "targets": "*i64", "lse": "*fp32", "grad": "*fp32"}
    for unit in UNITS:
        for out in ("bf16", "fp32"):
            signature = {**pointers, "dlogits": f"*{out}", "units": "i32", "first_id": "i32", "valid": "i32",
                         "inv_t": "fp32"}
            found.append(Variant(kernel="tile_stats_backward", name=f"unit{unit}_{out}",
                                 function=tile_stats_backward_rows, signature=signature,
                                 constants={"UNIT": unit, **config["backward"][0]}, options=config["backward"][1],
                                 divisible=("logits", "dlogits"), small=(*pointers, "dlogits")))
    return found
