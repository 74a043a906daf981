"""weft: sparse and partitioned collectives for PyTorch.

Importing weft starts nothing: no thread, no socket, no compiler.
"""

import typing as _typing

from . import backend as _backend
from . import kernels, sparse
from .bootstrap.init import init, shutdown
from .comm import (
    all_reduce,
    all_to_all,
    barrier,
    clip_grad_norm_,
    exchange,
    overlap_grads,
    sync_grads,
    sync_params,
)
from .errors import Error, StillRunning, WeftError, WireError
from .rows import Rows
from .sparse import (
    algorithm,
    explain,
    sparse_all_gather,
    sparse_all_reduce,
    sparse_broadcast,
    sparse_reduce,
    sparse_reduce_scatter,
)
from .wire.base import Wire

if _typing.TYPE_CHECKING:
    from . import ddp, nn
    from .nn.partition import Partition

__version__ = "0.1.0"

__all__ = [
    "Error",
    "Partition",
    "Rows",
    "StillRunning",
    "WeftError",
    "Wire",
    "WireError",
    "algorithm",
    "all_reduce",
    "all_to_all",
    "barrier",
    "clip_grad_norm_",
    "ddp",
    "exchange",
    "explain",
    "init",
    "kernels",
    "nn",
    "overlap_grads",
    "shutdown",
    "sparse",
    "sparse_all_gather",
    "sparse_all_reduce",
    "sparse_broadcast",
    "sparse_reduce",
    "sparse_reduce_scatter",
    "sync_grads",
    "sync_params",
]

_backend.register()  # names for torch.distributed.init_process_group, and nothing more


def __getattr__(name: str) -> _typing.Any:
    if name in ("ddp", "nn"):  # on first use: they import what most programs never need
        import importlib

        return importlib.import_module(f".{name}", __name__)
    if name == "Partition":
        from .nn.partition import Partition

        return Partition
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
