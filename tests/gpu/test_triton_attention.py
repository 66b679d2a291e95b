"""The Triton attention on this GPU: right values, and one set of bits for a row in every schedule, layout and batch."""

import dataclasses
import itertools

import pytest
import torch

from rlk.kernels import attention
from rlk.kernels.attention_plan import decode_plan
from rlk.kernels.variants import architecture
from rlk.ops import attention as ops
from rlk.ops.attention import attention_varlen_reference
from tests.gpu.operator_checks import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

ROUNDING = 2.0**-8  # largest relative error of one rounding to BF16
SHAPES = [(4, 2, 64), (8, 2, 128), (5, 1, 128), (2, 2, 64), (16, 1, 128), (32, 1, 64)]  # H, G, E
LENGTHS = [1, 37, 700, 64, 1300]


def poison():
    """Leave NaN in the memory that the next calls will get."""
    torch.full((1 << 24,), float("nan"), device="cuda")


def table(rows):
    return torch.tensor(rows, dtype=torch.int32)


class Sequences:
    """Random q, k, v of sequences packed one behind the other, and the ways to run attention over them."""

    def __init__(self, lengths, shape, seed=0):
        H, G, E = shape
        self.lengths, self.group = lengths, H // G
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]
        generator = torch.Generator("cuda").manual_seed(seed)
        qkv = torch.randn(sum(lengths), H + 2 * G, E, generator=generator, device="cuda").to(torch.bfloat16)
        self.q, self.k, self.v = qkv.split((H, G, G), dim=1)  # rows are strided, as the model's projection leaves them

    def whole_segments(self):
        return table([(start, n, 0, i) for i, (start, n) in enumerate(zip(self.starts, self.lengths, strict=True))])

    def varlen(self):
        """(o, lse)"""
        poison()
        return attention.attention_varlen(self.q, self.k, self.v, self.whole_segments(), table(self.starts).cuda())

    def pages(self, page_size, seed=0):
        """(k cache, v cache, block table): pages shuffled, NaN in slots without a key, entries -1 beyond the last."""
        counts = [-(-n // page_size) for n in self.lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        caches = torch.full((2, len(order), page_size, *self.k.shape[1:]), float("nan"), dtype=torch.bfloat16,
                            device="cuda")
        block_table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
        slots = []
        for source, n in enumerate(self.lengths):
            block_table[source, : counts[source]] = table([order.pop() for _ in range(counts[source])])
            position = torch.arange(n)
            slots.append(block_table[source, position // page_size].long() * page_size + position % page_size)
        slots = torch.cat(slots).cuda()
        for cache, x in zip(caches, (self.k, self.v), strict=True):
            cache.flatten(0, 1)[slots] = x
        return (*caches, block_table.cuda())

    def paged(self, page_size, cuts):
        """Each sequence in the parts that end at `cuts` (fractions of its length), one call per round of parts."""
        *caches, block_table = self.pages(page_size)
        out = torch.empty_like(self.q.contiguous())
        ends = [[int(n * cut) for cut in (*cuts, 1)] for n in self.lengths]
        for turn in range(len(cuts) + 1):
            rows, segments = [], []
            for source, start in enumerate(self.starts):
                first = ends[source][turn - 1] if turn else 0
                segments.append((len(rows), ends[source][turn] - first, first, source))
                rows += range(start + first, start + ends[source][turn])
            poison()
            if rows:
                out[rows] = attention.attention_paged(self.q[rows], *caches, table(segments), block_table)
        return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_agree_with_float64(shape):
    sequences = Sequences(LENGTHS, shape)
    segments, starts = sequences.whole_segments().cuda(), table(sequences.starts).cuda()
    q, k, v = (x.double() for x in (sequences.q, sequences.k, sequences.v))
    exact = attention_varlen_reference(q, k, v, segments, starts)[0]
    magnitude = attention_varlen_reference(q, k, v.abs(), segments, starts)[0]
    o, lse = sequences.varlen()
    assert ((o.double() - exact).abs() <= ROUNDING * (exact.abs() + magnitude)).all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 256, 600])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_of_any_size_and_chunked_prefill_give_the_bits_of_the_pack(shape, page_size):
    sequences = Sequences(LENGTHS, shape)
    whole, _ = sequences.varlen()
    for cuts in ((), (0.5,), (0.03, 0.31, 0.99)):
        assert same(sequences.paged(page_size, cuts), whole)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_has_the_same_bits_alone_as_in_a_pack(shape):
    together = Sequences([5, 1300, 64], shape)
    alone = Sequences([1300], shape)
    alone.q, alone.k, alone.v = (x[5:1305] for x in (together.q, together.k, together.v))
    for a, b in zip(alone.varlen(), together.varlen(), strict=True):
        assert same(a, b[5:1305])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] // shape[1] <= 16], ids=str)
