"""The gate on compiler options: each must show an effect, for Triton ignores unknown ones without a word."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlk.build.gates import Failure
from rlk.build.triton_aot import TARGETS, compile_variant, unheard

if TYPE_CHECKING:
    from rlk.kernels.variants import Variant

# The contract wants these in every kernel, also where this compiler finds nothing to fuse.
REQUIRED = {"enable_fp_fusion": False}


def variants_without(variant: Variant, arch: str) -> dict[str, Variant]:
    """For each option that must change the machine code: `variant` without it."""
    defaults = default_options(arch)
    return {
        name: dataclasses.replace(variant, name=f"{variant.name}.without-{name}",
                                  options={key: other for key, other in variant.options.items() if key != name})
        for name, value in variant.options.items()
        if name in defaults and name not in REQUIRED and value != defaults[name]
    }


def default_options(arch: str) -> dict[str, Any]:
    """Every option that Triton's compiler for `arch` knows, with its default."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    return vars(make_backend(GPUTarget(*TARGETS[arch])).parse_options({}))


def check_options(variants: Iterable[Variant], arch: str) -> list[Failure]:
    """Failures of options that the compiler does not know, does not record, or that change nothing.

    Compiles what is not compiled yet: each variant, and once more without each option that is not the default.
    """
    failures = []
    for variant in variants:
        def fail(gate: str, got: object, expected: object, variant: Variant = variant) -> None:
            failures.append(Failure(variant.kernel, variant.name, gate, got, expected))

        compiled = compile_variant(variant, arch)
        for name, value in variant.options.items():
            recorded = getattr(compiled.metadata, name, "no such option")
            if recorded != value:
                fail(f"option {name}", recorded, value)
        for name, value in REQUIRED.items():
            if variant.options.get(name) != value:
                fail(f"option {name}", variant.options.get(name, "the default"), value)
        for name, without in variants_without(variant, arch).items():
            if compiles_alike(without, compiled.asm, arch):
                fail(f"option {name}", f"the same machine code with {variant.options[name]!r} and without it",
                     "a difference, or no such option in the configuration")
    return failures


def compiles_alike(variant: Variant, asm: str, arch: str) -> bool:
    """Does `variant` compile to this assembly? A variant that does not compile at all is another one."""
    try:
        with unheard():
            return compile_variant(variant, arch).asm == asm
    except RuntimeError:  # what Triton raises when a pass fails
        return False
