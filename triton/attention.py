"""Causal attention over rows or pages of keys: prefill, and decode split over chunks of keys. BF16, forward only.

Shape legend: T query rows (packed), U key rows (packed), H query heads, G kv heads, E head dim, P pages, S slots of a
page. The rule, layout and order of every sum: attention_rule.py; segments and block tables: rlk/ops/attention.py; how
queries become tiles: attention_plan.py. Schedules with equal bits:
  attention_prefill  one program per (tile, kv head) goes through all chunks
  attention_hopper   the same for rows of keys on sm_90: attention_hopper.py
  attention_split    one program per (tile, kv head, chunk) writes the chunk's FP32 state to a workspace
  attention_merge    one program per (query row, head) joins the states
Keys that no row of a tile sees reach no result. A key that is seen must be finite: a later row's NaN in the same tile
would reach the rows before it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rlk.contract import ATTENTION_BLOCK, ATTENTION_CHUNK
from rlk.kernels.attention_hopper import attention_hopper, rows_of, rows_type
from rlk.kernels.attention_plan import Plan, Tiles, decode_keys, decode_plan, plan
from rlk.kernels.attention_rule import attend_chunks, attend_keys, empty_state, finish, join, place_of
from rlk.kernels.operands import check_multiple, check_tensor, state_range
from rlk.kernels.variants import Variant, architecture

HEAD_DIMS = (64, 128)
UNBOUNDED = 1 << 31
MOST_PAGED = 1 << 30  # positions x page size, for the kernel's division by the page size


@triton.jit
def load_tile(tiles):
    """(row_start, row_count, position_start, source) of this program's tile."""
    tile = tiles + 4 * tl.program_id(0)
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit
def tile_rows(row_count, group, BLOCK_M: tl.constexpr, IDENTITY: tl.constexpr):
    """(query row, head of the group, whether it is there) of each tile row; those that are not repeat one that is."""
    m = tl.arange(0, BLOCK_M)
    if IDENTITY:
        return m * 0, tl.minimum(m, group - 1), m < group
    row = m // group
    return tl.minimum(row, row_count - 1), m - row * group, row < row_count


@triton.jit
def load_queries(q, row, head, q_stride, E: tl.constexpr):
    e = tl.arange(0, E)
    return tl.load(q + row.to(tl.int64)[:, None] * q_stride + head[:, None] * E + e[None, :])