def test_a_captured_decode_step_gives_the_bits_of_the_pack_at_every_position(shape):
    sequences = Sequences([1400, 1, 700, 530], shape)
    whole, _ = sequences.varlen()
    *caches, block_table = sequences.pages(16)
    lanes = len(sequences.lengths)
    q = torch.zeros((lanes, *whole.shape[1:]), dtype=whole.dtype, device="cuda")
    segments = table([(0, 1, 0, 0)] * lanes).cuda()

    def step():
        return attention.attention_paged(q, *caches, decode_plan(segments, max(sequences.lengths)), block_table)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for position in (0, 1, 63, 64, 511, 512, 513, 699, 1023, 1024, 1399):
        lengths = sequences.lengths
        live = [(lane, 1, position, lane) if position < n else (0, 0, 0, 0) for lane, n in enumerate(lengths)]
        rows = [start + min(position, n - 1) for start, n in zip(sequences.starts, lengths, strict=True)]
        segments.copy_(table(live))
        q.copy_(sequences.q[rows])
        out.fill_(float("nan"))
        graph.replay()
        eager = step()
        for lane, (_, count, _, _) in enumerate(live):
            expected = whole[rows[lane]] if count else torch.zeros_like(out[lane])
            assert same(out[lane], expected) and same(eager[lane], expected)


@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 2, 64)], ids=str)
def test_the_captured_operator_follows_changing_lengths_tables_and_pages(shape):
    """As the engine's decode step calls it: a lane's sequence grows, ends, and comes back in other pages."""
    sequences = Sequences([1400, 1, 700, 530], shape)
    whole, _ = sequences.varlen()
    held = [torch.zeros((4, *whole.shape[1:]), dtype=whole.dtype, device="cuda"), *sequences.pages(16),
            table([(0, 1, 0, 0), *[(0, 0, 0, 0)] * 3]).cuda()]

    def step():
        q, k_cache, v_cache, block_table, segments = held
        return ops.attention_paged(q, k_cache, v_cache, segments, block_table)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for turn, positions in enumerate([(0, 0, 0, 0), (63, None, 64, 529), (511, 0, 512, None), (1399, None, 699, 513)]):
        live = [(0, 0, 0, 0) if at is None else (lane, 1, at, lane) for lane, at in enumerate(positions)]
        rows = [start + (at or 0) for start, at in zip(sequences.starts, positions, strict=True)]
        for ours, theirs in zip(held, (sequences.q[rows], *sequences.pages(16, turn), table(live)), strict=True):
            ours.copy_(theirs)
        out.fill_(float("nan"))
        graph.replay()
        eager = step()
        for lane, at in enumerate(positions):
            expected = torch.zeros_like(out[lane]) if at is None else whole[rows[lane]]
            assert same(out[lane], expected) and same(eager[lane], expected), (turn, lane)


