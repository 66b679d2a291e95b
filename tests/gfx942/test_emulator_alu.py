"""What the emulator's arithmetic has in common: operands, modifiers, real syntax, and a test for every mnemonic."""

import itertools
import os
import shutil

import numpy as np
import pytest

from tests.gfx942 import test_emulator_compare, test_emulator_float, test_emulator_integer, test_emulator_scalar
from tests.gfx942.alu_cases import LANES, SPECIAL, decoded, encoded, get_lanes, put_lanes, same
from tests.gfx942.assembly import ODD_LANES, make_wave, mnemonics_in, printed, run
from tests.gfx942.emulator import UnknownInstruction
from tests.gfx942.emulator.instruction import parse
from tests.gfx942.emulator.table import decode, decoder_of, known_mnemonics
from tests.gfx942.test_emulator_float import add

OTHER_FILES = {"lanes", "memory_ops", "matrix"}  # tested in their own files
PARTS = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16),
         "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8)}
CLAMPED = ["v_add_f32_e64 v0, v2, v4 clamp", "v_fma_f32 v0, v2, v4, v6 clamp", "v_mul_f64 v[0:1], v[2:3], v[4:5] clamp",
           "v_pk_add_f32 v[0:1], v[2:3], v[4:5] clamp"]
MODIFIED = {"v_add_f32_e64 v0, -v2, |v4|": lambda a, b: add(-a, abs(b)),
            "v_add_f32_e64 v0, -|v2|, 0.5": lambda a, b: add(-abs(a), 0.5),
            "v_add_f32_e64 v0, s2, -v4": lambda a, b: add(1.5, -b),
            "v_add_f32_e64 v0, neg(4.0), v4": lambda a, b: add(-4.0, b)}
DPP = ["v_add_f32_dpp v0, -v2, |v4| row_shr:1 row_mask:0xf bank_mask:0xf",
       "v_add_f32_dpp v0, v2, v4 row_shl:3 row_mask:0xb bank_mask:0x7 bound_ctrl:1",
       "v_add_f32_dpp v0, v2, v4 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf",
       "v_mov_b32_dpp v0, v2 row_bcast:15 row_mask:0xa bank_mask:0xf",
       "v_max_f32_dpp v0, v2, v4 row_half_mirror row_mask:0xf bank_mask:0xf"]
SDWA = ["v_cndmask_b32_sdwa v0, v2, v4, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1",
        "v_mul_f32_sdwa v0, -v2, |v4| dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
        "v_add_f16_sdwa v0, -v2, |v4| dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:WORD_0",
        "v_cmp_lt_u32_sdwa s[4:5], v2, v4 src0_sel:BYTE_3 src1_sel:WORD_0",
        "v_lshlrev_b32_sdwa v0, v2, v4 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_1"]
OP_SEL = ["v_pack_b32_f16 v0, v2, v4 op_sel:[1,0,0]", "v_mad_u32_u16 v0, v2, v4, v6 op_sel:[0,1,0,0]",
          "v_add_i16 v0, v2, v4 op_sel:[1,1,0]"]


def sdwa_text(target="DWORD", unused="UNUSED_PAD", first="DWORD", second="DWORD", signed=False):
    a = "sext(v2)" if signed else "v2"
    return f"v_add_u32_sdwa v0, {a}, v4 dst_sel:{target} dst_unused:{unused} src0_sel:{first} src1_sel:{second}"


TEXTS = [*CLAMPED, *MODIFIED, *DPP, *SDWA, *OP_SEL, sdwa_text("BYTE_2", "UNUSED_SEXT", "BYTE_1", "WORD_1", True)]
MODULES = (test_emulator_integer, test_emulator_float, test_emulator_compare, test_emulator_scalar)
ALL_TEXTS = [text for module in MODULES for text in module.TEXTS] + TEXTS


# ---- syntax and coverage --------------------------------------------------------------------------------------------

def test_every_arithmetic_mnemonic_is_exercised():
    ours = {name for name in known_mnemonics() if decoder_of(name).__module__.rsplit(".", 1)[1] not in OTHER_FILES}
    assert ours - mnemonics_in(ALL_TEXTS) == set()


