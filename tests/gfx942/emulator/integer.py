"""Vector instructions on integers and bits, with carries in lane masks where they have any."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.table import Step, decodes
from tests.gfx942.emulator.vector import (
    allow_modifiers,
    lane_mask_reader,
    lane_mask_writer,
    typed_reader,
    typed_writer,
    vector,
)
from tests.gfx942.emulator.wave import LANES, Wave, bits_of, mask_of

U32, U64, I32, I64 = np.uint32, np.uint64, np.int32, np.int64

# ---- add, subtract, multiply ----------------------------------------------------------------------------------------

for _type in ("u32", "u16", "i16"):
    vector(f"v_add_{_type}", _type, f"{_type} {_type}", lambda a, b: a + b, saturates=True, op_sel=_type == "i16")
    vector(f"v_sub_{_type}", _type, f"{_type} {_type}", lambda a, b: a - b, saturates=True, op_sel=_type == "i16")
for _type in ("u32", "u16"):
    vector(f"v_subrev_{_type}", _type, f"{_type} {_type}", lambda a, b: b - a, saturates=True)
vector("v_add_i32", "i32", "i32 i32", lambda a, b: a + b, saturates=True)
vector("v_sub_i32", "i32", "i32 i32", lambda a, b: a - b, saturates=True)
vector("v_add3_u32", "u32", "u32 u32 u32", lambda a, b, c: a + b + c)


def low24(a: np.ndarray) -> np.ndarray:
    return a & U32(0xFFFFFF)


def signed24(a: np.ndarray) -> np.ndarray:
    return a << I32(8) >> I32(8)


vector("v_mul_lo_u32", "u32", "u32 u32", lambda a, b: a * b)
vector("v_mul_lo_u16", "u16", "u16 u16", lambda a, b: a * b)
vector("v_mul_hi_u32", "u32", "u32 u32", lambda a, b: a.astype(U64) * b.astype(U64) >> U64(32))
vector("v_mul_hi_i32", "i32", "i32 i32", lambda a, b: a.astype(I64) * b.astype(I64) >> I64(32))
vector("v_mul_u32_u24", "u32", "u32 u32", lambda a, b: low24(a) * low24(b))
vector("v_mul_i32_i24", "i32", "i32 i32", lambda a, b: signed24(a) * signed24(b))
vector("v_mul_hi_u32_u24", "u32", "u32 u32", lambda a, b: low24(a).astype(U64) * low24(b).astype(U64) >> U64(32))
vector("v_mul_hi_i32_i24", "i32", "i32 i32", lambda a, b: signed24(a).astype(I64) * signed24(b).astype(I64) >> I64(32))
vector("v_mad_u32_u24", "u32", "u32 u32 u32", lambda a, b, c: low24(a) * low24(b) + c)
vector("v_mad_i32_i24", "i32", "i32 i32 i32", lambda a, b, c: signed24(a) * signed24(b) + c)
vector("v_mad_u32_u16", "u32", "u16 u16 u32", lambda a, b, c: a.astype(U32) * b.astype(U32) + c, op_sel=True)
vector("v_mad_i32_i16", "i32", "i16 i16 i32", lambda a, b, c: a.astype(I32) * b.astype(I32) + c, op_sel=True)
vector("v_mad_u16", "u16", "u16 u16 u16", lambda a, b, c: a * b + c, saturates=True, op_sel=True)
vector("v_mad_i16", "i16", "i16 i16 i16", lambda a, b, c: a * b + c, saturates=True, op_sel=True)


def _multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a * b + c in 64 bits, and bit 64 of the exact sum."""
    product = a * b
    total = product + c
    if a.dtype == U64:
        return total, total < product
    wrapped = ((product ^ total) & (c ^ total)) < 0
    return total, (total < 0) ^ wrapped


@decodes("v_mad_u64_u32", "v_mad_i64_i32")
def _mad_wide(instruction: Instruction) -> Step:
    instruction.expect_operands(5)
    instruction.allow()
    narrow, wide = ("u32", "u64") if "u64" in instruction.mnemonic else ("i32", "i64")
    dtype = U64 if wide == "u64" else I64
    a, b = (typed_reader(instruction, position, narrow, source=position - 2) for position in (2, 3))
    c = typed_reader(instruction, 4, wide, source=2)
    write, write_mask = typed_writer(instruction, 0, wide), lane_mask_writer(instruction.operands[1])

    def step(wave: Wave) -> None:
        total, carry = _multiply_add(a(wave).astype(dtype), b(wave).astype(dtype), c(wave))
        write(wave, total)
        write_mask(wave, mask_of(carry) & wave.exec)

    return step


