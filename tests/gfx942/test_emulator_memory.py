"""The emulator's loads, stores and atomics, one instruction at a time against bytes in Python."""

import itertools
import math
import struct

import numpy as np
import pytest

from tests.gfx942.assembly import ODD_LANES, make_wave, mnemonics_in, mnemonics_of, printed, run
from tests.gfx942.emulator import OutsideMemory, UnknownInstruction
from tests.gfx942.memory_cases import MASKS, SIZE, SPACES, TARGET, active, bytes_of, prepare, register, spread
from tests.gfx942.test_emulator_atomics import ATOMICS

LOADS = {  # ending -> (format of one lane's bytes, where the result goes)
    "ubyte": ("B", "all"), "sbyte": ("b", "all"), "ushort": ("H", "all"), "sshort": ("h", "all"), "dword": ("I", "all"),
    "dwordx2": ("2I", "all"), "dwordx3": ("3I", "all"), "dwordx4": ("4I", "all"), "ubyte_d16": ("B", "low"),
    "ubyte_d16_hi": ("B", "high"), "sbyte_d16": ("b", "low"), "sbyte_d16_hi": ("b", "high"), "short_d16": ("h", "low"),
    "short_d16_hi": ("h", "high")}
STORES = {"byte": ("B", 0), "short": ("H", 0), "dword": ("I", 0), "dwordx2": ("2I", 0), "dwordx3": ("3I", 0),
          "dwordx4": ("4I", 0), "byte_d16_hi": ("B", 16), "short_d16_hi": ("H", 16)}
LDS_NAMES = {"ubyte": "u8", "sbyte": "i8", "ushort": "u16", "sshort": "i16", "ubyte_d16": "u8_d16",
             "ubyte_d16_hi": "u8_d16_hi", "sbyte_d16": "i8_d16", "sbyte_d16_hi": "i8_d16_hi", "short_d16": "u16_d16",
             "short_d16_hi": "u16_d16_hi", "dword": "b32", "dwordx2": "b64", "dwordx3": "b96", "dwordx4": "b128"}
LDS_STORE_NAMES = {**LDS_NAMES, "byte": "b8", "short": "b16", "byte_d16_hi": "b8_d16_hi", "short_d16_hi": "b16_d16_hi"}


def words(form):
    return math.ceil(struct.calcsize("<" + form) / 4)


def load_line(space, kind, offset=16, bank="v"):
    data, places = register(words(LOADS[kind][0]), bank=bank), SPACES[space].format(o=offset)
    return f"ds_read_{LDS_NAMES[kind]} {data}, {places}" if space == "lds" else (
        f"{space.split()[0]}_load_{kind} {data}, {places}")


