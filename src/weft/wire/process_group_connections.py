"""What a process-group wire is made of: the sockets to all other ranks, by lane."""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from datetime import timedelta

import torch.distributed as dist

from .interface import own_address
from .mesh import Door, Listener
from .mover import Mover
from .watch import Watch

__all__ = ["Connections"]

_LANES = ("bulk", "small", "side")
_made: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connections:
    """The connections of one rank to all others.

    Attributes:
        mover: moves the messages.
        side: the side socket to each peer, for the watcher.
        watch: the watcher, once there is one.
    """

    def __init__(self, lanes: dict[str, dict[int, socket.socket]]) -> None:
        self.mover = Mover(lanes["bulk"], lanes["small"])
        self.side = lanes["side"]
        self.watch: Watch | None = None
        self._process = os.getpid()
        _made.add(self)

    @classmethod
    def make(cls, store: dist.Store, rank: int, size: int, timeout: float) -> Connections:
        """Connect to all; collective.

        Raises:
            RuntimeError: from the store.
            OSError: from the sockets.
        """
        deadline = time.monotonic() + timeout
        with Listener(own_address(store), len(_LANES) * size) as listener:
            own = listener.door
            store.set(f"{rank}", json.dumps([own.host, own.port, own.token.hex()]))
            peers = [peer for peer in range(size) if peer != rank]
            left = max(deadline - time.monotonic(), 0.001)
            store.wait([f"{peer}" for peer in peers], timedelta(seconds=left))
            doors = {}
            for peer in peers:
                host, port, token = json.loads(store.get(f"{peer}"))
                doors[peer] = Door(host, port, bytes.fromhex(token))
            return cls(listener.mesh(rank, doors, _LANES, deadline))

    def cut(self) -> None:
        """Shut the data connections down: waits end with an error, here and at the peers'."""
        self.mover.cut()

    def drop(self) -> None:
        """Let go of the data connections."""
        self.mover.close()

    def close(self) -> None:
        """Say bye to all and let go of everything. Twice is fine."""
        if os.getpid() != self._process:
            return  # a forked child: these are its parent's
        if self.watch is not None:
            self.watch.close()
        self.drop()


def _after_fork() -> None:
    """A child closes its copies, so that an end here is seen by the peers."""
    for connections in list(_made):
        connections.mover.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
