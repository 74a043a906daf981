"""The rate of what carries a group's rows, as the group's own calls reached it.

A rate is a whole number r: 2^r kilobytes a second. What follows from it is the length of chunks,
and whether index lists are packed; neither changes the bits of a result.

Each rank states in the opening of a call the best rate that its calls reached so far. The least
that ranks state counts for that call: so all ranks have chunks of one length. Before that it is a
guess: what `WEFT_LINK` says, else `GUESS`.
"""

from __future__ import annotations

import math
import os

from ..base.errors import WeftError
from ..group.group import Group
from .sizes import Sizes

GUESS = 15
"""A rate of 33 MB/s, before anything is known: chunks of 256 KiB, and packed lists."""

MOST = 40
"""No rate is higher."""

RATE = "rate of the link"
"""Where a group's state keeps the best rate so far."""

_LARGE = 1_000_000  # bytes of the bound, from which the time of a call says something of the link
_PACKED = 19  # half a gigabyte a second, from which packing lists takes longer than it saves
_CHUNK = 3  # chunks of 2^3 ms: 32 to 128 KiB at 100 Mbit/s and 512 at 1 Gbit/s were the best
_CHUNKS = (1 << 16, 1 << 20)  # bytes of the smallest and the largest chunk between hosts
_NEAR = 1 << 24  # bytes of one chunk of every rank together, if all share a host


def known_rate(group: Group) -> int:
    """The rate that this rank states in the opening of a call."""
    return group.state.get(RATE) or _guessed()


def learn(group: Group, sizes: Sizes, union: int, seconds: float) -> None:
    """Keep the rate that a call reached, if it is the best so far.

    Args:
        group: over which the rows went.
        sizes: of the call.
        union: rows of its result.
        seconds: from the end of the opening to the result.
    """
    nbytes = sizes.bound(union)
    if nbytes >= _LARGE and not sizes.on_one_host:
        group.state[RATE] = max(group.state.get(RATE, 0), rate_of(nbytes / seconds))


def rate_of(bytes_a_second: float) -> int:
    """The rate of so many bytes a second.

    Example:
        >>> rate_of(125e6), rate_of(34e6)  # 1 Gbit/s, the guess
        (16, 15)
    """
    return min(max(1, int(bytes_a_second / 1000).bit_length() - 1), MOST)


def fitted(sizes: Sizes, rate: int) -> Sizes:
    """The sizes of a call between known hosts, with what suits a link of that rate."""
    smallest, largest = _CHUNKS
    if sizes.on_one_host:  # a copy keeps a core as busy as a merge: small chunks overlap little
        fair = 1 << (_NEAR // sizes.ranks).bit_length() - 1
        return sizes.but(chunk=max(smallest, fair), gaps=False)
    packs = sizes.compiled and rate < _PACKED
    return sizes.but(chunk=min(max(smallest, 1 << rate + _CHUNK), largest), gaps=packs)


def _guessed() -> int:
    """The rate before any call was large enough: as WEFT_LINK says, in Gbit/s. Raises WeftError."""
    text = os.environ.get("WEFT_LINK")
    if text is None:
        return GUESS
    try:
        rate = float(text)
        if not 0 < rate < math.inf:
            raise ValueError("no rate")
    except ValueError:
        raise WeftError(f"WEFT_LINK={text!r} is no rate in Gbit/s: e.g. 10") from None
    return rate_of(rate * 125e6)
