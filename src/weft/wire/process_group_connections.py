"""What a process-group wire is made of: the sockets to all other ranks, by lane."""

from __future__ import annotations

import contextlib
import json
import os
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import WeftError
from .files import make_room
from .interface import own_address
from .joined import Joined
from .mesh import AbsentError, Door, Listener, Mesh
from .mover import Mover

__all__ = ["Connections"]

_LANES = ("bulk", "small", "side")
_PATIENCE = 5.0  # seconds that others get to read at the store why no wire is made
_made: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connections(Joined):
    """The connections of one rank to all others."""

    mover: Mover

    def __init__(self, rank: int, mesh: Mesh) -> None:
        super().__init__(mesh.lanes["side"])
        self.mover = Mover(rank, mesh.lanes["bulk"], mesh.lanes["small"], mesh.shared)
        _made.add(self)

    @classmethod
    def make(cls, store: dist.Store, rank: int, size: int, timeout: float) -> Connections:
        """Connect to all; collective.

        Raises:
            WeftError: some rank may not open as many files; the same on every rank.
            RuntimeError: from the store.
            OSError: from the sockets.
        """
        deadline = time.monotonic() + timeout
        if trouble := make_room(len(_LANES) * (size - 1)):
            _met(store, rank, size, {"trouble": trouble}, deadline)
        with Listener(own_address(store), len(_LANES) * size) as listener:
            own = listener.door
            door = {"door": [own.host, own.port, own.token.hex()]}
            doors = {}
            for peer, said in _met(store, rank, size, door, deadline).items():
                host, port, token = said["door"]
                doors[peer] = Door(host, port, bytes.fromhex(token))
            return cls(rank, listener.mesh(rank, doors, _LANES, deadline, small="small"))

    def introduce(self, host: bytes) -> None:
        """Let peers on the host of that 16-byte name read long messages where they lie."""
        self.mover.introduce(host)
        self.mover.meet()


def _met(
    store: dist.Store, rank: int, size: int, said: dict[str, Any], deadline: float
) -> dict[int, dict[str, Any]]:
    """What each other rank says at the store, told what this one does; collective.

    Raises:
        WeftError: of some rank it is what is in the way; the first one's, on every rank.
        AbsentError: some rank said nothing in time.
        RuntimeError: from the store.
    """
    store.set(f"{rank}", json.dumps(said))
    peers = [peer for peer in range(size) if peer != rank]
    left = max(deadline - time.monotonic(), 0.001)
    try:
        store.wait([f"{peer}" for peer in peers], timedelta(seconds=left))
    except RuntimeError:
        if late := [peer for peer in peers if not store.check([f"{peer}"])]:
            raise AbsentError(late, "came, and then did not say where to connect") from None
        raise
    found: dict[int, dict[str, Any]] = {peer: json.loads(store.get(f"{peer}")) for peer in peers}
    for one, words in sorted((found | {rank: said}).items()):
        if "trouble" in words:
            # the store may end with the program that is about to be told: not before all have read
            with contextlib.suppress(RuntimeError):
                store.set(f"{rank} read", "")
                store.wait([f"{peer} read" for peer in peers], timedelta(seconds=_PATIENCE))
            raise WeftError(f"rank {one}: {words['trouble']}")
    return found


def _after_fork() -> None:
    """A child closes its copies, so that an end here is seen by the peers."""
    for connections in list(_made):
        connections.mover.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