def store_line(space, kind, offset=16, bank="v"):
    data, places = register(words(STORES[kind][0]), bank=bank), SPACES[space].format(o=offset)
    if space == "lds":
        return f"ds_write_{LDS_STORE_NAMES[kind]} {places.replace(' ', f', {data} ', 1)}"
    if space == "buffer":
        return f"buffer_store_{kind} {data}, {places}"
    address, *rest = places.replace(" offset", ", offset").split(", ")
    return f"{space.split()[0]}_store_{kind} {', '.join([address, data, *rest[:-1]])} {rest[-1]}"


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("space", SPACES)
def test_load(space, kind):
    form, part = LOADS[kind]
    for offsets, exec_mask in itertools.product((spread(), spread() // 16 * 16), MASKS):
        wave, memory, start = prepare(space, offsets, exec_mask)
        expected = wave.vector.copy()
        for lane in active(exec_mask):
            values = struct.unpack_from("<" + form, bytes_of(memory, start), int(offsets[lane]) + 16)
            for row, value in zip(TARGET, values, strict=False):
                old = int(expected[row, lane])
                expected[row, lane] = {"all": value & 0xFFFFFFFF, "low": old & 0xFFFF0000 | value & 0xFFFF,
                                       "high": old & 0xFFFF | (value & 0xFFFF) << 16}[part]
        run(wave, load_line(space, kind))
        np.testing.assert_array_equal(wave.vector, expected)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("space", SPACES)
def test_store(space, kind):
    form, shift = STORES[kind]
    for step, exec_mask in itertools.product((17, 16), MASKS):  # not aligned, and aligned
        offsets = np.random.default_rng(2).permutation(64) * step
        wave, memory, start = prepare(space, offsets, exec_mask)
        expected = bytearray(memory.bytes.tobytes())
        for lane in active(exec_mask):
            values = [int(wave.vector[row, lane]) >> shift for row in TARGET[: words(form)]]
            size = struct.calcsize("<" + form)
            at = start + int(offsets[lane]) + 16
            expected[at : at + size] = struct.pack(f"<{words(form)}I", *values)[:size]
        run(wave, store_line(space, kind))
        assert memory.bytes.tobytes() == bytes(expected)


def test_accumulation_registers_load_and_store():
    wave, memory, start = prepare("global", np.arange(64) * 16)
    run(wave, load_line("global", "dwordx4", 0, "a"), store_line("global", "dwordx4", 1024, "a"))
    np.testing.assert_array_equal(memory.bytes[start + 1024 : start + 2048], memory.bytes[start : start + 1024])
    expected = memory.bytes[start : start + 1024].view(np.uint32)
    np.testing.assert_array_equal(wave.vector[264:268].T.reshape(-1), expected)


def test_last_lane_wins_where_lanes_store_to_one_place():
    wave, memory, start = prepare("global", np.zeros(64, int), ODD_LANES)
    run(wave, store_line("global", "dword", 0))
    assert memory.bytes[start : start + 4].view(np.uint32)[0] == wave.vector[8, 63]


@pytest.mark.parametrize("line, words_", [("global_load_dword v8, v[2:3], off offset:-16", 1),
                                          ("global_load_dwordx2 v[8:9], v1, s[2:3] offset:-16 sc0 sc1 nt", 2)])
def test_negative_offset(line, words_):
    wave, memory, start = prepare("global", np.arange(64) * 4 + 16)
    run(wave, line)
    np.testing.assert_array_equal(wave.vector[8], memory.bytes[start : start + 256].view(np.uint32))


@pytest.mark.parametrize("scope", ["", " sc0", " sc1", " sc0 sc1", " nt", " sc0 nt", " sc1 nt", " sc0 sc1 nt"])
def test_scopes_change_nothing(scope):
    wave, memory, start = prepare("global", np.arange(64) * 4)
    run(wave, "global_load_dword v8, v[2:3], off" + scope, "global_store_dword v[2:3], v8, off offset:256" + scope)
    np.testing.assert_array_equal(memory.bytes[start + 256 : start + 512], memory.bytes[start : start + 256])


def test_flat_addresses_in_the_aperture_are_lds():
    wave, memory, start = prepare("flat", np.arange(64) * 4)
    wave.lds.bytes[:512] = np.random.default_rng(4).integers(0, 256, 512, np.uint8)
    odd = np.arange(64) % 2 == 1
    run(wave, "s_mov_b64 s[10:11], src_shared_base")
    wave.vector[2, odd], wave.vector[3, odd] = np.arange(64)[odd] * 4, wave.scalar[11]
    run(wave, "flat_load_dword v8, v[2:3]", "flat_store_dword v[2:3], v8 offset:256")
    read = np.where(odd, wave.lds.bytes[:256].view(np.uint32), memory.bytes[start:start + 256].view(np.uint32))
    np.testing.assert_array_equal(wave.vector[8], read)
    np.testing.assert_array_equal(wave.lds.bytes[256:512].view(np.uint32)[odd], read[odd])
    np.testing.assert_array_equal(memory.bytes[start + 256:start + 512].view(np.uint32)[~odd], read[~odd])


# ---- what lies outside ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("line", ["global_load_dwordx4 v[8:11], v[2:3], off", "flat_store_dword v[2:3], v8",
                                  "global_load_ubyte v8, v1, s[2:3]", "global_atomic_add v[2:3], v8, off"])
