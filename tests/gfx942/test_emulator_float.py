"""The emulator's vector instructions on floats: fractions rounded to nearest even, NaN and zero rules, division."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.gfx942.alu_cases import (
    LANES,
    SPECIAL,
    check_lanes,
    decoded,
    encoded,
    finite,
    get_lanes,
    lanes_of,
    nearest,
    put_lanes,
    same,
    special_columns,
    vector_text,
)
from tests.gfx942.assembly import make_wave, run

TYPES = ("f16", "f32", "f64")
patterns = arrays(np.uint64, (3, LANES), elements=st.integers(0, (1 << 64) - 1))


def add(a, b):
    return Fraction(a) + Fraction(b) or a + b if finite(a, b) else a + b


def multiply(a, b):
    if not finite(a, b):
        return a * b
    return signed_zero(Fraction(a) * Fraction(b), math.copysign(1, a) * math.copysign(1, b))


def signed_zero(exact, sign):
    """A fraction; what is zero, or will be rounded to it, keeps the sign."""
    return exact if exact else math.copysign(0.0, sign)


def fused(a, b, c):
    if not finite(a, b, c):
        return a * b + c if not finite(a, b) else c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        return exact
    product_sign = math.copysign(1, a) * math.copysign(1, b)
    return -0.0 if product_sign < 0 and math.copysign(1, c) < 0 and not (Fraction(a) * Fraction(b)) else 0.0


def signaling(bits, name):
    value = decoded(bits, name)
    return math.isnan(value) and not bits >> {"f16": 9, "f32": 22, "f64": 51}[name] & 1


def ordered(a, b, better):
    """The better of two, a number before a NaN, zeros by their signs."""
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return better((a, b), key=lambda x: (x, math.copysign(1, x)))


def largest(a, b):
    return ordered(a, b, max)


def smallest(a, b):
    return ordered(a, b, min)


def middle(a, b, c):
    """As the manual has it: the larger of the two beside the largest, where -0 equals +0."""
    if any(map(math.isnan, (a, b, c))):
        return smallest(smallest(a, b), c)
    top = largest(largest(a, b), c)
    return largest(b, c) if top == a else largest(a, c) if top == b else largest(a, b)


def scaled(a, power):
    if not math.isfinite(a) or a == 0:
        return a
    return Fraction(a) * Fraction(2) ** min(max(power, -5000), 5000)


def mantissa(a):
    return math.frexp(a)[0] if math.isfinite(a) else a


def exponent(a):
    return math.frexp(a)[1] if math.isfinite(a) else 0


def integral(function):
    return lambda a: math.copysign(float(function(a)), a) if math.isfinite(a) else a


ARITHMETIC = {}
for _t, _i in (("f16", "i16"), ("f32", "i32"), ("f64", "i32")):
    _two, _three = f"{_t} {_t}", f"{_t} {_t} {_t}"
    ARITHMETIC |= {
        f"v_add_{_t}": (_t, _two, add), f"v_mul_{_t}": (_t, _two, multiply),
        f"v_ldexp_{_t}": (_t, f"{_t} {_i}", scaled), f"v_frexp_mant_{_t}": (_t, _t, mantissa),
        f"v_frexp_exp_{_i}_{_t}": (_i, _t, exponent), f"v_trunc_{_t}": (_t, _t, integral(math.trunc)),
        f"v_floor_{_t}": (_t, _t, integral(math.floor)), f"v_ceil_{_t}": (_t, _t, integral(math.ceil)),
        f"v_rndne_{_t}": (_t, _t, integral(round))}
    if _t != "f16":  # it keeps half of the register: below
        ARITHMETIC[f"v_fma_{_t}"] = (_t, _three, fused)
    if _t != "f64":
        ARITHMETIC |= {f"v_sub_{_t}": (_t, _two, lambda a, b: add(a, -b)),
                       f"v_subrev_{_t}": (_t, _two, lambda a, b: add(b, -a))}
ARITHMETIC["v_mul_legacy_f32"] = ("f32", "f32 f32", lambda a, b: 0.0 if a == 0 or b == 0 else multiply(a, b))

EXTREMES = {f"v_{_name}_{_t}": (_t, f"{_t} {_t}", _function) for _t in TYPES for _name, _function in (
    ("max", largest), ("min", smallest))}
EXTREMES |= {f"v_{_name}_{_t}": (_t, f"{_t} {_t} {_t}", _function) for _t in ("f16", "f32") for _name, _function in (
    ("max3", lambda a, b, c: largest(largest(a, b), c)), ("min3", lambda a, b, c: smallest(smallest(a, b), c)),
    ("med3", middle))}


def reciprocal(a):
    return math.copysign(math.inf, a) if a == 0 else 1 / a


def root(a):
    return math.nan if a < 0 else math.sqrt(a)


def power_of_two(a):
    return 0.0 if a < -1100 else math.inf if a > 1100 else 2.0 ** a


def logarithm(a):
    return -math.inf if a == 0 else math.nan if a < 0 else math.log2(a)


def sine(a):
    return math.nan if math.isinf(a) else 0.0 if abs(a) > 256 else math.sin(2 * math.pi * math.fmod(a, 1))


def cosine(a):
    return math.nan if math.isinf(a) else 1.0 if abs(a) > 256 else math.cos(2 * math.pi * math.fmod(a, 1))


FUNCTIONS = {"rcp": reciprocal, "rsq": lambda a: reciprocal(root(a)), "sqrt": root, "exp": power_of_two,
             "log": logarithm, "sin": sine, "cos": cosine}
FUNCTION_NAMES = [f"v_{name}_{t}" for name in FUNCTIONS for t in ("f16", "f32")] + ["v_rcp_iflag_f32"] + [
    f"v_{name}_f64" for name in ("rcp", "rsq", "sqrt")]
ACCUMULATING = {f"v_fmac_{t}": t for t in ("f32", "f64")}
DIVISIONS = [f"v_div_{what}_{t} {d}, {mask}{d}, {d}, {d}" for t, d in (("f32", "v0"), ("f64", "v[0:1]"))
             for what, mask in (("scale", "vcc, "), ("fmas", ""), ("fixup", ""))]


def text_of(mnemonic, cases):
    result, sources, _ = cases[mnemonic]
    return vector_text(mnemonic, result, sources.split())


TEXTS = [*(text_of(m, ARITHMETIC) for m in ARITHMETIC), *(text_of(m, EXTREMES) for m in EXTREMES), *DIVISIONS,
         *(vector_text(m, m[-3:], [m[-3:]]) for m in FUNCTION_NAMES), "v_fma_f16 v0, v2, v4, v6",
         "v_div_fixup_f16 v0, v2, v4, v6", *(vector_text(m, t, [t, t]) for m, t in ACCUMULATING.items()),
         *(f"v_fract_{t} {d}, {s}" for t, d, s in (("f16", "v0", "v2"), ("f32", "v0", "v2"),
                                                   ("f64", "v[0:1]", "v[2:3]"))),
         "v_fmaak_f32 v0, v2, v4, 0x3fc00000", "v_fmamk_f32 v0, v2, 0x3fc00000, v4"]


@pytest.mark.parametrize("mnemonic", ARITHMETIC)
def test_float_arithmetic_is_rounded_once(mnemonic):
    result, sources, function = ARITHMETIC[mnemonic]
    for columns in special_columns(sources.split()):
        check_lanes(text_of(mnemonic, ARITHMETIC), result, sources.split(), columns, function)


@settings(max_examples=8, deadline=None)
@given(values=patterns)
@pytest.mark.parametrize("mnemonic", ARITHMETIC)
def test_float_arithmetic_on_random_bits(mnemonic, values):
    result, sources, function = ARITHMETIC[mnemonic]
    sources = sources.split()
    check_lanes(text_of(mnemonic, ARITHMETIC), result, sources,
                [column.tolist() for column in values[: len(sources)]], function)


def close_columns(name, seed):
    """Patterns whose exponents are near each other's, and whose products' are near the third's: sums that round."""
    rng = np.random.default_rng(seed)
    width, mantissa_bits, bias = {"f16": (16, 10, 15), "f32": (32, 23, 127), "f64": (64, 52, 1023)}[name]
    low = rng.integers(0, 1 << mantissa_bits, (3, LANES), np.uint64)
    sparse = low & ~np.uint64((1 << mantissa_bits // 2) - 1)
    mantissas = np.where(rng.random((3, LANES)) < 0.5, low, sparse)
    spread = rng.integers(-mantissa_bits - 3, mantissa_bits + 3, LANES)
    one, other = rng.integers(-3, 3, (2, LANES))
    fields = np.stack([bias + one, bias + other, np.clip(bias + one + other + spread, 0, 2 * bias)]).astype(np.uint64)
    signs = rng.integers(0, 2, (3, LANES), np.uint64) << np.uint64(width - 1)
    return (signs | fields << np.uint64(mantissa_bits) | mantissas).tolist()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ("f32", "f64"))
def test_fused_multiply_add_rounds_once(name, seed):
    columns = close_columns(name, seed)
    check_lanes(vector_text(f"v_fma_{name}", name, [name] * 3), name, [name] * 3, columns, fused)
    check_lanes(vector_text(f"v_fmac_{name}", name, [name] * 2), name, [name] * 3, columns, fused, accumulates=True)


def test_fused_multiply_add_of_halfway_products_is_not_rounded_twice():
    """(1 + 2**-12)**2 lies halfway between two FP32 numbers; a third term far too small for FP64 decides."""
    a = encoded(1 + 2.0 ** -12, "f32")
    tiny, normal = encoded(2.0 ** -140, "f32"), encoded(2.0 ** -100, "f32")
    third = [tiny, tiny | 1 << 31, normal, normal | 1 << 31, 0, 1 << 31, 1, 1 << 31 | 1] * 8
    got = lanes_of("v_fma_f32 v0, v2, v4, v6", "f32", ["f32"] * 3, [[a] * LANES, [a] * LANES, third])
    base = encoded(1 + 2.0 ** -11, "f32")
    assert got[:8] == [base + 1, base, base + 1, base, base, base, base + 1, base]


@pytest.mark.parametrize("seed", range(4))
def test_fmaak_and_fmamk_take_their_literal_where_it_stands(seed):
    columns = close_columns("f32", seed)[:2]
    check_lanes("v_fmaak_f32 v0, v2, v4, 0x3fc00000", "f32", ["f32"] * 2, columns, lambda a, b: fused(a, b, 1.5))
    check_lanes("v_fmamk_f32 v0, v2, 0x3fc00000, v4", "f32", ["f32"] * 2, columns, lambda a, b: fused(a, 1.5, b))


@pytest.mark.parametrize("seed", range(4))
def test_half_precision_fma_keeps_the_other_half(seed):
    columns = close_columns("f16", seed)
    for extra, shift in (("", 0), (" op_sel:[0,0,0,1]", 16)):
        wave = make_wave()
        for k, values in enumerate(columns):
            put_lanes(wave, 2 + 2 * k, "f16", values)
        before = get_lanes(wave, 0, "f32")
        run(wave, "v_fma_f16 v0, v2, v4, v6" + extra)
        for k, got in enumerate(get_lanes(wave, 0, "f32")):
            wanted = fused(*(decoded(values[k], "f16") for values in columns))
            assert same(got >> shift & 0xFFFF, wanted, "f16")
            assert got & 0xFFFF << (16 - shift) == before[k] & 0xFFFF << (16 - shift)


@pytest.mark.parametrize("mnemonic", EXTREMES)
def test_extremes_order_zeros_and_prefer_numbers_to_nans(mnemonic):
    result, sources, function = EXTREMES[mnemonic]
    names = sources.split()
    for columns in special_columns(names):
        quiet = [[0 if signaling(bits, name) else bits for bits in column]
                 for name, column in zip(names, columns, strict=True)]
        check_lanes(text_of(mnemonic, EXTREMES), result, names, quiet, function)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("which", ("max", "min"))
def test_a_signaling_nan_comes_out_quiet(name, which):
    noisy = {"f16": 0x7C01, "f32": 0x7F800001, "f64": (0x7FF << 52) + 1}[name]
    quiet = noisy | {"f16": 0x200, "f32": 1 << 22, "f64": 1 << 51}[name]
    one = encoded(1.0, name)
    text = vector_text(f"v_{which}_{name}", name, [name] * 2)
    assert lanes_of(text, name, [name] * 2, [[noisy] * LANES, [one] * LANES]) == [quiet] * LANES
    assert lanes_of(text, name, [name] * 2, [[one] * LANES, [noisy] * LANES]) == [quiet] * LANES


@pytest.mark.parametrize("mnemonic", FUNCTION_NAMES)
def test_function_is_right_to_the_last_bit_or_next_to_it(mnemonic):
    name, function = mnemonic[-3:], FUNCTIONS[mnemonic.split("_")[1]]
    flushes = name == "f32" and mnemonic.split("_")[1] not in ("sin", "cos")
    rng = np.random.default_rng(5)
    draws = rng.integers(0, 1 << 64, 8 * LANES, np.uint64).tolist()
    draws += [encoded(float(x), name) for x in rng.uniform(-20, 20, 8 * LANES).astype(np.float16)]
    values = [*SPECIAL[{"f16": 16, "f32": 32, "f64": 64}[name]], *draws]
    values += [0] * (-len(values) % LANES)
    for start in range(0, len(values), LANES):
        column = values[start : start + LANES]
        got = lanes_of(vector_text(mnemonic, name, [name]), name, [name], [column])
        for bits, result in zip(column, got, strict=True):
            argument = flush(decoded(bits, name)) if flushes else decoded(bits, name)
            wanted = argument if math.isnan(argument) else function(argument)
            wanted = nearest(Fraction(wanted), name) if math.isfinite(wanted) and wanted else wanted
            wanted = flush(wanted) if flushes else wanted
            exact = same(result, wanted, name) or abs(wanted) < 1e-15 and decoded(result, name) == 0  # sin of a half
            near = math.isfinite(wanted) and wanted != 0 and abs(encoded(wanted, name) - result) <= 1
            assert exact or near, f"{mnemonic} of {argument} gave {decoded(result, name)}, expected {wanted}"


def flush(value):
    return math.copysign(0.0, value) if abs(value) < 2.0 ** -126 else value


@pytest.mark.parametrize("text, wanted", [
    ("v_exp_f32_e32 v0, 0xff800000", 0), ("v_exp_f32_e32 v0, 0x80000000", 0x3F800000),
    ("v_exp_f32_e32 v0, 0xc2fc0000", 0x00800000), ("v_exp_f32_e32 v0, 0xc2fc0001", 0),
    ("v_log_f32_e32 v0, -1.0", 0xFFC00000), ("v_log_f32_e32 v0, 0x80000000", 0xFF800000),
    ("v_log_f32_e32 v0, 1", 0xFF800000), ("v_log_f32_e32 v0, 0x00800000", 0xC2FC0000),
    ("v_rcp_f32_e32 v0, 0xff800000", 0x80000000), ("v_rcp_f32_e32 v0, 0x80000000", 0xFF800000),
    ("v_rcp_f32_e32 v0, 0x7f000000", 0), ("v_rcp_f32_e32 v0, 1", 0x7F800000),
    ("v_rsq_f32_e32 v0, 4.0", 0x3F000000), ("v_rsq_f32_e32 v0, -4.0", 0xFFC00000),
    ("v_sqrt_f32_e32 v0, -4.0", 0xFFC00000), ("v_sqrt_f32_e32 v0, 0x80000000", 0x80000000),
    ("v_sin_f32_e32 v0, 0.5", 0), ("v_sin_f32_e32 v0, 0x3e800000", 0x3F800000),
    ("v_cos_f32_e32 v0, 0.5", 0xBF800000), ("v_cos_f32_e32 v0, 0x3e800000", 0)])
def test_examples_of_the_manual_and_flushed_denormals(text, wanted):
    wave = make_wave()
    run(wave, text)
    assert get_lanes(wave, 0, "f32") == [wanted] * LANES


@pytest.mark.parametrize("name", TYPES)
def test_fraction_stays_below_one(name):
    text = vector_text(f"v_fract_{name}", name, [name])
    below = 1 - 2.0 ** -{"f16": 11, "f32": 24, "f64": 53}[name]
    for (column,) in special_columns([name]):
        for bits, got in zip(column, lanes_of(text, name, [name], [column]), strict=True):
            value = decoded(bits, name)
            if not math.isfinite(value):
                assert math.isnan(decoded(got, name))
            else:
                exact = Fraction(value) - math.floor(value)
                assert decoded(got, name) == min(nearest(exact, name), below)


DIVIDE = {  # what LLVM makes of a / b, a in v[2:3], b in v[4:5]; the quotient in v[0:1]
    "f32": """v_div_scale_f32 v8, s[0:1], v4, v4, v2
v_rcp_f32_e32 v10, v8
v_fma_f32 v12, -v8, v10, 1.0
v_fmac_f32_e32 v10, v12, v10
v_div_scale_f32 v12, vcc, v2, v4, v2
v_mul_f32_e32 v14, v12, v10
v_fma_f32 v16, -v8, v14, v12
v_fmac_f32_e32 v14, v16, v10
v_fma_f32 v8, -v8, v14, v12
v_div_fmas_f32 v8, v8, v10, v14
v_div_fixup_f32 v0, v8, v4, v2""",
    "f64": """v_div_scale_f64 v[8:9], s[0:1], v[4:5], v[4:5], v[2:3]
v_rcp_f64_e32 v[10:11], v[8:9]
v_fma_f64 v[12:13], -v[8:9], v[10:11], 1.0
v_fmac_f64_e32 v[10:11], v[10:11], v[12:13]
v_fma_f64 v[12:13], -v[8:9], v[10:11], 1.0
v_fmac_f64_e32 v[10:11], v[10:11], v[12:13]
v_div_scale_f64 v[12:13], vcc, v[2:3], v[4:5], v[2:3]
v_mul_f64 v[14:15], v[12:13], v[10:11]
v_fma_f64 v[8:9], -v[8:9], v[14:15], v[12:13]
v_div_fmas_f64 v[8:9], v[8:9], v[10:11], v[14:15]
v_div_fixup_f64 v[0:1], v[8:9], v[4:5], v[2:3]"""}
TEXTS += [line for program in DIVIDE.values() for line in program.splitlines()]


def quotient(a, b):
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b)) or a == b == 0:
        return math.nan
    if math.isinf(a) or b == 0:
        return math.copysign(math.inf, sign)
    return math.copysign(0.0, sign) if math.isinf(b) else signed_zero(Fraction(a) / Fraction(b), sign)


