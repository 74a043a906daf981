"""Who is to blame: the judgement that follows from where each rank is.

Nothing here communicates. At the deadline of a wait `detector` collects the places of the ranks,
and calls `judge`; every rank raises the verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from ...errors import WireError, names

NAMED = 8
"""Ranks that are named for each value in which ranks differ."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What broke the session.

    Attributes:
        culprit: the rank to blame, or None.
        text: a clause that says what happened, such as "rank 2 died".
    """

    culprit: int | None
    text: str

    def error(self, rank: int) -> WireError:
        """What a rank raises on account of it: the same text each time."""
        text = f"rank {rank}: {self.text}; start the group again"
        return WireError(text, rank=rank, culprit=self.culprit)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is.

    Attributes:
        calls: how many calls it has started.
        doing: the name of the call that it is in, "" between calls.
        awaits: the rank that it waits for, None if it does not wait.
        seconds: how long it has waited or, if it does not wait, how long ago its last wait ended.
        raised: the error that it raised since then, outside any call, or "".
        at: where its program stands, as "file:line in function", or "".
        awaited: ranks whose messages have not come, `awaits` among them; a few of them, if many.
        history: the numbers and names of the last calls that it has started.
    """

    calls: int
    doing: str
    awaits: int | None
    seconds: float
    raised: str = ""
    at: str = ""
    awaited: tuple[int, ...] = ()
    history: tuple[tuple[int, str], ...] = ()

    @property
    def call(self) -> str:
        """The call it is in, as errors spell it: "call 17 (sparse_all_reduce)"."""
        return f"call {self.calls} ({self.doing})"

    @property
    def missing(self) -> frozenset[int]:
        """The ranks whose messages it is known to wait for."""
        if self.awaits is None:
            return frozenset(self.awaited)
        return frozenset((*self.awaited, self.awaits))

    def __str__(self) -> str:
        at = f", at {self.at}" if self.at else ""
        if self.awaits is not None:
            where = f"in {self.call}" if self.doing else "outside weft"
            return f"is {where} and has waited for rank {self.awaits} for {self.seconds:.1f} s{at}"
        if self.doing:
            return f"is in {self.call} and waits for nobody{at}"
        return f"has been outside weft for {self.seconds:.1f} s{after(self.raised)}{at}"


def after(raised: str) -> str:
    """The end of a clause that says what a rank raised before it left, or was late."""
    return f", after it raised ({raised})" if raised else ""


def on_leaver(rank: int, raised: str) -> Verdict:
    """The verdict on a rank that left while others waited for it, perhaps after an error."""
    return Verdict(rank, f"rank {rank} left{after(raised)}")


def differing(how: str, held: Iterable[tuple[object, Sequence[int], int]], then: str) -> str:
    """How ranks differ: values, each with the ranks that have it, or some, and how many they are.

    Example:
        >>> differing("the ops differ", [("sum", [0, 3], 9), ("max", [2], 1)], "pass the same")
        'the ops differ: ranks 0, 3 and 7 more have sum, rank 2 has max; pass the same'
    """
    texts = []
    for value, ranks, total in held:
        named = sorted(ranks)[:NAMED]
        more = f" and {total - len(named)} more" if total > len(named) else ""
        who = f"{', '.join(map(str, named))}{more}"
        texts.append(f"rank {who} has {value}" if total == 1 else f"ranks {who} have {value}")
    return f"{how}: {', '.join(texts)}; {then}"


def how_to_try(wire: str) -> str:
    """How one finds out whether a wire that weft does not have itself does what it has to."""
    return f"(try it by weft doctor --wire {wire}, or by weft.testing.check_wire)"


def judge(
    me: int,
    places: Mapping[int, Place],
    silent: Set[int],
    leavers: Mapping[int, str],
    wire: str = "",
) -> Verdict:
    """Name the culprit of a wait that did not end in time.

    Where all ranks answer, and wait for each other in the same calls, nobody is known to be to
    blame. Then the verdict says between whom messages are missing. Its culprit is the one rank that
    is at an end of all of these, if there is one, and else None.

    Args:
        me: the rank that waited and asks.
        places: where this rank is, and where those are that answered.
        silent: the ranks that were asked and did not answer.
        leavers: the ranks that said bye before, each with the error that it raised, or "".
        wire: the name of the wire that the wait is over; "": one of weft's own.

    Example:
        >>> stuck, busy = Place(17, "sparse_all_reduce", 1, 5.0), Place(16, "", None, 12.3)
        >>> judge(0, {0: stuck, 1: busy}, set(), {}).text
        'rank 1 has not entered call 17 (sparse_all_reduce): it has been outside weft for 12.3 s'
    """
    if silent:
        return _silent(me, places, sorted(silent))
    chain = [me]  # this rank, the rank that it waits for, the rank that that one waits for, ...
    while (following := places[chain[-1]].awaits) is not None:
        if following in leavers:
            return on_leaver(following, leavers[following])
        if following in chain or following not in places:
            return _in_a_circle(me, places, wire)
        chain.append(following)
    return _at_the_end(chain, places, wire)


def _silent(me: int, places: Mapping[int, Place], silent: Sequence[int]) -> Verdict:
    """Some do not answer. A rank of several that hears nobody suspects itself."""
    if len(places) == 1 and len(silent) > 1:
        return Verdict(me, f"rank {me} hears none of the others: its own link is down")
    do = "does" if len(silent) == 1 else "do"
    return Verdict(
        silent[0], f"{names(silent)} {do} not answer (stopped, cut off, or stuck in foreign code)"
    )


