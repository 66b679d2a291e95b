"""The Triton attention's gradients on this GPU: right values, and bits that no tile, pack or run can change."""

import dataclasses

import pytest
import torch

from rlk.kernels import attention_backward
from rlk.kernels.attention import attention_varlen
from rlk.kernels.attention_backward import attention_varlen_backward
from rlk.kernels.variants import architecture
from rlk.ops.attention import attention_varlen as attend
from rlk.ops.registry import registry
from tests.gpu.test_triton_attention import ROUNDING, poison, same, table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

SHAPES = [(4, 2, 64), (8, 2, 128), (5, 1, 128), (2, 2, 64), (16, 1, 128), (32, 1, 64)]  # H, G, E
LENGTHS = [1, 37, 700, 64, 1300]
GRADIENTS = ("dq", "dk", "dv")


class Case:
    """Sequences packed one behind the other, their forward, and a gradient of its output.

    segments: (row start, rows, position, source) of the query rows; default: all rows of all sequences.
    """

    def __init__(self, lengths, shape, segments=None, seed=0):
        H, G, E = shape
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.segments = table(segments or [(start, n, 0, i) for i, (start, n) in
                                           enumerate(zip(self.starts, lengths, strict=True))])
        rows = int((self.segments[:, 0] + self.segments[:, 1]).max())
        generator = torch.Generator("cuda").manual_seed(seed)

        def draw(*dims):
            return torch.randn(dims, generator=generator, device="cuda").to(torch.bfloat16)

        self.q, self.do = draw(rows, H, E), draw(rows, H, E)
        self.k, _, self.v = draw(sum(lengths), 3 * G, E).split(G, dim=1)
        self.k = self.k.contiguous()  # as the norm leaves it, beside v in the fused projection
        self.run_forward()

    def run_forward(self):
        self.o, self.lse = attention_varlen(self.q, self.k, self.v, self.segments, table(self.starts).cuda())

    def backward(self):
        poison()
        return attention_varlen_backward(self.do, self.q, self.k, self.v, self.o, self.lse, self.segments,
                                         table(self.starts).cuda())

    def exact(self):
        """Gradients in float64, and the same sums of magnitudes: what roundings of weights and of o are relative to."""
        H, G = self.q.shape[1], self.k.shape[1]
        q, k, v, do = (x.double() for x in (self.q, self.k, self.v, self.do))
        sums = [[torch.zeros_like(x) for x in (q, k, v)] for _ in range(2)]
        for start, n, position, source in self.segments.tolist():
            rows, keys = slice(start, start + n), slice(self.starts[source], self.starts[source] + position + n)
            hidden = (torch.arange(position + n, device="cuda") > torch.arange(
                position, position + n, device="cuda")[:, None])
            for head in range(H):
                g = head // (H // G)
                a, b, c, d = q[rows, head], k[keys, g], v[keys, g], do[rows, head]
                scale = q.shape[2] ** -0.5
                p = (a @ b.T * scale).masked_fill(hidden, -torch.inf).softmax(1)
                d_p, most = d @ c.T, d.abs() @ c.abs().T
                ds = p * (d_p - (p * d_p).sum(1, keepdim=True)) * scale
                ds_size = p * (most + (p * most).sum(1, keepdim=True)) * scale
                for (dq, dk, dv), weight, x, y, z in ((sums[0], ds, a, b, d),
                                                      (sums[1], ds_size, a.abs(), b.abs(), d.abs())):
                    dq[rows, head] += weight @ y
                    dk[keys, g] += weight.T @ x
                    dv[keys, g] += p.T @ z
        return sums


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_agree_with_float64(shape):
    case = Case(LENGTHS, shape)
    for name, got, exact, size in zip(GRADIENTS, case.backward(), *case.exact(), strict=True):
        assert ((got.double() - exact).abs() <= ROUNDING * (exact.abs() + 3 * size)).all(), name
        assert float((got.double() - exact).norm() / exact.norm()) < 1e-2, name


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_local_queries_against_gathered_keys_agree_with_float64_and_leave_unseen_keys_zero(shape):
    """As on a rank of context parallelism: two parts of one sequence, a part of another, rows that no segment uses."""
    case = Case([900, 300], shape, [(3, 200, 150, 0), (203, 250, 600, 0), (460, 70, 100, 1)])
    got = case.backward()
    for name, x, exact, size in zip(GRADIENTS, got, *case.exact(), strict=True):
        assert ((x.double() - exact).abs() <= ROUNDING * (exact.abs() + 3 * size)).all(), name
    dq, dk, dv = got
    assert not dq[:3].any() and not dq[453:460].any()
    assert not any(x[850:900].any() or x[1070:].any() for x in (dk, dv))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_what_lies_beyond_the_segments_changes_no_gradient(shape):
    """NaN in query rows that no segment has and in keys that no query sees; a segment without rows."""
    case = Case([900, 300], shape, [(3, 200, 150, 0), (203, 0, 0, 0), (203, 250, 600, 0), (460, 70, 100, 1)])
    bits = case.backward()
    for rows in (slice(0, 3), slice(453, 460)):
        case.q[rows] = case.do[rows] = float("nan")
    for keys in (slice(850, 900), slice(1070, 1200)):
        case.k[keys] = case.v[keys] = float("nan")
    case.run_forward()
    for name, a, b in zip(GRADIENTS, case.backward(), bits, strict=True):
        assert same(a, b), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_has_the_same_gradients_alone_as_in_a_pack(shape):
    together = Case([5, 1300, 64], shape)
    bits = together.backward()
    alone = Case([1300], shape)
    for name in ("q", "k", "v", "do"):
        setattr(alone, name, getattr(together, name)[5:1305].clone())
    alone.run_forward()
    for name, a, b in zip(GRADIENTS, alone.backward(), bits, strict=True):
        assert same(a, b[5:1305]), name


