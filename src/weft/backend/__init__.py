"""weft and MPI as backends of torch.distributed.

`import weft` registers both, which starts nothing: their groups live in `gloo` and `mpi` and are
loaded with the first group. `collectives` has what runs over a wire, `work` what
torch.distributed waits for.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

__all__ = ["MPI", "WEFT", "register"]

WEFT = "weft"
"""All collectives over a wire of weft's, sparse and uneven ones too; messages over gloo."""

MPI = "weft_mpi"
"""All collectives over MPI. Not "mpi": init_process_group has that name for its own, built in."""


def register() -> None:
    """Make the backends known to `torch.distributed.init_process_group`. Twice is fine."""
    if not dist.is_available():  # a torch built without it
        return
    for name, create in ((WEFT, _weft), (MPI, _mpi)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, devices=["cpu"])


def _weft(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    from .gloo import WeftGroup

    return WeftGroup(store, rank, size, timeout)


def _mpi(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    from .mpi import MpiGroup

    return MpiGroup(store, rank, size, timeout)
