"""Loads, stores and atomics: scalar, global, flat, buffer and LDS."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.gfx942.emulator import atomics
from tests.gfx942.emulator.addressing import (
    SCOPES,
    Place,
    Places,
    buffer_places,
    check,
    global_places,
    lds_places,
    read_descriptor,
    registers,
    signed_address,
)
from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.memory import OutsideMemory
from tests.gfx942.emulator.operand import scalar_reader, scalar_register
from tests.gfx942.emulator.table import Step, decodes
from tests.gfx942.emulator.wave import LANES, M0, Wave

LANE = np.arange(LANES)

# ending of the mnemonic -> (bytes of a word, words, which part of the register, sign)
LOADS = {"ubyte": (1, 1, "all", False), "sbyte": (1, 1, "all", True), "ushort": (2, 1, "all", False),
         "sshort": (2, 1, "all", True), "dword": (4, 1, "all", False), "dwordx2": (4, 2, "all", False),
         "dwordx3": (4, 3, "all", False), "dwordx4": (4, 4, "all", False),
         "ubyte_d16": (1, 1, "low", False), "ubyte_d16_hi": (1, 1, "high", False),
         "sbyte_d16": (1, 1, "low", True), "sbyte_d16_hi": (1, 1, "high", True),
         "short_d16": (2, 1, "low", False), "short_d16_hi": (2, 1, "high", False)}
STORES = {"byte": (1, 1, "all"), "short": (2, 1, "all"), "dword": (4, 1, "all"), "dwordx2": (4, 2, "all"),
          "dwordx3": (4, 3, "all"), "dwordx4": (4, 4, "all"), "byte_d16_hi": (1, 1, "high"),
          "short_d16_hi": (2, 1, "high")}
LDS_LOADS = {"u8": "ubyte", "i8": "sbyte", "u16": "ushort", "i16": "sshort", "b32": "dword", "b64": "dwordx2",
             "b96": "dwordx3", "b128": "dwordx4", "u8_d16": "ubyte_d16", "u8_d16_hi": "ubyte_d16_hi",
             "i8_d16": "sbyte_d16", "i8_d16_hi": "sbyte_d16_hi", "u16_d16": "short_d16", "u16_d16_hi": "short_d16_hi"}
LDS_STORES = {"b8": "byte", "b16": "short", "b32": "dword", "b64": "dwordx2", "b96": "dwordx3", "b128": "dwordx4",
              "b8_d16_hi": "byte_d16_hi", "b16_d16_hi": "short_d16_hi"}


def load_step(places: Places, space: str, row: int, width: int, count: int, part: str, sign: bool) -> Step:
    """Load `count` words of each active lane into the registers from `row`."""

    def step(wave: Wave) -> None:
        words = fetch(wave, places(wave), getattr(wave, space), width, count)
        if sign:
            words = words.astype(np.int8 if width == 1 else np.int16).astype(np.int32).view(np.uint32)
        put(wave, row, words, part)

    return step


def fetch(wave: Wave, place: Place, memory, width: int, count: int) -> np.ndarray:
    """uint32 [c, active lanes]; words that do not exist are zero."""
    addresses, exists = place
    if not wave.full:
        addresses = addresses[wave.active]
        exists = None if exists is None else exists[:, wave.active]
    if exists is None or exists.all():
        return memory.load(addresses, width, count)
    words = np.zeros(exists.shape, np.uint32)
    for k, there in enumerate(exists):
        words[k, there] = memory.load(addresses[there] + width * k, width)[0]
    return words


def put(wave: Wave, row: int, words: np.ndarray, part: str = "all") -> None:
    """Write words [c, active lanes] into the active lanes of registers from `row`."""
    lanes = slice(None) if wave.full else wave.active
    if part == "low":
        words = wave.vector[row, lanes] & np.uint32(0xFFFF0000) | words & np.uint32(0xFFFF)
    elif part == "high":
        words = wave.vector[row, lanes] & np.uint32(0xFFFF) | words << np.uint32(16)
    wave.vector[row : row + len(words), lanes] = words


def store_step(places: Places, space: str, row: int, width: int, count: int, part: str) -> Step:
    def step(wave: Wave) -> None:
        addresses, exists = places(wave)
        words = wave.vector[row : row + count]
        if part == "high":
            words = words >> np.uint32(16)
        if not wave.full:
            addresses, words = addresses[wave.active], words[:, wave.active]
            exists = None if exists is None else exists[:, wave.active]
        memory = getattr(wave, space)
        if exists is None or exists.all():
            memory.store(addresses, words, width)
            return
        for k, there in enumerate(exists):
            memory.store(addresses[there] + width * k, words[k : k + 1, there], width)

    return step


# ---- global, flat and buffer ----------------------------------------------------------------------------------------

def memory_places(instruction: Instruction, space: str, operands: tuple[str, ...], width: int, count: int) -> Places:
    """The places of a global (address, base), flat (address) or buffer (offset, descriptor, scalar offset) access."""
    if space == "buffer":
        return buffer_places(instruction, width, count)
    return global_places(instruction, *operands)


SPACES = {"global": 2, "flat": 1, "buffer": 3}  # -> operands that give the address
MEMORIES = {"global": "memory", "flat": "flat", "buffer": "memory"}  # of a wave; flat atomics reach global memory only
BUFFER_FLAGS = {"global": "", "flat": "", "buffer": "offen idxen"}


def _load(space: str, kind: str) -> Callable[[Instruction], Step]:
    width, count, part, sign = LOADS[kind]

    def decoder(instruction: Instruction) -> Step:
        if "lds" in instruction.flags:
            return lds_direct(instruction, space, width, count, sign)
        check(instruction, 1 + SPACES[space], f"offset {SCOPES} {BUFFER_FLAGS[space]}")
        target, *operands = instruction.operands
        places = memory_places(instruction, space, tuple(operands), width, count)
        return load_step(places, MEMORIES[space], registers(target, count), width, count, part, sign)

    return decoder


def _store(space: str, kind: str) -> Callable[[Instruction], Step]:
    width, count, part = STORES[kind]

    def decoder(instruction: Instruction) -> Step:
        check(instruction, 1 + SPACES[space], f"offset {SCOPES} {BUFFER_FLAGS[space]}")
        operands = list(instruction.operands)
        data = operands.pop(0 if space == "buffer" else 1)
        places = memory_places(instruction, space, tuple(operands), width, count)
        return store_step(places, MEMORIES[space], registers(data, count), width, count, part)

    return decoder


def lds_direct(instruction: Instruction, space: str, width: int, count: int, sign: bool) -> Step:
    """A load whose lanes land in LDS, four bytes each, at M0 plus the instruction's offset."""
    check(instruction, SPACES[space], f"offset {SCOPES} lds {BUFFER_FLAGS[space]}")
    if count != 1:
        raise ValueError("gfx942 loads at most four bytes per lane into LDS")
    places = memory_places(instruction, space, instruction.operands, width, count)
    offset = instruction.offset()

    def step(wave: Wave) -> None:
        words = fetch(wave, places(wave), wave.memory, width, 1)
        if sign:
            words = words.astype(np.int8 if width == 1 else np.int16).astype(np.int32).view(np.uint32)
        wave.lds.store((wave.scalar[M0] & 0xFFFF) + offset + 4 * LANE[wave.active], words, 4)

    return step


