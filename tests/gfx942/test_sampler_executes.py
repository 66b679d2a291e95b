"""The sampler's and the scan's gfx942 code objects, executed: the bytes of the host build, in both wave orders."""

import ctypes

import numpy as np
import pytest

from rlk.ops import gpu_sampler
from rlk.rollout.engine import SamplingParams
from tests.gfx942.hip_runs import ORDERS, HostFibers
from tests.gfx942.numerics import same_bytes
from tests.gfx942.sampler_runs import (
    SEGMENT,
    EmulatedSampler,
    emulated_sum,
    keys,
    same_sums,
    sampling_case,
    scan_rows,
    torch_scan,
)

COLUMNS, VALID, ROWS = 4404, 4401, 2  # two segments, the last with an odd end


@pytest.fixture(params=ORDERS)
def order(request):
    return request.param


class OnHost:
    """The same step through the launchers, on host fibers."""

    def __init__(self, logits, params):
        self.build, self.logits = HostFibers(64), logits
        size = ctypes.c_int64()
        self.build.call("sampler_sizes", ctypes.addressof(size), ctypes.addressof(ctypes.c_int64()))
        self.state_bytes = size.value
        self.states = np.zeros((ROWS, size.value), np.uint8)
        self.row_args = (logits, ROWS, COLUMNS, VALID, gpu_sampler.rules_of(params).view(np.uint8))

    def select(self, stages):
        candidates = np.zeros(ROWS * 2 * SEGMENT, np.uint64)
        self.build.call("sampler_select", *self.row_args, stages, self.states, candidates, None, None)

    def fill(self, made, *names):
        """`made`'s arrays with other contents, to be written."""
        self.made = {name: np.full_like(array, 7) for name, array in made.items()}
        return [self.made.get(name) for name in names]

    def draw(self, made, uids, positions):
        self.build.call("sampler_draw", *self.row_args, self.states, uids, positions,
                        *self.fill(made, "tokens", "index", "offsets", "ids", "values", "masks"), None)
        return self.made


def both(order, params, bad=False):
    logits = sampling_case(ROWS, COLUMNS, 5).numpy()
    if bad:
        logits[0, 4400] = np.nan
    host = OnHost(logits, params)
    return EmulatedSampler(order, logits, params, VALID, host.state_bytes), host


@pytest.mark.parametrize("params", [
    [SamplingParams(top_p=0.9, temperature=0.7, seed=1 << 63)] * ROWS,
    [SamplingParams(top_k=30), SamplingParams(top_k=300, top_p=0.6, min_p=1e-4)],
], ids=("top-p", "each its own"))
def test_sets_and_tokens_have_the_bytes_of_the_host_build(order, params):
    gfx942, host = both(order, params)
    stages = gpu_sampler._stages(params)
    gfx942.select(stages)
    host.select(stages)
    assert same_bytes(gfx942.states, host.states)
    rows = [key.numpy() for key in keys(ROWS)]
    got = gfx942.draw(*rows, sets=True)
    expected = host.draw(got, *rows)
    size = expected["offsets"][-1]
    for name in ("tokens", "index", "offsets", "masks"):
        assert same_bytes(got[name], expected[name]), name
    for name in ("ids", "values"):
        assert same_bytes(got[name][:size], expected[name][:size]), name
    bits = np.unpackbits(got["masks"].view(np.uint8), bitorder="little").reshape(ROWS, -1)
    for row in range(ROWS):
        own = got["ids"][got["offsets"][row]:got["offsets"][row + 1]]
        assert bits[row].nonzero()[0].tolist() == own.tolist()
        assert got["ids"][got["index"][row]] == got["tokens"][row]

    logprobs = np.array([-1.5, -0.0], np.float32)
    log = gfx942.record(logprobs, steps=2, words=400)
    counts = np.diff(got["offsets"])
    assert log["counts"].tolist() == [*counts, -7, -7] and log["tokens"].tolist() == [*got["tokens"], -7, -7]
    assert same_bytes(log["logprobs"][:2], logprobs)
    sizes = np.minimum(counts, -(-VALID // 32))
    assert log["cursors"].tolist() == [0, sizes.sum(), 0]
    masks = got["masks"].reshape(ROWS, -1)
    written = [masks[row, :size] if counts[row] > size else got["ids"].view(np.uint32)[got["offsets"][row]:][:size]
               for row, size in enumerate(sizes)]
    assert log["words"][:sizes.sum()].tolist() == np.concatenate(written).tolist()


def test_the_whole_vocabulary_and_greedy_have_the_bytes_of_the_host_build(order):
    gfx942, host = both(order, [SamplingParams(seed=5)] * ROWS)
    gfx942.select(0)
    host.select(0)
    rows = [key.numpy() for key in keys(ROWS)]
    got = gfx942.draw(*rows, sets=False)
    expected = host.draw(got, *rows)
    assert all(same_bytes(got[name], expected[name]) for name in got)
    assert same_bytes(got["values"], host.logits[np.arange(ROWS), got["tokens"]])

    gfx942, host = both(order, [SamplingParams(temperature=0.0)] * ROWS, bad=True)
    gfx942.select(0)
    greedy = gfx942.greedy()
    assert greedy["tokens"].tolist() == [-1, host.logits[1, :VALID].argmax()]
    assert greedy["values"].tolist() == [-np.inf, host.logits[1, :VALID].max()]


@pytest.mark.parametrize("columns", [2500, 1024, 3])
def test_the_scan_makes_torchs_additions(order, columns):
    for name, x in scan_rows(2, columns).items():
        assert same_sums(emulated_sum(order, x), torch_scan(x)), name
