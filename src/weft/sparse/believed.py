"""Which figures of the link a call goes by: what is known, else measured, and how long that holds.

Processes are busy with their start: those that make their machine code, or load it, keep the cores,
and each other from answering, for seconds, while the first calls are made already. What a link is
measured like then may be wrong by a hundred times. So ranks tell each other whether any of them is
at that; while one is, they go by rough figures and ask again, at the 2nd, the 4th, the 8th call and
so on. Of whatever else keeps a rank busy nothing is known: so all is measured again at the 8th and
the 64th call. Every rank counts the same calls and hears the same answers, so all do alike.
"""

from __future__ import annotations

from collections.abc import Callable

from ..kernels.compile import compiler
from ..wire.base import Wire
from ..wire.link import Link, figures, rough
from . import profile
from .record import apart

__all__ = ["link_for_call", "link_of"]

_MEASURE_AGAIN = (8, 64)  # calls


def link_of(wire: Wire) -> Link:
    """The figures of the wire's network; read or measured, by all ranks, the first time."""
    if wire.link is None:
        wire.link = _aside(wire, lambda wire: profile.link(wire, _first))
    return wire.link


def link_for_call(wire: Wire) -> Link:
    """`link_of` for a call more, on every rank: measured again where it is time to."""
    link = link_of(wire)
    if not link.measured:
        return link
    wire.priced += 1
    if link.early and wire.priced > 1 and wire.priced.bit_count() == 1:
        wire.link = _aside(wire, lambda wire: link if _told(wire)[0] else figures(wire))
    elif wire.priced in _MEASURE_AGAIN:
        wire.link = _aside(wire, lambda wire: link.quicker(figures(wire)))
    return link_of(wire)


def _first(wire: Wire) -> Link:
    busy, near = _told(wire)
    return rough(wire, near=near) if busy else figures(wire)


def _told(wire: Wire) -> tuple[bool, bool]:
    """Whether any rank is busy with its start, and whether all lend their memory to all others."""
    lends = all(wire.lends(peer) for peer in wire.peers)
    said = wire.all_gather_bytes(bytes([compiler.busy, lends]))
    return any(one[0] for one in said), all(one[1] for one in said)


def _aside(wire: Wire, look: Callable[[Wire], Link]) -> Link:
    """The link as found by `look`, which is no part of the call that wanted to know."""
    with apart(wire):
        link = look(wire)
    wire.memory.drain()  # of the blocks it measured with, which may be larger than any call's
    return link