for _space in SPACES:
    for _kind in LOADS:
        decodes(f"{_space}_load_{_kind}")(_load(_space, _kind))
    for _kind in STORES:
        decodes(f"{_space}_store_{_kind}")(_store(_space, _kind))


@decodes("global_load_lds_dword", "global_load_lds_ubyte", "global_load_lds_sbyte", "global_load_lds_ushort",
         "global_load_lds_sshort")
def _global_load_lds(instruction: Instruction) -> Step:
    width, count, _, sign = LOADS[instruction.mnemonic.removeprefix("global_load_lds_")]
    return lds_direct(instruction, "global", width, count, sign)


# ---- atomics --------------------------------------------------------------------------------------------------------

# ending of the mnemonic after global_atomic_ -> (operation, words); flat and buffer have the same but for bf16
ATOMICS = {name + suffix: (name, words) for suffix, words in (("", 1), ("_x2", 2))
           for name in ("swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "inc",
                        "dec")}
ATOMICS |= {"add_f32": ("fadd", 1), "add_f64": ("fadd", 2), "min_f64": ("fmin", 2), "max_f64": ("fmax", 2),
            "pk_add_f16": ("pk_add_f16", 1)}
LDS_ATOMICS = {name.format(rtn="{}", bits=bits): (operation, bits // 32) for bits in (32, 64) for name, operation in {
    "add_{rtn}u{bits}": "add", "sub_{rtn}u{bits}": "sub", "rsub_{rtn}u{bits}": "rsub", "inc_{rtn}u{bits}": "inc",
    "dec_{rtn}u{bits}": "dec", "min_{rtn}i{bits}": "smin", "max_{rtn}i{bits}": "smax", "min_{rtn}u{bits}": "umin",
    "max_{rtn}u{bits}": "umax", "and_{rtn}b{bits}": "and", "or_{rtn}b{bits}": "or", "xor_{rtn}b{bits}": "xor",
    "cmpst_{rtn}b{bits}": "cmpswap", "add_{rtn}f{bits}": "fadd", "min_{rtn}f{bits}": "fmin",
    "max_{rtn}f{bits}": "fmax"}.items()}
