"""Every operator as the registry serves it on this GPU: right values, and bits that no batch, graph or memory changes.

What each kernel's configurations have to add is in the other files; operator_cases.py has the table.
"""

import pytest
import torch

from rlk.kernels import gemm, logprob, norm
from rlk.kernels.variants import architecture
from rlk.ops.registry import registry
from tests.gpu.operator_cases import CASES, ELSEWHERE, LENGTHS, TILES, draw, tile_stats_case
from tests.gpu.operator_checks import batches, poisoned_memory, same

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")
ROWS = sorted(LENGTHS)  # 0, one, an odd number, a decode step's, and what training brings


def of_case(case):
    return case.label or case.op


every_case = pytest.mark.parametrize("case", CASES, ids=of_case)


def test_every_operator_that_a_gpu_serves_has_a_case():
    served = {backend.op for backends in registry._backends.values() for backend in backends
              if "cuda" in backend.devices and backend.name not in ("reference", "torch")}
    assert served == {case.op for case in CASES} | set(ELSEWHERE)


# ---- the checks, each of which a control below makes fail ----


def wrong_values(case, args, monkeypatch) -> list[str]:
    """Results that are not those of float64, or not of all that the call allocated."""
    results = case.run(args)
    with poisoned_memory(monkeypatch):
        poisoned = case.run(args)
    changed = [f"result {i} holds what was in its memory before" for i, pair in enumerate(
        zip(results, poisoned, strict=True)) if not same(*pair)]
    return case.far(poisoned, args) + changed


def unequal_batches(case, args, rows) -> list[str]:
    """Batches of some of the rows whose bytes are not those that the rows have among all."""
    results, found = case.run(args), []
    for index in batches(rows, results[0].device):
        part, expected = case.batch(args, results, index)
        unequal = [i for i, (a, b) in enumerate(zip(case.run(part), expected, strict=True))
                   if case.gives[i] is not None and not same(a, b)]
        if unequal:
            found.append(f"results {unequal} of {len(index)} rows")
    return found


def unequal_replays(case, rows, monkeypatch) -> list[str]:
    """Replays, in poisoned memory and with other operands each time, whose bytes are not those of a plain call."""
    held = case.make(rows, 0, "cuda")
    case.run(held)  # compiles and uploads before the capture
    graph = torch.cuda.CUDAGraph()
    with poisoned_memory(monkeypatch), torch.cuda.graph(graph):
        results = case.call(held)
    found = []
    for seed in (20, 30, 0):
        for ours, theirs in zip(held, case.make(rows, seed, "cuda"), strict=True):
            if isinstance(ours, torch.Tensor) and ours.is_cuda:
                ours.copy_(theirs)
        expected = case.run(held)
        graph.replay()
        if not all(map(same, results, expected)):
            found.append(f"operands of seed {seed}")
    return found


@pytest.mark.parametrize("rows", [0, 1, 37])
@every_case
def test_the_table_s_operands_and_exact_results_fit_the_operators_of_the_cpu(case, rows, monkeypatch):
    args = case.make(rows, 1, "cpu")
    assert wrong_values(case, args, monkeypatch) == []
    assert case.roles is None or unequal_batches(case, args, rows) == []


@gpu
@pytest.mark.parametrize("rows", ROWS)
@every_case
def test_values_agree_with_float64_whatever_was_in_memory(case, rows, monkeypatch):
    assert wrong_values(case, case.make(rows, 1, "cuda"), monkeypatch) == []


@gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.roles is not None], ids=of_case)
def test_a_row_has_the_same_bits_alone_in_any_batch_and_at_any_position(case):
    assert unequal_batches(case, case.make(8192, 2, "cuda"), 8192) == []


@gpu
@pytest.mark.parametrize("rows", [1, 64, 1000])
@pytest.mark.parametrize("case", [case for case in CASES if case.captured], ids=of_case)
def test_a_graph_replays_the_bits_of_calls_with_changing_operands(case, rows, monkeypatch):
    assert unequal_replays(case, rows, monkeypatch) == []


# ---- controls ----


def case_of(op):
    return next(case for case in CASES if case.op == op)


@gpu
def test_a_sum_split_across_other_warps_for_few_rows_is_caught(monkeypatch):
    """tl.sum adds in an order that depends on the warps: one configuration has to serve every batch."""
    case = tile_stats_case(TILES * 2374)
    args = case.make(1000, 3, "cuda")
    assert unequal_batches(case, args, 1000) == []

    def fewer_warps(logits_TV, *rest):
        with monkeypatch.context() as patch:
            if len(logits_TV) < 1000:
                patch.setitem(logprob.CONFIGS[architecture()]["stats"], "num_warps", 1)
            return logprob.tile_stats(logits_TV, *rest)

    with registry.override(case.op, fewer_warps):
        assert case.far(case.run(args), args) == []
        assert len(unequal_batches(case, args, 1000)) == len(batches(1000, "cpu")) - 1  # all but the empty one


@gpu
def test_a_depth_split_for_few_rows_is_caught():
    case = case_of("linear_fp32")
    args = case.make(8192, 2, "cuda")

    def split(x_MK, w_NK):
        return gemm.linear(x_MK, w_NK, 2 if len(x_MK) <= 64 else 1, torch.float32)

    with registry.override(case.op, split):
        assert case.far(case.run(args), args) == []
        assert len(unequal_batches(case, args, 8192)) == sum(0 < len(index) <= 64 for index in batches(8192, "cpu"))


@gpu
def test_results_that_are_left_unwritten_or_stale_are_caught(monkeypatch):
    case = case_of("residual_add")

    def all_but_the_last_row(partial_TD, residual_TD):
        y_TD = torch.empty_like(residual_TD)
        y_TD[:-1] = norm.residual_add(partial_TD[:-1], residual_TD[:-1])
        return y_TD

    with registry.override(case.op, all_but_the_last_row):
        assert wrong_values(case, case.make(64, 1, "cuda"), monkeypatch)

    first = case.make(64, 0, "cuda")[1]

    def of_the_first_operands(partial_TD, residual_TD):
        return norm.residual_add(partial_TD, first if torch.cuda.is_current_stream_capturing() else residual_TD)

    with registry.override(case.op, of_the_first_operands):
        assert len(unequal_replays(case, 64, monkeypatch)) == 2  # the third has those operands again


@every_case
def test_a_value_beyond_rounding_is_caught(case):
    args = case.make(37, 1, "cpu")
    results = case.run(args)
    for i, (result, exact) in enumerate(zip(results, case.expected(args), strict=True)):
        if exact is None:
            continue
        values = result.view(-1)
        largest = values.abs().nan_to_num(0, 0, 0).argmax()
        kept = values[largest].clone()
        values[largest] = kept + 1 if result.dtype == torch.int64 else kept * 1.03 + 1
        assert len(case.far(results, args)) == 1, i
        values[largest] = kept


def test_the_byte_comparison_sees_signs_of_zero_and_payloads_of_nan():
    x = draw("cpu", 1, 4)
    zero, nan = torch.zeros(4), torch.full((4,), float("nan"))
    other = nan.clone()
    other.view(torch.int32)[2] += 1
    assert same(x, x.clone()) and same(nan, nan.clone())
    assert not same(zero, -zero) and not same(nan, other) and not same(x, x.float())