@pytest.mark.parametrize("offset", [-1 << 62, -(1 << 21), -4, SIZE, SIZE + 4096, 1 << 40])
def test_access_outside_raises_unless_the_lane_is_off(line, offset):
    wave, _, start = prepare("global", np.zeros(64, int))
    address = offset + start
    wave.vector[2, 5], wave.vector[3, 5] = address & 0xFFFFFFFF, address >> 32 & 0xFFFFFFFF
    wave.vector[1, 5] = 0
    if "s[2:3]" in line:
        wave.write_sgprs(2, 2, address & (1 << 64) - 1)
    with pytest.raises(OutsideMemory, match=f"at {address & (1 << 64) - 1:#x} "):
        run(wave, line)
    wave.exec = 0 if "s[2:3]" in line else ~(1 << 5)
    run(wave, line)


def test_access_across_an_end_raises():
    wave, _, start = prepare("global", np.full(64, SIZE - 12))
    run(wave, "global_load_dwordx3 v[8:10], v[2:3], off")
    with pytest.raises(OutsideMemory, match=f"16 bytes at {start + SIZE - 12:#x}"):
        run(wave, "global_load_dwordx4 v[8:11], v[2:3], off")


def test_local_access_outside_raises():
    wave = make_wave(lds=1000)
    wave.vector[1] = 996
    run(wave, "ds_read_b32 v8, v1", "ds_write_b32 v1, v8")
    for line in ("ds_read_b64 v[8:9], v1", "ds_write_b32 v1, v8 offset:4", "ds_read2_b32 v[8:9], v1 offset1:1",
                 "ds_add_u32 v1, v8 offset:4"):
        with pytest.raises(OutsideMemory, match="1000 bytes of LDS"):
            run(wave, line)


def test_local_memory_starts_as_a_pattern():
    wave = make_wave()
    wave.vector[1] = range(0, 256, 4)
    run(wave, "ds_read_b32 v8, v1")
    assert (wave.vector[8] == 0xA5A5A5A5).all()


# ---- buffers --------------------------------------------------------------------------------------------------------

