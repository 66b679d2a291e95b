"""Log-prob: one value, whoever computes it. Bits are compared as bytes; values against float64."""

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.collectives import LocalCommunicator
from rlk.errors import CheckFailed
from rlk.ops.gemm import gemm_dw_cpu, linear_fp32, linear_fp32_cpu
from rlk.ops.logprob import ScoreRule, chunk_rows, gradient_rows, score, score_logits
from rlk.ops.registry import registry
from rlk.ops.sampler import sample
from rlk.rollout.engine import SamplingParams
from tests.thread_ranks import on_threads

LOCAL = LocalCommunicator()
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.8]),
    top_p=st.sampled_from([1e-6, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 20]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**63 - 1),
)


def raw(*tensors):
    return [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def problem(seed=0, tokens=7, hidden=32, vocab=256, dtype=torch.float32):
    """Hidden states and an LM head whose logits are as peaked as a model's."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(tokens, hidden, generator=generator).to(dtype)
    head_VD = (torch.randn(vocab, hidden, generator=generator) * 0.5).to(dtype)
    return hidden_TD, head_VD


def draw(hidden_TD, head_VD, params, valid_vocab):
    """Sampled tokens with the rule that scores them again."""
    index = torch.arange(hidden_TD.shape[0])
    result = sample(linear_fp32(hidden_TD, head_VD), params, index + 100, index, valid_vocab)
    support = None if result.support_ids is None else (result.support_offsets, result.support_ids)
    return result, ScoreRule(params.score_temperature, valid_vocab, support)


def rows_of(rule, start, stop):
    """The rule for rows start..stop-1 alone."""
    if rule.support is None:
        return rule
    offsets, ids = rule.support
    part = ids[int(offsets[start]):int(offsets[stop])]
    return ScoreRule(rule.temperature, rule.valid_vocab, (offsets[start:stop + 1] - offsets[start], part))


def exact(logits_TV, targets, rule):
    """(logprob, entropy) of the rule in logits' dtype by PyTorch's autograd: the oracle."""
    keep = torch.zeros(logits_TV.shape, dtype=torch.bool)
    for row in range(logits_TV.shape[0]):
        ids = slice(0, rule.valid_vocab)
        if rule.support is not None:
            offsets, retained = rule.support
            ids = retained[int(offsets[row]):int(offsets[row + 1])].long()
        keep[row, ids] = True
    logp = (logits_TV / rule.temperature).masked_fill(~keep, -torch.inf).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(~keep, 0)).sum(-1)
    return logp.gather(1, targets.unsqueeze(1))[:, 0], entropy


# ---- values ----


def test_temperature_divides_the_logits():
    """CASES 1."""
    logprob, _ = score_logits(padded([[2.0, 1.0, 0.0]]), torch.tensor([0]), ScoreRule(0.5, 3))
    assert logprob.item() == pytest.approx(-0.1429, abs=5e-5)


def test_nucleus_normalises_over_the_retained_set_on_both_sides():
    """CASES 2."""
    logits = padded([[0.5, 0.3, 0.15, 0.05]]).log()
    for uid in range(50):
        result = sample(logits, SamplingParams(top_p=0.6), torch.tensor([uid]), torch.tensor([0]), 4)
        assert result.support_ids.tolist() == [0, 1]
        if result.tokens.item() == 0:
            break
    rule = ScoreRule(1.0, 4, (result.support_offsets, result.support_ids))
    rescored, _ = score_logits(logits, torch.tensor([0]), rule)
    assert rescored.item() == pytest.approx(-0.4700, abs=5e-5)
    assert raw(rescored) == raw(result.logprobs)


def test_the_sums_follow_the_written_order_bit_by_bit():
    """Every tile's largest logit is 0, so that states merge by plain FP32 additions; exp comes from the backward."""
    rows, width = 300, 24
    logits = -3 * torch.randn(rows, 64 * width, generator=torch.Generator().manual_seed(1)).abs()
    logits[:, ::width] = 0
    zeros, e = torch.zeros(rows), torch.empty_like(logits)
    registry.call("tile_stats_backward", logits, logits, torch.zeros(rows, dtype=torch.int64), zeros, zeros - 1, 0,
                  64 * width, 1.0, e)
    e[:, 0] = 1  # the target's own entry is another formula
    lanes = np.zeros((rows, 64, 16), np.float32)
    for i, column in enumerate(np.moveaxis(e.numpy().reshape(rows, 64, width), 2, 0)):
        lanes[:, :, i % 16] += column
    for half in (8, 4, 2, 1):
        lanes[:, :, :half] += lanes[:, :, half:2 * half]
    total = np.zeros(rows, np.float32)
    for tile in range(64):
        total += lanes[:, tile, 0]
    logprob, _ = score_logits(logits, torch.zeros(rows, dtype=torch.int64), ScoreRule(1.0, 64 * width))
    assert raw(logprob) == raw(torch.from_numpy(-np.log(total.astype(np.float64)).astype(np.float32)))


def test_ids_beyond_the_tokenizer_do_not_exist():
    """CASES 4: a tokenizer of 151,669 tokens under 151,936 logits, the largest at 151,700."""
    logits = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(0))
    logits[:, 151_700] = 50.0
    absent = logits.clone()
    absent[:, 151_669:] = float("nan")
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)):
        one, other = (sample(x, params, torch.tensor([1, 2]), torch.tensor([5, 6]), 151_669) for x in (logits, absent))
        assert one.tokens.max() < 151_669
        assert raw(one.logprobs) == raw(other.logprobs)
    expected = logits[:, :151_669].double().log_softmax(-1)
    logprob, _ = score_logits(absent, torch.tensor([7, 9]), ScoreRule(1.0, 151_669))
    torch.testing.assert_close(logprob.double(), expected[[0, 1], [7, 9]], atol=2e-6, rtol=0)
    with pytest.raises(CheckFailed, match="row 1: target 151700 is not in the vocabulary's ids 0 to 151668"):
        score_logits(logits, torch.tensor([7, 151_700]), ScoreRule(1.0, 151_669))


