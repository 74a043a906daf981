"""What an algorithm sends, in whole: each says it beside its schedule, as a function of the sizes.

`weft.explain` prints it, and tests hold it against what is sent.
Indices count as they are: a list that is packed takes fewer bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from . import codec
from .sizes import Sizes
from .stream import list_messages


class Traffic(NamedTuple):
    """What the average rank waits for, sends and receives after the opening of a call.

    Attributes:
        rounds: messages that it waits for one after the other.
        messages: that it sends.
        bytes: that it receives.
    """

    rounds: int
    messages: int
    bytes: float


class Sent(NamedTuple):
    """Messages, and the bytes in them."""

    messages: float
    bytes: float

    def to(self, peers: float) -> Sent:
        """What goes to so many peers, where each gets this."""
        return Sent(peers * self.messages, peers * self.bytes)


def together(*parts: Sent) -> Sent:
    """What is sent in parts."""
    messages, nbytes = map(sum, zip(*parts, strict=True))
    return Sent(messages, nbytes)


def of_list(sizes: Sizes, count: float) -> Sent:
    """A list of so many indices."""
    nbytes = codec.PREFIX + count * sizes.index
    return Sent(list_messages(nbytes), nbytes)


def of_rows(sizes: Sizes, count: float, row: int) -> Sent:
    """So many rows, of `row` bytes each."""
    nbytes = count * row
    rows = max(1, sizes.chunk // max(row, 1))
    return Sent(math.ceil(count / rows) if nbytes else 0, nbytes)


def of_eager(sizes: Sizes, index_bytes: int) -> Traffic:
    """What the opening carries where all rows fit in it, with indices of so many bytes."""
    others = sizes.ranks - 1
    return Traffic(0, others, others * sizes.mean * (sizes.row + index_bytes))


def of_ring(sizes: Sizes, count: float, row: int) -> tuple[int, Sent]:
    """Where all ranks get so many rows of each other rank: rounds, and what a rank sends."""
    others = sizes.ranks - 1
    sent = of_rows(sizes, count, row)
    rounds = min(others, 1) if sizes.sends_directly(sent.bytes) else others
    return rounds, sent.to(others)
