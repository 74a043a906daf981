"""What joins one rank to all others, whatever its messages pass through."""

from __future__ import annotations

import abc
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .mover import Message
from .watch import Watch

__all__ = ["Joined", "Moving"]


class Moving(Protocol):
    """What moves the messages of one rank: `mover.Mover`, or what has its face."""

    @property
    def lines(self) -> Mapping[int, Any]:
        """What leads to each peer."""

    @property
    def small(self) -> Mapping[int, Any]:
        """What leads to each peer for small messages."""

    def post(
        self, lines: Any, sends: Sequence[Message], recvs: Sequence[Message], at: int
    ) -> list[Any]:
        """As `Mover.post`."""

    def finish(self, orders: Any, limit: float, at: Callable[[int], None]) -> None:
        """As `Mover.finish`."""

    def over(self, orders: Any) -> bool:
        """As `Mover.over`."""

    def arrived(self, orders: Any) -> list[bool]:
        """As `Mover.arrived`."""

    def lends(self, peer: int) -> bool:
        """As `Mover.lends`."""

    def read(self, peer: int, address: int, into: memoryview) -> bool:
        """As `Mover.read`."""

    def cut(self) -> None:
        """End all waits; any thread may call it."""

    def close(self) -> None:
        """Let go of everything."""


class Joined(abc.ABC):
    """What moves the messages of one rank, and the side sockets beside it.

    Attributes:
        mover: moves the messages.
        side: the side socket to each peer, for the watcher.
        watch: the watcher, once there is one.
    """

    mover: Moving

    def __init__(self, side: Mapping[int, socket.socket]) -> None:
        self.side = side
        self.watch: Watch | None = None
        self._process = os.getpid()

    @abc.abstractmethod
    def introduce(self, host: bytes) -> None:
        """Tell the peers the 16-byte name of this host, for what is quicker within one."""

    def cut(self) -> None:
        """End all waits with an error, here and at the peers'; any thread may call it."""
        self.mover.cut()

    def drop(self) -> None:
        """Let go of what moves the messages."""
        self.mover.close()

    def close(self) -> None:
        """Say bye to all and let go of everything. Twice is fine."""
        if os.getpid() != self._process:
            return  # a forked child: these are its parent's
        if self.watch is not None:
            self.watch.close()
        self.drop()
