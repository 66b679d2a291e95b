"""Runs a variant of a Triton kernel: compiled ahead of time for gfx942, executed by the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlk.build.triton_aot import compile_variant
from tests.gfx942.emulator import Device
from tests.gfx942.emulator.wave import LANES

if TYPE_CHECKING:
    from rlk.kernels.variants import Variant

# what a Triton pointer type points to, as numpy holds it; BF16 travels as uint16
ELEMENTS = {"*bf16": np.uint16, "*fp16": np.float16, "*fp32": np.float32, "*fp64": np.float64, "*i1": np.bool_,
            "*i8": np.int8, "*u8": np.uint8, "*i16": np.int16, "*u16": np.uint16, "*i32": np.int32, "*u32": np.uint32,
            "*i64": np.int64, "*u64": np.uint64}


def run_variant(device: Device, variant: Variant, grid: tuple[int, ...], values: Mapping) -> dict[str, np.ndarray]:
    """Launch `variant` with `values` by argument name; returns every array of them as the kernel left it.

    A pointer's value is an array, which is copied into new memory, or the address of what `device.put` stored. Raises
    ValueError for values that the compiled kernel may not be given: a wrong dtype, a number that is no multiple of 16
    although the variant says so, a name too many or too few.
    """
    if values.keys() != variant.signature.keys():
        raise ValueError(f"{variant.label} got values for {sorted(values)}, expected {sorted(variant.signature)}")
    arguments, arrays = [], {}
    for name, kind in variant.signature.items():
        value = values[name]
        if isinstance(value, np.ndarray):
            if value.dtype != ELEMENTS[kind]:
                raise ValueError(f"{variant.label}: {name} has dtype {value.dtype}, expected {ELEMENTS[kind].__name__} "
                                 f"for {kind}")
            arrays[name] = device.put(value)
            value = arrays[name]
        elif kind.startswith("fp"):
            value = float(value)
        if name in variant.divisible and value % 16:
            raise ValueError(f"{variant.label}: {name} is {value}, expected a multiple of 16")
        arguments.append(value)
    compiled = compile_variant(variant, "gfx942")
    device.launch(compiled.path, compiled.metadata.name, (*grid, 1, 1)[:3], LANES * compiled.metadata.num_warps,
                  arguments, compiled.metadata.shared)
    return {name: device.get(address, values[name].shape, values[name].dtype) for name, address in arrays.items()}
