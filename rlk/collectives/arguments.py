"""What the communicators accept: dtypes and their codes, shapes, places."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*SUM_DTYPES, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
          torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128)
DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}  # the first three are enum Dtype of hipkernels/abi.h


def summable(x: torch.Tensor) -> torch.Tensor:
    """x; ValueError when its dtype cannot be summed over ranks."""
    if x.dtype not in SUM_DTYPES:
        raise ValueError(f"cannot sum {x.dtype} over ranks: expected one of {SUM_DTYPES}; convert it")
    return x


def scattered_shape(x: torch.Tensor, world: int) -> tuple[int, ...]:
    """The shape of one rank's part of x; ValueError when x does not divide into `world` parts."""
    if x.dim() == 0 or x.shape[0] % world:
        raise ValueError(f"reduce_scatter of shape {tuple(x.shape)} over {world} ranks: the first dimension "
                         "must be a multiple of the ranks; pad it")
    return (x.shape[0] // world, *x.shape[1:])


def output(x: torch.Tensor, shape: Sequence[int], out: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """`out`, checked, or a new tensor of `shape` with x's dtype. ValueError when x or out do not fit."""
    shape = tuple(shape)
    if x.device != device:
        raise ValueError(f"expected a {_where(device)} tensor, got one on {x.device}")
    if x.dtype not in DTYPE_CODE:
        raise ValueError(f"cannot exchange {x.dtype}: expected one of {DTYPES}; view it as torch.uint8")
    contiguous("x", x)
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=device)
    if out.dtype != x.dtype or out.device != device or out.shape != shape:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}, expected {x.dtype} {shape} on the "
                         f"{_where(device)}")
    return contiguous("out", out)


def contiguous(name: str, x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError(f"expected a contiguous tensor, got {name} with strides {x.stride()} for shape "
                         f"{tuple(x.shape)}; call contiguous()")
    return x


def several(xs: Sequence[torch.Tensor], outs: Sequence | None) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The pairs (x, out or None) of reduce_scatter_many; ValueError when dtypes or lengths differ."""
    if outs is not None and len(outs) != len(xs):
        raise ValueError(f"reduce_scatter_many of {len(xs)} tensors into {len(outs)}: expected as many")
    if len({x.dtype for x in xs}) > 1:
        raise ValueError(f"reduce_scatter_many of {[str(x.dtype) for x in xs]}: expected one dtype; call it for each")
    return list(zip(xs, outs or [None] * len(xs), strict=True))


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _where(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else str(device)
