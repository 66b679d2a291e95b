"""The sampler on this GPU: the sets and tokens of the CPU's, the log-probs of the scorer, eager and in graphs."""

import dataclasses

import pytest
import torch

from rlk.errors import CheckFailed
from rlk.ops import gpu_sampler, sampler
from rlk.ops.logprob import ScoreRule, score_logits
from rlk.ops.registry import registry
from rlk.rollout.engine import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")
COLUMNS, VALID = 151_936, 151_669
TEMPERATURES = (0.2, 0.7, 1.0, 1.8)
NUCLEI = [{"top_p": 0.95}, {"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.999999}, {"top_k": 1}, {"top_k": 50},
          {"top_k": 20, "top_p": 0.5}, {"top_k": 1_000_000, "top_p": 0.3}, {"min_p": 0.05}, {"min_p": 1.0},
          {"min_p": 0.001, "top_k": 2000, "top_p": 0.9}]
KINDS = {"whole": SamplingParams(seed=8), "greedy": SamplingParams(temperature=0.0),
         "nucleus": SamplingParams(top_p=0.95, temperature=0.7, seed=8)}


def make_logits(rows, seed=0, columns=COLUMNS):
    """Peaked, flat, with ties and with holes, by turns; on the CPU."""
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    logits[::4] *= 4
    logits[2::4] = (logits[2::4] * 8).round() / 4
    logits[3::4, ::3] = -torch.inf
    return logits


def keys(rows, device="cpu"):
    return torch.arange(rows, device=device) + (3 << 40), torch.arange(rows, device=device) * 5


def drawn_by_both(logits, params, valid):
    """((tokens, support) of the GPU, of the CPU), on the CPU."""
    tokens, support = gpu_sampler.draw(logits.cuda(), params, *keys(len(logits), "cuda"), valid)
    gpu = tokens.cpu(), None if support is None else tuple(part.cpu() for part in support)
    return gpu, sampler.draw_cpu(logits, params, *keys(len(logits)), valid)


def same(drawn, other):
    if (drawn[1] is None) != (other[1] is None) or not torch.equal(drawn[0], other[0]):
        return False
    return drawn[1] is None or all(torch.equal(a, b) for a, b in zip(drawn[1], other[1], strict=True))


def native_sets(logits, params):
    """Which ids the native sampler keeps, bool [B, V]."""
    registry.set_mode("native")
    try:
        return sampler._retain(logits / params.temperature, params).isfinite()
    finally:
        registry.set_mode("consistency")


@pytest.mark.parametrize("nucleus", NUCLEI, ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_sets_and_tokens_are_those_of_the_cpu(temperature, nucleus):
    params = SamplingParams(**nucleus, temperature=temperature, seed=77)
    assert same(*drawn_by_both(make_logits(5), params, VALID))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("ids, dropped", [(4, 1), (4, 2), (4, 3), (4096, 1), (4096, 1000), (65_536, 40_000),
                                          (65_536, 65_535)])
def test_top_p_drops_up_to_and_with_the_sum_that_meets_its_limit(ids, dropped, temperature):
    """Of 2^k equal probabilities every sum is exact: at top_p = 1 - dropped / 2^k that many fall, a step above it one
    fewer. Here, on the CPU, and in the native sampler."""
    there = torch.arange(ids) * 2 + 1  # the others have no probability
    logits = torch.full((3, COLUMNS), -torch.inf)
    logits[:, there] = torch.tensor([[0.0], [3.0], [-7.0]])
    for step, fall in ((-2.0**-24, dropped), (0.0, dropped), (2.0**-24, dropped - 1)):
        params = SamplingParams(top_p=1 - dropped / ids + step, temperature=temperature, seed=5)
        gpu, cpu = drawn_by_both(logits, params, VALID)
        assert same(gpu, cpu)
        native = native_sets(logits.cuda(), params).cpu()
        for row, kept in enumerate(gpu[1][1].split(gpu[1][0].diff().tolist())):
            assert torch.equal(kept.long(), there[fall:]) and torch.equal(native[row].nonzero()[:, 0], there[fall:])


@pytest.mark.parametrize("columns, valid", [(COLUMNS, COLUMNS), (152_064, 152_064), (32_000, 31_999), (4097, 4097),
                                            (1001, 999), (5, 3), (1, 1)])
def test_any_vocabulary_is_sampled_as_on_the_cpu(columns, valid):
    for params in (SamplingParams(top_p=0.9), SamplingParams(top_k=7, top_p=0.9), *KINDS.values()):
        assert same(*drawn_by_both(make_logits(4, 1, columns)[:3], params, valid))


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.5), SamplingParams(top_k=9), SamplingParams(),
                                    SamplingParams(temperature=0.0)])
def test_flat_rows_are_cut_by_id_and_bad_rows_draw_nothing(params):
    logits = make_logits(6)
    logits[1] = 0
    logits[2, VALID - 1], logits[3, 5], logits[4] = torch.nan, torch.inf, -torch.inf
    logits[5, VALID:] = torch.nan  # ids that do not exist
    (tokens, support), cpu = drawn_by_both(logits, params, VALID)
    assert (tokens < 0).tolist() == [False, False, True, True, True, False]
    assert same((tokens, support), cpu)


