"""Vector instructions on floats: arithmetic, minimum and maximum, rounding, and the functions of one argument.

Denormals are kept, rounding is to nearest even. The FP32 functions (rcp, rsq, sqrt, exp, log) take and give denormals
as zero, as the manual says; it allows them one unit in the last place, here they are rounded correctly. The FP64
functions, of which the hardware gives about 24 bits, are rounded correctly too.
"""

from __future__ import annotations

import numpy as np

from tests.gfx942.emulator import rounding
from tests.gfx942.emulator.rounding import fma, maximum, minimum
from tests.gfx942.emulator.vector import vector

TYPES = ("f16", "f32", "f64")
TURNS = 256  # v_sin_f32 and v_cos_f32 know arguments up to so many turns

# ---- arithmetic -----------------------------------------------------------------------------------------------------

for _type in TYPES:
    _two, _three = f"{_type} {_type}", f"{_type} {_type} {_type}"
    vector(f"v_add_{_type}", _type, _two, lambda a, b: a + b)
    vector(f"v_mul_{_type}", _type, _two, lambda a, b: a * b)
    vector(f"v_max_{_type}", _type, _two, maximum)
    vector(f"v_min_{_type}", _type, _two, minimum)
    vector(f"v_fma_{_type}", _type, _three, fma, op_sel=_type == "f16")
    if _type != "f16":
        vector(f"v_fmac_{_type}", _type, _three, fma, accumulates=True)
for _type in ("f16", "f32"):
    vector(f"v_sub_{_type}", _type, f"{_type} {_type}", lambda a, b: a - b)
    vector(f"v_subrev_{_type}", _type, f"{_type} {_type}", lambda a, b: b - a)
vector("v_fmaak_f32 v_fmamk_f32", "f32", "f32 f32 f32", fma)  # the literal stands where it is multiplied or added
vector("v_mul_legacy_f32", "f32", "f32 f32", lambda a, b: np.where((a == 0) | (b == 0), np.float32(0), a * b))


def maximum3(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return maximum(maximum(a, b), c)


def minimum3(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return minimum(minimum(a, b), c)


def median(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The one that is neither largest nor smallest; the smallest when there is a NaN."""
    largest = maximum3(a, b, c)
    result = np.where(largest == a, maximum(b, c), np.where(largest == b, maximum(a, c), maximum(a, b)))
    unordered = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(unordered, minimum3(a, b, c), result) if unordered.any() else result


for _type in ("f16", "f32"):
    _three = f"{_type} {_type} {_type}"
    vector(f"v_max3_{_type}", _type, _three, maximum3, op_sel=_type == "f16")
    vector(f"v_min3_{_type}", _type, _three, minimum3, op_sel=_type == "f16")
    vector(f"v_med3_{_type}", _type, _three, median, op_sel=_type == "f16")

# ---- parts of a number ----------------------------------------------------------------------------------------------

for _type, _exponent in (("f16", "i16"), ("f32", "i32"), ("f64", "i32")):
    vector(f"v_ldexp_{_type}", _type, f"{_type} {_exponent}", lambda a, b: np.ldexp(a, b.astype(np.int32)))
    vector(f"v_frexp_mant_{_type}", _type, _type, rounding.mantissa)
    vector(f"v_frexp_exp_{_exponent}_{_type}", _exponent, _type, rounding.exponent)
    vector(f"v_trunc_{_type}", _type, _type, np.trunc)
    vector(f"v_floor_{_type}", _type, _type, np.floor)
    vector(f"v_ceil_{_type}", _type, _type, np.ceil)
    vector(f"v_rndne_{_type}", _type, _type, np.rint)
    vector(f"v_fract_{_type}", _type, _type, rounding.fraction)

# ---- functions ------------------------------------------------------------------------------------------------------


def reciprocal(a: np.ndarray) -> np.ndarray:
    return 1 / a


def reciprocal_root(a: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(a)


def _bounded_sine(a: np.ndarray) -> np.ndarray:
    return np.where(np.abs(a) > TURNS, np.where(np.isinf(a), np.nan, 0), rounding.sine(a))


def _bounded_cosine(a: np.ndarray) -> np.ndarray:
    return np.where(np.abs(a) > TURNS, np.where(np.isinf(a), np.nan, 1), rounding.cosine(a))


FUNCTIONS = {"rcp": reciprocal, "rsq": reciprocal_root, "sqrt": np.sqrt, "exp": np.exp2, "log": np.log2}
for _name, _function in FUNCTIONS.items():
    vector(f"v_{_name}_f32", "f32", "f32", lambda a, f=_function: rounding.flushing_function(f, a))
    vector(f"v_{_name}_f16", "f16", "f16", lambda a, f=_function: rounding.rounded_function(f, a))
    if _name in ("rcp", "rsq", "sqrt"):
        vector(f"v_{_name}_f64", "f64", "f64", lambda a, f=_function: rounding.rounded_function(f, a))
vector("v_rcp_iflag_f32", "f32", "f32", lambda a: rounding.flushing_function(reciprocal, a))
for _type in ("f16", "f32"):
    vector(f"v_sin_{_type}", _type, _type, lambda a: rounding.rounded_function(_bounded_sine, a))
    vector(f"v_cos_{_type}", _type, _type, lambda a: rounding.rounded_function(_bounded_cosine, a))
