"""A case of every operator that a GPU serves, with operands for any number of rows.

The operands run on a CPU as well, where its backends hold the table to the operators' arguments.
"""

from __future__ import annotations

import torch

from rlk.ops import sampler
from rlk.ops.attention import attention_paged_reference, attention_varlen_reference
from rlk.ops.registry import registry
from rlk.preflight import unserved_operators
from rlk.rollout.engine import SamplingParams
from tests.gpu.operator_checks import BF16, ENTRY, FP32, OFFSETS, PLACE, ROW, STEP, Case

unserved_operators("cuda", "consistency")  # imports every operator

EPS = 1e-6


# ---- operands ----


def draw(device, seed, *shape, scale=1.0, dtype=BF16):
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)


def integers(device, seed, most, *shape):
    return torch.randint(most, shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def linear_case(op, N, K, *leaves, **more):
    def make(rows, seed, device):
        return [draw(device, seed, rows, K), draw(device, seed + 1, N, K, scale=K**-0.5), *leaves]

    return Case(op, make, roles=(ROW, *[None] * (1 + len(leaves))), error=2.0**-15, **more)


def gemm_dx(rows, seed, device):
    return [draw(device, seed, rows, 528), draw(device, seed + 1, 528, 784, scale=0.05)]


def gemm_dw(rows, seed, device):
    return [draw(device, seed, rows, 528), draw(device, seed + 1, rows, 784),
            draw(device, seed + 2, 528, 784, dtype=FP32)]


def add_rms_norm(rows, seed, device):
    return [draw(device, seed, rows, 1040, dtype=FP32), draw(device, seed + 1, rows, 1040), draw(device, 2, 1040), EPS]


def rms_norm_backward(rows, seed, device):
    return [draw(device, seed, rows, 1040), draw(device, seed + 1, rows, 1040), draw(device, seed + 2, rows, 1040),
            draw(device, 3, 1040), EPS, draw(device, 4, 1040, dtype=FP32)]


def rotation(rows, seed, device):
    angle = draw(device, seed, rows, 64, scale=2.0, dtype=FP32)
    return angle.cos(), angle.sin()


def qk_norm_rope(rows, seed, device):
    return [draw(device, seed, rows, 9, 128)[:, 1:6], draw(device, 1, 128), *rotation(rows, seed, device), EPS]


def qk_norm_rope_backward(rows, seed, device):
    return [draw(device, seed + 1, rows, 5, 128), *qk_norm_rope(rows, seed, device), draw(device, 2, 128, dtype=FP32)]


def cache_and_slots(rows, seed, device):
    """Two caches [P, S, G, E] and slots in them, one of which is -1."""
    pages = rows // 16 + 3
    slots = torch.randperm(pages * 16, generator=torch.Generator().manual_seed(seed))[:rows]
    slots[rows // 2 :][:1] = -1
    return [*draw(device, seed + 5, 2, pages, 16, 2, 128), slots.to(device)]


def write_kv(rows, seed, device):
    qkv = draw(device, seed, rows, 9, 128)
    return [qkv[:, 5:7].contiguous(), qkv[:, 7:], *cache_and_slots(rows, seed, device)]


def qk_norm_rope_write(rows, seed, device):
    return [draw(device, seed, rows, 9, 128), draw(device, 1, 128), draw(device, 2, 128), *rotation(rows, seed, device),
            EPS, *cache_and_slots(rows, seed, device)]


def tokens_of(rows, seed, device):
    """Few ids many times, and some of another rank, around first_row = 1000."""
    return (torch.rand(rows, generator=torch.Generator(device).manual_seed(seed), device=device)**4 * 620).long() + 990


def embedding(rows, seed, device):
    return [tokens_of(rows, seed, device), draw(device, seed, 600, 1040), 1000]


def embedding_backward(rows, seed, device):
    return [draw(device, seed, rows, 1040), tokens_of(rows, seed, device), draw(device, 1, 600, 1040, dtype=FP32), 1000]


def adamw(rows, seed, device):
    master, first, second, grad = draw(device, seed, 4, 16 * rows, dtype=FP32)
    return [master, first, second.square(), grad, master.to(BF16), 0.37, 1e-3, 0.9, 0.999, 1e-8, 0.1, 0.19, 0.002]


# ---- sequences ----

LENGTHS = {0: [], 1: [1], 37: [5, 0, 32], 64: [1, 0, 62, 1], 1000: [300, 0, 1, 699],
           8192: [1, 0, 700, 64, 1300, 2000, 37, 2000, 2090]}  # rows -> those of each sequence, packed
H, G, E = 8, 2, 128
PREFIX, PAGE = 70, 16  # keys before a sequence's rows in the cache; slots of a page


def lengths_of(rows, device):
    """The CPU's attention refuses a segment without rows."""
    return [n for n in LENGTHS[rows] if n or device != "cpu"]


def segments_of(rows, position, device):
    """(segments, first row of each), on the CPU: from there they are uploaded once."""
    lengths = torch.tensor(lengths_of(rows, device), dtype=torch.int32)
    starts = lengths.cumsum(0, dtype=torch.int32) - lengths
    source = torch.arange(len(lengths), dtype=torch.int32)
    return torch.stack([starts, lengths, torch.full_like(starts, position), source], 1), starts


def attention_varlen(rows, seed, device):
    qkv = draw(device, seed, rows, H + 2 * G, E)
    return [*qkv.split((H, G, G), 1), *segments_of(rows, 0, device), True]


def attention_paged(rows, seed, device):
    """Pages in random order, with NaN in every slot that no row sees."""
    segments, _ = segments_of(rows, PREFIX, device)
    lengths = [n + PREFIX for n in lengths_of(rows, device)]
    counts = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    caches = torch.full((2, len(order), PAGE, G, E), float("nan"), dtype=BF16, device=device)
    table = torch.full((max(len(counts), 1), max(counts, default=0) + 1), -1, dtype=torch.int32)
    for row, (count, n) in enumerate(zip(counts, lengths, strict=True)):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        position = torch.arange(n)
        slots = (table[row, position // PAGE].long() * PAGE + position % PAGE).to(device)
        caches.flatten(1, 2)[:, slots] = draw(device, seed + row, 2, n, G, E)
    return [draw(device, seed, rows, H, E), *caches, segments, table.to(device)]


def attention_varlen_backward(rows, seed, device):
    q, k, v, segments, starts, _ = attention_varlen(rows, seed, device)
    o, lse = registry.call("attention_varlen", q, q, k, v, segments, starts, need_lse=True)
    return [draw(device, seed + 1, rows, H, E), q, k, v, o, lse, segments, starts]


def exact_varlen(args, of_v=lambda v: v):
    q, k, v, segments, starts, _ = args
    segments = segments.to(q.device)
    return [attention_varlen_reference(q.double(), k.double(), of_v(v.double()), segments, starts)[0], None]


def exact_paged(args, of_v=lambda v: v):
    q, k, v, segments, table = args
    return [attention_paged_reference(q.double(), k.double(), of_v(v.double()), segments.to(q.device), table)]


def exact_varlen_backward(args):
    do, q, k, v, _, _, segments, starts = args
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = exact_varlen([*leaves, segments, starts, False])[0]
    return list(torch.autograd.grad(out, leaves, do.double())) if len(q) else [x.detach() for x in leaves]


def largest_gradient(args):
    """Of all three: a query that sees one key has a gradient of 0, the difference of two numbers."""
    return 3 * [torch.stack([x.abs().max() if len(x) else x.new_zeros(()) for x in exact_varlen_backward(args)]).max()]


# ---- log-probs and the draw ----

TILES, INV_T = 64, 1 / 0.7
VOCAB, FIRST_ID, COLUMNS = 1301, 99, 1201  # of retained sets; a rank's columns: an odd number of them
SET_SIZES = (1, 2, 31, 64, 255, 256, 257, 700, 769, 1100)  # from 769 on a lane takes several together


def tile_stats_case(V, **more):
    def make(rows, seed, device):
        logits = draw(device, seed, rows, V, scale=4.0, dtype=FP32)
        logits[:, V - 200 :] = 1e4
        return [logits, TILES, 1000, V + 1000 - 200, INV_T]

    return Case("tile_stats", make, roles=(ROW, None, None, None, None), exact=exact_tile_stats, **more)


def exact_tile_stats(args):
    logits, tiles, first_id, valid, inv_t = args
    x = logits.double() * inv_t
    x[:, valid - first_id :] = -torch.inf
    x = x.unflatten(1, (tiles, -1))
    top = x.amax(-1, keepdim=True)
    e = (x - top.nan_to_num(0, 0, 0)).exp()
    return [torch.stack([top[..., 0], e.sum(-1), (e * x.nan_to_num(0, 0, 0)).sum(-1)], -1)]


def merge_tiles(rows, seed, device):
    top, weighted, target = draw(device, seed, 3, rows, TILES, scale=3.0, dtype=FP32)
    sums = torch.rand(rows, TILES, generator=torch.Generator(device).manual_seed(seed), device=device) * 130 + 1
    return [torch.stack([top, sums, weighted * sums], -1), target[:, 0].contiguous(), INV_T]


def tile_stats_backward(rows, seed, device):
    logits, V, valid = draw(device, seed, rows, 1027, scale=4.0, dtype=FP32), 1027, 997
    targets = integers(device, seed, valid, rows) + 1000
    targets[3::5] = 7  # another rank's
    lse = (logits[:, :valid].double() * INV_T).logsumexp(1).float()
    return [logits, targets, lse, draw(device, seed + 1, rows, dtype=FP32), 1000, 1000 + valid, INV_T,
            torch.full((rows, V), float("nan"), dtype=BF16, device=device)]


class Sets:
    """Retained sets of `rows` rows, sizes in an order of the seed's: what the operators over them take."""

    def __init__(self, rows, seed, device):
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        sizes = torch.tensor(SET_SIZES).repeat(rows // len(SET_SIZES) + 1)[:rows][order].to(device)
        self.offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        noise = torch.rand(rows, VOCAB, generator=torch.Generator(device).manual_seed(seed), device=device)
        kept = noise.argsort(1).argsort(1) < sizes[:, None]
        self.logits = draw(device, seed, rows, VOCAB, scale=4.0, dtype=FP32)
        self.ids, self.values = kept.nonzero()[:, 1].int(), self.logits[kept]
        self.index = self.offsets[:-1] + (noise[:, 0] * sizes).long().clamp(max=sizes - 1)
        self.lse = (self.logits.double() * INV_T).masked_fill(~kept, -torch.inf).logsumexp(1).float()


def find_targets(rows, seed, device):
    sets = Sets(rows, seed, device)
    targets = sets.ids[sets.index].long()
    targets[3::5] = VOCAB + 3
    return [sets.offsets, sets.ids, targets]


def pick_logits(rows, seed, device):
    sets = Sets(rows, seed, device)
    logits = sets.logits[:, FIRST_ID : FIRST_ID + COLUMNS].contiguous()
    return [logits, sets.offsets, sets.ids, FIRST_ID, torch.full_like(sets.values, float("nan"))]


def support_score(rows, seed, device):
    sets = Sets(rows, seed, device)
    return [sets.values, sets.offsets, sets.index, INV_T]


def support_score_backward(rows, seed, device):
    sets = Sets(rows, seed, device)
    return [sets.values, sets.offsets, sets.ids, sets.index, sets.lse, draw(device, seed, rows, dtype=FP32), FIRST_ID,
            INV_T, torch.full((rows, COLUMNS), float("nan"), dtype=BF16, device=device)]


def draw_tokens(rows, seed, device):
    logits = draw(device, seed, rows, VOCAB, scale=3.0, dtype=FP32)
    return [logits, SamplingParams(temperature=0.7, seed=8), integers(device, seed, 1 << 40, rows),
            integers(device, seed + 1, 5000, rows), VOCAB - 2]


def exact_tokens(args):
    """The CPU's rule. Which numbers are drawn is held against numpy in tests/unit/test_ops_sampler.py."""
    return list(sampler.draw_cpu(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in args)))


# ---- the table ----

CASES = [
    linear_case("linear", 528, 1024),
    linear_case("linear", 528, 1040, label="linear-tail"),
    linear_case("linear_fp32", 528, 1024),
    linear_case("linear_leaves", 528, 1024, 4),
    linear_case("linear_swiglu", 1056, 1024, roundings=12),  # of gate and up, by up to 1 + |gate| of them, and its own
    Case("gemm_dx", gemm_dx, roles=(ROW, None), error=2.0**-15),
    Case("gemm_dw", gemm_dw, writes=(2,), error=2.0**-15),
    Case("rms_norm", lambda *a: add_rms_norm(*a)[1:], roles=(ROW, None, None)),
    Case("add_rms_norm", add_rms_norm, 1, roles=(ROW, ROW, None, None), gives=(ROW, ROW), roundings=2),
    Case("residual_add", lambda *a: add_rms_norm(*a)[:2], 1, roles=(ROW, ROW)),
    Case("rms_norm_backward", rms_norm_backward, writes=(5,), roles=(ROW, ROW, ROW, None, None, None),
         gives=(ROW, None)),
    Case("qk_norm_rope", qk_norm_rope, roles=(ROW, None, ROW, ROW, None)),
    Case("qk_norm_rope_backward", qk_norm_rope_backward, writes=(6,), roles=(ROW, ROW, None, ROW, ROW, None, None),
         gives=(ROW, None)),
    Case("swiglu", lambda rows, seed, device: [draw(device, seed, rows, 2 * 1040, scale=4.0)], roles=(ROW,)),
    Case("swiglu_backward", lambda rows, seed, device: [draw(device, seed, rows, 1040),
                                                       draw(device, seed + 1, rows, 2 * 1040, scale=4.0)],
         roles=(ROW, ROW)),
    Case("embedding", embedding, 1, roles=(ROW, None, None), error=0.0),
    Case("embedding_backward", embedding_backward, writes=(2,)),
    Case("write_kv", write_kv, writes=(2, 3), error=0.0),
    Case("qk_norm_rope_write", qk_norm_rope_write, writes=(6, 7), gives=(ROW, None, None),
         roles=(ROW, None, None, ROW, ROW, None, None, None, ROW)),
    Case("adamw", adamw, writes=(0, 1, 2, 4)),
    Case("sum_squares", lambda rows, seed, device: [draw(device, seed, 16 * rows, dtype=FP32)], error=0.0,
         captured=False),  # it gives a Python float
    Case("attention_varlen", attention_varlen, exact=exact_varlen, error=STEP[BF16],
         sizes=lambda args: exact_varlen(args, torch.abs)),
    Case("attention_paged", attention_paged, exact=exact_paged, error=STEP[BF16],
         sizes=lambda args: exact_paged(args, torch.abs)),
    Case("attention_varlen_backward", attention_varlen_backward, exact=exact_varlen_backward, error=2.0**-6,
         sizes=largest_gradient),
    tile_stats_case(64 * 129),
    Case("merge_tiles", merge_tiles, roles=(ROW, ROW, None), gives=(ROW, ROW, ROW),
         sizes=lambda args: 3 * [20.0]),  # the largest of the numbers that are subtracted
    Case("tile_stats_backward", tile_stats_backward, 7, writes=(7,), error=2.0**-15,
         sizes=lambda args: [args[3].abs()[:, None] * INV_T],  # of the target: the difference of two such numbers
         roles=(ROW, ROW, ROW, ROW, None, None, None, ROW)),
    Case("find_targets", find_targets, 2, roles=(OFFSETS, ENTRY, ROW), gives=(PLACE,)),
    Case("pick_logits", pick_logits, writes=(4,), roles=(ROW, OFFSETS, ENTRY, None, ENTRY), gives=(ENTRY,), error=0.0),
    Case("support_score", support_score, roles=(ENTRY, OFFSETS, PLACE, None), gives=(ROW, ROW, ROW),
         sizes=lambda args: 3 * [20.0]),
    Case("support_score_backward", support_score_backward, 8, writes=(8,), error=2.0**-15,
         sizes=lambda args: [args[5].abs()[:, None] * INV_T],  # likewise
         roles=(ENTRY, OFFSETS, ENTRY, PLACE, ROW, ROW, None, None, ROW)),
    Case("draw", draw_tokens, roles=(ROW, None, ROW, ROW, None), gives=(ROW, None), exact=exact_tokens),
]
ELSEWHERE = {"cumulative_sum": "test_cumulative_sum.py",  # only as torch has it, and for 2 to 7 rows
             "all_reduce_add_rms_norm": "test_communicator.py"}  # of several ranks
