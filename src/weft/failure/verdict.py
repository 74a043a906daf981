"""Who is to blame: the judgement that follows from where each rank is.

Nothing here communicates. At the deadline of a wait `detector` collects the places of the ranks,
and calls `judge`; every rank raises the verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..base.errors import WireError, names

NAMED = 8
"""Ranks that are named for each value in which ranks differ."""

REMEMBERED = 8
"""Calls in the history of a rank."""

SAME_ORDER = "all ranks make their calls in the same order, whichever groups they are on"
"""What a rank is told of a call that does not go on while a rank is in one of another group."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What broke the session.

    Attributes:
        culprit: the rank to blame, or None.
        text: a clause that says what happened, such as "rank 2 died".
        remedy: what to do about it.
    """

    culprit: int | None
    text: str
    remedy: str = "start the group again"

    def error(self, rank: int) -> WireError:
        """What a rank raises on account of it: the same text each time."""
        text = f"rank {rank}: {self.text}; {self.remedy}"
        return WireError(text, rank=rank, culprit=self.culprit)


class Entered(NamedTuple):
    """A call that a rank has come to, in words that mean the same on all ranks of the call.

    How many calls a rank has started means something else on each rank: some are calls of a few
    ranks, and some are made inside others.

    Attributes:
        ranks: that make it, in their order and in words (`Group.members`).
        number: of the call, among those of these ranks.
        name: of the call.
    """

    ranks: str
    number: int
    name: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, or was as it left.

    Attributes:
        calls: how many calls it has started.
        doing: the name of the call that it is in, "" between calls.
        awaits: the rank that it waits for, None if it does not wait: for its message or, if that
            has come, until it has taken what this rank sends.
        seconds: how long it has waited or, if it does not wait, how long ago its last wait ended.
        raised: the error that it raised since then, outside any call or as it left; or "".
        elsewhere: where it is on another group, as a clause, if it is outside of any call; or "".
        prepares: the call whose arguments it looks at outside of calls, or "".
        at: where its program stands, as "file:line in function", or "".
        awaited: all ranks that it so waits for, `awaits` among them; a few of them, if many.
        entered: the call that it is in, once it has come to that; None: it has come to none.
        opens: whether it waits for what the others say at the beginning of that call. Every rank
            says it as it comes to the call, and waits for nobody before.
        history: the last calls that it has come to, `entered` among them.
    """

    calls: int
    doing: str
    awaits: int | None
    seconds: float
    raised: str = ""
    at: str = ""
    awaited: tuple[int, ...] = ()
    entered: Entered | None = None
    opens: bool = False
    history: tuple[Entered, ...] = ()
    elsewhere: str = ""
    prepares: str = ""

    @classmethod
    def of(cls, values: list[Any]) -> Place:
        """The place with the values that a message has, where tuples are lists."""
        place = cls(*values)
        return replace(
            place,
            awaited=tuple(place.awaited),
            entered=place.entered and Entered(*place.entered),
            history=tuple(Entered(*each) for each in place.history),
        )

    @property
    def call(self) -> str:
        """The call it is in, as errors spell it: "call 17 (sparse_all_reduce)"."""
        return f"call {self.calls} ({self.doing})"

    @property
    def missing(self) -> frozenset[int]:
        """The ranks that it is known to wait for: a message is missing to it or from it."""
        return frozenset(self.awaited if self.awaits is None else (self.awaits, *self.awaited))

    def __str__(self) -> str:
        at = f", at {self.at}" if self.at else ""
        if self.awaits is not None:
            where = f"in {self.call}" if self.doing else "outside weft"
            return f"is {where} and has waited for rank {self.awaits} for {self.seconds:.1f} s{at}"
        if self.doing:
            return f"is in {self.call} and waits for nobody{at}"
        if self.prepares:
            return f"prepares the arguments of {self.prepares}{at}"
        if self.elsewhere:
            return f"is {self.elsewhere}{at}"
        return f"has been outside weft for {self.seconds:.1f} s{after(self.raised)}{at}"


def after(raised: str) -> str:
    """The end of a clause that says what a rank raised before it left, or was late."""
    return f", after it raised ({raised})" if raised else ""


def on_leaver(rank: int, left: Place) -> Verdict:
    """The verdict on a rank that left while others waited for it, perhaps after an error."""
    return Verdict(rank, f"rank {rank} left{after(left.raised)}")


def leaver_to_blame(
    ranks: Iterable[int], leavers: Mapping[int, Place], call: Entered | None
) -> int | None:
    """The first of these ranks that left and so keeps others waiting in a call; None: none does.

    One that is past the call has sent all that others need there. One that left in the middle of
    the call has not, nor has one that never came to it. Where that is unknown, one that has raised
    is to blame, and one that left well is not.

    Args:
        ranks: of the call.
        leavers: the ranks that left, each with where it was then.
        call: None: it is unknown, or those who wait are in none.
    """
    for rank in ranks:
        left = leavers.get(rank)
        if left is None or _is_past(left, call):
            continue
        is_inside = call is not None and left.entered == call
        if left.raised or is_inside or _has_not_entered(left, call):
            return rank
    return None