@pytest.mark.parametrize("params", [*KINDS.values(), SamplingParams(top_k=300, top_p=0.9)])
def test_a_row_does_not_depend_on_the_batch(params):
    logits, (uids, positions) = make_logits(64).cuda(), keys(64, "cuda")
    tokens, support = gpu_sampler.draw(logits, params, uids, positions, VALID)
    for rows in (slice(0, 1), slice(5, 12), slice(31, 64)):
        part, own = gpu_sampler.draw(logits[rows], params, uids[rows], positions[rows], VALID)
        assert torch.equal(part, tokens[rows])
        if own is not None:
            offsets, ids = support
            assert torch.equal(own[1], ids[offsets[rows.start]:offsets[rows.stop]])


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_the_operator_is_served_and_scored(params):
    registry.set_mode("consistency")
    logits = make_logits(5).cuda()
    result = sampler.sample(logits, params, *keys(5, "cuda"), VALID)
    tokens, support = sampler.draw_cpu(logits.cpu(), params, *keys(5), VALID)
    assert torch.equal(result.tokens.cpu(), tokens)
    exact = torch.full(logits.shape, -torch.inf, dtype=torch.float64)
    for row in range(5):
        kept = torch.arange(VALID) if support is None else support[1][support[0][row]:support[0][row + 1]].long()
        exact[row, kept] = logits.cpu()[row, kept].double() / params.score_temperature
    exact = exact.log_softmax(1)[torch.arange(5), tokens]
    torch.testing.assert_close(result.logprobs.cpu().double(), exact, atol=2e-5, rtol=1e-5)


def test_bad_rows_are_named_by_sample():
    logits = make_logits(3).cuda()
    logits[1, 7] = torch.nan
    with pytest.raises(CheckFailed, match="row 1"):
        sampler.sample(logits, KINDS["nucleus"], *keys(3, "cuda"), VALID)


# ---- in graphs ----


def check_steps(found, inputs, params):
    """The log against eager draws and the scorer, byte for byte."""
    for step, (logits, uids, positions) in enumerate(inputs):
        tokens, support = gpu_sampler.draw(logits, params, uids, positions, VALID)
        scores = score_logits(logits, tokens, ScoreRule(params.score_temperature, VALID, support))[0]
        assert found.tokens[step].tolist() == tokens.tolist()
        assert found.logprobs[step].tobytes() == scores.cpu().numpy().tobytes()
        assert (found.sets is None) == (support is None)
        if support is not None:
            own = support[1].cpu().split(support[0].diff().tolist())
            assert [ids.tolist() for ids in found.sets[step]] == [ids.tolist() for ids in own]


@pytest.mark.parametrize("params", [*KINDS.values(), SamplingParams(top_k=40, top_p=0.8), SamplingParams(min_p=1e-6)],
                         ids=[*KINDS, "top-k", "min-p"])
def test_a_replayed_graph_gives_the_bytes_of_eager_draws(params):
    rows, steps = 8, 6
    logits, (uids, positions) = make_logits(rows).cuda(), keys(rows, "cuda")
    graph_sampler = gpu_sampler.GpuSampler(rows, COLUMNS, VALID, params, steps=steps, device=logits.device,
                                           log_words=steps * rows * (COLUMNS // 32))
    for tensor in (graph_sampler._work.states, graph_sampler._work.candidates, graph_sampler._values_N,
                   graph_sampler._ids_N, graph_sampler._masks):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN and wild numbers, where a kernel reads before it writes
    graph_sampler.step(logits, uids, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_sampler.step(logits, uids, positions)
    graph_sampler.reset()
    inputs = []
    for step in range(steps):
        logits.copy_(make_logits(rows, step + 10))
        positions += 1
        graph.replay()
        inputs.append((logits.clone(), uids.clone(), positions.clone()))
    assert graph_sampler.steps_left() == 0
    check_steps(graph_sampler.read(), inputs, params)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_rows_of_one_graph_may_differ_and_change(temperature):
    each = [SamplingParams(top_p=0.5), SamplingParams(top_k=40, seed=9), SamplingParams(min_p=0.1, top_p=0.9)]
    each = [dataclasses.replace(params, temperature=temperature) for params in each]
    logits, (uids, positions) = make_logits(3).cuda(), keys(3, "cuda")
    graph_sampler = gpu_sampler.GpuSampler(3, COLUMNS, VALID, each, steps=4, log_words=1 << 20, device=logits.device)
    graph_sampler.step(logits, uids, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_sampler.step(logits, uids, positions)
    graph_sampler.reset()
    for rules in (each, each[::-1]):
        graph_sampler.set_params(rules)
        graph.replay()
    found = graph_sampler.read()
    for step, rules in enumerate((each, each[::-1])):
        for row, params in enumerate(rules):
            one = slice(row, row + 1)
            token, (_, ids) = gpu_sampler.draw(logits[one], params, uids[one], positions[one], VALID)
            assert found.tokens[step, row] == int(token) and found.sets[step][row].tolist() == ids.tolist()


def test_runs_repeat_their_bytes():
    logits, (uids, positions) = make_logits(8).cuda(), keys(8, "cuda")
    params = SamplingParams(top_k=5000, top_p=0.95, min_p=1e-5)
    first = gpu_sampler.draw(logits, params, uids, positions, VALID)
    for _ in range(50):
        assert same(gpu_sampler.draw(logits, params, uids, positions, VALID), first)
