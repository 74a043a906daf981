"""Results that the ranks of a host make in common: each writes a part, and all have the whole.

Two exchanges of small messages. In the first, ranks say how large their parts are, and rank 0 says
in which block (`weft.wire.blocks`) they lie, one behind the other; in the second, that theirs are
written. The first is not needed where all know how large parts are at the most, which then have
that room, and rank 0 has offered a block before it said the last that all have heard.

Where blocks do not work on some rank or are not wanted (`WEFT_KEEP=0`), which all tell each other
the first time, or callers hold all there are, there is nothing in common and all know.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Self

from torch import Tensor

from .base import Wire
from .blocks import MOST, RANKS, Block, Blocks, Giver, Place
from .memory import kept_at_most
from .routine import told

__all__ = ["LEAST", "Common", "begun", "offer", "offered", "works"]

LEAST = 1 << 21
"""Bytes of a result from which on making it in common is worth an exchange more."""

_GRAIN = 64  # bytes, of which the beginning of each area is a multiple
_AREAS = 2  # of a result: its indices and its values
_SAID = struct.Struct("<5q")  # bytes of a part in each area; the block: number, start, size
_NOWHERE = Place(-1, 0, 0)
_CARD = struct.Struct("<qq16s")  # process and file of rank 0, what is in it
_KEPT = "results in common"  # what a wire keeps by that name
_TOLD = "about results in common"  # the exchanges, both of them


class Common:
    """A result in the making, with two areas in each of which ranks' parts lie in rank order.

    Use it in a `with` block: afterwards only what `own` returned may be touched.

    Attributes:
        mine: this rank's part of each area (uint8, 1-D), which it writes, or its beginning.
        sizes: of each area, the bytes of every rank's part.
    """

    def __init__(self, wire: Wire, block: Block, sizes: Sequence[list[int]]) -> None:
        self._wire, self._block, self.sizes = wire, block, sizes
        self._starts = _starts(sizes)
        begins = [
            start + sum(area[: wire.rank]) for start, area in zip(self._starts, sizes, strict=False)
        ]
        self.mine = [
            block.memory[begin : begin + area[wire.rank]]
            for begin, area in zip(begins, sizes, strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._block.release()

    def finish(self, count: int = 0) -> list[int]:
        """Say that this rank's parts are written, and how much that is, and hear it of all.

        Raises:
            WireError: the deadline passed, or a peer failed.
        """
        mine = _SAID.pack(count, *[0] * (_AREAS + 2))
        heard = _exchanged(self._wire, mine)
        return [_SAID.unpack(heard.get(rank, mine))[0] for rank in range(self._wire.size)]

    def whole(self, area: int) -> Tensor:
        """All of an area, to be read."""
        start = self._starts[area]
        return self._block.memory[start : start + sum(self.sizes[area])]

    def own(self, area: int) -> Tensor:
        """All of an area as memory of its own, for a caller; once."""
        start = self._starts[area]
        return self._block.own(start, start + sum(self.sizes[area]))


def begun(wire: Wire, most: int, mine: tuple[int, int]) -> Common | None:
    """Begin a result; collective among ranks that can all read each other's memory.

    Args:
        wire: among whom.
        most: bytes of all parts at the most, of every rank; the same on each.
        mine: bytes of this rank's part of each area.

    Returns:
        The result to be written, or None on every rank.

    Raises:
        WireError: the deadline passed, or a peer failed.
    """
    most += _AREAS * _GRAIN
    if not LEAST <= most <= MOST:
        return None
    found = _blocks(wire)
    if found is None:
        return None
    blocks, giver = found
    blocks.settle()
    place = (giver.take(most) if giver is not None else None) or _NOWHERE
    heard = _exchanged(wire, _SAID.pack(*mine, *place))
    said = [_SAID.unpack(heard.get(rank) or _SAID.pack(*mine, *place)) for rank in range(wire.size)]
    place = Place(*said[0][_AREAS:])
    if place == _NOWHERE:
        return None
    sizes = [[each[area] for each in said] for area in range(_AREAS)]
    return Common(wire, blocks.take(place), sizes)


def offer(wire: Wire, most: int) -> None:
    """Have a block ready for a result of at most so many bytes, on rank 0; before a call opens."""
    blocks, giver = wire.kept.get(_KEPT) or (None, None)
    most += _AREAS * _GRAIN
    if blocks is not None and giver is not None and LEAST <= most <= MOST:
        blocks.settle()
        giver.offer(wire.sequence + 1, most)


def offered(wire: Wire, sizes: Sequence[list[int]]) -> Common | None:
    """Begin a result in the block that is on offer for this call, before anybody says more in it.

    Args:
        wire: among whom.
        sizes: of each area, the bytes of every rank's part at the most; the same on each rank.

    Returns:
        The result to be written, or None on every rank.
    """
    blocks, giver = wire.kept.get(_KEPT) or (None, None)
    most = _starts(sizes)[-1]
    place = blocks.offered(wire.sequence, most) if blocks is not None and most >= LEAST else None
    if blocks is None or place is None:
        return None
    blocks.settle()
    if giver is not None:
        giver.gone()
    return Common(wire, blocks.take(place), sizes)


def works(wire: Wire) -> bool:
    """Whether results are made in common here, as far as is known; the same on every rank."""
    return wire.near and wire.kept.get(_KEPT, True) is not None


def _blocks(wire: Wire) -> tuple[Blocks, Giver | None] | None:
    """What a wire keeps for it; None on every rank where some cannot."""
    if _KEPT not in wire.kept:
        wire.kept[_KEPT] = _opened(wire)
    found: tuple[Blocks, Giver | None] | None = wire.kept[_KEPT]
    return found


def _opened(wire: Wire) -> tuple[Blocks, Giver | None] | None:
    giver: Giver | None = None
    keep = kept_at_most()
    if wire.rank == 0 and wire.size <= RANKS and keep:
        try:
            giver = Giver(wire.size, keep)
        except OSError:
            giver = None
    try:
        card = (0, -1, b"") if giver is None else (os.getpid(), giver.fd, giver.sign)
        process, fd, sign = _CARD.unpack(wire.all_gather_bytes(_CARD.pack(*card))[0])
        blocks = giver.blocks if giver is not None else None
        if blocks is None and fd >= 0 and keep:
            blocks = Blocks.seen(process, fd, wire.rank, sign)
        able = wire.all_gather_bytes(bytes([blocks is not None]))
    finally:
        if giver is not None:
            giver.close()
    if blocks is None or not all(said[0] for said in able):
        return None
    return blocks, giver


def _exchanged(wire: Wire, message: bytes) -> dict[int, bytes]:
    """What each peer says, who hears this."""
    return told(wire, _TOLD, dict.fromkeys(wire.peers, message), _SAID.size)


def _starts(sizes: Sequence[list[int]]) -> list[int]:
    """Where each area begins, and the end."""
    starts = [0]
    for area in sizes:
        starts.append(-(-(starts[-1] + sum(area)) // _GRAIN) * _GRAIN)
    return starts
