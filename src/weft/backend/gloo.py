"""Backend "weft": every collective over a wire of weft's, messages over gloo.

Collectives take sparse tensors (`all_reduce`) and tensors of different sizes, and raise the same
errors on every rank: see `collectives`. `send` and `recv` use a gloo group that this group has; so
`recv` without a source works.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import _torch
from ..wire.tcp.address import gloo_interfaces
from .group import PythonGroup
from .space import unused


class WeftGroup(PythonGroup):
    """A group of backend "weft", on one rank.

    Attributes:
        space: the part of the store in which its ranks meet; no earlier group has used it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        seconds = timeout.total_seconds()
        self.space = unused(store, rank, size, seconds)
        interfaces = gloo_interfaces(store)
        self._gloo: Any = _torch.gloo_group(self.space, rank, size, seconds, interfaces)
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