LDS_ATOMICS |= {"pk_add_{}f16": ("pk_add_f16", 1), "pk_add_{}bf16": ("pk_add_bf16", 1)}


def atomic_step(instruction: Instruction, places: Places, space: str, operation: str, words: int, target: str | None,
                data_row: int, compare_row: int) -> Step:
    """Lanes one after another, in ascending order; `target` takes the old values."""
    function = atomics.OPERATIONS[operation]
    target_row = None if target is None else registers(target, words)

    def step(wave: Wave) -> None:
        addresses, exists = places(wave)
        lanes = wave.active if exists is None else wave.active & exists.all(0)
        if (addresses[lanes] % (4 * words)).any():
            raise OutsideMemory(f"an atomic of {4 * words} bytes at an address that is no multiple of its size")
        data = atomics.join(wave.vector[data_row : data_row + words, lanes])
        compare = atomics.join(wave.vector[compare_row : compare_row + words, lanes])
        old = atomics.apply(getattr(wave, space), addresses[lanes], function, data, compare) if lanes.any() else data
        if target_row is not None:
            wave.vector[target_row : target_row + words, wave.active] = 0
            wave.vector[target_row : target_row + words, lanes] = atomics.split(old)

    return step


def _atomic(space: str, kind: str) -> Callable[[Instruction], Step]:
    operation, words = ATOMICS.get(kind, ("pk_add_bf16", 1))

    def decoder(instruction: Instruction) -> Step:
        returns = "sc0" in instruction.flags
        operands = list(instruction.operands)
        target = operands.pop(0) if returns and space != "buffer" else None
        check(instruction, 1 + SPACES[space] + (target is not None), f"offset {SCOPES} {BUFFER_FLAGS[space]}")
        data = operands.pop(0 if space == "buffer" else 1)
        compares = operation == "cmpswap"
        row = registers(data, words * (1 + compares))
        if returns and space == "buffer":  # the old value replaces the data
            target = data if not compares else f"{data[0]}[{row % 256}:{row % 256 + words - 1}]"
        places = memory_places(instruction, space, tuple(operands), 4, words)
        return atomic_step(instruction, places, "memory", operation, words, target, row, row + words * compares)

    return decoder


def _lds_atomic(kind: str, returns: bool) -> Callable[[Instruction], Step]:
    operation, words = LDS_ATOMICS[kind]

    def decoder(instruction: Instruction) -> Step:
        compares = operation == "cmpswap"
        check(instruction, 2 + returns + compares, "offset")
        operands = list(instruction.operands)
        target = operands.pop(0) if returns else None
        rows = [registers(operand, words) for operand in operands[1:]]  # compare, data; or data alone
        return atomic_step(instruction, lds_places(operands[0], instruction.offset()), "lds", operation,
                           words, target, rows[-1], rows[0])

    return decoder


for _space in SPACES:
    for _kind in ATOMICS | ({} if _space == "buffer" else {"pk_add_bf16": None}):
        decodes(f"{_space}_atomic_{_kind}")(_atomic(_space, _kind))
for _kind in LDS_ATOMICS:
    decodes("ds_" + _kind.format(""))(_lds_atomic(_kind, False))
    decodes("ds_" + _kind.format("rtn_"))(_lds_atomic(_kind, True))


@decodes("ds_wrxchg_rtn_b32", "ds_wrxchg_rtn_b64")
def _exchange(instruction: Instruction) -> Step:
    check(instruction, 3, "offset")
    target, address, data = instruction.operands
    words = 1 if instruction.mnemonic.endswith("32") else 2
    row = registers(data, words)
    return atomic_step(instruction, lds_places(address, instruction.offset()), "lds", "swap", words,
                       target, row, row)


# ---- LDS ------------------------------------------------------------------------------------------------------------

