"""Samples into packs, packs onto context-parallel ranks, and attention over a pack.

A pack is a row of whole samples, laid end to end: `tokens` holds each sample without its last token, and a response
token is scored from the row before it. Under context parallelism a pack is cut into 2 x cp equal chunks, and rank r
takes chunks r and 2cp-1-r (zigzag: early rows see few keys, late rows many, so every rank gets the same work). Queries
stay where they are; keys and values are gathered into pack order.

Legend: T this rank's rows, U the pack's rows, R scored rows of this rank, H/G query and kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlk.collectives import Communicator
from rlk.errors import UsageError
from rlk.ops.attention import attention_varlen
from rlk.rollout.engine import Trajectory


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices dealt to `parts` lists, longest first, each to the list with the fewest tokens so far; in order."""
    loads, lists = [0] * parts, [[] for _ in range(parts)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        part = min(range(parts), key=lambda p: (loads[p], p))
        loads[part] += lengths[i]
        lists[part].append(i)
    return [sorted(part) for part in lists]


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices in packs of at most `capacity` tokens: longest first, each into the first pack with room.

    Raises UsageError for a sample longer than a pack.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > capacity:
            raise UsageError(f"a sample has {lengths[i]} tokens and a pack holds {capacity} (max-tokens-per-gpu x cp): "
                             f"raise --max-tokens-per-gpu or --cp, or lower --max-response-len")
        fitting = [p for p, free in enumerate(room) if free >= lengths[i]]
        if fitting:
            packs[fitting[0]].append(i)
            room[fitting[0]] -= lengths[i]
        else:
            packs.append([i])
            room.append(capacity - lengths[i])
    return packs


def zigzag_rows(pack_rows: int, cp: int, cp_rank: int) -> np.ndarray:
    """The pack rows that a context-parallel rank holds, ascending within each of its two chunks; int64 [T]."""
    if cp == 1:
        return np.arange(pack_rows)
    chunk = pack_rows // (2 * cp)
    return np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for c in (cp_rank, 2 * cp - 1 - cp_rank)])


@dataclass
class Pack:
    """One micro-batch on one rank, ready for the model."""

    samples: list[int]  # indices into the trajectories it was made from
    tokens_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64, each row's position in its own sample
    segments: torch.Tensor  # int32 [n, 4], see rlk.ops.attention
    key_starts: torch.Tensor  # int32 [sources]
    rows_R: torch.Tensor  # int64: the local rows that score a response token
    targets_R: torch.Tensor  # int64: the token each of them scores
    sample_R: np.ndarray  # index into `samples` of each scored row
    offset_R: np.ndarray  # its position in that sample's response
    support: tuple[torch.Tensor, torch.Tensor] | None  # CSR of the retained sets of the scored rows

    def to(self, device: torch.device) -> Pack:
        """The pack for a model on `device`; what attention is cut by (segments, key_starts) stays on the host."""
        names = ("tokens_T", "positions_T", "rows_R", "targets_R")
        support = self.support and tuple(part.to(device) for part in self.support)
        return replace(self, support=support, **{name: getattr(self, name).to(device) for name in names})


