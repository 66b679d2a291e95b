"""Attention: the written rule bit by bit, one row's bits in every layout, values and gradients against float64."""

from __future__ import annotations

import ctypes
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.ops.attention import (
    attention_paged,
    attention_varlen,
    attention_varlen_cpu,
    attention_varlen_reference,
    write_kv,
)
from rlk.ops.registry import registry

DTYPES = (torch.float32, torch.bfloat16)
f32 = np.float32


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    as_integers = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.contiguous().view(as_integers), b.contiguous().view(as_integers))


@contextmanager
def threads(n: int):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def poisoned_outputs():
    """torch.empty gives NaN, so that an output element the kernel forgets shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def native_mode():
    registry.set_mode("native")
    yield
    registry.set_mode("consistency")


class Sequences:
    """Random q, k, v of sequences packed one behind the other, and the ways to run attention over them."""

    def __init__(self, lengths, heads=(4, 2, 16), dtype=torch.float32, seed=0):
        h, g, e = heads
        self.lengths = list(lengths)
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        generator = torch.Generator().manual_seed(seed)
        t = sum(self.lengths)
        # Fused, as the model's projection leaves them: rows of q, k and v are strided.
        qkv = (torch.randn(t, h + 2 * g, e, generator=generator) * 2).to(dtype)
        self.q, self.k, self.v = qkv.split((h, g, g), dim=1)

    def rows(self, i):
        return slice(self.starts[i], self.starts[i] + self.lengths[i])

    def varlen(self):
        return attention_varlen(self.q, self.k, self.v, self.whole_segments(), self.key_starts())

    def whole_segments(self):
        return table([(start, n, 0, i) for i, (start, n) in enumerate(zip(self.starts, self.lengths, strict=True))])

    def key_starts(self):
        return table(self.starts)

    def alone(self, i):
        rows = self.rows(i)
        return attention_varlen(self.q[rows], self.k[rows], self.v[rows], table([(0, self.lengths[i], 0, 0)]),
                                table([0]))

    def paged(self, page_size, chunks, seed=1):
        """Prefill in `chunks` (each a list of row counts, per sequence), all sequences of a round in one call.

        Pages are shuffled; whatever was not yet written is NaN. Returns the outputs in packed order.
        """
        pages_of = [-(-n // page_size) for n in self.lengths]
        order = torch.randperm(sum(pages_of) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        block_table = torch.full((len(self.lengths), max(pages_of)), -1, dtype=torch.int32)
        for i, n in enumerate(pages_of):
            block_table[i, :n] = table([order.pop() for _ in range(n)])
        g, e = self.k.shape[1:]
        k_cache, v_cache = torch.full((2, sum(pages_of) + 3, page_size, g, e), math.nan, dtype=self.k.dtype)
        out, done = torch.empty(self.q.shape, dtype=self.q.dtype), [0] * len(self.lengths)
        for turn in range(max(map(len, chunks))):
            rows, segments, slots = [], [], []
            for i, counts in enumerate(chunks):
                if turn < len(counts):
                    positions = range(done[i], done[i] + counts[turn])
                    segments.append((len(rows), counts[turn], done[i], i))
                    rows += [self.starts[i] + p for p in positions]
                    slots += [int(block_table[i, p // page_size]) * page_size + p % page_size for p in positions]
                    done[i] += counts[turn]
            write_kv(self.k[rows], self.v[rows], k_cache, v_cache, torch.tensor(slots))
            out[rows] = attention_paged(self.q[rows], k_cache, v_cache, table(segments), block_table)
        assert done == self.lengths
        return out


def table(values):
    return torch.tensor(values, dtype=torch.int32)


# ---- the rule, written out for one row in exact FP32 steps (docs/numerics.md, hipkernels/cpu/attention.h)

_fmaf = ctypes.CDLL(None).fmaf
_fmaf.argtypes, _fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
_fma = np.frompyfunc(_fmaf, 3, 1)


def fma(a, b, c):
    return np.asarray(_fma(a, b, c), dtype=f32)


def exp2(x):
    """exp2_f32 of hipkernels/vector_math.h."""
    x = np.asarray(x, f32)
    clamped = np.clip(x, f32(-126), f32(127.5))
    whole = np.rint(clamped)
    p = np.full_like(x, f32(1.5403530393381609954e-4))
    for coefficient in (1.3333558146428443423e-3, 9.6181291076284771619e-3, 5.5504108664821579953e-2,
                        2.4022650695910071233e-1, 6.9314718055994530942e-1, 1.0):
        p = fma(p, clamped - whole, f32(coefficient))
    return np.where(x < -126, f32(0), np.ldexp(p, whole.astype(int)).astype(f32))


def rule(q_E, k_JE, v_JE, dtype, block=64, chunk=512):
    """Attention of one query over all the keys given, by the contract's rule for these widths."""
    scale = f32(math.log2(math.e) / math.sqrt(len(q_E)))
    t_J = np.zeros(len(k_JE), f32)
    for e in range(len(q_E)):
        t_J = fma(q_E[e], k_JE[:, e], t_J)
    t_J = t_J * scale
    merged = None
    for first in range(0, len(t_J), chunk):
        m, total, o_E = f32(-np.inf), f32(0), np.zeros(v_JE.shape[1], f32)
        for start in range(first, min(first + chunk, len(t_J)), block):
            seen = slice(start, min(start + block, first + chunk, len(t_J)))
            top = max(m, t_J[seen].max())
            factor = exp2(m - top)
            m, total, o_E = top, total * factor, o_E * factor
            p_J = torch.from_numpy(exp2(t_J[seen] - m)).to(dtype).float().numpy()
            for p, v_E in zip(p_J, v_JE[seen], strict=True):
                total, o_E = total + p, fma(p, v_E, o_E)
        if merged is None:
            merged = m, total, o_E
            continue
        m0, total0, o0_E = merged
        top = max(m0, m)
        a, b = exp2(m0 - top), exp2(m - top)
        merged = top, fma(total, b, total0 * a), fma(o_E, b, o0_E * a)
    return torch.from_numpy(merged[2] / merged[1]).to(dtype)


