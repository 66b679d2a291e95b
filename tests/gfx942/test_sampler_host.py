"""The GPU's sampler and scan on host fibers: the sets and tokens of the CPU's sampler, the sums of torch's scan."""

import numpy as np
import pytest
import torch

from rlk.errors import CheckFailed
from rlk.ops import cumulative_sum, gpu_sampler, sampler
from rlk.ops.logprob import ScoreRule, score_logits
from rlk.rollout.engine import SamplingParams
from tests.gfx942.hip_runs import BAD_SHAPE, ORDERS, WAVES, HostFibers, LaunchError
from tests.gfx942.sampler_runs import keys, on_fibers, same_sums, sampling_case, scan_rows, torch_scan

BUILDS = [(wave, order, seed) for wave in WAVES for order, seed in ((ORDERS[0], 0), (ORDERS[1], 7))]
NUCLEI = [
    {"top_p": 0.95}, {"top_p": 0.5}, {"top_p": 1e-6}, {"top_p": 0.999999}, {"top_k": 1}, {"top_k": 50},
    {"top_k": 100_000, "top_p": 0.3}, {"top_k": 20, "top_p": 0.5}, {"min_p": 0.05}, {"min_p": 1.0},
    {"min_p": 0.01, "top_k": 200, "top_p": 0.9},
]
SHAPES = [(9000, 8999), (4099, 4099), (300, 256)]  # columns, valid ids: rows at no multiple of 16 bytes among them


@pytest.fixture(params=BUILDS, ids=lambda build: f"wave{build[0]}-{build[1]}")
def fibers(request, monkeypatch):
    on_fibers(monkeypatch, build := HostFibers(*request.param))
    return build


def check_draw(logits, params, valid):
    """Both backends' tokens and sets."""
    rows = keys(len(logits))
    ours, cpu = (backend(logits, params, *rows, valid) for backend in (gpu_sampler.draw, sampler.draw_cpu))
    assert torch.equal(ours[0], cpu[0])
    assert (ours[1] is None) == (cpu[1] is None) == params.full_vocabulary
    if cpu[1] is not None:
        assert torch.equal(ours[1][0], cpu[1][0]) and torch.equal(ours[1][1], cpu[1][1])


@pytest.mark.parametrize("nucleus", NUCLEI, ids=str)
def test_sets_and_tokens_are_those_of_the_cpu(fibers, nucleus):
    for number, (columns, valid) in enumerate(SHAPES):
        for temperature, scale in ((0.2, 3.0), (0.7, 3.0), (1.0, 0.1), (1.8, 20.0)):
            check_draw(sampling_case(3, columns, number, scale),
                       SamplingParams(**nucleus, temperature=temperature, seed=1 << 62), valid)


@pytest.mark.parametrize("params", [SamplingParams(seed=3), SamplingParams(temperature=0.2), SamplingParams(
    temperature=0.0, top_p=0.5)], ids=("whole", "cold", "greedy"))
def test_tokens_of_the_whole_vocabulary_are_those_of_the_cpu(fibers, params):
    for number, (columns, valid) in enumerate(SHAPES):
        check_draw(sampling_case(3, columns, number), params, valid)


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9), SamplingParams(top_k=3), SamplingParams(min_p=0.1),
                                    SamplingParams(), SamplingParams(temperature=0.0)])
def test_a_row_that_cannot_be_sampled_draws_nothing_and_leaves_the_others(fibers, params):
    logits = sampling_case(5, 4500, 1)
    logits[1, 3], logits[2, 4499], logits[3] = torch.nan, torch.inf, -torch.inf
    assert (gpu_sampler.draw(logits, params, *keys(5), 4500)[0] < 0).tolist() == [False, True, True, True, False]
    check_draw(logits, params, 4500)


