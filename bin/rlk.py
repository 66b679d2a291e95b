#!/usr/bin/env python3
"""The SPMD entry script: `torchrun --nproc-per-node N bin/rlk.py [run ...]`, one process per rank."""

import sys
from pathlib import Path


def main() -> int:
    # The checkout instead of bin/, where `import rlk` would find this file.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from rlk.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