LAST_ROWS = (1, 2, 63, 64, 65, 200, 512, 513, 1100)  # contexts whose last row is compared


def rule_differs(dtype, **widths):
    """Contexts at which the kernel's bits differ from the rule's with these widths, in any query head."""
    differing = []
    for n in LAST_ROWS:
        s = Sequences([n], heads=(2, 1, 16), dtype=dtype, seed=n)
        out_HE = s.varlen()[-1]
        q_HE, k_JE, v_JE = (x.float().numpy() for x in (s.q[-1], s.k[:, 0], s.v[:, 0]))
        expected_HE = torch.stack([rule(q_E, k_JE, v_JE, dtype, **widths) for q_E in q_HE])
        if not same_bits(out_HE, expected_HE):
            differing.append(n)
    return differing


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_follows_the_written_rule_bit_by_bit(dtype):
    assert rule_differs(dtype) == []


@pytest.mark.parametrize("widths, least", [(dict(block=32), 33), (dict(chunk=256), 257)])
def test_another_block_or_chunk_width_would_show(widths, least):
    """Negative control: where the widths matter, the comparison above does tell them apart."""
    differing = rule_differs(torch.float32, **widths)
    assert differing and min(differing) >= least


# ---- one row, one set of bits


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    chunks = []
    for n in lengths:
        counts = []
        while sum(counts) < n:
            counts.append(draw(st.integers(1, n - sum(counts))) if len(counts) < 4 else n - sum(counts))
        chunks.append(counts)
    heads = draw(st.sampled_from([(1, 1, 16), (4, 2, 16), (8, 4, 32), (3, 3, 64), (5, 1, 32), (2, 1, 128)]))
    return Sequences(lengths, heads, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))), chunks


