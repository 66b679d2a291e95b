"""Packs: every response token scored once, from the right row, on exactly one context-parallel rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.errors import UsageError
from rlk.rollout.engine import Trajectory
from rlk.train.packing import balance, first_fit, make_pack, zigzag_rows


def trajectory(uid: int, prompt: int, response: int, with_support: bool = False) -> Trajectory:
    """Tokens that name their own place: 1000 * uid + position."""
    tokens = 1000 * uid + np.arange(prompt + response, dtype=np.int32)
    offsets = ids = None
    if with_support:
        sizes = 1 + np.arange(response) % 3
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        ids = np.concatenate([tokens[prompt + i] + np.arange(n) for i, n in enumerate(sizes)]).astype(np.int32)
    return Trajectory(uid, tokens[:prompt], tokens[prompt:], np.zeros(response, np.float32), offsets, ids, "length", 0)


shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=7)


@given(shapes, st.sampled_from([1, 2, 4]), st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_response_token_is_scored_once_by_the_row_before_it(shape, cp, with_support):
    samples = [trajectory(uid, *lengths, with_support) for uid, lengths in enumerate(shape)]
    seen = set()
    for cp_rank in range(cp):
        pack = make_pack(samples, list(range(len(samples))), cp, cp_rank)
        assert len(pack.tokens_T) % (2 if cp > 1 else 1) == 0
        inputs = pack.tokens_T[pack.rows_R]
        for row, (i, offset) in enumerate(zip(pack.sample_R, pack.offset_R, strict=True)):
            target = int(pack.targets_R[row])
            assert target == samples[i].tokens[offset]
            assert int(inputs[row]) == target - 1  # the token before it in the same sample
            assert int(pack.positions_T[pack.rows_R[row]]) == len(samples[i].prompt_tokens) + offset - 1
            if with_support:
                begin, end = pack.support[0][row:row + 2].tolist()
                assert pack.support[1][begin].item() == target and end - begin == 1 + offset % 3
            seen.add((int(i), int(offset)))
    assert len(seen) == sum(response for _, response in shape)
    assert len(seen) == sum(len(make_pack(samples, list(range(len(samples))), cp, r).rows_R) for r in range(cp))


@given(shapes, st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=60)
def test_segments_cover_each_row_once_with_consecutive_positions(shape, cp):
    samples = [trajectory(uid, *lengths) for uid, lengths in enumerate(shape)]
    for cp_rank in range(cp):
        pack = make_pack(samples, list(range(len(samples))), cp, cp_rank)
        rows = []
        for start, count, position, source in pack.segments.tolist():
            rows += range(start, start + count)
            assert pack.positions_T[start:start + count].tolist() == list(range(position, position + count))
            assert 0 <= source < len(pack.key_starts)
        assert sorted(rows) == list(range(len(pack.tokens_T)))
        sources = pack.segments[:, 3].tolist()
        assert sources == sorted(sources)


@given(st.integers(1, 20), st.sampled_from([2, 4]))
def test_zigzag_gives_every_rank_the_same_causal_work(chunks, cp):
    rows = [zigzag_rows(2 * cp * chunks, cp, rank) for rank in range(cp)]
    assert sorted(np.concatenate(rows)) == list(range(2 * cp * chunks))
    assert len({int(r.sum()) for r in rows}) == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(50, 120))
def test_packs_hold_every_sample_once_within_capacity(lengths, capacity):
    packs = first_fit(lengths, capacity)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= capacity for pack in packs)


def test_a_sample_longer_than_a_pack_is_refused_with_both_numbers():
    with pytest.raises(UsageError, match="120 tokens and a pack holds 64"):
        first_fit([10, 120], 64)


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 5))
def test_data_parallel_ranks_differ_by_at_most_one_longest_sample(lengths, parts):
    lists = balance(lengths, parts)
    assert sorted(i for part in lists for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in lists]
    assert max(loads) - min(loads) <= max(lengths, default=0)
