"""Python objects over a communicator."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from rlk.collectives import Communicator


def all_gather_object(comm: Communicator, value: Any) -> list:
    """Every rank's picklable `value`, in rank order."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = comm.all_gather(torch.tensor([len(data)], device=comm.device))
    comm.check()  # sizes that did not arrive would be read as lengths
    sizes = sizes.flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[:len(data)] = data
    rows = comm.all_gather(padded.to(comm.device))
    comm.check()
    rows = rows.cpu().numpy()
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