def test_flat_logits_and_equal_zeros_are_cut_by_id(fibers):
    for params in (SamplingParams(top_p=0.5), SamplingParams(top_k=7), SamplingParams(top_k=5000, top_p=0.25)):
        check_draw(torch.zeros(2, 8192), params, 8192)
        signed = torch.zeros(1, 4100)
        signed[0, ::2] = -1e-45  # a -0.0 after the temperature
        check_draw(signed, SamplingParams(top_k=params.top_k, top_p=params.top_p, temperature=8.0), 4100)


def test_a_row_does_not_depend_on_its_neighbours(fibers):
    logits, (uids, positions) = sampling_case(4, 4500, 3), keys(4)
    params = SamplingParams(top_p=0.9, top_k=300, temperature=0.7)
    tokens, (offsets, ids) = gpu_sampler.draw(logits, params, uids, positions, 4500)
    for row in range(4):
        one = slice(row, row + 1)
        token, (_, own) = gpu_sampler.draw(logits[one], params, uids[one], positions[one], 4500)
        assert token == tokens[one] and torch.equal(own, ids[offsets[row]:offsets[row + 1]])


def test_the_limit_of_top_p_is_where_the_comparison_turns():
    for top_p in (1e-6, 0.3, 0.5, 0.95, 0.999999, float(np.nextafter(np.float32(1), np.float32(0)))):
        limit, drop_up_to = gpu_sampler.drop_limit(top_p), np.float32(1) - np.float32(top_p)
        assert np.float32(limit * 2.0**-62) <= drop_up_to < np.float32((limit + 1) * 2.0**-62)
    assert gpu_sampler.drop_limit(1.0) == gpu_sampler.drop_limit(1 - 1e-12) == 0


def test_wrong_arguments_are_refused(fibers):
    uids, positions = keys(2)
    for logits, valid, rows in ((torch.zeros(2, 8, dtype=torch.float64), 8, uids), (torch.zeros(2, 8), 9, uids),
                                (torch.zeros(2, 8), 0, uids), (torch.zeros(2, 8), 8, uids.int())):
        with pytest.raises(ValueError, match="expected"):
            gpu_sampler.draw(logits, SamplingParams(), rows, positions, valid)
    with pytest.raises(LaunchError) as caught:
        fibers.call("sampler_select", None, 1, 300_000, 300_000, None, 0, None, None, None, None)
    assert caught.value.code == BAD_SHAPE
    tokens, support = gpu_sampler.draw(torch.zeros(0, 8), SamplingParams(top_p=0.5), uids[:0], positions[:0], 8)
    assert tokens.numel() == 0 and support[0].tolist() == [0] and support[1].numel() == 0


# ---- the sampler of graphs ----


def make_sampler(params, steps=4, columns=4500, valid=4400, words=4096):
    return gpu_sampler.GpuSampler(3, columns, valid, params, steps=steps, log_words=words, device=torch.device("cpu"))


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9, seed=4), SamplingParams(min_p=1e-9, temperature=1.8)],
                         ids=("as ids", "as bits"))
def test_the_log_gives_back_every_step(fibers, params):
    sampler_of_graph, (uids, positions) = make_sampler(params), keys(3)
    expected = []
    for step in range(3):
        logits = sampling_case(3, 4500, step, 3.0 if params.top_p < 1 else 0.3)
        tokens, logprobs = sampler_of_graph.step(logits, uids, positions + step)
        drawn, support = sampler.draw_cpu(logits, params, uids, positions + step, 4400)
        scores = score_logits(logits, drawn, ScoreRule(params.temperature, 4400, support))[0]
        assert torch.equal(tokens, drawn) and logprobs.numpy().tobytes() == scores.numpy().tobytes()
        expected.append((drawn, scores, [ids.tolist() for ids in support[1].split(support[0].diff().tolist())]))
    found = sampler_of_graph.read()
    for step, (tokens, scores, sets) in enumerate(expected):
        assert found.tokens[step].tolist() == tokens.tolist()
        assert found.logprobs[step].tobytes() == scores.numpy().tobytes()
        assert [ids.tolist() for ids in found.sets[step]] == sets
        assert all(ids.dtype == np.int32 for ids in found.sets[step])
    assert sampler_of_graph.steps_left() == 1
    sampler_of_graph.reset()
    assert sampler_of_graph.steps_left() == 4 and sampler_of_graph.read().sets == []


