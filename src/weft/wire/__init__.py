"""How bytes get from rank to rank: what a wire is, and how one is registered.

For a network of your own write a `Wire`, as the manual's page "To write a wire" does, and try it by
`weft.testing.check_wire`. `interface` says what a wire promises, `factory` how a group makes one.
"""

from ..base.memory import Pool
from .factory import Start
from .interface import (
    CHANNELS,
    MEETS,
    Droppable,
    Failure,
    Features,
    Lease,
    Meeting,
    Pending,
    PendingBytes,
    Recv,
    Reducing,
    Rounds,
    Send,
    Wire,
    WireFailed,
)
from .registry import register_wire, unregister_wire

__all__ = [
    "CHANNELS",
    "MEETS",
    "Droppable",
    "Failure",
    "Features",
    "Lease",
    "Meeting",
    "Pending",
    "PendingBytes",
    "Pool",
    "Recv",
    "Reducing",
    "Rounds",
    "Send",
    "Start",
    "Wire",
    "WireFailed",
    "register_wire",
    "unregister_wire",
]
