"""Backend "weft": every collective over a wire of weft's, messages over gloo.

So a collective gives the same everywhere, on tensors of every dtype, sparse and uneven ones too,
and its errors are the same on every rank. `send` and `recv` go to a gloo group inside, which also
receives from whoever sends.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .group import PythonGroup
from .space import unused


class WeftGroup(PythonGroup):
    """One rank's end of a group of backend "weft".

    Attributes:
        space: the store in which its ranks meet, and no group before it has.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.space = unused(store, rank, size, timeout.total_seconds())
        self._gloo: Any = dist.ProcessGroupGloo(self.space, rank, size, timeout=timeout)
        self._gloo._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._set_default_backend(kind)  # which serves all that is not overridden here

    def getBackendName(self) -> str:  # C++ asks by this name
        return "weft"

    # C++ could call gloo by itself, but would hold the GIL while it starts the call. gloo's threads
    # take the GIL while they hold a lock that starting needs: a deadlock, now and then.

    def send(self, *args: Any) -> Any:
        return self._gloo.send(*args)

    def recv(self, *args: Any) -> Any:
        return self._gloo.recv(*args)

    def shutdown(self) -> None:
        super().shutdown()
        self._gloo.shutdown()
