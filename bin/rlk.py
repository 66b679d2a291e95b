#!/usr/bin/env python3
"""The SPMD entry script: `torchrun --nproc-per-node N bin/rlk.py [run ...]`, one process per rank."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not bin/: `import rlk` must not find this file

from rlk.cli import main

if __name__ == "__main__":
    sys.exit(main())
