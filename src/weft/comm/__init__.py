"""Communication routines: tensors between ranks, models in step, on every backend.

To add one: a file for it, which opens with `opening.opened`, and its line here and in `weft`.
"""

from ..call.attempt import attempt
from .all_reduce import all_reduce
from .all_to_all import all_to_all
from .barrier import barrier
from .clip import clip_grad_norm_
from .exchange import exchange
from .gradients import sync_grads
from .parameters import sync_params
from .remote_rows import RemoteRows, remote_rows
from .uneven import all_gather_v, reduce_scatter_v

__all__ = [
    "RemoteRows",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "attempt",
    "barrier",
    "clip_grad_norm_",
    "exchange",
    "reduce_scatter_v",
    "remote_rows",
    "sync_grads",
    "sync_params",
]
