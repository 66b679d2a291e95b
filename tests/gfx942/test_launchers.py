"""The launchers of the row kernels, GEMM and log-prob, without a GPU: what they launch is a gated variant, given the
arguments that it was compiled for; on gfx942 the emulator then runs it on the tensors."""

import numpy as np
import pytest
import torch

from rlk.kernels import gemm, gemm_reduce, logprob, norm, rope, swiglu
from rlk.ops import norm as norm_ops
from rlk.ops import swiglu as swiglu_ops
from tests.gfx942.emulator import Device
from tests.gfx942.triton_runs import run_variant

MODULES = (gemm, gemm_reduce, logprob, norm, rope, swiglu)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32",
         torch.int64: "*i64"}
EPS = 1e-6


class Kernel:
    """Stands for a jitted function: kernel[grid](...) finds the variant, and `execute`s it."""

    def __init__(self, function, variants, execute, launched):
        self.function, self.variants, self.execute, self.launched = function, variants, execute, launched

    def __getitem__(self, grid):
        return lambda *args, **named: self._launch(grid, dict(zip(self.function.arg_names, args, strict=False)) | named)

    def _launch(self, grid, given):
        values = {name: given.pop(name) for name in self.variants[0].signature}
        kinds = {name: TYPES[value.dtype] for name, value in values.items() if isinstance(value, torch.Tensor)}
        (variant,) = [v for v in self.variants if v.constants | v.options == given
                      and kinds == {name: kind for name, kind in v.signature.items() if kind.startswith("*")}]
        for name in variant.divisible:
            value = values[name]
            assert (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0, name
        self.launched.append(variant.label)
        if self.execute:
            self.execute(variant, grid, values)


def memory_of(tensor):
    """The tensor's memory from its first element on, as a numpy array that shares it."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), tensor.storage_offset(), (
        tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset(),))
    return (flat.view(torch.int16) if tensor.dtype == torch.bfloat16 else flat).numpy()


def emulate(variant, grid, values):
    memory = {name: memory_of(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
    arrays = {name: array.view(np.uint16) if array.dtype == np.int16 else array for name, array in memory.items()}
    before = {name: array.tobytes() for name, array in arrays.items()}
    after = run_variant(Device(), variant, grid, values | arrays)
    for name, array in arrays.items():  # two names may share one tensor: only what was written goes back
        if after[name].tobytes() != before[name]:
            array[:] = after[name]


def stand_in(monkeypatch, modules, variants, arch, execute):
    """Puts a `Kernel` in the place of each of these variants' functions; returns the labels of what is launched."""
    labels = []
    for module in modules:
        monkeypatch.setattr(module, "architecture", lambda: arch)
        monkeypatch.setattr(module, "check_tensor", lambda *_, **__: None)
    for function in {id(v.function): v.function for v in variants}.values():
        own = [variant for variant in variants if variant.function is function]
        kernel = Kernel(function, own, emulate if execute else None, labels)
        for module in modules:
            for name, value in vars(module).items():
                if value is function:
                    monkeypatch.setattr(module, name, kernel)
    return labels


@pytest.fixture
def launched(monkeypatch, request):
    """Labels of what the launchers launched. The parameter: the architecture, and whether the emulator runs it."""
    arch, execute = request.param
    every = [variant for module in MODULES for variant in module.variants(arch) if module is not gemm_reduce]
    return stand_in(monkeypatch, MODULES, every, arch, execute)


recorded = pytest.mark.parametrize("launched", [("gfx942", False), ("sm_90", False)], indirect=True,
                                   ids=["gfx942", "sm_90"])
executed = pytest.mark.parametrize("launched", [("gfx942", True)], indirect=True, ids=["gfx942"])


def draw(seed, *shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(got, exact):
    return torch.allclose(got.double(), exact.double(), rtol=2.0**-7, atol=2.0**-9)


@executed
@pytest.mark.parametrize("leaves", [1, 2])
@pytest.mark.parametrize(("M", "K"), [(3, 1088), (3, 64), (70, 1056), (70, 128)])
def test_linear_gives_the_product_in_both_dtypes_and_with_each_epilogue(launched, M, K, leaves):
    x, w, residual = draw(1, M, K), draw(2, 96, K), draw(3, M, 96)
    exact = x.double() @ w.double().T
    total = gemm.linear(x, w, leaves, torch.float32)
    assert torch.allclose(total.double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(gemm.linear(x, w, leaves), total.to(torch.bfloat16))
    assert torch.equal(gemm.linear(x, w, leaves, residual_MN=residual), (residual + total).to(torch.bfloat16))
    if leaves == 1:
        assert torch.equal(gemm.linear(x, w, swiglu=True), swiglu.swiglu(gemm.linear(x, w)))


@recorded
def test_every_variant_of_the_gemm_is_launched_by_some_product_and_no_other(launched, request):
    arch, _ = request.node.callspec.params["launched"]
    shapes = {(M, N, K * leaves, leaves) for M in (1, 9, 17, 33, 65, 600) for N in (32, 1536, 6144, 10240, 24576)
              for leaves in gemm.LEAVES for K in (48, 1024, 4096)}
    for M, N, K, leaves in shapes:
        x, w = torch.empty(M, K, dtype=torch.bfloat16), torch.empty(N, K, dtype=torch.bfloat16)
        for options in ({}, {"out_dtype": torch.float32}, {"residual_MN": torch.empty(M, N, dtype=torch.bfloat16)},
                        *([{"swiglu": True}] if leaves == 1 else [])):
            gemm.linear(x, w, leaves, **options)
    assert set(launched) == {variant.label for variant in gemm.variants(arch)}


@executed
def test_norms_agree_with_the_reference(launched):
    x, w, partial = draw(1, 3, 1040), draw(2, 1040), draw(3, 3, 1040, dtype=torch.float32)
    assert close(norm.rms_norm(x, w, EPS), norm_ops.rms_norm_reference(x.double(), w.double(), EPS))
    hidden, y = norm.add_rms_norm(partial, x, w, EPS)
    assert torch.equal(hidden, norm_ops.residual_add_reference(partial, x))
    assert torch.equal(hidden, norm.residual_add(partial, x)) and torch.equal(y, norm.rms_norm(hidden, w, EPS))


@executed
@pytest.mark.parametrize("E", [64, 128])
def test_rotary_heads_of_the_fused_qkv_agree_with_the_reference(launched, E):
    qkv, q_weight, k_weight = draw(1, 3, 14, E), draw(2, E), draw(3, E)
    angle = torch.rand(3, E // 2, generator=torch.Generator().manual_seed(4)) * 6
    cos, sin = angle.cos(), angle.sin()
    q, k = rope.qkv_norm_rope(qkv, 9, 3, q_weight, k_weight, cos, sin, EPS)
    for got, heads, weight in ((q, qkv[:, :9], q_weight), (k, qkv[:, 9:12], k_weight)):
        assert torch.equal(rope.qk_norm_rope(heads, weight, cos, sin, EPS), got)  # a view with the qkv's stride
        assert close(got, norm_ops.qk_norm_rope_reference(heads.double(), weight.double(), cos.double(), sin.double(),
                                                          EPS))


@executed
def test_swiglu_agrees_with_the_reference(launched):
    gate_up = draw(1, 3, 96)
    assert close(swiglu.swiglu(gate_up), swiglu_ops.swiglu_reference(gate_up.double()))


@executed
def test_scores_and_gradient_agree_with_torch(launched):
    logits, valid, inv_t = draw(1, 2, 64 * 12, dtype=torch.float32, scale=4.0), 700, 1 / 0.7
    targets, grad = torch.tensor([3, 699]), draw(2, 2, dtype=torch.float32)
    stats = [logprob.tile_stats(logits[:, part].contiguous(), 32, part.start, valid, inv_t)
             for part in (slice(0, 384), slice(384, 768))]  # of two ranks
    picked = logits.gather(1, targets[:, None])[:, 0]
    got, entropy, lse = logprob.merge_tiles(torch.cat(stats, 1), picked, inv_t)
    leaf = logits.double().requires_grad_()
    distribution = torch.distributions.Categorical(logits=leaf[:, :valid] * inv_t)
    assert torch.allclose(got.double(), distribution.log_prob(targets), atol=1e-5)
    assert torch.allclose(entropy.double(), distribution.entropy(), atol=1e-5)
    (exact,) = torch.autograd.grad(distribution.log_prob(targets), leaf, grad.double())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-8)):
        dlogits = torch.full_like(logits, float("nan"), dtype=dtype)
        logprob.tile_stats_backward(logits, targets, lse, grad, 0, valid, inv_t, dlogits)
        alone = dlogits[1:].clone().fill_(torch.nan)
        logprob.tile_stats_backward(logits[1:], targets[1:], lse[1:], grad[1:], 0, valid, inv_t, alone)
        assert torch.equal(alone, dlogits[1:])
        assert torch.allclose(dlogits.double(), exact, rtol=tolerance, atol=1e-6)


def test_tensors_that_a_kernel_was_not_compiled_for_are_refused():
    with pytest.raises(ValueError, match="x on cpu, expected a GPU; on the CPU use rlk.ops"):
        norm.rms_norm(draw(1, 2, 64), draw(2, 64), EPS)
    with pytest.raises(ValueError, match="N = 40, expected a positive multiple of 16; pad it"):
        gemm.linear(draw(1, 2, 64), draw(2, 40, 64))
    with pytest.raises(ValueError, match="3 leaves for K = 96"):
        gemm.linear(draw(1, 2, 96), draw(2, 48, 96), 3)
    with pytest.raises(ValueError, match="130 logits a row do not split into 64 equal tiles"):
        logprob.tile_stats(draw(1, 2, 130, dtype=torch.float32), 64, 0, 130, 1.0)
