"""The emulator's comparisons, conversions and packed instructions, each lane against Python numbers."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from tests.gfx942.alu_cases import (
    LANES,
    SPECIAL,
    check_lanes,
    decoded,
    encoded,
    get_lanes,
    nearest,
    put_lanes,
    registers,
    same,
    special_columns,
    vector_text,
)
from tests.gfx942.assembly import ODD_LANES, make_wave, run
from tests.gfx942.test_emulator_float import add, close_columns, fused, largest, multiply, signaling, smallest

INTEGER = {"f": lambda a, b: False, "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b,
           "gt": lambda a, b: a > b, "ne": lambda a, b: a != b, "ge": lambda a, b: a >= b, "t": lambda a, b: True}
FLOAT = {"f": lambda a, b: False, "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b,
         "gt": lambda a, b: a > b, "lg": lambda a, b: a < b or a > b, "ge": lambda a, b: a >= b,
         "o": lambda a, b: a == a and b == b, "u": lambda a, b: a != a or b != b, "nge": lambda a, b: not a >= b,
         "nlg": lambda a, b: not (a < b or a > b), "ngt": lambda a, b: not a > b, "nle": lambda a, b: not a <= b,
         "neq": lambda a, b: a != b, "nlt": lambda a, b: not a < b, "tru": lambda a, b: True}
COMPARISONS = {f"{name}_{type_}": (type_, function)
               for types, functions in ((("i16", "u16", "i32", "u32", "i64", "u64"), INTEGER),
                                        (("f16", "f32", "f64"), FLOAT))
               for type_, (name, function) in itertools.product(types, functions.items())}


def compare_text(kind, name, target):
    type_ = COMPARISONS[name][0]
    suffix = "_e32" if target == "vcc" else "_e64"
    return f"v_{kind}_{name}{suffix} {target}, {registers(type_, 2)}, {registers(type_, 4)}"


CLASSES = {f"v_{kind}_class_{t}": t for kind in ("cmp", "cmpx") for t in ("f16", "f32", "f64")}


def class_text(mnemonic):
    return f"{mnemonic}_e64 s[4:5], {registers(CLASSES[mnemonic], 2)}, v4"


@pytest.mark.parametrize("target", ("vcc", "s[4:5]"))
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison_gives_a_mask_that_is_zero_in_inactive_lanes(name, target):
    type_, function = COMPARISONS[name]
    first = 106 if target == "vcc" else 4
    for columns in itertools.islice(special_columns([type_] * 2), 5):
        wave = make_wave(ODD_LANES)
        put_lanes(wave, 2, type_, columns[0])
        put_lanes(wave, 4, type_, columns[1])
        wave.write_sgprs(first, 2, (1 << 64) - 1)
        pairs = zip(*([decoded(bits, type_) for bits in column] for column in columns), strict=True)
        wanted = sum(function(*pair) << k for k, pair in enumerate(pairs)) & ODD_LANES
        run(wave, compare_text("cmp", name, target))
        assert wave.read_sgprs(first, 2) == wanted and wave.exec == ODD_LANES
        wave.write_sgprs(first, 2, (1 << 64) - 1)
        run(wave, compare_text("cmpx", name, target))
        assert wave.read_sgprs(first, 2) == wanted and wave.exec == wanted


def class_of(bits, name):
    """The number of the class that the manual gives the value."""
    value = decoded(bits, name)
    if math.isnan(value):
        return 0 if signaling(bits, name) else 1
    smallest_normal = 2.0 ** {"f16": -14, "f32": -126, "f64": -1022}[name]
    size = 3 if math.isinf(value) else 0 if value == 0 else 1 if abs(value) < smallest_normal else 2
    return 6 + size if math.copysign(1, value) > 0 else 5 - size


@pytest.mark.parametrize("mnemonic", CLASSES)
def test_class_test_knows_all_ten_classes(mnemonic):
    name = CLASSES[mnemonic]
    values = SPECIAL[{"f16": 16, "f32": 32, "f64": 64}[name]]
    values = [*values, *([0] * (LANES - len(values)))]
    assert {class_of(bits, name) for bits in values} == set(range(10))
    for wanted in range(10):
        wave = make_wave()
        put_lanes(wave, 2, name, values)
        wave.vector[4] = 1 << wanted
        run(wave, class_text(mnemonic))
        expected = sum((class_of(bits, name) == wanted) << k for k, bits in enumerate(values))
        assert wave.read_sgprs(4, 2) == expected
        assert wave.exec == (expected if "cmpx" in mnemonic else (1 << 64) - 1)


# ---- conversions ----------------------------------------------------------------------------------------------------

LIMITS = {"i16": (-(1 << 15), (1 << 15) - 1), "u16": (0, (1 << 16) - 1), "i32": (-(1 << 31), (1 << 31) - 1),
          "u32": (0, (1 << 32) - 1)}


def saturating(name, rounds=math.trunc):
    low, high = LIMITS[name]
    return lambda a: 0 if math.isnan(a) else low if a == -math.inf else high if a == math.inf else min(
        max(rounds(a), low), high)


def to_float(name):
    return lambda a: a if isinstance(a, float) and not (a and math.isfinite(a)) else nearest(Fraction(a), name)


def half_toward_zero(a):
    if not math.isfinite(a) or a == 0:
        return encoded(a, "f16") if a == a else 0x7E00
    bits = encoded(nearest(abs(Fraction(a)), "f16"), "f16")
    bits -= decoded(bits, "f16") > abs(a)
    return bits | (a < 0) << 15


def normalized(a, low, top):
    return 0 if math.isnan(a) else round(Fraction(min(max(a, low), 1.0)) * top)


CONVERSIONS = {
    **{f"v_cvt_{i}_{f}": (i, f, saturating(i)) for i in ("i32", "u32") for f in ("f32", "f64")},
    **{f"v_cvt_{f}_{i}": (f, i, to_float(f)) for i in ("i32", "u32") for f in ("f32", "f64")},
    **{f"v_cvt_{i}_f16": (i, "f16", saturating(i)) for i in ("i16", "u16")},
    **{f"v_cvt_f16_{i}": ("f16", i, to_float("f16")) for i in ("i16", "u16")},
    **{f"v_cvt_f32_{t}": ("f32", t, to_float("f32")) for t in ("f16", "f64")},
    **{f"v_cvt_{t}_f32": (t, "f32", to_float(t)) for t in ("f16", "f64")},
    "v_cvt_rpi_i32_f32": ("i32", "f32", saturating("i32", lambda a: math.floor(Fraction(a) + Fraction(1, 2)))),
    "v_cvt_flr_i32_f32": ("i32", "f32", saturating("i32", math.floor)),
    **{f"v_cvt_f32_ubyte{k}": ("f32", "b32", lambda a, k=k: float(a >> 8 * k & 255)) for k in range(4)},
    "v_cvt_pknorm_i16_f32": ("b32", "f32 f32", lambda a, b: sum(
        (normalized(x, -1.0, 32767) & 0xFFFF) << 16 * k for k, x in enumerate((a, b)))),
    "v_cvt_pknorm_u16_f32": ("b32", "f32 f32", lambda a, b: sum(
        normalized(x, 0.0, 65535) << 16 * k for k, x in enumerate((a, b)))),
    "v_cvt_pk_i16_i32": ("b32", "i32 i32", lambda a, b: sum(
        (min(max(x, -32768), 32767) & 0xFFFF) << 16 * k for k, x in enumerate((a, b)))),
    "v_cvt_pk_u16_u32": ("b32", "u32 u32", lambda a, b: min(a, 65535) | min(b, 65535) << 16),
    "v_pack_b32_f16": ("b32", "b16 b16", lambda a, b: a | b << 16),
    "v_cvt_pk_u8_f32": ("b32", "f32 u32 b32", lambda a, at, c: c & ~(255 << 8 * (at & 3)) | (
        0 if math.isnan(a) else 255 if a > 255 else 0 if a < 0 else round(a)) << 8 * (at & 3)),
}


def conversion_text(mnemonic):
    result, sources, _ = CONVERSIONS[mnemonic]
    return vector_text(mnemonic, result, sources.split())


@pytest.mark.parametrize("mnemonic", CONVERSIONS)
def test_conversion(mnemonic):
    result, sources, function = CONVERSIONS[mnemonic]
    for columns in special_columns(sources.split()):
        check_lanes(conversion_text(mnemonic), result, sources.split(), columns, function)


@pytest.mark.parametrize("seed", range(3))
def test_packing_halves_rounds_toward_zero(seed):
    (a, b, _), specials = close_columns("f32", seed), SPECIAL[32]
    columns = [[*specials, *a][:LANES], [*b, *specials][-LANES:]]
    wave = make_wave()
    put_lanes(wave, 2, "f32", columns[0])
    put_lanes(wave, 4, "f32", columns[1])
    run(wave, "v_cvt_pkrtz_f16_f32 v0, v2, v4")
    for k, got in enumerate(get_lanes(wave, 0, "b32")):
        for column, bits in zip(columns, (got & 0xFFFF, got >> 16), strict=True):
            value = decoded(column[k], "f32")
            assert same(bits, math.nan, "f16") if math.isnan(value) else bits == half_toward_zero(value)


# ---- packed instructions --------------------------------------------------------------------------------------------

PACKED_F32 = {"v_pk_add_f32": (2, add), "v_pk_mul_f32": (2, multiply), "v_pk_fma_f32": (3, fused)}
PACKED_16 = {
    "v_pk_add_f16": ("f16", 2, add), "v_pk_mul_f16": ("f16", 2, multiply), "v_pk_fma_f16": ("f16", 3, fused),
    "v_pk_max_f16": ("f16", 2, largest), "v_pk_min_f16": ("f16", 2, smallest),
    "v_pk_mul_lo_u16": ("u16", 2, lambda a, b: a * b), "v_pk_lshlrev_b16": ("u16", 2, lambda a, b: b << (a & 15)),
    "v_pk_lshrrev_b16": ("u16", 2, lambda a, b: b >> (a & 15)),
    "v_pk_ashrrev_i16": ("i16", 2, lambda a, b: b >> (a & 15))}
for _t in ("i16", "u16"):
    PACKED_16 |= {f"v_pk_add_{_t}": (_t, 2, lambda a, b: a + b), f"v_pk_sub_{_t}": (_t, 2, lambda a, b: a - b),
                  f"v_pk_mad_{_t}": (_t, 3, lambda a, b, c: a * b + c), f"v_pk_max_{_t}": (_t, 2, max),
                  f"v_pk_min_{_t}": (_t, 2, min)}
SELECTIONS = [((0, 0, 0), (1, 1, 1)), ((1, 0, 1), (0, 1, 0)), ((0, 0, 0), (0, 0, 0)), ((1, 1, 1), (1, 1, 1))]


def bracket(bits):
    return f"[{','.join(map(str, bits))}]"


def selections(low, high, sources, **more):
    shown = {"op_sel": low, "op_sel_hi": high, **more}
    return "".join(f" {key}:{bracket(bits[:sources])}" for key, bits in shown.items()
                   if any(bits[:sources]) != (key == "op_sel_hi") or not all(bits[:sources]) == (key == "op_sel_hi"))


def packed_text(mnemonic, low, high, **more):
    sources = (PACKED_F32.get(mnemonic) or PACKED_16[mnemonic][1:])[0]
    wide = mnemonic in PACKED_F32
    operands = [f"v[{2 * k}:{2 * k + 1}]" if wide else f"v{2 * k}" for k in range(sources + 1)]
    return f"{mnemonic} {', '.join(operands)}{selections(low, high, sources, **more)}"


NEGATED = {"neg_lo": (0, 1, 1), "neg_hi": (1, 0, 1)}
MIX = ["v_fma_mix_f32 v0, v2, v4, v6", "v_fma_mix_f32 v0, v2, -v4, v6 op_sel:[1,0,0] op_sel_hi:[1,0,1]",
       "v_fma_mixlo_f16 v0, v2, v4, v6 op_sel:[0,0,1] op_sel_hi:[1,1,1]",
       "v_fma_mixhi_f16 v0, v2, |v4|, v6 op_sel_hi:[0,0,1]"]
TEXTS = [*(compare_text(kind, name, target) for kind in ("cmp", "cmpx") for name in COMPARISONS
           for target in ("vcc", "s[4:5]")), *map(class_text, CLASSES), *map(conversion_text, CONVERSIONS),
         "v_cvt_pkrtz_f16_f32 v0, v2, v4", *(packed_text(m, *s) for m in PACKED_F32 | PACKED_16 for s in SELECTIONS),
         *(packed_text(m, *SELECTIONS[0], **NEGATED) for m in (*PACKED_F32, "v_pk_fma_f16")),
         "v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]", *MIX]


@pytest.mark.parametrize("negated", (False, True))
@pytest.mark.parametrize("low, high", SELECTIONS)
@pytest.mark.parametrize("mnemonic", PACKED_F32)
def test_packed_float_takes_the_numbers_that_op_sel_names(mnemonic, low, high, negated):
    sources, function = PACKED_F32[mnemonic]
    wave = make_wave(ODD_LANES)
    for j, columns in enumerate(zip(close_columns("f32", 1), close_columns("f32", 2), strict=True)):
        for half, values in enumerate(columns):
            put_lanes(wave, 2 + 2 * j + half, "f32", values)
    start = wave.vector.copy()
    run(wave, packed_text(mnemonic, low, high, **(NEGATED if negated else {})))
    for k, (result, select) in itertools.product(range(LANES), enumerate((low, high))):
        flips = NEGATED[("neg_lo", "neg_hi")[result]] if negated else (0, 0, 0)
        numbers = [decoded(int(start[2 + 2 * j + select[j], k]) ^ flips[j] << 31, "f32") for j in range(sources)]
        got = int(wave.vector[result, k])
        assert same(got, function(*numbers), "f32") if ODD_LANES >> k & 1 else got == start[result, k]


@pytest.mark.parametrize("low, high", SELECTIONS)
@pytest.mark.parametrize("mnemonic", PACKED_16)
def test_packed_halves(mnemonic, low, high):
    name, sources, function = PACKED_16[mnemonic]
    batches = zip(special_columns([name] * 3, 1), special_columns([name] * 3, 2), strict=True)
    for columns in itertools.islice(batches, 6):
        wave = make_wave()
        for j in range(3):
            column = [(a & 0xFFFF) | (b & 0xFFFF) << 16 for a, b in zip(columns[0][j], columns[1][j], strict=True)]
            wave.vector[2 + 2 * j] = [0 if name == "f16" and (signaling(w & 0xFFFF, name) or signaling(w >> 16, name))
                                      else w for w in column]
        run(wave, packed_text(mnemonic, low, high))
        for k, (result, select) in itertools.product(range(LANES), enumerate((low, high))):
            numbers = [decoded(int(wave.vector[2 + 2 * j, k]) >> 16 * select[j], name) for j in range(sources)]
            assert same(int(wave.vector[0, k]) >> 16 * result & 0xFFFF, function(*numbers), name), numbers


def test_packed_float_reads_scalar_pairs_and_the_low_half_of_constants():
    wave = make_wave()
    wave.vector[2:4] = np.float32([[3.0], [5.0]]).view(np.uint32)
    wave.write_sgprs(4, 2, encoded(0.5, "f32") | encoded(8.0, "f32") << 32)
    run(wave, "v_pk_mul_f32 v[0:1], v[2:3], s[4:5]", "v_pk_add_f32 v[4:5], v[0:1], 1.0 op_sel_hi:[1,0]",
        "v_pk_mul_f32 v[6:7], v[2:3], s[4:5] op_sel:[1,0] op_sel_hi:[0,1]")
    assert wave.vector[[0, 1, 4, 5, 6, 7], 9].view(np.float32).tolist() == [1.5, 40.0, 2.5, 41.0, 2.5, 24.0]


@pytest.mark.parametrize("first, second", itertools.product((0, 1), repeat=2))
def test_packed_move_chooses_one_number_of_each_source(first, second):
    wave = make_wave(ODD_LANES)
    start = wave.vector.copy()
    run(wave, f"v_pk_mov_b32 v[4:5], v[2:3], v[4:5] op_sel:[{first},{second}]")
    active = wave.active
    assert (wave.vector[4] == np.where(active, start[2 + first], start[4])).all()
    assert (wave.vector[5] == np.where(active, start[4 + second], start[5])).all()


@pytest.mark.parametrize("text", MIX)
def test_mixed_multiply_add_reads_halves_and_singles(text):
    halves, highs = ([int(c) for c in text.split(key)[1][1:6:2]] if key in text else [0, 0, 0]
                     for key in ("op_sel_hi:", "op_sel:"))
    for columns in itertools.islice(special_columns(["f32"] * 3), 6):
        wave = make_wave()
        for j, column in enumerate(columns):
            put_lanes(wave, 2 + 2 * j, "f32", column)
        before = get_lanes(wave, 0, "b32")
        run(wave, text)
        for k, got in enumerate(get_lanes(wave, 0, "b32")):
            a, b, c = (decoded(column[k] >> 16 * high, "f16" if half else "f32")
                       for column, half, high in zip(columns, halves, highs, strict=True))
            b = -b if "-v4" in text else abs(b) if "|v4|" in text else b
            if "mix_f32" in text:
                assert same(got, fused(a, b, c), "f32")
            else:
                shift = 16 if "mixhi" in text else 0
                assert same(got >> shift & 0xFFFF, fused(a, b, c), "f16")
                assert got >> 16 - shift & 0xFFFF == before[k] >> 16 - shift & 0xFFFF