def _lds_load(kind: str) -> Callable[[Instruction], Step]:
    width, count, part, sign = LOADS[kind]

    def decoder(instruction: Instruction) -> Step:
        check(instruction, 2, "offset")
        target, address = instruction.operands
        return load_step(lds_places(address, instruction.offset()), "lds",
                         registers(target, count), width, count, part, sign)

    return decoder


def _lds_store(kind: str) -> Callable[[Instruction], Step]:
    width, count, part = STORES[kind]

    def decoder(instruction: Instruction) -> Step:
        check(instruction, 2, "offset")
        address, data = instruction.operands
        return store_step(lds_places(address, instruction.offset()), "lds",
                          registers(data, count), width, count, part)

    return decoder


for _name, _kind in LDS_LOADS.items():
    decodes(f"ds_read_{_name}")(_lds_load(_kind))
for _name, _kind in LDS_STORES.items():
    decodes(f"ds_write_{_name}")(_lds_store(_kind))


@decodes("ds_read2_b32", "ds_read2_b64", "ds_read2st64_b32", "ds_read2st64_b64")
def _read2(instruction: Instruction) -> Step:
    """Two reads of one or two words; the offsets count in elements, or in 64 of them."""
    check(instruction, 2, "offset0 offset1")
    target, address = instruction.operands
    words, unit = _element(instruction)
    row = registers(target, 2 * words)
    places = [lds_places(address, unit * instruction.offset(key)) for key in ("offset0", "offset1")]

    def step(wave: Wave) -> None:
        put(wave, row, np.concatenate([fetch(wave, place(wave), wave.lds, 4, words) for place in places]))

    return step


@decodes("ds_write2_b32", "ds_write2_b64", "ds_write2st64_b32", "ds_write2st64_b64")
def _write2(instruction: Instruction) -> Step:
    check(instruction, 3, "offset0 offset1")
    address, *data = instruction.operands
    words, unit = _element(instruction)
    first, second = (store_step(lds_places(address, unit * instruction.offset(key)), "lds",
                                registers(operand, words), 4, words, "all")
                     for key, operand in zip(("offset0", "offset1"), data, strict=True))

    def step(wave: Wave) -> None:
        first(wave)
        second(wave)

    return step


def _element(instruction: Instruction) -> tuple[int, int]:
    """(words of an element, bytes that an offset of one stands for)."""
    words = 2 if instruction.mnemonic.endswith("64") else 1
    return words, 4 * words * (64 if "st64" in instruction.mnemonic else 1)


# ---- scalar loads and caches ----------------------------------------------------------------------------------------

SCALAR_SIZES = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}


def _scalar_load(kind: str, buffer: bool) -> Callable[[Instruction], Step]:
    count = SCALAR_SIZES[kind]

    def decoder(instruction: Instruction) -> Step:
        check(instruction, 3, "offset glc")
        (target, size), (base, _) = (scalar_register(operand) for operand in instruction.operands[:2])
        if size != count:
            raise ValueError(f"the target has {size} registers, expected {count}")
        number = re.fullmatch(r"-?0x[0-9a-f]+", instruction.operands[2])  # signed, unlike a literal's 32 bits
        immediate = int(number[0], 16) if number else instruction.offset()
        read = None if number else scalar_reader(instruction.operands[2])

        def step(wave: Wave) -> None:
            offset = immediate + (read(wave) if read else 0)
            if buffer:
                start, length = read_descriptor(wave, base)
            else:
                start, length = signed_address(wave.read_sgprs(base, 2)), 1 << 64
            there = min(count, max(0, -(-(length - offset) // 4)))
            words = wave.memory.load(np.array([start + offset & ~3]), 4, there)[:, 0] if there else ()
            value = sum(int(word) << 32 * k for k, word in enumerate(words))
            wave.write_sgprs(target, count, value)

        return step

    return decoder


for _kind in SCALAR_SIZES:
    decodes(f"s_load_{_kind}")(_scalar_load(_kind, False))
    decodes(f"s_buffer_load_{_kind}")(_scalar_load(_kind, True))


@decodes("buffer_wbl2", "buffer_inv", "s_dcache_inv", "s_dcache_inv_vol", "s_dcache_wb", "s_dcache_wb_vol")
def _cache(instruction: Instruction) -> Step:
    """Memory has no caches here."""
    check(instruction, 0, SCOPES)
    return lambda wave: None


@decodes(*(f"scratch_load_{kind}" for kind in LOADS), *(f"scratch_store_{kind}" for kind in STORES))
def _scratch(instruction: Instruction) -> Step:
    raise ValueError("kernels here must not use scratch memory; it means spilled registers or an array indexed at run "
                     "time")
