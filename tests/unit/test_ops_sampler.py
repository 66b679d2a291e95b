"""The sampler: vLLM's nucleus, draws that follow the distribution, noise keyed by (seed, uid, position) alone."""

import ctypes
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.build import SOURCES
from rlk.errors import CheckFailed
from rlk.ops.registry import registry
from rlk.ops.sampler import philox4x32, philox_uniform, sample
from rlk.rollout.engine import SamplingParams

NUCLEUS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.8]),
    top_p=st.sampled_from([1e-6, 0.5, 0.95, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 20, 10_000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)
# Random123's known answers for philox4x32-10 (kat_vectors): counter, key, words
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def random_logits(seed, rows, vocab=256, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits, params, uids=None, positions=None, valid_vocab=None):
    index = torch.arange(logits.shape[0])
    return sample(logits, params, index if uids is None else uids, index if positions is None else positions,
                  valid_vocab or logits.shape[1])


def supports(result):
    return [ids.tolist() for ids in result.support_ids.split(result.support_offsets.diff().tolist())]


def native_nucleus(x, params):
    """vLLM's order in PyTorch for one row x = logit / temperature; None when it stands on a float tie."""
    close = 1e-5
    probs = x.softmax(-1)
    if params.min_p > 0:
        ratio = probs / probs.max()
        if params.min_p < 1 and ((ratio - params.min_p).abs() < close).any():
            return None
        x = x.masked_fill(x < x.max() if params.min_p == 1 else ratio < params.min_p, -torch.inf)
    ascending, order = x.sort(stable=True)
    if 0 < params.top_k < x.numel():
        ascending = ascending.masked_fill(ascending < ascending[-params.top_k], -torch.inf)
    if params.top_p < 1:
        cumulative = ascending.softmax(-1).cumsum(-1)
        threshold = 1 - torch.tensor(params.top_p)
        if ((cumulative[:-1] - threshold).abs() < min(close, threshold / 100)).any():
            return None
        drop = cumulative <= threshold
        drop[-1] = False
        ascending = ascending.masked_fill(drop, -torch.inf)
    return sorted(order[ascending > -torch.inf].tolist())


# ---- the retained set ----


@settings(max_examples=60, deadline=None)
@given(params=NUCLEUS.filter(lambda p: not p.full_vocabulary), seed=st.integers(0, 1000), valid=st.integers(150, 256),
       scale=st.sampled_from([0.1, 3.0, 10.0]))
def test_the_retained_set_is_the_native_one(params, seed, valid, scale):
    logits = random_logits(seed, 4, scale=scale)
    retained = supports(draw(logits, params, valid_vocab=valid))
    for row, ids in enumerate(retained):
        expected = native_nucleus(logits[row, :valid] * torch.tensor(1 / params.temperature), params)
        assert ids == expected or expected is None


def test_the_cumulative_sum_is_torchs():
    """The rule quotes torch.cumsum on a CPU: FP32 in, summed in double, rounded to FP32 at each step."""
    probs = random_logits(0, 1, vocab=5000).softmax(-1)[0].sort().values
    assert probs.cumsum(0).numpy().tobytes() == probs.double().cumsum(0).float().numpy().tobytes()


def test_ties_stay_under_top_k_and_fall_by_id_under_top_p():
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0, -0.0, -5.0]])
    assert supports(draw(logits, SamplingParams(top_k=2))) == [[0, 2, 3]]
    assert supports(draw(logits, SamplingParams(top_k=4))) == [[0, 1, 2, 3, 4]]  # 0.0 and -0.0 are one value
    assert supports(draw(torch.tensor([[0.0, -0.0, 0.0, -0.0]]), SamplingParams(top_p=0.5))) == [[2, 3]]


def test_the_largest_always_stays():
    assert supports(draw(random_logits(1, 3), SamplingParams(top_p=1e-6))) == [
        [i] for i in random_logits(1, 3).argmax(-1).tolist()]


def test_the_retained_set_has_no_cap():
    result = draw(torch.zeros(2, 4096), SamplingParams(top_p=0.999))
    assert result.support_offsets.diff().tolist() == [4092, 4092]


@settings(max_examples=30, deadline=None)
@given(params=NUCLEUS, seed=st.integers(0, 1000), mode=st.sampled_from(["consistency", "native"]))
def test_the_result_is_well_formed(params, seed, mode):
    registry.set_mode(mode)
    result = draw(random_logits(seed, 5), params, valid_vocab=200)
    assert (result.tokens.dtype, result.logprobs.dtype) == (torch.int64, torch.float32)
    assert (result.support_ids is None) == params.full_vocabulary
    assert 0 <= result.tokens.min() <= result.tokens.max() < 200
    if result.support_ids is not None:
        assert (result.support_offsets.dtype, result.support_ids.dtype) == (torch.int64, torch.int32)
        for token, ids in zip(result.tokens.tolist(), supports(result), strict=True):
            assert token in ids and ids == sorted(set(ids))


# ---- the draw ----


def chi_square(logits, params, draws=20_000):
    """Pearson's statistic in standard deviations above its mean, for one row drawn under many sample uids."""
    result = draw(logits.expand(draws, -1).contiguous(), params, positions=torch.arange(draws) % 7)
    counts = torch.bincount(result.tokens, minlength=logits.numel()).double()
    support = range(logits.numel()) if result.support_ids is None else supports(result)[0]
    x = torch.full((logits.numel(),), -torch.inf, dtype=torch.float64)
    x[list(support)] = logits[list(support)].double() / params.temperature
    expected = x.softmax(-1) * draws
    assert counts[expected == 0].sum() == 0
    used = expected > 0
    degrees = int(used.sum()) - 1
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    return float((statistic - degrees) / (2 * degrees) ** 0.5)


