"""The cumulative scan on this GPU: torch.cumsum's raw bits, on 10,000 rows of each kind."""

import pytest
import torch

from rlk.ops import cumulative_sum as scan
from rlk.ops import sampler
from rlk.ops.registry import registry
from rlk.rollout.engine import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")
COLUMNS = (4096, 32_000, 151_936, 152_064)
SIZES = [*scan.ROWS] * 10  # of the matrices that are cut from one draw
DRAWS = 10  # of each kind and width: 10,800 rows of each kind


@pytest.fixture(autouse=True)
def native_mode():
    registry.set_mode("native")
    yield
    registry.set_mode("consistency")


def calls(backend):
    return sum(row["calls"] for row in registry.readback()
               if (row["op"], row["backend"]) == ("cumulative_sum", backend))


def make(kind, rows, columns, generator):
    def normal(deviation):
        return torch.randn(rows, columns, generator=generator, device="cuda") * deviation

    if kind == "uniform":
        return torch.rand(rows, columns, generator=generator, device="cuda")
    if kind == "softmaxed":
        return normal(3).softmax(1)
    if kind == "sorted":
        return normal(2).softmax(1).sort(1).values
    if kind == "peaked":
        return (normal(1) * torch.rand(rows, 1, generator=generator, device="cuda") * 60).softmax(1)
    if kind == "denormal":
        return normal(1) * 1e-40
    if kind == "signed":
        return normal(1)
    bad = normal(1e38)  # overflows on the way
    places = torch.randint(columns, (rows, 3), generator=generator, device="cuda")
    return bad.scatter_(1, places, torch.tensor([torch.inf, -torch.inf, torch.nan], device="cuda").repeat(rows, 1))


KINDS = ("uniform", "softmaxed", "sorted", "peaked", "denormal", "signed", "infinite")


def differing(a, b):
    return (a.view(torch.int32) != b.view(torch.int32)).sum()


def unequal(a, b):
    return int(differing(a, b))


def test_this_torch_is_verified():
    assert scan.verified(torch.cuda.current_device())
    found = [probe for probe in registry.probes if probe["op"] == "cumulative_sum"]
    assert found and found[0]["equal"] and found[0]["unequal"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_random_rows_have_the_bits_of_torch(columns, kind):
    generator, wrong = torch.Generator("cuda").manual_seed(columns), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(DRAWS):
        for x in make(kind, sum(SIZES), columns, generator).split(SIZES):
            assert scan.guarded(x)
            wrong += differing(scan.cumulative_sum_tiled(x), torch.cumsum(x, 1))
    assert int(wrong) == 0


def test_the_comparison_catches_another_order():
    x = make("softmaxed", 7, 152_064, torch.Generator("cuda").manual_seed(0))
    backwards = x.flip(1).cumsum(1).flip(1)
    assert torch.allclose(x.cumsum(1)[:, -1], backwards[:, 0], rtol=1e-4)
    assert unequal(x.cumsum(1)[:, -1], backwards[:, 0]) > 0 and unequal(torch.zeros(4), -torch.zeros(4)) == 4


@pytest.mark.parametrize("columns", [*COLUMNS, 4095, 4097, 5000])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 64])
def test_every_batch_gets_torchs_bits_and_the_readback_says_from_where(rows, columns):
    for kind in KINDS:
        x = make(kind, rows, columns, torch.Generator("cuda").manual_seed(rows))
        before = calls("hip"), calls("torch")
        y = scan.cumulative_sum(x)
        if rows > 1:  # of one long row torch itself gives other bits from call to call: its blocks race for the prefix
            assert unequal(y, torch.cumsum(x, 1)) == 0, kind
        if kind == "softmaxed":
            torch.testing.assert_close(y.double(), x.double().cumsum(1), rtol=1e-4, atol=1e-6)
        tiled = rows in scan.ROWS and columns >= scan.LEAST_COLUMNS
        assert (calls("hip") - before[0], calls("torch") - before[1]) == (int(tiled), int(not tiled)), kind


def test_what_is_outside_the_guard_is_torchs():
    x = make("uniform", 4, 8192, torch.Generator("cuda").manual_seed(0))
    before = calls("hip")
    for other in (x[:, :4095].contiguous(), x.t().contiguous().t(), x.bfloat16()):
        assert torch.equal(scan.cumulative_sum(other), torch.cumsum(other, 1))
    assert calls("hip") == before


def test_a_graph_gives_the_bits_of_changing_inputs():
    generator = torch.Generator("cuda").manual_seed(3)
    x = make("sorted", 4, 151_936, generator)
    scan.cumulative_sum(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scan.cumulative_sum(x)
    for kind in KINDS:
        x.copy_(make(kind, 4, 151_936, generator))
        graph.replay()
        assert unequal(out, torch.cumsum(x, 1)) == 0


def test_the_native_samplers_sets_are_those_of_torchs_scan():
    logits = torch.randn(4, 151_936, generator=torch.Generator("cuda").manual_seed(1), device="cuda") * 3
    before = calls("hip")
    for top_p in (1e-6, 0.3, 0.95, 0.999):
        params = SamplingParams(top_p=top_p, temperature=0.7)
        kept = sampler._retain(logits / 0.7, params) > -torch.inf
        ascending, order = (logits / 0.7).sort(dim=-1, stable=True)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - torch.tensor(top_p)
        drop[:, -1] = False
        assert torch.equal(kept, torch.empty_like(drop).scatter_(-1, order, ~drop))
    assert calls("hip") == before + 4
