"""The emulator's moves between lanes, against loops over lanes written from the manual's pseudocode."""

import numpy as np
import pytest

from tests.gfx942.assembly import ODD_LANES, make_wave, mnemonics_in, mnemonics_of, printed, run
from tests.gfx942.emulator import UnknownInstruction
from tests.gfx942.emulator.instruction import parse
from tests.gfx942.emulator.lanes import dpp_move

MASKS = [(1 << 64) - 1, ODD_LANES, 1 << 63, 0]


def is_active(exec_mask, lane):
    return exec_mask >> lane & 1 == 1


# ---- DPP ------------------------------------------------------------------------------------------------------------

def shift(n, row):
    return lambda lane: lane + n if (lane + n) // row == lane // row and lane + n >= 0 else None


DPP = {  # control -> the lane that a lane reads, None for none
    **{f"row_shl:{n}": shift(n, 16) for n in (1, 5, 15)}, **{f"row_shr:{n}": shift(-n, 16) for n in (1, 8, 15)},
    **{f"row_ror:{n}": (lambda lane, n=n: lane // 16 * 16 + (lane - n) % 16) for n in (1, 4, 15)},
    **{f"row_newbcast:{n}": (lambda lane, n=n: lane // 16 * 16 + n) for n in (0, 7, 15)},
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
    "wave_shl:1": shift(1, 64), "wave_shr:1": shift(-1, 64),
    "wave_rol:1": lambda lane: (lane + 1) % 64, "wave_ror:1": lambda lane: (lane - 1) % 64,
    "row_mirror": lambda lane: lane // 16 * 16 + 15 - lane % 16,
    "row_half_mirror": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "quad_perm:[3,0,2,1]": lambda lane: lane // 4 * 4 + (3, 0, 2, 1)[lane % 4],
    "quad_perm:[0,0,0,0]": lambda lane: lane // 4 * 4,
}


def moved(wave, control, rows, banks, zero):
    """What v_mov_b32_dpp v8, v9 leaves in v8."""
    result = wave.vector[8].copy()
    for lane in range(64):
        if not is_active(wave.exec, lane) or not rows >> lane // 16 & 1 or not banks >> lane % 16 // 4 & 1:
            continue
        source = DPP[control](lane)
        if source is not None and is_active(wave.exec, source):
            result[lane] = wave.vector[9, source]
        elif zero:
            result[lane] = 0
    return result


# Compilers before LLVM 13 print the same bit as bound_ctrl:0.
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1", " bound_ctrl:0"])
@pytest.mark.parametrize("control", DPP)
def test_dpp_move(control, bound):
    for exec_mask in MASKS:
        for rows, banks in ((15, 15), (10, 15), (15, 6), (3, 9)):
            wave = make_wave(exec_mask)
            expected = moved(wave, control, rows, banks, bool(bound))
            run(wave, f"v_mov_b32_dpp v8, v9 {control} row_mask:{rows:#x} bank_mask:{banks:#x}{bound}")
            np.testing.assert_array_equal(wave.vector[8], expected)


def test_dpp_leaves_the_old_result_where_there_is_no_source():
    wave = make_wave()
    expected = np.where(np.arange(64) % 16 > 0, np.roll(wave.vector[9], 1) + wave.vector[10], wave.vector[8])
    run(wave, "v_add_u32_dpp v8, v9, v10 row_shr:1 row_mask:0xf bank_mask:0xf")
    np.testing.assert_array_equal(wave.vector[8], expected)


def test_dpp_control_that_is_not_known_raises():
    with pytest.raises(UnknownInstruction):
        run(make_wave(), "v_mov_b32_dpp v8, v9 row_share:1 row_mask:0xf bank_mask:0xf")
    assert dpp_move(parse(0, "v_mov_b32_e32 v8, v9")) is None


def test_dpp_lines_are_as_the_disassembler_prints_them():
    lines = [f"v_mov_b32_dpp v8, v9 {control} row_mask:0xa bank_mask:0xf{bound}" for control in DPP
             for bound in ("", " bound_ctrl:1")]
    assert printed(lines) == lines


# ---- swizzle --------------------------------------------------------------------------------------------------------

def bit_mask(keep, one, flip):
    return lambda lane: lane & 32 | (lane & 31 & keep | one) ^ flip


def reverse_bits(x):
    return int(f"{x:05b}"[::-1], 2)


SWIZZLES = {  # offset -> the lane that a lane reads
    "": bit_mask(0, 0, 0),
    "offset:swizzle(SWAP,16)": lambda lane: lane ^ 16,
    "offset:swizzle(SWAP,1)": lambda lane: lane ^ 1,
    "offset:swizzle(REVERSE,8)": lambda lane: lane ^ 7,
    "offset:swizzle(REVERSE,32)": lambda lane: lane ^ 31,
    "offset:swizzle(BROADCAST,8,3)": lambda lane: lane & ~7 | 3,
    "offset:swizzle(BROADCAST,32,17)": lambda lane: lane & ~31 | 17,
    "offset:swizzle(QUAD_PERM,2,3,0,1)": lambda lane: lane ^ 2,
    "offset:swizzle(QUAD_PERM,3,1,0,0)": lambda lane: lane & ~3 | (3, 1, 0, 0)[lane & 3],
    'offset:swizzle(BITMASK_PERM,"01pip")': bit_mask(0b00111, 0b01000, 0b00010),
    'offset:swizzle(BITMASK_PERM,"iiipp")': bit_mask(31, 0, 0b11100),
    "offset:49312": lambda lane: lane & 32 | (lane + 5) % 32,  # 0xc0a0: rotate by 5
    "offset:50342": lambda lane: lane & 32 | lane & 6 | (lane % 32 - 5) & 31 & ~6,  # 0xc4a6: back by 5, two bits stay
    "offset:57344": lambda lane: lane & 32 | reverse_bits(lane % 32),  # 0xe000
    "offset:57347": lambda lane: lane & 32 | reverse_bits(lane % 32) >> 2 | lane & 3,
    "offset:57375": lambda lane: lane,
}


@pytest.mark.parametrize("offset", SWIZZLES)
def test_swizzle(offset):
    for exec_mask in MASKS:
        wave = make_wave(exec_mask)
        expected = wave.vector[8].copy()
        for lane in range(64):
            source = SWIZZLES[offset](lane)
            if is_active(exec_mask, lane):
                expected[lane] = wave.vector[9, source] if is_active(exec_mask, source) else 0
        run(wave, f"ds_swizzle_b32 v8, v9 {offset}")
        np.testing.assert_array_equal(wave.vector[8], expected)


def test_bit_mask_swizzles_of_every_kind_agree_with_their_numbers():
    rng = np.random.default_rng(0)
    numbers = [f"ds_swizzle_b32 v8, v9 offset:{number}" for number in rng.integers(0, 0x8000, 50)]
    for number, text in zip(numbers, printed(numbers), strict=True):
        one, other = make_wave(), make_wave()
        run(one, number)
        run(other, text)
        assert one.vector.tobytes() == other.vector.tobytes(), text


def test_swizzle_that_is_not_known_raises():
    with pytest.raises(UnknownInstruction, match="swizzle"):
        run(make_wave(), "ds_swizzle_b32 v8, v9 offset:swizzle(SHUFFLE,1)")


# ---- permutes -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("offset", [0, 4, 252])
@pytest.mark.parametrize("exec_mask", MASKS)
def test_pull_permute(exec_mask, offset):
    wave = make_wave(exec_mask)
    expected = wave.vector[8].copy()
    for lane in range(64):
        source = (int(wave.vector[10, lane]) + offset) // 4 % 64
        if is_active(exec_mask, lane):
            expected[lane] = wave.vector[9, source] if is_active(exec_mask, source) else 0
    run(wave, f"ds_bpermute_b32 v8, v10, v9{f' offset:{offset}' if offset else ''}")
    np.testing.assert_array_equal(wave.vector[8], expected)


@pytest.mark.parametrize("offset", [0, 4, 252])
@pytest.mark.parametrize("exec_mask", MASKS)
def test_push_permute(exec_mask, offset):
    wave = make_wave(exec_mask)
    received = [0] * 64
    for lane in range(64):
        if is_active(exec_mask, lane):
            received[(int(wave.vector[10, lane]) + offset) // 4 % 64] = int(wave.vector[9, lane])
    expected = [received[lane] if is_active(exec_mask, lane) else int(wave.vector[8, lane]) for lane in range(64)]
    run(wave, f"ds_permute_b32 v8, v10, v9{f' offset:{offset}' if offset else ''}")
    np.testing.assert_array_equal(wave.vector[8], expected)


# ---- single lanes ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("exec_mask", MASKS)
def test_read_lane_ignores_exec(exec_mask):
    wave = make_wave(exec_mask)
    wave.scalar[5] = 64 + 41
    run(wave, "v_readlane_b32 s8, v9, 63", "v_readlane_b32 s9, v9, s5", "v_readlane_b32 vcc_hi, v9, 0",
        "s_mov_b32 m0, 7", "v_readlane_b32 s10, v9, m0")
    assert wave.scalar[8:11] == wave.vector[9, [63, 41, 7]].tolist()
    assert wave.read_sgprs(106, 2) >> 32 == wave.vector[9, 0]


@pytest.mark.parametrize("exec_mask, lane", [(MASKS[0], 0), (ODD_LANES, 0), (1 << 63, 63), (0b1101000, 3), (0, 0)])
def test_read_first_lane(exec_mask, lane):
    wave = make_wave(exec_mask)
    run(wave, "v_readfirstlane_b32 s8, v9", "v_readfirstlane_b32 m0, a10")
    assert wave.scalar[8] == wave.vector[9, lane]
    assert wave.scalar[124] == wave.vector[266, lane]


@pytest.mark.parametrize("exec_mask", MASKS)
def test_write_lane_ignores_exec(exec_mask):
    wave = make_wave(exec_mask)
    wave.scalar[6] = 0xDEADBEEF
    expected = wave.vector.copy()
    expected[9, [3, 41, 63]] = [0xFFFFFFFF, 0xDEADBEEF, 0x40400000]
    run(wave, "v_writelane_b32 v9, -1, 3", "s_movk_i32 m0, 0x69", "v_writelane_b32 v9, s6, m0",
        "s_mov_b32 m0, 0x40400000", "v_writelane_b32 v9, m0, 63")
    np.testing.assert_array_equal(wave.vector, expected)


@pytest.mark.parametrize("exec_mask", MASKS)
def test_count_of_bits_below_the_lane(exec_mask):
    wave = make_wave(exec_mask)
    mask = ODD_LANES
    wave.write_sgprs(4, 2, mask)
    run(wave, "v_mbcnt_lo_u32_b32 v8, s4, 0", "v_mbcnt_hi_u32_b32 v8, s5, v8", "v_mbcnt_lo_u32_b32 v9, -1, 0",
        "v_mbcnt_hi_u32_b32 v9, -1, v9", "v_mbcnt_lo_u32_b32 v10, v11, v12")
    before = make_wave().vector
    for lane in range(64):
        if is_active(exec_mask, lane):
            assert wave.vector[8, lane] == (mask & (1 << lane) - 1).bit_count()
            assert wave.vector[9, lane] == lane
            own = (int(before[11, lane]) & (1 << min(lane, 32)) - 1).bit_count()
            assert wave.vector[10, lane] == (own + int(before[12, lane])) & 0xFFFFFFFF
        else:
            assert (wave.vector[8:11, lane] == before[8:11, lane]).all()


@pytest.mark.parametrize("line", ["v_readlane_b32 s[8:9], v9, 1", "v_readfirstlane_b32 v8, v9",
                                  "ds_swizzle_b32 v8, v9 gds", "v_writelane_b32 v[8:9], 1, 1",
                                  "ds_bpermute_b32 v8, v9, v[10:11]"])
def test_wrong_operands_raise(line):
    with pytest.raises(UnknownInstruction):
        run(make_wave(), line)


LINES = [f"ds_swizzle_b32 v8, v9 {offset}".strip() for offset in SWIZZLES] + [
    "ds_bpermute_b32 v8, v10, v9 offset:4", "ds_permute_b32 v8, v10, v9", "v_readlane_b32 s8, v9, 63",
    "v_readfirstlane_b32 s8, v9", "v_writelane_b32 v9, s6, m0", "v_mbcnt_lo_u32_b32 v8, s4, 0",
    "v_mbcnt_hi_u32_b32 v8, -1, v8"]


def test_every_instruction_is_tested_and_printed_so():
    assert mnemonics_in(LINES) == mnemonics_of("lanes")
    assert [line.replace("_e32 ", " ").replace("_e64 ", " ") for line in printed(LINES)] == LINES
