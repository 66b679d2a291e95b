"""Values, exact rounding and one-line programs for the tests of the emulator's arithmetic.

Expectations are computed lane by lane in Python integers and fractions, never in numpy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from tests.gfx942.assembly import ODD_LANES, make_wave, run

LANES = 64
BITS = {"b16": 16, "u16": 16, "i16": 16, "f16": 16, "b32": 32, "u32": 32, "i32": 32, "f32": 32,
        "b64": 64, "u64": 64, "i64": 64, "f64": 64}
FLOATS = {"f16": ("<e", 11, -14, 15), "f32": ("<f", 24, -126, 127), "f64": ("<d", 53, -1022, 1023)}

SPECIAL = {  # bits -> patterns: extremes of integers, shift counts; of floats zeros, denormals, infinities, NaNs
    16: [0, 1, 2, 15, 16, 17, 0x7F, 0x80, 0xFF, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x3BFF, 0x3800, 0x7BFF, 0xFBFF, 0x7C00,
         0xFC00, 0x7E00, 0x7C01, 0xFE5A, 0x7FFF, 0x8000, 0x8001, 0x83FF, 0xFFFF, 0x4248],
    32: [0, 1, 2, 3, 4, 5, 8, 24, 31, 32, 33, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000, 0x800001,
         0xFFFFFF, 0x3F800000, 0xBF800000, 0x3F7FFFFF, 0x3F000000, 0x3FC00000, 0x40200000, 0xC0490FDB, 0x4B000000,
         0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x4F7FFFFF, 0x4F800000, 0x7E800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
         0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x80000000, 0x80000001, 0x807FFFFF, 0xFFFFFFFF,
         0x0C0D0B0A, 0x09080706, 0x477FE000, 0x477FF000, 0x33000000, 0x33000001],
    64: [0, 1, 2, 31, 32, 63, 64, 65, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, 0x3FF << 52, 0xBFF << 52,
         0x3FE << 52, 0x41DFFFFFFFC00000, 0x41E << 52, 0xC1E << 52, 0x41EFFFFFFFE00000, 0x41F << 52, 1 << 52,
         (1 << 52) - 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, 0x7FE << 52, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF,
         0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0x7FF << 52) + 1, (1 << 64) - 1, 0x400921FB54442D18,
         0x36A0000000000000, 0x3690000000000000, 0x47EFFFFFF0000000, 0x47EFFFFFE0000000],
}


def decoded(bits: int, name: str) -> int | float:
    """The low bits as a number of type `name`."""
    width = BITS[name]
    bits &= (1 << width) - 1
    if name[0] == "f":
        return struct.unpack(FLOATS[name][0], bits.to_bytes(width // 8, "little"))[0]
    return bits - (1 << width) if name[0] == "i" and bits >> (width - 1) else bits


def encoded(value: int | float | Fraction, name: str) -> int:
    """Bits of a number: integers are cut to their width, fractions rounded to nearest even, floats must fit."""
    if name[0] != "f":
        return int(value) & (1 << BITS[name]) - 1
    if isinstance(value, Fraction):
        value = nearest(value, name)
    return int.from_bytes(struct.pack(FLOATS[name][0], value), "little")


def nearest(exact: Fraction, name: str) -> float:
    """The number of type `name` nearest to a fraction, ties to even."""
    _, precision, lowest, highest = FLOATS[name]
    if exact == 0:
        return 0.0
    size = abs(exact)
    power = size.numerator.bit_length() - size.denominator.bit_length()
    power -= Fraction(2) ** power > size
    unit = Fraction(2) ** (max(power, lowest) - precision + 1)
    rounded = round(size / unit) * unit
    value = float(rounded) if rounded < Fraction(2) ** (highest + 1) else math.inf
    return value if exact > 0 else -value


def finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)


def registers(name: str, first: int, file: str = "v") -> str:
    return f"{file}[{first}:{first + 1}]" if BITS[name] == 64 else f"{file}{first}"


def vector_text(mnemonic: str, result: str, sources: list[str], extra: str = "") -> str:
    """`v_add_u32 v0, v2, v4` with pairs of registers where the types need them."""
    operands = [registers(result, 0), *(registers(name, 2 + 2 * k) for k, name in enumerate(sources))]
    return f"{mnemonic} {', '.join(operands)}{extra}"


def put_lanes(wave, first: int, name: str, values) -> None:
    """Write bit patterns into a register, or the two of a 64-bit type."""
    values = np.asarray(values, np.uint64)
    wave.vector[first] = values.astype(np.uint32)
    if BITS[name] == 64:
        wave.vector[first + 1] = (values >> np.uint64(32)).astype(np.uint32)


def get_lanes(wave, first: int, name: str) -> list[int]:
    low = wave.vector[first].tolist()
    if BITS[name] != 64:
        return low
    return [a | b << 32 for a, b in zip(low, wave.vector[first + 1].tolist(), strict=True)]


def lanes_of(text: str, result: str, sources: list[str], columns, accumulates: bool = False) -> list[int]:
    """What the instruction leaves in v0 (v[0:1]) for columns of 64 source patterns, with some lanes not active.

    Source k is in v[2k + 2]; the last one in v0 when it accumulates. Lanes that are not active must keep their value.
    """
    wave = make_wave(ODD_LANES)
    for k, (name, values) in enumerate(zip(sources, columns, strict=True)):
        put_lanes(wave, 0 if accumulates and k == len(sources) - 1 else 2 + 2 * k, name, values)
    before = get_lanes(wave, 0, result)
    run(wave, text)
    after = get_lanes(wave, 0, result)
    for k in range(LANES):
        if not ODD_LANES >> k & 1:
            assert after[k] == before[k], f"{text} changed lane {k}, which is not active"
    wave.exec = (1 << LANES) - 1
    if accumulates:
        put_lanes(wave, 0, sources[-1], columns[-1])
    run(wave, text)
    whole = get_lanes(wave, 0, result)
    assert all(whole[k] == after[k] for k in range(LANES) if ODD_LANES >> k & 1)
    return whole


def special_columns(sources: list[str], seed: int = 0):
    """Batches of columns: every pair of special values of the first two sources, the third drawn; then random bits."""
    rng = np.random.default_rng(seed)
    lists = [SPECIAL[BITS[name]] for name in sources]
    if len(lists) == 1:
        rows = [(a,) for a in lists[0]]
    else:
        rows = [(a, b, *(rest[rng.integers(len(rest))] for rest in lists[2:])) for a in lists[0] for b in lists[1]]
        rng.shuffle(rows)
        rows = rows[:640]
    rows += [tuple(rng.integers(0, 1 << 64, len(lists), np.uint64).tolist()) for _ in range(64 + -len(rows) % LANES)]
    for start in range(0, len(rows), LANES):
        yield list(zip(*rows[start : start + LANES], strict=True))


def same(got: int, wanted: int | float | Fraction, name: str) -> bool:
    """Whether the bits are those of the number; any quiet NaN is a NaN."""
    if isinstance(wanted, float) and math.isnan(wanted):
        return math.isnan(decoded(got, name)) and got >> (FLOATS[name][1] - 2) & 1 == 1
    return got == encoded(wanted, name)


def check_lanes(text: str, result: str, sources: list[str], columns, function: Callable,
                accumulates: bool = False) -> None:
    """Compare every lane with function(*numbers), a number or a fraction to be rounded."""
    got = lanes_of(text, result, sources, columns, accumulates)
    for k, patterns in enumerate(zip(*columns, strict=True)):
        numbers = [decoded(int(bits), name) for bits, name in zip(patterns, sources, strict=True)]
        wanted = function(*numbers)
        assert same(got[k], wanted, result), (
            f"{text}: {[hex(int(bits)) for bits in patterns]} = {numbers} gave {got[k]:#x}, expected {wanted} "
            f"({encoded(wanted, result):#x})")