def in_the_job(ranks: Sequence[int] | None, culprit: int | None) -> str:
    """How a group's ranks are numbered in the job, to end a text that names them.

    It is "" where they have the same numbers there, or the culprit has.

    Args:
        ranks: of the group, by their numbers in the job; None: these are the same.
        culprit: the rank to blame, by its number in the group, or None.

    Example:
        >>> in_the_job([4, 6], 1)
        ' (rank 1 of this group is rank 6 of the job)'
        >>> in_the_job([4, 6], None), in_the_job([0, 1], None)
        (' (this group has ranks 4 and 6 of the job)', '')
    """
    if ranks is None or [*ranks] == [*range(len(ranks))]:
        return ""
    if culprit is None:
        return f" (this group has {_some(ranks)} of the job)"
    if ranks[culprit] == culprit:
        return ""
    return f" (rank {culprit} of this group is rank {ranks[culprit]} of the job)"


def differing(how: str, holders: Iterable[tuple[object, Sequence[int]]], then: str) -> str:
    """How ranks differ: values, each with the ranks that have it. Of many the first are named.

    Example:
        >>> differing("they differ", [("sum", [*range(9)]), ("max", [9])], "pass one")
        'they differ: ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more have sum, rank 9 has max; pass one'
    """
    texts = []
    for value, ranks in holders:
        named = sorted(ranks)[:NAMED]
        more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
        who = f"{', '.join(map(str, named))}{more}"
        texts.append(f"rank {who} has {value}" if len(ranks) == 1 else f"ranks {who} have {value}")
    if len(texts) > NAMED:
        texts = [*texts[:NAMED], f"and {len(texts) - NAMED} more are stated"]
    return f"{how}: {', '.join(texts)}; {then}"


def crossed(calls: Mapping[int, str]) -> str:
    """That ranks are in calls of different groups, and so wait for each other.

    Args:
        calls: by rank, a clause on where it is. Of more than two ranks the first two are named.
    """
    first, second = sorted(calls)[:2]
    return (
        f"rank {first} {calls[first]}, but rank {second} {calls[second]}: all ranks must make the "
        "calls of a group and of its subsets in the same order"
    )


def judge(
    me: int,
    places: Mapping[int, Place],
    silent: Set[int],
    leavers: Mapping[int, Place],
) -> Verdict:
    """Name the culprit of a wait that did not end in time.

    Where all ranks answer, and wait for each other in the same calls, nobody is known to be to
    blame. Then the verdict says between whom messages are missing. Its culprit is the one rank that
    is at an end of all messages that are known to be lost, if there is one, and else None.

    Args:
        me: the rank that waited and asks.
        places: where this rank is, and where those are that answered.
        silent: the ranks that were asked and did not answer.
        leavers: the ranks that said bye before, each with where it was then.

    Example:
        >>> stuck, busy = Place(17, "sparse_all_reduce", 1, 5.0), Place(17, "barrier", None, 12.3)
        >>> judge(0, {0: stuck, 1: busy}, set(), {}).text
        'rank 1 keeps the others waiting: it is in call 17 (barrier) and waits for nobody'
    """
    if silent:
        return _silent(me, places, sorted(silent))
    chain = [me]  # this rank, the rank that it waits for, the rank that that one waits for, ...
    while (following := places[chain[-1]].awaits) is not None:
        if following in leavers:
            return on_leaver(following, leavers[following])
        if following in chain:
            circle = chain[chain.index(following) :]
            verdict = None
            if _are_crossed(circle, places):
                verdict = in_crossed_calls(circle, places)
            return verdict or _among_equals(me, places)
        if following not in places:
            return _among_equals(me, places)
        chain.append(following)
    if len(chain) > 1 and _is_past(places[chain[-1]], places[chain[-2]].entered):
        return _among_equals(me, places)
    return _at_the_end(chain, places)


def _silent(me: int, places: Mapping[int, Place], silent: Sequence[int]) -> Verdict:
    """Some do not answer. A rank of several that hears nobody suspects itself."""
    if len(places) == 1 and len(silent) > 1:
        return Verdict(me, f"rank {me} hears none of the others: its own link is down")
    do = "does" if len(silent) == 1 else "do"
    return Verdict(
        silent[0], f"{names(silent)} {do} not answer (stopped, cut off, or stuck in foreign code)"
    )