def _carries(mnemonic: str, function: Callable[[np.ndarray, np.ndarray, np.ndarray | int], np.ndarray]) -> None:
    """Declare an addition or subtraction in 33 bits, whose bit 32 goes into a lane mask; `c` in it takes one in."""
    with_input = "c_co_" in mnemonic or "bb" in mnemonic

    @decodes(mnemonic)
    def decoder(instruction: Instruction) -> Step:
        instruction.expect_operands(5 if with_input else 4)
        allow_modifiers(instruction)
        a, b = (typed_reader(instruction, position, "u32", source=position - 2) for position in (2, 3))
        mask = lane_mask_reader(instruction.operands[4]) if with_input else None
        write, write_mask = typed_writer(instruction, 0, "u32"), lane_mask_writer(instruction.operands[1])

        def step(wave: Wave) -> None:
            carry = bits_of(mask(wave)).astype(U64) if with_input else U64(0)
            total = function(a(wave).astype(U64), b(wave).astype(U64), carry)
            write(wave, total)
            write_mask(wave, mask_of(total >> U64(32) != 0) & wave.exec)

        return step


for _name in ("v_add_co_u32", "v_addc_co_u32"):
    _carries(_name, lambda a, b, carry: a + b + carry)
for _name in ("v_sub_co_u32", "v_subb_co_u32"):
    _carries(_name, lambda a, b, carry: a - b - carry)
for _name in ("v_subrev_co_u32", "v_subbrev_co_u32"):
    _carries(_name, lambda a, b, carry: b - a - carry)

# ---- bits -----------------------------------------------------------------------------------------------------------

