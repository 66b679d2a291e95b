"""The three helpers of a division that is rounded correctly: scale, multiply-add with the scale undone, fix-up.

The manual's pseudocode, with its two slips repaired so that the division comes out right: div_fmas undoes div_scale's
power (it prints 2**32, which undoes neither), and a denominator whose reciprocal and quotient are both denormal is
scaled down (it prints the power with the other sign, which overflows).
"""

from __future__ import annotations

import numpy as np

from tests.gfx942.emulator import rounding
from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.rounding import NOT_A_NUMBER, biased_exponent, is_denormal
from tests.gfx942.emulator.table import Step, decodes
from tests.gfx942.emulator.vector import lane_mask_writer, typed_reader, typed_writer, vector
from tests.gfx942.emulator.wave import VCC, Wave, bits_of, mask_of

SCALE = {"f32": 64, "f64": 128}  # the power of two
FAR = {"f32": 96, "f64": 768}  # exponents between numerator and denominator that make the quotient nearly overflow
TINY = {"f32": 23, "f64": 53}  # exponent field of a numerator that leaves no room for the remainder
BIAS = {"f32": 127, "f64": 1023}
ORDINARY = 45  # exponents that keep a quotient far from every limit
UNDERFLOW = {"f32": -150, "f64": -1075}  # difference of the exponents below which the quotient is zero


def _ordinary(denominator: np.ndarray, numerator: np.ndarray, name: str) -> bool:
    """Whether no lane is near any of the special cases: nearly always, and much faster."""
    if name not in BIAS:  # FP16 has no room between its limits
        return False
    exponents = biased_exponent(np.concatenate((denominator, numerator)))
    return bool((np.abs(exponents - BIAS[name]) < ORDINARY).all())


def scale(value: np.ndarray, denominator: np.ndarray, numerator: np.ndarray,
          name: str) -> tuple[np.ndarray, np.ndarray]:
    """(`value`, which is one of the other two, scaled; where the quotient has to be scaled back)."""
    if _ordinary(denominator, numerator, name):
        return value, np.zeros(value.shape, bool)
    power = SCALE[name]
    inverse, quotient = 1 / denominator, numerator / denominator
    is_denominator, is_numerator = value == denominator, value == numerator
    tiny_inverse, tiny_quotient = is_denormal(inverse), is_denormal(quotient)
    none = np.zeros(value.shape, bool)
    cases = [  # (condition, power of two, which values it scales, whether the quotient is scaled back); the first holds
        (biased_exponent(numerator) - biased_exponent(denominator) >= FAR[name], power, is_denominator, ~none),
        (is_denormal(denominator), power, ~none, none),
        (tiny_inverse & tiny_quotient, -power, is_denominator, ~none),
        (tiny_inverse, -power, ~none, none),
        (tiny_quotient, power, is_numerator, ~none),
        (biased_exponent(numerator) <= TINY[name], power, ~none, none),
    ]
    conditions = [condition for condition, _, _, _ in cases]
    powers = np.select(conditions, [np.where(which, by, 0) for _, by, which, _ in cases], 0)
    back = np.select(conditions, [flags for _, _, _, flags in cases], none)
    zero = (numerator == 0) | (denominator == 0)
    scaled = np.where(zero, value.dtype.type(NOT_A_NUMBER), np.ldexp(value, powers.astype(np.int32)))
    return scaled, back & ~zero


def fix_up(quotient: np.ndarray, denominator: np.ndarray, numerator: np.ndarray, name: str) -> np.ndarray:
    """The quotient, or what the special cases of a division give."""
    dtype = quotient.dtype.type
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    if _ordinary(denominator, numerator, name) and not np.isnan(quotient).any():
        return np.where(negative, -np.abs(quotient), np.abs(quotient))

    def signed(value: float) -> np.ndarray:
        return np.where(negative, dtype(-value), dtype(value))

    under = biased_exponent(numerator) - biased_exponent(denominator) < UNDERFLOW.get(name, -100)
    both_zero = (denominator == 0) & (numerator == 0)
    both_infinite = np.isinf(denominator) & np.isinf(numerator)
    return np.select(
        [np.isnan(numerator), np.isnan(denominator), both_zero | both_infinite,
         (denominator == 0) | np.isinf(numerator), np.isinf(denominator) | (numerator == 0), under, np.isnan(quotient)],
        [rounding.quiet(numerator), rounding.quiet(denominator), dtype(NOT_A_NUMBER), signed(np.inf),
         signed(0.0), signed(0.0), signed(np.inf)],
        np.where(negative, -np.abs(quotient), np.abs(quotient)))


@decodes("v_div_scale_f32", "v_div_scale_f64")
def _div_scale(instruction: Instruction) -> Step:
    instruction.expect_operands(5)
    instruction.allow()
    name = instruction.mnemonic[-3:]
    readers = [typed_reader(instruction, position, name, source=position - 2) for position in (2, 3, 4)]
    write, write_mask = typed_writer(instruction, 0, name), lane_mask_writer(instruction.operands[1])

    def step(wave: Wave) -> None:
        scaled, back = scale(*[read(wave) for read in readers], name)
        write(wave, scaled)
        write_mask(wave, mask_of(back) & wave.exec)

    return step


@decodes("v_div_fmas_f32", "v_div_fmas_f64")
def _div_fmas(instruction: Instruction) -> Step:
    instruction.expect_operands(4)
    instruction.allow("clamp")
    name = instruction.mnemonic[-3:]
    readers = [typed_reader(instruction, position, name) for position in (1, 2, 3)]
    write = typed_writer(instruction, 0, name)

    def step(wave: Wave) -> None:
        a, b, c = (read(wave) for read in readers)
        mask = wave.read_sgprs(VCC, 2)
        if not mask:
            return write(wave, rounding.fma(a, b, c))
        back = np.where(biased_exponent(c) > BIAS[name], 2.0 ** SCALE[name], 2.0 ** -SCALE[name])
        factor = np.where(bits_of(mask), back, 1.0)
        return write(wave, rounding.fma_scaled(a, b, c, factor))

    return step


for _type in ("f16", "f32", "f64"):
    vector(f"v_div_fixup_{_type}", _type, f"{_type} {_type} {_type}", lambda a, b, c, t=_type: fix_up(a, b, c, t),
           op_sel=_type == "f16")
