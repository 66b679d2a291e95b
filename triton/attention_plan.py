"""How attention's queries are cut in tiles: the host's half of triton/attention.py.

A tile is a segment (rlk/ops/attention.py) that one program can hold: its rows, times the query heads of a kv head, fit
in BLOCK_M, and their positions lie within one block of keys. So no row ever meets a block that it sees nothing of, in
whatever tile it is: the sums of a row are the same operations everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlk.contract import ATTENTION_BLOCK, ATTENTION_CHUNK

SPLIT_ROWS = 64  # most query rows x heads of a group of a segment whose chunks become programs of their own
ROW_START, ROW_COUNT, POSITION, SOURCE = range(4)


@dataclass(frozen=True)
class Tiles:
    """Tiles of one schedule."""

    table: torch.Tensor  # int32 [n, 4] on the GPU, rows as in segments
    chunks: int  # at least those of the longest tile
    rows: int  # most query rows of a tile
    identity: bool = False  # tile i is query row i, or empty


@dataclass(frozen=True)
class Plan:
    """The tiles of one batch; every layer of a step shares it."""

    split: Tiles | None
    prefill: Tiles | None
    query_rows: int
    covered: bool  # every query row is in a tile


def cut(segments: np.ndarray, rows: int) -> np.ndarray:
    """The segments int32 [n, 4] as tiles of at most `rows` query rows, within blocks of keys; empty ones fall away.

    Tile boundaries are at absolute positions, so that a segment in several parts gives the same tiles.
    """
    segments = segments[segments[:, ROW_COUNT] > 0].astype(np.int64)
    rows = min(rows, ATTENTION_BLOCK)
    per_block = -(-ATTENTION_BLOCK // rows)

    def number(position):
        return position // ATTENTION_BLOCK * per_block + position % ATTENTION_BLOCK // rows

    begin, end = segments[:, POSITION], segments[:, POSITION] + segments[:, ROW_COUNT]
    counts = number(end - 1) - number(begin) + 1
    owner = np.repeat(np.arange(len(segments)), counts)
    tile = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + number(begin)[owner]
    block, place = np.divmod(tile, per_block)
    first = np.maximum(block * ATTENTION_BLOCK + place * rows, begin[owner])
    last = np.minimum(block * ATTENTION_BLOCK + np.minimum((place + 1) * rows, ATTENTION_BLOCK), end[owner])
    row_start = segments[owner, ROW_START] + first - begin[owner]
    return np.stack([row_start, last - first, first, segments[owner, SOURCE]], 1).astype(np.int32)


def chunks_of(keys: int) -> int:
    return -(-keys // ATTENTION_CHUNK)


def tiles(segments: np.ndarray, rows: int, device: torch.device) -> Tiles | None:
    """The segments cut in tiles of at most `rows` query rows, those with the most keys first, for they end last."""
    table = cut(segments, rows)
    if not len(table):
        return None
    keys = table[:, POSITION] + table[:, ROW_COUNT]
    sorted_table = torch.from_numpy(table[np.argsort(-keys, kind="stable")])
    if device.type == "cuda":
        sorted_table = sorted_table.pin_memory().to(device, non_blocking=True)
    return Tiles(sorted_table, chunks_of(int(keys.max())), rows)


def plan(segments: torch.Tensor, query_rows: int, group: int, split_rows: int, prefill_rows: int, sources: int,
         most_keys: int, device: torch.device) -> Plan:
    """Cut segments int32 [n, 4] that lie on the CPU.

    group: query heads per kv head. split_rows, prefill_rows: BLOCK_M of the two schedules; short segments are split
    over their chunks, if their group fits. sources and most_keys: rows of the key table and the most positions of
    one. Raises ValueError for a segment outside of the queries or the table.
    """
    if segments.dtype != torch.int32 or segments.dim() != 2 or segments.shape[1] != 4:
        raise ValueError(f"attention got segments {segments.dtype} {tuple(segments.shape)}, expected int32 [n, 4]")
    if group > prefill_rows:
        raise ValueError(f"attention got {group} query heads per kv head, expected at most {prefill_rows}")
    table = segments.numpy()
    start, count, position, source = table.astype(np.int64).T
    bad = (start < 0) | (count < 0) | (start + count > query_rows) | (position < 0) | (position + count > most_keys)
    bad |= (source < 0) | (source >= sources)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"attention got segment {row} = {table[row].tolist()} with {query_rows} query rows and "
                         f"{sources} sources of at most {most_keys} keys: (row start, rows, position, source) must lie "
                         "within; check the segment table")
    short = (count * group <= SPLIT_ROWS) & (group <= split_rows)

    split = tiles(table[short], split_rows // group, device) if short.any() else None
    prefill = tiles(table[~short], prefill_rows // group, device)
    return Plan(split, prefill, query_rows, int(count.sum()) == query_rows)


def decode_plan(segments: torch.Tensor, most_keys: int) -> Plan:
    """The plan of a decode step, without a look at its numbers: segments int32 [T, 4] on the GPU are the tiles.

    Segment i is query row i at (anything, 1, position, source), or has no rows and gives zeros. most_keys bounds the
    keys of every row, and so the grid: a captured graph serves all steps up to there.
    """
    if segments.dtype != torch.int32 or segments.dim() != 2 or segments.shape[1] != 4 or not segments.is_contiguous():
        raise ValueError(f"attention got segments {segments.dtype} {tuple(segments.shape)}, expected contiguous int32 "
                         "[T, 4]")
    found = Tiles(segments, chunks_of(most_keys), 1, identity=True) if len(segments) else None
    return Plan(found, None, len(segments), covered=True)
