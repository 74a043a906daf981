"""The wire over gloo, PyTorch's backend for the CPU: plain and slow, and the one to trust.

All bytes go by `send` and `recv` of uint8 tensors on a gloo group of weft's own: no memory is
shared, and only torch opens sockets. Use it to compare when a result looks wrong (`WEFT_SAFE=1`),
or if a process may not open sockets of its own. How messages travel is told in `framed`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..base import _torch
from ..rendezvous.address import gloo_interfaces
from .factory import Start
from .framed import FramedWire, Waitable

_Socket = tuple[int, int]
"""The number of a descriptor, and the inode, which tells whether it is still that socket."""

_NOTHING_COMES = 1  # a tag that no frame has
_AT_ONCE = timedelta(milliseconds=1)
_GRACE = 0.5  # seconds after its deadline in which gloo may say itself what is missing
_LOOK = 0.1  # seconds between two looks at whether a wire can still come of it


class GlooCarrier:
    """A gloo group that nobody else uses."""

    def __init__(self, group: Any, sockets: Collection[_Socket]) -> None:
        """`sockets`: those that it has opened."""
        self._group = group
        self._sockets = sockets

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Waitable:
        work: Waitable = self._group.send(tensors, peer, tag)
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Waitable:
        work: Waitable = self._group.recv(tensors, peer, tag)
        return work

    def end_waits(self, peers: Sequence[int]) -> None:
        """See `Carrier`.

        Neither a wait nor a group of gloo's can be aborted (torch 2.13). But where one wait runs
        out, gloo closes the connections to all ranks, and every wait of the group raises.
        """
        for peer in peers:  # of one that is closed already, only its own waits raise
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                self.recv([nothing], peer, _NOTHING_COMES).wait(_AT_ONCE)

    def abandon(self) -> None:
        """See `Carrier`. What the child kept open would hide the death of the parent from peers."""
        _torch.keep(self._group)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number, inode in self._sockets:
            with contextlib.suppress(OSError):  # gloo has closed it
                if os.fstat(number).st_ino == inode:
                    os.dup2(nothing, number)  # gloo, which knows the number, can do no harm
        os.close(nothing)


def _open_sockets() -> set[_Socket]:
    """The sockets that this process has open."""
    sockets = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself, which is closed again
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.add((int(name), status.st_ino))
    return sockets


def make(start: Start) -> FramedWire:
    """Make this rank's end of the wire; for the registry.

    Raises:
        TimeoutError, RuntimeError: as `carrier`.
    """
    wire = FramedWire(carrier(start), start.rank, start.size)
    wire.start()
    return wire


def carrier(start: Start) -> GlooCarrier:
    """A gloo group of these ranks, which nobody else uses, for a wire or for control links.

    Collective. gloo connects in a thread: it waits for all ranks, also for one that has died, and
    where that had begun to connect for five times as long as it was told to. When this raises, the
    thread goes on until gloo gives up.

    Raises:
        TimeoutError: not all ranks are connected after `start.timeout` seconds.
        RuntimeError: from gloo or the store.
    """
    deadline = time.monotonic() + start.timeout + _GRACE
    connected: Future[GlooCarrier] = Future()

    def connect() -> None:
        try:
            connected.set_result(_connect(start))
        except Exception as error:
            connected.set_exception(error)

    threading.Thread(target=connect, name="weft gloo", daemon=True).start()
    # until gloo is through, another rank has failed, or the time is over
    while not wait([connected], _LOOK).done:
        start.check()
        if time.monotonic() > deadline:
            raise TimeoutError("gloo has not connected all ranks")
    return connected.result()


def _connect(start: Start) -> GlooCarrier:
    store = start.store
    assert store is not None  # a group over gloo has one
    before = _open_sockets()
    interfaces = gloo_interfaces(store)
    group = _torch.gloo_group(store, start.rank, start.size, start.timeout, interfaces)
    # gloo does not say which are its own; one that another thread opened meanwhile is taken for it
    return GlooCarrier(group, _open_sockets() - before)