def _at_the_end(chain: Sequence[int], places: Mapping[int, Place]) -> Verdict:
    """All answered, and a chain of waits leads to a rank that waits for nobody."""
    last = chain[-1]
    its = places[last]
    for waiter in reversed(chain[:-1]):
        waiting = places[waiter]
        if _has_not_entered(its, waiting.entered):
            absent = f"rank {last} has not entered {waiting.call}: it {its}"
            if its.elsewhere:  # where it may wait for one that waits here
                return Verdict(None, f"{absent}; see that {SAME_ORDER}")
            return Verdict(last, absent)
    return Verdict(last, f"rank {last} keeps the others waiting: it {its}")


def _has_not_entered(place: Place, call: Entered | None) -> bool:
    """Whether a rank is known not to have come to a call in which another one waits.

    One that is in a call, and has come to none, may be on the way to it.
    """
    if call is None or (place.doing and place.entered is None):
        return False
    numbers = [each.number for each in place.history if each.ranks == call.ranks]
    if not numbers:  # it may have forgotten some
        return len(place.history) < REMEMBERED
    return max(numbers) < call.number


def in_crossed_calls(circle: Sequence[int], places: Mapping[int, Place]) -> Verdict | None:
    """The verdict on ranks of which each waits for the next, in calls of different groups.

    None: one of them is in no call, or did not say where it is.
    """
    calls = {}
    for rank in circle:
        place = places.get(rank)
        if place is None or place.entered is None:
            return None
        calls[rank] = f"{place} (a call of {place.entered.ranks})"
    return Verdict(None, crossed(calls))


def _are_crossed(circle: Sequence[int], places: Mapping[int, Place]) -> bool:
    """Whether ranks make calls of some of them in different orders: nobody comes to another's."""
    pairs = zip(circle, [*circle[1:], circle[0]], strict=True)
    return all(
        _has_not_entered(places[awaited], places[waiter].entered) for waiter, awaited in pairs
    )


def _lost(places: Mapping[int, Place]) -> list[tuple[int, int]]:
    """Messages that were sent, as is known, and have not come: who sent, and who waits for it.

    A rank that is past a call has sent all that others wait for there. One that has come to a call
    has said what others wait for at its beginning. Whatever else ranks wait for may be late because
    the sender itself waits.
    """
    lost = []
    for waiter, waiting in places.items():
        for sender in waiting.missing & places.keys():
            its = places[sender]
            has_opened = waiting.opens and waiting.entered in its.history
            if has_opened or _is_past(its, waiting.entered):
                lost.append((sender, waiter))
    return lost


def _culprit_of(lost: Sequence[tuple[int, int]]) -> int | None:
    """The one rank that is at an end of all messages that are lost, and sent some; or None.

    Of two ranks with a message between them, either end may have lost it. So may a rank that
    nothing comes to, of which others may think that it awaits nothing.
    """
    if not lost:
        return None
    ends = frozenset.intersection(*(frozenset(pair) for pair in lost))
    senders = {sender for sender, _ in lost}
    return next(iter(ends & senders)) if len(ends) == 1 and ends & senders else None


def _is_past(place: Place, call: Entered | None) -> bool:
    """Whether a rank is known to have made a call in which another one waits, and to be out.

    That shows that it had all it needed there, and that those who still wait for it there did not
    get what it sent. No call makes others inside itself once it has met the others, see
    `Worker.submit`.
    """
    return call is not None and call in place.history and place.entered != call


def _among_equals(me: int, places: Mapping[int, Place]) -> Verdict:
    """Ranks wait for each other, or for one that has sent all; all of them answer."""
    mine = places[me]
    calls = {place.entered or (place.calls, place.doing) for place in places.values()}
    where = f" in {mine.call}" if mine.doing and len(calls) == 1 else ""
    pairs: set[frozenset[int]] = set()  # of ranks between which messages are missing
    for rank, place in places.items():
        pairs.update(frozenset((rank, peer)) for peer in place.missing)
    ends = frozenset.intersection(*pairs)  # of all pairs; there is one, as this rank waits
    if len(ends) == 1:
        (end,) = ends
        others = sorted(frozenset.union(*pairs) - ends)
        who = f"rank {end} and {_some(others)}"
    elif len(pairs) == 1:
        who = " and ".join(f"rank {rank}" for rank in sorted(ends))
    else:
        who = _some(sorted(frozenset.union(*pairs)))
    text = (
        f"not all came in time between {who}{where}, though all answer: the link is too slow, or "
        "the ranks disagree on what to send"
    )
    return Verdict(_culprit_of(_lost(places)), text)


def _some(ranks: Sequence[int]) -> str:
    """The ranks in words; of many the first."""
    if len(ranks) <= NAMED:
        return names(ranks)
    return f"ranks {', '.join(map(str, ranks[:NAMED]))} and {len(ranks) - NAMED} more"
