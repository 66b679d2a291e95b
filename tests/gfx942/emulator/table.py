"""Which mnemonic is decoded by what. Each instruction file fills it when it is imported."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from tests.gfx942.emulator.instruction import Instruction, parse
from tests.gfx942.emulator.wave import Wave

Step = Callable[[Wave], None]  # runs one instruction on one wave
Decoder = Callable[[Instruction], Step]

_decoders: dict[str, Decoder] = {}


class UnknownInstruction(Exception):
    """The emulator has no such instruction, or not with these modifiers."""


def decodes(*mnemonics: str) -> Callable[[Decoder], Decoder]:
    """Decorator: this function turns instructions of these mnemonics into steps.

    It raises ValueError for what it cannot run; a modifier that it does not know is such a thing (Instruction.allow).
    """

    def add(decoder: Decoder) -> Decoder:
        for mnemonic in mnemonics:
            if mnemonic in _decoders:
                raise ValueError(f"{mnemonic} is decoded twice")
            _decoders[mnemonic] = decoder
        return decoder

    return add


def known_mnemonics() -> list[str]:
    load_instructions()
    return sorted(_decoders)


def decoder_of(mnemonic: str) -> Decoder:
    load_instructions()
    return _decoders[mnemonic]


def decode(address: int, text: str) -> Step:
    """The step of one line of disassembly. Raises UnknownInstruction, with the line, when it cannot be run.

    Run steps under np.errstate(all="ignore"): overflow and NaN are results here, not accidents.
    """
    load_instructions()
    try:
        instruction = parse(address, text)
        decoder = _decoders.get(instruction.mnemonic)
        if decoder is None:
            raise ValueError(f"no instruction {instruction.mnemonic}")
        return decoder(instruction)
    except ValueError as error:
        raise UnknownInstruction(f"{text!r} at {address:#x}: {error}") from error


FILES = ("scalar", "control", "vector", "integer", "floating", "division", "compare", "packed", "convert", "lanes",
         "memory_ops", "matrix")


@functools.cache
def load_instructions() -> None:
    """Import every instruction file, which fills the table."""
    for name in FILES:
        importlib.import_module(f"tests.gfx942.emulator.{name}")
