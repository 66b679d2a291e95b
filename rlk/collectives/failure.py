"""How a collective ended badly: the records of hipkernels/collective_protocol.h, and the words for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from rlk.collectives.arguments import DTYPES

# enums of hipkernels/collective_protocol.h
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "barrier", "all_reduce_add_rms_norm")
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BARRIER, ALL_REDUCE_NORM = range(5)
SIGNALS = ("ready signal", "done signal", "closed signal", "call", "data")
NO_FAILURE, TIMED_OUT, PEER_CLOSED, MISMATCH, SLOT_REUSED = range(5)
NO_SLOT = -1
WHY_CLOSED = {TIMED_OUT: " after a time-out of its own", PEER_CLOSED: " after another rank had closed its own",
              MISMATCH: " after ranks disagreed", SLOT_REUSED: " after a direct slot was used twice in a row"}


class Call(ctypes.Structure):
    """What a rank calls. `slot` is NO_SLOT unless the input lies in a direct staging area; `detail` stands for the rest
    that must be equal: the route, the sizes of parts.
    """

    _fields_ = [("operation", ctypes.c_int32), ("dtype", ctypes.c_int32), ("count", ctypes.c_uint64),
                ("slot", ctypes.c_int32), ("detail", ctypes.c_uint32)]

    def __str__(self) -> str:
        operation = OPERATIONS[self.operation]
        if self.operation == BARRIER:
            return operation
        where = "" if self.slot == NO_SLOT else f" in slot {self.slot}"
        return f"{operation} of {self.count} x {str(DTYPES[self.dtype]).removeprefix('torch.')}{where}"


class Failure(ctypes.Structure):
    """Why a call ended: whom this rank waited for, and for what; or what both called. `reason` is why a peer closed."""

    _fields_ = [("kind", ctypes.c_int32), ("peer", ctypes.c_int32), ("signal", ctypes.c_int32),
                ("reason", ctypes.c_int32), ("generation", ctypes.c_uint64), ("seen", ctypes.c_uint64),
                ("mine", Call), ("theirs", Call)]


def explain(failure: Failure, operation: str, rank: int, names: Sequence[int], timeout_s: float) -> str:
    """One sentence for what went wrong on `rank`, with a remedy; `names` are the ranks' global numbers."""
    mine, peer, generation = names[rank], names[failure.peer], failure.generation
    if failure.kind == MISMATCH:
        calls = str(failure.mine), str(failure.theirs)
        alike = " by another route or in other parts" if calls[0] == calls[1] else ""
        return (f"ranks disagree in generation {generation}: rank {mine} calls {calls[0]}, rank {peer} "
                f"calls {calls[1]}{alike}; make every rank call the same operations in the same order")
    if failure.kind == SLOT_REUSED:
        return (f"rank {mine} calls {failure.mine} in generation {generation} right after another call in slot "
                f"{failure.mine.slot}, which peers may still be reading; alternate the slots, or make another call "
                "between")
    waited = (f"rank {mine} in {operation} waits for rank {peer}'s {SIGNALS[failure.signal]} of generation "
              f"{generation} (it is at {failure.seen})")
    if failure.kind == PEER_CLOSED:
        why = WHY_CLOSED.get(failure.reason, "")
        return f"{waited}, but rank {peer} has closed its communicator{why}; see that rank's own error"
    return f"{waited}: no answer within {timeout_s:g} s; see whether rank {peer} died or hangs, or raise --timeout"
