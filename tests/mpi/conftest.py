"""A gloo group over the ranks that mpirun started."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def world_group():
    """The process group of all ranks; torch.distributed meets through a file whose name MPI hands round."""
    mpi = pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    rank, world = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    with tempfile.TemporaryDirectory(prefix="rlk-mpi-") as folder:
        rendezvous = mpi.COMM_WORLD.bcast(f"{folder}/rendezvous")
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world,
                                timeout=timedelta(seconds=120))
        yield dist.group.WORLD
        mpi.COMM_WORLD.Barrier()
        dist.destroy_process_group()