def test_the_texts_are_what_the_disassembler_prints():
    """The assembler accepts each line and prints it again: the same, but for the encoding that it names."""
    if not shutil.which("llvm-mc-19") and os.environ.get("CI") != "true":
        pytest.skip("llvm-mc-19 is not on PATH: install it with `apt-get install llvm-19`")
    lines = printed(ALL_TEXTS)
    assert len(lines) == len(ALL_TEXTS)
    for text, line in zip(ALL_TEXTS, lines, strict=True):
        mine, real = parse(0, text), parse(0, line)
        assert (mine.mnemonic, mine.operands, mine.modifiers, mine.flags) == (
            real.mnemonic, real.operands, real.modifiers, real.flags), f"{text} is printed as {line}"
        assert mine.encoding in ("", real.encoding)
        decode(0, line)


@pytest.mark.parametrize("text", [
    "v_add_f32_e64 v0, v1, v2 mul:2", "v_add_f32_e64 v0, v1, v2 div:2", "v_add_f32_e64 v0, v1, v2 sc0",
    "v_add_u32_e32 v0, v1, v2 offset:4", "v_and_b32_e64 v0, v1, v2 clamp", "v_add_u32_e32 v0, -v1, v2",
    "v_and_b32_e64 v0, |v1|, v2", "v_add_u32_e32 v0, sext(v1), v2", "v_mul_lo_u32 v0, v1, v2 op_sel:[1,0,0]",
    "v_add_f32_e32 v0, v1, v2 quad_perm:[0,1,2,3]", "v_add_i16 v0, v2, v4 op_sel:[0,0,1]", "v_fma_f32 v0, v1, v2",
    "v_pk_mul_f32 v[0:1], v[2:3], 0.5", "v_pk_mul_f32 v[0:1], v[2:3], v4", "v_pk_add_u16 v0, v1, v2 neg_lo:[1,0]",
    "v_add_f64 v0, v[2:3], v[4:5]", "v_add_f64 v[0:1], v2, v[4:5]", "v_cmp_lt_f32_e64 s4, v1, v2",
    "v_cmp_lt_f32_e64 s[4:5], v1, v2 clamp", "v_cndmask_b32_e64 v0, v1, v2, s4", "s_add_u32 s0, s1, s2 clamp",
    "s_add_u32 s0, v1, s2", "s_mov_b64 s0, s[2:3]", "s_mov_b64 s[0:1], s2", "s_and_b32 s[0:1], s2, s3",
    "v_fma_mix_f32 v0, v1, v2, v3 op_sel:[1,0,0]", "v_no_such_b32 v0, v1", "v_add_u32_e32 v0, v1, v2 mystery",
    "v_mov_b32_e32 s0, v1", "v_swap_b32 v0, v1 clamp", "s_branch 4 nt"])
def test_what_would_be_skipped_is_refused(text):
    with pytest.raises(UnknownInstruction, match="at 0x40"):
        decode(0x40, text)


# ---- operands and modifiers -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("operand, bits", [
    ("0", 0), ("-1", 0xFFFFFFFF), ("64", 64), ("-16", 0xFFFFFFF0), ("0.5", 0x3F000000), ("-4.0", 0xC0800000),
    ("0.15915494", 0x3E22F983), ("0x12345678", 0x12345678), ("s3", 77), ("vcc_lo", 5), ("exec_hi", 0xFFFFFFFF),
    ("m0", 9), ("src_vccz", 0), ("src_execz", 0), ("src_scc", 1)])
def test_an_operand_of_32_bits(operand, bits):
    wave = make_wave()
    wave.scalar[3], wave.scalar[106], wave.scalar[124], wave.scc = 77, 5, 9, 1
    run(wave, f"v_mov_b32_e32 v0, {operand}", f"v_not_b32_e32 v1, {operand}")
    assert get_lanes(wave, 0, "b32") == [bits] * LANES and get_lanes(wave, 1, "b32") == [bits ^ 0xFFFFFFFF] * LANES


@pytest.mark.parametrize("text, bits", [
    ("v_add_f16_e32 v0, 1.0, v2", encoded(1.0, "f16")), ("v_add_f16_e32 v0, 0.15915494, v2", 0x3118),
    ("v_add_f64 v[0:1], v[2:3], -2.0", encoded(-2.0, "f64")),
    ("v_mul_f64 v[0:1], v[4:5], 0.15915494309189532", 0x3FC45F306DC9C882),
    ("v_mov_b64_e32 v[0:1], 0x80000000", 0x80000000), ("v_mov_b64_e32 v[0:1], -1", (1 << 64) - 1),
    ("v_add_f64 v[0:1], v[2:3], 0x40590000", encoded(100.0, "f64")), ("v_add_f16_e32 v0, 0x4248, v2", 0x4248),
    ("v_add_f64 v[0:1], v[2:3], s[4:5]", encoded(0.75, "f64")), ("v_mov_b64_e32 v[0:1], exec", (1 << 64) - 1)])
