"""What the launchers of row gradients, tables and optimizer launch, on either architecture: every gated variant of
their kernels, given the arguments that it was compiled for, and no other."""

import pytest
import torch

from rlk.kernels import (
    embedding,
    norm_backward,
    operands,
    optimizer,
    paged_cache,
    rope,
    rope_backward,
    swiglu_backward,
)
from tests.gfx942.test_launchers import stand_in

MODULES = (embedding, norm_backward, optimizer, paged_cache, rope_backward, swiglu_backward)
EPS = 1e-6


@pytest.fixture(params=["gfx942", "sm_90"])
def launched(monkeypatch, request):
    """(The labels of what is launched, those of all variants.)"""
    variants = [variant for module in MODULES for variant in module.variants(request.param)]
    monkeypatch.setattr(rope, "architecture", lambda: request.param)
    labels = stand_in(monkeypatch, MODULES, variants, request.param, execute=False)
    return labels, {variant.label for variant in variants}


def bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def test_every_variant_is_launched_by_some_shape_and_no_other(launched):
    labels, expected = launched
    for D in (48, 512, 1024, 2048, 2560, 4096, 5120, 8192):
        for T in (1, 17):
            for beside in (None, bf16(T, D)):
                norm_backward.rms_norm_backward(bf16(T, D), beside, bf16(T, D), bf16(D), EPS, torch.empty(D))
    for E in (64, 128):
        for T, H in ((1, 1), (1, 16), (16, 1), (33, 9)):
            angles = torch.empty(T, E // 2)
            rope_backward.qk_norm_rope_backward(bf16(T, H, E), bf16(T, H, E), bf16(E), angles, angles, EPS,
                                                torch.empty(E))
            pages, slots = bf16(1, 1, H, E), torch.zeros(T, dtype=torch.int64)
            paged_cache.write_kv(bf16(T, H, E), bf16(T, H, E), pages, pages, slots)
            paged_cache.qk_norm_rope_write(bf16(T, 3 * H, E), bf16(E), bf16(E), angles, angles, EPS, pages, pages,
                                           slots)
    for T in (1, 16):
        tokens = torch.zeros(T, dtype=torch.int64)
        swiglu_backward.swiglu_backward(bf16(T, 1040), bf16(T, 2080))
        for V, first_row in ((1, 1), (16, 0), (37, 16)):
            embedding.embedding(tokens, bf16(V, 528), first_row)
            embedding.embedding_backward(bf16(T, 528), tokens, torch.empty(V, 528), first_row)
    for n in (16, 1040, 40000):
        flat = torch.empty(n)
        optimizer.sum_squares(flat)
        for weight in (flat, bf16(n)):
            optimizer.adamw(flat, flat, flat, flat, weight, *[1.0] * 8)
    assert set(labels) == expected


def test_only_a_part_may_be_as_long_as_a_launch_reaches(launched, monkeypatch):
    labels, _ = launched
    monkeypatch.setattr(optimizer, "MOST_ELEMENTS", 32768)
    flat = torch.empty(40000)
    optimizer.sum_squares(flat)
    optimizer.adamw(flat, flat, flat, flat, flat, *[0.5] * 8)
    assert [label.split("/")[0] for label in labels] == ["sum_squares"] * 2 + ["sum_squares_total"] + ["adamw"] * 2


@pytest.mark.parametrize("name, launch", [
    ("x", lambda rows, far, w, angles, pages, slots: rope.qk_norm_rope(far, w, angles, angles, EPS)),
    ("x", lambda rows, far, w, angles, pages, slots: rope_backward.qk_norm_rope_backward(
        rows, far, w, angles, angles, EPS, None)),
    ("k", lambda rows, far, w, angles, pages, slots: paged_cache.write_kv(far, rows, pages, pages, slots)),
    ("v", lambda rows, far, w, angles, pages, slots: paged_cache.write_kv(rows, far, pages, pages, slots)),
    ("qkv", lambda rows, far, w, angles, pages, slots: paged_cache.qk_norm_rope_write(
        far, w, w, angles, angles, EPS, pages[:, :, :1], pages[:, :, :1], slots)),
])
def test_rows_whose_offsets_exceed_32_bits_are_refused(monkeypatch, name, launch):
    modules = (*MODULES, rope)
    labels = stand_in(monkeypatch, modules, [v for module in modules for v in module.variants("gfx942")], "gfx942",
                      execute=False)
    T, H, E = 4, 3, 64
    angles, slots = torch.empty(T, E // 2), torch.zeros(T, dtype=torch.int64)
    others = bf16(E), angles, bf16(1, 1, H, E), slots
    far = bf16(T, 8 * H, E)[:, :H]
    launch(bf16(T, H, E), far, *others)
    assert labels.pop(0) and not labels
    monkeypatch.setattr(operands, "MOST_BYTES", far.stride(0) * T * 2)
    with pytest.raises(ValueError, match=f"got 4 rows of {name} that lie 1536 elements apart.*make it contiguous"):
        launch(bf16(T, H, E), far, *others)
    launch(bf16(T, H, E), far.contiguous(), *others)
    assert len(labels) == 1
