"""The emulator's matrix instructions: layouts by the manual's formulas, sums against FP64 and FP32 loops."""

import re

import numpy as np
import pytest

from tests.gfx942.assembly import make_wave, mnemonics_of, printed, run
from tests.gfx942.emulator import UnknownInstruction
from tests.gfx942.numerics import from_bf16, random_bf16, to_bf16

LANES = 64
# the mnemonic as gfx942 prints it -> (M, K, B, type), and names of before gfx942
SHAPES = {
    "v_mfma_f32_16x16x16_bf16": (16, 16, 1, "bf16"), "v_mfma_f32_32x32x8_bf16": (32, 8, 1, "bf16"),
    "v_mfma_f32_32x32x4_2b_bf16": (32, 4, 2, "bf16"), "v_mfma_f32_16x16x4_4b_bf16": (16, 4, 4, "bf16"),
    "v_mfma_f32_4x4x4_16b_bf16": (4, 4, 16, "bf16"),
    "v_mfma_f32_16x16x16_f16": (16, 16, 1, "f16"), "v_mfma_f32_32x32x8_f16": (32, 8, 1, "f16"),
    "v_mfma_f32_32x32x4_2b_f16": (32, 4, 2, "f16"), "v_mfma_f32_16x16x4_4b_f16": (16, 4, 4, "f16"),
    "v_mfma_f32_4x4x4_16b_f16": (4, 4, 16, "f16"),
    "v_mfma_f32_16x16x4_f32": (16, 4, 1, "f32"), "v_mfma_f32_32x32x2_f32": (32, 2, 1, "f32"),
    "v_mfma_f32_32x32x1_2b_f32": (32, 1, 2, "f32"), "v_mfma_f32_16x16x1_4b_f32": (16, 1, 4, "f32"),
    "v_mfma_f32_4x4x1_16b_f32": (4, 1, 16, "f32"),
}


def older(mnemonic):
    kind = SHAPES[mnemonic][3]
    return re.sub(r"(_\d+b)?_\w?f\d\d$", "", mnemonic) + ("bf16_1k" if kind == "bf16" else kind)


