"""A wire in rounds for tensors of the CPU: what devices run can be tried without a device.

NCCL and its like carry messages in rounds, and in no other way (`weft.wire.torch_rounds`). So does
this wire, by the same code, over a process group of gloo: a schedule that is wrong there is wrong
here. And here it is told: before each round the ranks compare what they send with what is awaited.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from weft.base import _torch
from weft.rendezvous import places as rendezvous
from weft.rendezvous.address import free_address, gloo_interfaces
from weft.wire.start import Start
from weft.wire.torch_rounds import OnThread, TorchRounds

_FOREVER = timedelta(days=1000)  # of an operation: the limits are those of the waits


def round_wire(start: Start) -> TorchRounds:
    """A wire in rounds over gloo, `lockstep`; a factory.

    In such a wire every rank is in every round: it posts the other ends of the messages that others
    post before it waits, and waits, if for nothing. Where a message has another length than its
    receive, or goes on another channel, the wire fails on every rank and names the sender.

    Raises:
        RuntimeError: from gloo; somebody did not come in time.
    """
    if start.rank == 0:  # gloo wants a store, and the group may have none
        address = free_address()
        store, port = rendezvous.host(address)
        start.exchange(f"{address} {port}".encode())
    else:
        address, _, number = start.exchange(b"")[0].decode().partition(" ")
        store = rendezvous.connect(address, int(number), start.timeout)
    interfaces = gloo_interfaces(store)
    gloo = _torch.gloo_group(store, start.rank, start.size, start.timeout, interfaces)
    group = _torch.process_group_of(gloo, store, start.rank, start.size)
    group.set_timeout(_FOREVER)
    return _OverItsOwn(group, start)


class _OverItsOwn(TorchRounds):
    """Rounds over a process group of this wire's own, which ends with it."""

    def __init__(self, group: Any, start: Start) -> None:
        own = [group]  # none, once it is closed
        operations = OnThread(lambda: own[0] if own else None, start.size, torch.device("cpu"))
        super().__init__(operations, range(start.size), start.rank)
        self._own = own
        self._made_in = os.getpid()

    def close(self) -> None:
        super().close()
        if os.getpid() == self._made_in:  # in a forked child gloo's threads are not there
            self._own.clear()
