"""Running a Triton variant on the emulator: what is given to the kernel must be what it was compiled for."""

import dataclasses

import numpy as np
import pytest
import triton
import triton.language as tl

from rlk.kernels.variants import Variant
from tests.gfx942.emulator import Device
from tests.gfx942.triton_runs import run_variant


@triton.jit
def scale_kernel(x, y, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


VARIANT = Variant("scale", "block_64", scale_kernel, {"x": "*fp32", "y": "*fp32", "n": "i32", "factor": "fp32"},
                  {"BLOCK": 64}, {"num_warps": 1}, divisible=("x", "y"), small=("x", "y"))
X = np.arange(100, dtype=np.float32)


def values(**changes):
    return dict(x=X, y=np.zeros_like(X), n=100, factor=3) | changes


def test_arrays_come_back_as_the_kernel_left_them():
    after = run_variant(Device(), VARIANT, (2,), values())
    np.testing.assert_array_equal(after["y"], 3 * X)
    np.testing.assert_array_equal(after["x"], X)
    assert after.keys() == {"x", "y"}


def test_addresses_stay_on_the_device():
    device = Device()
    x, y = device.put(X), device.put(np.zeros_like(X))
    assert run_variant(device, VARIANT, (2, 1), values(x=x, y=y)) == {}
    assert run_variant(device, VARIANT, (1, 1, 1), values(x=y, y=x, factor=0.5, n=10)) == {}
    np.testing.assert_array_equal(device.get(x, 100, np.float32), np.where(X < 10, 1.5 * X, X))


@pytest.mark.parametrize("changes, message", [
    (dict(x=X.astype(np.float64)), "x has dtype float64, expected float32"),
    (dict(more=1), r"got values for \[.*'more'.*\], expected \['factor', 'n', 'x', 'y'\]"),
    (dict(y=4), "y is 4, expected a multiple of 16")])
def test_wrong_values_are_refused(changes, message):
    with pytest.raises(ValueError, match="scale/block_64.*" + message):
        run_variant(Device(), VARIANT, (2,), values(**changes))


def test_number_that_was_promised_to_be_a_multiple_of_16_is_checked():
    variant = dataclasses.replace(VARIANT, divisible=("x", "y", "n"))
    with pytest.raises(ValueError, match="n is 100"):
        run_variant(Device(), variant, (2,), values())