def test_a_constant_has_the_width_of_its_operand(text, bits):
    wave = make_wave()
    put_lanes(wave, 2, "f64", [0] * LANES)
    put_lanes(wave, 4, "f64", [encoded(1.0, "f64")] * LANES)
    wave.write_sgprs(4, 2, encoded(0.75, "f64"))
    run(wave, text)
    assert get_lanes(wave, 0, "b64" if "v[0:1]" in text else "b32") == [bits] * LANES


@pytest.mark.parametrize("text", MODIFIED)
def test_signs_of_float_sources(text):
    wave = make_wave()
    wave.scalar[2] = encoded(1.5, "f32")
    for rotation in range(0, len(SPECIAL[32]), 5):
        values = [*SPECIAL[32], *SPECIAL[32]][: LANES]
        other = values[rotation:] + values[:rotation]
        put_lanes(wave, 2, "f32", values)
        put_lanes(wave, 4, "f32", other)
        run(wave, text)
        for k, got in enumerate(get_lanes(wave, 0, "f32")):
            assert same(got, MODIFIED[text](decoded(values[k], "f32"), decoded(other[k], "f32")), "f32")


@pytest.mark.parametrize("text", CLAMPED)
def test_clamp_of_floats_is_between_zero_and_one_and_zero_for_nan(text):
    name = "f64" if "f64" in text else "f32"
    wanted = {-2.0: 0.0, -0.0: 0.0, 0.25: 0.25, 1.0: 1.0, 7.0: 1.0, float("inf"): 1.0, float("-inf"): 0.0}
    values = [*wanted, float("nan")]
    wave = make_wave()
    factor = 1.0 if "fma" in text or "mul" in text else -0.0
    for first, number in ((2, None), (4, factor), (6, -0.0)):
        column = [encoded(values[k % len(values)] if number is None else number, name) for k in range(LANES)]
        put_lanes(wave, first, name, column)
        if "pk" in text:
            put_lanes(wave, first + 1, name, column)
    run(wave, text)
    expected = [encoded(wanted.get(values[k % len(values)], 0.0), name) for k in range(LANES)]
    assert get_lanes(wave, 0, name) == expected
    if "pk" in text:
        assert get_lanes(wave, 1, name) == expected


def part(bits, selection, signed=False):
    first, size = PARTS[selection]
    value = bits >> first & (1 << size) - 1
    return value - (1 << size) if signed and value >> (size - 1) else value


@pytest.mark.parametrize("signed", (False, True))
@pytest.mark.parametrize("first, second", [("DWORD", "BYTE_0"), ("BYTE_1", "WORD_1"), ("BYTE_2", "DWORD"),
                                           ("BYTE_3", "BYTE_3"), ("WORD_0", "BYTE_2"), ("WORD_1", "WORD_0")])
def test_sdwa_selects_parts_of_the_sources(first, second, signed):
    wave = make_wave()
    run(wave, sdwa_text(first=first, second=second, signed=signed))
    for k, got in enumerate(get_lanes(wave, 0, "u32")):
        a, b = int(wave.vector[2, k]), int(wave.vector[4, k])
        assert got == part(a, first, signed) + part(b, second) & 0xFFFFFFFF


