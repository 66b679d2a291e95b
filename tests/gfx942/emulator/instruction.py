"""One line of disassembly as data: `v_add_f32_e64 v1, |v2|, -s3 clamp` -> mnemonic, operands, modifiers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ENCODINGS = ("_e64_dpp", "_e32", "_e64", "_sdwa", "_dpp")
MODIFIER = re.compile(r"\b([a-z]\w*):(\[[^\]]*\]|swizzle\([^)]*\)|[\w+-]+)")
FLAG_WORDS = {"sc0", "sc1", "nt", "offen", "idxen", "glc", "slc", "dlc", "clamp", "gds", "lds", "tfe",
              "row_mirror", "row_half_mirror"}


@dataclass(frozen=True)
class Instruction:
    """What the decoder knows before any lane runs."""

    address: int
    text: str
    mnemonic: str  # without the encoding's suffix
    encoding: str  # "e32", "e64", "sdwa", "dpp" or ""
    operands: tuple[str, ...]
    modifiers: dict[str, str] = field(default_factory=dict)  # offset:16 -> {"offset": "16"}
    flags: frozenset[str] = frozenset()  # sc0, offen, clamp, row_mirror, ...

    def offset(self, key: str = "offset") -> int:
        return int(self.modifiers.get(key, "0"), 0)

    def allow(self, *names: str) -> None:
        """Raise ValueError for a modifier or flag that is not among `names`: whoever decodes would skip it."""
        if unknown := sorted((self.modifiers.keys() | self.flags) - set(names)):
            raise ValueError(f"{self.text!r}: got {', '.join(unknown)}, expected only {', '.join(names) or 'operands'}")

    def expect_operands(self, count: int) -> None:
        if len(self.operands) != count:
            raise ValueError(f"{self.text!r} has {len(self.operands)} operands, expected {count}")


def parse(address: int, text: str) -> Instruction:
    """Split one line; raises ValueError for a word that is neither an operand nor a known flag."""
    mnemonic, _, rest = text.strip().partition(" ")
    if mnemonic == "s_waitcnt":  # its counters are words, not separated by commas
        return Instruction(address, text, mnemonic, "", (rest,))
    encoding = ""
    for suffix in ENCODINGS:
        if mnemonic.endswith(suffix):
            mnemonic, encoding = mnemonic.removesuffix(suffix), suffix[1:]
            break
    modifiers = {key: value for key, value in MODIFIER.findall(rest)}
    flags: set[str] = set()
    operands = []
    for part in _split(MODIFIER.sub("", rest)):
        words = part.split()
        flags.update(word for word in words if word in FLAG_WORDS)
        kept = [word for word in words if word not in FLAG_WORDS]
        if len(kept) > 1:
            raise ValueError(f"cannot parse {text!r}: {kept[1:]} is no known modifier")
        operands += kept
    return Instruction(address, text, mnemonic, encoding, tuple(operands), modifiers, frozenset(flags))


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and parentheses; drop the blanks inside those: hwreg(HW_REG_MODE, 0, 4)."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        elif not (character == " " and depth):
            current += character
    return [*parts, current] if current.strip() else parts