@settings(deadline=None, max_examples=30)
@given(batch=batches(), page_size=st.sampled_from([1, 4, 16, 64, 7]))
def test_a_row_has_the_same_bits_alone_packed_and_in_any_chunked_prefill(batch, page_size):
    sequences, chunks = batch
    packed = sequences.varlen()
    for i in range(len(sequences.lengths)):
        assert same_bits(packed[sequences.rows(i)], sequences.alone(i))
    assert same_bits(packed, sequences.paged(page_size, chunks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_prefill_decode_and_varlen_agree_over_several_chunks(dtype, page_size, poisoned_outputs):
    lengths = [1100, 70, 513]
    sequences = Sequences(lengths, heads=(4, 2, 32), dtype=dtype)
    packed = sequences.varlen()
    decode_the_end = [[n - 5] + [1] * 5 for n in lengths]
    uneven = [[500, 13, 300, 287], [64, 6], [1, 511, 1]]
    assert same_bits(packed, sequences.paged(page_size, decode_the_end))
    assert same_bits(packed, sequences.paged(page_size, uneven))


def test_decode_from_the_first_token_agrees():
    sequences = Sequences([90, 33], dtype=torch.bfloat16)
    assert same_bits(sequences.varlen(), sequences.paged(16, [[1] * 90, [1] * 33]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_thread_count(dtype):
    sequences = Sequences([600, 70, 1, 300], heads=(8, 4, 32), dtype=dtype)
    results = []
    for n in (1, 2, 3):
        with threads(n):
            results.append((sequences.varlen(), sequences.paged(16, [[600], [69, 1], [1], [300]]),
                            *gradients(sequences)))
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_keys_that_a_row_does_not_see_are_not_read():
    sequences = Sequences([130])
    clean = sequences.varlen()
    for x in (sequences.k, sequences.v):
        x[100:] = math.nan
    assert same_bits(clean[:100], sequences.varlen()[:100])


def test_rows_outside_every_segment_are_zero(poisoned_outputs):
    sequences = Sequences([20])
    sequences.q.requires_grad_()
    out = attention_varlen(sequences.q, sequences.k, sequences.v, table([(4, 10, 0, 0)]), table([0]))
    out.sum().backward()
    for x in (out, sequences.q.grad):
        assert x[:4].eq(0).all() and x[14:].eq(0).all() and x[4:14].isfinite().all()


# ---- values and gradients against float64


def plain(q_THE, k_UGE, v_UGE, segments, key_starts):
    """Softmax attention row by row, differentiable; in float64 the oracle."""
    group = q_THE.shape[1] // k_UGE.shape[1]
    out = torch.zeros_like(q_THE)
    for row_start, row_count, position, source in segments.tolist():
        for i in range(row_count):
            keys = slice(int(key_starts[source]), int(key_starts[source]) + position + i + 1)
            k_JHE, v_JHE = (x[keys].repeat_interleave(group, dim=1) for x in (k_UGE, v_UGE))
            logits_HJ = torch.einsum("he,jhe->hj", q_THE[row_start + i], k_JHE) / math.sqrt(q_THE.shape[2])
            out[row_start + i] = torch.einsum("hj,jhe->he", logits_HJ.softmax(1), v_JHE)
    return out


def gradients(sequences, run=attention_varlen, dtype=None, segments=None, weight_seed=7):
    """(output, dq, dk, dv) of `run` under a random linear loss."""
    inputs = (sequences.q, sequences.k, sequences.v)
    q, k, v = (x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in inputs)
    out = run(q, k, v, sequences.whole_segments() if segments is None else segments, sequences.key_starts())
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(weight_seed)).to(sequences.q.dtype)
    out.backward(weight.to(out.dtype))
    return out.detach(), q.grad, k.grad, v.grad


def assert_near_float64(got, exact, dtype):
    """Each tensor's error, relative to its largest element, is at the dtype's rounding."""
    for name, x, y in zip(("output", "dq", "dk", "dv"), got, exact, strict=True):
        error = (x.double() - y).abs().max() / y.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2), f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 1, 32), (2, 2, 64), (4, 1, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients_match_float64(dtype, heads, poisoned_outputs):
    sequences = Sequences([70, 1, 130], heads, dtype)
    assert_near_float64(gradients(sequences), gradients(sequences, plain, torch.float64), dtype)


def test_gradients_over_several_chunks_match_float64():
    sequences = Sequences([700], dtype=torch.float32)
    assert_near_float64(gradients(sequences), gradients(sequences, plain, torch.float64), torch.float32)


def test_reference_in_float64_is_exact_for_mixed_segments(native_mode):
    """Whole sequences, a later part and a decode in one table, in the native arm (torch's own gradients)."""
    sequences = Sequences([40, 30, 9])
    segments = table([(0, 40, 0, 0), (40, 12, 18, 1), (52, 1, 8, 2)])
    exact = gradients(sequences, plain, torch.float64, segments)
    for got, tolerance in ((gradients(sequences, dtype=torch.float64, segments=segments, run=reference), 1e-12),
                           (gradients(sequences, segments=segments), 1e-5)):
        for x, y in zip(got, exact, strict=True):
            assert (x.double() - y).abs().max() < tolerance * (1 + y.abs().max())


def reference(*arguments):
    return attention_varlen_reference(*arguments)[0]


def test_native_paged_attention_ignores_unwritten_slots(native_mode):
    sequences = Sequences([40, 70, 5])
    out = sequences.paged(16, [[20, 20], [69, 1], [1] * 5])
    assert (out - sequences.varlen()).abs().max() < 1e-5


def test_gradient_bits_do_not_depend_on_the_pack_or_on_a_split_into_segments():
    lengths = [33, 90, 64]
    sequences = Sequences(lengths, dtype=torch.bfloat16)
    packed = gradients(sequences)
    split = [part for i, (start, n) in enumerate(zip(sequences.starts, lengths, strict=True))
             for part in ((start, 10, 0, i), (start + 10, n - 10, 10, i))]
    assert all(same_bits(a, b) for a, b in zip(packed, gradients(sequences, segments=table(split)), strict=True))
    weight = torch.randn(packed[0].shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    for i in range(len(lengths)):
        rows = sequences.rows(i)
        q, k, v = (x[rows].clone().requires_grad_() for x in (sequences.q, sequences.k, sequences.v))
        attention_varlen(q, k, v, table([(0, lengths[i], 0, 0)]), table([0])).backward(weight[rows])
        assert all(same_bits(a[rows], b.grad) for a, b in zip(packed[1:], (q, k, v), strict=True))


def test_saved_log_sum_exp_is_base_two():
    sequences = Sequences([20], heads=(1, 1, 16))
    _, lse_TH = attention_varlen_cpu(sequences.q, sequences.k, sequences.v, sequences.whole_segments(),
                                     sequences.key_starts(), need_lse=True)
    logits_TU = (sequences.q[:, 0].double() @ sequences.k[:, 0].double().T / 4).tril()
    exact_T = torch.stack([row[:i + 1].logsumexp(0) for i, row in enumerate(logits_TU)]) / math.log(2)
    assert (lse_TH[:, 0].double() - exact_T).abs().max() < 1e-5


# ---- the cache write, and bad input


@pytest.mark.parametrize("mode", ["consistency", "native"])
def test_write_kv_fills_the_slots_named_and_no_other(mode):
    registry.set_mode(mode)
    try:
        sequences = Sequences([4])
        k_cache, v_cache = torch.zeros(2, 3, 2, 2, 16)
        write_kv(sequences.k, sequences.v, k_cache, v_cache, torch.tensor([5, -1, 0, 3]))
    finally:
        registry.set_mode("consistency")
    for cache, x in ((k_cache, sequences.k), (v_cache, sequences.v)):
        expected = torch.zeros(6, 2, 16)
        expected[[5, 0, 3]] = x[[0, 2, 3]]
        assert same_bits(cache.flatten(0, 1), expected)


@pytest.mark.parametrize("segment", [(0, 11, 0, 0), (-1, 2, 0, 0), (0, 5, 6, 0), (0, 5, 0, 1), (0, 0, 0, 0)])
def test_a_segment_that_reaches_outside_is_refused(segment):
    s = Sequences([10])
    with pytest.raises(ValueError, match="check the segment table"):
        attention_varlen(s.q, s.k, s.v, table([segment]), table([0]))


@pytest.mark.parametrize("segment, pages", [((0, 10, 0, 0), [0, 1]), ((0, 10, 0, 0), [0, 1, 9]),
                                            ((0, 10, 0, 0), [0, -1, 1]), ((0, 10, 0, 1), [0, 1, 2])])
def test_a_page_outside_the_cache_is_refused(segment, pages):
    s = Sequences([10])
    cache = torch.zeros(3, 4, 2, 16)
    with pytest.raises(ValueError, match="check the segment and block tables"):
        attention_paged(s.q, cache, cache, table([segment]), table([pages]))


def test_other_bad_input_is_refused():
    s = Sequences([10])
    apart = table([(0, 5, 0, 0), (5, 1, 0, 1), (6, 4, 5, 0)])
    with pytest.raises(ValueError, match="adjacent"):
        attention_varlen(s.q.clone().requires_grad_(), s.k, s.v, apart, table([0, 5])).sum().backward()
    with pytest.raises(TypeError, match="int64"):
        attention_varlen(s.q, s.k, s.v, s.whole_segments().long(), s.key_starts())
    with pytest.raises(TypeError, match="one for q, k and v"):
        attention_varlen(s.q, s.k.bfloat16(), s.v, s.whole_segments(), s.key_starts())
    with pytest.raises(ValueError, match="slots from 0 to 6"):
        write_kv(s.k[:2], s.v[:2], torch.zeros(3, 2, 2, 16), torch.zeros(3, 2, 2, 16), torch.tensor([0, 6]))