def padded(rows):
    """FP32 logits padded to 64 columns with values that must not count."""
    logits = torch.tensor(rows)
    return torch.nn.functional.pad(logits, (0, 64 - logits.shape[1]), value=1e30)


@settings(max_examples=25, deadline=None)
@given(params=PARAMS, seed=st.integers(0, 1000), valid=st.integers(200, 256),
       mode=st.sampled_from(["consistency", "native"]))
def test_values_agree_with_float64(params, seed, valid, mode):
    hidden_TD, head_VD = problem(seed)
    result, rule = draw(hidden_TD, head_VD, params, valid)
    registry.set_mode(mode)
    try:
        logprob, entropy = score(hidden_TD, head_VD, result.tokens, rule, LOCAL)
    finally:
        registry.set_mode("consistency")
    expected = exact(hidden_TD.double() @ head_VD.double().T, result.tokens, rule)
    torch.testing.assert_close(logprob.double(), expected[0], atol=1e-4, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[1], atol=2e-4, rtol=1e-5)


# ---- bits ----


@settings(max_examples=40, deadline=None)
@given(params=PARAMS, seed=st.integers(0, 1000), tokens=st.integers(1, 9), chunk=st.integers(1, 10),
       valid=st.integers(200, 256), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_training_recomputes_the_sampled_bits(params, seed, tokens, chunk, valid, dtype):
    hidden_TD, head_VD = problem(seed, tokens, dtype=dtype)
    result, rule = draw(hidden_TD, head_VD, params, valid)
    rescored, entropy = score_logits(linear_fp32(hidden_TD, head_VD), result.tokens, rule)
    trained, trained_entropy = score(hidden_TD, head_VD, result.tokens, rule, LOCAL, chunk_tokens=chunk)
    assert raw(result.logprobs) == raw(rescored) == raw(trained)
    assert raw(entropy) == raw(trained_entropy)
    assert (result.logprobs <= 1e-6).all()


@settings(max_examples=20, deadline=None)
@given(params=PARAMS, seed=st.integers(0, 1000), row=st.integers(0, 6))
def test_neighbours_in_the_batch_do_not_change_bits(params, seed, row):
    hidden_TD, head_VD = problem(seed)
    result, rule = draw(hidden_TD, head_VD, params, 250)
    together = score(hidden_TD, head_VD, result.tokens, rule, LOCAL)
    alone = score(hidden_TD[row:row + 1], head_VD, result.tokens[row:row + 1], rows_of(rule, row, row + 1), LOCAL)
    assert raw(together[0][row], together[1][row]) == raw(*alone)


@settings(max_examples=12, deadline=None)
@given(params=PARAMS, seed=st.integers(0, 1000), world=st.sampled_from([2, 4, 8]),
       valid=st.sampled_from([100, 250, 256]))
def test_vocabulary_parallel_ranks_give_the_bits_of_one(params, seed, world, valid):
    hidden_TD, head_VD = problem(seed)
    result, rule = draw(hidden_TD, head_VD, params, valid)
    one = score(hidden_TD, head_VD, result.tokens, rule, LOCAL)
    for ours in on_threads(world, lambda comm: score(hidden_TD, head_VD.chunk(world)[comm.rank], result.tokens, rule,
                                                   comm, chunk_tokens=3)):
        assert raw(*ours) == raw(*one)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_threads_do_not_change_bits(top_p):
    hidden_TD, head_VD = problem(tokens=65, vocab=1024)
    seen = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        head = head_VD.clone().requires_grad_()
        head.main_grad = torch.zeros(head.shape)
        hidden = hidden_TD.clone().requires_grad_()
        result, rule = draw(hidden_TD, head_VD, SamplingParams(temperature=0.7, top_p=top_p), 1000)
        logprob, entropy = score(hidden, head, result.tokens, rule, LOCAL)
        logprob.sum().backward()
        seen.append(raw(result.tokens, result.logprobs, logprob.detach(), entropy, hidden.grad, head.main_grad))
    torch.set_num_threads(1)
    assert seen[0] == seen[1]


def test_a_negative_zero_logit_scores_as_zero_on_both_sides():
    target, rule = torch.tensor([0]), ScoreRule(1.0, 1)
    rollout = score_logits(torch.full((1, 64), -0.0), target, rule)
    training = score(torch.ones(1, 1), torch.full((64, 1), -0.0), target, rule, LOCAL)
    assert raw(*rollout) == raw(*training)


# ---- gradients ----


@settings(max_examples=15, deadline=None)
@given(params=PARAMS, seed=st.integers(0, 1000), chunk=st.integers(1, 8), world=st.sampled_from([1, 2]))
def test_gradients_agree_with_float64_autograd(params, seed, chunk, world):
    hidden_TD, head_VD = problem(seed)
    result, rule = draw(hidden_TD, head_VD, params, 250)
    upstream = torch.randn(7, generator=torch.Generator().manual_seed(seed))

    def gradients(comm):
        hidden, head = hidden_TD.clone().requires_grad_(), head_VD.chunk(world)[comm.rank].clone().requires_grad_()
        head.main_grad = torch.ones(head.shape)
        logprob, entropy = score(hidden, head, result.tokens, rule, comm, chunk)
        assert not entropy.requires_grad
        logprob.backward(upstream)
        assert head.grad is None
        return hidden.grad, head.main_grad - 1

    dhidden, dhead = zip(*(on_threads(world, gradients) if world > 1 else [gradients(LOCAL)]), strict=True)
    hidden, head = hidden_TD.double().requires_grad_(), head_VD.double().requires_grad_()
    exact(hidden @ head.T, result.tokens, rule)[0].backward(upstream.double())
    torch.testing.assert_close(sum(dhidden).double(), hidden.grad, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(dhead).double(), head.grad, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunking_does_not_change_a_bit_of_the_gradients(top_p, dtype):
    hidden_TD, head_VD = problem(dtype=dtype)
    result, rule = draw(hidden_TD, head_VD, SamplingParams(top_p=top_p), 250)
    seen = []
    for chunk in (1, 3, 1024):
        hidden, head = hidden_TD.clone().requires_grad_(), head_VD.clone().requires_grad_()
        head.main_grad = torch.zeros(head.shape)
        score(hidden, head, result.tokens, rule, LOCAL, chunk)[0].sum().backward()
        assert hidden.grad.dtype == dtype
        seen.append(raw(hidden.grad, head.main_grad))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_native_gradients_agree_with_the_contract_ones(top_p):
    hidden_TD, head_VD = problem()
    result, rule = draw(hidden_TD, head_VD, SamplingParams(temperature=0.7, top_p=top_p), 250)
    seen = []
    for mode in ("native", "consistency"):
        registry.set_mode(mode)
        hidden, head = hidden_TD.clone().requires_grad_(), head_VD.clone().requires_grad_()
        head.main_grad = torch.zeros(head.shape)
        score(hidden, head, result.tokens, rule, LOCAL, 3)[0].sum().backward()
        seen.append((hidden.grad, head.main_grad))
    torch.testing.assert_close(seen[0], seen[1], atol=1e-4, rtol=1e-4)


def test_a_frozen_head_needs_no_gradient_buffer():
    hidden_TD, head_VD = problem()
    hidden_TD.requires_grad_()
    score(hidden_TD, head_VD, torch.zeros(7, dtype=torch.int64), ScoreRule(1.0, 256), LOCAL)[0].sum().backward()
    assert hidden_TD.grad.abs().sum() > 0


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_one_chunks_logits_exist_at_a_time_and_a_weight_gradient_takes_several_chunks(top_p):
    hidden_TD, head_VD = problem(tokens=11, dtype=torch.bfloat16)
    result, rule = draw(hidden_TD, head_VD, SamplingParams(temperature=0.7, top_p=top_p), 250)
    hidden_TD.requires_grad_()
    head_VD.requires_grad_().main_grad = torch.zeros(head_VD.shape)
    made, rows = [], []

    def watched_logits(x_MK, w_NK):
        assert not [None for logits in made if logits() is not None]
        logits = linear_fp32_cpu(x_MK, w_NK)
        assert logits.numel() <= 2 * head_VD.shape[0]
        made.append(weakref.ref(logits))
        return logits

    def watched_gradient(dy_MN, x_MK, main_grad_NK):
        rows.append(dy_MN.shape[0])
        gemm_dw_cpu(dy_MN, x_MK, main_grad_NK)

    with registry.override("linear_fp32", watched_logits), registry.override("gemm_dw", watched_gradient):
        score(hidden_TD, head_VD, result.tokens, rule, LOCAL, chunk_tokens=2)[0].sum().backward()
    assert len(made) == (4 + 2 + 6 if rule.support is None else 6)  # parts of the vocabulary for 8 rows, for 3; chunks
    assert rows == [8, 2, 1]


@pytest.mark.parametrize(("chunk", "columns", "width", "rows"), [
    (1024, 151_936, 2, 4096), (1024, 151_936, 4, 2048), (1024, 262_144, 2, 3072), (1024, 2**21, 2, 1024)])
def test_a_gradients_rows_fill_the_room_of_two_chunks_below_2_gib(chunk, columns, width, rows):
    assert gradient_rows(chunk, columns, width) == rows


@pytest.mark.parametrize(("vocab", "rows"), [(500, 2048), (151_936, 2048), (262_144, 1792), (2**21, 255), (2**30, 1)])
def test_a_chunks_logits_stay_below_2_gib_on_one_rank(vocab, rows):
    assert chunk_rows(2048, vocab) == rows and (rows == 1 or 4 * rows * vocab < 2**31)


# ---- errors and edges ----


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_nothing_is_scored_or_exchanged_after_a_bad_target(top_p):
    """The check waits behind the first product; what relies on it waits as well."""
    hidden_TD, head_VD = problem()
    result, rule = draw(hidden_TD, head_VD, SamplingParams(temperature=0.7, top_p=top_p), 250)
    targets_T = result.tokens.clone()
    targets_T[-1] = 255  # is no id of the tokenizer, and so in no set

    class Exchange(LocalCommunicator):
        def all_reduce(self, *_):
            raise AssertionError("exchanged")

    def scored(*_):
        raise AssertionError("scored")

    with registry.override("support_score", scored), registry.override("merge_tiles", scored):
        for call in (lambda: score(hidden_TD, head_VD, targets_T, rule, Exchange(), 2),
                     lambda: score_logits(linear_fp32(hidden_TD, head_VD), targets_T, rule)):
            with pytest.raises(CheckFailed, match="row 6: target 255"):
                call()


def test_another_number_of_targets_is_refused():
    hidden_TD, head_VD = problem()
    with pytest.raises(ValueError, match="0 rows of hidden states and 7 targets"):
        score(hidden_TD[:0], head_VD, torch.full((7,), 999), ScoreRule(1.0, 256), LOCAL)


def test_a_target_outside_its_retained_set_names_row_and_ids():
    rule = ScoreRule(1.0, 64, (torch.tensor([0, 2, 4]), torch.tensor([1, 5, 0, 9], dtype=torch.int32)))
    with pytest.raises(CheckFailed, match=r"row 1: target 5 is not in its retained set of 2 ids \(0, 9\)"):
        score_logits(torch.zeros(2, 64), torch.tensor([5, 5]), rule)


def test_a_support_of_another_length_is_refused():
    rule = ScoreRule(1.0, 64, (torch.tensor([0, 1]), torch.tensor([1], dtype=torch.int32)))
    with pytest.raises(ValueError, match="1 rows over 1 .*, expected int32 ids under one row per target: 2"):
        score_logits(torch.zeros(2, 64), torch.tensor([1, 1]), rule)


def test_no_tokens_give_no_scores():
    hidden_TD, head_VD = problem(tokens=0)
    none = torch.zeros(0, dtype=torch.int64)
    for support in (None, (torch.tensor([0]), torch.zeros(0, dtype=torch.int32))):
        logprob, entropy = score(hidden_TD, head_VD, none, ScoreRule(1.0, 256, support), LOCAL)
        assert logprob.shape == entropy.shape == (0,)


@pytest.fixture(autouse=True)
def consistency_mode():
    registry.set_mode("consistency")
    torch.set_num_threads(1)
    yield
    registry.set_mode("consistency")
