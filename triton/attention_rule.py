"""The attention rule in Triton: what the prefill, split and merge kernels of attention.py share, and the order of
every sum of theirs and of attention_hopper.py.

DATA LAYOUT. The query heads of one kv head are the rows of one tile: tile row = query row * group + head within the
group. A tile's keys are read in blocks of BLOCK_N at absolute positions, from rows or from pages.

REDUCTION ORDER, for one tile row at absolute position p:
  logit  t_j = (q . k_j) * scale, the product by the matrix unit, E ascending; scale = log2(e) / sqrt(E) in FP32
  block  keys j <= p of BLOCK_N positions:  m' = max(m, max_j (q . k_j) * scale);  p_j = exp2(fma(q . k_j, scale, -m'))
         rounded to BF16;  (o, d) = (o, d) * exp2(m - m') + P (V, 1), by the matrix unit, j ascending
  chunk  the blocks of CHUNK positions, ascending, from the empty state
  join   chunk states ascending into a total that starts empty:  m' = max(m, m_c);
         o = fma(o_c, exp2(m_c - m'), o * exp2(m - m')), d likewise
  result o / d, rounded once
The row sum d is P times a column of ones: tl.sum would add in an order that depends on how warps share the keys. The
rows of a tile lie within one block (attention_plan.py), so no row meets a block of which it sees nothing: every row
goes through the same operations in every tile. A key that a row does not see has weight +0 and can only change the
sign of a sum that is zero; the result makes that +0.
Every sum runs inside one matrix instruction or one accumulator, so tile height, warps and stages cannot change a bit.
"""

import triton
import triton.language as tl

SUM_COLUMNS = tl.constexpr(16)  # the narrowest that tl.dot takes: every column of P x ones is the row sum


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, E: tl.constexpr):
    """(m, d, acc) before the first key; d holds the row sum in each of its columns."""
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return m, tl.zeros((BLOCK_M, SUM_COLUMNS), tl.float32), tl.zeros((BLOCK_M, E), tl.float32)


@triton.jit
def join(total, chunk):
    """The state `total` after the state `chunk`, of later keys, joined it."""
    m, d, acc = total
    m_chunk, d_chunk, acc_chunk = chunk
    m_new = tl.maximum(m, m_chunk)
    old = tl.exp2(m - m_new)[:, None]
    new = tl.exp2(m_chunk - m_new)[:, None]
    d = tl.fma(d_chunk, new.broadcast_to(d.shape), d * old)
    return m_new, d, tl.fma(acc_chunk, new.broadcast_to(acc.shape), acc * old)


@triton.jit
def finish(total):
    """(output in FP32 before its rounding, base-2 log-sum-exp) of a state."""
    m, d, acc = total
    row_sum = tl.max(d, 1)  # the columns are equal
    # -0 + 0.0 is +0.
    return tl.div_rn(acc + 0.0, row_sum[:, None].broadcast_to(acc.shape)), m + tl.log2(row_sum)


@triton.jit
def attend_block(state, q, k, v, scale, visible, MASKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The state after one block of keys: q [BLOCK_M, E], k [E, BLOCK_N], v [BLOCK_N, E], visible [BLOCK_M, BLOCK_N]."""
    m, d, acc = state
    products = tl.dot(q, k)
    if MASKED:
        products = tl.where(visible, products, float("-inf"))
    m_new = tl.maximum(m, tl.max(products, 1) * scale)
    p = tl.exp2(tl.fma(products, scale + tl.zeros_like(products), (-m_new)[:, None].broadcast_to(products.shape)))
    p = p.to(q.dtype)
    decay = tl.exp2(m - m_new)[:, None]
    d = tl.dot(p, tl.full((BLOCK_N, SUM_COLUMNS), 1.0, q.dtype), d * decay)
    return m_new, d, tl.dot(p, v, acc * decay)


@triton.jit
def place_of(source, table, PAGED: tl.constexpr):
    """What `keys` holds for a source: its row of the block table, or the first of its key rows.

    That row is read here, and not before each block: a load that waits for another cannot be asked for early.
    """
    if PAGED:
        return source
    return tl.load(table + source)


@triton.jit
def page_offsets(position, keys):
    """Where the keys at `position` lie in the pages of k and of v, in elements."""
    _, _, table, place, key_stride, table_stride, page_stride, page_size, magic = keys
    # position // page_size by one multiplication: (2 p + 1) ceil(2^31 / S) / 2^32, exact while p S < 2^30.
    page_index = tl.umulhi((2 * position + 1).to(tl.uint32), magic.to(tl.uint32)).to(tl.int32)
    slot = position - page_index * page_size
    page = tl.load(table + place.to(tl.int64) * table_stride + page_index)
    return page.to(tl.int64) * page_stride + slot.to(tl.int64) * key_stride


@triton.jit
def attend_keys(total, chunk, q, keys, scale, position_m, begin, stop, end, kv_head, MASKED: tl.constexpr,
                JOIN: tl.constexpr, PAGED: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """(total, chunk) after the blocks from `begin` up to `stop`. Only keys before `end` are read.

    With JOIN a block that begins a chunk first joins the chunk before it into the total. Without MASKED every row
    must see each of these blocks to its last key.
    """
    e = tl.arange(0, E)
    n = tl.arange(0, BLOCK_N)
    k, v, place, key_stride = keys[0], keys[1], keys[3], keys[4]
    for start in range(begin, stop, BLOCK_N):
        if JOIN:
            if (start % CHUNK == 0) & (start > 0):
                total = join(total, chunk)
                chunk = empty_state(BLOCK_M, E)
        position = start + n
        visible = position[None, :] <= position_m[:, None]
        if MASKED:  # what no row sees is never read: the last key stands in for it, and meets a weight of zero
            position = tl.minimum(position, end - 1)
        if PAGED:
            offset = page_offsets(position, keys) + kv_head * E
        else:
            offset = (place + position).to(tl.int64) * key_stride + kv_head * E
        k_block = tl.load(k + offset[None, :] + e[:, None])
        v_block = tl.load(v + offset[:, None] + e[None, :])
        chunk = attend_block(chunk, q, k_block, v_block, scale, visible, MASKED, BLOCK_N)
    return total, chunk


@triton.jit
def attend_chunks(total, q, keys, scale, position_m, count, kv_head, PAGED: tl.constexpr, E: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """`total` after the first `count` chunks, of which every row must see every key.

    A loop over chunks around one over blocks, where attend_keys has a branch: the branch would end the overlap of one
    block's products with the next block's at every block, the loops only at every chunk.
    """
    for number in range(count):
        begin = number * CHUNK
        _, chunk = attend_keys(total, empty_state(BLOCK_M, E), q, keys, scale, position_m, begin, begin + CHUNK,
                               begin + CHUNK, kv_head, False, False, PAGED, E, BLOCK_M, BLOCK_N, CHUNK)
        total = join(total, chunk)
    return total
