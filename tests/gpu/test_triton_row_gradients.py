"""Gradients of the row operators, embedding, cache writes and the optimizer on this GPU: right values, fixed bits."""

import pytest
import torch

from rlk.kernels import embedding, norm_backward, optimizer, paged_cache, rope, rope_backward, swiglu_backward
from rlk.ops import adamw as adamw_ops
from rlk.ops import embedding as embedding_ops
from rlk.ops import norm as norm_ops
from rlk.ops import swiglu as swiglu_ops
from tests.gpu.operator_checks import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

EPS = 1e-6
ONE_ROUNDING = 1.02 * 2.0**-8  # to BF16, and the FP32 errors before it
ROWS = (slice(0, 1), slice(3, 10), slice(60, 131))


def draw(seed, *shape, scale=1.0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def close(got, exact):
    """Within the rounding of got's dtype, and FP32's errors of the row's largest value."""
    size = exact.abs().amax(-1, keepdim=True)
    step = ONE_ROUNDING if got.dtype == torch.bfloat16 else 2.0**-20
    return bool(((got.double() - exact).abs() <= exact.abs() * step + size * 2.0**-17).all())


def rotation(T, E):
    angle = torch.rand(T, E // 2, device="cuda", generator=torch.Generator("cuda").manual_seed(T)) * 6
    return angle.cos(), angle.sin()


def poisoned(call):
    """The result of `call`, with memory that the caching allocator will hand out again filled with NaN before."""
    for size in (1 << 14, 1 << 20, 1 << 26):
        torch.full((size,), float("nan"), device="cuda")
    return call()


@pytest.mark.parametrize("add", [False, True], ids=["alone", "dhidden"])
@pytest.mark.parametrize("T", [1, 63, 8192])
@pytest.mark.parametrize("D", [48, 512, 1024, 1040, 2560, 4096, 5120, 8192])
def test_the_gradients_of_the_norm_agree_with_float64_and_repeat(T, D, add):
    x, dy, w = draw(1, T, D, scale=3.0), draw(2, T, D), draw(3, D)
    beside, before = (draw(4, T, D) if add else None), draw(5, D, dtype=torch.float32)
    grads = [before.clone() for _ in range(3)]
    dx, *others = [poisoned(lambda grad=grad: norm_backward.rms_norm_backward(dy, beside, x, w, EPS, grad))
                   for grad in grads]
    assert all(same(dx, other) for other in others) and all(same(grads[0], other) for other in grads[1:])
    exact_grad = before.double()
    exact = norm_ops.rms_norm_backward_reference(dy.double(), beside, x.double(), w.double(), EPS, exact_grad)
    assert close(dx, exact) and close(grads[0], exact_grad)
    for rows in ROWS if T > 131 else ():
        beside_rows = None if beside is None else beside[rows]
        assert same(norm_backward.rms_norm_backward(dy[rows], beside_rows, x[rows], w, EPS, None), dx[rows])


@pytest.mark.parametrize("E", [64, 128])
@pytest.mark.parametrize(("T", "H"), [(1, 1), (63, 17), (4096, 8), (8192, 32)])
def test_the_gradients_of_rotated_heads_agree_with_float64_and_repeat(T, H, E):
    qkv, dy, w, (cos, sin) = draw(1, T, H + 3, E), draw(2, T, H, E), draw(3, E), rotation(T, E)
    x, before = qkv[:, 1 : H + 1], draw(4, E, dtype=torch.float32)
    grads = [before.clone() for _ in range(3)]
    dx, *others = [poisoned(lambda grad=grad: rope_backward.qk_norm_rope_backward(dy, x, w, cos, sin, EPS, grad))
                   for grad in grads]
    assert all(same(dx, other) for other in others) and all(same(grads[0], other) for other in grads[1:])
    exact_grad = before.double()
    exact = norm_ops.qk_norm_rope_backward_reference(dy.double(), x.double(), w.double(), cos.double(), sin.double(),
                                                     EPS, exact_grad)
    assert close(dx, exact) and close(grads[0], exact_grad)
    for rows in ROWS if T > 131 else ():
        part = rope_backward.qk_norm_rope_backward(dy[rows], x[rows], w, cos[rows], sin[rows], EPS, None)
        assert same(part, dx[rows])


@pytest.mark.parametrize("F", [16, 48, 3072, 12288])
def test_the_gradient_of_swiglu_agrees_with_float64(F):
    gate_up, dy = draw(F, 200, 2 * F, scale=4.0), draw(1, 200, F)
    got = swiglu_backward.swiglu_backward(dy, gate_up)
    exact = swiglu_ops.swiglu_backward_reference(dy.double(), gate_up.double())
    assert bool(((got.double() - exact).abs() <= exact.abs() * ONE_ROUNDING + 1e-6).all())
    for rows in ROWS:
        assert same(swiglu_backward.swiglu_backward(dy[rows], gate_up[rows]), got[rows])


@pytest.mark.parametrize(("V", "D"), [(37, 48), (1000, 4096), (151936, 4096)])
def test_embedding_and_its_gradient_have_the_bits_of_the_cpu(V, D):
    first_row, T = 1000, 3000
    generator = torch.Generator("cuda").manual_seed(V)
    rank = torch.rand(T, device="cuda", generator=generator)
    tokens = (rank ** 6 * (V + 20)).long() + first_row - 10  # few tokens many times, many once, some of another rank
    tokens[100:400] = first_row + 5
    table = draw(1, V, D)
    x = embedding.embedding(tokens, table, first_row)
    assert same(x.cpu(), embedding_ops.embedding_cpu(tokens.cpu(), table.cpu(), first_row))
    del table
    dx, grad = draw(2, T, D, scale=100.0), torch.zeros(V, D, device="cuda")
    grad[: min(V, 100)] = draw(3, min(V, 100), D, dtype=torch.float32)
    expected, again = grad.cpu(), grad.clone()
    embedding.embedding_backward(dx, tokens, grad, first_row)
    embedding_ops.embedding_backward_cpu(dx.cpu(), tokens.cpu(), expected, first_row)
    assert same(grad.cpu(), expected)
    half = T // 2  # in two micro-batches, too
    embedding.embedding_backward(dx[:half], tokens[:half].clone(), again, first_row)
    embedding.embedding_backward(dx[half:], tokens[half:].clone(), again, first_row)
    assert same(again, grad)


def test_a_batch_of_one_token_alone_is_added_in_order():
    tokens, dx = torch.full((8192,), 3, device="cuda"), draw(1, 8192, 64, scale=100.0)
    grad = torch.zeros(5, 64, device="cuda")
    embedding.embedding_backward(dx, tokens, grad, 0)
    expected = torch.zeros(5, 64)
    embedding_ops.embedding_backward_cpu(dx.cpu(), tokens.cpu(), expected, 0)
    assert same(grad.cpu(), expected)
    embedding_ops.embedding_backward_cpu(dx.flip(0).cpu(), tokens.cpu(), expected.zero_(), 0)
    assert not same(grad.cpu(), expected)  # the comparison sees another order


@pytest.mark.parametrize("E", [64, 128])
@pytest.mark.parametrize(("T", "H", "G"), [(1, 32, 8), (8, 32, 8), (200, 17, 9), (4096, 4, 1)])
def test_norm_rotation_and_cache_write_in_one_have_the_bits_of_the_steps(T, H, G, E):
    qkv, q_weight, k_weight, (cos, sin) = draw(1, T, H + 2 * G, E), draw(2, E), draw(3, E), rotation(T, E)
    pages, size = T // 16 + 3, 16
    caches = draw(4, 2, pages, size, G, E)
    expected = caches.clone()
    slots = torch.randperm(pages * size, device="cuda")[:T]
    slots[T // 2] = -1
    q = paged_cache.qk_norm_rope_write(qkv, q_weight, k_weight, cos, sin, EPS, caches[0], caches[1], slots)
    plain_q, k = rope.qkv_norm_rope(qkv, H, G, q_weight, k_weight, cos, sin, EPS)
    paged_cache.write_kv(k, qkv[:, H + G :], expected[0], expected[1], slots)
    assert same(q, plain_q) and same(caches, expected)
    written = slots >= 0
    for cache, rows in ((expected[0], k), (expected[1], qkv[:, H + G :])):
        assert same(cache.flatten(0, 1)[slots[written]], rows[written])


def test_a_captured_cache_write_follows_changing_slots_and_rows():
    T, H, G, E = 8, 4, 2, 128
    qkv, q_weight, k_weight, (cos, sin) = draw(1, T, H + 2 * G, E), draw(2, E), draw(3, E), rotation(T, E)
    caches, slots = draw(4, 2, 4, 16, G, E), torch.arange(T, device="cuda")

    def step():
        return paged_cache.qk_norm_rope_write(qkv, q_weight, k_weight, cos, sin, EPS, caches[0], caches[1], slots)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = step()
    for seed in range(5):
        qkv.copy_(draw(seed + 10, *qkv.shape))
        slots.copy_(torch.randperm(64, device="cuda")[:T])
        slots[seed] = -1
        before = caches.clone()
        graph.replay()
        after, replayed = caches.clone(), q.clone()
        caches.copy_(before)
        assert same(step(), replayed) and same(caches, after) and not same(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [16, 2064, 1 << 22])
def test_five_adamw_updates_have_the_bits_of_the_cpu(dtype, n):
    state = [draw(seed, n, dtype=torch.float32) for seed in range(3)]
    state[2].square_()
    state[2][:6] = torch.tensor([0.0, 0.0, 1e-42, 1.0, 3e38, 1e-38])
    cpu = [x.cpu() for x in state]
    weights = [x[0] if dtype == torch.float32 else torch.empty(n, dtype=dtype, device=x[0].device)
               for x in (state, cpu)]
    for step in range(1, 6):
        grad = draw(10 + step, n, dtype=torch.float32)
        grad[:6] = torch.tensor([0.0, 1e-40, -1e-40, 3e38, -1e-20, 1e-30])
        scalars = (0.37, 1e-3, 0.9, 0.999, 1e-8, 0.1, 1 - 0.9**step, 1 - 0.999**step)
        optimizer.adamw(*state, grad, weights[0], *scalars)
        adamw_ops.adamw_cpu(*cpu, grad.cpu(), weights[1], *scalars)
    assert all(same(a.cpu(), b) for a, b in zip([*state, weights[0]], [*cpu, weights[1]], strict=True))


@pytest.mark.parametrize("n", [16, 16384, 12_345_680, (1 << 28) + (1 << 20) + 16])
def test_a_sum_of_squares_agrees_with_float64_and_repeats(n):
    x = draw(n % 1000, n, dtype=torch.float32)
    x *= 1e15
    got = float(optimizer.sum_squares(x))
    assert got == pytest.approx(float(sum(part.double().square().sum() for part in x.split(1 << 24))), rel=1e-12)
    assert all(float(optimizer.sum_squares(x)) == got for _ in range(3))
