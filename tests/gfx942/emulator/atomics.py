"""What atomics do to a value in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gfx942.emulator.memory import Memory
from tests.gfx942.numerics import from_bf16, to_bf16

Operation = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]  # (old, data, compare) -> new, all uint


def signed(old: np.ndarray) -> type:
    return np.int32 if old.dtype == np.uint32 else np.int64


def floating(old: np.ndarray) -> type:
    return np.float32 if old.dtype == np.uint32 else np.float64


def viewed(function: Callable, kind: Callable[[np.ndarray], type]) -> Operation:
    """`function` of the bits seen as signed or as floating numbers of the same size."""
    return lambda old, data, _: function(old.view(kind(old)), data.view(kind(old))).view(old.dtype)


def _halves_f16(old, data, _):
    return (old.view(np.float16) + data.view(np.float16)).view(np.uint32)


def _halves_bf16(old, data, _):
    return to_bf16(from_bf16(old.view(np.uint16)) + from_bf16(data.view(np.uint16))).view(np.uint32)


OPERATIONS: dict[str, Operation] = {
    "swap": lambda old, data, _: data,
    "cmpswap": lambda old, data, compare: np.where(old == compare, data, old),
    "add": lambda old, data, _: old + data,
    "sub": lambda old, data, _: old - data,
    "rsub": lambda old, data, _: data - old,
    "umin": lambda old, data, _: np.minimum(old, data),
    "umax": lambda old, data, _: np.maximum(old, data),
    "smin": viewed(np.minimum, signed),
    "smax": viewed(np.maximum, signed),
    "and": lambda old, data, _: old & data,
    "or": lambda old, data, _: old | data,
    "xor": lambda old, data, _: old ^ data,
    "inc": lambda old, data, _: np.where(old >= data, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, data, _: np.where((old == 0) | (old > data), data, old - old.dtype.type(1)),
    "fadd": viewed(np.add, floating),
    "fmin": viewed(np.fmin, floating),
    "fmax": viewed(np.fmax, floating),
    "pk_add_f16": _halves_f16,
    "pk_add_bf16": _halves_bf16,
}


def apply(memory: Memory, addresses: np.ndarray, operation: Operation, data: np.ndarray,
          compare: np.ndarray | None) -> np.ndarray:
    """Apply to uint32 or uint64 data [n] at addresses [n], lane after lane; returns the old values [n]."""
    if len(np.unique(addresses)) == len(addresses):
        return _apply_once(memory, addresses, operation, data, compare)
    return np.concatenate([_apply_once(memory, addresses[k : k + 1], operation, data[k : k + 1], None if compare is None
                                       else compare[k : k + 1]) for k in range(len(addresses))])


def _apply_once(memory, addresses, operation, data, compare) -> np.ndarray:
    words = data.dtype.itemsize // 4
    changes = memory.changes
    old = join(memory.load(addresses, 4, words))
    new = operation(old, data, compare)
    memory.store(addresses, split(new), 4)
    memory.changes = changes + bool((new != old).any())
    return old


def join(words: np.ndarray) -> np.ndarray:
    """uint32 [1 or 2, n], the low words first, as uint32 or uint64 [n]."""
    return words[0] if len(words) == 1 else words[0] | words[1].astype(np.uint64) << np.uint64(32)


def split(values: np.ndarray) -> np.ndarray:
    """uint32 or uint64 [n] as uint32 [1 or 2, n]."""
    if values.dtype == np.uint32:
        return values[None]
    return np.stack([values.astype(np.uint32), (values >> np.uint64(32)).astype(np.uint32)])
