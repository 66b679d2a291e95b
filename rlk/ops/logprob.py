"""Log-prob and entropy of a target token, over the whole vocabulary or over the sampler's retained set.

The rule. Logits are FP32 and multiplied by 1/temperature; ids >= valid_vocab count as minus infinity.
    x = logit / temperature,  lse = max + log(sum exp(x - max)),  logprob = x[target] - lse,  entropy = lse - sum p x
Over the whole vocabulary the sums run over 64 equal tiles of the padded vocabulary, each in one fixed order, merged in
tile order; tensor-parallel ranks own whole tiles. Over a retained set they run over exactly that set, ids ascending, in
one fixed order. hipkernels/cpu/logprob.cpp states both orders. `score` (training) and `score_logits` (rollout) call the
same operators on the same rows, so their bits are equal.

Shape legend: T tokens, D hidden, V vocabulary (padded; of this rank where said), N entries of the retained sets.
A retained set is a CSR pair (offsets int64 [T+1], ids int32 [N]), ids ascending within a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rlk.collectives import Communicator
from rlk.contract import VOCAB_TILES
from rlk.errors import CheckFailed
from rlk.ops.cpu_library import DTYPE_CODE, FLOAT, INT, LONG, POINTER, function, ptr
from rlk.ops.gemm import gemm_dw, gemm_dx, linear_fp32
from rlk.ops.gradients import main_grad, wants_grad
from rlk.ops.registry import EVERYWHERE, registry

CHUNK_TOKENS = 2048  # most rows of logits of the whole vocabulary that exist at one time in `score`, or as many bytes
VOCAB_PARTS = 4  # most parts of the vocabulary that are read one after the other, on all ranks together
CHUNK_STEP = 256  # rows: products of other numbers of rows get padded
MOST_BYTES = 1 << 31  # of a chunk's logits or dlogits: a GPU's kernels take less

Support = tuple[torch.Tensor, torch.Tensor]
Scores = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ScoreRule:
    """Over what, and at which temperature, log-probs are taken."""

    temperature: float  # > 0; for greedy sampling 1 (SamplingParams.score_temperature)
    valid_vocab: int  # len(tokenizer): ids from here on do not exist
    support: Support | None = None  # the retained sets; None: the whole vocabulary

    @property
    def inv_temperature(self) -> float:
        return 1.0 / self.temperature


def score(hidden_TD: torch.Tensor, head_VD: torch.Tensor, targets_T: torch.Tensor, rule: ScoreRule,
          comm: Communicator, chunk_tokens: int = CHUNK_TOKENS) -> Scores:
    """Log-prob and entropy of each target from the final hidden states: (logprob, entropy), FP32 [T] each.

    head_VD is this rank's rows [rank * V, (rank + 1) * V) of the LM head; targets_T is int64. At a time there are no
    more logits than chunk_tokens tokens have over the whole vocabulary. `logprob` is differentiable with respect to
    hidden_TD (the gradient is this rank's partial sum; copy_to_tp upstream adds up the ranks') and to head_VD (added
    into head_VD.main_grad).
    Raises CheckFailed for a target outside its retained set or the vocabulary, ValueError for another number of them.
    """
    if hidden_TD.shape[0] != targets_T.numel():
        raise ValueError(f"got {hidden_TD.shape[0]} rows of hidden states and {targets_T.numel()} targets, expected as "
                         "many; give the rows that are scored")
    vocab = comm.world * head_VD.shape[0]
    picks, chunk = _Picks.of(targets_T, rule, vocab), chunk_rows(chunk_tokens, vocab)
    if wants_grad(hidden_TD, head_VD):
        return _Score.apply(hidden_TD, head_VD, picks, rule, comm, chunk)
    return _score_chunks(hidden_TD, head_VD, picks, rule, comm, chunk)[1][:2]


def score_logits(logits_TV: torch.Tensor, targets_T: torch.Tensor, rule: ScoreRule) -> Scores:
    """`score` from full FP32 rows of logits, with the same bits; what the rollout engine calls. Not differentiable."""
    picks = _Picks.of(targets_T, rule, logits_TV.shape[1])
    values_N = _pick(logits_TV, picks.offsets, picks.ids_N, 0)
    stats = _tile_stats(logits_TV, rule, VOCAB_TILES, 0) if rule.support is None else None
    picks.check()
    return _finish(values_N, stats, picks, rule)[:2]


@dataclass(frozen=True)
class _Picks:
    """The ids of each row whose logits are needed one by one: its retained set, or the target alone. A CSR."""

    offsets: torch.Tensor
    ids_N: torch.Tensor
    targets_T: torch.Tensor
    index_T: torch.Tensor  # where each row's target stands among the N entries; only to be used after `check`
    check: Callable[[], None]  # raises CheckFailed unless every target is among its row's ids

    @classmethod
    def of(cls, targets_T: torch.Tensor, rule: ScoreRule, vocab: int) -> _Picks:
        if targets_T.dtype != torch.int64 or not 0 < rule.valid_vocab <= vocab:
            raise ValueError(f"got {targets_T.dtype} targets and {rule.valid_vocab} valid ids over {vocab} logits, "
                             "expected int64 targets and 1 to all of the ids")
        if rule.support is None:
            check = _later_check(targets_T, (targets_T >= 0) & (targets_T < rule.valid_vocab),
                                 lambda row: f"the vocabulary's ids 0 to {rule.valid_vocab - 1}")
            offsets = torch.arange(targets_T.numel() + 1, device=targets_T.device)
            return cls(offsets, targets_T.to(torch.int32), targets_T, offsets[:-1], check)
        offsets, ids_N = rule.support
        if (offsets.dtype, ids_N.dtype) != (torch.int64, torch.int32) or offsets.numel() != targets_T.numel() + 1 or (
                int(offsets[-1]) != ids_N.numel()):
            raise ValueError(f"the support has {offsets.numel() - 1} rows over {ids_N.numel()} {ids_N.dtype} ids, "
                             f"expected int32 ids under one row per target: {targets_T.numel()}")
        index_T = registry.call("find_targets", targets_T, offsets, ids_N, targets_T)
        check = _later_check(targets_T, index_T >= 0, lambda row: _described(ids_N[offsets[row]:offsets[row + 1]]))
        return cls(offsets, ids_N, targets_T, index_T, check)


def _described(retained: torch.Tensor) -> str:
    shown = ", ".join(map(str, retained[:8].tolist())) + (", ..." if retained.numel() > 8 else "")
    return f"its retained set of {retained.numel()} ids ({shown})"


def _later_check(targets_T, good_T, expected: Callable[[int], str]) -> Callable[[], None]:
    """What raises CheckFailed unless all of good_T holds.

    A GPU is asked now, and waited for when the result is called: what is launched in between keeps it busy.
    """
    all_good, asked = good_T.all(), None
    if good_T.is_cuda and torch.cuda.is_initialized():  # the tests' pretended GPU has no events
        all_good, asked = all_good.to("cpu", non_blocking=True), torch.cuda.Event()
        asked.record(torch.cuda.current_stream(good_T.device))

    @functools.cache  # no need to ask again
    def check() -> None:
        if asked is not None:
            asked.synchronize()
        if not bool(all_good):
            row = int((~good_T).nonzero()[0])
            raise CheckFailed(f"row {row}: target {int(targets_T[row])} is not in {expected(row)}; targets and support "
                              "must be those of one trajectory, aligned, under one tokenizer")

    return check


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def chunk_rows(chunk: int, vocab: int) -> int:
    """At most `chunk` rows, whose FP32 logits a GPU's kernels take even on one rank; whole CHUNK_STEPs if so many."""
    most = (MOST_BYTES - 1) // (4 * max(vocab, 1))
    return max(1, min(chunk, most - most % CHUNK_STEP if most >= CHUNK_STEP else most))


