"""The Triton kernels: rlk.kernels.gemm is triton/gemm.py of the checkout.

triton/ has no __init__.py, so that it can never stand before the real triton package on the import path. When
installed, that folder is this package (pyproject.toml maps it) and this file is not there.
"""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[2] / "triton"))
