"""Which way a message goes over GPU IPC. All ways have the same bits, so this is about speed alone.

pushed     every rank stores its message into all peers' memory, words beside tags: one crossing of the link, no fence,
           twice the bytes
one-shot   every rank reads all the others' messages and sums them: one exchange; fewer waits than two
two-shot   rank r sums part r and all gather the parts: two exchanges; with more than two ranks, the fewest bytes
The fourth way, the process group, is taken where GPU IPC cannot be (rlk/collectives/factory.py).
"""

from __future__ import annotations

from typing import NamedTuple

ONE_SHOT, TWO_SHOT, PUSHED = 0, 1, 2  # enum Route of hipkernels/gpu/transfer.h
WORLDS = (2, 4, 8)  # ranks of a group that GPU IPC serves

KIB, MIB = 1 << 10, 1 << 20
EVERY_SIZE = 1 << 62


class Limits(NamedTuple):
    """The largest message, in bytes, that goes this way; what is larger than both goes two-shot."""

    pushed: int
    one_shot: int

    def route(self, nbytes: int) -> int:
        if nbytes <= self.pushed:
            return PUSHED
        return ONE_SHOT if nbytes <= self.one_shot else TWO_SHOT


# Measured by bench/collectives.py for sm_90 and 2 ranks; between two ranks two shots move no fewer bytes than one. The
# others are not measured: they are set where the bytes on a link outweigh the wait that is saved.
LIMITS = {
    "sm_90": {2: Limits(512 * KIB, EVERY_SIZE), 4: Limits(128 * KIB, 256 * KIB), 8: Limits(64 * KIB, 256 * KIB)},
    "gfx942": {2: Limits(128 * KIB, EVERY_SIZE), 4: Limits(128 * KIB, 768 * KIB), 8: Limits(64 * KIB, 768 * KIB)},
}


def limits(architecture: str, world: int) -> Limits:
    """Of a group of `world` ranks; one rank alone has nobody to push to."""
    return LIMITS[architecture].get(world, Limits(-1, EVERY_SIZE))
