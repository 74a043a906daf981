"""How the statements of many ranks become one: pairwise, in log2 P rounds of recursive doubling.

The lower ranks are always on the left, so that all ranks end with the same bytes. Recursive
doubling is of a power of two. So of P ranks with such a *core* below P the first 2 (P - core) form
pairs, of which the lower rank speaks for both: it hears the upper one before the rounds, and tells
it the result after them. `voice` numbers those that speak.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..group.channels import SMALL
from ..group.group import Group
from ..group.pending import Awaited, Pending
from .statement import CAP, Combine, Statement

DIRECT = 16
"""Ranks: of so many, and fewer, each tells all others its own statement instead."""

Hear = Callable[[int, memoryview], Statement]
"""The statement in a peer's message."""


def partners(rank: int, ranks: int) -> tuple[int | None, list[int]]:
    """With whom a rank swaps statements.

    Returns:
        The other one of a pair, if there is one; and with whom it swaps, in this order: nobody if
        another one speaks for it.

    Example:
        >>> partners(0, 24), partners(1, 24), partners(23, 24)
        ((1, [2, 4, 8, 16]), (0, []), (None, [22, 21, 19, 14]))
    """
    core = 1 << (ranks.bit_length() - 1)
    paired = 2 * (ranks - core)
    if rank < paired and rank % 2:
        return rank - 1, []
    partner = rank + 1 if rank < paired else None
    voice = rank // 2 if rank < paired else rank - paired // 2
    others = []
    for power in range(core.bit_length() - 1):
        other = voice ^ 1 << power
        others.append(2 * other if other < paired // 2 else other + paired // 2)
    return partner, others


def combined(
    group: Group,
    mine: Statement,
    combine: Combine,
    hear: Hear,
    watch: Callable[[Awaited], object] | None,
) -> tuple[int, Statement]:
    """Swap statements until they are one; collective.

    If any rank watches who comes, every rank sends every rank an empty message. A rank that watches
    does so first, and the others once they have heard of it: also those that are in another call,
    so that none of these messages is left over.

    Returns:
        Who told this rank the last of it, and what all stated.
    """
    notices = None
    if watch is not None:
        notices = _notices(group)
        watch(notices)
    peer, said = _swapped(group, mine, combine, hear)
    if said.watched:
        notices = notices or _notices(group)
        notices.wait()
        notices.release()
    return peer, said


def _notices(group: Group) -> Pending:
    """Start to tell every rank that this one has come, and to hear it of every rank."""
    nothing = torch.empty(0, dtype=torch.uint8)
    sends = [(peer, nothing) for peer in group.peers]
    return group.post(sends, [(peer, 0) for peer in sorted(group.peers)], SMALL)


def _swapped(group: Group, mine: Statement, combine: Combine, hear: Hear) -> tuple[int, Statement]:
    """What all stated, and who told this rank the last of it."""
    rank = group.rank
    partner, others = partners(rank, group.size)

    def swap(peer: int, statement: Statement) -> Statement:
        telling = group.tell(statement.pack(), CAP, to=[peer])
        of_both = telling.wait()  # in rank order
        theirs = bytearray(of_both[peer > rank])  # which outlives what was received
        telling.release()
        return hear(peer, memoryview(theirs))

    def united(peer: int, theirs: Statement) -> Statement:
        lower, upper = (mine, theirs) if rank < peer else (theirs, mine)
        return group.decode(peer, "a statement", lower.with_upper, upper, combine)

    # who only listens in a swap still says in which call it is: another one is noticed here, too
    listening = mine.without_body()
    if partner is not None and partner < rank:  # which speaks for this rank
        swap(partner, mine)
        return partner, swap(partner, listening)
    if partner is not None:
        mine = united(partner, swap(partner, listening))
    for peer in others:
        mine = united(peer, swap(peer, mine))
    if partner is not None:
        swap(partner, mine)
    return others[-1], mine
