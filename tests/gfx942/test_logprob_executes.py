"""The Triton log-prob's gfx942 code objects, executed: tile states, their merge, and the gradient."""

import dataclasses
import math

import numpy as np
import pytest

from rlk.kernels import logprob
from tests.gfx942.emulator import Device
from tests.gfx942.numerics import BF16_EPSILON, from_bf16, same_bytes
from tests.gfx942.triton_runs import run_variant

ARCH = "gfx942"
VARIANTS = {variant.label: variant for variant in logprob.variants(ARCH)}
TILES = 64
LANES = logprob.CONFIGS[ARCH]["stats"]["LANES"]
INV_T = float(np.float32(1 / 0.7))
HELD = logprob.CONFIGS[ARCH]["stats"]["HELD"]
# multiples of 4, of 2 (Qwen3's 2374) and odd; several rounds, one, and more than stay in registers
WIDTHS = [LANES + 36, 2374, 1027, 12, 6, 5, HELD * LANES + 36]


def tile_stats(logits, tiles, valid=None, inv_t=INV_T, order="forward", **options):
    T, V = logits.shape
    width = V // tiles
    unit = logprob.choose(width)
    values = dict(logits=logits, stats=np.full((T, tiles, 3), np.nan, np.float32), units=width // unit, tiles=tiles,
                  valid=V if valid is None else valid, inv_t=inv_t)
    variant = VARIANTS[f"tile_stats/unit{unit}"]
    variant = dataclasses.replace(variant, options=variant.options | options)
    return run_variant(Device(order), variant, (tiles, T), values)["stats"]


def merge_tiles(stats, target_logits, inv_t=INV_T):
    T = len(stats)
    values = dict(stats=stats, target_logits=target_logits, scores=np.full((3, T), np.nan, np.float32), T=T,
                  inv_t=inv_t)
    return run_variant(Device(), VARIANTS["merge_tiles/tiles64"], (math.ceil(T / 64),), values)["scores"]


def backward(logits, targets, lse, grad, first_id, valid, out="fp32", inv_t=INV_T):
    T, V = logits.shape
    unit = logprob.choose(V)
    poison = np.full((T, V), np.nan, np.float32) if out == "fp32" else np.full((T, V), 0x7FC0, np.uint16)
    values = dict(logits=logits, targets=targets, lse=lse, grad=grad, dlogits=poison, units=V // unit,
                  first_id=first_id, valid=valid, inv_t=inv_t)
    grid = (math.ceil(V / 2048), T)
    return run_variant(Device(), VARIANTS[f"tile_stats_backward/unit{unit}_{out}"], grid, values)["dlogits"]


