"""The attention launchers, with the emulator in the GPU's place: plans, grids, strides, workspaces, refusals."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlk.kernels import attention, attention_plan
from rlk.kernels.attention_plan import REMEMBERED, decode_plan, of_content, upload
from rlk.ops import gpu
from rlk.ops.attention import attention_varlen_reference
from tests.gfx942.emulator import Device
from tests.gfx942.numerics import BF16_EPSILON
from tests.gfx942.triton_runs import run_variant

ARCH = "gfx942"
G, GROUP, E = 2, 4, 64


class EmulatedKernel:
    """A Triton kernel whose launches the emulator runs, if they are among the variants that are built."""

    def __init__(self, function, module=attention):
        self.function, self.module = function, module

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def launch(self, grid, *args, **named):
        names = self.function.arg_names
        values = dict(zip(names, args, strict=False))
        constants = {name: value for name, value in named.items() if name in names}
        options = {name: value for name, value in named.items() if name not in names}
        (variant,) = (each for each in self.module.variants(ARCH) if each.function is self.function
                      and (each.constants, each.options) == (constants, options) and not each.name.endswith("_far"))
        device, stores = Device(), {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in stores:  # q, k and v may share one
                    stored = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                    stores[storage.data_ptr()] = stored, device.put(stored)
                values[name] = stores[storage.data_ptr()][1] + value.storage_offset() * value.element_size()
        run_variant(device, variant, grid, values)
        for stored, address in stores.values():
            stored[...] = device.get(address, stored.shape, stored.dtype)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(attention, "architecture", lambda: ARCH)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for name in attention.FUNCTIONS:
        monkeypatch.setattr(attention, name, EmulatedKernel(getattr(attention, name)))


def table(rows):
    return torch.tensor(rows, dtype=torch.int32)


def fused(rows, seed=0):
    """q, k and v as the model's projection leaves them: rows are strided."""
    qkv = torch.randn(rows, G * (GROUP + 2), E, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return qkv.split((G * GROUP, G, G), dim=1)


def same(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def paged(k, v, lengths, page_size=16):
    """The keys of sequences that follow each other, in pages from the last one down; NaN in free slots, -1 beyond."""
    counts = [-(-n // page_size) for n in lengths]
    caches = torch.full((2, sum(counts) + 1, page_size, G, E), float("nan"), dtype=torch.bfloat16)
    block_table, page, start = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32), sum(counts), 0
    for source, n in enumerate(lengths):
        for index in range(counts[source]):
            rows = slice(start + index * page_size, start + min((index + 1) * page_size, n))
            block_table[source, index] = page
            for cache, x in zip(caches, (k, v), strict=True):
                cache[page, : rows.stop - rows.start] = x[rows]
            page -= 1
        start += n
    return (*caches, block_table)


def test_a_pack_of_short_and_long_sequences_agrees_with_the_reference_and_leaves_other_rows_zero():
    q, k, v = fused(44)
    segments, starts = table([(0, 3, 0, 0), (4, 40, 0, 1)]), table([0, 4])
    o, lse = attention.attention_varlen(q, k, v, segments, starts)
    exact = attention_varlen_reference(q.double(), k.double(), v.double(), segments, starts)[0]
    magnitude = attention_varlen_reference(q.double(), k.double(), v.double().abs(), segments, starts)[0]
    assert ((o.double() - exact).abs() <= BF16_EPSILON * (exact.abs() + magnitude)).all()
    assert not o[3].any() and not lse[3].any()
    logits = torch.einsum("he,uhe->hu", q[2].double(), k[:3].double().repeat_interleave(GROUP, 1)) / E**0.5
    # It is the logarithm of a sum of weights that were rounded to BF16.
    assert torch.allclose(lse[2].double() * np.log(2), logits.logsumexp(1), rtol=0, atol=BF16_EPSILON)


def test_pages_rows_chunked_prefill_and_decode_have_the_same_bits():
    lengths = [3, 40]
    q, k, v = fused(43)
    whole, _ = attention.attention_varlen(q, k, v, table([(0, 3, 0, 0), (3, 40, 0, 1)]), table([0, 3]))
    *caches, block_table = paged(k, v, lengths)
    rows = torch.tensor([0, 1, *range(3, 36)])
    chunk = attention.make_plan(table([(0, 2, 0, 0), (2, 33, 0, 1)]), q[rows], G, 2, 48, paged=True)
    first = attention.attention_paged(q[rows], *caches, chunk, block_table)
    assert same(first, whole[rows])
    step = attention.attention_paged(q[[2, 36]], *caches, decode_plan(table([(0, 1, 2, 0), (1, 1, 33, 1)]), 48),
                                     block_table)
    assert same(step, whole[[2, 36]])


def test_a_decode_step_takes_its_tiles_from_the_segments_as_they_are():
    q, k, v = fused(40)
    *caches, block_table = paged(k, v, [40])
    segments = table([(0, 1, 39, 0), (0, 0, 0, 0)])
    o = attention.attention_paged(q[[39, 0]], *caches, segments, block_table)
    alone = attention.attention_paged(q[39:], *caches, decode_plan(table([(0, 1, 39, 0)]), 40), block_table)
    assert same(o[0], alone[0])
    assert not o[1].any()


def test_a_plan_is_made_once_for_tables_of_the_same_content():
    q, k, v = fused(43)
    segments, starts = table([(0, 3, 0, 0), (3, 40, 0, 1)]), table([0, 3])
    first = attention.make_plan(segments, q, G, 2, 43)
    assert attention.make_plan(segments.clone(), q, G, 2, 43) is first
    assert attention.make_plan(segments, q, G, 2, 44) is not first
    on_device = upload(starts, q.device)
    assert upload(starts.clone(), q.device) is on_device and torch.equal(on_device, starts)
    segments[1, 1], starts[1] = 39, 4  # in place: another content
    assert attention.make_plan(segments, q, G, 2, 43).prefill.table[:, 1].sum() == 39
    assert upload(starts, q.device).tolist() == [0, 4]


class OnHost(torch.Tensor):
    is_cuda = False


@pytest.fixture
def cuda(monkeypatch):
    """The state of a GPU that attention_plan and rlk.ops.gpu ask for, and how often a tensor was copied to the host."""
    state = SimpleNamespace(stream=0, capturing=False, reads=0)

    def cpu(x):
        assert not state.capturing
        state.reads += 1
        return x.clone().as_subclass(OnHost)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=state.stream))
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    return state


def test_each_stream_has_its_own_tables(cuda):
    remembered, content = of_content(lambda table, *args: [table, *args]), table([1, 2])
    first = remembered(content, "a")
    cuda.stream = 1
    other = remembered(content, "a")
    assert other is not first and remembered(content, "a") is other
    cuda.stream = 0
    assert remembered(content, "a") is first
    for i in range(REMEMBERED):
        remembered(table([i]))
    assert remembered(content, "a") is not first  # it was not used for longest


def test_a_captured_graph_keeps_the_tables_that_a_call_before_it_made(cuda):
    remembered, content = of_content(lambda table: [table]), table([1, 2])
    cuda.capturing, cuda.stream = True, 1
    with pytest.raises(RuntimeError, match=r"shape \(2,\) while a graph is captured.*make the same call once before"):
        remembered(content)
    cuda.capturing, cuda.stream = False, 0
    made = remembered(content)
    cuda.capturing, cuda.stream = True, 1
    assert remembered(content) is made
    cuda.capturing = False
    for i in range(REMEMBERED + 1):
        remembered(table([i]))
    cuda.capturing = True
    assert remembered(content) is made  # a graph may replay at any time


def test_segments_on_the_gpu_are_read_once_for_all_layers_and_again_when_they_have_changed(cuda):
    q, k, v = fused(43)
    whole, _ = attention.attention_varlen(q, k, v, table([(0, 3, 0, 0), (3, 40, 0, 1)]), table([0, 3]))
    *caches, block_table = paged(k, v, [3, 40])
    segments = table([(0, 1, 2, 0), (1, 1, 33, 1)])
    for _ in range(3):
        assert same(gpu.attention_paged(q[[2, 36]], *caches, segments, block_table), whole[[2, 36]])
    assert cuda.reads == 1
    segments[0, 2], segments[1, 2] = 1, 38
    assert same(gpu.attention_paged(q[[1, 41]], *caches, segments, block_table), whole[[1, 41]])
    assert cuda.reads == 2
    segments[1, 2] = 64
    with pytest.raises(ValueError, match="check the segment table"):
        gpu.attention_paged(q[[1, 41]], *caches, segments, block_table)


def test_segments_on_the_cpu_that_are_a_decode_step_are_uploaded_and_are_its_tiles(cuda, monkeypatch):
    q, k, v = fused(43)
    whole, _ = attention.attention_varlen(q, k, v, table([(0, 3, 0, 0), (3, 40, 0, 1)]), table([0, 3]))
    *caches, block_table = paged(k, v, [3, 40])
    bounds = []
    monkeypatch.setattr(attention_plan, "upload", lambda table, device: table.as_subclass(torch.Tensor))
    monkeypatch.setattr(attention, "decode_plan", lambda *args: bounds.append(args[1]) or decode_plan(*args))
    for rows, segments in (([2, 36], [(0, 1, 2, 0), (1, 1, 33, 1)]), ([0, 3, 4], [(0, 1, 0, 0), (1, 2, 0, 1)])):
        on_host = table(segments).as_subclass(OnHost)
        assert same(gpu.attention_paged(q[rows], *caches, on_host, block_table), whole[rows])
    assert bounds == [34] and not cuda.reads  # the second is none


@pytest.mark.parametrize("rows, segments", [
    ([0, 1, *range(3, 36)], [(0, 2, 0, 0), (2, 33, 0, 1)]),
    ([7, 2], [(1, 1, 2, 0), (0, 1, 4, 1)]),  # as many segments as rows, in another order
    ([3, 4], [(0, 0, 0, 0), (0, 2, 0, 1)]),
])
def test_segments_on_the_gpu_that_are_no_decode_step_are_cut_on_the_host(cuda, rows, segments):
    q, k, v = fused(43)
    whole, _ = attention.attention_varlen(q, k, v, table([(0, 3, 0, 0), (3, 40, 0, 1)]), table([0, 3]))
    *caches, block_table = paged(k, v, [3, 40])
    assert same(gpu.attention_paged(q[rows], *caches, table(segments), block_table), whole[rows])


def test_a_decode_step_is_captured_without_a_look_at_its_segments_and_nothing_else_is(cuda):
    q, k, v = fused(43)
    *caches, block_table = paged(k, v, [3, 40])
    segments = table([(0, 1, 2, 0), (1, 1, 33, 1)])
    eager = gpu.attention_paged(q[[2, 36]], *caches, segments, block_table)
    cuda.capturing, cuda.reads = True, 0
    assert same(gpu.attention_paged(q[[2, 36]], *caches, segments, block_table), eager) and not cuda.reads
    with pytest.raises(ValueError, match="2 segments for 3 query rows while a graph is captured.*decode steps alone"):
        gpu.attention_paged(q[:3], *caches, segments, block_table)


def test_nothing_to_do_gives_an_empty_result():
    q, k, v = fused(3)
    *caches, block_table = paged(k, v, [3])
    assert attention.attention_paged(q[:0], *caches, table([]).reshape(0, 4), block_table).shape == (0, G * GROUP, E)
    assert not attention.attention_varlen(q, k, v, table([(0, 0, 0, 0)]), table([0]))[0].any()


def beside(x):
    """As large as x, two bytes behind an aligned address."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape)


@pytest.mark.parametrize("broken, message", [
    (lambda q, k, v: (q.double(), k, v), "q torch.float64"),
    (lambda q, k, v: (q, k.float(), v.float()), "k torch.float32"),
    (lambda q, k, v: (q, k, v[:, :1]), "expected the same shape"),
    (lambda q, k, v: (q[:, :7], k, v), "H a multiple of G"),
    (lambda q, k, v: (q[..., :32], k[..., :32].contiguous(), v[..., :32].contiguous()), r"E one of \(64, 128\)"),
    (lambda q, k, v: (q[:2], k, v), "check the segment table"),
    (lambda q, k, v: (q, beside(k), beside(v)), "multiple of 16 bytes"),
])
def test_operands_that_the_kernels_cannot_take_are_refused_by_name(broken, message):
    with pytest.raises(ValueError, match=message):
        attention.attention_varlen(*broken(*fused(3)), table([(0, 3, 0, 0)]), table([0]))


def test_a_group_too_large_for_a_decode_tile_is_refused():
    q, k, v = torch.zeros(1, 17, E, dtype=torch.bfloat16), *torch.zeros(2, 1, 16, 1, E, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="17 query heads per kv head, expected at most 16"):
        attention.attention_paged(q, k, v, decode_plan(table([(0, 1, 0, 0)]), 16), table([[0]]))


def test_pages_too_large_for_the_kernels_division_are_refused():
    q, cache = torch.zeros(1, 1, E, dtype=torch.bfloat16), torch.zeros(1, 1 << 15, 1, E, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="smaller pages"):
        attention.attention_paged(q, cache, cache, table([(0, 1, 0, 0)]), table([[0, 0]]))


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 48, 600, 1023, 4096, 32768])
def test_the_kernels_division_by_the_page_size_is_exact(page_size):
    most = attention.MOST_PAGED // page_size
    multiples = np.arange(0, most, max(page_size, most // 10000 // page_size * page_size))
    position = np.unique(np.concatenate([multiples, multiples - 1, multiples + 1, [most - 1]]))
    position = position[(position >= 0) & (position < most)].astype(np.uint64)
    magic = np.uint64(attention.page_magic(page_size) % (1 << 32))
    assert np.array_equal((2 * position + 1) * magic >> np.uint64(32), position // np.uint64(page_size))
