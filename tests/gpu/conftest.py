"""What the GPU tests launched must be what was gated."""

from __future__ import annotations

import os

# Before CUDA starts: ranks on one GPU are streams that wait for each other, each in a hardware queue of its own.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("GPU_MAX_HW_QUEUES", "16")

import pytest
import torch

from rlk.build.triton_aot import all_variants
from rlk.kernels.variants import architecture


@pytest.fixture(scope="session", autouse=True)
def only_gated_kernels_ran():
    """Fails at the end when a launcher made Triton compile a form that no variant names, and so no gate saw.

    Triton compiles a kernel anew for each set of argument properties (a multiple of 16, equal to 1), and each form may
    order its loads and sums in its own way.
    """
    yield
    if not torch.cuda.is_available():
        return
    strangers = []
    for variant, *others in _by_function(all_variants(architecture())):
        for cache, *_ in variant.function.device_caches.values():
            for compiled in cache.values():
                form = _form(compiled.src, variant.function.arg_names)
                # A test's own configuration has constants that are in no table: it is not the dispatch's.
                same = [each for each in (variant, *others) if each.constants.items() <= form["constants"].items()]
                if same and form not in map(_gated_form, same):
                    strangers.append(f"{variant.kernel}: {form}")
    assert not strangers, "\n".join(["kernels ran that no gate saw:", *strangers])


def _by_function(variants) -> list[list]:
    groups: dict = {}
    for variant in variants:
        groups.setdefault(variant.function, []).append(variant)
    return list(groups.values())


def _gated_form(variant) -> dict:
    return {"constants": variant.constants, "signature": variant.signature, "divisible": sorted(variant.divisible),
            "small": sorted(variant.small) if architecture() == "gfx942" else []}


def _form(source, names) -> dict:
    """What Triton compiled for: an integer that was 1 is among the constants."""
    marked = {attribute: sorted(names[path[0]] for path, attrs in source.attrs.items()
                                if attribute in (attr[0] for attr in attrs))
              for attribute in ("tt.divisibility", "tt.pointer_range")}
    return {"constants": {names[path[0]]: getattr(value, "value", value) for path, value in source.constants.items()},
            "signature": {name: kind for name, kind in source.signature.items() if kind != "constexpr"},
            "divisible": marked["tt.divisibility"], "small": marked["tt.pointer_range"]}
