"""`python -m rlk.build [TARGET ...]`: cpu (the default), host, hip, cuda, triton, report.

`python -m rlk.build fingerprint [TARGET]` prints the fingerprint of the sources of cpu, host, gfx942, sm_90a or gpu.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rlk.build import FLAGS, source_fingerprint
from rlk.build.cpu import build_cpu
from rlk.errors import CheckFailed, UsageError


def cpu() -> None:
    print(build_cpu(verbose=True))


def host() -> None:
    from rlk.build.host_fibers import WAVES, build_host

    for wave in WAVES:
        print(build_host(wave, verbose=True))


def hip() -> None:
    from rlk.build.hip import build_hip

    built = build_hip(verbose=True)
    print(f"{built.library}: {len(built.code_objects)} code objects beside it, gates passed ({built.compiler})")


def cuda() -> None:
    from rlk.build.cuda import build_cuda

    print(build_cuda(verbose=True))


def triton() -> None:
    from rlk.build.triton_aot import TARGETS
    from rlk.build.triton_build import make_triton

    for arch in TARGETS:
        start = time.monotonic()
        checked = "gates passed" if arch == "gfx942" else "options checked"
        print(f"{make_triton(arch)}: {checked} ({time.monotonic() - start:.0f} s)")


def report() -> None:
    from rlk.build.report import write_report

    print(write_report())


def print_fingerprint(target: str = "cpu") -> int:
    known = [*FLAGS, "gpu"]
    if target not in known:
        print(f"error: no sources of {target!r}; expected one of {', '.join(known)}", file=sys.stderr)
        return UsageError.exit_status
    print(source_fingerprint(target))
    return 0


TARGETS: dict[str, Callable[[], None]] = {each.__name__: each for each in (cpu, host, hip, cuda, triton, report)}


def main(arguments: list[str]) -> int:
    """Build each target named; returns the exit status."""
    if arguments[:1] == ["fingerprint"]:
        return print_fingerprint(*arguments[1:])
    try:
        for name in arguments or ["cpu"]:
            if name not in TARGETS:
                raise UsageError(f"no target {name!r}; expected one of {', '.join(TARGETS)}")
            TARGETS[name]()
    except (UsageError, CheckFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
