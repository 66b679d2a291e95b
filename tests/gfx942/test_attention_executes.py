"""The Triton attention's gfx942 code objects, executed: the rule's bits in every schedule and layout of keys."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk.kernels import attention
from rlk.kernels.attention_plan import Tiles, chunks_of, cut, plan, tiles
from tests.gfx942.attention_cases import draw, f32, rows_of, rule
from tests.gfx942.emulator import Device
from tests.gfx942.numerics import BF16_EPSILON, from_bf16, same_bytes, to_bf16
from tests.gfx942.triton_runs import run_variant

ARCH = "gfx942"
VARIANTS = {(variant.kernel.removeprefix("attention_"), form, variant.constants["E"], "_far" in variant.name): variant
            for variant in attention.variants(ARCH) for form in ("decode", "paged", "varlen")
            if f"_{form}_" in variant.name}
NAN = 0x7FC0


def pages(batch, page_size, seed=0):
    """(k cache, v cache, block table): pages shuffled, NaN in every slot that holds no key, table entries -1 beyond."""
    counts = [-(-n // page_size) for n in batch.lengths]
    order = list(np.random.default_rng(seed).permutation(sum(counts) + 2))
    caches = np.full((2, len(order), page_size, *batch.k.shape[1:]), NAN, np.uint16)
    table = np.full((len(counts), max(counts) + 1), -1, np.int32)
    for source, (start, n) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        for page in range(counts[source]):
            table[source, page] = order.pop()
            slots = np.arange(page * page_size, min((page + 1) * page_size, n))
            for cache, x in zip(caches, (batch.k, batch.v), strict=True):
                cache[table[source, page], : len(slots)] = x[start + slots]
    return (*caches, table)


def launch(variant, grid, values, order):
    return run_variant(Device(order), variant, grid, {name: values[name] for name in variant.signature})


def attend(batch, schedule, form, page_size=16, order="forward", far=False, **changed):
    """(o, lse or None) as the launchers run it; `changed` replaces constants and options of prefill or split.

    far: the code for keys of 2 GiB and more.
    """
    (T, H, E), G = batch.q.shape, batch.k.shape[1]

    def variant(kernel):
        found = VARIANTS[kernel, form, E, far and kernel == schedule]
        own = changed if kernel == schedule else {}
        constants = {name: own.get(name, value) for name, value in found.constants.items()}
        options = found.options | {name: value for name, value in own.items() if name not in constants}
        return dataclasses.replace(found, name=found.name + "".join(f".{value}" for value in own.values()),
                                   constants=constants, options=options)

    kernel = variant(schedule)
    if form == "varlen":
        k, v, table = batch.k, batch.v, batch.starts
        layout = dict(key_stride=G * E, table_stride=0, page_stride=0, page_size=0, page_magic=0)
    else:
        k, v, table = pages(batch, page_size)
        layout = dict(key_stride=G * E, table_stride=table.shape[1], page_stride=page_size * G * E,
                      page_size=page_size, page_magic=attention.page_magic(page_size))
    if form == "decode":
        made = Tiles(torch.from_numpy(batch.segments), chunks_of(max(batch.lengths)) + 1, 1, identity=True)
    else:
        made = tiles(batch.segments, kernel.constants["BLOCK_M"] // batch.group, torch.device("cpu"))
    places = len(made.table) * made.rows
    values = dict(q=batch.q, k=k, v=v, o=np.full((T, H, E), NAN, np.uint16), lse=np.full((T, H), np.nan, f32),
                  tiles=made.table.numpy(), table=table, scale=attention.logit_scale(E), group=batch.group,
                  q_stride=H * E, rows=made.rows, chunks=made.chunks, **layout)
    if schedule == "prefill":
        out = launch(kernel, (len(made.table), G), values, order)
    else:
        for name, width in (("states_m", ()), ("states_d", ()), ("states_acc", (E,))):
            values[name] = np.full((places, H, made.chunks, *width), np.nan, f32)
        values |= launch(kernel, (len(made.table), G, made.chunks), values, order)
        out = launch(variant("merge"), (places, H), values, order)
    return out["o"], out["lse"] if form == "varlen" else None


def float64(batch):
    """Output, and the sum of weights times |v|: what one rounding of the weights is relative to."""
    exact, magnitude = np.zeros((2, *batch.q.shape))
    for row, kv_head, head, keys in rows_of(batch):
        logits = from_bf16(batch.k[keys, kv_head]).astype(float) @ from_bf16(batch.q[row, head])
        weights = np.exp((logits - logits.max()) / math.sqrt(batch.q.shape[2]))
        v = from_bf16(batch.v[keys, kv_head]).astype(float)
        exact[row, head], magnitude[row, head] = (weights / weights.sum() @ x for x in (v, np.abs(v)))
    return exact, magnitude


RAGGED = dict(segments=[(0, 1, 0, 0), (1, 0, 0, 1), (1, 37, 0, 2), (38, 9, 60, 3)], lengths=[1, 3, 37, 69])
TWO_CHUNKS = dict(segments=[(0, 7, 509, 0)], lengths=[516])
SHORT = dict(segments=[(0, 5, 0, 0), (5, 0, 3, 0), (5, 1, 63, 1), (6, 3, 63, 2)], lengths=[5, 64, 66])
DECODE = dict(segments=[(0, 1, 514, 0), (1, 1, 0, 1), (2, 1, 70, 2)], lengths=[515, 1, 71])
PATHS = [("prefill", "paged"), ("prefill", "varlen"), ("split", "paged"), ("split", "varlen"), ("split", "decode")]


def cases():
    for E in attention.HEAD_DIMS:
        for schedule, form in PATHS:
            if form == "decode":
                yield pytest.param(E, schedule, form, DECODE, {64: 4, 128: 5}[E], 2, id=f"{schedule}-{form}-e{E}")
                continue
            for seed, shape in enumerate([RAGGED if schedule == "prefill" else SHORT, TWO_CHUNKS]):
                group, G = [(4, 1), (2, 2), (1, 1)][(seed + E // 64) % 3]
                yield pytest.param(E, schedule, form, shape, group, G, id=f"{schedule}-{form}-e{E}-{seed}")


@pytest.mark.parametrize(("E", "schedule", "form", "shape", "group", "G"), cases())
def test_every_configuration_gives_the_bits_of_the_rule_and_agrees_with_float64(E, schedule, form, shape, group, G):
    batch = draw(1, **shape, group=group, G=G, E=E)
    o, lse = attend(batch, schedule, form)
    expected, expected_lse = rule(batch)
    exact, magnitude = float64(batch)
    assert np.all(np.abs(from_bf16(o) - exact) <= BF16_EPSILON * (np.abs(exact) + magnitude))
    assert same_bytes(o, expected)
    assert same_bytes(attend(batch, schedule, form, far=True)[0], expected)
    if form == "varlen":
        assert np.allclose(lse, expected_lse, rtol=0, atol=1e-5)


def test_the_cases_execute_every_variant():
    executed = {kernel for E, schedule, form, *_ in (case.values for case in cases())
                for kernel in ((schedule, form, E, False), (schedule, form, E, True), ("merge", form, E, False))}
    assert set(VARIANTS) <= executed
    assert len(VARIANTS) == len(attention.variants(ARCH))


@pytest.fixture(scope="module")
def long_batch():
    return draw(2, **TWO_CHUNKS, group=2, G=1, E=64)


@pytest.fixture(scope="module")
def long_bits(long_batch):
    return attend(long_batch, "prefill", "varlen")


@pytest.mark.parametrize("changed", [
    dict(BLOCK_M=16, num_warps=2), dict(BLOCK_M=32, num_warps=1), dict(BLOCK_M=32, num_warps=8),
    dict(BLOCK_M=128, num_warps=8), dict(WHOLE=True), dict(num_stages=2), dict(order="reverse"),
], ids=str)
def test_tile_height_warps_stages_and_loops_do_not_change_a_bit(changed, long_batch, long_bits):
    o, lse = attend(long_batch, "prefill", "varlen", **changed)
    assert same_bytes(o, long_bits[0])
    assert same_bytes(lse, long_bits[1])


@pytest.mark.parametrize("changed", [dict(num_warps=1), dict(num_warps=4), dict(BLOCK_M=32), dict(order="reverse")],
                         ids=str)
def test_the_split_schedule_gives_the_bits_of_the_monolithic_one(changed, long_batch, long_bits):
    o, lse = attend(long_batch, "split", "varlen", **changed)
    assert same_bytes(o, long_bits[0])
    assert same_bytes(lse, long_bits[1])


@pytest.mark.parametrize("page_size", [1, 7, 48, 64, 600])
@pytest.mark.parametrize("schedule", ["prefill", "split"])
def test_the_page_size_does_not_change_a_bit(schedule, page_size, long_batch, long_bits):
    assert same_bytes(attend(long_batch, schedule, "paged", page_size)[0], long_bits[0])


def test_a_row_has_the_same_bits_alone_in_parts_and_in_decode(long_batch, long_bits):
    parts = [(0, 2, 509, 0), (2, 1, 511, 0), (3, 4, 512, 0)]
    alone = [(row, 1, 509 + row, 0) for row in range(7)]
    for schedule, form in PATHS:
        segments = np.array(alone if form == "decode" else parts, np.int32)
        batch = dataclasses.replace(long_batch, segments=segments)
        assert same_bytes(attend(batch, schedule, form)[0], long_bits[0])


def test_a_decode_row_without_a_sequence_gives_zeros(long_batch, long_bits):
    batch = dataclasses.replace(long_batch, q=long_batch.q[:3],
                                segments=np.array([(0, 0, 0, 0), (1, 1, 510, 0), (0, 0, 9, 7)], np.int32))
    o, _ = attend(batch, "split", "decode")
    assert same_bytes(o[1], long_bits[0][1])
    assert not o[[0, 2]].any()


def test_the_sign_of_a_sum_of_zero_does_not_depend_on_keys_that_the_row_does_not_see():
    batch = draw(3, [(0, 3, 576, 0)], [579], group=2, G=1, E=64)
    batch.q[...], batch.k[...], batch.v[...] = to_bf16(f32(4)), to_bf16(f32(-4)), to_bf16(f32(1))
    batch.k[576] = to_bf16(f32(4))  # its row forgets the blocks and the chunk before, whose sums underflow to -0
    batch.v[:576] = to_bf16(f32(-1))
    batch.v[576] = to_bf16(f32(-0.0))
    together, _ = attend(batch, "prefill", "varlen")
    assert not together[0].any()
    rows = dataclasses.replace(batch, segments=np.array([(row, 1, 576 + row, 0) for row in range(3)], np.int32))
    assert same_bytes(attend(rows, "split", "decode")[0], together)


@pytest.mark.parametrize("changed", [dict(CHUNK=256), dict(BLOCK_N=32), dict(kpack=2)], ids=str)
def test_another_order_of_the_sums_is_caught(changed, long_batch, long_bits):
    o, lse = attend(long_batch, "prefill", "varlen", **changed)
    assert np.allclose(from_bf16(o), from_bf16(long_bits[0]), atol=0.02)
    assert not same_bytes(lse, long_bits[1])


@given(st.integers(1, 64), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 700)), max_size=4), st.randoms())
def test_tiles_hold_every_row_once_within_a_block_of_keys_wherever_a_sequence_is_cut(rows, sequences, random):
    whole, parts, start = [], [], 0
    for source, (count, position) in enumerate(sequences):
        whole.append((start, count, position, source))
        middle = random.randint(0, count)
        parts += [(start, middle, position, source), (start + middle, count - middle, position + middle, source)]
        start += count
    for segments in (whole, parts):
        table = cut(np.array(segments, np.int32).reshape(-1, 4), rows)
        row_start, count, position, source = table.T
        held = [row for first, n in zip(row_start, count, strict=True) for row in range(first, first + n)]
        assert held == list(range(start))
        assert np.all((count >= 1) & (count <= rows) & (position // 64 == (position + count - 1) // 64))
        assert all(row - place == whole[owner][0] - whole[owner][2]
                   for row, place, owner in zip(row_start, position, source, strict=True))


@pytest.mark.parametrize("segment", [(-1, 1, 0, 0), (3, 2, 0, 0), (0, 1, -1, 0), (0, 1, 20, 0), (0, 1, 0, 2)])
def test_a_segment_outside_of_the_queries_or_the_table_is_refused_by_name(segment):
    with pytest.raises(ValueError, match=r"segment 1 = .*check the segment table"):
        plan(torch.tensor([(0, 4, 0, 0), segment], dtype=torch.int32), 4, 2, 16, 64, 2, 20, torch.device("cpu"))


def test_short_segments_are_split_over_their_chunks_and_long_ones_are_not():
    segments = torch.tensor([(0, 16, 600, 0), (16, 17, 0, 1)], dtype=torch.int32)
    made = plan(segments, 40, 4, 16, 64, 2, 1000, torch.device("cpu"))
    assert made.split.table[:, 3].unique().tolist() == [0] and made.split.chunks == 2
    assert made.prefill.table[:, 3].unique().tolist() == [1] and not made.covered
    assert plan(segments, 40, 17, 16, 64, 2, 1000, torch.device("cpu")).split is None
