"""The wire over gloo, PyTorch's backend for the CPU: plain and slow, and the one to trust.

All bytes go by `send` and `recv` of uint8 tensors on a gloo group of weft's own: no memory is
shared, and only torch opens sockets. Use it to compare when a result looks wrong (`WEFT_SAFE=1`),
or if a process may not open sockets of its own. How messages travel is told in `framed`.
"""

from __future__ import annotations

import torch.distributed as dist

from .. import _torch
from .framed import Carrier, FramedWire
from .registry import Start
from .tcp.address import gloo_interfaces


def make(start: Start) -> FramedWire:
    """Make this rank's end of the wire; for the registry.

    Raises:
        RuntimeError: from gloo or the store.
    """
    assert start.store is not None  # a group over gloo has one
    carrier = carrier_at(start.store, start.rank, start.size, start.timeout)
    wire = FramedWire(carrier, start.rank, start.size)
    wire.start()
    return wire


def carrier_at(store: dist.Store, rank: int, size: int, timeout: float) -> Carrier:
    """A gloo group of the ranks that meet at a store, which nobody else uses; collective.

    Raises:
        RuntimeError: from gloo or the store.
    """
    group: Carrier = _torch.gloo_group(store, rank, size, timeout, gloo_interfaces(store))
    return group