def test_words_past_the_end_of_a_buffer_read_as_zero_and_are_not_written():
    offsets = np.array([0, SIZE - 16, SIZE - 12, SIZE - 4, SIZE, SIZE + 4, 1 << 31, (1 << 32) - 4] * 8)
    wave, memory, start = prepare("buffer", offsets)
    content = np.append(memory.bytes[start : start + SIZE].view(np.uint32), np.zeros(4, np.uint32))
    run(wave, "buffer_load_dwordx4 v[8:11], v1, s[4:7], s9 offen")
    for lane, offset in enumerate(offsets):
        at = min(int(offset), SIZE) // 4
        np.testing.assert_array_equal(wave.vector[8:12, lane], np.append(content[at:], np.zeros(4, np.uint32))[:4])
    wave.vector[12:16] = 1
    before = memory.bytes.copy()
    run(wave, "buffer_store_dwordx4 v[12:15], v1, s[4:7], s9 offen")
    changed = np.unique(np.flatnonzero(memory.bytes != before) // 4 * 4 - start)
    assert changed.tolist() == [0, 4, 8, 12, SIZE - 16, SIZE - 12, SIZE - 8, SIZE - 4]


def test_buffer_without_lane_offsets_and_with_an_index():
    wave, memory, start = prepare("buffer", np.arange(64) * 4)
    value = memory.bytes[start + 8 : start + 12].view(np.uint32)[0]
    run(wave, "buffer_load_dword v8, off, s[4:7], s9 offset:8")
    assert (wave.vector[8] == value).all()
    wave.vector[12] = 99  # an index, which a stride of 0 makes nothing of
    wave.vector[13] = 8
    run(wave, "buffer_load_dword v8, v[12:13], s[4:7], s9 idxen offen",
        "buffer_load_dword v9, v12, s[4:7], s9 idxen offset:8")
    assert (wave.vector[8:10] == value).all()


def test_buffer_stride_without_an_index_is_a_hint():
    wave, memory, start = prepare("buffer", np.arange(64) * 4)
    wave.scalar[5] |= (0x4000 | 2048) << 16  # what Triton asks of the cache
    run(wave, load_line("buffer", "dword", 0))
    np.testing.assert_array_equal(wave.vector[8], memory.bytes[start : start + 256].view(np.uint32))
    with pytest.raises(ValueError, match="raw buffer"):
        run(wave, "buffer_load_dword v8, v1, s[4:7], s9 idxen")


@pytest.mark.parametrize("word, bit", [(1, 31), (3, 23)])
def test_buffer_that_is_not_raw_raises(word, bit):
    wave, _, _ = prepare("buffer", np.zeros(64, int))
    wave.scalar[4 + word] |= 1 << bit
    with pytest.raises(ValueError, match="swizzled"):
        run(wave, load_line("buffer", "dword", 0))


# ---- two at once, and straight into LDS -----------------------------------------------------------------------------

TWO = [f"ds_{verb}2{unit}_b{bits}" for verb in ("read", "write") for unit in ("", "st64") for bits in (32, 64)]


def two_line(mnemonic):
    count = int(mnemonic[-2:]) // 32
    data = register(2 * count) if "read" in mnemonic else f"{register(count)}, {register(count, TARGET[count])}"
    return f"{mnemonic} {data}, v1 offset0:3 offset1:5" if "read" in mnemonic else (
        f"{mnemonic} v1, {data} offset0:3 offset1:5")


@pytest.mark.parametrize("exec_mask", MASKS)
@pytest.mark.parametrize("mnemonic", TWO)
def test_two_accesses(mnemonic, exec_mask):
    count, unit = int(mnemonic[-2:]) // 32, int(mnemonic[-2:]) // 8 * (64 if "st64" in mnemonic else 1)
    wave, memory, _ = prepare("lds", np.random.default_rng(2).permutation(64) * 8, exec_mask)
    expected, content = wave.vector.copy(), memory.bytes.copy()
    for at in (3 * unit, 5 * unit):  # where both write one place, the second stays
        for lane in active(exec_mask):
            place = content[int(wave.vector[1, lane]) + at :][: 4 * count].view(np.uint32)
            rows = range(8 + (at == 5 * unit) * count, 8 + (at == 5 * unit) * count + count)
            if "read" in mnemonic:
                expected[rows, lane] = place
            else:
                place[:] = wave.vector[rows, lane]
    run(wave, two_line(mnemonic))
    np.testing.assert_array_equal(wave.vector, expected)
    np.testing.assert_array_equal(memory.bytes, content)


LDS_DIRECT = [f"{space} {kind}" for space in ("buffer", "global") for kind in
              ("dword", "ubyte", "sbyte", "ushort", "sshort")]


def direct_line(case):
    space, kind = case.split()
    return f"buffer_load_{kind} v1, s[4:7], s9 offen offset:16 lds" if space == "buffer" else (
        f"global_load_lds_{kind} v[2:3], off offset:16")


@pytest.mark.parametrize("exec_mask", MASKS)
@pytest.mark.parametrize("case", LDS_DIRECT)
def test_load_straight_into_local_memory(case, exec_mask):
    space, kind = case.split()
    offsets = spread()
    wave, memory, start = prepare(space, offsets, exec_mask)
    run(wave, "s_mov_b32 m0, 0x200")
    expected = wave.lds.bytes.copy()
    for lane in active(exec_mask):
        value, = struct.unpack_from("<" + LOADS[kind][0], bytes_of(memory, start), int(offsets[lane]) + 16)
        expected[0x200 + 16 + 4 * lane :][:4] = np.frombuffer(struct.pack("<I", value & 0xFFFFFFFF), np.uint8)
    run(wave, direct_line(case))
    np.testing.assert_array_equal(wave.lds.bytes, expected)


# ---- scalar loads and caches ----------------------------------------------------------------------------------------

SCALAR = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}


def scalar_target(kind):
    return "s16" if SCALAR[kind] == 1 else f"s[16:{15 + SCALAR[kind]}]"


@pytest.mark.parametrize("kind", SCALAR)
@pytest.mark.parametrize("offset, at", [("0x40", 0x40), ("s10", 0x24), ("s10 offset:0x8", 0x2C), ("0x43", 0x40)])
@pytest.mark.parametrize("form", ["s_load", "s_buffer_load"])
def test_scalar_load(form, kind, offset, at):
    wave, memory, start = prepare("buffer", np.zeros(64, int))
    wave.scalar[10] = 0x24
    wave.write_sgprs(4, 2, start)
    base = "s[2:3]" if form == "s_load" else "s[4:7]"
    run(wave, f"{form}_{kind} {scalar_target(kind)}, {base}, {offset}")
    expected = struct.unpack_from(f"<{SCALAR[kind]}I", bytes_of(memory, start), at)
    assert wave.scalar[16 : 16 + SCALAR[kind]] == list(expected)