def _at_the_end(chain: Sequence[int], places: Mapping[int, Place], wire: str) -> Verdict:
    """All answered, and a chain of waits leads to a rank that waits for nobody."""
    me = chain[0]
    last = chain[-1]
    mine = places[me]
    its = places[last]
    if len(chain) > 1 and _is_past(its, places[chain[-2]]):
        waiters = [chain[-2]]
        # where several are past it, the waiter's own end may have lost what they sent
        culprit = last if len(_past(waiters, places)) == 1 else None
        return Verdict(culprit, _nothing_of(last, waiters, places, wire))
    if mine.doing and its.calls < mine.calls:
        return Verdict(last, f"rank {last} has not entered {mine.call}: it {its}")
    if mine.doing and its.calls > mine.calls:
        return Verdict(last, f"rank {last} is past {mine.call} already: it {its}")
    return Verdict(last, f"rank {last} keeps the others waiting: it {its}")


def _in_a_circle(me: int, places: Mapping[int, Place], wire: str) -> Verdict:
    """All answered, and ranks wait for each other."""
    earliest = min(place.calls for place in places.values())
    if _make_different_calls(places, earliest):
        return _astray(me, places)
    behind = [rank for rank in sorted(places) if places[rank].calls == earliest]
    past = _past(behind, places)
    if past:
        first = min(past)
        waiters = [rank for rank in behind if first in places[rank].missing]
        culprit = first if len(past) == 1 else None
        return Verdict(culprit, _nothing_of(first, waiters, places, wire))
    return _among_equals(me, places, wire)


def _make_different_calls(places: Mapping[int, Place], earliest: int) -> bool:
    """Whether two ranks are known to have different calls of one number, from this one on."""
    calls: dict[int, str] = {}
    for place in places.values():
        own = dict(place.history)
        if place.doing:
            own[place.calls] = place.doing
        for number, name in own.items():
            if number >= earliest and calls.setdefault(number, name) != name:
                return True
    return False


def _astray(me: int, places: Mapping[int, Place]) -> Verdict:
    """The ranks do not make the same calls."""
    calls = {rank: (place.calls, place.doing) for rank, place in places.items()}
    often = Counter(calls.values())  # how many ranks are in a call
    # the one furthest behind or, in calls of one number, in the call that fewest are in
    culprit = min(places, key=lambda rank: (places[rank].calls, often[calls[rank]], -rank))
    others = [rank for rank in (me, *sorted(places)) if calls[rank] != calls[culprit]]
    return Verdict(
        culprit,
        f"rank {culprit} {places[culprit]}, but rank {others[0]} {places[others[0]]}: "
        "all ranks must make the same calls in the same order",
    )


def _past(waiters: Sequence[int], places: Mapping[int, Place]) -> set[int]:
    """The ranks that are known to be past a call in which one of these waits for them.

    That a rank is past a call shows that it had all it needed there, and that those who still wait
    for it there did not get what it sent.
    """
    past: set[int] = set()
    for waiter in waiters:
        waiting = places[waiter]
        answered = waiting.missing & places.keys()
        past.update(peer for peer in answered if _is_past(places[peer], waiting))
    return past


def _is_past(place: Place, waiting: Place) -> bool:
    """Whether a rank is known to have made the call in which another one waits, and to be out."""
    has_made = (waiting.calls, waiting.doing) in place.history
    is_inside = bool(place.doing) and place.calls == waiting.calls
    return has_made and not is_inside


def _nothing_of(rank: int, waiters: Sequence[int], places: Mapping[int, Place], wire: str) -> str:
    """What is known where ranks wait for one that is past their call."""
    wait = "waits" if len(waiters) == 1 else "wait"
    return (
        f"rank {rank} is past {places[waiters[0]].call}, where {_some(waiters)} {wait} for it: "
        f"it {places[rank]}; {_perhaps(wire)}"
    )


def _among_equals(me: int, places: Mapping[int, Place], wire: str) -> Verdict:
    """Ranks wait for each other, and none of them is known to be past the call of another."""
    mine = places[me]
    calls = {(place.calls, place.doing) for place in places.values()}
    where = f" in {mine.call}" if mine.doing and len(calls) == 1 else ""
    pairs: set[frozenset[int]] = set()  # of ranks between which messages are missing
    for rank, place in places.items():
        pairs.update(frozenset((rank, peer)) for peer in place.missing)
    ends = frozenset.intersection(*pairs)  # of all pairs; there is one, as this rank waits
    if len(ends) == 1:
        (end,) = ends
        others = sorted(frozenset.union(*pairs) - ends)
        who = f"rank {end} and {_some(others)}"
        culprit = end
    elif len(pairs) == 1:
        who = " and ".join(f"rank {rank}" for rank in sorted(ends))
        culprit = None
    else:
        who = _some(sorted(frozenset.union(*pairs)))
        culprit = None
    text = f"not all came in time between {who}{where}, though all answer: {_perhaps(wire)}"
    return Verdict(culprit, text)


def _perhaps(wire: str) -> str:
    """What may be wrong where all ranks answer, and not all messages come."""
    if not wire:
        return "the link is too slow, or the ranks disagree on what to send"
    return (
        "the link is too slow, the ranks disagree on what to send, or "
        f"wire {wire!r} lost a message {how_to_try(wire)}"
    )


def _some(ranks: Sequence[int]) -> str:
    """The ranks in words; of many the first."""
    if len(ranks) <= NAMED:
        return names(ranks)
    return f"ranks {', '.join(map(str, ranks[:NAMED]))} and {len(ranks) - NAMED} more"
