"""The emulator's vector instructions on integers and bits, each against Python integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.gfx942.alu_cases import BITS, LANES, check_lanes, get_lanes, put_lanes, special_columns, vector_text
from tests.gfx942.assembly import ODD_LANES, make_wave, run


def low24(a):
    return a & 0xFFFFFF


def sign24(a):
    return (a & 0xFFFFFF) - ((a & 0x800000) << 1)


def leading_zeros(a):
    return 32 - a.bit_length() if a else -1


def like_sign(a):
    """How many bits from the top equal the sign bit."""
    text = f"{a & 0xFFFFFFFF:032b}"
    same = len(text) - len(text.lstrip(text[0]))
    return same if same < 32 else -1


def field(a, offset, width):
    return a >> (offset & 31) & (1 << (width & 31)) - 1


def signed_field(a, offset, width):
    width &= 31
    part = field(a, offset, width)
    return part - (1 << width) if width and part >> (width - 1) else part


def permuted(a, b, selector):
    source = (a << 32 | b).to_bytes(8, "little")
    result = []
    for pick in selector.to_bytes(4, "little"):
        if pick < 8:
            result.append(source[pick])
        elif pick < 12:
            result.append(255 * (source[1 + 2 * (pick - 8)] >> 7))
        else:
            result.append(0 if pick == 12 else 255)
    return int.from_bytes(bytes(result), "little")


def byte_distance(a, b):
    return sum(abs(x - y) for x, y in zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True))


def middle(*values):
    return sorted(values)[1]


CASES = {  # mnemonic -> (result, sources, what one lane gives)
    "v_add_u32": ("u32", "u32 u32", lambda a, b: a + b),
    "v_sub_u32": ("u32", "u32 u32", lambda a, b: a - b),
    "v_subrev_u32": ("u32", "u32 u32", lambda a, b: b - a),
    "v_add_i32": ("i32", "i32 i32", lambda a, b: a + b),
    "v_sub_i32": ("i32", "i32 i32", lambda a, b: a - b),
    "v_add_u16": ("u16", "u16 u16", lambda a, b: a + b),
    "v_sub_u16": ("u16", "u16 u16", lambda a, b: a - b),
    "v_subrev_u16": ("u16", "u16 u16", lambda a, b: b - a),
    "v_add_i16": ("i16", "i16 i16", lambda a, b: a + b),
    "v_sub_i16": ("i16", "i16 i16", lambda a, b: a - b),
    "v_add3_u32": ("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
    "v_mul_lo_u32": ("u32", "u32 u32", lambda a, b: a * b),
    "v_mul_lo_u16": ("u16", "u16 u16", lambda a, b: a * b),
    "v_mul_hi_u32": ("u32", "u32 u32", lambda a, b: a * b >> 32),
    "v_mul_hi_i32": ("i32", "i32 i32", lambda a, b: a * b >> 32),
    "v_mul_u32_u24": ("u32", "u32 u32", lambda a, b: low24(a) * low24(b)),
    "v_mul_i32_i24": ("i32", "u32 u32", lambda a, b: sign24(a) * sign24(b)),
    "v_mul_hi_u32_u24": ("u32", "u32 u32", lambda a, b: low24(a) * low24(b) >> 32),
    "v_mul_hi_i32_i24": ("i32", "u32 u32", lambda a, b: sign24(a) * sign24(b) >> 32),
    "v_mad_u32_u24": ("u32", "u32 u32 u32", lambda a, b, c: low24(a) * low24(b) + c),
    "v_mad_i32_i24": ("i32", "u32 u32 i32", lambda a, b, c: sign24(a) * sign24(b) + c),
    "v_mad_u32_u16": ("u32", "u16 u16 u32", lambda a, b, c: a * b + c),
    "v_mad_i32_i16": ("i32", "i16 i16 i32", lambda a, b, c: a * b + c),
    "v_lshl_add_u64": ("u64", "u64 u32 u64", lambda a, b, c: (a << (b & 7)) + c),
    "v_and_b32": ("b32", "b32 b32", lambda a, b: a & b),
    "v_or_b32": ("b32", "b32 b32", lambda a, b: a | b),
    "v_xor_b32": ("b32", "b32 b32", lambda a, b: a ^ b),
    "v_xnor_b32": ("b32", "b32 b32", lambda a, b: ~(a ^ b)),
    "v_not_b32": ("b32", "b32", lambda a: ~a),
    "v_and_or_b32": ("b32", "b32 b32 b32", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("b32", "b32 b32 b32", lambda a, b, c: a | b | c),
    "v_xad_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_lshlrev_b16": ("b16", "b16 b16", lambda a, b: b << (a & 15)),
    "v_lshrrev_b16": ("b16", "b16 b16", lambda a, b: b >> (a & 15)),
    "v_ashrrev_i16": ("i16", "b16 i16", lambda a, b: b >> (a & 15)),
    "v_lshlrev_b32": ("b32", "b32 b32", lambda a, b: b << (a & 31)),
    "v_lshrrev_b32": ("b32", "b32 b32", lambda a, b: b >> (a & 31)),
    "v_ashrrev_i32": ("i32", "b32 i32", lambda a, b: b >> (a & 31)),
    "v_lshlrev_b64": ("b64", "b32 b64", lambda a, b: b << (a & 63)),
    "v_lshrrev_b64": ("b64", "b32 b64", lambda a, b: b >> (a & 63)),
    "v_ashrrev_i64": ("i64", "b32 i64", lambda a, b: b >> (a & 63)),
    "v_lshl_add_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a + b) << (c & 31)),
    "v_lshl_or_b32": ("b32", "b32 b32 b32", lambda a, b, c: a << (b & 31) | c),
    "v_bfe_u32": ("u32", "u32 u32 u32", field),
    "v_bfe_i32": ("i32", "i32 u32 u32", signed_field),
    "v_bfi_b32": ("b32", "b32 b32 b32", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfm_b32": ("b32", "b32 b32", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "v_bcnt_u32_b32": ("u32", "u32 u32", lambda a, b: bin(a).count("1") + b),
    "v_bfrev_b32": ("b32", "b32", lambda a: int(f"{a:032b}"[::-1], 2)),
    "v_ffbh_u32": ("i32", "u32", leading_zeros),
    "v_ffbh_i32": ("i32", "i32", like_sign),
    "v_ffbl_b32": ("i32", "u32", lambda a: (a & -a).bit_length() - 1),
    "v_alignbit_b32": ("b32", "b32 b32 b32", lambda a, b, c: (a << 32 | b) >> (c & 31)),
    "v_alignbyte_b32": ("b32", "b32 b32 b32", lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
    "v_perm_b32": ("b32", "b32 b32 b32", permuted),
    "v_sad_u8": ("u32", "u32 u32 u32", lambda a, b, c: byte_distance(a, b) + c),
    "v_sad_u32": ("u32", "u32 u32 u32", lambda a, b, c: abs(a - b) + c),
    "v_mov_b32": ("b32", "b32", lambda a: a),
    "v_mov_b64": ("b64", "b64", lambda a: a),
}
for _type in ("u32", "i32", "u16", "i16"):
    CASES |= {f"v_max_{_type}": (_type, f"{_type} {_type}", max), f"v_min_{_type}": (_type, f"{_type} {_type}", min),
              f"v_max3_{_type}": (_type, f"{_type} {_type} {_type}", max),
              f"v_min3_{_type}": (_type, f"{_type} {_type} {_type}", min),
              f"v_med3_{_type}": (_type, f"{_type} {_type} {_type}", middle)}

HALVES = {"v_mad_u16": "u16", "v_mad_i16": "i16"}
CARRIES = {"v_add_co_u32": lambda a, b, c: a + b, "v_sub_co_u32": lambda a, b, c: a - b,
           "v_subrev_co_u32": lambda a, b, c: b - a, "v_addc_co_u32": lambda a, b, c: a + b + c,
           "v_subb_co_u32": lambda a, b, c: a - b - c, "v_subbrev_co_u32": lambda a, b, c: b - a - c}

patterns = arrays(np.uint64, (3, LANES), elements=st.integers(0, (1 << 64) - 1))


def text_of(mnemonic):
    result, sources, _ = CASES[mnemonic]
    return vector_text(mnemonic, result, sources.split())


def carry_text(mnemonic, mask="s[4:5]"):
    with_input = "c_co" in mnemonic or "bb" in mnemonic
    suffix = "_e32" if mask == "vcc" else "_e64"
    carry_in = f", {'vcc' if mask == 'vcc' else 's[6:7]'}" if with_input else ""
    return f"{mnemonic}{suffix} v0, {mask}, v2, v4{carry_in}"


MOVES = ["v_accvgpr_write_b32 a7, v2", "v_accvgpr_mov_b32 a8, a7", "v_accvgpr_read_b32 v0, a8", "v_swap_b32 v0, v2",
         "v_nop", "v_cndmask_b32_e64 v0, v2, v4, s[4:5]", "v_cndmask_b32_e32 v0, v2, v4, vcc",
         "v_cndmask_b32_e64 v0, -v2, |v4|, s[4:5]"]
WIDE = ["v_mad_u64_u32 v[0:1], s[4:5], v2, v4, v[6:7]", "v_mad_i64_i32 v[0:1], s[4:5], v2, v4, v[6:7]"]
SATURATING = ["v_add_u32_e64 v0, v2, v4 clamp", "v_sub_u32_e64 v0, v2, v4 clamp", "v_add_i32 v0, v2, v4 clamp",
              "v_sub_i32 v0, v2, v4 clamp", "v_add_u16_e64 v0, v2, v4 clamp", "v_sub_i16 v0, v2, v4 clamp",
              "v_mad_i16 v0, v2, v4, v6 clamp"]
TEXTS = [*map(text_of, CASES), *MOVES, *WIDE, *SATURATING, *map(carry_text, CARRIES),
         *(carry_text(mnemonic, "vcc") for mnemonic in CARRIES), *(f"{m} v0, v2, v4, v6" for m in HALVES)]


@pytest.mark.parametrize("mnemonic", CASES)
def test_integer_instruction_on_special_values(mnemonic):
    result, sources, function = CASES[mnemonic]
    for columns in special_columns(sources.split()):
        check_lanes(text_of(mnemonic), result, sources.split(), columns, function)


@settings(max_examples=8, deadline=None)
@given(values=patterns)
@pytest.mark.parametrize("mnemonic", CASES)
def test_integer_instruction_on_random_values(mnemonic, values):
    result, sources, function = CASES[mnemonic]
    sources = sources.split()
    check_lanes(text_of(mnemonic), result, sources, [column.tolist() for column in values[: len(sources)]], function)


@pytest.mark.parametrize("selector", (0x07060302, 0x04050607, 0x08080808, 0x0B0A0908, 0x0C0C0100, 0x0D0CFF07))
def test_a_permutation_of_bytes_by_a_scalar(selector):
    wave = make_wave()
    wave.scalar[29] = selector
    run(wave, "v_perm_b32 v0, v2, v4, s29")
    sources = zip(get_lanes(wave, 2, "b32"), get_lanes(wave, 4, "b32"), strict=True)
    assert get_lanes(wave, 0, "b32") == [permuted(a, b, selector) for a, b in sources]


def test_a_permutation_of_bytes_takes_every_selector():
    selectors = [sum(((k * 4 + byte) & 255) << 8 * byte for byte in range(4)) for k in range(LANES)]
    for columns in special_columns(["b32", "b32"]):
        check_lanes("v_perm_b32 v0, v2, v4, v6", "b32", ["b32"] * 3, [*columns, selectors], permuted)


@pytest.mark.parametrize("mask", ("vcc", "s[4:5]"))
@pytest.mark.parametrize("mnemonic", CARRIES)
def test_carry_goes_through_a_lane_mask(mnemonic, mask):
    function, text = CARRIES[mnemonic], carry_text(mnemonic, mask)
    carry_in = 0x0123_4567_89AB_CDEF
    for a, b in special_columns(["u32", "u32"]):
        wave = make_wave(ODD_LANES)
        put_lanes(wave, 2, "u32", a)
        put_lanes(wave, 4, "u32", b)
        wave.write_sgprs(106 if mask == "vcc" else 6, 2, carry_in)
        run(wave, text)
        got, carries = get_lanes(wave, 0, "u32"), wave.read_sgprs(106 if mask == "vcc" else 4, 2)
        for k in range(LANES):
            exact = function(a[k] & 0xFFFFFFFF, b[k] & 0xFFFFFFFF, carry_in >> k & 1)
            active = ODD_LANES >> k & 1
            assert carries >> k & 1 == (exact >> 32 & 1) * active
            if active:
                assert got[k] == exact & 0xFFFFFFFF


@pytest.mark.parametrize("text", WIDE)
def test_wide_multiply_add_gives_64_bits_and_the_next_one(text):
    narrow, wide = ("u32", "u64") if "u64" in text else ("i32", "i64")
    for columns in special_columns([narrow, narrow, wide]):
        check_lanes(text, wide, [narrow, narrow, wide], columns, lambda a, b, c: a * b + c)
        wave = make_wave(ODD_LANES)
        for first, name, values in zip((2, 4, 6), (narrow, narrow, wide), columns, strict=True):
            put_lanes(wave, first, name, values)
        run(wave, text)
        for k in range(LANES):
            a, b, c = (_signed(values[k], name) for values, name in zip(columns, (narrow, narrow, wide), strict=True))
            assert wave.read_sgprs(4, 2) >> k & 1 == (a * b + c >> 64 & 1) * (ODD_LANES >> k & 1)


def _signed(value, name):
    value &= (1 << BITS[name]) - 1
    return value - (1 << BITS[name]) if name[0] == "i" and value >> (BITS[name] - 1) else value


@pytest.mark.parametrize("mnemonic", HALVES)
def test_multiply_add_of_halves_keeps_the_other_half(mnemonic):
    name = HALVES[mnemonic]
    for columns in special_columns([name] * 3):
        wave = make_wave()
        for first, values in zip((2, 4, 6), columns, strict=True):
            put_lanes(wave, first, "b32", values)
        old = get_lanes(wave, 0, "b32")
        run(wave, f"{mnemonic} v0, v2, v4, v6 op_sel:[1,0,0,1]")
        for k, got in enumerate(get_lanes(wave, 0, "b32")):
            a, b, c = ((int(values[k]) >> shift) & 0xFFFF for values, shift in zip(columns, (16, 0, 0), strict=True))
            assert got == old[k] & 0xFFFF | (a * b + c & 0xFFFF) << 16
        run(wave, f"{mnemonic} v0, v2, v4, v6")
        assert all(got >> 16 == (int(a[0] >> 16) * int(a[1]) + int(a[2])) & 0xFFFF for got, a in zip(
            get_lanes(wave, 0, "b32"), zip(*columns, strict=True), strict=True))


@pytest.mark.parametrize("text", SATURATING)
def test_clamp_saturates_integers(text):
    name = text.split()[0].removesuffix("_e64")[-3:]
    count = 3 if "mad" in text else 2
    lowest = -(1 << BITS[name] - 1) if name[0] == "i" else 0
    highest = lowest + (1 << BITS[name]) - 1

    def clamped(a, b, c=0):
        exact = a * b + c if "mad" in text else a - b if "sub" in text else a + b
        return min(max(exact, lowest), highest)

    for columns in special_columns([name] * count):
        if "mad" in text:  # keeps the high half of what was there, which check_lanes would not expect
            wave = make_wave()
            for k, values in enumerate(columns):
                put_lanes(wave, 2 + 2 * k, name, values)
            run(wave, text)
            got = [lane & 0xFFFF for lane in get_lanes(wave, 0, name)]
            assert got == [clamped(*(_signed(x, name) for x in row)) & 0xFFFF for row in zip(*columns, strict=True)]
        else:
            check_lanes(text, name, [name] * count, columns, clamped)


def test_moves_through_accumulation_registers_and_swap():
    wave = make_wave(ODD_LANES)
    start = wave.vector.copy()
    run(wave, *MOVES[:3])
    active = wave.active
    assert (wave.vector[0] == np.where(active, start[2], start[0])).all()
    run(wave, "v_nop", "v_mov_b32_e32 v0, v4", "v_swap_b32 v0, v2")
    assert (wave.vector[0] == np.where(active, start[2], start[0])).all()
    assert (wave.vector[2] == np.where(active, start[4], start[2])).all()


def test_cndmask_takes_its_second_source_where_the_mask_is_set():
    wave = make_wave(ODD_LANES)
    mask = 0xF0F0_1234_0000_FFFF
    wave.write_sgprs(4, 2, mask)
    wave.write_sgprs(106, 2, mask)
    for text in MOVES[5:]:
        run(wave, text)
        for k in range(LANES):
            a, b = int(wave.vector[2, k]), int(wave.vector[4, k])
            if "|" in text:
                a, b = a ^ 1 << 31, b & ~(1 << 31)
            if ODD_LANES >> k & 1:
                assert wave.vector[0, k] == (b if mask >> k & 1 else a)
