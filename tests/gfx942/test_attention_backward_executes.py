"""The Triton attention's gradients, as gfx942 code objects, executed: the rule's bits, whatever tiles and pack."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlk.kernels import attention, attention_backward
from rlk.kernels.attention_plan import backward_plan, key_blocks, vector_tiles
from rlk.ops.attention import attention_varlen_reference
from tests.gfx942.attention_cases import accumulate, draw, exp2, f32, fma, rows_of, rule
from tests.gfx942.emulator import Device
from tests.gfx942.numerics import BF16_EPSILON, from_bf16, random_bf16, same_bytes, to_bf16
from tests.gfx942.test_attention_launches import EmulatedKernel
from tests.gfx942.triton_runs import run_variant

ARCH = "gfx942"
VARIANTS = {(variant.kernel, variant.constants["E"]): variant for variant in attention_backward.variants(ARCH)}
GRADIENTS = ("dq", "dk", "dv")
NAN = 0x7FC0


@dataclasses.dataclass
class Forward:
    """What the backward gets from the forward, and the gradient of its output."""

    o: np.ndarray
    lse: np.ndarray
    d_o: np.ndarray


def forward(batch, seed=9):
    return Forward(*rule(batch), random_bf16(np.random.default_rng(seed), *batch.q.shape))


def backward(batch, saved, order="forward", unrounded=True, **changed):
    """(dq, dk, dv, delta [T, H]) as the launcher runs it; `changed`, by kernel: other constants and options.

    unrounded: the gradients in FP32, before the rounding to BF16 that would hide most differences.
    """
    (T, H, E), (U, G, _) = batch.q.shape, batch.k.shape

    def variant(kernel):
        found, own = VARIANTS[kernel, E], changed.get(kernel, {})
        constants = {name: own.get(name, value) for name, value in found.constants.items()}
        options = found.options | {name: value for name, value in own.items() if name not in constants}
        types = {name: "*fp32" if unrounded and name in GRADIENTS else kind for name, kind in found.signature.items()}
        return dataclasses.replace(found, name=found.name + "".join(f".{value}" for value in own.values()),
                                   signature=types, constants=constants, options=options)

    pack, dkdv, dq = (variant(kernel) for kernel in attention_backward.FUNCTIONS)
    plan = backward_plan(torch.from_numpy(batch.segments), T, batch.group, dq.constants["BLOCK_M"],
                         dkdv.constants["BLOCK_N"], len(batch.lengths), U, torch.device("cpu"))
    outputs = dict(dq=(T, H, E), dk=(U, G, E), dv=(U, G, E), q_packed=(G, T, H // G, E), d_o_packed=(G, T, H // G, E))
    values = {name: np.full(shape, *((np.nan, f32) if unrounded and name in GRADIENTS else (NAN, np.uint16)))
              for name, shape in outputs.items()} | dict(
        q=batch.q, k=batch.k, v=batch.v, o=saved.o, d_o=saved.d_o, lse=saved.lse,
        terms=np.full((G, T, H // G, 4), np.nan, f32), tiles=plan.tiles.numpy(), blocks=plan.blocks.numpy(),
        segments=plan.segments.numpy(), starts=batch.starts, scale=attention.logit_scale(E),
        softmax_scale=1 / math.sqrt(E), group=batch.group, rows=T, q_stride=H * E, key_stride=G * E, value_stride=G * E)
    packs = -(-T * batch.group // pack.constants["BLOCK_M"])
    for kernel, grid in ((pack, (packs, G)), (dkdv, (G, len(plan.blocks))), (dq, (len(plan.tiles), G))):
        given = {name: values[name] for name in kernel.signature}
        values |= run_variant(Device(order), kernel, grid, given)
    delta = values["terms"][..., 1].transpose(1, 0, 2).reshape(T, H)
    return values["dq"], values["dk"], values["dv"], delta


def gradient_rule(batch, saved, delta):
    """(dq, dk, dv) by the rule at the top of triton/attention_backward.py, row by row."""
    E = batch.q.shape[2]
    scale, softmax_scale = f32(attention.logit_scale(E)), f32(1 / math.sqrt(E))
    dq, dk, dv = np.zeros(batch.q.shape, f32), *np.zeros((2, *batch.k.shape), f32)
    for row, kv_head, head, keys in rows_of(batch):
        q, d_o, k, v = (from_bf16(x) for x in (batch.q[row, head], saved.d_o[row, head], batch.k[keys, kv_head],
                                               batch.v[keys, kv_head]))
        products = accumulate(q, k.T, np.zeros(len(k), f32))
        d_p = accumulate(d_o, v.T, np.full(len(k), -delta[row, head]))
        p = exp2(fma(products, scale, -saved.lse[row, head]))
        ds = from_bf16(to_bf16(p * d_p))
        p = from_bf16(to_bf16(p))
        dq[row, head] = accumulate(ds, k, dq[row, head])
        dv[keys, kv_head] = (dv[keys, kv_head] + p[:, None] * d_o).astype(f32)
        dk[keys, kv_head] = (dk[keys, kv_head] + ds[:, None] * q).astype(f32)
    return to_bf16(dq * softmax_scale), to_bf16(dk * softmax_scale), to_bf16(dv)


def float64(batch, saved):
    """Each gradient, and the same sums of what a rounding of weights, their sum or o is relative to."""
    E = batch.q.shape[2]
    exact = [np.zeros(batch.q.shape), *np.zeros((2, *batch.k.shape))]
    size = [np.zeros(batch.q.shape), *np.zeros((2, *batch.k.shape))]
    for row, kv_head, head, keys in rows_of(batch):
        q, d_o, k, v = (from_bf16(x).astype(float) for x in (batch.q[row, head], saved.d_o[row, head],
                                                             batch.k[keys, kv_head], batch.v[keys, kv_head]))
        p = np.exp(k @ q / math.sqrt(E) - (k @ q / math.sqrt(E)).max())
        p /= p.sum()
        d_p, most = v @ d_o, np.abs(v) @ np.abs(d_o)
        ds, ds_size = p * (d_p - p @ d_p) / math.sqrt(E), p * (most + p @ most) / math.sqrt(E)
        for to, weight, sign in ((exact, ds, lambda x: x), (size, ds_size, np.abs)):
            to[0][row, head] = weight @ sign(k)
            to[1][keys, kv_head] += weight[:, None] * sign(q)
            to[2][keys, kv_head] += p[:, None] * sign(d_o)
    return exact, size


SHAPES = {
    "ragged": dict(segments=[(0, 1, 0, 0), (1, 37, 0, 1), (38, 5, 64, 2)], lengths=[1, 37, 69]),
    "two parts": dict(segments=[(0, 9, 3, 0), (9, 7, 70, 0), (16, 3, 0, 1)], lengths=[90, 3]),  # as a rank of CP has
}
CASES = [pytest.param(shape, group, G, E, id=f"{shape} {group}x{G} e{E}") for shape, group, G, E in (
    ("ragged", 4, 2, 64), ("two parts", 2, 1, 64), ("ragged", 5, 1, 128), ("two parts", 4, 1, 128))]


@pytest.mark.parametrize(("shape", "group", "G", "E"), CASES)
def test_gradients_have_the_bits_of_the_rule_and_agree_with_float64(shape, group, G, E):
    batch = draw(1, **SHAPES[shape], group=group, G=G, E=E)
    saved = forward(batch)
    *got, delta = backward(batch, saved, unrounded=False)
    exact_delta = (from_bf16(saved.d_o).astype(float) * from_bf16(saved.o)).sum(-1)
    assert np.allclose(delta, exact_delta, rtol=1e-5, atol=1e-5)
    exact, size = float64(batch, saved)
    seen = np.concatenate([np.arange(n) + start < start + max(p + c for _, c, p, s in batch.segments if s == source)
                           for source, (start, n) in enumerate(zip(batch.starts, batch.lengths, strict=True))])
    for name, x, by_rule, y, allowed in zip(GRADIENTS, got, gradient_rule(batch, saved, delta), exact, size,
                                            strict=True):
        rows = slice(None) if name == "dq" else seen
        assert same_bytes(x[rows], by_rule[rows]), name
        assert (np.abs(from_bf16(x[rows]) - y[rows]) <= BF16_EPSILON * (np.abs(y) + 3 * allowed)[rows]).all(), name
        assert name == "dq" or (x[~seen] == NAN).all()  # keys that nobody sees are left alone


@pytest.fixture(scope="module")
def case():
    batch = draw(2, [(0, 41, 0, 0), (41, 30, 64, 1)], [41, 94], group=2, G=1, E=64)
    saved = forward(batch)
    return batch, saved, backward(batch, saved)


@pytest.mark.parametrize(("dkdv", "dq"), [
    (dict(BLOCK_M=16), dict(BLOCK_M=16, num_warps=1)), (dict(BLOCK_N=32), dict(BLOCK_N=32)),
    (dict(BLOCK_M=64, num_warps=8), dict(BLOCK_M=128, num_warps=8)), (dict(BLOCK_N=128), dict(BLOCK_N=128)),
    (dict(WHOLE=True), dict(WHOLE=True)), (dict(num_warps=2), dict(num_stages=2)),
], ids=str)
def test_tiles_blocks_warps_stages_and_loops_do_not_change_a_bit(dkdv, dq, case):
    batch, saved, bits = case
    for got, expected in zip(backward(batch, saved, attention_dkdv=dkdv, attention_dq=dq), bits, strict=True):
        assert same_bytes(got, expected)


def test_the_order_of_waves_and_workgroups_does_not_change_a_bit(case):
    batch, saved, bits = case
    for got, expected in zip(backward(batch, saved, order="reverse"), bits, strict=True):
        assert same_bytes(got, expected)


def test_a_source_has_the_same_gradients_alone_as_in_a_pack(case):
    batch, saved, bits = case
    alone = dataclasses.replace(batch, q=batch.q[41:], k=batch.k[41:], v=batch.v[41:], lengths=[94],
                                segments=np.array([(0, 30, 64, 0)], np.int32))
    got = backward(alone, Forward(saved.o[41:], saved.lse[41:], saved.d_o[41:]))
    for x, y in zip(got, bits, strict=True):
        assert same_bytes(x, y[41:])


def test_another_order_of_the_sums_is_caught(case):
    """Rows 20 and later before rows 0 to 19: the gradients of keys differ in their last bits, those of queries not."""
    batch, saved, bits = case
    swapped = np.concatenate([[(20, 21, 20, 0), (0, 20, 0, 0)], batch.segments[1:]]).astype(np.int32)
    dq, dk, dv, _ = backward(dataclasses.replace(batch, segments=swapped), saved)
    assert same_bytes(dq, bits[0])
    for got, expected in zip((dk, dv), bits[1:3], strict=True):
        assert np.allclose(got, expected, rtol=1e-4, atol=1e-5) and not same_bytes(got, expected)


def test_blocks_hold_every_seen_key_once_and_tiles_every_vector_the_longest_first():
    segments = np.array([(0, 70, 0, 3), (70, 10, 100, 3), (80, 2, 126, 0), (90, 300, 0, 1)], np.int32)
    blocks = key_blocks(segments, 64)
    held = sorted((int(segments[begin, 3]), int(first) + i) for first, n, begin, _ in blocks for i in range(n))
    assert held == sorted((source, key) for source, n in ((3, 110), (0, 128), (1, 300)) for key in range(n))
    assert blocks[:, 1].max() == 64 and set(map(tuple, blocks[:, 2:].tolist())) == {(0, 2), (2, 3), (3, 4)}
    rows = [sum(max(0, min(n, p + n - first)) for _, n, p, _ in segments[begin:end]) for first, _, begin, end in blocks]
    assert rows == sorted(rows, reverse=True)
    tiles = vector_tiles(segments, 5, 64)
    vectors = sorted(int(first) + i for first, n, _, _ in tiles for i in range(n))
    assert vectors == sorted(v for start, n, _, _ in segments for v in range(5 * start, 5 * (start + n)))
    assert (np.diff(tiles[:, 2]) <= 0).all() and tiles[:, 1].max() == 64
    for first, _, place, source in tiles:
        assert any(s == source and place - 5 * p == first - 5 * start >= 0 for start, _, p, s in segments)


# ---- the launcher, with the emulator in the GPU's place

G, GROUP, E = 2, 4, 64


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for module in (attention, attention_backward):
        monkeypatch.setattr(module, "architecture", lambda: ARCH)
        for name, function in module.FUNCTIONS.items():
            monkeypatch.setattr(module, name, EmulatedKernel(function, module))


def table(rows):
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 4) if rows and isinstance(rows[0], tuple) else (
        torch.tensor(rows, dtype=torch.int32))


def inputs(rows, seed=0):
    """q and k as their norms leave them, v as a view of the fused projection, and do with strides of its own."""
    generator = torch.Generator().manual_seed(seed)
    qkv, d_o = (torch.randn(rows, heads, E, generator=generator).bfloat16()
                for heads in (G * (GROUP + 2), 2 * G * GROUP))
    q, k, v = qkv.split((G * GROUP, G, G), dim=1)
    return q.contiguous(), k.contiguous(), v, d_o[:, ::2]


def test_a_pack_agrees_with_autograd_and_leaves_zeros_for_rows_that_no_segment_uses(emulated, monkeypatch):
    q, k, v, d_o = inputs(44)
    segments, starts = table([(0, 3, 0, 0), (4, 36, 0, 1)]), table([0, 4])
    o, lse = attention.attention_varlen(q, k, v, segments, starts)
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **named: new_empty(*args, **named).fill_(torch.nan))
    got = attention_backward.attention_varlen_backward(d_o, q, k, v, o, lse, segments, starts)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    attention_varlen_reference(*leaves, segments, starts)[0].backward(d_o.double())
    for name, x, leaf in zip(GRADIENTS, got, leaves, strict=True):
        assert (x.double() - leaf.grad).abs().max() <= 1e-2 * leaf.grad.abs().max(), name
        assert not x[3].any() and not x[40:].any()


def test_an_output_and_log_sums_that_are_not_contiguous_give_the_same_gradients(emulated):
    q, k, v, d_o = inputs(5)
    segments, starts = table([(0, 5, 0, 0)]), table([0])
    o, lse = attention.attention_varlen(q, k, v, segments, starts)
    apart = [torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0] for x in (o, lse)]
    assert not any(x.is_contiguous() for x in apart)
    got, expected = (attention_backward.attention_varlen_backward(d_o, q, k, v, *forward, segments, starts)
                     for forward in (apart, (o, lse)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_nothing_to_do_gives_zeros(emulated):
    q, k, v, d_o = inputs(3)
    for segments in (table([(0, 0, 0, 0)]), torch.zeros(0, 4, dtype=torch.int32)):
        got = attention_backward.attention_varlen_backward(d_o, q, k, v, q, torch.zeros(3, G * GROUP), segments,
                                                           table([0]))
        assert [x.shape for x in got] == [q.shape, k.shape, v.shape] and not any(x.any() for x in got)


@pytest.mark.parametrize("changed, message", [
    (dict(do_THE=torch.zeros(2, G * GROUP, E).bfloat16()), "do of q's shape"),
    (dict(lse_TH=torch.zeros(3, 1)), "lse torch.float32"),
    (dict(o_THE=torch.zeros(3, G * GROUP, E)), "o torch.float32"),
    (dict(v_UGE=torch.zeros(3, G, E)), "v torch.float32"),
    (dict(k_UGE=torch.zeros(3, 3, E).bfloat16()), "H a multiple of G"),
    (dict(k_UGE=torch.zeros(3, G, 32).bfloat16()), r"E one of \(64, 128\)"),
    (dict(segments=table([(0, 4, 0, 0)])), "check the segment table"),
    (dict(segments=table([(0, 1, 0, 0), (1, 1, 0, 1), (2, 1, 0, 0)])), "source to be adjacent"),
    (dict(key_starts=torch.zeros(2)), "key_starts torch.float32"),
])
def test_operands_that_the_kernels_cannot_take_are_refused_by_name(changed, message, emulated):
    q, k, v, d_o = inputs(3)
    given = dict(do_THE=d_o, q_THE=q, k_UGE=k, v_UGE=v, o_THE=q, lse_TH=torch.zeros(3, G * GROUP),
                 segments=table([(0, 3, 0, 0)]), key_starts=table([0, 0]))
    with pytest.raises(ValueError, match=message):
        attention_backward.attention_varlen_backward(**given | changed)


def test_a_plan_for_other_rows_is_refused(emulated):
    q, k, v, d_o = inputs(3)
    plan = attention_backward.make_plan(table([(0, 2, 0, 0)]), q[:2], G, 1, 3)
    with pytest.raises(ValueError, match="make one for these"):
        attention_backward.attention_varlen_backward(d_o, q, k, v, q, torch.zeros(3, G * GROUP), plan, table([0]))
