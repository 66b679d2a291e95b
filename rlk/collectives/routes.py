"""Which way a message goes over GPU IPC. All ways have the same bits, so this is about speed alone.

one-shot   every rank sums the whole message itself: one exchange; the fewest waits
two-shot   rank r sums part r and all gather the parts: two exchanges; the fewest bytes over the links
The third way, the process group, is taken where GPU IPC cannot be (rlk/collectives/factory.py).
"""

from __future__ import annotations

ONE_SHOT, TWO_SHOT = 0, 1
WORLDS = (2, 4, 8)  # ranks of a group that GPU IPC serves

KIB = 1 << 10
# The largest message that goes one-shot: architecture -> ranks -> bytes.
ONE_SHOT_BYTES = {
    "sm_90": {2: 512 * KIB, 4: 256 * KIB, 8: 256 * KIB},
    "gfx942": {2: 768 * KIB, 4: 768 * KIB, 8: 768 * KIB},
}


def one_shot_bytes(architecture: str, world: int) -> int:
    """The largest message, in bytes, that `world` ranks reduce in one exchange."""
    return ONE_SHOT_BYTES[architecture].get(world, 0)
