"""Matrix instructions: D = A B + C on a wave's 64 lanes, BF16, FP16 or FP32 in, FP32 out.

An instruction v_mfma_f32_MxNxK_Bb multiplies B independent M x K and K x N blocks. Which register of which lane holds
which element is the manual's; how the hardware rounds within one instruction is not documented. Here the products are
added to C with K ascending, each sum rounded once to FP32, subnormals kept. Exec plays no part.

Shape letters: M rows of A, N = M columns of B, K, B blocks; R registers, H halves of a register, G groups of M lanes.
Rows are numbered 4 g q' + 4 g' + r: r within four registers of D, g' by the lane's group, q' by the four.
"""

from __future__ import annotations

import numpy as np

from tests.gfx942.emulator.addressing import check, registers
from tests.gfx942.emulator.instruction import Instruction
from tests.gfx942.emulator.operand import constant, vector_register
from tests.gfx942.emulator.rounding import fma
from tests.gfx942.emulator.table import Step, decodes
from tests.gfx942.emulator.wave import LANES, Wave

# every (M, K, B) of a type, as in v_mfma_f32_32x32x4_2b_bf16 -> (32, 4, 2)
SHAPES = {
    "bf16": ((16, 16, 1), (32, 8, 1), (32, 4, 2), (16, 4, 4), (4, 4, 16)),
    "f16": ((16, 16, 1), (32, 8, 1), (32, 4, 2), (16, 4, 4), (4, 4, 16)),
    "f32": ((16, 4, 1), (32, 2, 1), (32, 1, 2), (16, 1, 4), (4, 1, 16)),
}
OLDER_NAMES = {"bf16": "bf16_1k", "f16": "f16", "f32": "f32"}


class Multiplier:
    """Multiplies for one shape, in buffers that it keeps.

    All products of one k lie in the order of D's registers and lanes, so that D is a sum over the rows of an array.
    """

    def __init__(self, kind: str, m: int, k: int, blocks: int) -> None:
        self.kind, self.m, self.k, self.blocks = kind, m, k, blocks
        self.halves = 1 if kind == "f32" else 2
        self.groups = LANES // m
        self.sources = k * m * blocks // LANES // self.halves  # registers of A and of B
        self.results = m * m * blocks // LANES
        row_groups = self.groups if m > 4 else 1  # 4 x 4 blocks: a lane holds all rows
        self.rows = (m // 4 // row_groups, row_groups, 4)  # q', g', r
        self.a = np.zeros((k, m * blocks), np.float32)
        self.b = np.zeros((k, m * blocks), np.float32)
        self.right = np.zeros((k, blocks * m * m), np.float32)
        self.terms = np.zeros((k + 1, blocks * m * m), np.float32)  # C, then the products

        # Where A and B go, as views with one axis for each axis of the registers.
        line = np.dtype((np.void, 4 * m))  # a row of a block of B, copied as a whole
        lines, copies = self.b.view(line), self.right.view(line)
        if m == 4:  # D: registers r, lanes B N
            self.axes_a = (0, 5, 2, 4, 3, 1)  # of R G q' g' r H -> R H q' r g' G
            self.lines, self.copies = lines[:, None, :], copies.reshape(k, m, blocks)
        else:  # D: registers B q' r, lanes g' N
            self.axes_a = (1, 0, 5, 2, 4, 3) if blocks == 1 else (0, 5, 1, 2, 4, 3)  # -> [K] [B] q' r g'
            self.lines, self.copies = lines[:, :, None], copies.reshape(k, blocks, m)
        self.axes_b = (1, 0, 3, 2) if blocks == 1 else (0, 3, 1, 2)  # of R G N H -> [K] [B] N
        shape_a = (self.sources, self.groups, *self.rows, self.halves)
        shape_b = (self.sources, self.groups, m, self.halves)
        self.into_a = self._numbers_to(self.a).reshape([shape_a[axis] for axis in self.axes_a])
        self.into_b = self._numbers_to(self.b).reshape([shape_b[axis] for axis in self.axes_b])
        self.shape_a, self.shape_b = shape_a, shape_b

    def _numbers_to(self, buffer: np.ndarray) -> np.ndarray:
        """The view of an FP32 buffer that takes source numbers: BF16 is the high half of an FP32."""
        return buffer.view(np.uint16).reshape(-1, 2)[:, 1] if self.kind == "bf16" else buffer

    def _numbers_from(self, words: np.ndarray) -> np.ndarray:
        return words.view({"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[self.kind])

    def __call__(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> None:
        """uint32 registers a and b [R, 64], FP32 c and d [results, 64]; d may be c."""
        self.into_a[...] = self._numbers_from(a).reshape(self.shape_a).transpose(self.axes_a)
        self.into_b[...] = self._numbers_from(b).reshape(self.shape_b).transpose(self.axes_b)
        self.copies[...] = self.lines
        left = np.repeat(self.a, self.m, axis=1)
        if self.kind == "f32":
            total = c.reshape(-1)
            for x, y in zip(left, self.right, strict=True):
                total = fma(x, y, total)
            d[...] = total.reshape(d.shape)
            return
        self.terms[0] = c.reshape(-1)
        np.multiply(left, self.right, out=self.terms[1:])  # exact, but for those outside FP32's range
        # Over the outer axis: one row after another. From -0, since numpy's own start, +0, would hide a sum of -0.
        np.add.reduce(self.terms, axis=0, out=d.reshape(-1), initial=np.float32(-0.0))


def _decoder(kind: str, m: int, k: int, blocks: int):
    multiply = Multiplier(kind, m, k, blocks)
    sources, results = multiply.sources, multiply.results

    def decoder(instruction: Instruction) -> Step:
        check(instruction, 4, "cbsz abid blgp")
        if any(instruction.offset(key) for key in ("cbsz", "abid", "blgp")):
            raise ValueError("no broadcast modifiers here")
        target, *factors, addend = instruction.operands
        row = registers(target, results)
        a, b = (registers(operand, sources) for operand in factors)
        if vector_register(addend):
            c, fixed = registers(addend, results), None
        else:
            c, fixed = 0, np.full((results, LANES), constant(addend, 32), np.uint32).view(np.float32)

        def step(wave: Wave) -> None:
            vector = wave.vector
            start = vector[c : c + results].view(np.float32) if fixed is None else fixed
            multiply(vector[a : a + sources], vector[b : b + sources], start,
                     vector[row : row + results].view(np.float32))

        return step

    return decoder


for _kind, _shapes in SHAPES.items():
    for _m, _k, _blocks in _shapes:
        _plain, _count = f"v_mfma_f32_{_m}x{_m}x{_k}", f"_{_blocks}b" if _blocks > 1 else ""
        decodes(f"{_plain}{_count}_{_kind}", _plain + OLDER_NAMES[_kind])(_decoder(_kind, _m, _k, _blocks))