@triton.jit(do_not_specialize=("group", "table_stride", "page_size", "page_magic"))
def attention_prefill(q, k, v, o, lse, tiles, table, scale, group, q_stride, key_stride, table_stride, page_stride,
                      page_size, page_magic, PAGED: tl.constexpr, LSE: tl.constexpr, WHOLE: tl.constexpr,
                      E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """Grid (tiles, G). o [T, H, E] in its dtype; with LSE also lse [T, H].

    WHOLE: whole chunks and whole blocks get loops of their own.
    """
    row_start, row_count, position_start, source = load_tile(tiles)
    kv_head = tl.program_id(1)
    row, head, live = tile_rows(row_count, group, BLOCK_M, False)
    position_m = position_start + row
    row = row_start + row
    head = kv_head * group + head
    q_tile = load_queries(q, row, head, q_stride, E)
    keys = (k, v, table, place_of(source, table, PAGED), key_stride, table_stride, page_stride, page_size, page_magic)
    end = position_start + row_count
    total = empty_state(BLOCK_M, E)
    chunk = empty_state(BLOCK_M, E)
    masked_from = 0
    if WHOLE:
        masked_from = (position_start + 1) // BLOCK_N * BLOCK_N
        chunks = masked_from // CHUNK
        total = attend_chunks(total, q_tile, keys, scale, position_m, chunks, kv_head, PAGED, E, BLOCK_M, BLOCK_N,
                              CHUNK)
        _, chunk = attend_keys(total, chunk, q_tile, keys, scale, position_m, chunks * CHUNK, masked_from, end, kv_head,
                               False, False, PAGED, E, BLOCK_M, BLOCK_N, CHUNK)
    total, chunk = attend_keys(total, chunk, q_tile, keys, scale, position_m, masked_from, end, end, kv_head, True,
                               not WHOLE, PAGED, E, BLOCK_M, BLOCK_N, CHUNK)
    output, log_sum = finish(join(total, chunk))
    at = row.to(tl.int64) * (group * tl.num_programs(1)) + head
    e = tl.arange(0, E)
    tl.store(o + at[:, None] * E + e[None, :], output.to(o.dtype.element_ty), mask=live[:, None])
    if LSE:
        tl.store(lse + at, log_sum, mask=live)


@triton.jit(do_not_specialize=("group", "table_stride", "page_size", "page_magic"))
def attention_split(q, k, v, states_m, states_d, states_acc, tiles, table, scale, group, q_stride, key_stride,
                    table_stride, page_stride, page_size, page_magic, PAGED: tl.constexpr, IDENTITY: tl.constexpr,
                    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """Grid (tiles, G, chunks). The chunk's state, to states_* [tiles x rows of a tile, H, chunks(, E)]."""
    row_start, row_count, position_start, source = load_tile(tiles)
    tile = tl.program_id(0)
    begin = tl.program_id(2) * CHUNK
    end = position_start + row_count
    if (row_count == 0) | (begin >= end):
        return
    kv_head = tl.program_id(1)
    row, head, live = tile_rows(row_count, group, BLOCK_M, IDENTITY)
    head = kv_head * group + head
    if IDENTITY:
        row_start = tile
        place = tile + row
    else:
        place = tile * (BLOCK_M // group) + row
    q_tile = load_queries(q, row_start + row, head, q_stride, E)
    keys = (k, v, table, place_of(source, table, PAGED), key_stride, table_stride, page_stride, page_size, page_magic)
    chunk = empty_state(BLOCK_M, E)
    _, chunk = attend_keys(chunk, chunk, q_tile, keys, scale, position_start + row, begin,
                           tl.minimum(end, begin + CHUNK), end, kv_head, True, False, PAGED, E, BLOCK_M, BLOCK_N,
                           CHUNK)
    m, d, acc = chunk
    at = (place.to(tl.int64) * (group * tl.num_programs(1)) + head) * tl.num_programs(2) + tl.program_id(2)
    e = tl.arange(0, E)
    tl.store(states_m + at, m, mask=live)
    tl.store(states_d + at, tl.max(d, 1), mask=live)  # its columns are equal
    tl.store(states_acc + at[:, None] * E + e[None, :], acc, mask=live[:, None])


@triton.jit(do_not_specialize=("rows", "chunks"))
def attention_merge(states_m, states_d, states_acc, o, lse, tiles, rows, chunks, IDENTITY: tl.constexpr,
                    LSE: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr):
    """Grid (tiles x rows of a tile, H). Joins the states; UNROLL chunks are read at once."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    tile = place if IDENTITY else place // rows
    row = place - tile * rows
    row_count = tl.load(tiles + 4 * tile + 1)
    count = (tl.load(tiles + 4 * tile + 2) + row) // CHUNK + 1
    e = tl.arange(0, E)[None, :]
    if IDENTITY:
        row = place
        if row_count == 0:
            tl.store(o + (row.to(tl.int64) * heads + head) * E + e, tl.zeros((1, E), o.dtype.element_ty))
            return
    else:
        if row >= row_count:
            return
        row += tl.load(tiles + 4 * tile)
    states = (place.to(tl.int64) * heads + head) * chunks + tl.zeros((1,), tl.int32)
    total = (tl.full((1,), float("-inf"), tl.float32), tl.zeros((1, 1), tl.float32), tl.zeros((1, E), tl.float32))
    for first in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            # A chunk beyond the last is the last with weight zero: a load under a mask would wait for its own.
            at = states + tl.minimum(first + i, count - 1)
            m = tl.where(first + i < count, tl.load(states_m + at), float("-inf"))
            total = join(total, (m, tl.load(states_d + at)[:, None], tl.load(states_acc + at[:, None] * E + e)))
    output, log_sum = finish(total)
    at = row.to(tl.int64) * heads + head + tl.zeros((1,), tl.int32)
    tl.store(o + at[:, None] * E + e, output.to(o.dtype.element_ty))
    if LSE:
        tl.store(lse + at, log_sum)


@dataclass(frozen=True)
class Config:
    """One configuration: the constants of the kernel that are its own, and compiler options."""

    kernel: str
    constants: dict[str, Any]
    options: dict[str, Any]
    most_programs: int = UNBOUNDED  # of a launch; the first entry that serves as many is taken


CONFIGS: dict[str, dict[str, Config]] = {
    "gfx942": {
        # Two waves per SIMD hide each other's loads; software pipelining would take the registers of the second.
        "prefill_64_w4": Config("attention_prefill", {"BLOCK_M": 64, "WHOLE": False},
                                {"num_warps": 4, "num_stages": 1, "waves_per_eu": 2, "matrix_instr_nonkdim": 16}),
        # A tile of 16 rows leaves the compiler no other matrix instruction.
        "split_16_w2": Config("attention_split", {"BLOCK_M": 16},
                              {"num_warps": 2, "num_stages": 2, "schedule_hint": "memory-bound-attention"}),
        "merge_w1": Config("attention_merge", {"UNROLL": 4}, {"num_warps": 1}),
    },
    "sm_90": {
        "prefill_128_w8": Config("attention_prefill", {"BLOCK_M": 128, "WHOLE": True},
                                 {"num_warps": 8, "num_stages": 3}),
        "hopper_128": Config("attention_hopper", {"BLOCK_M": 128, "STAGES": 2}, {}),
        # A program that has a multiprocessor to itself must keep enough loads under way alone.
        "split_16_w4": Config("attention_split", {"BLOCK_M": 16}, {"num_warps": 4, "num_stages": 5}, most_programs=132),
        "split_16_w2": Config("attention_split", {"BLOCK_M": 16}, {"num_warps": 2, "num_stages": 3}),
        "merge_w1": Config("attention_merge", {"UNROLL": 4}, {"num_warps": 1}),
    },
}
FUNCTIONS = {"attention_prefill": attention_prefill, "attention_hopper": attention_hopper,
             "attention_split": attention_split, "attention_merge": attention_merge}


def choose(arch: str, kernel: str, programs: int = UNBOUNDED) -> Config:
    """The configuration of one of FUNCTIONS for that many programs.

    All configurations of a kernel have the same BLOCK_M.
    """
    return next(config for config in CONFIGS[arch].values()
                if config.kernel == kernel and programs <= config.most_programs)


def prefill_kernel(arch: str, paged: bool) -> str:
    """Which of FUNCTIONS goes through all chunks of keys that lie in pages, or in rows."""
    hopper = any(config.kernel == "attention_hopper" for config in CONFIGS[arch].values())
    return "attention_hopper" if hopper and not paged else "attention_prefill"


def constants(config: Config, E: int, **own: bool) -> dict[str, Any]:
    """The constexpr arguments; `own`: PAGED, IDENTITY and LSE as far as the kernel has them."""
    blocks = {} if config.kernel == "attention_merge" else {"BLOCK_N": ATTENTION_BLOCK}
    return own | {"E": E, "CHUNK": ATTENTION_CHUNK} | blocks | config.constants


def logit_scale(E: int) -> float:
    return math.log2(math.e) / math.sqrt(E)


def page_magic(page_size: int) -> int:
    """ceil(2^31 / page_size) as a signed 32-bit number."""
    magic = -(-(1 << 31) // page_size)
    return magic - (1 << 32) if magic >= 1 << 31 else magic


def attention_paged(q_THE: torch.Tensor, k_cache_PSGE: torch.Tensor, v_cache_PSGE: torch.Tensor,
                    segments: torch.Tensor | Plan, block_table: torch.Tensor,
                    most_keys: int | None = None) -> torch.Tensor:
    """rlk.ops.attention.attention_paged on the GPU; [T, H, E] BF16.

    segments: on the CPU they are cut in tiles here; on the GPU they are those of decode_plan, nothing is read back and
    the call can be captured in a graph; `most_keys` (default: all that the table holds) bounds their keys. Or a Plan,
    to be made once for all layers. block_table int32 [B, max_pages] on the GPU; its entries are not checked.
    Raises ValueError for shapes, strides and segments that do not fit.
    """
    pages, page_size, G, _ = k_cache_PSGE.shape
    held = block_table.shape[1] * page_size
    if held * page_size > MOST_PAGED:
        raise ValueError(f"attention_paged got a table of {held} positions in pages of {page_size}, expected positions "
                         f"x page size up to {MOST_PAGED}; take smaller pages")
    check_keys("attention_paged", k_cache_PSGE, v_cache_PSGE)
    if v_cache_PSGE.stride() != k_cache_PSGE.stride():
        raise ValueError(f"attention_paged got a v cache with strides {v_cache_PSGE.stride()} beside a k cache with "
                         f"{k_cache_PSGE.stride()}, expected the same; allocate both alike")
    if not isinstance(segments, Plan):
        segments = (decode_plan(segments, min(most_keys or held, held)) if segments.is_cuda else
                    make_plan(segments, q_THE, G, len(block_table), held, paged=True))
    page_stride, key_stride = k_cache_PSGE.stride()[:2]
    return _attend("attention_paged", q_THE, k_cache_PSGE, v_cache_PSGE, segments, block_table,
                   (key_stride, block_table.stride(0), page_stride, page_size, page_magic(page_size)), True)[0]


def longest_decode(segments: torch.Tensor, q_THE: torch.Tensor, k_cache_PSGE: torch.Tensor,
                   block_table: torch.Tensor) -> int:
    """Keys of the longest row if these segments, on the CPU, are a decode step that may pass as it is; else 0.

    Raises ValueError for segments outside of the queries or the table.
    """
    keys = decode_keys(segments, len(q_THE), len(block_table), block_table.shape[1] * k_cache_PSGE.shape[1])
    group = q_THE.shape[1] // k_cache_PSGE.shape[2]
    return keys if group <= choose(architecture(), "attention_split").constants["BLOCK_M"] else 0


def attention_varlen(q_THE: torch.Tensor, k_UGE: torch.Tensor, v_UGE: torch.Tensor, segments: torch.Tensor | Plan,
                     key_starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rlk.ops.attention.attention_varlen on the GPU, forward: (o [T, H, E] BF16, base-2 log-sum-exp [T, H] FP32).

    k and v whose heads do not lie together are copied; so are those of different row strides (a norm's output beside a
    view of the fused qkv) where a kernel knows one stride.
    segments: on the CPU, or a Plan. key_starts int32 [sources] on the GPU; its entries are not checked. Rows outside of
    every segment have o = 0 and lse = 0. Raises ValueError for shapes, strides and segments that do not fit.
    """
    k_UGE, v_UGE = (x if x.stride()[-2:] == (x.shape[-1], 1) else x.contiguous() for x in (k_UGE, v_UGE))
    check_keys("attention_varlen", k_UGE, v_UGE)
    if not isinstance(segments, Plan):
        segments = make_plan(segments, q_THE, k_UGE.shape[1], len(key_starts), len(k_UGE))
    one_stride = segments.split is not None or prefill_kernel(architecture(), False) == "attention_prefill"
    if one_stride and k_UGE.stride() != v_UGE.stride():
        k_UGE, v_UGE = k_UGE.contiguous(), v_UGE.contiguous()
        check_keys("attention_varlen", k_UGE, v_UGE)  # says where the new ones may reach
    return _attend("attention_varlen", q_THE, k_UGE, v_UGE, segments, key_starts, (k_UGE.stride(0), 0, 0, 0, 0), False)


def make_plan(segments: torch.Tensor, q_THE: torch.Tensor, G: int, sources: int, most_keys: int,
              paged: bool = False) -> Plan:
    """attention_plan.plan for these queries in this process's configurations; keys in pages or rows."""
    arch = architecture()
    block_m = [choose(arch, kernel).constants["BLOCK_M"] for kernel in ("attention_split", prefill_kernel(arch, paged))]
    return plan(segments, len(q_THE), q_THE.shape[1] // G, *block_m, sources, most_keys, q_THE.device)


def _attend(op, q_THE, k, v, tiling, table, key_layout, paged):
    q_THE = q_THE if q_THE.stride(2) == 1 and q_THE.stride(1) == q_THE.shape[2] else q_THE.contiguous()
    T, H, E = q_THE.shape
    G = k.shape[-2]
    if E not in HEAD_DIMS or k.shape[-1] != E or H % G or tiling.query_rows != T:
        raise ValueError(f"{op} got q {tuple(q_THE.shape)}, keys {tuple(k.shape)} and a plan of {tiling.query_rows} "
                         f"rows, expected E one of {HEAD_DIMS}, H a multiple of G and a row of the plan for each of q")
    check_tensor(op, "q", q_THE, torch.bfloat16)
    check_tensor(op, "table", table, torch.int32)
    if table.stride(-1) != 1:
        raise ValueError(f"{op} got a table with strides {table.stride()}, expected contiguous rows")
    check_multiple(op, q_row_stride=q_THE.stride(0))
    make = q_THE.new_empty if tiling.covered else q_THE.new_zeros
    o_THE = make((T, H, E))
    lse_TH = make((0, H) if paged else (T, H), dtype=torch.float32)  # of pages the kernels give none
    shared = (table, logit_scale(E), H // G, q_THE.stride(0), *key_layout)
    if tiling.prefill is not None:
        config = choose(architecture(), prefill_kernel(architecture(), paged))
        if tiling.prefill.rows * (H // G) > config.constants["BLOCK_M"]:
            raise ValueError(f"{op} got a plan for tiles of {tiling.prefill.rows} rows x {H // G} heads, expected at "
                             f"most {config.constants['BLOCK_M']}; make the plan for keys in "
                             f"{'pages' if paged else 'rows'}")
        grid, tile_table = (len(tiling.prefill.table), G), tiling.prefill.table
        if config.kernel == "attention_hopper":
            attention_hopper[grid](rows_of(k), rows_of(v), q_THE, v, o_THE, lse_TH, tile_table, table, logit_scale(E),
                                   H // G, q_THE.stride(0), v.stride(0), **constants(config, E), **options(config))
        else:
            attention_prefill[grid](q_THE, k, v, o_THE, lse_TH, tile_table, *shared,
                                    **constants(config, E, PAGED=paged, LSE=not paged), **options(config))
    if tiling.split is not None:
        _attend_split(q_THE, k, v, o_THE, lse_TH, tiling.split, shared, paged)
    return o_THE, lse_TH


def _attend_split(q_THE, k, v, o_THE, lse_TH, tiles: Tiles, shared, paged):
    (_, H, E), G = q_THE.shape, k.shape[-2]
    programs = len(tiles.table) * G * tiles.chunks
    split, merge = choose(architecture(), "attention_split", programs), choose(architecture(), "attention_merge")
    if H // G > split.constants["BLOCK_M"]:
        raise ValueError(f"a decode plan got {H // G} query heads per kv head, expected at most "
                         f"{split.constants['BLOCK_M']}; give the segments on the CPU")
    places = len(tiles.table) * tiles.rows
    states = [q_THE.new_empty((places, H, tiles.chunks) + width, dtype=torch.float32) for width in ((), (), (E,))]
    for state in states:
        check_tensor("attention", "a workspace", state, torch.float32)
    attention_split[len(tiles.table), G, tiles.chunks](
        q_THE, k, v, *states, tiles.table, *shared, **constants(split, E, PAGED=paged, IDENTITY=tiles.identity),
        **options(split))
    attention_merge[places, H](
        *states, o_THE, lse_TH, tiles.table, tiles.rows, tiles.chunks,
        **constants(merge, E, IDENTITY=tiles.identity, LSE=not paged), **options(merge))


def check_keys(op, k, v):
    """Raise ValueError unless k and v, in rows or pages, are of one shape and lie as the kernels read them."""
    for name, x in (("k", k), ("v", v)):
        E = x.shape[-1]
        if x.dtype != torch.bfloat16 or not x.is_cuda or x.data_ptr() % 16:
            raise ValueError(f"{op} got {name} {x.dtype} on {x.device} at {x.data_ptr():#x}, expected bfloat16 on a "
                             "GPU at a multiple of 16 bytes")
        if x.stride()[-2:] != (E, 1) or x.shape != k.shape:
            raise ValueError(f"{op} got {name} {tuple(x.shape)} with strides {x.stride()} beside k {tuple(k.shape)}, "
                             "expected the same shape, and a row's heads contiguous")
        check_multiple(op, **{f"{name}_stride_{i}": stride for i, stride in enumerate(x.stride()[:-2])})
        state_range(x)


def options(config: Config) -> dict[str, Any]:
    """What a launch passes to the compiler: no FMA but those that are written."""
    return {"enable_fp_fusion": False, **config.options}


POINTERS = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "o": "*bf16", "lse": "*fp32", "tiles": "*i32", "table": "*i32",
            "key_starts": "*i32", "states_m": "*fp32", "states_d": "*fp32", "states_acc": "*fp32"}
MULTIPLES = ("q_stride", "key_stride", "v_stride", "page_stride")  # of 16
FORMS = {  # what else a launcher sets: pages or rows; decode or tiles
    "attention_prefill": {"paged": {"PAGED": True, "LSE": False}, "varlen": {"PAGED": False, "LSE": True}},
    "attention_hopper": {"varlen": {}},
    "attention_split": {"decode": {"PAGED": True, "IDENTITY": True}, "paged": {"PAGED": True, "IDENTITY": False},
                        "varlen": {"PAGED": False, "IDENTITY": False}},
    "attention_merge": {"decode": {"IDENTITY": True, "LSE": False}, "paged": {"IDENTITY": False, "LSE": False},
                        "varlen": {"IDENTITY": False, "LSE": True}},
}


def variants(arch: str) -> list[Variant]:
    """Every kernel that the launchers above can launch on `arch`."""
    found = []
    for name, config in CONFIGS[arch].items():
        for E, (form, own) in itertools.product(HEAD_DIMS, FORMS[config.kernel].items()):
            if config.kernel == "attention_prefill" and prefill_kernel(arch, own["PAGED"]) != config.kernel:
                continue
            function, fixed = FUNCTIONS[config.kernel], constants(config, E, **own)
            types = POINTERS | {"scale": "fp32", "k_rows": rows_type(E), "v_rows": rows_type(E)}
            signature = {argument: types.get(argument, "i32")
                         for argument in function.arg_names if argument not in fixed}
            divisible = tuple(x for x in signature if x in (*POINTERS, *MULTIPLES))
            variant = Variant(config.kernel, f"{name}_{form}_e{E}", function, signature, fixed, options(config),
                              divisible, small=tuple(x for x in signature if x in POINTERS))
            found.append(variant)
            if arch == "gfx942" and "k" in signature:  # keys of 2 GiB and more: other loads
                near = tuple(x for x in variant.small if x not in ("k", "v"))
                found.append(dataclasses.replace(variant, name=f"{variant.name}_far", small=near))
    return found