def gradient_rows(chunk: int, vocab: int, width: int) -> int:
    """Rows whose dlogits, of `width` bytes each, exist at one time: in twice the room of a chunk's logits.

    More rows than a chunk, because a product for main_grad reads and writes all of it whatever the rows. Every split of
    the vocabulary over ranks gives the same rows, and so the same sums.
    """
    return max(1, min(2 * 4 // width, (MOST_BYTES - 1) // max(1, chunk * vocab * width))) * chunk


def _gradient_chunks(tokens: int, chunk: int, group: int) -> Iterator[slice]:
    """Groups of whole chunks, and what is left over by itself: rows that are padded get copied."""
    whole = tokens - tokens % chunk
    yield from _chunks(whole, group)
    if whole < tokens:
        yield slice(whole, tokens)


def _pick(logits_TV, offsets, ids_N, first_id, values_N=None) -> torch.Tensor:
    values_N = logits_TV.new_empty(ids_N.numel()) if values_N is None else values_N
    registry.call("pick_logits", logits_TV, logits_TV, offsets, ids_N, first_id, values_N)
    return values_N


def _tile_stats(logits_TV, rule: ScoreRule, tiles: int, first_id: int) -> torch.Tensor:
    return registry.call("tile_stats", logits_TV, logits_TV, tiles, first_id, rule.valid_vocab, rule.inv_temperature)


def _finish(values_N, stats, picks: _Picks, rule: ScoreRule):
    """(logprob, entropy, lse), FP32 [T] each, from the picked logits and, without a support, the tiles' states."""
    if stats is None:
        return registry.call("support_score", values_N, values_N, picks.offsets, picks.index_T, rule.inv_temperature)
    return registry.call("merge_tiles", stats, stats, values_N, rule.inv_temperature)


def _score_chunks(hidden_TD, head_VD, picks: _Picks, rule: ScoreRule, comm: Communicator, chunk: int):
    """The forward pass: (values_N, (logprob, entropy, lse)). One exchange between ranks after the last chunk."""
    if VOCAB_TILES % comm.world:
        raise ValueError(f"{comm.world} ranks cannot own {VOCAB_TILES} vocabulary tiles in equal parts")
    first_id = comm.rank * head_VD.shape[0]
    if rule.support is not None:
        values_N = _pick_sets(hidden_TD, head_VD, picks, first_id, chunk)
        values_N = comm.all_reduce(values_N, values_N)  # exact: all ranks but the owner hold +0
        return values_N, _finish(values_N, None, picks, rule)
    values_T, local_stats = _read_vocabulary(hidden_TD, head_VD, picks, rule, first_id, comm.world, chunk)
    values_T = comm.all_reduce(values_T, values_T)  # exact: all ranks but the owner hold +0
    by_rank = comm.all_gather(local_stats)
    return values_T, _finish(values_T, by_rank.transpose(0, 1).flatten(1, 2).contiguous(), picks, rule)


def _pick_sets(hidden_TD, head_VD, picks: _Picks, first_id: int, chunk: int) -> torch.Tensor:
    """The logits of the retained sets' ids, FP32 [N]; +0 where another rank owns them."""
    values_N = hidden_TD.new_empty(picks.ids_N.numel(), dtype=torch.float32)
    for rows in _chunks(hidden_TD.shape[0], chunk):
        logits_TV = linear_fp32(hidden_TD[rows], head_VD)
        picks.check()  # the answer comes while the product runs
        _pick(logits_TV, picks.offsets[rows.start:rows.stop + 1], picks.ids_N, first_id, values_N)
        del logits_TV  # before the next chunk's exist
    return values_N


def _read_vocabulary(hidden_TD, head_VD, picks: _Picks, rule: ScoreRule, first_id: int, world: int,
                     chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets' logits, FP32 [T], +0 where another rank owns them; this rank's tiles' states, FP32 [T, tiles, 3].

    As many logits at a time as `chunk` rows of the whole vocabulary have, but of more rows and less of the vocabulary,
    in whole tiles: a product with few rows reads the weights for little work.
    """
    tiles, stats = VOCAB_TILES // world, []
    values_T = hidden_TD.new_zeros(hidden_TD.shape[0], dtype=torch.float32)
    for rows in _chunks(hidden_TD.shape[0], chunk * VOCAB_PARTS):
        hidden, offsets = hidden_TD[rows], picks.offsets[rows.start:rows.stop + 1]
        parts = min(-(-hidden.shape[0] // (chunk * world)), max(1, VOCAB_PARTS // world))
        parts = 1 << (parts - 1).bit_length()
        of_rows, picked_T = [], torch.empty_like(values_T)
        for number, part_VD in enumerate(head_VD.chunk(parts)):
            logits_TV, part_id = linear_fp32(hidden, part_VD), first_id + number * part_VD.shape[0]
            picks.check()  # the answer comes while the product runs
            _pick(logits_TV, offsets, picks.ids_N, part_id, picked_T)
            values_T[rows] += picked_T[rows]  # exact: one part owns the target, the others give +0
            of_rows.append(_tile_stats(logits_TV, rule, tiles // parts, part_id))
            del logits_TV  # before the next part's exist
        stats.append(torch.cat(of_rows, 1))
    return values_T, torch.cat(stats) if stats else values_T.new_empty(0, tiles, 3)


class _Score(torch.autograd.Function):
    """`score` with its gradient: d logprob / d logit = (1[id = target] - p) / temperature on the ids scored over.

    Over the whole vocabulary the backward pass computes each chunk's logits again; over retained sets it has kept them.
    """

    @staticmethod
    def forward(ctx, hidden_TD, head_VD, picks, rule, comm, chunk):
        values_N, (logprob_T, entropy_T, lse_T) = _score_chunks(hidden_TD, head_VD, picks, rule, comm, chunk)
        ctx.save_for_backward(hidden_TD, values_N, lse_T)
        ctx.head, ctx.first_id, ctx.world = head_VD, comm.rank * head_VD.shape[0], comm.world
        ctx.picks, ctx.rule, ctx.chunk = picks, rule, chunk
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, _):
        hidden_TD, values_N, lse_T = ctx.saved_tensors
        head_VD, first_id, picks, rule = ctx.head, ctx.first_id, ctx.picks, ctx.rule
        grad_T, head_grad_VD = grad_T.contiguous(), main_grad(head_VD)
        dhidden_TD, tokens = torch.empty_like(hidden_TD), hidden_TD.shape[0]
        group = gradient_rows(ctx.chunk, head_VD.shape[0] * ctx.world, hidden_TD.element_size())
        room_TV = hidden_TD.new_empty(min(group, tokens), head_VD.shape[0])
        for rows in _gradient_chunks(tokens, ctx.chunk, group):
            hidden, dlogits_TV = hidden_TD[rows], room_TV[:rows.stop - rows.start]
            if rule.support is None:
                for part in _chunks(hidden.shape[0], ctx.chunk):
                    logits_TV = linear_fp32(hidden[part], head_VD)
                    registry.call("tile_stats_backward", hidden, logits_TV, picks.targets_T[rows][part],
                                  lse_T[rows][part], grad_T[rows][part], first_id, rule.valid_vocab,
                                  rule.inv_temperature, dlogits_TV[part])
                    del logits_TV
            else:
                registry.call("support_score_backward", hidden, values_N, picks.offsets[rows.start:rows.stop + 1],
                              picks.ids_N, picks.index_T[rows], lse_T[rows], grad_T[rows], first_id,
                              rule.inv_temperature, dlogits_TV)
            if ctx.needs_input_grad[0]:
                dhidden_TD[rows] = gemm_dx(dlogits_TV, head_VD)
            if head_grad_VD is not None:
                gemm_dw(dlogits_TV, hidden, head_grad_VD)
        return dhidden_TD if ctx.needs_input_grad[0] else None, None, None, None, None, None


# ---- backend "cpu": hipkernels/cpu/logprob.cpp ----

_find_targets = function("rlk_find_targets", POINTER, POINTER, POINTER, LONG, POINTER)
_pick_logits = function("rlk_pick_logits", POINTER, LONG, LONG, POINTER, POINTER, LONG, POINTER)
_tile_stats_cpu = function("rlk_tile_stats", POINTER, LONG, LONG, LONG, LONG, LONG, FLOAT, POINTER)
_merge_tiles = function("rlk_merge_tiles", POINTER, LONG, LONG, POINTER, FLOAT, POINTER)
_support_score = function("rlk_support_score", POINTER, POINTER, POINTER, LONG, FLOAT, POINTER)
_tile_stats_backward = function("rlk_tile_stats_backward", POINTER, LONG, LONG, POINTER, POINTER, POINTER, LONG, LONG,
                                FLOAT, INT, POINTER)
_support_score_backward = function("rlk_support_score_backward", POINTER, POINTER, POINTER, POINTER, POINTER, POINTER,
                                   LONG, LONG, LONG, FLOAT, INT, POINTER)


@registry.register("find_targets", "cpu", contract=True, dtypes=(torch.int64,))
def find_targets_cpu(offsets, ids_N, targets_T):
    index_T = torch.empty_like(targets_T)
    _find_targets(ptr(offsets), ptr(ids_N), ptr(targets_T), targets_T.numel(), ptr(index_T))
    return index_T


@registry.register("pick_logits", "cpu", contract=True, dtypes=(torch.float32,))
def pick_logits_cpu(logits_TV, offsets, ids_N, first_id, values_N):
    _pick_logits(ptr(logits_TV), *logits_TV.shape, ptr(offsets), ptr(ids_N), first_id, ptr(values_N))


@registry.register("tile_stats", "cpu", contract=True, dtypes=(torch.float32,))
def tile_stats_cpu(logits_TV, tiles, first_id, valid_vocab, inv_temperature):
    rows, columns = logits_TV.shape
    if columns % tiles:
        raise ValueError(f"{columns} logits a row do not split into {tiles} equal tiles; pad the vocabulary to a "
                         f"multiple of {VOCAB_TILES}")
    stats = logits_TV.new_empty(rows, tiles, 3)
    _tile_stats_cpu(ptr(logits_TV), rows, columns, tiles, first_id, valid_vocab, inv_temperature, ptr(stats))
    return stats


@registry.register("merge_tiles", "cpu", contract=True, dtypes=(torch.float32,))
def merge_tiles_cpu(stats, target_logits_T, inv_temperature):
    out = stats.new_empty(3, stats.shape[0])
    _merge_tiles(ptr(stats), *stats.shape[:2], ptr(target_logits_T), inv_temperature, ptr(out))
    return out.unbind()


@registry.register("support_score", "cpu", contract=True, dtypes=(torch.float32,))
def support_score_cpu(values_N, offsets, index_T, inv_temperature):
    out = values_N.new_empty(3, index_T.numel())
    _support_score(ptr(values_N), ptr(offsets), ptr(index_T), index_T.numel(), inv_temperature, ptr(out))
    return out.unbind()


@registry.register("tile_stats_backward", "cpu", contract=True)
def tile_stats_backward_cpu(logits_TV, targets_T, lse_T, grad_T, first_id, valid_vocab, inv_temperature, dlogits_TV):
    _tile_stats_backward(ptr(logits_TV), *logits_TV.shape, ptr(targets_T), ptr(lse_T), ptr(grad_T), first_id,
                         valid_vocab, inv_temperature, DTYPE_CODE[dlogits_TV.dtype], ptr(dlogits_TV))


@registry.register("support_score_backward", "cpu", contract=True)
def support_score_backward_cpu(values_N, offsets, ids_N, index_T, lse_T, grad_T, first_id, inv_temperature, dlogits_TV):
    _support_score_backward(ptr(values_N), ptr(offsets), ptr(ids_N), ptr(index_T), ptr(lse_T), ptr(grad_T),
                            *dlogits_TV.shape, first_id, inv_temperature, DTYPE_CODE[dlogits_TV.dtype], ptr(dlogits_TV))


# ---- backend "reference": plain PyTorch; the oracle, and the native arm's code ----


def _rows_of(offsets: torch.Tensor) -> torch.Tensor:
    """The row of each CSR entry."""
    return torch.repeat_interleave(torch.arange(offsets.numel() - 1, device=offsets.device), offsets.diff())


@registry.register("find_targets", "reference", contract=False, devices=EVERYWHERE, dtypes=(torch.int64,))
def find_targets_reference(offsets, ids_N, targets_T):
    """Index among the N entries of each row's target, int64 [T]; -1 where the row lacks it."""
    hits = (ids_N == targets_T[_rows_of(offsets)]).nonzero().flatten()
    index_T = torch.full_like(targets_T, -1)
    index_T[torch.searchsorted(offsets, hits, right=True) - 1] = hits
    return index_T


@registry.register("pick_logits", "reference", contract=False, devices=EVERYWHERE)
def pick_logits_reference(logits_TV, offsets, ids_N, first_id, values_N):
    """values[n] = the logit of entry n, or 0 where another rank owns it. Fills entries offsets[0] to offsets[-1]."""
    entries = slice(int(offsets[0]), int(offsets[-1]))
    columns = ids_N[entries].long() - first_id
    owned = (columns >= 0) & (columns < logits_TV.shape[1])
    picked = logits_TV[_rows_of(offsets), columns.where(owned, 0)]
    values_N[entries] = picked.where(owned, 0)


@registry.register("tile_stats", "reference", contract=False, devices=EVERYWHERE)
def tile_stats_reference(logits_TV, tiles, first_id, valid_vocab, inv_temperature):
    """(max, sum exp(x - max), sum exp(x - max) x) as [T, 1, 3]: one tile per rank; the order is PyTorch's own."""
    x = logits_TV[:, :max(0, valid_vocab - first_id)] * inv_temperature
    if x.shape[1] == 0:
        return x.new_tensor([-torch.inf, 0.0, 0.0]).expand(x.shape[0], 1, 3)
    top = x.amax(-1, keepdim=True)
    weights = (x - top).exp_()
    return torch.stack([top[:, 0], weights.sum(-1), weights.mul_(x).sum(-1)], -1).unsqueeze(1)


@registry.register("merge_tiles", "reference", contract=False, devices=EVERYWHERE)
def merge_tiles_reference(stats, target_logits_T, inv_temperature):
    """(logprob, entropy, lse), [T] each, from states [T, tiles, 3] and the targets' unscaled logits."""
    tops, sums, weighted = stats.unbind(-1)
    top = tops.amax(-1, keepdim=True)
    scales = (tops - top).exp_()
    total = (scales * sums).sum(-1)
    lse = top[:, 0] + total.log()
    return target_logits_T * inv_temperature - lse, lse - (scales * weighted).sum(-1) / total, lse


@registry.register("support_score", "reference", contract=False, devices=EVERYWHERE)
def support_score_reference(values_N, offsets, index_T, inv_temperature):
    """(logprob, entropy, lse), [T] each, over each row's own entries only; `values_N` are unscaled logits."""
    x, rows, zeros = values_N * inv_temperature, _rows_of(offsets), values_N.new_zeros(index_T.numel())
    top = torch.full_like(zeros, -torch.inf).scatter_reduce_(0, rows, x, "amax")
    weights = (x - top[rows]).exp_()
    total = zeros.index_add(0, rows, weights)
    lse = top + total.log()
    return x[index_T] - lse, lse - zeros.index_add(0, rows, weights * x) / total, lse


@registry.register("tile_stats_backward", "reference", contract=False, devices=EVERYWHERE)
def tile_stats_backward_reference(logits_TV, targets_T, lse_T, grad_T, first_id, valid_vocab, inv_temperature,
                                  dlogits_TV):
    """dlogits = grad / temperature * (1[id = target] - exp(x - lse)), in dlogits' dtype; 0 for ids >= valid_vocab."""
    scale_T = grad_T * inv_temperature
    dlogits = (logits_TV * inv_temperature).sub_(lse_T.unsqueeze(1)).exp_().mul_(-scale_T.unsqueeze(1))
    dlogits[:, max(0, valid_vocab - first_id):] = 0
    own = ((targets_T >= first_id) & (targets_T < first_id + logits_TV.shape[1])).nonzero().flatten()
    dlogits[own, targets_T[own] - first_id] += scale_T[own]
    dlogits_TV.copy_(dlogits)


@registry.register("support_score_backward", "reference", contract=False, devices=EVERYWHERE)
def support_score_backward_reference(values_N, offsets, ids_N, index_T, lse_T, grad_T, first_id, inv_temperature,
                                     dlogits_TV):
    """The same over each row's entries offsets[0] to offsets[-1]; 0 for every other id."""
    first, last, rows = int(offsets[0]), int(offsets[-1]), _rows_of(offsets)
    scale_T = grad_T * inv_temperature
    entries = (values_N[first:last] * inv_temperature - lse_T[rows]).exp_() * -scale_T[rows]
    entries[index_T - first] += scale_T
    columns = ids_N[first:last].long() - first_id
    own = ((columns >= 0) & (columns < dlogits_TV.shape[1])).nonzero().flatten()
    dlogits_TV.zero_()[rows[own], columns[own]] = entries[own].to(dlogits_TV.dtype)
