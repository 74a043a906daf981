"""A backend of torch.distributed that is safe to compare with: gloo with one thread a group.

Of two threads of one gloo group, which is torch's default, both write the name of the operation
that each has ended to one string, without a lock (torch 2.8 to 2.15, ProcessGroupGloo::runLoop). If
one of these operations is a sparse all-reduce, that corrupts the memory of the process. Plain
DistributedDataParallel with two sparse tables does so, and so does every program that starts a
sparse all-reduce while another operation of the same group is under way.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..base import _torch
from ..rendezvous.address import gloo_interfaces

_NAME = "gloo_of_one_thread"


def gloo_of_one_thread() -> str:
    """The name of a backend of torch.distributed: gloo, whose groups have one thread each.

    Its operations, algorithms and results are gloo's, but they run one after the other, as they
    were started. In a group of torch's own backend two of them may run at once, and corrupt the
    memory of the process if one is a sparse all-reduce.

    The first call registers the backend, in this process.

    ```python
    group = dist.new_group(backend=weft.testing.gloo_of_one_thread())
    plain = DistributedDataParallel(model, process_group=group)  # also with several sparse tables
    ```
    """
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _group, devices=["cpu"])
    return _NAME


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    seconds = timeout.total_seconds()
    return _torch.gloo_group(store, rank, size, seconds, gloo_interfaces(store))
