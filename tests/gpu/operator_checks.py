"""What a case of an operator is, and how its results are compared: with float64, and byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from rlk.ops.registry import registry

BF16, FP32 = torch.bfloat16, torch.float32
# Largest relative error of one rounding, and of the FP32 operations before it.
STEP = {BF16: 1.02 * 2.0**-8, FP32: 2.0**-20, torch.float64: 2.0**-40}
FLOAT_ERROR = 2.0**-17  # of sums in FP32, in units of a row's largest result

# What an argument, or a result, is to the rows of a batch. Anything else is shared by them.
ROW = "row"  # dimension 0 is the rows
OFFSETS, ENTRY = "offsets", "entry"  # of a CSR over the rows
PLACE = "place"  # of each row, a number of an entry


@dataclass(frozen=True)
class Case:
    """One operator with operands of fixed widths.

    make     (rows, seed, device) -> its arguments; those of two seeds have the same shapes
    like     the argument that chooses the backend
    writes   arguments that it writes: they are results too, behind what it returns
    roles    of the arguments in a batch; None: its rows are not independent of each other
    gives    roles of the results
    exact    arguments -> results in float64, None for one that is not compared; default: plain PyTorch
    sizes    arguments -> what `error` is relative to, for each result; default: the row's largest result
    """

    op: str
    make: Callable[[int, int, str], list]
    like: int = 0
    writes: tuple[int, ...] = ()
    roles: tuple[str | None, ...] | None = None
    gives: tuple[str | None, ...] = (ROW,)
    exact: Callable[[list], list] | None = None
    sizes: Callable[[list], list] | None = None
    error: float = FLOAT_ERROR
    roundings: int = 1
    label: str = ""
    captured: bool = True  # may be in a graph

    def call(self, args: list) -> list:
        """The results; what is written is written into `args`."""
        return _listed(registry.call(self.op, args[self.like], *args)) + [args[i] for i in self.writes]

    def run(self, args: list) -> list:
        return self.call([a.clone() if i in self.writes else a for i, a in enumerate(args)])

    def expected(self, args: list) -> list:
        if self.exact is not None:
            return self.exact(args)
        (reference,) = (b.function for b in registry._backends[self.op] if b.name == "reference")
        args = [_double(a) for a in args]
        return _listed(reference(*args)) + [args[i] for i in self.writes]

    def far(self, results: list, args: list) -> list[str]:
        """Results that are further from the exact ones than rounding explains."""
        exact = self.expected(args)
        sizes = [None] * len(exact) if self.sizes is None else self.sizes(args)
        found = []
        for i, (got, wanted, size) in enumerate(zip(results, exact, sizes, strict=True)):
            if wanted is None or not wanted.numel():
                continue
            if not got.is_floating_point():
                wrong = got.cpu() != wanted.cpu()
            else:
                wanted = wanted.double()
                if size is None:
                    size = wanted.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True)
                limit = wanted.abs() * STEP[got.dtype] * self.roundings + size * self.error
                wrong = ~((got == wanted) | ((got.double() - wanted).abs() <= limit))
            if wrong.any():
                found.append(f"result {i}: {int(wrong.sum())} of {wrong.numel()} values")
        return found

    def batch(self, args: list, results: list, index: torch.Tensor) -> tuple[list, list]:
        """(arguments, results) of the rows `index` alone, in that order."""
        offsets = next((a for a, role in zip(args, self.roles, strict=True) if role == OFFSETS), None)
        return (_cut(args, self.roles, offsets, index), _cut(results, self.gives, offsets, index))


def _listed(returned) -> list:
    if returned is None:
        return []
    if isinstance(returned, float):
        return [torch.tensor(returned, dtype=torch.float64)]
    return list(returned) if isinstance(returned, tuple) else [returned]


def _double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _cut(tensors: list, roles: tuple, offsets: torch.Tensor | None, index: torch.Tensor) -> list:
    if offsets is not None:
        lengths = offsets.diff()[index]
        own_offsets = torch.cat([offsets[:1] * 0, lengths.cumsum(0)])
        moved = offsets[index] - own_offsets[:-1]
        entries = torch.arange(int(own_offsets[-1]), device=index.device) + moved.repeat_interleave(lengths)

    def part(x, role):
        if role == ROW:
            return x[index]
        if role == OFFSETS:
            return own_offsets
        if role == ENTRY:
            return x[entries]
        return torch.where(x[index] < 0, -1, x[index] - moved) if role == PLACE else x

    return [part(x, role) for x, role in zip(tensors, roles, strict=True)]


def same(a, b) -> bool:
    """Byte for byte."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def batches(rows: int, device: str) -> list[torch.Tensor]:
    """Rows of a batch of `rows`: alone, in a decode step's number, anywhere and in another order, and most of them."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(rows))
    chosen = [order[:0], torch.tensor([rows - 1]), torch.arange(rows // 3, rows // 3 + min(64, rows // 2)), order[:37],
              order[: rows // 8], torch.arange(rows // 4, rows * 3 // 4)]
    return [index.to(device) for index in (chosen if rows else chosen[:1])]


@contextmanager
def poisoned_memory(monkeypatch) -> Iterator[None]:
    """What operators allocate holds NaN, or -1: when they run, or in a graph when it is replayed."""
    def fill(make):
        def made(*args, **named):
            x = make(*args, **named)
            return x.fill_(float("nan") if x.is_floating_point() else 255 if x.dtype == torch.uint8 else -1)
        return made

    with monkeypatch.context() as patch:
        for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(place, name, fill(getattr(place, name)))
        yield