@pytest.mark.parametrize("other", (math.nan, 1.0))
@pytest.mark.parametrize("name", TYPES)
def test_division_fix_up_keeps_a_right_quotient_and_knows_the_special_cases(name, other):
    """Where numerator and denominator decide, it gets any `other` quotient."""
    for a, b in special_columns([name] * 2):
        pairs = [(decoded(x, name), decoded(y, name)) for x, y in zip(a, b, strict=True)]
        wanted = [quotient(*pair) for pair in pairs]
        plain = [encoded(w, name) if isinstance(w, Fraction) else encoded(other, name) for w in wanted]
        wave = make_wave()
        for first, column in ((2, plain), (4, b), (6, a)):
            put_lanes(wave, first, name, column)
        run(wave, vector_text(f"v_div_fixup_{name}", name, [name] * 3))
        for k, got in enumerate(get_lanes(wave, 0, name)):
            assert same(got & 0xFFFF if name == "f16" else got, wanted[k], name), pairs[k]


@pytest.mark.parametrize("name", DIVIDE)
def test_the_division_sequence_is_rounded_correctly(name):
    rng = np.random.default_rng(11)
    batches = [*special_columns([name] * 2), *(close_columns(name, seed)[:2] for seed in range(4))]
    batches += [rng.integers(0, 1 << 64, (2, LANES), np.uint64).tolist() for _ in range(8)]
    for columns in batches:
        wave = make_wave()
        put_lanes(wave, 2, name, columns[0])
        put_lanes(wave, 4, name, columns[1])
        run(wave, *DIVIDE[name].splitlines())
        for k, got in enumerate(get_lanes(wave, 0, name)):
            a, b = decoded(columns[0][k], name), decoded(columns[1][k], name)
            wanted = quotient(a, b)
            assert same(got, wanted, name), f"{a} / {b} gave {decoded(got, name)}, expected {wanted}"
