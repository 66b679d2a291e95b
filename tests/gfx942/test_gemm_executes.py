"""The Triton GEMM's gfx942 code objects, executed: right values, and one set of bits in every configuration."""

import dataclasses
import itertools

import numpy as np
import pytest

from rlk.contract import GEMM_CHUNK
from rlk.kernels import gemm, gemm_reduce, swiglu
from rlk.kernels.gemm import CONFIGS
from tests.gfx942.emulator import Device
from tests.gfx942.numerics import BF16_EPSILON, from_bf16, random_bf16, same_bytes, to_bf16
from tests.gfx942.triton_runs import run_variant

ARCH = "gfx942"
TABLE = CONFIGS[ARCH]
VARIANTS = {variant.label: variant for variant in gemm.variants(ARCH)}
K = GEMM_CHUNK[ARCH] + 64  # two chunks, of 16 K blocks and of one
N = 144  # no multiple of 32, 64 or 128
GUARD = 512  # elements behind a result
DTYPES = {"bf16": np.uint16, "fp32": np.float32}


def tiles(name, x, w, leaves=1, out="fp32", tree=None, order="forward", **constants):
    """What the kernel of one configuration writes: the product [M, N], or the workspace [parts, M, N]."""
    config, (M, K), N = TABLE[name], x.shape, w.shape[0]
    tree = (1 if config.split else leaves) if tree is None else tree
    variant = next(v for v in gemm.variants(ARCH) if v.kernel == "gemm" and v.name.startswith(name)
                   and v.constants["TREE"] == tree and v.constants["EPILOGUE"] == "round"
                   and v.signature["y"] == f"*{out}")
    variant = dataclasses.replace(variant, constants=variant.constants | constants)
    grid = gemm.grid(config, ARCH, M, N, K, leaves)
    nan = np.uint16(0x7FC0) if out == "bf16" else np.float32(np.nan)
    y = np.full(grid[1] * M * N + GUARD, nan)
    values = dict(x=x, w=w, residual=x, y=y, M=M, N=N, K=K, leaf_k=K // leaves)
    y = run_variant(Device(order), variant, grid, values)["y"]
    assert same_bytes(y[-GUARD:], np.full(GUARD, nan))
    return y[:-GUARD].reshape((grid[1], M, N) if config.split else (M, N))


def reduced(workspace, leaves=1, out="fp32", epilogue="round", residual=None):
    """The reduce kernel behind a split product."""
    parts, M, N = workspace.shape
    config = gemm_reduce.choose(ARCH)
    width = N // 2 if epilogue == "swiglu" else N
    variant = VARIANTS[f"gemm_reduce/block_512_{epilogue}_leaves{leaves}_{out}"]
    values = dict(workspace=workspace, residual=workspace if residual is None else residual,
                  y=np.zeros((M, width), DTYPES[out]), M=M, N=N, chunks=parts // leaves)
    return run_variant(Device(), variant, gemm_reduce.grid(config, M, width), values)["y"]


def product(name, x, w, leaves=1, out="fp32", order="forward"):
    """The product as `linear` launches it."""
    if not TABLE[name].split:
        return tiles(name, x, w, leaves, out, order=order)
    return reduced(tiles(name, x, w, leaves, order=order), leaves, out)


def float64(x, w):
    return from_bf16(x).astype(np.float64) @ from_bf16(w).astype(np.float64).T


def draw(seed, M, N=N, K=K):
    rng = np.random.default_rng(seed)
    return random_bf16(rng, M, K), random_bf16(rng, N, K)


def chain(x, w, first, last):
    """One accumulator from +0 over k in [first, last). The operand packing of kpack 2 gives a block of 32 to two matrix
    instructions: eights of it by turns, the first four of each to the first."""
    x, w = from_bf16(x).astype(np.float64), from_bf16(w).astype(np.float64)
    acc = np.zeros((len(x), len(w)), np.float32)
    for block, half, eight, k in itertools.product(range(first, last, 32), (0, 4), (0, 8, 16, 24), range(4)):
        column = block + eight + half + k
        if column < last:
            acc = (acc + np.outer(x[:, column], w[:, column])).astype(np.float32)
    return acc


@pytest.fixture(scope="module")
def operands():
    return draw(1, 65)


@pytest.fixture(scope="module")
def expected(operands):
    """The contract's own order, in numpy."""
    x, w = operands
    return chain(x, w, 0, GEMM_CHUNK[ARCH]) + chain(x, w, GEMM_CHUNK[ARCH], K)


SINGLE_LEAF = [name for name, config in TABLE.items() if 1 in config.leaves]


@pytest.mark.parametrize("M", [1, 3, 17])
@pytest.mark.parametrize("name", SINGLE_LEAF)
def test_every_configuration_gives_the_bits_of_the_contract(name, M, operands, expected):
    x, w = operands
    assert same_bytes(product(name, x[-M:], w), expected[-M:])


@pytest.mark.parametrize("name", ["prefill_64x64_w4", "prefill_128x128_w8", "prefill_tail_64x64_w4", "qkv_32x64_w4_u4"])
def test_a_row_has_the_same_bits_in_a_larger_batch_and_in_either_wave_order(name, operands, expected):
    x, w = operands
    for order in ("forward", "reverse"):
        assert same_bytes(product(name, x, w, order=order), expected)


@pytest.mark.parametrize("name", SINGLE_LEAF)
def test_many_tiles_are_each_made_once(name):
    config = TABLE[name]
    x, w = draw(9, 2 * config.block_m + 1, N=9 * config.block_n + 16, K=64)  # more than one group of N tiles
    assert same_bytes(product(name, x, w), chain(x, w, 0, 64))


@pytest.mark.parametrize("name", SINGLE_LEAF)
def test_bf16_results_are_the_sum_rounded_once_and_agree_with_float64(name):
    x, w = draw(2, 5, N=48)
    y, total = product(name, x, w, out="bf16"), product(name, x, w)
    assert same_bytes(y, to_bf16(total))
    exact, magnitude = float64(x, w), np.abs(float64(x & 0x7FFF, w & 0x7FFF))
    assert np.all(np.abs(total - exact) <= magnitude * 2.0**-20)
    assert np.all(np.abs(from_bf16(y) - exact) <= np.abs(exact) * BF16_EPSILON + magnitude * 2.0**-20)


@pytest.mark.parametrize("depth", [16, 48, 80, 1072])
def test_a_k_that_is_no_multiple_of_the_block_gives_the_same_bits_in_decode_and_prefill(depth):
    x, w = draw(3, 3, N=48, K=depth)
    decode, prefill = (product(name, x, w) for name in ("decode_tail_16x32_w2", "prefill_tail_64x64_w4"))
    cuts = [*range(0, depth, GEMM_CHUNK[ARCH]), depth]
    sums = [chain(x, w, *cut) for cut in itertools.pairwise(cuts)]
    assert same_bytes(decode, sum(sums[1:], sums[0])) and same_bytes(prefill, decode)


def tree(sums):
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_leaves_are_added_in_a_balanced_tree_in_every_configuration(leaves):
    x, w = draw(4, 17, N=48, K=64 * leaves)
    expected = tree([chain(x, w, 64 * leaf, 64 * leaf + 64) for leaf in range(leaves)])
    names = [name for name, config in TABLE.items() if leaves in config.leaves]
    assert len(names) >= 3
    for name in names:
        assert same_bytes(product(name, x, w, leaves), expected), name


def test_a_leaf_of_several_chunks_adds_them_before_the_tree():
    x, w = draw(5, 3, N=48, K=2 * K)
    expected = product("short_16x32_w2", x[:, :K].copy(), w[:, :K].copy()) + product(
        "short_16x32_w2", x[:, K:].copy(), w[:, K:].copy())
    for name in ("decode_16x32_w2", "prefill_64x128_w4"):
        assert same_bytes(product(name, x, w, leaves=2), expected), name


@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
def test_a_reduction_adds_chunks_ascending_then_leaves_in_a_tree_then_the_residual_and_rounds_once(leaves):
    rng = np.random.default_rng(6)
    workspace = rng.standard_normal((3 * leaves, 3, 528)).astype(np.float32)
    residual = random_bf16(rng, 3, 528)
    expected = tree([a + b + c for a, b, c in workspace.reshape(leaves, 3, 3, 528)])
    assert same_bytes(reduced(workspace, leaves), expected)
    assert same_bytes(reduced(workspace, leaves, "bf16"), to_bf16(expected))
    finished = reduced(workspace, leaves, "bf16", "residual", residual)
    assert same_bytes(finished, to_bf16(from_bf16(residual) + expected))


@pytest.mark.parametrize("name", [name for name in SINGLE_LEAF if not TABLE[name].split])
def test_a_fused_epilogue_has_the_bits_of_the_product_and_what_follows_it(name):
    x, w = draw(10, 3, N=96, K=K - 32 if TABLE[name].tail else K)
    residual = random_bf16(np.random.default_rng(11), 3, 96)
    total = product(name, x, w)
    assert same_bytes(fused(name, "residual", x, w, residual), to_bf16(from_bf16(residual) + total))
    (variant,) = swiglu.variants(ARCH)
    values = dict(gate_up=to_bf16(total), y=np.zeros((3, 48), np.uint16), F=48)
    assert same_bytes(fused(name, "swiglu", x, w, x), run_variant(Device(), variant, (3, 1), values)["y"])


def fused(name, epilogue, x, w, residual):
    """What a monolithic configuration writes with that epilogue."""
    config, (M, K), N = TABLE[name], x.shape, w.shape[0]
    width = N // 2 if epilogue == "swiglu" else N
    values = dict(x=x, w=w, residual=residual, y=np.zeros((M, width), np.uint16), M=M, N=N, K=K, leaf_k=K)
    return run_variant(Device(), VARIANTS[f"gemm/{name}_{epilogue}"], gemm.grid(config, ARCH, M, width, K), values)["y"]


def test_swapped_operands_have_the_same_bits(operands, expected):
    """No table has such a configuration yet: it is a candidate where few rows would leave the matrix unit idle."""
    x, w = operands[0][:17], operands[1]
    config = dataclasses.replace(TABLE["short_16x32_w2"], swap=True, max_k=1 << 31)
    variant = dataclasses.replace(VARIANTS["gemm/short_16x32_w2_fp32"], constants=gemm.constants(config, ARCH, 1))
    values = dict(x=x, w=w, residual=x, y=np.zeros((17, N), np.float32), M=17, N=N, K=K, leaf_k=K)
    y = run_variant(Device(), variant, gemm.grid(config, ARCH, 17, N, K), values)["y"]
    assert same_bytes(y, expected[:17])


def test_swiglu_in_the_reduction_has_the_bits_of_the_product_and_the_swiglu_kernel():
    x, w = draw(8, 3, N=96)
    workspace = tiles("decode_16x32_w2", x, w)
    (variant,) = swiglu.variants(ARCH)
    gate_up = reduced(workspace, out="bf16")
    apart = run_variant(Device(), variant, (3, 1), dict(gate_up=gate_up, y=np.zeros((3, 48), np.uint16), F=48))["y"]
    assert same_bytes(reduced(workspace, out="bf16", epilogue="swiglu"), apart)


def test_the_comparison_catches_another_chunk_width_another_k_order_and_another_split(operands, expected):
    x, w = operands[0][:17], operands[1]
    narrow = tiles("prefill_64x64_w4", x, w, CHUNK=512)
    backwards = tiles("prefill_64x64_w4", x[:, ::-1].copy(), w[:, ::-1].copy())
    halves = tiles("prefill_tail_64x64_w4", x, w, leaves=2)
    unpacked = tiles_without_kpack(x, w)
    for wrong in (narrow, backwards, halves, unpacked):
        assert np.allclose(wrong, expected[:17], atol=1e-3)
        assert not same_bytes(wrong, expected[:17])


def tiles_without_kpack(x, w):
    """kpack 1 hands the matrix unit another order of k: the contract names kpack 2 for that reason."""
    variant = VARIANTS["gemm/prefill_64x64_w4_fp32"]
    variant = dataclasses.replace(variant, options=variant.options | {"kpack": 1})
    M, N = x.shape[0], w.shape[0]
    grid = gemm.grid(TABLE["prefill_64x64_w4"], ARCH, M, N, K)
    values = dict(x=x, w=w, residual=x, y=np.zeros((M, N), np.float32), M=M, N=N, K=K, leaf_k=K)
    return run_variant(Device(), variant, grid, values)["y"]


QWEN3 = [  # hidden, (q + 2 kv) x head dimension, q x head dimension, intermediate: 0.6B, 4B, 8B, 14B, 32B
    (1024, 4096, 2048, 3072), (2560, 6144, 4096, 9728), (4096, 6144, 4096, 12288), (5120, 7168, 5120, 17408),
    (5120, 10240, 8192, 25600),
]


def products_of(hidden, qkv, heads, intermediate, tp, leaves):
    """(N, K, leaves) of each product of a rank."""
    own = max(leaves // tp, 1)
    yield qkv // tp, hidden, 1
    yield hidden, heads // tp, own
    yield 2 * intermediate // tp, hidden, 1
    yield hidden, intermediate // tp, own
    yield 151936 // tp, hidden, 1


@pytest.mark.parametrize("arch", list(CONFIGS))
def test_every_qwen3_product_has_a_configuration_and_every_configuration_a_product(arch):
    shapes = {shape for model in QWEN3 for tp in (1, 2, 4, 8) for leaves in (1, 2, 4, 8) if leaves >= tp or leaves == 1
              for shape in products_of(*model, tp, leaves)}
    shapes |= {(48, 48 * leaves, leaves) for leaves in (1, 2, 4, 8)}  # small test models
    chosen = {gemm.choose(arch, M, N, K, leaves) for N, K, leaves in shapes for M in (1, 8, 16, 17, 64, 65, 512, 4096)}
    assert chosen == set(CONFIGS[arch])


def test_shapes_of_the_reference_workload_get_their_tuned_kernels():
    choices = {role: gemm.choose(ARCH, 8, N, K) for role, N, K in (
        ("qkv", 1536, 4096), ("down", 4096, 3072), ("lm_head", 37984, 4096), ("gate_up", 6144, 4096))}
    assert choices == {"qkv": "qkv_32x64_w4_u4", "down": "down_16x32_w2_u4", "lm_head": "decode_16x128_w4",
                       "gate_up": "decode_16x32_w2"}


@pytest.mark.parametrize("name", [name for name, config in TABLE.items() if config.split])
def test_a_split_product_has_a_reduction_for_each_of_its_leaf_counts(name):
    for leaves in TABLE[name].leaves:
        assert f"gemm_reduce/block_512_round_leaves{leaves}_fp32" in VARIANTS