def test_a_hundred_runs_beside_other_work_give_the_same_bits():
    case = Case([700, 2100, 64, 1300], (8, 2, 128))
    first, other, x = case.backward(), torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for turn in range(100):
        with torch.cuda.stream(other):  # takes multiprocessors away, another number of them each time
            for _ in range(turn % 4):
                x = (x @ x).clamp(-1, 1)
        assert all(same(a, b) for a, b in zip(case.backward(), first, strict=True))


@pytest.fixture
def changed(monkeypatch):
    """Changes constants or options of the configuration of one kernel."""
    def change(kernel, **values):
        configs = attention_backward.CONFIGS[architecture()]
        for name, config in configs.items():
            if config.kernel == kernel:
                constants = config.constants | {key: value for key, value in values.items() if key in config.constants}
                options = config.options | {key: value for key, value in values.items() if key not in constants}
                monkeypatch.setitem(configs, name, dataclasses.replace(config, constants=constants, options=options))
    return change


@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 2, 64), (5, 1, 64)], ids=str)
@pytest.mark.parametrize("kernel, values", [
    ("attention_dkdv", dict(BLOCK_M=16, num_warps=4)), ("attention_dkdv", dict(BLOCK_M=32)),
    ("attention_dkdv", dict(BLOCK_N=64, num_warps=4)), ("attention_dkdv", dict(BLOCK_N=32, num_warps=2)),
    ("attention_dkdv", dict(WHOLE=False)), ("attention_dkdv", dict(WHOLE=True)), ("attention_dkdv", dict(num_stages=1)),
    ("attention_dq", dict(BLOCK_M=16, num_warps=1)), ("attention_dq", dict(BLOCK_M=32, num_warps=2)),
    ("attention_dq", dict(BLOCK_M=128, num_warps=8)), ("attention_dq", dict(BLOCK_N=32)),
    ("attention_dq", dict(BLOCK_N=128, num_stages=1)), ("attention_dq", dict(WHOLE=False)),
    ("attention_dq", dict(num_stages=3)),
], ids=str)
def test_tiles_blocks_warps_stages_and_loops_do_not_change_a_bit(kernel, values, shape, changed):
    case = Case(LENGTHS, shape)
    bits = case.backward()
    changed(kernel, **values)
    for name, a, b in zip(GRADIENTS, case.backward(), bits, strict=True):
        assert same(a, b), name


def test_another_order_of_the_sums_is_caught():
    case = Case([2600], (8, 2, 128))
    bits = case.backward()
    case.segments = table([(1300, 1300, 1300, 0), (0, 1300, 0, 0)])
    dq, dk, dv = case.backward()
    assert same(dq, bits[0])
    assert torch.allclose(dk.float(), bits[1].float(), rtol=0.02, atol=0.02)
    assert not same(torch.stack([dk, dv]), torch.stack(bits[1:]))


def test_the_operator_differentiates_itself_on_the_gpu():
    case = Case(LENGTHS, (8, 2, 128))
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out = attend(*leaves, case.segments, table(case.starts))
    assert same(out, case.o)
    out.backward(case.do)
    for name, leaf, expected in zip(GRADIENTS, leaves, case.backward(), strict=True):
        assert same(leaf.grad, expected), name
    assert ("attention_varlen_backward", "triton") in {(row["op"], row["backend"]) for row in registry.readback()}


def test_every_launch_is_one_of_the_variants_that_are_built(monkeypatch):
    """What the ahead-of-time build and its gates see is what runs."""
    known = [(variant.function, variant.constants, variant.options)
             for variant in attention_backward.variants(architecture())]
    launched = []

    class Recorder:
        def __init__(self, function):
            self.function = function

        def __getitem__(self, grid):
            def launch(*args, **named):
                names = self.function.arg_names
                launched.append((self.function, {name: value for name, value in named.items() if name in names},
                                 {name: value for name, value in named.items() if name not in names}))
                return self.function[grid](*args, **named)
            return launch

    for name, function in attention_backward.FUNCTIONS.items():
        monkeypatch.setattr(attention_backward, name, Recorder(function))
    for shape in ((8, 2, 128), (4, 2, 64)):
        Case([3, 700], shape).backward()
    assert all(launch in known for launch in launched)
    assert all(any(launch == variant for launch in launched) for variant in known)
