"""What the launchers ask of their tensors, so that a kernel is only ever compiled in the form that was gated.

Triton compiles a kernel anew when a pointer is not a multiple of 16 bytes, and the new code may load, and so reduce,
in another order: a launcher refuses such a tensor instead.
"""

from __future__ import annotations

import torch

FEWEST_ALIGNED_BYTES = 16
MOST_BYTES = 1 << 31  # offsets are 32-bit; gfx942's buffer loads need it
MULTIPLE = 16  # of elements: row widths and strides


def check_tensor(op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple | None = None,
                 aligned: bool = True) -> None:
    """Raise ValueError unless `tensor` is a GPU tensor of that dtype (and shape) below 2 GiB, `aligned` to 16 bytes."""
    if tensor.dtype != dtype or (shape is not None and tuple(tensor.shape) != tuple(shape)):
        wanted = f"{dtype}" + (f" {tuple(shape)}" if shape is not None else "")
        raise ValueError(f"{op} got {name} {tensor.dtype} {tuple(tensor.shape)}, expected {wanted}")
    if not tensor.is_cuda:
        raise ValueError(f"{op} got {name} on {tensor.device}, expected a GPU; on the CPU use rlk.ops")
    if aligned and tensor.data_ptr() % FEWEST_ALIGNED_BYTES:
        raise ValueError(f"{op} got {name} at an address that is no multiple of {FEWEST_ALIGNED_BYTES} bytes; clone it")
    if tensor.numel() * tensor.element_size() >= MOST_BYTES:
        raise ValueError(f"{op} got {name} {tuple(tensor.shape)} of {tensor.numel() * tensor.element_size()} bytes, "
                         f"expected less than {MOST_BYTES}; split the rows")
    state_range(tensor)


def state_range(tensor: torch.Tensor) -> None:
    """Tell Triton how many bytes the kernel reaches from this pointer.

    On AMD it compiles buffer loads for what reaches less than 2 GiB, and by itself takes the size of the whole storage:
    a weight's form would depend on whether it lies in one flat buffer with the others.
    """
    if torch.version.hip:
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        tensor.ptr_range = lambda: reach * tensor.element_size()


def check_reach(op: str, name: str, rows: torch.Tensor, stride: int) -> None:
    """Raise ValueError unless these rows, `stride` elements apart, lie within 2 GiB from the first to the last."""
    if len(rows) * stride * rows.element_size() >= MOST_BYTES:
        raise ValueError(f"{op} got {len(rows)} rows of {name} that lie {stride} elements apart, expected less than "
                         f"{MOST_BYTES} bytes from the first to the last; make it contiguous")


def check_multiple(op: str, **widths: int) -> None:
    """Raise ValueError unless every width or stride, by name, is a positive multiple of 16."""
    for name, width in widths.items():
        if width <= 0 or width % MULTIPLE:
            raise ValueError(f"{op} got {name} = {width}, expected a positive multiple of {MULTIPLE}; pad it")


def state_far(tensor: torch.Tensor) -> None:
    """Tell Triton that a kernel may reach any distance from this pointer, whatever the tensor's size.

    For tables that exceed 2 GiB in some models: one form of the kernel, with 64-bit addresses, serves all.
    """
    if torch.version.hip:
        tensor.ptr_range = lambda: MOST_BYTES
