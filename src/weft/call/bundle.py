"""How every rank of many hears the statement of every other: all-gather by recursive doubling.

In each round a rank swaps all statements that it knows with one other rank, so that it knows twice
as many, and after log2 P rounds all. They travel as a *bundle*, one behind the other in a message.

Recursive doubling is of a power of two. So of P ranks with such a *core* below P the first
2 (P - core) form pairs, of which the lower rank speaks for both: it hears the upper one before the
rounds, and tells it all statements after them. `voice` numbers those that speak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ..failure.verdict import crossed
from ..group.channels import SMALL
from ..group.group import Group
from ..group.pending import Awaited, Exchange
from .statement import CAP, Statement, unpack


def swaps(rank: int, ranks: int) -> Iterator[tuple[int, range]]:
    """With whom a rank swaps bundles, in this order; and whose statements each of these has then.

    Example:
        >>> [*swaps(0, 6)]
        [(1, range(1, 2)), (2, range(2, 4)), (4, range(4, 6)), (1, range(0, 2))]
        >>> [*swaps(1, 6)]
        [(0, range(0, 1)), (0, range(0, 6))]
    """
    core = 1 << (ranks.bit_length() - 1)
    paired = 2 * (ranks - core)

    def first(voice: int) -> int:
        """The rank that has this voice; the next one has the next voice, or none."""
        return min(2 * voice, voice + paired // 2)

    if rank < paired and rank % 2:
        yield rank - 1, range(rank - 1, rank)
        yield rank - 1, range(ranks)
        return
    if rank < paired:
        yield rank + 1, range(rank + 1, rank + 2)
    voice = max(rank // 2, rank - paired // 2)
    for power in range(core.bit_length() - 1):
        other = voice ^ 1 << power
        block = other >> power << power
        yield first(other), range(first(block), first(block + (1 << power)))
    if rank < paired:
        yield rank + 1, range(rank, rank + 2)


def statements_of_all(
    group: Group, mine: Statement, watch: Callable[[Awaited], object] | None
) -> dict[int, Statement]:
    """Swap bundles until every rank knows every statement; collective.

    If any rank watches who comes, every rank sends every rank an empty message. A rank that watches
    does so first, and the others once they have heard of it: also those that are in another call,
    so that none of these messages is left over.

    Returns:
        The statements by rank.
    """
    notices = None
    if watch is not None:
        notices = _notices(group)
        watch(notices)
    known = {group.rank: mine}
    for peer, ranks in swaps(group.rank, group.size):
        others = [each for rank, each in known.items() if rank != group.rank]
        message = _swapped(group, peer, bundle(mine, others))
        known = statements_in(group, mine, peer, memoryview(message), ranks) | known
    if notices is None and any(each.watched for each in known.values()):
        notices = _notices(group)
    if notices is not None:
        notices.wait()
        notices.release()
    return known


def _notices(group: Group) -> Exchange:
    """Start to tell every rank that this one has come, and to hear it of every rank."""
    nothing = torch.empty(0, dtype=torch.uint8)
    sends = [(peer, nothing) for peer in group.peers]
    return group.post(sends, [(peer, 0) for peer in sorted(group.peers)], SMALL)


def bundle(own: Statement, others: Iterable[Statement]) -> bytearray:
    """A message with statements of several ranks; a fingerprint that many state is in it once."""
    message = own.pack()
    fields = None
    for each in sorted(others, key=lambda other: other.fields):
        message += each.pack(repeats=each.fields == fields)
        fields = each.fields
    return message


def _swapped(group: Group, peer: int, message: bytearray) -> bytearray:
    """Tell a peer a message of any length, and hear its own.

    They go in pieces of as many bytes as may be told at once; a shorter one is the last. Who has
    told all goes on with empty ones until the other has, too.
    """
    heard = bytearray()
    start = 0
    while start <= max(len(message), len(heard)):
        telling = group.tell(message[start : start + CAP], CAP, to=[peer])
        heard += telling.wait()[peer]
        start += CAP
    return heard


def statements_in(
    group: Group, mine: Statement, peer: int, message: memoryview, ranks: Sequence[int]
) -> dict[int, Statement]:
    """The statements in a peer's message, by rank.

    Raises:
        WireError: it is something else; or of other ranks than these; or of another call, which is
            not of the ranks of this one.
    """
    statements = group.decode(peer, "a statement", unpack, message, mine.fields)
    for each in statements.values():
        if each.fields is not mine.fields and each.members != mine.members:
            places = {
                group.rank_in_errors(group.rank): mine.place,
                group.rank_in_errors(peer): each.place,
            }
            raise group.session.fail(None, crossed(places))
    if set(statements) != set(ranks):
        sender = group.rank_in_errors(peer)
        of_others = f"is of ranks {[*statements]}, and not of {[*ranks]}"
        raise group.fail(peer, f"rank {sender} sent a statement that {of_others}")
    return statements
