"""The default group of torch.distributed over MPI, for processes that mpirun started."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ..wire import mpi
from ..wire.interface import own_address
from . import store as stores

__all__ = ["start_group"]

_BACKEND = "weft_mpi"  # registered by weft.backend


def start_group(timeout: float) -> None:
    """Start MPI and set up the default group among all processes of mpirun; collective.

    Rank 0 hosts the store where groups are made, on a port that the system chose, and tells the
    others over MPI where.

    Raises:
        WeftError: MPI cannot be had.
        WireError: not all ranks came within `timeout` seconds.
    """
    world = mpi.start(timeout)
    limit = timedelta(seconds=timeout)
    store: dist.Store
    if world.size == 1:
        store = dist.HashStore()
    elif world.rank == 0:
        address = own_address(dist.HashStore())
        store, port = stores.host(address)
        world.broadcast(f"{address}:{port}", timeout)
    else:
        store = stores.join(world.broadcast("", timeout), timeout)
    dist.init_process_group(
        _BACKEND, store=store, rank=world.rank, world_size=world.size, timeout=limit
    )