@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 2, 64)], ids=str)
def test_rows_beyond_the_segments_are_not_read_and_give_zeros(shape):
    """Packed rows that pad a batch, and keys that no query sees, may hold anything."""
    sequences = Sequences([5, 700, 64], shape)
    whole, whole_lse = sequences.varlen()
    within = torch.cat([torch.arange(5), torch.arange(15, 715), torch.arange(725, 789)]).cuda()
    q, k, v = (x.new_full((800, *x.shape[1:]), float("nan")) for x in (sequences.q, sequences.k, sequences.v))
    for padded, x in ((q, sequences.q), (k, sequences.k), (v, sequences.v)):
        padded[within] = x
    segments = table([(0, 5, 0, 0), (5, 0, 0, 0), (15, 700, 0, 1), (725, 64, 0, 2)])
    poison()
    o, lse = attention.attention_varlen(q, k, v, segments, table([0, 15, 725]).cuda())
    assert same(o[within], whole) and same(lse[within], whole_lse)
    outside = torch.ones(800, dtype=torch.bool, device="cuda").index_fill(0, within, False)
    assert not o[outside].any() and not lse[outside].any()


@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 2, 64)], ids=str)
def test_keys_and_values_may_lie_apart_in_different_ways(shape):
    """As in the model: k from its norm, v in the fused projection."""
    sequences = Sequences([700, 130], shape)
    whole = sequences.varlen()
    k, v = sequences.k, sequences.v
    for sequences.k, sequences.v in ((k.contiguous(), v), (k, v.contiguous()),
                                     (k, v.transpose(0, 1).contiguous().transpose(0, 1))):
        for a, b in zip(sequences.varlen(), whole, strict=True):
            assert same(a, b)


def test_rows_that_lie_gibibytes_apart_give_the_bits_of_rows_beside_each_other():
    sequences = Sequences([700], (8, 2, 128))
    whole = sequences.varlen()
    wide = torch.empty(700, 1 << 22, dtype=torch.bfloat16, device="cuda")  # 5.5 GiB
    for name, column in (("k", 0), ("v", 1 << 20)):
        x = wide[:, column:column + 256].view(700, 2, 128)
        x.copy_(getattr(sequences, name))
        setattr(sequences, name, x)
    for a, b in zip(sequences.varlen(), whole, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 2, 64)], ids=str)
def test_what_lies_behind_few_keys_is_not_seen(shape):
    """Fewer keys than a block, at the end of their memory or with NaN behind them."""
    sequences = Sequences([40], shape)
    whole = sequences.varlen()
    for rows in (40, 300):
        behind = torch.full((2, rows, *sequences.k.shape[1:]), float("nan"), dtype=torch.bfloat16, device="cuda")
        behind[0, :40], behind[1, :40] = sequences.k, sequences.v
        o, lse = attention.attention_varlen(sequences.q, *behind, sequences.whole_segments(), table([0]).cuda())
        assert same(o, whole[0]) and same(lse, whole[1])


def test_a_long_pack_repeats_its_bits_beside_other_work():
    """Groups of warps that take turns must give the same sums in whatever turns."""
    sequences = Sequences([5000, 64, 700], (8, 2, 128))
    whole = sequences.varlen()
    other, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for turn in range(40):
        if turn % 4:
            with torch.cuda.stream(other):
                noise = (noise @ noise).clamp(-1, 1) if turn % 2 else noise.flip(0)
        for a, b in zip(sequences.varlen(), whole, strict=True):
            assert same(a, b), turn


@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 2, 64)], ids=str)
def test_a_captured_forward_pass_follows_its_inputs(shape):
    sequences = Sequences([700, 3, 64], shape)
    held = [torch.zeros_like(x) for x in (sequences.q, sequences.k, sequences.v)]
    segments, starts = sequences.whole_segments(), table(sequences.starts).cuda()
    attention.attention_varlen(*held, segments, starts)  # makes the plan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.attention_varlen(*held, segments, starts)
    for seed in range(3):
        fresh = Sequences(sequences.lengths, shape, seed)
        for mine, theirs in zip(held, (fresh.q, fresh.k, fresh.v), strict=True):
            mine.copy_(theirs)
        graph.replay()
        assert all(map(same, out, fresh.varlen()))


