"""What a process-group wire is made of: a gloo group of its own, and the side sockets beside it."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
import weakref
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .express import Express
from .side import Address, Listener, cut, with_listener
from .watch import Watch

__all__ = ["Connections", "Gloo"]

_HELLO = 512  # bytes in which ranks introduce themselves
_made: weakref.WeakSet[Connections] = weakref.WeakSet()


class Gloo(Protocol):
    """What a wire uses of `torch.distributed.ProcessGroupGloo`, whose stubs leave it out."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> dist.Work: ...


class Connections:
    """The connections of one rank to all others.

    Attributes:
        gloo: the group that carries the data, or None once it was dropped.
        mesh: the side socket to each peer, until a watcher has them.
        express: the lane of small messages.
        watch: the watcher, once there is one.
    """

    def __init__(
        self,
        gloo: Gloo,
        ours: Address,
        theirs: frozenset[Address],
        side: dict[int, socket.socket],
        express: dict[int, socket.socket],
    ) -> None:
        self.gloo: Gloo | None = gloo
        self.mesh = side
        self.express = Express(express)
        self.watch: Watch | None = None
        self._ours, self._theirs = ours, theirs
        self._process = os.getpid()
        _made.add(self)

    @classmethod
    def make(cls, store: dist.Store, rank: int, size: int, timeout: float) -> Connections:
        """Connect to all; collective.

        Raises:
            RuntimeError: from gloo or the store.
            OSError: from the side sockets.
        """
        deadline = time.monotonic() + timeout
        device, name, family = with_listener(_device)
        gloo: Gloo | None = None
        try:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub names it otherwise
            options._devices = [device]
            options._threads = 1  # for collectives, of which there are none
            options._timeout = timedelta(seconds=timeout)
            gloo = cast(Gloo, dist.ProcessGroupGloo(store, rank, size, options))
            with ExitStack() as open_doors, ExitStack() as sockets:
                listeners = {
                    lane: open_doors.enter_context(Listener(name, family, size))
                    for lane in ("side", "express")
                }
                own: dict[str, Any] = {"gloo": name[:2]}
                own |= {lane: [it.port, it.token.hex()] for lane, it in listeners.items()}
                hellos = _introduce(gloo, rank, size, json.dumps(own), deadline)
                at = {peer: Address.of(hello["gloo"]) for peer, hello in hellos.items()}
                meshes: dict[str, dict[int, socket.socket]] = {}
                for lane, listener in listeners.items():
                    doors = {
                        peer: (
                            Address(at[peer].host, hello[lane][0]),
                            bytes.fromhex(hello[lane][1]),
                        )
                        for peer, hello in hellos.items()
                    }
                    meshes[lane] = listener.mesh(rank, doors, deadline)
                    for sock in meshes[lane].values():
                        sockets.callback(sock.close)
                sockets.pop_all()  # all are connected: they are the new object's to close
            return cls(gloo, Address.of(name), frozenset(at.values()), **meshes)
        except BaseException:
            gloo = None  # an exception keeps this frame, which shall not keep the connections
            raise

    def cut(self) -> None:
        """Shut the data connections down: waits end with an error, here and at the peers'."""
        cut(self._ours, self._theirs)
        self.express.cut()

    def drop(self) -> None:
        """Let go of the data connections."""
        self.gloo = None
        self.express.close()

    def close(self) -> None:
        """Say bye to all and let go of everything. Twice is fine."""
        if os.getpid() != self._process:
            return  # a forked child: these are its parent's
        if self.watch is not None:
            self.watch.close()
        self.drop()


def _device() -> dist.ProcessGroupGloo.Device:
    """A gloo device of one's own, on the interface that gloo would take."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    make = dist.ProcessGroupGloo
    if interface:  # not lazy: all ranks talk to all, and connections must stand before a failure
        return make.create_device(interface=interface, lazy_init=False)
    return make.create_default_device(lazy_init=False)


def _introduce(
    gloo: Gloo, rank: int, size: int, hello: str, deadline: float
) -> dict[int, dict[str, Any]]:
    """Swap a few words with everybody."""
    peers = [peer for peer in range(size) if peer != rank]
    words = torch.frombuffer(bytearray(hello.encode().ljust(_HELLO)), dtype=torch.uint8)
    heard = torch.empty((size, _HELLO), dtype=torch.uint8)
    works = [gloo.recv([heard[peer]], peer, 0) for peer in peers]
    works += [gloo.send([words], peer, 0) for peer in peers]
    for work in works:
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    return {peer: json.loads(bytes(heard[peer].tolist())) for peer in peers}


def _after_fork() -> None:
    """A child has gloo's objects but not its threads, for which their destructors would wait."""
    for connections in list(_made):
        if connections.gloo is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connections.gloo))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
