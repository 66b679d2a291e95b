"""The emulator's atomics, one instruction at a time against Python's integers, lane after lane."""

import itertools
import struct

import numpy as np
import pytest

from tests.gfx942.assembly import printed, run
from tests.gfx942.emulator import OutsideMemory
from tests.gfx942.memory_cases import MASKS, SIZE, SPACES, active, prepare, register
from tests.gfx942.numerics import from_bf16, to_bf16


def signed(value, bits):
    return value - (value >> (bits - 1) << bits)


def as_float(value, bits):
    return struct.unpack({32: "<f", 64: "<d"}[bits], value.to_bytes(bits // 8, "little"))[0]


def float_bits(value, bits):
    return int.from_bytes(struct.pack({32: "<f", 64: "<d"}[bits], value), "little")


def float_sum(old, data, bits):
    x, y = as_float(old, bits), as_float(data, bits)
    return float_bits(np.float32(x) + np.float32(y) if bits == 32 else x + y, bits)


def by_halves(function):
    def both(old, data, bits):
        return function(old & 0xFFFF, data & 0xFFFF) | function(old >> 16, data >> 16) << 16
    return both


def f16_sum(x, y):
    halves = np.array([x, y], np.uint16).view(np.float16)
    return int((halves[0] + halves[1]).view(np.uint16))


def bf16_sum(x, y):
    return int(to_bf16(from_bf16(x) + from_bf16(y)))


OPERATIONS = {  # (old, data, bits) -> new; compare-and-swap stands apart
    "swap": lambda old, data, bits: data,
    "add": lambda old, data, bits: old + data,
    "sub": lambda old, data, bits: old - data,
    "rsub": lambda old, data, bits: data - old,
    "smin": lambda old, data, bits: min(signed(old, bits), signed(data, bits)),
    "smax": lambda old, data, bits: max(signed(old, bits), signed(data, bits)),
    "umin": lambda old, data, bits: min(old, data),
    "umax": lambda old, data, bits: max(old, data),
    "and": lambda old, data, bits: old & data,
    "or": lambda old, data, bits: old | data,
    "xor": lambda old, data, bits: old ^ data,
    "inc": lambda old, data, bits: 0 if old >= data else old + 1,
    "dec": lambda old, data, bits: data if old == 0 or old > data else old - 1,
    "add_f": float_sum,
    "min_f": lambda old, data, bits: min(old, data, key=lambda x: as_float(x, bits)),
    "max_f": lambda old, data, bits: max(old, data, key=lambda x: as_float(x, bits)),
    "pk_add_f16": by_halves(f16_sum),
    "pk_add_bf16": by_halves(bf16_sum),
    "cmpswap": None,
}
INTEGER_NAMES = ["swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "inc", "dec"]
MEMORY_ATOMICS = {name + suffix: (name, bits) for name in INTEGER_NAMES for suffix, bits in (("", 32), ("_x2", 64))} | {
    "add_f32": ("add_f", 32), "add_f64": ("add_f", 64), "min_f64": ("min_f", 64), "max_f64": ("max_f", 64),
    "pk_add_f16": ("pk_add_f16", 32), "pk_add_bf16": ("pk_add_bf16", 32)}
LDS_ATOMICS = {"add_u": "add", "sub_u": "sub", "rsub_u": "rsub", "inc_u": "inc", "dec_u": "dec", "min_i": "smin",
               "max_i": "smax", "min_u": "umin", "max_u": "umax", "and_b": "and", "or_b": "or", "xor_b": "xor",
               "cmpst_b": "cmpswap", "add_f": "add_f", "min_f": "min_f", "max_f": "max_f"}
LDS_ATOMICS = {(name, bits): (operation, bits) for name, operation in LDS_ATOMICS.items() for bits in (32, 64)} | {
    ("pk_add_f", 16): ("pk_add_f16", 32), ("pk_add_bf", 16): ("pk_add_bf16", 32)}


def atomic_cases():
    """(line, space, operation, bits, returns, the first row of data, of the value compared with, of the old value)."""
    for space in ("global", "global with a scalar base", "flat", "buffer"):
        for name, (operation, bits) in MEMORY_ATOMICS.items():
            if space == "buffer" and name == "pk_add_bf16":
                continue
            count, compares = bits // 32, operation == "cmpswap"
            data, places = register(count * (1 + compares)), SPACES[space].format(o=16)
            rows = 8, 8 + count * compares
            for returns in (False, True):
                line = f"{space.split()[0]}_atomic_{name} "
                if space == "buffer":
                    line += f"{data}, {places}"
                else:
                    address, *rest = places.replace(" offset", ", offset").split(", ")
                    line += register(count, 20) + ", " if returns else ""
                    line += f"{', '.join([address, data, *rest[:-1]])} {rest[-1]}"
                yield line + (" sc0" if returns else ""), space, operation, bits, returns, *rows, (
                    8 if space == "buffer" else 20)
    for (name, size), (operation, bits) in [*LDS_ATOMICS.items(), (("wrxchg_b", 32), ("swap", 32)),
                                            (("wrxchg_b", 64), ("swap", 64))]:
        count, compares = bits // 32, operation == "cmpswap"
        data = ", ".join(register(count, 8 + count * k) for k in range(1 + compares))
        stem, kind = name.rsplit("_", 1)
        for returns in (False, True):
            if stem == "wrxchg" and not returns:
                continue
            mnemonic = f"ds_{stem}_{'rtn_' if returns else ''}{kind}{size}"
            target = register(count, 20) + ", " if returns else ""
            yield (f"{mnemonic} {target}v1, {data} offset:16", "lds", operation, bits, returns,
                   8 + count * compares, 8, 20)


ATOMICS = list(atomic_cases())


@pytest.mark.parametrize("case", ATOMICS, ids=[case[0] for case in ATOMICS])
def test_atomic(case):
    line, space, operation, bits, returns, data_row, compare_row, old_row = case
    count = bits // 32
    rng = np.random.default_rng(5)
    apart_and_in_common = rng.permutation(64) * 8, rng.integers(0, 5, 64) * 8
    for offsets, exec_mask in itertools.product(apart_and_in_common, MASKS):
        wave, memory, start = prepare(space, offsets, exec_mask)
        if "_f" in operation or "bf16" in operation:  # finite numbers
            kind = np.float16 if operation == "pk_add_f16" else np.float32 if bits == 32 else np.float64
            numbers = rng.standard_normal(SIZE // 2).astype(kind)
            numbers = to_bf16(numbers) if operation == "pk_add_bf16" else numbers
            memory.bytes[start : start + SIZE] = numbers.view(np.uint8)[:SIZE]
            drawn = numbers.view(np.uint32)[: 64 * count].reshape(64, count).T
            wave.vector[data_row : data_row + count] = drawn[:, ::-1]
        else:
            wave.vector[8:12] &= np.uint32(3)  # so that inc, dec, min and max see both sides, and compares succeed
            memory.bytes.view(np.uint32)[:] &= np.uint32(3)
            if "smin" in operation or "smax" in operation:
                wave.vector[8:12, ::3] |= np.uint32(1 << 31)
        content, expected = bytearray(memory.bytes.tobytes()), wave.vector.copy()

        def value(row, lane, expected=expected):
            return sum(int(expected[row + k, lane]) << 32 * k for k in range(count))

        for lane in active(exec_mask):
            at = start + int(offsets[lane]) + 16
            old, data = int.from_bytes(content[at : at + bits // 8], "little"), value(data_row, lane)
            if operation == "cmpswap":
                new = data if old == value(compare_row, lane) else old
            else:
                new = OPERATIONS[operation](old, data, bits)
            content[at : at + bits // 8] = (new & (1 << bits) - 1).to_bytes(bits // 8, "little")
            if returns:
                expected[old_row : old_row + count, lane] = [old >> 32 * k & 0xFFFFFFFF for k in range(count)]
        run(wave, line)
        assert memory.bytes.tobytes() == bytes(content)
        np.testing.assert_array_equal(wave.vector, expected)


def test_atomic_past_the_end_of_a_buffer_does_nothing_and_returns_zero():
    wave, memory, start = prepare("buffer", np.where(np.arange(64) % 2, SIZE, np.arange(64) * 4))
    content = memory.bytes[start : start + 256].view(np.uint32).copy()
    run(wave, "buffer_atomic_swap v8, v1, s[4:7], s9 offen sc0")
    np.testing.assert_array_equal(wave.vector[8], np.where(np.arange(64) % 2, 0, content))


def test_atomic_at_an_odd_address_raises():
    wave, _, _ = prepare("global", np.full(64, 4))
    with pytest.raises(OutsideMemory, match="8 bytes"):
        run(wave, "global_atomic_add_x2 v[2:3], v[8:9], off")


def test_atomics_that_change_nothing_are_no_progress():
    wave, memory, start = prepare("global", np.zeros(64, int))
    wave.vector[8] = 0
    run(wave, "global_atomic_or v[2:3], v8, off")
    assert memory.changes == 0
    wave.vector[8] = ~memory.bytes[start : start + 4].view(np.uint32)
    run(wave, "global_atomic_or v[2:3], v8, off")
    assert memory.changes == 1


def test_lines_are_as_the_disassembler_prints_them():
    assert printed(case[0] for case in ATOMICS) == [case[0] for case in ATOMICS]