vector("v_and_b32", "b32", "b32 b32", lambda a, b: a & b)
vector("v_or_b32", "b32", "b32 b32", lambda a, b: a | b)
vector("v_xor_b32", "b32", "b32 b32", lambda a, b: a ^ b)
vector("v_xnor_b32", "b32", "b32 b32", lambda a, b: ~(a ^ b))
vector("v_not_b32", "b32", "b32", lambda a: ~a)
vector("v_and_or_b32", "b32", "b32 b32 b32", lambda a, b, c: a & b | c)
vector("v_or3_b32", "b32", "b32 b32 b32", lambda a, b, c: a | b | c)
vector("v_xad_u32", "u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c)


def _shift_counts(a: np.ndarray) -> np.ndarray:
    """As many low bits as the type's width needs: 4, 5 or 6."""
    return a & a.dtype.type(a.dtype.itemsize * 8 - 1)


def _left(count: np.ndarray, value: np.ndarray) -> np.ndarray:
    return value << _shift_counts(count.astype(value.dtype, copy=False))


def _right(count: np.ndarray, value: np.ndarray) -> np.ndarray:
    return value >> _shift_counts(count.astype(value.dtype, copy=False))


for _bits, _count in ((16, "b16"), (32, "b32"), (64, "b32")):
    vector(f"v_lshlrev_b{_bits}", f"b{_bits}", f"{_count} b{_bits}", _left)
    vector(f"v_lshrrev_b{_bits}", f"b{_bits}", f"{_count} b{_bits}", _right)
    vector(f"v_ashrrev_i{_bits}", f"i{_bits}", f"{_count} i{_bits}", _right)
vector("v_lshl_add_u32", "u32", "u32 u32 u32", lambda a, b, c: _left(b, a) + c)
vector("v_add_lshl_u32", "u32", "u32 u32 u32", lambda a, b, c: _left(c, a + b))
vector("v_lshl_or_b32", "b32", "b32 b32 b32", lambda a, b, c: _left(b, a) | c)
vector("v_lshl_add_u64", "u64", "u64 u32 u64", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c)


def _low_bits(count: np.ndarray) -> np.ndarray:
    return (U32(1) << (count & U32(31))) - U32(1)


def _extract_signed(value: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    """A field with its sign; a field of no bits is zero."""
    width = width & U32(31)
    field = (value >> (offset & U32(31)).view(I32)).view(U32) & _low_bits(width)
    sign = _low_bits(width) & ~(_low_bits(width) >> U32(1))
    return (field ^ sign) - sign


vector("v_bfe_u32", "u32", "u32 u32 u32", lambda a, b, c: a >> (b & U32(31)) & _low_bits(c))
vector("v_bfe_i32", "u32", "i32 u32 u32", _extract_signed)
vector("v_bfi_b32", "b32", "b32 b32 b32", lambda a, b, c: a & b | ~a & c)
vector("v_bfm_b32", "b32", "b32 b32", lambda a, b: _left(b, _low_bits(a)))
vector("v_bcnt_u32_b32", "u32", "u32 u32", lambda a, b: np.bitwise_count(a).astype(U32) + b)


def reversed_bits(a: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(a.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(bits, axis=1, bitorder="big")[:, ::-1].copy().view(U32).reshape(-1)


def leading_zeros(a: np.ndarray) -> np.ndarray:
    """Zeros above the highest one, -1 when there is none."""
    return np.where(a == 0, I32(-1), I32(32) - np.frexp(a.astype(np.float64))[1])


vector("v_bfrev_b32", "b32", "b32", reversed_bits)
vector("v_ffbh_u32", "i32", "u32", leading_zeros)
vector("v_ffbh_i32", "i32", "i32", lambda a: leading_zeros((a ^ a >> I32(31)).view(U32)))
vector("v_ffbl_b32", "i32", "u32", lambda a: np.where(a == 0, I32(-1), np.bitwise_count((a & -a) - U32(1)).astype(I32)))

vector("v_alignbit_b32", "b32", "b32 b32 b32",
       lambda a, b, c: (a.astype(U64) << U64(32) | b) >> (c & U32(31)).astype(U64))
vector("v_alignbyte_b32", "b32", "b32 b32 b32",
       lambda a, b, c: (a.astype(U64) << U64(32) | b) >> (U32(8) * (c & U32(3))).astype(U64))

PERM_WIDTH = 14  # choices of a byte: 8 bytes of the two sources, 4 signs, 0x00, 0xff
FIRST_CHOICE, FIRST_BYTE = ((np.arange(LANES) * width)[:, None] for width in (PERM_WIDTH, 8))  # of each lane


def _permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """A selector's byte takes: 0-3 a byte of b; 4-7 of a; 8-11 the sign of byte 1, 3, 5, 7; 12 zero; above 0xff."""
    picks, sources = selector.view(np.uint8).reshape(LANES, 4), (a.astype(U64) << U64(32) | b).view(np.uint8)
    if not (picks > 7).any():
        return sources[picks + FIRST_BYTE].view(U32).reshape(LANES)
    choices = np.empty((LANES, PERM_WIDTH), np.uint8)
    choices[:, :8] = sources.reshape(LANES, 8)
    choices[:, 8:12] = (choices[:, 1:8:2] >> np.uint8(7)) * np.uint8(255)
    choices[:, 12], choices[:, 13] = 0, 255
    return choices.reshape(-1)[np.minimum(picks, PERM_WIDTH - 1) + FIRST_CHOICE].view(U32).reshape(LANES)


vector("v_perm_b32", "b32", "b32 b32 b32", _permute_bytes)


def _byte_differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    left, right = (x.view(np.uint8).reshape(LANES, 4).astype(I32) for x in (a, b))
    return np.abs(left - right).sum(axis=1).astype(U32)


vector("v_sad_u8", "u32", "u32 u32 u32", lambda a, b, c: _byte_differences(a, b) + c)
vector("v_sad_u32", "u32", "u32 u32 u32", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c)

# ---- minimum, maximum, median ---------------------------------------------------------------------------------------

for _type in ("u32", "i32", "u16", "i16"):
    vector(f"v_max_{_type}", _type, f"{_type} {_type}", np.maximum)
    vector(f"v_min_{_type}", _type, f"{_type} {_type}", np.minimum)
    vector(f"v_max3_{_type}", _type, f"{_type} {_type} {_type}", lambda a, b, c: np.maximum(np.maximum(a, b), c),
           op_sel=_type.endswith("16"))
    vector(f"v_min3_{_type}", _type, f"{_type} {_type} {_type}", lambda a, b, c: np.minimum(np.minimum(a, b), c),
           op_sel=_type.endswith("16"))
    vector(f"v_med3_{_type}", _type, f"{_type} {_type} {_type}",
           lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)), op_sel=_type.endswith("16"))
