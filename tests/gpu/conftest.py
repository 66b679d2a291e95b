"""What the GPU tests launched must be what was gated, and all of it."""

from __future__ import annotations

import os
from pathlib import Path

# Before CUDA starts: ranks on one GPU are streams that wait for each other, each in a hardware queue of its own.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("GPU_MAX_HW_QUEUES", "16")

import pytest
import torch

from rlk.build.triton_aot import all_variants
from rlk.kernels.variants import architecture


@pytest.fixture(scope="session", autouse=True)
def the_gated_kernels_ran_and_no_others(request):
    """Fails at the end when a launcher made Triton compile a form that no variant names, and so no gate saw; and, if
    all tests of this folder have run, when a configuration that the dispatch can choose was never launched.

    Triton compiles a kernel anew for each set of argument properties (a multiple of 16, equal to 1), and each form may
    order its loads and sums in its own way.
    """
    yield
    if not torch.cuda.is_available():
        return
    strangers, left_out = [], set()
    for variant, *others in _by_function(all_variants(architecture())):
        left_out.update(each.label for each in (variant, *others))
        for cache, *_ in variant.function.device_caches.values():
            for compiled in cache.values():
                form = _form(compiled.src, variant.function.arg_names)
                left_out.difference_update(each.label for each in (variant, *others) if form == _gated_form(each)
                                           and _has_options(compiled.metadata, each.options))
                # A test's own configuration has constants that are in no table: it is not the dispatch's.
                same = [each for each in (variant, *others) if each.constants.items() <= form["constants"].items()]
                if same and form not in map(_gated_form, same):
                    strangers.append(f"{variant.kernel}: {form}")
    assert not strangers, "\n".join(["kernels ran that no gate saw:", *strangers])
    if folder := os.environ.get("RLK_UNLAUNCHED"):  # of several processes, bench/gpu_tests.py puts these together
        (Path(folder) / f"{os.getpid()}.unlaunched").write_text("\n".join(left_out))
    # On gfx942 some forms are for keys of 2 GiB and more.
    assert not left_out or not _all_ran(request.session) or torch.version.hip, (
        f"configurations that no test launched: {', '.join(sorted(left_out))}; give each a case")


def _all_ran(session) -> bool:
    """Have all test files of this folder run, whole and without a failure?"""
    config = session.config
    narrowed = config.option.keyword or config.option.markexpr or any("::" in arg for arg in config.args)
    ran = {item.path for item in session.items}
    return not narrowed and not session.testsfailed and ran >= set(Path(__file__).parent.glob("test_*.py"))


def _has_options(metadata, options: dict) -> bool:
    return all(getattr(metadata, name) == value for name, value in options.items())


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