@pytest.mark.parametrize("mode", ["consistency", "native"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}, {"min_p": 0.2}])
def test_draws_follow_the_distribution(mode, options):
    registry.set_mode(mode)
    assert abs(chi_square(random_logits(3, 1, vocab=64, scale=1.0)[0], SamplingParams(**options, seed=11))) < 4


@settings(max_examples=20, deadline=None)
@given(params=NUCLEUS, seed=st.integers(0, 1000), picked=st.lists(st.integers(0, 7), min_size=1, max_size=12))
def test_a_draw_does_not_depend_on_the_batch(params, seed, picked):
    logits, index = random_logits(seed, 8), torch.tensor(picked)
    uids, positions = torch.arange(8) + (5 << 16), torch.arange(8) * 3
    whole, part = draw(logits, params, uids, positions), draw(logits[index], params, uids[index], positions[index])
    assert torch.equal(whole.tokens[index], part.tokens)
    assert whole.logprobs[index].numpy().tobytes() == part.logprobs.numpy().tobytes()


def test_a_draw_depends_on_seed_uid_and_position():
    logits = torch.zeros(1, 4096)
    ones = [torch.tensor([n]) for n in (1, 2, 1 << 40)]
    seen = {int(draw(logits, SamplingParams(seed=seed), uid, position).tokens)
            for seed in (0, 1, 1 << 40) for uid in ones for position in ones[:2]}
    assert len(seen) == 18


@settings(max_examples=20, deadline=None)
@given(params=NUCLEUS, seed=st.integers(0, 1000))
def test_both_backends_draw_the_same_tokens(params, seed):
    logits = random_logits(seed, 6)
    ours = draw(logits, params)
    registry.set_mode("native")
    native = draw(logits, params)
    registry.set_mode("consistency")
    if ours.support_ids is None or torch.equal(ours.support_ids, native.support_ids):  # apart on a float tie only
        assert torch.equal(ours.tokens, native.tokens)
        torch.testing.assert_close(ours.logprobs, native.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["consistency", "native"])
def test_greedy_takes_the_lowest_id_of_the_largest(mode):
    registry.set_mode(mode)
    logits = torch.full((2, 64), -1.0)
    logits[0, [9, 4]] = 2.0
    logits[1, :] = -0.0
    logits[1, 7] = 0.0
    result = draw(logits, SamplingParams(temperature=0.0, top_p=0.5, top_k=3))
    assert result.tokens.tolist() == [4, 0]
    assert result.support_ids is None
    torch.testing.assert_close(result.logprobs, logits.log_softmax(-1)[[0, 1], [4, 0]])


def test_a_set_of_one_has_log_prob_zero():
    result = draw(random_logits(2, 4), SamplingParams(top_k=1))
    assert result.logprobs.tolist() == [0.0] * 4
    assert torch.equal(result.tokens, random_logits(2, 4).argmax(-1))


@pytest.mark.parametrize("mode", ["consistency", "native"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1),
                                    SamplingParams(temperature=0.0)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_row_that_cannot_be_sampled_is_named(mode, params, bad):
    registry.set_mode(mode)
    logits = random_logits(0, 3)
    logits[1, slice(None) if bad is None else 3] = -torch.inf if bad is None else bad
    with pytest.raises(CheckFailed, match=r"row 1 \(sample uid 1, position 1\)"):
        draw(logits, params)


@pytest.mark.parametrize("mode", ["consistency", "native"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.999)])
def test_an_id_at_minus_infinity_is_never_drawn(mode, params):
    registry.set_mode(mode)
    logits = torch.zeros(500, 64)
    logits[:, ::2] = -torch.inf
    result = draw(logits, params)
    assert (result.tokens % 2 == 1).all() and result.logprobs.isfinite().all()


# ---- the noise ----


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, words, philox_header):
    counter, key, words = (np.array([int(w, 16) for w in text.split()], np.uint32) for text in (counter, key, words))
    assert philox4x32(counter[None], key)[0].tolist() == words.tolist()
    out = (ctypes.c_uint32 * 4)()
    philox_header.words((ctypes.c_uint32 * 4)(*counter.tolist()), *map(int, key), out)
    assert list(out) == words.tolist()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), uid=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31 - 1))
def test_header_and_python_give_one_uniform(philox_header, seed, uid, position):
    uniform = float(philox_uniform(seed, torch.tensor([uid]), torch.tensor([position])))
    assert uniform == philox_header.uniform(seed, uid, position)
    assert 0 <= uniform < 1


@pytest.fixture(scope="module")
def philox_header(tmp_path_factory):
    """hipkernels/philox.h alone, as a GPU build will include it."""
    folder = tmp_path_factory.mktemp("philox")
    (folder / "philox.cpp").write_text("""
        #include "philox.h"
        extern "C" void words(const uint32_t* c, uint32_t k0, uint32_t k1, uint32_t* out) {
          const rlk::Words4 r = rlk::philox4x32({{c[0], c[1], c[2], c[3]}}, k0, k1);
          for (int i = 0; i < 4; ++i) out[i] = r.w[i];
        }
        extern "C" double uniform(uint64_t seed, uint64_t uid, uint64_t position) {
          return rlk::sampling_uniform(seed, uid, position);
        }""")
    command = "g++ -std=c++17 -O2 -shared -fPIC philox.cpp -o philox.so -I".split()
    subprocess.run([*command, str(SOURCES)], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "philox.so"))
    library.uniform.restype, library.uniform.argtypes = ctypes.c_double, [ctypes.c_uint64] * 3
    return library


@pytest.fixture(autouse=True)
def consistency_mode():
    registry.set_mode("consistency")
    yield
    registry.set_mode("consistency")
