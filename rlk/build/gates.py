"""The gates: what each kernel's machine code must be, as data beside the kernels (triton/gates, hipkernels/gpu).

One table per kernel, with a sub-table per configuration that differs:

    [kernel]
    max_vgprs = 128         # VGPRs and AGPRs of a lane
    max_lds = 32768         # bytes of a workgroup
    matrix = "v_mfma_f32_16x16x16_bf16"    # the one matrix instruction there is; without this key there is none
    load_bits = 128         # the widest load from memory, which exists
    narrow_loads = 0        # most loads that are narrower than that: one that the bulk falls back to would show
    system_scope = true     # what crosses GPUs: every scoped load, store and fence has system scope
    [kernel.configuration]
    max_vgprs = 256

No kernel may spill, use scratch, or hold v_mfma_f32_32x32x8 (its sum runs in another order).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rlk.build import KERNELS, SOURCES, fingerprint
from rlk.build.resources import Resources
from rlk.errors import CheckFailed, UsageError

FORBIDDEN_MATRIX = "v_mfma_f32_32x32x8"


@dataclass(frozen=True)
class Failure:
    """One gate that one kernel does not pass."""

    kernel: str
    configuration: str  # "" for a kernel with one
    gate: str
    got: object
    expected: object

    def __str__(self) -> str:
        where = f"kernel {self.kernel}" + (f", configuration {self.configuration}" if self.configuration else "")
        return f"{where}, gate {self.gate}: got {self.got}, expected {self.expected}"


@dataclass(frozen=True)
class Gates:
    """The gates of one kernel in one configuration; the names are the keys of the files."""

    max_vgprs: int
    max_lds: int
    matrix: str = ""
    load_bits: int = 0  # 0: any
    narrow_loads: int = -1  # most loads narrower than load_bits; -1: any
    system_scope: bool = False


@dataclass(frozen=True)
class GateTable:
    """One kernel's section: its gates, and those of the configurations that differ."""

    common: Gates
    configurations: dict[str, Gates]

    def of(self, configuration: str) -> Gates:
        return self.configurations.get(configuration, self.common)


def triton_gates() -> dict[str, GateTable]:
    """The gates of the Triton kernels by kernel, from triton/gates/*.toml."""
    return read_gates(sorted((KERNELS / "gates").glob("*.toml")))


def hip_gates_fingerprint() -> str:
    """SHA-256 over the gates of the HIP kernels."""
    return fingerprint((SOURCES / "gpu").glob("*.toml"), SOURCES)


def hip_gates() -> dict[str, GateTable]:
    """The gates of the HIP kernels by kernel, from hipkernels/gpu/*.toml."""
    return read_gates(sorted((SOURCES / "gpu").glob("*.toml")))


def read_gates(paths: Iterable[Path]) -> dict[str, GateTable]:
    """The tables of all files. Raises UsageError naming file, kernel and key when one is not understood."""
    tables: dict[str, GateTable] = {}
    for path in paths:
        try:
            sections = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path}: {error}") from None
        for kernel, section in sections.items():
            if kernel in tables or not isinstance(section, dict):
                raise UsageError(f"{path}: expected one table per kernel, got {kernel!r} again or outside of a table")
            own = {key: value for key, value in section.items() if not isinstance(value, dict)}
            common = _gates(f"{path}: [{kernel}]", own)
            tables[kernel] = GateTable(common, {
                name: _gates(f"{path}: [{kernel}.{name}]", changed, common)
                for name, changed in section.items() if isinstance(changed, dict)})
    return tables


def _gates(where: str, values: dict, base: Gates | None = None) -> Gates:
    types = {field.name: {"int": int, "str": str, "bool": bool}[field.type] for field in fields(Gates)}
    for key, value in values.items():
        if key not in types or type(value) is not types[key]:
            raise UsageError(f"{where}: {key} = {value!r}, expected one of "
                             + ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items()))
    if base:
        return replace(base, **values)
    if missing := {"max_vgprs", "max_lds"} - values.keys():
        raise UsageError(f"{where}: {', '.join(sorted(missing))} missing; every kernel has a ceiling")
    return Gates(**values)


