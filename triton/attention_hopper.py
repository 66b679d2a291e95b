"""Attention over rows of keys for Hopper's asynchronous units: the training forward pass of sm_90. BF16.

Shape legend: T query rows (packed), U key rows (packed), H query heads, G kv heads, E head dim. The rule and the order
of every sum are those of attention_rule.py, written down again in Gluon: here the program, not the compiler, says which
warps wait for what. tests/gpu/test_triton_attention.py holds that both give the same bytes.

DATA LAYOUT. A tile (attention_plan.py) of BLOCK_M = 2 x ROWS rows is one program of twelve warps. Two groups of four
have ROWS rows each; one warp loads the keys for both, and three are idle. In shared memory, 128-byte swizzled:
  queries  [2, ROWS, E]          of each group
  k, v     [STAGES, BLOCK_N, E]  a ring of blocks of keys, filled by the tensor memory accelerator
  last_v   [2, BLOCK_N, E]       v of the tile's last block: rows that no query sees hold a copy of one that is seen
  ones     [SUM_COLUMNS, BLOCK_N]
A stage's k is full when its bytes have arrived and free when both groups have multiplied with it; so is its v. Of the
last block all of k is loaded, whatever lies behind the tile's keys: its products are replaced before they are used.

REDUCTION ORDER. That of attention_rule.py: the products of a block in one accumulator, E ascending; the row sum and
P V in one accumulator each over the blocks of a chunk; chunk states joined ascending. A group makes the weights of a
block while the other group's products have the matrix unit, in turns that nobody enforces: who runs when is no part of
any sum.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlk.contract import ATTENTION_BLOCK

ROWS = gl.constexpr(64)  # of a group of warps: what one matrix instruction takes
SUM_COLUMNS = gl.constexpr(8)  # the narrowest matrix instruction: every column of P x ones is the row sum
# Registers of a thread: what the launch gives, 168 for twelve warps, goes from the loading warps to the others.
COMPUTE_REGISTERS = gl.constexpr(240)
LOAD_REGISTERS = gl.constexpr(24)
# Triton renamed these after 3.6.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of the threads of a group
load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a matrix instruction's results [ROWS, columns] in the registers of four warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def row_wise(E):
    """16 bytes a thread of rows of E elements, for four warps."""
    return gl.BlockedLayout([1, 8], [32 * 8 // E, E // 8], [4, 1], [1, 0])


@gluon.jit
def of_rows(x, columns: gl.constexpr):
    """One number per row, [ROWS, 1], to be broadcast over accumulators of that width."""
    return gl.convert_layout(x, gl.SliceLayout(1, accumulator(columns)))[:, None]


@gluon.jit
def empty_state(BLOCK_N: gl.constexpr, E: gl.constexpr):
    """(m, d, acc) before the first key; d holds the row sum in each of its columns."""
    m = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, accumulator(BLOCK_N)))
    return (m, gl.zeros((ROWS, SUM_COLUMNS), gl.float32, accumulator(SUM_COLUMNS)),
            gl.zeros((ROWS, E), gl.float32, accumulator(E)))


@gluon.jit
def join(total, chunk, E: gl.constexpr):
    """attention_rule.join."""
    m, d, acc = total
    m_chunk, d_chunk, acc_chunk = chunk
    m_new = gl.maximum(m, m_chunk)
    old, new = gl.exp2(m - m_new), gl.exp2(m_chunk - m_new)
    d = gl.fma(d_chunk, of_rows(new, SUM_COLUMNS) + gl.zeros_like(d), d * of_rows(old, SUM_COLUMNS))
    return m_new, d, gl.fma(acc_chunk, of_rows(new, E) + gl.zeros_like(acc), acc * of_rows(old, E))


@gluon.jit
def begin_products(queries, k, BLOCK_N: gl.constexpr):
    """q . k of a block, begun."""
    return warpgroup_mma(queries, k.permute((1, 0)), gl.zeros((ROWS, BLOCK_N), gl.float32, accumulator(BLOCK_N)),
                         use_acc=False, is_async=True)


@gluon.jit
def weigh(state, products, scale, E: gl.constexpr):
    """(m, d and acc decayed, P in BF16): attention_rule.attend_block before its products."""
    m, d, acc = state
    m_new = gl.maximum(m, gl.max(products, 1) * scale)
    p = gl.exp2(gl.fma(products, scale + gl.zeros_like(products), (-m_new)[:, None] + gl.zeros_like(products)))
    decay = gl.exp2(m - m_new)
    return m_new, d * of_rows(decay, SUM_COLUMNS), acc * of_rows(decay, E), p.to(gl.bfloat16)


@gluon.jit
def begin_sums(weighed, ones, v, E: gl.constexpr):
    """(m, d + P x ones, acc + P V), both begun."""
    m, d, acc, p = weighed
    d = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, accumulator(SUM_COLUMNS), 2)), ones, d, is_async=True)
    acc = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, accumulator(E), 2)), v, acc, is_async=True)
    return m, d, acc


@gluon.jit
def tile_rows(which: gl.constexpr, tile, group, LAYOUT: gl.constexpr):
    """(query row, its position, head of the kv head's, whether it is there) of each row of group `which`.

    Rows that are absent repeat the last one.
    """
    row_start, row_count, position_start, _ = tile
    m = which * ROWS + gl.arange(0, ROWS, LAYOUT)
    row = m // group
    near = gl.minimum(row, row_count - 1)
    return row_start + near, position_start + near, m - row * group, row < row_count


@gluon.jit
def attend(which: gl.constexpr, tile, q, v, o, lse, scale, group, kv_head, heads, q_stride, v_stride, buffers, ring,
           E: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr):
    """Group `which` of the tile's rows, from their queries to their results."""
    _, row_count, position_start, first_key = tile
    queries, last_v, ones = buffers
    queries, last_v = queries.index(which), last_v.index(which)
    k_ring, v_ring, k_full, v_full, k_free, v_free = ring
    whole = position_start // BLOCK_N  # blocks of which every row sees every key; one follows

    e = gl.arange(0, E, gl.SliceLayout(0, row_wise(E)))[None, :]
    row, _, head, _ = tile_rows(which, tile, group, gl.SliceLayout(1, row_wise(E)))
    q_rows = gl.load(q + row.to(gl.int64)[:, None] * q_stride + (kv_head * group + head)[:, None] * E + e)
    last_position = gl.minimum(whole * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, row_wise(E))),
                               position_start + row_count - 1)
    v_rows = gl.load(v + (first_key + last_position).to(gl.int64)[:, None] * v_stride + kv_head * E + e)
    queries.store(q_rows)
    last_v.store(v_rows)
    fence_async_shared()
    barrier()  # all threads' stores, before anyone multiplies with them

    total = empty_state(BLOCK_N, E)
    chunk = empty_state(BLOCK_N, E)
    mbarrier.wait(k_full.index(0), 0)
    products = warpgroup_mma_wait(0, deps=(begin_products(queries, k_ring.index(0), BLOCK_N),))
    mbarrier.arrive(k_free.index(0))
    stage, phase = 0, 0
    for block in range(whole):
        if (block % (CHUNK // BLOCK_N) == 0) & (block > 0):
            total = join(total, chunk, E)
            chunk = empty_state(BLOCK_N, E)
        next_stage, next_phase = stage + 1, phase
        if next_stage == STAGES:
            next_stage, next_phase = 0, phase ^ 1
        # This block's sums and the next one's products begin together, and not before: while this group weighs, the
        # other one has the matrix unit.
        weighed = weigh(chunk, products, scale, E)
        mbarrier.wait(k_full.index(next_stage), next_phase)
        following = begin_products(queries, k_ring.index(next_stage), BLOCK_N)
        mbarrier.wait(v_full.index(stage), phase)
        m, d, acc = begin_sums(weighed, ones, v_ring.index(stage), E)
        products = warpgroup_mma_wait(2, deps=(following,))
        mbarrier.arrive(k_free.index(next_stage))
        d, acc = warpgroup_mma_wait(0, deps=(d, acc))
        mbarrier.arrive(v_free.index(stage))
        chunk = (m, d, acc)
        stage, phase = next_stage, next_phase

    if (whole % (CHUNK // BLOCK_N) == 0) & (whole > 0):
        total = join(total, chunk, E)
        chunk = empty_state(BLOCK_N, E)
    row, position, head, live = tile_rows(which, tile, group, gl.SliceLayout(1, accumulator(BLOCK_N)))
    key = whole * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, accumulator(BLOCK_N)))
    products = gl.where(key[None, :] <= position[:, None], products, float("-inf"))
    m, d, acc = begin_sums(weigh(chunk, products, scale, E), ones, last_v, E)
    d, acc = warpgroup_mma_wait(0, deps=(d, acc))

    m, d, acc = join(total, (m, d, acc), E)
    row_sum = gl.max(d, 1)  # the columns are equal
    # attention_rule.finish: -0 + 0.0 is +0.
    output = gl.div_rn(acc + 0.0, of_rows(row_sum, E) + gl.zeros_like(acc)).to(o.dtype.element_ty)
    log_sum = m + gl.log2(gl.convert_layout(row_sum, m.type.layout))
    gl.store(lse + row.to(gl.int64) * heads + kv_head * group + head, log_sum, mask=live)
    row, _, head, live = tile_rows(which, tile, group, gl.SliceLayout(1, row_wise(E)))
    at = row.to(gl.int64) * heads + kv_head * group + head
    gl.store(o + at[:, None] * E + e, gl.convert_layout(output, row_wise(E)), mask=live[:, None])


@gluon.jit
def load_keys(tile, kv_head, k_rows, v_rows, ring, E: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """The tile's blocks into the ring: k of all of them, v of all but the last."""
    _, _, position_start, first_key = tile
    k_ring, v_ring, k_full, v_full, k_free, v_free = ring
    whole = position_start // BLOCK_N
    stage, phase = 0, 1  # a barrier that nobody has used yet counts as past its phase 1
    for block in range(whole + 1):
        at = [first_key + block * BLOCK_N, kv_head * E]
        mbarrier.wait(k_free.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k_rows.block_type.nbytes)
        load_block(k_rows, at, k_full.index(stage), k_ring.index(stage))
        if block < whole:
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_rows.block_type.nbytes)
            load_block(v_rows, at, v_full.index(stage), v_ring.index(stage))
        stage += 1
        if stage == STAGES:
            stage, phase = 0, phase ^ 1


@gluon.jit(do_not_specialize=("group",))
def attention_hopper(k_rows, v_rows, q, v, o, lse, tiles, key_starts, scale, group, q_stride, v_stride,
                     E: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                     CHUNK: gl.constexpr):
    """Grid (tiles, G). o [T, H, E] in its dtype, lse [T, H]; k_rows and v_rows: `rows_of` the keys and values."""
    gl.static_assert(BLOCK_M == 2 * ROWS)
    tile = tiles + 4 * gl.program_id(0)
    first_key = gl.load(key_starts + gl.load(tile + 3))
    tile = (gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), first_key)
    kv_head = gl.program_id(1)
    heads = group * gl.num_programs(1)

    queries = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, E], SWIZZLED)
    last_v = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, E], SWIZZLED)
    ones = gl.allocate_shared_memory(gl.bfloat16, [SUM_COLUMNS, BLOCK_N], SWIZZLED)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, E], SWIZZLED)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, E], SWIZZLED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    ones.store(gl.full((SUM_COLUMNS, BLOCK_N), 1.0, gl.bfloat16, row_wise(BLOCK_N)))
    fence_async_shared()

    buffers = (queries, last_v, ones.permute((1, 0)))
    ring = (k_ring, v_ring, k_full, v_full, k_free, v_free)
    gl.warp_specialize(
        [(attend, (0, tile, q, v, o, lse, scale, group, kv_head, heads, q_stride, v_stride, buffers, ring, E, BLOCK_N,
                   STAGES, CHUNK)),
         (attend, (1, tile, q, v, o, lse, scale, group, kv_head, heads, q_stride, v_stride, buffers, ring, E, BLOCK_N,
                   STAGES, CHUNK)),
         (load_keys, (tile, kv_head, k_rows, v_rows, ring, E, BLOCK_N, STAGES))],
        [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS])


def rows_of(x_UGE: torch.Tensor) -> TensorDescriptor:
    """Keys or values as the kernel's loads know them: blocks of rows of one head."""
    U, G, E = x_UGE.shape
    return TensorDescriptor(x_UGE, [U, G * E], [x_UGE.stride(0), 1], [ATTENTION_BLOCK, E], SWIZZLED.value)


def rows_type(E: int) -> str:
    """The compiler's name for what `rows_of` gives."""
    return f"tensordesc<bf16[{ATTENTION_BLOCK}, {E}],{SWIZZLED.value!r}>"
