"""weft: sparse and partitioned collectives for PyTorch.

Importing weft starts nothing: no thread, no socket, no compiler. A name is imported from its home
when it is first used.
"""

import importlib as _importlib
import typing as _typing

from . import backend as _backend
from .version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from . import ddp, kernels, nn, schedules, sparse, testing
    from .base.errors import Error, StillRunning, WeftError, WireError
    from .bootstrap.config import Config
    from .bootstrap.init import config, init, shutdown
    from .call.attempt import attempt
    from .comm.all_reduce import all_reduce
    from .comm.all_to_all import all_to_all
    from .comm.barrier import barrier
    from .comm.clip import clip_grad_norm_
    from .comm.exchange import exchange
    from .comm.gradients import sync_grads
    from .comm.parameters import sync_params
    from .comm.remote_rows import RemoteRows, remote_rows
    from .comm.uneven import all_gather_v, reduce_scatter_v
    from .ddp.sync import sync_sparsified
    from .group.group import Group
    from .group.worker import Work
    from .nn.partition import Partition
    from .records.calls import CallStats
    from .records.listeners import on_call
    from .sparse import (
        explain,
        sparse_all_gather,
        sparse_all_reduce,
        sparse_broadcast,
        sparse_reduce,
        sparse_reduce_scatter,
    )
    from .sparse.rows import Rows

__all__ = [
    "CallStats",
    "Config",
    "Error",
    "Group",
    "Partition",
    "RemoteRows",
    "Rows",
    "StillRunning",
    "WeftError",
    "WireError",
    "Work",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "attempt",
    "barrier",
    "clip_grad_norm_",
    "config",
    "ddp",
    "exchange",
    "explain",
    "init",
    "kernels",
    "nn",
    "on_call",
    "reduce_scatter_v",
    "remote_rows",
    "schedules",
    "shutdown",
    "sparse",
    "sparse_all_gather",
    "sparse_all_reduce",
    "sparse_broadcast",
    "sparse_reduce",
    "sparse_reduce_scatter",
    "sync_grads",
    "sync_params",
    "sync_sparsified",
    "testing",
    "trainers",
]

_ROOMS = ("ddp", "kernels", "nn", "schedules", "sparse", "testing", "trainers")
_HOMES = {
    "Partition": "nn.partition",
    "Rows": "sparse.rows",
    "Group": "group.group",
    "sync_sparsified": "ddp.sync",
    **dict.fromkeys(("Error", "StillRunning", "WeftError", "WireError"), "base.errors"),
    **dict.fromkeys(("config", "init", "shutdown"), "bootstrap.init"),
    "CallStats": "records.calls",
    "on_call": "records.listeners",
    "Config": "bootstrap.config",
    "Work": "group.worker",
    **dict.fromkeys(("all_reduce", "all_to_all", "attempt", "barrier", "exchange"), "comm"),
    **dict.fromkeys(("RemoteRows", "remote_rows"), "comm"),
    **dict.fromkeys(("all_gather_v", "reduce_scatter_v"), "comm"),
    "clip_grad_norm_": "comm",
    **dict.fromkeys(("sync_grads", "sync_params"), "comm"),
}
"""Where a name is from; the others are from `sparse`."""

_backend.register()  # names for torch.distributed.init_process_group, and nothing more


def __getattr__(name: str) -> _typing.Any:
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    if name in _ROOMS:
        return _importlib.import_module(f".{name}", __name__)
    home = _importlib.import_module(f".{_HOMES.get(name, 'sparse')}", __name__)
    found = globals()[name] = getattr(home, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