def check_all(kernels: Iterable[Resources], tables: dict[str, GateTable]) -> list[Failure]:
    """Every kernel against its gates; a kernel without gates fails, and so do gates without a kernel."""
    kernels = list(kernels)
    failures = [failure for kernel in kernels for failure in check_kernel(kernel, tables.get(kernel.kernel))]
    built = {(kernel.kernel, kernel.configuration) for kernel in kernels}
    for name, table in tables.items():
        configurations = {configuration for kernel, configuration in built if kernel == name}
        if not configurations:
            failures.append(Failure(name, "", "section", "gates for a kernel that is not built", "no such section"))
        failures += [Failure(name, stale, "section", "gates for a configuration that is not built", "no such section")
                     for stale in table.configurations.keys() - configurations]
    return failures


def check_kernel(kernel: Resources, table: GateTable | None) -> list[Failure]:
    """The gates that `kernel` does not pass; `table` None: it has no section, which is a failure too."""
    def check(gate: str, ok: bool, got: object, expected: object) -> None:
        if not ok:
            failures.append(Failure(kernel.kernel, kernel.configuration, gate, got, expected))

    failures: list[Failure] = []
    code, matrix, loads = kernel.code, kernel.matrix, kernel.loads
    check("vgpr_spills", code.vgpr_spills == 0, code.vgpr_spills, 0)
    check("sgpr_spills", code.sgpr_spills == 0, code.sgpr_spills, 0)
    check("scratch", code.scratch == 0, f"{code.scratch} bytes", "0 bytes")
    wide = sorted(name for name in matrix if name.startswith(FORBIDDEN_MATRIX))
    check("forbidden matrix", not wide, ", ".join(wide), f"no {FORBIDDEN_MATRIX}")
    if table is None:
        check("section", False, "no gates", f"a table [{kernel.kernel}] in the gates beside the kernel")
        return failures
    gates = table.of(kernel.configuration)
    check("max_vgprs", code.vgprs <= gates.max_vgprs, code.vgprs, f"at most {gates.max_vgprs}")
    check("max_lds", kernel.lds <= gates.max_lds, kernel.lds, f"at most {gates.max_lds}")
    expected = {gates.matrix} if gates.matrix else set()
    check("matrix", matrix.keys() == expected, ", ".join(sorted(matrix)) or "none", gates.matrix or "none")
    if gates.load_bits:
        check("load_bits", max(loads, default=0) == gates.load_bits, max(loads, default=0), gates.load_bits)
    if gates.narrow_loads >= 0:
        narrow = sum(count for bits, count in loads.items() if bits < gates.load_bits)
        check("narrow_loads", narrow <= gates.narrow_loads, narrow, f"at most {gates.narrow_loads}")
    if gates.system_scope:
        for got, wanted in _scope_errors([text for _, text in code.instructions]):
            check("system_scope", False, got, wanted)
    return failures


def _scope_errors(instructions: list[str]) -> list[tuple[str, str]]:
    """What is not of system scope: (got, expected) each.

    LLVM's memory model for gfx942: sc0 sc1 on a load, a store, buffer_wbl2 (write back: release) and buffer_inv
    (invalidate: acquire) is system scope; sc1 alone is this GPU and sc0 alone the workgroup. On an atomic that reads
    and writes, sc1 is system scope and sc0 asks for the old value.
    """
    errors, seen = [], set()
    for text in instructions:
        words = text.split()
        kind = next((kind for kind in ("buffer_wbl2", "buffer_inv", "_atomic_", "_load_", "_store_")
                     if kind in words[0] and words[0].startswith(("global_", "buffer_", "flat_"))), None)
        bits = {"sc0", "sc1"} & set(words)
        if kind == "_atomic_":
            if "sc1" not in bits:
                errors.append((text, "sc1 on an atomic"))
        elif kind and bits:
            seen.add(kind)
            if len(bits) == 1:
                errors.append((text, "sc0 sc1"))
    return errors + [(f"no {kind.strip('_')} of system scope", f"{kind.strip('_')} sc0 sc1")
                     for kind in ("buffer_wbl2", "buffer_inv", "_load_", "_store_") if kind not in seen]


def require(failures: Iterable[Failure]) -> None:
    """Raises CheckFailed with one line per failure, if there is one."""
    if lines := [str(failure) for failure in failures]:
        raise CheckFailed(f"{len(lines)} of the kernels' gates failed:\n" + "\n".join(lines))