def make_pack(trajectories: Sequence[Trajectory], samples: list[int], cp: int, cp_rank: int) -> Pack:
    """Lay out the given trajectories as one pack on the host, and cut this context-parallel rank's rows out of it."""
    chosen = [trajectories[i] for i in samples]
    whole = [np.concatenate([t.prompt_tokens, t.tokens]).astype(np.int64) for t in chosen]
    lengths = [len(w) - 1 for w in whole]
    padding = -sum(lengths) % (2 * cp) if cp > 1 else 0
    if padding:  # dummy rows that make the chunks equal: a sample of their own, never scored
        whole.append(np.zeros(padding + 1, np.int64))
        lengths.append(padding)
    starts = np.cumsum([0, *lengths])
    source_U = np.repeat(np.arange(len(lengths)), lengths)
    position_U = np.concatenate([np.arange(n) for n in lengths])
    response_U = position_U - np.repeat([len(t.prompt_tokens) - 1 for t in chosen] + [padding] * bool(padding), lengths)
    tokens_U = np.concatenate([w[:-1] for w in whole])
    targets_U = np.concatenate([w[1:] for w in whole])

    rows_T = zigzag_rows(len(tokens_U), cp, cp_rank)
    scored = np.flatnonzero(response_U[rows_T] >= 0)
    sample_R, offset_R = source_U[rows_T[scored]], response_U[rows_T[scored]]
    return Pack(
        samples=samples,
        tokens_T=torch.from_numpy(tokens_U[rows_T]),
        positions_T=torch.from_numpy(position_U[rows_T]),
        segments=torch.from_numpy(_segments(source_U[rows_T], position_U[rows_T])),
        key_starts=torch.from_numpy(starts[:-1].astype(np.int32)),
        rows_R=torch.from_numpy(scored),
        targets_R=torch.from_numpy(targets_U[rows_T[scored]]),
        sample_R=sample_R,
        offset_R=offset_R,
        support=_gather_support(chosen, sample_R, offset_R),
    )


def _segments(source_T: np.ndarray, position_T: np.ndarray) -> np.ndarray:
    """Runs of consecutive positions of one source, ordered by source; int32 [n, 4]."""
    breaks = np.flatnonzero((np.diff(source_T) != 0) | (np.diff(position_T) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(np.concatenate([starts, [len(source_T)]]))
    table = np.stack([starts, counts, position_T[starts], source_T[starts]], axis=1).astype(np.int32)
    return table[np.lexsort((table[:, 2], table[:, 3]))]


def _gather_support(chosen: list[Trajectory], sample_R: np.ndarray,
                    offset_R: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The retained sets of the scored rows as one CSR (offsets int64 [R+1], ids int32), or None for no sets."""
    if not chosen or chosen[0].support_offsets is None:
        return None
    pieces = [chosen[s].support_ids[chosen[s].support_offsets[o]:chosen[s].support_offsets[o + 1]]
              for s, o in zip(sample_R, offset_R, strict=True)]
    offsets = np.cumsum([0, *(len(p) for p in pieces)]).astype(np.int64)
    ids = np.concatenate(pieces).astype(np.int32) if pieces else np.zeros(0, np.int32)
    return torch.from_numpy(offsets), torch.from_numpy(ids)


class PackContext:
    """How the model attends over a pack (the ForwardContext of training)."""

    def __init__(self, pack: Pack, cp_comm: Communicator):
        self.positions_T = pack.positions_T
        self._pack, self._cp = pack, cp_comm
        if cp_comm.world > 1:
            rows, device = len(pack.tokens_T) * cp_comm.world, pack.tokens_T.device
            gathered = np.concatenate([zigzag_rows(rows, cp_comm.world, r) for r in range(cp_comm.world)])
            self._gathered_rows = torch.from_numpy(gathered).to(device)  # pack row of each gathered row
            self._pack_order = torch.from_numpy(np.argsort(gathered)).to(device)

    def attend(self, layer: int, q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
        if self._cp.world > 1:
            k_TGE, v_TGE = (_GatherRows.apply(x, self._cp, self._pack_order, self._gathered_rows)
                            for x in (k_TGE, v_TGE))
        return attention_varlen(q_THE, k_TGE, v_TGE, self._pack.segments, self._pack.key_starts)


class _GatherRows(torch.autograd.Function):
    """Every rank's rows in pack order; backward sums each row's gradient over the ranks, in FP32, in the fixed tree."""

    @staticmethod
    def forward(ctx, x_TGE, comm, pack_order, gathered_rows):
        ctx.comm, ctx.gathered_rows = comm, gathered_rows
        return comm.all_gather(x_TGE.contiguous()).flatten(0, 1)[pack_order]

    @staticmethod
    def backward(ctx, grad_UGE):
        return ctx.comm.reduce_scatter(grad_UGE[ctx.gathered_rows].contiguous()), None, None, None
