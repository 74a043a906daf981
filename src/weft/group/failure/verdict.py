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
    """

    calls: int
    doing: str
    awaits: int | None
    seconds: float
    raised: str = ""
    at: str = ""

    @property
    def call(self) -> str:
        """The call it is in, as errors spell it: "call 17 (sparse_all_reduce)"."""
        return f"call {self.calls} ({self.doing})"

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


def left(rank: int, raised: str) -> Verdict:
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


def judge(
    me: int, places: Mapping[int, Place], silent: Set[int], gone: Mapping[int, str]
) -> Verdict:
    """Name the culprit of a wait that did not end in time.

    Args:
        me: the rank that waited and asks.
        places: where this rank is, and where those are that answered.
        silent: the ranks that were asked and did not answer.
        gone: the ranks that said bye before, each with the error that it raised, or "".

    Example:
        >>> stuck, busy = Place(17, "sparse_all_reduce", 1, 5.0), Place(16, "", None, 12.3)
        >>> judge(0, {0: stuck, 1: busy}, set(), {}).text
        'rank 1 has not entered call 17 (sparse_all_reduce): it has been outside weft for 12.3 s'
    """
    if silent:
        return _silent(me, places, sorted(silent))
    chain = [me]  # this rank, the rank that it waits for, the rank that that one waits for, ...
    while (following := places[chain[-1]].awaits) is not None:
        if following in gone:
            return left(following, gone[following])
        if following in chain or following not in places:
            return _in_a_circle(me, places)
        chain.append(following)
    return _behind(me, chain[-1], places)


def _silent(me: int, places: Mapping[int, Place], silent: Sequence[int]) -> Verdict:
    """Some do not answer. A rank of several that hears nobody suspects itself."""
    if len(places) == 1 and len(silent) > 1:
        return Verdict(me, f"rank {me} hears none of the others: its own link is down")
    do = "does" if len(silent) == 1 else "do"
    return Verdict(
        silent[0], f"{names(silent)} {do} not answer (stopped, cut off, or stuck in foreign code)"
    )


def _behind(me: int, last: int, places: Mapping[int, Place]) -> Verdict:
    """All answered, and the waits lead to a rank that waits for nobody."""
    mine = places[me]
    its = places[last]
    if mine.doing and its.calls < mine.calls:
        return Verdict(last, f"rank {last} has not entered {mine.call}: it {its}")
    if mine.doing and its.calls > mine.calls:
        return Verdict(last, f"rank {last} is past {mine.call} already: it {its}")
    return Verdict(last, f"rank {last} keeps the others waiting: it {its}")


def _in_a_circle(me: int, places: Mapping[int, Place]) -> Verdict:
    """All answered, and ranks wait for each other: one is in another call, or messages differ."""
    mine = places[me]
    calls = {rank: (place.calls, place.doing) for rank, place in places.items()}
    often = Counter(calls.values())  # how many ranks are in a call
    if len(often) == 1:
        where = f" in {mine.call}" if mine.doing else ""
        return Verdict(
            mine.awaits,
            f"not all came in time between rank {mine.awaits} and rank {me}{where}, though both "
            "answer: the link is too slow, or the ranks disagree on what to send",
        )
    # the one furthest behind or, in calls of one number, in the call that fewest are in
    culprit = min(places, key=lambda rank: (places[rank].calls, often[calls[rank]], -rank))
    others = [rank for rank in (me, *sorted(places)) if calls[rank] != calls[culprit]]
    return Verdict(
        culprit,
        f"rank {culprit} {places[culprit]}, but rank {others[0]} {places[others[0]]}: "
        "all ranks must make the same calls in the same order",
    )
