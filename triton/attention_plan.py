"""How attention's queries are cut in tiles: the host's half of the attention kernels.

A tile is a segment (rlk/ops/attention.py) that one program can hold: its rows, times the query heads of a kv head, fit
in BLOCK_M, and their positions lie within one block of keys. So no row ever meets a block that it sees nothing of, in
whatever tile it is: the sums of a row are the same operations everywhere.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlk.contract import ATTENTION_BLOCK, ATTENTION_CHUNK

REMEMBERED = 32  # results of each function that `of_content` wraps
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


def of_content(function: Callable) -> Callable:
    """Remember function(table, *args) by the bytes of `table`, a CPU tensor: all layers of a step ask for the same.

    A result that is not made again is a copy to the GPU that the host does not wait for. Nobody may change it. Tables
    on the GPU are of the current stream: it has filled them, and takes their memory back, so each stream has its own.
    A captured graph keeps what a call before it made, on whatever stream; capturing must begin when that has been
    filled, as torch.cuda.graph sees to. Raises RuntimeError while a graph is captured that needs what is not there.
    """
    made: OrderedDict[tuple, Any] = OrderedDict()  # of (content, stream); that which was not used for longest is first
    captured: dict[tuple, Any] = {}  # of content: graphs know the tables' addresses, so they are never dropped

    def in_graph(content: tuple):
        if content not in captured:
            found = [result for (other, _), result in made.items() if other == content]
            if not found:
                raise RuntimeError(f"{function.__name__} got a new table of shape {tuple(content[1])} while a graph is "
                                   "captured, expected one that a call has had before: a copy to the GPU cannot be "
                                   "captured; make the same call once before capturing")
            captured[content] = found[-1]
        return captured[content]

    @functools.wraps(function)
    def call(table: torch.Tensor, *args):
        content, stream = (table.numpy().tobytes(), table.shape, table.dtype, *args), 0
        if torch.cuda.is_initialized():
            if torch.cuda.is_current_stream_capturing():
                return in_graph(content)
            stream = torch.cuda.current_stream().cuda_stream
        key = content, stream
        if key not in made:
            made[key] = function(table.clone(), *args)  # the caller may change his own
            if len(made) > REMEMBERED:
                made.popitem(last=False)
        made.move_to_end(key)
        return made[key]

    return call


@of_content
def upload(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The table on `device`."""
    return table.to(device)


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


def check_segments(segments: torch.Tensor, query_rows: int, sources: int, most_keys: int) -> None:
    """Raise ValueError unless segments are int32 [n, 4], each within the queries and the positions of its source."""
    if segments.dtype != torch.int32 or segments.dim() != 2 or segments.shape[1] != 4:
        raise ValueError(f"attention got segments {segments.dtype} {tuple(segments.shape)}, expected int32 [n, 4]")
    table = segments.numpy()
    start, count, position, source = table.astype(np.int64).T
    bad = (start < 0) | (count < 0) | (start + count > query_rows) | (position < 0) | (position + count > most_keys)
    bad |= (source < 0) | (source >= sources)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"attention got segment {row} = {table[row].tolist()} with {query_rows} query rows and "
                         f"{sources} sources of at most {most_keys} keys: (row start, rows, position, source) must lie "
                         "within; check the segment table")


@of_content
def plan(segments: torch.Tensor, query_rows: int, group: int, split_rows: int, prefill_rows: int, sources: int,
         most_keys: int, device: torch.device) -> Plan:
    """Cut segments int32 [n, 4] that lie on the CPU.

    group: query heads per kv head. split_rows, prefill_rows: BLOCK_M of the two schedules; short segments are split
    over their chunks, if their group fits. sources and most_keys: rows of the key table and the most positions of
    one. Raises ValueError for a segment outside of the queries or the table.
    """
    check_segments(segments, query_rows, sources, most_keys)
    if group > prefill_rows:
        raise ValueError(f"attention got {group} query heads per kv head, expected at most {prefill_rows}")
    table = segments.numpy()
    count = table[:, ROW_COUNT].astype(np.int64)
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