def draw(seed, *shape, scale=4.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def exact_states(logits, tiles, inv_t=INV_T):
    x = logits.astype(np.float64).reshape(len(logits), tiles, -1) * inv_t
    top = x.max(-1)
    e = np.exp(x - top[..., None])
    return np.stack([top, e.sum(-1), (e * x).sum(-1)], -1)


def exact_scores(logits, targets, inv_t=INV_T):
    x = logits.astype(np.float64) * inv_t
    top = x.max(-1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(x - top).sum(-1))
    p = np.exp(x - lse[:, None])
    return np.stack([x[np.arange(len(x)), targets] - lse, lse - (p * x).sum(-1), lse])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_tiles_state_agrees_with_float64(width):
    logits = draw(width, 2, 3 * width)
    exact = exact_states(logits, 3)
    got = tile_stats(logits, 3)
    assert np.all(np.abs(got[..., 0] - exact[..., 0]) <= np.abs(exact[..., 0]) * 2.0**-23)
    assert np.allclose(got, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [2374, 1027])
def test_a_tile_has_the_same_bits_in_any_batch_on_any_rank_and_in_either_wave_order(width):
    logits = draw(width, 3, 4 * width)
    together = tile_stats(logits, 4)
    assert same_bytes(tile_stats(logits, 4, order="reverse"), together)
    assert same_bytes(tile_stats(logits[2:], 4), together[2:])
    rank = np.ascontiguousarray(logits[:, 2 * width :])  # the second of two ranks
    assert same_bytes(tile_stats(rank, 2), together[:, 2:].copy())


def test_the_comparison_of_tiles_catches_another_number_of_warps():
    logits = draw(8, 3, 4 * 2374)
    fewer, one_set = tile_stats(logits, 4, num_warps=2), tile_stats(logits, 4)
    assert np.allclose(fewer, one_set, rtol=1e-5) and not same_bytes(fewer, one_set)


@pytest.mark.parametrize("width", [2374, 1100])
def test_ids_beyond_the_tokenizer_change_nothing(width):
    logits, valid = draw(1, 2, 3 * width), width + 700
    poisoned = logits.copy()
    poisoned[:, valid:] = np.resize(np.array([np.nan, np.inf, 3e38, -np.inf], np.float32), 3 * width - valid)
    got = tile_stats(poisoned, 3, valid)
    assert same_bytes(got, tile_stats(logits, 3, valid))
    assert np.all(got[:, 2] == [-np.inf, 0, 0])  # a tile without a valid id
    masked = np.where(np.arange(3 * width) < valid, logits, -np.inf).astype(np.float32)
    assert same_bytes(got, tile_stats(masked, 3))
    exact = exact_states(logits[:, width:valid], 1)
    assert np.allclose(got[:, 1], exact[:, 0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [12, HELD * LANES + 36])
def test_a_zeros_sign_changes_no_bit_and_minus_infinity_weighs_nothing(width):
    logits = -np.abs(draw(9, 2, 3 * width))
    logits[:, ::5], logits[:, 1::7] = 0.0, -np.inf
    logits[:, ::width], logits[1, -width:] = 0.0, -np.inf
    negative = np.where(logits == 0, np.float32(-0.0), logits)
    got = tile_stats(logits, 3)
    assert same_bytes(tile_stats(negative, 3), got)
    assert same_bytes(got[:, :, 0].copy(), np.array([[0, 0, 0], [0, 0, -np.inf]], np.float32))
    assert np.all(got[1, 2] == [-np.inf, 0, 0])
    kept = np.where(np.isinf(logits), np.float32(-1e4), logits)  # its e is zero too
    assert same_bytes(got[:, :2].copy(), tile_stats(kept, 3)[:, :2].copy())


@pytest.mark.parametrize("T", [1, 3, 65])
def test_merged_scores_agree_with_float64(T):
    logits = draw(T, T, TILES * 12)
    targets = np.random.default_rng(T).integers(0, TILES * 12, T)
    stats = exact_states(logits, TILES).astype(np.float32)
    scores = merge_tiles(stats, logits[np.arange(T), targets])
    assert np.allclose(scores, exact_scores(logits, targets), rtol=0, atol=2e-5)


def test_a_row_is_merged_to_the_same_bits_in_any_batch():
    stats, targets = exact_states(draw(2, 65, TILES * 12), TILES).astype(np.float32), draw(3, 65)
    together = merge_tiles(stats, targets)
    for row in (0, 63, 64):
        assert same_bytes(merge_tiles(stats[row : row + 1], targets[row : row + 1]), together[:, row : row + 1].copy())


def test_tiles_are_merged_in_ascending_order():
    """With equal maxima each scale is 1, and the sum of e is the plain FP32 sum, tile after tile."""
    rng = np.random.default_rng(4)
    stats = np.zeros((40, TILES, 3), np.float32)
    stats[..., 1] = rng.uniform(0, 2 / TILES, (40, TILES))  # the log of a sum near 1 hides no bit of it
    stats[..., 2] = stats[..., 1]
    ascending = np.add.accumulate(stats[..., 1], axis=1)[:, -1]
    single = np.zeros_like(stats)
    single[..., 0] = -np.inf
    single[:, 5] = np.stack([np.zeros(40, np.float32), ascending, ascending], -1)
    merged, expected = merge_tiles(stats, np.zeros(40, np.float32)), merge_tiles(single, np.zeros(40, np.float32))
    assert same_bytes(merged, expected)
    backwards = stats[:, ::-1].copy()
    assert not same_bytes(merge_tiles(backwards, np.zeros(40, np.float32)), expected)


def test_a_whole_row_from_logits_to_scores():
    width, T = 38, 2
    logits = draw(5, T, TILES * width)
    valid = TILES * width - 50
    targets = np.array([1000, valid - 1])
    for inv_t in (INV_T, 5.0):
        scores = merge_tiles(tile_stats(logits, TILES, valid, inv_t), logits[np.arange(T), targets], inv_t)
        exact = exact_scores(logits[:, :valid], targets, inv_t)
        assert np.allclose(scores, exact, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize(("V", "out"), [(2100, "fp32"), (2100, "bf16"), (2374, "bf16"), (2374, "fp32"), (1027, "fp32"),
                                         (1027, "bf16")])
def test_the_gradient_agrees_with_float64(V, out):
    T, first_id, valid = 3, 100, V - 30
    logits, grad = draw(6, T, V), draw(7, T, scale=1.0)
    targets = np.array([first_id, first_id + 900, 5])  # the last one belongs to another rank
    lse = exact_scores(logits[:, :valid], np.zeros(T, int))[2].astype(np.float32)
    got = backward(logits, targets, lse, grad, first_id, valid, out)
    got = got.astype(np.float64) if out == "fp32" else from_bf16(got).astype(np.float64)
    p = np.exp(logits.astype(np.float64) * INV_T - lse[:, None].astype(np.float64))
    hit = np.arange(V) + first_id == targets[:, None]
    exact = np.where(np.arange(V) < valid, grad[:, None].astype(np.float64) * INV_T * (hit - p), 0)
    rounding = BF16_EPSILON if out == "bf16" else 0
    assert np.all(got[:, valid:] == 0)
    assert np.all(np.abs(got - exact) <= np.abs(exact) * (rounding + 1e-5) + 1e-7)
