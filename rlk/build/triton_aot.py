"""Compiles the Triton kernels ahead of time, in every configuration that the dispatch can choose.

No GPU is needed: gfx942 gives .hsaco code objects, sm_90 gives .cubin, both under build/<architecture>/triton/. A file
is kept by its content: the kernel and all it calls, the variant, the architecture and Triton's version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from rlk.build import BUILD, KERNELS, contract_constants, fingerprint, triton_version

if TYPE_CHECKING:
    from rlk.kernels.variants import Variant

MODULES = (  # of rlk.kernels; each has variants(arch)
    "gemm", "gemm_backward", "norm", "rope", "swiglu", "logprob", "attention", "attention_backward", "norm_backward",
    "rope_backward", "swiglu_backward", "embedding", "paged_cache", "optimizer",
)
TARGETS = {"gfx942": ("hip", "gfx942", 64), "sm_90": ("cuda", 90, 32)}  # architecture -> arguments of a GPUTarget
BINARY = {"gfx942": "hsaco", "sm_90": "cubin"}
ASSEMBLY = {"gfx942": "amdgcn", "sm_90": "ptx"}


@dataclass(frozen=True)
class CompiledVariant:
    """One compiled kernel: `path` is the code object, `asm` the assembly text, `metadata` what Triton recorded
    (metadata.name, .shared: dynamic LDS bytes, .num_warps, every option)."""

    path: Path
    asm: str
    metadata: SimpleNamespace


def all_variants(arch: str) -> list[Variant]:
    """Every variant of every kernel for "gfx942" or "sm_90", in the order of MODULES."""
    return [variant for name in MODULES for variant in importlib.import_module(f"rlk.kernels.{name}").variants(arch)]


def compile_variant(variant: Variant, arch: str) -> CompiledVariant:
    """The compiled kernel, from build/<arch>/triton/ if it is there. Triton's own errors pass through."""
    path = artifact(variant, arch)
    described, assembly = path.with_suffix(".json"), path.with_suffix("." + ASSEMBLY[arch])
    if not described.exists():
        _compile(variant, arch, path)
    return CompiledVariant(path, assembly.read_text(), SimpleNamespace(**json.loads(described.read_text())))


def artifact(variant: Variant, arch: str) -> Path:
    """Where the code object of `variant` lies or will lie."""
    content = json.dumps([triton_version(), arch, _source(variant).hash(), variant.options],
                         sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    return BUILD / arch / "triton" / variant.kernel / f"{variant.name}-{key}.{BINARY[arch]}"


def compile_all(arch: str, also: Callable[[Variant, str], dict[str, Variant]]) -> list[Variant]:
    """Compile every variant for `arch`, and what `also` derives from each, in as many processes as there are cores.

    Returns all_variants(arch). Variants compiled before cost nothing.
    """
    variants = all_variants(arch)
    labels = Counter(variant.label for variant in variants)
    if twice := [label for label, count in labels.items() if count > 1]:
        raise ValueError(f"two variants of one name: {', '.join(twice)}; expected names unique within a kernel")
    jobs = [(number, name) for number, variant in enumerate(variants)
            for name, each in {"": variant, **also(variant, arch)}.items() if not is_compiled(each, arch)]
    if len(jobs) < 2:  # a process takes longer to start than most kernels to compile
        for job in jobs:
            _compile_job(arch, also, *job)
        return variants
    # Spawned: a forked child of a process with LLVM's threads may hang.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_compile_job, arch, also, *job) for job in jobs]:
            done.result()
    return variants


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Drop what LLVM prints on this process's standard error: a form that need not compile says enough by failing."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def is_compiled(variant: Variant, arch: str) -> bool:
    return artifact(variant, arch).with_suffix(".json").exists()


def sources_fingerprint() -> str:
    """SHA-256 over the Triton sources and the contract's constants, their gates, what checks them, Triton's version."""
    own = Path(__file__).parent
    return fingerprint([*KERNELS.glob("*.py"), *KERNELS.glob("gates/*.toml")], KERNELS,
                       fingerprint(own.glob("*.py"), own), contract_constants(), triton_version())


@functools.cache
def _variants(arch: str) -> list[Variant]:
    return all_variants(arch)


def _compile_job(arch: str, also: Callable[[Variant, str], dict[str, Variant]], number: int, name: str) -> None:
    """In a worker: variant `number`, or the one that `also` derives from it under `name`."""
    variant = _variants(arch)[number]
    if not name:
        compile_variant(variant, arch)
        return
    with contextlib.suppress(RuntimeError), unheard():  # one that does not compile shows so when it is compared
        compile_variant(also(variant, arch)[name], arch)


def _source(variant: Variant):
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = variant.function.arg_names
    declared = variant.signature.keys() | variant.constants.keys()
    if declared != set(names):
        raise ValueError(f"{variant.label}: the signature and constants name {sorted(declared)}, expected the kernel's "
                         f"arguments {sorted(names)}")
    attrs: dict[tuple[int], list] = {}
    for marked, attr in ((variant.divisible, ["tt.divisibility", 16]), (variant.small, ["tt.pointer_range", 32])):
        for name in marked:
            attrs.setdefault((names.index(name),), []).append(attr)
    return (GluonASTSource if variant.function.is_gluon() else ASTSource)(
        fn=variant.function,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs=attrs,
    )


def _compile(variant: Variant, arch: str, path: Path) -> None:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    # One cache is enough, and it is ours: it lies in the checkout and is keyed by content.
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope():
        knobs.cache.dir = cache
        kernel = triton.compile(_source(variant), target=GPUTarget(*TARGETS[arch]), options=dict(variant.options))
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {
        BINARY[arch]: kernel.asm[BINARY[arch]],
        ASSEMBLY[arch]: kernel.asm[ASSEMBLY[arch]].encode(),
        "json": json.dumps(kernel.metadata._asdict(), default=vars, indent=1).encode(),
    }
    for suffix, data in written.items():  # the description last: it says that the others are there
        partial = path.with_suffix(f".{suffix}.{os.getpid()}")
        partial.write_bytes(data)
        partial.replace(path.with_suffix(f".{suffix}"))