@of_content
def decode_keys(segments: torch.Tensor, query_rows: int, sources: int, most_keys: int) -> int:
    """Keys of the longest row if segments int32 [n, 4] on the CPU are a decode step, as decode_plan has them; else 0.

    sources and most_keys as in `plan`; raises ValueError as it does.
    """
    check_segments(segments, query_rows, sources, most_keys)
    table = segments.numpy()
    count = table[:, ROW_COUNT]
    own_row = (count == 1) & (table[:, ROW_START] == np.arange(len(table)))
    if len(table) != query_rows or not (own_row | (count == 0)).all():
        return 0
    return int((table[:, POSITION] + count)[count > 0].max(initial=0))


@dataclass(frozen=True)
class BackwardPlan:
    """The work of attention_backward.py on one batch; every layer of a step shares it. Tables int32 [n, 4] on the GPU.

    The longest tiles and blocks come first, for they end last.
    """

    tiles: torch.Tensor  # (first vector, vectors, position x group of the first, source)
    blocks: torch.Tensor  # (first position, keys, first segment, end of segments)
    segments: torch.Tensor
    query_rows: int
    key_rows: int
    covered: bool  # every query row is in a segment
    keys_covered: bool  # every key row is in a block


def key_blocks(segments: np.ndarray, width: int) -> np.ndarray:
    """The keys of each source, up to the last that a segment sees, in blocks of `width`; int32 [n, 4].

    segments: without empty ones. Raises ValueError when the segments of a source are not adjacent.
    """
    if not len(segments):
        return np.zeros((0, 4), np.int32)
    source, end = segments[:, SOURCE], segments[:, POSITION].astype(np.int64) + segments[:, ROW_COUNT]
    begins = np.flatnonzero(np.diff(source, prepend=-1) != 0)
    if len(np.unique(source)) != len(begins):
        raise ValueError(f"attention_varlen_backward got segments of the sources {source.tolist()}, expected those of "
                         "one source to be adjacent; check the segment table")
    ends = np.append(begins[1:], len(segments))
    keys = np.maximum.reduceat(end, begins)
    counts = -(-keys // width)
    owner = np.repeat(np.arange(len(begins)), counts)
    first = width * (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts))
    rows = np.clip(end - first[:, None], 0, segments[:, ROW_COUNT])  # [block, segment]: those that see its first key
    rows[np.repeat(np.arange(len(begins)), ends - begins) != owner[:, None]] = 0
    table = np.stack([first, np.minimum(width, keys[owner] - first), begins[owner], ends[owner]], 1).astype(np.int32)
    return table[np.argsort(-rows.sum(1), kind="stable")]


def vector_tiles(segments: np.ndarray, group: int, height: int) -> np.ndarray:
    """The segments' vectors (query row x group + head of the group) in tiles of `height`; int32 [n, 4]."""
    segments = segments.astype(np.int64)
    vectors = segments[:, ROW_COUNT] * group
    counts = -(-vectors // height)
    owner = np.repeat(np.arange(len(segments)), counts)
    first = height * (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts))
    start, place = segments[owner, ROW_START] * group + first, segments[owner, POSITION] * group + first
    table = np.stack([start, np.minimum(height, vectors[owner] - first), place, segments[owner, SOURCE]], 1)
    return table[np.argsort(-place, kind="stable")].astype(np.int32)


@of_content
def backward_plan(segments: torch.Tensor, query_rows: int, group: int, tile_vectors: int, block_keys: int, sources: int,
                  key_rows: int, device: torch.device) -> BackwardPlan:
    """Cut segments int32 [n, 4] that lie on the CPU.

    group: query heads per kv head. tile_vectors, block_keys: BLOCK_M of attention_dq, BLOCK_N of attention_dkdv.
    Raises ValueError for segments outside of the queries or the keys, or apart from others of their source.
    """
    check_segments(segments, query_rows, sources, key_rows)
    table = segments.numpy()
    table = table[table[:, ROW_COUNT] > 0]
    blocks = key_blocks(table, block_keys)
    on_gpu = (torch.from_numpy(x).to(device) for x in (vector_tiles(table, group, tile_vectors), blocks, table))
    return BackwardPlan(*on_gpu, query_rows, key_rows, int(table[:, ROW_COUNT].sum()) == query_rows,
                        int(blocks[:, 1].sum()) == key_rows)