def test_scalar_load_before_the_base():
    wave, memory, start = prepare("global", np.zeros(64, int))
    wave.write_sgprs(2, 2, start + 64)
    run(wave, "s_load_dwordx2 s[16:17], s[2:3], -0x10")
    assert wave.scalar[16:18] == memory.bytes[start + 48 : start + 56].view(np.uint32).tolist()


def test_scalar_buffer_load_past_the_end_gives_zero():
    wave, memory, start = prepare("buffer", np.zeros(64, int))
    wave.scalar[16:24] = [7] * 8
    run(wave, f"s_buffer_load_dwordx4 s[16:19], s[4:7], {SIZE + 256 - 8:#x}",
        f"s_buffer_load_dwordx4 s[20:23], s[4:7], {SIZE + 256:#x}")
    assert wave.scalar[16:24] == memory.bytes[start + SIZE - 8 : start + SIZE].view(np.uint32).tolist() + [0] * 6


def test_scalar_load_outside_raises():
    wave, _, start = prepare("global", np.zeros(64, int))
    with pytest.raises(OutsideMemory, match=f"8 bytes at {start + SIZE - 4:#x}"):
        run(wave, f"s_load_dwordx2 s[16:17], s[2:3], {SIZE - 4:#x}")
    wave.write_sgprs(2, 2, 0)
    with pytest.raises(OutsideMemory, match="4 bytes at 0x0 "):
        run(wave, "s_load_dword s16, s[2:3], 0x0")


CACHES = ["buffer_wbl2 sc0 sc1", "buffer_wbl2 sc1", "buffer_inv sc0 sc1", "buffer_inv sc1", "s_dcache_inv",
          "s_dcache_inv_vol", "s_dcache_wb", "s_dcache_wb_vol"]


@pytest.mark.parametrize("line", CACHES)
def test_caches_have_no_effect(line):
    wave = make_wave()
    before = wave.vector.copy(), list(wave.scalar), wave.memory.changes
    run(wave, line)
    assert (wave.vector == before[0]).all() and wave.scalar == before[1] and wave.memory.changes == before[2]


SCRATCH = [f"scratch_load_{kind} {register(words(form))}, v1, off" for kind, (form, _) in LOADS.items()] + [
    f"scratch_store_{kind} v1, {register(words(form))}, off" for kind, (form, _) in STORES.items()]


@pytest.mark.parametrize("line", SCRATCH)
def test_scratch_raises(line):
    with pytest.raises(UnknownInstruction, match="must not use scratch"):
        run(make_wave(), line)


@pytest.mark.parametrize("line", [
    "global_load_dwordx2 v8, v[2:3], off", "global_load_dword v8, v2, off", "global_load_dword v8, v[2:3], off tfe",
    "buffer_load_dwordx2 v1, s[4:7], 0 offen lds", "buffer_load_format_x v8, v1, s[4:7], 0 offen",
    "ds_read_b32 v8, v1 gds", "ds_append v8", "s_store_dword s8, s[2:3], 0x0", "s_load_dwordx2 s16, s[2:3], 0x0"])
def test_what_is_not_known_raises(line):
    with pytest.raises(UnknownInstruction):
        run(make_wave(), line)


# ---- the whole file -------------------------------------------------------------------------------------------------

def all_lines():
    lines = [load_line(space, kind) for space in SPACES for kind in LOADS]
    lines += [store_line(space, kind) for space in SPACES for kind in STORES]
    lines += [two_line(mnemonic) for mnemonic in TWO]
    lines += [direct_line(case) for case in LDS_DIRECT] + CACHES + SCRATCH
    return lines + [f"{form}_{kind} {scalar_target(kind)}, s[4:{5 if form == 's_load' else 7}], 0x40"
                    for form in ("s_load", "s_buffer_load") for kind in SCALAR]


def test_every_instruction_is_tested():
    assert mnemonics_in(all_lines()) | mnemonics_in(case[0] for case in ATOMICS) == mnemonics_of("memory_ops")


def test_lines_are_as_the_disassembler_prints_them():
    assert printed(all_lines()) == all_lines()
