"""What the GPU tests launched must be what was gated."""

from __future__ import annotations

import pytest
import torch

from rlk.build.triton_aot import all_variants


@pytest.fixture(scope="session", autouse=True)
def only_gated_kernels_ran():
    """Fails at the end when a launcher made Triton compile a form that no variant names, and so no gate saw.

    Triton compiles a kernel anew for each set of argument properties (a multiple of 16, equal to 1), and each form may
    order its loads and sums in its own way.
    """
    yield
    if not torch.cuda.is_available():
        return
    from rlk.kernels.variants import architecture

    variants = all_variants(architecture())
    gated: dict[tuple, list[tuple]] = {}  # (kernel, constants) -> argument properties
    for variant in variants:
        key = variant.kernel, _plain(variant.constants)
        gated.setdefault(key, []).append((variant.signature, sorted(variant.divisible)))
    strangers = []
    for function, kernel in {variant.function: variant.kernel for variant in variants}.items():
        for source in (compiled.src for cache, *_ in function.device_caches.values() for compiled in cache.values()):
            names = function.arg_names
            constants = {names[path[0]]: value for path, value in source.constants.items()}
            forms = gated.get((kernel, _plain(constants)))
            if forms is None:
                continue  # constants of no table: a test's own configuration
            signature = {name: kind for name, kind in source.signature.items() if kind != "constexpr"}
            divisible = sorted(names[path[0]] for path, attrs in source.attrs.items()
                               if ["tt.divisibility", 16] in [list(attr) for attr in attrs])
            if (signature, divisible) not in forms:
                strangers.append(f"{kernel}: {signature} with {constants}, multiples of 16: {divisible}")
    assert not strangers, "\n".join(["kernels ran that no gate saw:", *strangers])


def _plain(constants: dict) -> tuple:
    return tuple(sorted((name, getattr(value, "value", value)) for name, value in constants.items()))
