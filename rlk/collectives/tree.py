"""The order of every sum over ranks, as plain PyTorch: the oracle of all transports.

A balanced binary tree in FP32: the left subtree takes the largest power of two of terms that is smaller than all of
them. Eight terms are added as ((0+1)+(2+3))+((4+5)+(6+7)), six as ((0+1)+(2+3))+(4+5). 16-bit terms are widened
first, and the root is rounded once.

Leaves: a row-parallel GEMM splits K into `leaves` equal parts and adds them in this same tree. With `leaves` and the
world powers of two, a rank owns leaves / world consecutive ones, which form a whole subtree; so the sum within each
rank followed by this sum over ranks has the same bits for every world that divides `leaves`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def left_size(terms: int) -> int:
    """How many of `terms` >= 2 terms the left subtree takes."""
    return 1 << (terms - 1).bit_length() - 1


def tree_sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The FP32 sum of equally shaped floating-point tensors, in the order above."""
    if len(terms) == 1:
        return terms[0].float()
    left = left_size(len(terms))
    return tree_sum(terms[:left]) + tree_sum(terms[left:])
