"""The emulator's scalar instructions: arithmetic and scc against Python integers, the exec mask, branches."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gfx942.alu_cases import SPECIAL
from tests.gfx942.assembly import ODD_LANES, make_wave, run
from tests.gfx942.emulator import UnknownInstruction
from tests.gfx942.emulator.control import Trap
from tests.gfx942.emulator.table import decode

WIDTH = {"u32": 32, "i32": 32, "u64": 64, "i64": 64}


def signed(value, bits):
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def fits(value):
    return -(1 << 31) <= value < 1 << 31


def count(value, bits):
    return f"{value & (1 << bits) - 1:0{bits}b}".count("1")


def lowest(value):
    return next((k for k in range(64) if value >> k & 1), -1)


def leading(value, bits):
    """Zeros above the highest one, -1 when there is none."""
    return next((k for k in range(bits) if value >> (bits - 1 - k) & 1), -1)


def like_sign(value, bits):
    text = f"{value & (1 << bits) - 1:0{bits}b}"
    same = len(text) - len(text.lstrip(text[0]))
    return same if same < bits else -1


def field(a, b, bits):
    return a >> (b & bits - 1) & (1 << (b >> 16 & 127)) - 1


def signed_field(a, b, bits):
    width = b >> 16 & 127
    return signed(field(a, b, bits), width) if width else 0


KEEP = object()  # scc stays as it was


def nonzero(function, bits):
    return lambda *sources: (function(*sources), function(*sources) & (1 << bits) - 1 != 0)


def kept(function):
    return lambda *sources: (function(*sources), KEEP)


def code(function):
    return lambda *sources: (None, function(*sources))


# mnemonic -> (result or "", sources, (result, scc) of the sources, then of scc where the last source is "scc");
# "dst" is the destination's old value, "k" a 16-bit constant
CASES = {
    "s_add_u32": ("u32", "u32 u32", lambda a, b: (a + b, a + b > 0xFFFFFFFF)),
    "s_sub_u32": ("u32", "u32 u32", lambda a, b: (a - b, b > a)),
    "s_addc_u32": ("u32", "u32 u32 scc", lambda a, b, c: (a + b + c, a + b + c > 0xFFFFFFFF)),
    "s_subb_u32": ("u32", "u32 u32 scc", lambda a, b, c: (a - b - c, b + c > a)),
    "s_add_i32": ("i32", "i32 i32", lambda a, b: (a + b, not fits(a + b))),
    "s_sub_i32": ("i32", "i32 i32", lambda a, b: (a - b, not fits(a - b))),
    "s_addk_i32": ("i32", "dst k", lambda a, k: (a + signed(k, 16), not fits(signed(a, 32) + signed(k, 16)))),
    "s_mulk_i32": ("i32", "dst k", kept(lambda a, k: a * signed(k, 16))),
    "s_movk_i32": ("i32", "k", kept(lambda k: signed(k, 16))),
    "s_cmovk_i32": ("i32", "dst k scc", kept(lambda a, k, c: signed(k, 16) if c else a)),
    "s_mul_i32": ("i32", "i32 i32", kept(lambda a, b: a * b)),
    "s_mul_hi_u32": ("u32", "u32 u32", kept(lambda a, b: a * b >> 32)),
    "s_mul_hi_i32": ("i32", "i32 i32", kept(lambda a, b: a * b >> 32)),
    "s_abs_i32": ("i32", "i32", nonzero(abs, 32)),
    "s_absdiff_i32": ("i32", "i32 i32", nonzero(lambda a, b: abs(signed(a - b, 32)), 32)),
    "s_sext_i32_i8": ("i32", "u32", kept(lambda a: signed(a, 8))),
    "s_sext_i32_i16": ("i32", "u32", kept(lambda a: signed(a, 16))),
    "s_pack_ll_b32_b16": ("u32", "u32 u32", kept(lambda a, b: (a & 0xFFFF) + ((b & 0xFFFF) << 16))),
    "s_pack_lh_b32_b16": ("u32", "u32 u32", kept(lambda a, b: (a & 0xFFFF) + (b >> 16 << 16))),
    "s_pack_hh_b32_b16": ("u32", "u32 u32", kept(lambda a, b: (a >> 16) + (b >> 16 << 16))),
    "s_bitreplicate_b64_b32": ("u64", "u32", kept(lambda a: int("".join(2 * bit for bit in f"{a:032b}"), 2))),
    "s_cmp_eq_u64": ("", "u64 u64", code(lambda a, b: a == b)),
    "s_cmp_lg_u64": ("", "u64 u64", code(lambda a, b: a != b)),
    "s_flbit_i32": ("i32", "i32", kept(lambda a: like_sign(a, 32))),
    "s_flbit_i32_i64": ("i32", "i64", kept(lambda a: like_sign(a, 64))),
}
for _n in (1, 2, 3, 4):
    CASES[f"s_lshl{_n}_add_u32"] = ("u32", "u32 u32", lambda a, b, n=_n: (a * 2**n + b, a * 2**n + b > 0xFFFFFFFF))
for _type in ("u32", "i32"):
    CASES[f"s_min_{_type}"] = (_type, f"{_type} {_type}", lambda a, b: (min(a, b), a < b))
    CASES[f"s_max_{_type}"] = (_type, f"{_type} {_type}", lambda a, b: (max(a, b), a > b))
    for _name, _compare in {"eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
                            "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b}.items():
        CASES[f"s_cmp_{_name}_{_type}"] = ("", f"{_type} {_type}", code(_compare))
        CASES[f"s_cmpk_{_name}_{_type}"] = ("", f"{_type} k", code(
            lambda a, k, f=_compare, t=_type: f(a, signed(k, 16) if t == "i32" else k)))
for _bits in (32, 64):
    _u, _i = f"u{_bits}", f"i{_bits}"
    CASES |= {f"s_{_name}_b{_bits}": (_u, f"{_u} {_u}", nonzero(_function, _bits)) for _name, _function in {
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b)}.items()}
    CASES |= {
        f"s_mov_b{_bits}": (_u, _u, kept(lambda a: a)),
        f"s_not_b{_bits}": (_u, _u, nonzero(lambda a: ~a, _bits)),
        f"s_lshl_b{_bits}": (_u, f"{_u} u32", nonzero(lambda a, b, n=_bits: a << b % n, _bits)),
        f"s_lshr_b{_bits}": (_u, f"{_u} u32", nonzero(lambda a, b, n=_bits: a >> b % n, _bits)),
        f"s_ashr_i{_bits}": (_i, f"{_i} u32", nonzero(lambda a, b, n=_bits: a >> b % n, _bits)),
        f"s_bfm_b{_bits}": (_u, "u32 u32", kept(lambda a, b, n=_bits: (2 ** (a % n) - 1) << b % n)),
        f"s_bfe_u{_bits}": (_u, f"{_u} u32", nonzero(lambda a, b, n=_bits: field(a, b, n), _bits)),
        f"s_bfe_i{_bits}": (_i, f"{_i} u32", nonzero(lambda a, b, n=_bits: signed_field(a, b, n), _bits)),
        f"s_brev_b{_bits}": (_u, _u, kept(lambda a, n=_bits: sum((a >> k & 1) << (n - 1 - k) for k in range(n)))),
        f"s_bcnt1_i32_b{_bits}": ("i32", _u, nonzero(lambda a, n=_bits: count(a, n), 32)),
        f"s_bcnt0_i32_b{_bits}": ("i32", _u, nonzero(lambda a, n=_bits: count(~a, n), 32)),
        f"s_ff1_i32_b{_bits}": ("i32", _u, kept(lowest)),
        f"s_ff0_i32_b{_bits}": ("i32", _u, kept(lambda a, n=_bits: lowest(~a & (1 << n) - 1))),
        f"s_flbit_i32_b{_bits}": ("i32", _u, kept(lambda a, n=_bits: leading(a, n))),
        f"s_bitset0_b{_bits}": (_u, "dst u32", kept(lambda a, b, n=_bits: a & ~(1 << b % n))),
        f"s_bitset1_b{_bits}": (_u, "dst u32", kept(lambda a, b, n=_bits: a | (1 << b % n))),
        f"s_cselect_b{_bits}": (_u, f"{_u} {_u} scc", kept(lambda a, b, c: a if c else b)),
        f"s_cmov_b{_bits}": (_u, f"dst {_u} scc", kept(lambda old, a, c: a if c else old)),
        f"s_bitcmp0_b{_bits}": ("", f"{_u} u32", code(lambda a, b, n=_bits: not a >> b % n & 1)),
        f"s_bitcmp1_b{_bits}": ("", f"{_u} u32", code(lambda a, b, n=_bits: a >> b % n & 1)),
    }
SAVES = {"and": lambda s, e: s & e, "or": lambda s, e: s | e, "xor": lambda s, e: s ^ e, "andn1": lambda s, e: ~s & e,
         "andn2": lambda s, e: s & ~e, "orn1": lambda s, e: ~s | e, "orn2": lambda s, e: s | ~e,
         "nand": lambda s, e: ~(s & e), "nor": lambda s, e: ~(s | e), "xnor": lambda s, e: ~(s ^ e)}
SAVE_TEXTS = [f"s_{name}_saveexec_b64 s[0:1], s[2:3]" for name in SAVES]
SAVE_TEXTS += [f"s_{name}_wrexec_b64 s[0:1], s[2:3]" for name in ("andn1", "andn2")]
BRANCHES = {"s_branch 4": (True, True), "s_cbranch_scc0 4": (True, False), "s_cbranch_scc1 4": (False, True),
            "s_cbranch_vccz 4": (True, False), "s_cbranch_vccnz 4": (False, True), "s_cbranch_execz 4": (True, False),
            "s_cbranch_execnz 4": (False, True)}  # text -> taken when the condition is 0, and when it is not
CONTROL = ["s_getpc_b64 s[0:1]", "s_setpc_b64 s[2:3]", "s_swappc_b64 s[0:1], s[2:3]", "s_call_b64 s[0:1], 65534",
           "s_endpgm", "s_barrier", "s_sleep 1", "s_waitcnt vmcnt(0) lgkmcnt(0)", "s_nop 0", "s_setprio 1",
           "s_icache_inv", "s_trap 2", "s_sethalt 0", "s_memtime s[0:1]", "s_memrealtime s[0:1]",
           "s_getreg_b32 s0, hwreg(HW_REG_MODE, 4, 4)", "s_setreg_b32 hwreg(HW_REG_MODE, 4, 4), s2",
           "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 8), 0xf0"]


def text_of(mnemonic, constant=0):
    """Sources in s[2:3] and s[4:5], the result in s[0:1]."""
    result, sources, _ = CASES[mnemonic]
    operands, free = [], iter((2, 4))
    if result:
        operands.append("s[0:1]" if WIDTH[result] == 64 else "s0")
    for name in sources.split():
        if name in WIDTH:
            first = next(free)
            operands.append(f"s[{first}:{first + 1}]" if WIDTH[name] == 64 else f"s{first}")
        elif name == "k":
            operands.append(hex(constant))
    return f"{mnemonic} {', '.join(operands)}"


TEXTS = [*map(text_of, CASES), *SAVE_TEXTS, *BRANCHES, *CONTROL]


WAVE = make_wave()  # one for all: the sources, the destination and scc are set each time
step = functools.lru_cache(maxsize=4096)(functools.partial(decode, 0))


def check_scalar(mnemonic, first, second, old, scc):
    """Run it on two source patterns, an old destination and a condition code."""
    result, sources, function = CASES[mnemonic]
    values, free = [], iter((first, second))
    constant = second & 0xFFFF
    for name in sources.split():
        if name in WIDTH:
            bits = next(free) & (1 << WIDTH[name]) - 1
            values.append(signed(bits, WIDTH[name]) if name[0] == "i" else bits)
        else:
            values.append({"k": constant, "dst": old & (1 << WIDTH[result or "u32"]) - 1, "scc": scc}[name])
    wave = WAVE
    wave.write_sgprs(0, 2, old)
    wave.write_sgprs(2, 2, first)
    wave.write_sgprs(4, 2, second)
    wave.scc = scc
    step(text_of(mnemonic, constant))(wave)
    wanted, wanted_scc = function(*values)
    label = f"{text_of(mnemonic, constant)} of {[hex(v) for v in values]}"
    assert wave.scc == (scc if wanted_scc is KEEP else int(wanted_scc)), label
    if result:
        assert wave.read_sgprs(0, WIDTH[result] // 32) == wanted & (1 << WIDTH[result]) - 1, label


@pytest.mark.parametrize("mnemonic", CASES)
def test_scalar_instruction_on_special_values(mnemonic):
    rng = np.random.default_rng(3)
    pairs = [(a, b) for bits in (32, 64) for a in SPECIAL[bits] for b in SPECIAL[bits]]
    for a, b in [pairs[k] for k in rng.choice(len(pairs), 150, replace=False)]:
        for scc in (0, 1):
            check_scalar(mnemonic, a, b, int(rng.integers(1 << 63)), scc)


words = st.integers(0, (1 << 64) - 1)


@settings(max_examples=10, deadline=None)
@given(first=words, second=words, old=words, scc=st.integers(0, 1))
@pytest.mark.parametrize("mnemonic", CASES)
def test_scalar_instruction_on_random_values(mnemonic, first, second, old, scc):
    check_scalar(mnemonic, first, second, old, scc)


@pytest.mark.parametrize("width", (0, 1, 31, 32, 33, 63, 64))
@pytest.mark.parametrize("mnemonic", ("s_bfe_u32", "s_bfe_i32", "s_bfe_u64", "s_bfe_i64"))
def test_a_bit_field_of_every_width(mnemonic, width):
    for offset in (0, 1, 31, 32, 63):
        check_scalar(mnemonic, 0x8123_4567_89AB_CDEF, width << 16 | offset, 0, 0)


@pytest.mark.parametrize("source", (0, ODD_LANES, ~ODD_LANES, 0xFFFF_0000_0F0F_5555))
@pytest.mark.parametrize("text", SAVE_TEXTS)
def test_saving_exec_gives_the_old_mask_and_wrexec_the_new(text, source):
    source &= (1 << 64) - 1
    wave = make_wave(ODD_LANES)
    wave.write_sgprs(2, 2, source)
    run(wave, text)
    wanted = SAVES[text.split("_")[1]](source, ODD_LANES) & (1 << 64) - 1
    assert wave.exec == wanted and wave.scc == (wanted != 0)
    assert wave.read_sgprs(0, 2) == (wanted if "wrexec" in text else ODD_LANES)
    assert wave.active.tolist() == [bool(wanted >> k & 1) for k in range(64)]


def test_exec_and_vcc_are_operands_by_half_and_whole():
    wave = make_wave(ODD_LANES)
    run(wave, "s_mov_b64 vcc, exec", "s_mov_b32 s0, vcc_lo", "s_mov_b32 s1, exec_hi", "s_mov_b32 exec_lo, -1",
        "s_mov_b32 vcc_hi, 0xff", "s_mov_b32 m0, s0")
    assert wave.read_sgprs(0, 2) == ODD_LANES and wave.scalar[124] == ODD_LANES & 0xFFFFFFFF
    assert wave.exec == ODD_LANES | 0xFFFFFFFF and wave.active[:32].all()
    assert wave.read_sgprs(106, 2) == 0xFF << 32 | ODD_LANES & 0xFFFFFFFF
    run(wave, "s_mov_b32 exec_hi, 0", "s_mov_b32 exec_lo, 0", "s_mov_b64 vcc, 0")
    run(wave, "s_mov_b32 s0, src_vccz", "s_mov_b32 s1, src_execz", "s_cmp_eq_u32 s0, 1", "s_mov_b32 s2, src_scc")
    assert wave.scalar[:3] == [1, 1, 1]


@pytest.mark.parametrize("operand, wanted", [
    ("-16", (1 << 64) - 16), ("64", 64), ("1.0", 0x3FF0 << 48), ("-4.0", 0xC010 << 48),
    ("0.15915494", 0x3FC45F306DC9C882), ("0xfedcba98", 0xFEDCBA98)])
def test_constants_of_64_bits(operand, wanted):
    wave = make_wave()
    run(wave, f"s_mov_b64 s[0:1], {operand}")
    assert wave.read_sgprs(0, 2) == wanted


def test_a_literal_of_a_signed_64_bit_operand_is_sign_extended():
    wave = make_wave()
    run(wave, "s_mov_b32 s2, 4", "s_ashr_i64 s[0:1], 0x80000000, s2")
    assert wave.read_sgprs(0, 2) == 0xFFFF_FFFF_F800_0000


class Places:
    """Stands for the program: every address is a step of its own number."""

    def at(self, address):
        return address


@pytest.mark.parametrize("text", BRANCHES)
@pytest.mark.parametrize("value", (0, 1))
def test_branch_counts_words_from_the_next_instruction(text, value):
    wave = make_wave(value)
    wave.program, wave.scc, wave.pc = Places(), value, 7
    wave.write_sgprs(106, 2, value << 40)
    decode(0x1000, text)(wave)
    assert wave.pc == (0x1014 if BRANCHES[text][value] else 7)
    decode(0x1000, text.replace(" 4", " 65535"))(wave)
    assert wave.pc == (0x1000 if BRANCHES[text][value] else 7)


def test_calls_keep_the_address_behind_them():
    wave = make_wave()
    wave.program = Places()
    wave.write_sgprs(2, 2, 0x5_0000_0040)
    decode(0x2000, CONTROL[0])(wave)
    assert wave.read_sgprs(0, 2) == 0x2004
    decode(0x2000, CONTROL[1])(wave)
    assert wave.pc == 0x5_0000_0040
    decode(0x3000, CONTROL[2])(wave)
    assert wave.pc == 0x5_0000_0040 and wave.read_sgprs(0, 2) == 0x3004
    decode(0x4000, CONTROL[3])(wave)
    assert wave.pc == 0x3FFC and wave.read_sgprs(0, 2) == 0x4004


def test_waiting_ending_and_what_does_nothing():
    wave = make_wave()
    run(wave, *CONTROL[7:11], "s_sethalt 0")
    assert not wave.waits and not wave.done
    run(wave, "s_barrier")
    assert wave.waits == "barrier"
    run(wave, "s_sleep 1")
    assert wave.waits == "spin"
    run(wave, "s_endpgm")
    assert wave.done
    with pytest.raises(Trap, match="s_trap 2"):
        run(wave, "s_trap 2")
    with pytest.raises(UnknownInstruction):
        decode(0, "s_sethalt 1")


def test_time_goes_on():
    wave = make_wave()
    for text in ("s_memtime s[0:1]", "s_memrealtime s[0:1]"):
        run(wave, text)
        before = wave.read_sgprs(0, 2)
        wave.executed += 10
        run(wave, text)
        assert wave.read_sgprs(0, 2) > before


def test_only_the_modelled_rounding_and_denormal_mode_may_be_set():
    wave = make_wave()
    run(wave, "s_getreg_b32 s0, hwreg(HW_REG_MODE, 4, 4)", "s_mov_b32 s2, 15", *CONTROL[-2:])
    assert wave.scalar[0] == 15  # denormals of all types are kept
    for text in ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 3"):
        with pytest.raises(UnknownInstruction, match="mode"):
            run(wave, text)
    with pytest.raises(UnknownInstruction, match="HW_REG_TRAPSTS"):
        decode(0, "s_getreg_b32 s0, hwreg(HW_REG_TRAPSTS)")