def place_of_factor(i, k, block, M, K, B):
    """(lane, element within the lane's registers) of A[i, k] or B[k, i]."""
    in_lane = K * M * B // LANES
    return i + M * (k // in_lane + block), k % in_lane


def place_of_result(i, j, block, M, B):
    """(lane, register) of D[i, j]."""
    if M == 4:
        return j + 4 * block, i
    if M == 16:
        return j + 16 * (i // 4), 4 * block + i % 4
    return j + 32 * (i // 4 % 2), 16 * block + 4 * (i // 8) + i % 4


def numbers(rng, kind, *shape):
    if kind == "bf16":
        return from_bf16(random_bf16(rng, *shape))
    return rng.standard_normal(shape).astype(np.float16 if kind == "f16" else np.float32).astype(np.float32)


def put_factor(wave, row, x, kind):
    """x [B, M, K] into the registers from `row`; returns how many there are."""
    B, M, K = x.shape
    in_lane = K * M * B // LANES
    elements = np.zeros((LANES, in_lane), np.float32)
    for block, i, k in np.ndindex(x.shape):
        lane, element = place_of_factor(i, k, block, M, K, B)
        elements[lane, element] = x[block, i, k]
    packed = {"bf16": to_bf16, "f16": np.float16, "f32": np.float32}[kind](elements)
    words = np.ascontiguousarray(packed).view(np.uint32)
    wave.vector[row : row + words.shape[1]] = words.T
    return words.shape[1]


def put_results(wave, row, x):
    B, M, _ = x.shape
    for block, i, j in np.ndindex(x.shape):
        lane, register = place_of_result(i, j, block, M, B)
        wave.vector[row + register, lane] = x[block, i, j].view(np.uint32)


def take_results(wave, row, B, M):
    x = np.zeros((B, M, M), np.float32)
    for block, i, j in np.ndindex(x.shape):
        lane, register = place_of_result(i, j, block, M, B)
        x[block, i, j] = wave.vector[row + register, lane : lane + 1].view(np.float32)[0]
    return x


def rounded_once(a, b, c):
    """FP32 a b + c rounded once; the product of BF16 or FP16 numbers is exact, that of FP32 numbers needs care."""
    exact = np.longdouble(a) * np.longdouble(b)  # 64 bits: exact for any two FP32 numbers
    return np.float32(exact + np.longdouble(c))


def sequential(a, b, c):
    """C + A B with k ascending, one FP32 rounding for each product: a [B, M, K], b [B, N, K], c [B, M, N]."""
    total = c.copy()
    for block, i, j in np.ndindex(c.shape):
        for k in range(a.shape[2]):
            total[block, i, j] = rounded_once(a[block, i, k], b[block, j, k], total[block, i, j])
    return total


def multiply(wave, mnemonic, a, b, c, d_bank="v", c_operand=None, a_bank="v"):
    """Run one instruction with A from register 0, B from 8, C from 16 and D to 64 of their banks: D [B, M, N]."""
    M, K, B, kind = SHAPES[mnemonic]
    base = 256 if a_bank == "a" else 0
    count, results = put_factor(wave, base, a, kind), M * M * B // LANES
    put_factor(wave, 8, b, kind)
    if c is not None:
        put_results(wave, 16 + (256 if d_bank == "a" else 0), c)

    def tuple_of(bank, first, size):
        return f"{bank}{first}" if size == 1 else f"{bank}[{first}:{first + size - 1}]"

    line = (f"{mnemonic} {tuple_of(d_bank, 64, results)}, {tuple_of(a_bank, 0, count)}, {tuple_of('v', 8, count)}, "
            f"{c_operand or tuple_of(d_bank, 16, results)}")
    run(wave, line)
    return take_results(wave, 64 + (256 if d_bank == "a" else 0), B, M), line


def drawn(mnemonic, seed=0):
    M, K, B, kind = SHAPES[mnemonic]
    rng = np.random.default_rng(seed)
    return (numbers(rng, kind, B, M, K), numbers(rng, kind, B, M, K),
            rng.standard_normal((B, M, M)).astype(np.float32))


@pytest.mark.parametrize("mnemonic", SHAPES)
def test_product_is_the_sequential_sum(mnemonic):
    a, b, c = drawn(mnemonic)
    result, _ = multiply(make_wave(), mnemonic, a, b, c)
    exact = a.astype(np.float64) @ b.astype(np.float64).swapaxes(1, 2) + c
    np.testing.assert_allclose(result, exact, rtol=0, atol=1e-5)
    assert result.tobytes() == sequential(a, b, c).tobytes()


@pytest.mark.parametrize("mnemonic", SHAPES)
def test_accumulation_registers_and_constants(mnemonic):
    a, b, c = drawn(mnemonic)
    expected = sequential(a, b, c)
    result, _ = multiply(make_wave(), mnemonic, a, b, c, d_bank="a", a_bank="a")
    assert result.tobytes() == expected.tobytes()
    for operand, value in (("0", 0.0), ("1.0", 1.0), ("-4.0", -4.0)):
        result, _ = multiply(make_wave(), mnemonic, a, b, None, c_operand=operand)
        assert result.tobytes() == sequential(a, b, np.full_like(c, value)).tobytes()


@pytest.mark.parametrize("mnemonic", SHAPES)
def test_lanes_that_are_off_take_part(mnemonic):
    a, b, c = drawn(mnemonic)
    result, _ = multiply(make_wave(exec_mask=5), mnemonic, a, b, c)
    assert result.tobytes() == sequential(a, b, c).tobytes()


@pytest.mark.parametrize("mnemonic", SHAPES)
def test_only_the_result_changes(mnemonic):
    M, _, B, _ = SHAPES[mnemonic]
    a, b, c = drawn(mnemonic)
    wave = make_wave()
    multiply(wave, mnemonic, a, b, c)
    before = wave.vector.copy()
    multiply(wave, mnemonic, a, b, c)
    multiply(wave, mnemonic, b, a, c)
    changed = np.flatnonzero((wave.vector != before).any(1))
    assert set(changed) <= {*range(64, 64 + M * M * B // LANES), *range(16)}


def test_result_may_replace_the_addend():
    a, b, c = drawn("v_mfma_f32_16x16x16_bf16")
    wave = make_wave()
    multiply(wave, "v_mfma_f32_16x16x16_bf16", a, b, c)
    put_results(wave, 16, c)
    run(wave, *["v_mfma_f32_16x16x16_bf16 v[16:19], v[0:1], v[8:9], v[16:19]"] * 2)
    assert take_results(wave, 16, 1, 16).tobytes() == sequential(a, b, sequential(a, b, c)).tobytes()


@pytest.mark.parametrize("mnemonic", [mnemonic for mnemonic, (_, K, _, _) in SHAPES.items() if K > 1])
def test_order_of_k_is_ascending(mnemonic):
    M, K, B, _ = SHAPES[mnemonic]
    a, b = np.ones((B, M, K), np.float32), np.ones((B, M, K), np.float32)
    a[:, :, -1] = 2.0**15
    b[:, :, -1] = 2.0**10  # 2^25 swallows what comes after it, not the sum of what came before
    b[:, :, :-1] = 1.75
    c = np.full((B, M, M), 1.75, np.float32)
    result, _ = multiply(make_wave(), mnemonic, a, b, c)
    before = np.float32(1.75 * K)
    assert before >= 2 and (result == np.float32(2.0**25) + before).all()


@pytest.mark.parametrize("mnemonic", SHAPES)
def test_subnormal_infinite_and_undefined_numbers(mnemonic):
    M, K, B, kind = SHAPES[mnemonic]
    a, b, c = (np.zeros(shape, np.float32) for shape in ((B, M, K), (B, M, K), (B, M, M)))
    small = {"bf16": 2.0**-133, "f16": 2.0**-24, "f32": 2.0**-149}[kind]
    a[:, 0, 0], a[:, 1, 0], a[:, 2, 0], a[:, 3, 0] = small, np.inf, np.nan, -small
    b[:, :, 0] = 1
    b[:, 0, 0] = 0
    c[:, 3] = 2.0**-149
    result, _ = multiply(make_wave(), mnemonic, a, b, c)
    assert (result[:, 0, 1:] == np.float32(small)).all() and (result[:, 0, 0] == 0).all()
    assert np.isposinf(result[:, 1, 1:]).all() and np.isnan(result[:, 1, 0]).all() and np.isnan(result[:, 2]).all()
    assert (result[:, 3, 1:] == np.float32(-small) + np.float32(2.0**-149)).all()


def test_fp32_products_are_rounded_with_their_sum():
    a, b, c = drawn("v_mfma_f32_32x32x2_f32")
    a[:, :, 1] = b[:, :, 1] = 0
    c = -(a[:, :, :1] * b[:, :, :1].swapaxes(1, 2))  # what is left is the error of rounding the product
    result, _ = multiply(make_wave(), "v_mfma_f32_32x32x2_f32", a, b, c)
    exact = a[:, :, :1].astype(np.float64) * b[:, :, :1].swapaxes(1, 2) + c
    assert (result == exact).all() and (result != 0).mean() > 0.9


@pytest.mark.parametrize("line", [
    "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0 cbsz:1",
    "v_mfma_f32_16x16x4_4b_f16 v[0:15], v[16:17], v[18:19], 0 abid:1",
    "v_mfma_f32_32x32x2_f32 v[0:15], v16, v17, 0 blgp:2", "v_mfma_f32_16x16x16_bf16 v[0:3], v4, v[6:7], 0",
    "v_mfma_f32_16x16x16_bf16 v[0:1], v[4:5], v[6:7], 0", "v_smfmac_f32_16x16x32_bf16 v[0:3], v[4:5], v[8:11], v12",
    "v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7]", "v_mfma_i32_16x16x32_i8 v[0:3], v[4:5], v[6:7], 0"])
def test_what_is_not_known_raises(line):
    with pytest.raises(UnknownInstruction):
        run(make_wave(), line)


def test_every_instruction_is_tested_under_both_names():
    lines = [multiply(make_wave(), mnemonic, *drawn(mnemonic))[1] for mnemonic in SHAPES]
    assert printed(lines) == lines
    older_lines = [line.replace(mnemonic, older(mnemonic)) for line, mnemonic in zip(lines, SHAPES, strict=True)]
    assert printed(older_lines) == lines
    for line, older_line in zip(lines, older_lines, strict=True):
        one, other = make_wave(), make_wave()
        run(one, line)
        run(other, older_line)
        assert one.vector.tobytes() == other.vector.tobytes()
    assert mnemonics_of("matrix") == {*SHAPES, *map(older, SHAPES)}