@pytest.mark.parametrize("seed", range(4))
def test_random_packs_give_the_bits_of_their_parts(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(n) for n in torch.randint(1, [40, 600, 2000, 5000][seed], (1 + 3 * seed % 5,), generator=generator)]
    sequences = Sequences(lengths, SHAPES[seed], seed)
    whole, _ = sequences.varlen()
    cuts = sorted(torch.rand(3, generator=generator).tolist())
    assert same(sequences.paged(16, cuts), whole)


@pytest.fixture
def changed(monkeypatch):
    """Changes constants or options of the configuration of one kernel."""
    def change(kernel, **values):
        configs = attention.CONFIGS[architecture()]
        for name, config in configs.items():
            if config.kernel == kernel:
                constants = config.constants | {key: value for key, value in values.items() if key in config.constants}
                options = config.options | {key: value for key, value in values.items() if key not in constants}
                monkeypatch.setitem(configs, name, dataclasses.replace(config, constants=constants, options=options))
    return change


@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 2, 64)], ids=str)
@pytest.mark.parametrize("kernel, values", [
    ("attention_prefill", dict(BLOCK_M=16, num_warps=1)), ("attention_prefill", dict(BLOCK_M=32, num_warps=2)),
    ("attention_prefill", dict(BLOCK_M=64, num_warps=4)), ("attention_prefill", dict(BLOCK_M=64, num_warps=8)),
    ("attention_prefill", dict(WHOLE=False)), ("attention_prefill", dict(WHOLE=True)),
    ("attention_prefill", dict(num_stages=2)), ("attention_hopper", dict(STAGES=3)),
    ("attention_hopper", dict(STAGES=4)), ("attention_split", dict(num_warps=1)),
    ("attention_split", dict(num_warps=2)), ("attention_split", dict(num_warps=8)),
    ("attention_split", dict(BLOCK_M=64)), ("attention_merge", dict(num_warps=4, UNROLL=1)),
], ids=str)
def test_tile_height_warps_stages_and_loops_do_not_change_a_bit(kernel, values, shape, changed):
    sequences = Sequences(LENGTHS, shape)
    whole = sequences.varlen()
    short = sequences.paged(16, (0.99,))
    changed(kernel, **values)
    for a, b in zip(sequences.varlen(), whole, strict=True):
        assert same(a, b)
    assert same(sequences.paged(16, (0.99,)), short)


def test_another_chunk_width_is_caught(monkeypatch):
    sequences = Sequences([1300], (8, 2, 128))
    o, lse = sequences.varlen()
    monkeypatch.setattr(attention, "ATTENTION_CHUNK", 256)
    other, other_lse = sequences.varlen()
    assert torch.allclose(o.float(), other.float(), atol=0.02)
    assert same(lse[:256], other_lse[:256]) and not same(lse, other_lse)


def test_every_launch_is_one_of_the_variants_that_are_built(monkeypatch):
    """What the ahead-of-time build and its gates see is what runs."""
    known = [(variant.function, variant.constants, variant.options) for variant in attention.variants(architecture())]
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

    for name, function in attention.FUNCTIONS.items():
        monkeypatch.setattr(attention, name, Recorder(function))
    for shape, lengths in itertools.product(((8, 2, 128), (4, 2, 64)), ([3, 700], [3] * 150)):
        sequences = Sequences(lengths, shape)
        sequences.varlen()
        sequences.paged(16, (0.99,))
        *caches, block_table = sequences.pages(16)
        rows = table([(i, 1, 0, i) for i in range(len(lengths))]).cuda()
        attention.attention_paged(sequences.q[:len(lengths)].contiguous(), *caches, rows, block_table)
    assert all(launch in known for launch in launched)
    assert all(any(launch == variant for launch in launched) for variant in known)
