"""Scalar arithmetic: Python integers of 32 or 64 bits, and the condition code scc.

Declared with the types of the result and the sources:

    scalar("s_add_u32", "u32", "u32 u32", lambda a, b: (a + b, a + b >> 32), scc="given")

Signed types read as negative numbers; results are cut to their width. What becomes of scc: "keep", "nonzero" (whether
the result is not 0), or "given" (the function returns it too). A source "scc" is the code itself, and "dst" the
destination's old value.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.operand import ScalarReader, scalar_reader, scalar_register
from tests.gfx942.emulator.table import Step, decodes
from tests.gfx942.emulator.types import TYPES, signed
from tests.gfx942.emulator.wave import EXEC, Wave

IMMEDIATE = {"s16": True, "u16": False}  # the 16-bit constant of an instruction: sign-extended or not


def scalar(mnemonics: str, result: str, sources: str, function: Callable, scc: str = "keep") -> None:
    """Declare scalar instructions. `result` may be "none": then the function gives scc alone."""
    types = sources.split()
    explicit = [name for name in types if name not in ("scc", "dst")]
    has_result = result != "none"

    @decodes(*mnemonics.split())
    def decoder(instruction: Instruction) -> Step:
        instruction.expect_operands(len(explicit) + has_result)
        instruction.allow()
        operands = iter(instruction.operands[has_result:])
        readers = [_reader(instruction, name, operands, result) for name in types]
        if not has_result:
            def compare(wave: Wave) -> None:
                wave.scc = int(function(*[read(wave) for read in readers]))

            return compare
        first, count, mask = scalar_destination(instruction, result)

        def step(wave: Wave) -> None:
            value = function(*[read(wave) for read in readers])
            if scc == "given":
                value, code = value
                wave.scc = int(code)
            value &= mask
            if scc == "nonzero":
                wave.scc = int(value != 0)
            wave.write_sgprs(first, count, value)

        return step


def scalar_destination(instruction: Instruction, name: str) -> tuple[int, int, int]:
    """(first SGPR, how many, mask of the bits) of operand 0, which must have the width of type `name`."""
    bits, _ = TYPES[name]
    register = scalar_register(instruction.operands[0])
    if register is None or register[1] != bits // 32:
        raise ValueError(f"{instruction.operands[0]} is no scalar destination of {bits} bits")
    return *register, (1 << bits) - 1


def _reader(instruction: Instruction, name: str, operands, result: str) -> ScalarReader:
    if name == "scc":
        return lambda wave: wave.scc
    if name == "dst":
        return typed_scalar(instruction.operands[0], result)
    operand = next(operands)
    if name in IMMEDIATE:
        value = int(operand, 0)
        value = signed(value, 16) if IMMEDIATE[name] else value & 0xFFFF
        return lambda wave: value
    return typed_scalar(operand, name)


def typed_scalar(operand: str, name: str) -> ScalarReader:
    """Reads an operand as a number of type `name`: a signed one may be negative."""
    bits, _ = TYPES[name]
    register = scalar_register(operand)
    if register and register[1] != bits // 32:
        raise ValueError(f"{operand} has {register[1]} registers, expected {bits // 32}")
    read = scalar_reader(operand, bits, name == "i64")
    if name[0] != "i":
        return read
    return lambda wave: signed(read(wave), bits)


# ---- arithmetic -----------------------------------------------------------------------------------------------------

def _overflows(exact: int) -> bool:
    return exact != signed(exact, 32)


scalar("s_add_u32", "u32", "u32 u32", lambda a, b: (a + b, a + b >> 32), "given")
scalar("s_sub_u32", "u32", "u32 u32", lambda a, b: (a - b, a < b), "given")
scalar("s_addc_u32", "u32", "u32 u32 scc", lambda a, b, c: (a + b + c, a + b + c >> 32), "given")
scalar("s_subb_u32", "u32", "u32 u32 scc", lambda a, b, c: (a - b - c, a < b + c), "given")
scalar("s_add_i32", "i32", "i32 i32", lambda a, b: (a + b, _overflows(a + b)), "given")
scalar("s_sub_i32", "i32", "i32 i32", lambda a, b: (a - b, _overflows(a - b)), "given")
scalar("s_addk_i32", "i32", "dst s16", lambda a, b: (a + b, _overflows(a + b)), "given")
scalar("s_mul_i32", "i32", "i32 i32", lambda a, b: a * b)
scalar("s_mulk_i32", "i32", "dst s16", lambda a, b: a * b)
scalar("s_mul_hi_u32", "u32", "u32 u32", lambda a, b: a * b >> 32)
scalar("s_mul_hi_i32", "i32", "i32 i32", lambda a, b: a * b >> 32)
for _type in ("u32", "i32"):
    scalar(f"s_min_{_type}", _type, f"{_type} {_type}", lambda a, b: (min(a, b), a < b), "given")
    scalar(f"s_max_{_type}", _type, f"{_type} {_type}", lambda a, b: (max(a, b), a > b), "given")
scalar("s_abs_i32", "i32", "i32", abs, "nonzero")
scalar("s_absdiff_i32", "u32", "i32 i32", lambda a, b: abs(signed(a - b, 32)), "nonzero")
for _shift in (1, 2, 3, 4):
    scalar(f"s_lshl{_shift}_add_u32", "u32", "u32 u32",
           lambda a, b, n=_shift: ((a << n) + b, (a << n) + b >> 32 != 0), "given")

# ---- bits -----------------------------------------------------------------------------------------------------------

LOGICAL = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
           "andn2": lambda a, b: a & ~b, "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b),
           "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b)}


def bit_count(value: int) -> int:
    return value.bit_count()


def lowest_one(value: int) -> int:
    """Position of the lowest one; -1 when there is none."""
    return (value & -value).bit_length() - 1


def signed_leading(value: int, bits: int) -> int:
    """How many bits from the top equal the sign; -1 when all do."""
    changed = value ^ (-1 if value < 0 else 0)
    return bits - changed.bit_length() if changed else -1


def extract(value: int, field: int, offset_bits: int, is_signed: bool) -> int:
    """The field that starts at the low bits of `field` and is as wide as its bits 16..22 say."""
    width = field >> 16 & 0x7F
    part = value >> (field & (1 << offset_bits) - 1) & (1 << width) - 1
    return signed(part, width) if is_signed and width else part


for _bits, _wide in ((32, "b32"), (64, "b64")):
    _full, _signed, _ones = _bits - 1, f"i{_bits}", (1 << _bits) - 1
    _offset = _full.bit_length()  # bits of a shift count
    for _name, _function in LOGICAL.items():
        scalar(f"s_{_name}_b{_bits}", _wide, f"{_wide} {_wide}", _function, "nonzero")
    scalar(f"s_mov_b{_bits}", _wide, _wide, lambda a: a)
    scalar(f"s_not_b{_bits}", _wide, _wide, lambda a: ~a, "nonzero")
    scalar(f"s_lshl_b{_bits}", _wide, f"{_wide} b32", lambda a, b, m=_full: a << (b & m), "nonzero")
    scalar(f"s_lshr_b{_bits}", _wide, f"{_wide} b32", lambda a, b, m=_full: a >> (b & m), "nonzero")
    scalar(f"s_ashr_i{_bits}", _signed, f"{_signed} b32", lambda a, b, m=_full: a >> (b & m), "nonzero")
    scalar(f"s_bfm_b{_bits}", _wide, "b32 b32", lambda a, b, m=_full: (1 << (a & m)) - 1 << (b & m))
    scalar(f"s_bfe_u{_bits}", _wide, f"{_wide} b32", lambda a, b, n=_offset: extract(a, b, n, False), "nonzero")
    scalar(f"s_bfe_i{_bits}", _signed, f"{_signed} b32", lambda a, b, n=_offset: extract(a, b, n, True), "nonzero")
    scalar(f"s_brev_b{_bits}", _wide, _wide, lambda a, n=_bits: int(f"{a:0{n}b}"[::-1], 2))
    scalar(f"s_bcnt1_i32_b{_bits}", "i32", _wide, bit_count, "nonzero")
    scalar(f"s_bcnt0_i32_b{_bits}", "i32", _wide, lambda a, n=_bits: n - a.bit_count(), "nonzero")
    scalar(f"s_ff1_i32_b{_bits}", "i32", _wide, lowest_one)
    scalar(f"s_ff0_i32_b{_bits}", "i32", _wide, lambda a, ones=_ones: lowest_one(a ^ ones))
    scalar(f"s_flbit_i32_b{_bits}", "i32", _wide, lambda a, n=_bits: n - a.bit_length() if a else -1)
    scalar("s_flbit_i32" + ("_i64" if _bits == 64 else ""), "i32", _signed, lambda a, n=_bits: signed_leading(a, n))
    scalar(f"s_bitset0_b{_bits}", _wide, "dst b32", lambda a, b, m=_full: a & ~(1 << (b & m)))
    scalar(f"s_bitset1_b{_bits}", _wide, "dst b32", lambda a, b, m=_full: a | 1 << (b & m))
    scalar(f"s_cselect_b{_bits}", _wide, f"{_wide} {_wide} scc", lambda a, b, c: a if c else b)
    scalar(f"s_cmov_b{_bits}", _wide, f"dst {_wide} scc", lambda old, a, c: a if c else old)
    scalar(f"s_bitcmp0_b{_bits}", "none", f"{_wide} b32", lambda a, b, m=_full: a >> (b & m) & 1 == 0)
    scalar(f"s_bitcmp1_b{_bits}", "none", f"{_wide} b32", lambda a, b, m=_full: a >> (b & m) & 1)
scalar("s_sext_i32_i8", "i32", "b32", lambda a: signed(a, 8))
scalar("s_sext_i32_i16", "i32", "b32", lambda a: signed(a, 16))
scalar("s_pack_ll_b32_b16", "b32", "b32 b32", lambda a, b: a & 0xFFFF | b << 16)
scalar("s_pack_lh_b32_b16", "b32", "b32 b32", lambda a, b: a & 0xFFFF | b & 0xFFFF0000)
scalar("s_pack_hh_b32_b16", "b32", "b32 b32", lambda a, b: a >> 16 | b & 0xFFFF0000)
scalar("s_bitreplicate_b64_b32", "b64", "b32", lambda a: sum((a >> k & 1) * 3 << 2 * k for k in range(32)))
scalar("s_movk_i32", "i32", "s16", lambda a: a)
scalar("s_cmovk_i32", "i32", "dst s16 scc", lambda old, a, c: a if c else old)

# ---- comparisons ----------------------------------------------------------------------------------------------------

COMPARISONS = {"eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
               "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b}
for _name, _function in COMPARISONS.items():
    for _type, _constant in (("i32", "s16"), ("u32", "u16")):
        scalar(f"s_cmp_{_name}_{_type}", "none", f"{_type} {_type}", _function)
        scalar(f"s_cmpk_{_name}_{_type}", "none", f"{_type} {_constant}", _function)
    if _name in ("eq", "lg"):
        scalar(f"s_cmp_{_name}_u64", "none", "u64 u64", _function)

# ---- the exec mask --------------------------------------------------------------------------------------------------

MASKS = {"and": lambda a, e: a & e, "or": lambda a, e: a | e, "xor": lambda a, e: a ^ e,
         "andn1": lambda a, e: ~a & e, "andn2": lambda a, e: a & ~e, "orn1": lambda a, e: ~a | e,
         "orn2": lambda a, e: a | ~e, "nand": lambda a, e: ~(a & e), "nor": lambda a, e: ~(a | e),
         "xnor": lambda a, e: ~(a ^ e)}


def saves_exec(mnemonic: str, function: Callable[[int, int], int]) -> None:
    """Declare a change of exec; the destination gets the old mask, or the new one for *_wrexec."""

    @decodes(mnemonic)
    def decoder(instruction: Instruction) -> Step:
        instruction.expect_operands(2)
        instruction.allow()
        first, count, _ = scalar_destination(instruction, "b64")
        read = typed_scalar(instruction.operands[1], "b64")
        writes_new = instruction.mnemonic.endswith("wrexec_b64")

        def step(wave: Wave) -> None:
            old = wave.exec
            wave.write_sgprs(EXEC, 2, function(read(wave), old))
            wave.scc = int(wave.exec != 0)
            wave.write_sgprs(first, count, wave.exec if writes_new else old)

        return step


for _name, _function in MASKS.items():
    saves_exec(f"s_{_name}_saveexec_b64", _function)
for _name in ("andn1", "andn2"):
    saves_exec(f"s_{_name}_wrexec_b64", MASKS[_name])