@pytest.mark.parametrize("unused", ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"))
@pytest.mark.parametrize("target", PARTS)
def test_sdwa_writes_a_part_and_fills_the_rest(target, unused):
    wave = make_wave(ODD_LANES)
    before = get_lanes(wave, 0, "u32")
    run(wave, sdwa_text(target, unused))
    first, size = PARTS[target]
    for k, got in enumerate(get_lanes(wave, 0, "u32")):
        value = int(wave.vector[2, k]) + int(wave.vector[4, k]) & (1 << size) - 1
        wanted = value << first
        if unused == "UNUSED_SEXT" and value >> (size - 1):
            wanted |= 0xFFFFFFFF << (first + size) & 0xFFFFFFFF
        if unused == "UNUSED_PRESERVE":
            wanted |= before[k] & ~(((1 << size) - 1) << first)
        assert got == (wanted if ODD_LANES >> k & 1 else before[k])


def test_sdwa_of_floats_masks_and_comparisons():
    wave = make_wave()
    wave.vector[2] &= 0x7FFF_7BFF  # no NaN in single or in halves, for the sums below
    wave.vector[4] &= 0x7BFF_7BFF
    wave.write_sgprs(106, 2, 0x00FF_F0F0_1234_5678)
    a, b = get_lanes(wave, 2, "b32"), get_lanes(wave, 4, "b32")
    run(wave, SDWA[0])
    assert get_lanes(wave, 0, "b32") == [b[k] >> 16 if 0x00FF_F0F0_1234_5678 >> k & 1 else a[k] for k in range(LANES)]
    old = get_lanes(wave, 0, "b32")
    run(wave, SDWA[2])
    for k, got in enumerate(get_lanes(wave, 0, "b32")):
        assert got & 0xFFFF == old[k] & 0xFFFF
        assert same(got >> 16, add(-decoded(a[k] >> 16, "f16"), abs(decoded(b[k], "f16"))), "f16")
    run(wave, SDWA[3], SDWA[4])
    assert wave.read_sgprs(4, 2) == sum((a[k] >> 24 < b[k] & 0xFFFF) << k for k in range(LANES))
    assert get_lanes(wave, 0, "b32") == [(b[k] >> 8 & 255) << (a[k] & 31) & 0xFFFFFFFF for k in range(LANES)]
    run(wave, SDWA[1], "v_mul_f32_e64 v1, -v2, |v4|")
    assert get_lanes(wave, 0, "b32") == get_lanes(wave, 1, "b32")


def test_op_sel_takes_high_halves():
    wave = make_wave()
    a, b, c = (get_lanes(wave, first, "b32") for first in (2, 4, 6))
    run(wave, OP_SEL[0])
    assert get_lanes(wave, 0, "b32") == [x >> 16 | (y & 0xFFFF) << 16 for x, y in zip(a, b, strict=True)]
    run(wave, OP_SEL[1])
    assert get_lanes(wave, 0, "b32") == [
        (x & 0xFFFF) * (y >> 16) + z & 0xFFFFFFFF for x, y, z in zip(a, b, c, strict=True)]
    run(wave, OP_SEL[2])
    assert get_lanes(wave, 0, "b32") == [(x >> 16) + (y >> 16) & 0xFFFF for x, y in zip(a, b, strict=True)]


# lane -> the lane it reads, None outside; then rows and banks that are written
MOVES = [(lambda k: k - 1 if k % 16 else None, 0xF, 0xF), (lambda k: k + 3 if k % 16 < 13 else None, 0xB, 0x7),
         (lambda k: k ^ 1, 0xF, 0xF), (lambda k: k // 16 * 16 - 1 if k >= 16 else None, 0xA, 0xF),
         (lambda k: k ^ 7, 0xF, 0xF)]


@pytest.mark.parametrize("exec_mask", ((1 << 64) - 1, ODD_LANES))
@pytest.mark.parametrize("text, move", zip(DPP, MOVES, strict=True))
def test_dpp_moves_source_0_and_leaves_out_lanes_without_one(text, move, exec_mask):
    source, rows, banks = move
    rng = np.random.default_rng(9)
    wave = make_wave(exec_mask)
    wave.vector[[0, 2, 4]] = rng.normal(size=(3, LANES)).astype(np.float32).view(np.uint32)
    start = wave.vector[:5].view(np.float32).copy()
    run(wave, text)
    for k, got in enumerate(wave.vector[0].view(np.float32)):
        reads = source(k)
        valid = reads is not None and exec_mask >> reads & 1
        written = exec_mask >> k & 1 and rows >> k // 16 & 1 and banks >> k % 16 // 4 & 1
        a, b = np.float32(start[2, reads] if valid else 0), start[4, k]
        if "-v2" in text:
            a, b = -a, abs(b)
        wanted = a if "mov" in text else max(a, b) if "max" in text else a + b
        assert got == (wanted if written and (valid or "bound_ctrl" in text) else start[0, k])


@pytest.mark.parametrize("mask, count", itertools.product((0, 1, ODD_LANES, (1 << 64) - 1), (1, 2)))
def test_halves_of_exec_are_read_and_written(mask, count):
    wave = make_wave(mask)
    assert [wave.read_sgprs(126, count), wave.read_sgprs(127, 1)] == [mask & (1 << 32 * count) - 1, mask >> 32]
    wave.write_sgprs(127, 1, 0x12345678)
    assert wave.exec == 0x12345678 << 32 | mask & 0xFFFFFFFF
