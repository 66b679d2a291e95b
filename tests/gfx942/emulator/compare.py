"""Comparisons: their results are masks of lanes, with zeros for lanes that are not active."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gfx942.emulator import rounding
from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.table import Step, decodes
from tests.gfx942.emulator.vector import SDWA_SOURCES, lane_mask_writer, typed_reader
from tests.gfx942.emulator.wave import EXEC, Wave, mask_of

Comparison = Callable[[np.ndarray, np.ndarray], np.ndarray]


def never(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.zeros(a.shape, bool)


def always(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.ones(a.shape, bool)


def unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


def less_or_greater(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a < b) | (a > b)


ORDERED: dict[str, Comparison] = {"lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater,
                                  "ge": np.greater_equal}
INTEGER: dict[str, Comparison] = {**ORDERED, "f": never, "t": always, "ne": np.not_equal}
FLOAT: dict[str, Comparison] = {**ORDERED, "f": never, "tru": always, "lg": less_or_greater, "u": unordered,
                                "o": lambda a, b: ~unordered(a, b)}
NEGATED = {"nge": "ge", "ngt": "gt", "nle": "le", "nlt": "lt", "nlg": "lg"}
FLOAT.update({name: lambda a, b, f=FLOAT[positive]: ~f(a, b) for name, positive in NEGATED.items()})
FLOAT["neq"] = np.not_equal


def compares(mnemonic: str, types: tuple[str, str], comparison: Comparison) -> None:
    """Declare v_cmp_* and, which also makes its result the exec mask, v_cmpx_*."""

    @decodes(mnemonic, mnemonic.replace("v_cmp_", "v_cmpx_"))
    def decoder(instruction: Instruction) -> Step:
        instruction.expect_operands(3)
        instruction.allow(*(SDWA_SOURCES if instruction.encoding == "sdwa" else ()))
        a, b = (typed_reader(instruction, k + 1, name) for k, name in enumerate(types))
        write = lane_mask_writer(instruction.operands[0])
        if instruction.mnemonic.startswith("v_cmp_"):
            return lambda wave: write(wave, mask_of(comparison(a(wave), b(wave))) & wave.exec)

        def step(wave: Wave) -> None:
            mask = mask_of(comparison(a(wave), b(wave))) & wave.exec
            write(wave, mask)
            wave.write_sgprs(EXEC, 2, mask)

        return step


def _classes(a: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Whether the number's class is among those wanted, one bit each."""
    negative = np.signbit(a)
    signaling, nan = rounding.is_signaling(a), np.isnan(a)
    infinite, zero, denormal = np.isinf(a), a == 0, rounding.is_denormal(a)
    positive_class = np.select([infinite, zero, denormal], [9, 6, 7], 8)
    negative_class = np.select([infinite, zero, denormal], [2, 5, 4], 3)
    kind = np.where(nan, np.where(signaling, 0, 1), np.where(negative, negative_class, positive_class))
    return wanted.astype(np.int64) >> kind & 1 == 1


for _type in ("i16", "u16", "i32", "u32", "i64", "u64"):
    for _name, _comparison in INTEGER.items():
        compares(f"v_cmp_{_name}_{_type}", (_type, _type), _comparison)
for _type in ("f16", "f32", "f64"):
    for _name, _comparison in FLOAT.items():
        compares(f"v_cmp_{_name}_{_type}", (_type, _type), _comparison)
    compares(f"v_cmp_class_{_type}", (_type, "b16" if _type == "f16" else "b32"), _classes)
