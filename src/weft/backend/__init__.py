"""weft and MPI as backends of torch.distributed.

`import weft` registers both, which starts nothing. The first group of a backend imports its module,
`gloo` or `mpi`. `collectives` has the collectives over a wire, `work` the objects that
torch.distributed waits for.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

__all__ = ["MPI", "WEFT", "register"]

WEFT = "weft"
"""The name of the backend with all collectives over a wire of weft's, also sparse and uneven ones,
and messages over gloo."""

MPI = "weft_mpi"
"""The name of the backend with all collectives over MPI. "mpi" is torch's own backend."""


def register() -> None:
    """Register the backends with `torch.distributed`. It may be called more than once."""
    if not dist.is_available():  # a torch built without it
        return
    from .. import _torch  # noqa: F401  # what it does in forked children

    for name, create in ((WEFT, _weft), (MPI, _mpi)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, devices=["cpu"])


def _weft(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    from .gloo import WeftGroup

    return WeftGroup(store, rank, size, timeout)


def _mpi(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    from .mpi import MpiGroup

    return MpiGroup(store, rank, size, timeout)