def test_rows_may_differ_in_their_nuclei(fibers):
    each = [SamplingParams(top_p=0.9), SamplingParams(top_k=40, seed=9), SamplingParams(min_p=0.1, top_k=3, top_p=0.5)]
    sampler_of_graph, (uids, positions) = make_sampler(each), keys(3)
    logits = sampling_case(3, 4500, 8)
    tokens, _ = sampler_of_graph.step(logits, uids, positions)
    sets = sampler_of_graph.read().sets[0]
    for row, params in enumerate(each):
        one = slice(row, row + 1)
        drawn, (_, ids) = sampler.draw_cpu(logits[one].contiguous(), params, uids[one], positions[one], 4400)
        assert tokens[row] == drawn and sets[row].tolist() == ids.tolist()
    sampler_of_graph.set_params([SamplingParams(top_p=0.3)] * 3)
    sampler_of_graph.step(logits, uids, positions)
    assert [len(ids) for ids in sampler_of_graph.read().sets[1]] != [len(ids) for ids in sets]
    with pytest.raises(ValueError, match="make another sampler"):
        sampler_of_graph.set_params([SamplingParams(top_p=0.3, temperature=0.5)] * 3)


def test_a_log_that_is_too_small_is_found_out(fibers):
    narrow, (uids, positions) = make_sampler(SamplingParams(min_p=1e-9), words=500), keys(3)
    assert narrow.steps_left() == 1
    for _ in range(2):
        narrow.step(sampling_case(3, 4500, 0, 0.3), uids, positions)
    with pytest.raises(CheckFailed, match="2 steps took"):
        narrow.read()
    short = make_sampler(SamplingParams(top_k=2), steps=1)
    for _ in range(3):
        short.step(sampling_case(3, 4500, 0), uids, positions)
    with pytest.raises(CheckFailed, match="holds 1 steps"):
        short.read()


def test_a_bad_row_is_named_when_the_log_is_read(fibers):
    sampler_of_graph, (uids, positions) = make_sampler(SamplingParams(top_p=0.9)), keys(3)
    logits = sampling_case(3, 4500, 0)
    sampler_of_graph.step(logits, uids, positions)
    logits[1, 9] = torch.nan
    sampler_of_graph.step(logits, uids, positions)
    with pytest.raises(CheckFailed, match="row 1 at step 1"):
        sampler_of_graph.read()


# ---- the scan ----


@pytest.mark.parametrize("columns", [1, 2, 1023, 1024, 1025, 5000])
def test_the_scan_makes_torchs_additions(fibers, columns):
    for name, x in scan_rows(3, columns).items():
        ours = cumulative_sum.cumulative_sum_tiled(torch.from_numpy(x)).numpy()
        assert same_sums(ours, torch_scan(x)), name


def test_another_width_of_torchs_scan_would_be_seen(fibers):
    x = scan_rows(3, 5000)["uniform"]
    ours = cumulative_sum.cumulative_sum_tiled(torch.from_numpy(x)).numpy()
    assert not same_sums(ours, torch_scan(x, lanes=256))
    np.testing.assert_allclose(ours, x.astype(np.float64).cumsum(1), rtol=1e-6)


def test_only_shapes_with_a_known_order_are_tiled():
    taken = torch.zeros(8, 5000)
    assert [rows for rows in range(1, 9) if cumulative_sum.guarded(taken[:rows])] == [2, 3, 4, 5, 6, 7]
    for other in (taken[:4].double(), taken[:4, :4095].contiguous(), taken[:4].t(), taken[0], taken[::2]):
        assert not cumulative_sum.guarded(other)
    assert cumulative_sum.guarded(taken[:4, :4096].contiguous())
