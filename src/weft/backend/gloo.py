"""Backend "weft": every collective over a group of weft's, messages over gloo.

Collectives take sparse tensors (`all_reduce`) and tensors of different sizes, and raise the same
errors on every rank: see `collectives`. `send` and `recv` use a gloo group that this group has; so
`recv` without a source works.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base import _torch
from ..base.arguments import root_in, wrong_root, wrong_timeout
from ..base.errors import WeftError
from ..rendezvous.address import gloo_interfaces
from .group import PythonBackend, PythonGroup, is_listened_to, sendable
from .space import unused


class _Messages:
    """Messages over a gloo group inside.

    Attributes:
        space: the part of the store in which its ranks meet, where no earlier group has met.
    """

    def _join_gloo(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Make the gloo group. Collective.

        Raises:
            WeftError: the timeout is not above 0, as one becomes that is too long for C++.
            WireError: as `unused`.
        """
        seconds = timeout.total_seconds()
        if error := wrong_timeout(seconds):
            raise WeftError(f"rank {rank}: {error}, of at most 292 years")
        self.space = unused(store, rank, size, seconds)
        interfaces = gloo_interfaces(store)
        self._gloo: Any = _torch.gloo_group(self.space, rank, size, seconds, interfaces)

    @functools.cached_property
    def _outer_gloo(self) -> Any:
        """The same as torch's dispatcher sees it."""
        gloo = self._gloo
        return _torch.process_group_of(gloo, self.space, gloo.rank(), gloo.size())

    # C++ could call gloo by itself, but would hold the GIL while it starts the call. gloo's threads
    # take the GIL while they hold a lock that starting needs: a deadlock, now and then.
    # And the compiler would look into what torch asks of a group, and know none of its methods.

    @_torch.uncompiled
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        self._check_rank("dst", dst)
        return self._message("send", tensors, dst, tag)

    @_torch.uncompiled
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        self._check_rank("src", src)
        return self._message("recv", tensors, src, tag)

    @_torch.uncompiled
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._message("recv_anysource", tensors, tag)

    def _check_rank(self, name: str, given: int) -> None:
        """Raise WeftError, on this rank alone, if an argument of this name is no rank."""
        size = self._gloo.size()
        if error := wrong_root(name, root_in(given, size), given, size):
            raise WeftError(f"rank {self._gloo.rank()}: {error}")

    def _message(self, name: str, tensors: Any, *where: int) -> Any:
        if is_listened_to(tensors):
            return getattr(self._outer_gloo, name)(tensors, *where)
        given = sendable(self._gloo.rank(), tensors)
        return getattr(self._gloo, name)([*map(_torch.waited, given)], *where)

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
