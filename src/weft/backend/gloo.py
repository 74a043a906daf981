"""Backend "weft": every collective over a group of weft's, messages over gloo.

Collectives take sparse tensors (`all_reduce`) and tensors of different sizes, and raise the same
errors on every rank: see `collectives`. `send` and `recv` use a gloo group that this group has; so
`recv` without a source works.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base import _torch
from ..rendezvous.address import gloo_interfaces
from .group import PythonBackend, PythonGroup
from .space import unused


class _Messages:
    """Messages over a gloo group inside.

    Attributes:
        space: the part of the store in which its ranks meet, where no earlier group has met.
    """

    def _join_gloo(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Make the gloo group. Collective."""
        seconds = timeout.total_seconds()
        self.space = unused(store, rank, size, seconds)
        interfaces = gloo_interfaces(store)
        self._gloo: Any = _torch.gloo_group(self.space, rank, size, seconds, interfaces)

    # C++ could call gloo by itself, but would hold the GIL while it starts the call. gloo's threads
    # take the GIL while they hold a lock that starting needs: a deadlock, now and then.

    def send(self, *args: Any) -> Any:
        return self._gloo.send(*args)

    def recv(self, *args: Any) -> Any:
        return self._gloo.recv(*args)

    def recv_anysource(self, *args: Any) -> Any:
        return self._gloo.recv_anysource(*args)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)  # type: ignore[misc]  # of the class that this is mixed into
        self._gloo.set_timeout(timeout)


class WeftGroup(_Messages, PythonGroup):
    """A group of backend "weft", on one rank."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._join_gloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._set_default_backend(kind)  # which serves all that is not overridden here

    def getBackendName(self) -> str:  # C++ asks by this name
        return "weft"

    def shutdown(self) -> None:
        super().shutdown()
        self._gloo.shutdown()


class WeftBackend(_Messages, PythonBackend):
    """The CPU's part of a group that has other backends for other devices, on one rank."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
    ) -> None:
        super().__init__("weft", group, rank, size, timeout)
        self._join_gloo(store, rank, size, timeout)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self._gloo.monitored_barrier(opts.timeout, wait_all_ranks)

    def _get_sequence_number_for_group(self) -> int:
        number: int = self._gloo._get_sequence_number_for_group()
        return number

    def shutdown(self) -> None:
        super().shutdown()
        self._gloo.shutdown()
