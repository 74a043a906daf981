"""`weft.failure.verdict.judge`: who is named, from what ranks say about themselves."""

from __future__ import annotations

import pytest

from weft.failure.verdict import REMEMBERED, Entered, Place, judge

CALL = "sparse_all_reduce"
ALL = "all 3 ranks"
"""Stands for all ranks, as ranks that make a call."""

SOME = "ranks 0, 1"
"""Stands for some of them."""


def made(*calls, by=ALL):
    """Calls that a rank has come to."""
    return tuple(Entered(by, number, name) for number, name in calls)


def waits(
    awaits,
    calls=5,
    doing=CALL,
    *,
    more=(),
    before=(),
    by=ALL,
    opens=False,
):
    """A rank in a call, if it is in any, that waits for another one."""
    history = before
    entered = None
    if doing:
        entered = Entered(by, calls, doing)
        history = (*before, entered)
    awaited = (awaits, *more)
    return Place(
        calls,
        doing,
        awaits,
        2.0,
        awaited=awaited,
        entered=entered,
        opens=opens,
        history=history,
    )


def busy(calls=5, doing=CALL):
    """A rank in a call that waits for nobody."""
    entered = Entered(ALL, calls, doing)
    return Place(calls, doing, None, 3.0, entered=entered, history=(entered,))


def outside(calls=4, raised="", history=()):
    return Place(calls, "", None, 12.3, raised, history=history)


def left(raised=""):
    """A rank as it left."""
    return Place(4, "", None, 1.0, raised)


def check(verdict, culprit, text):
    assert verdict.culprit == culprit
    assert verdict.text.startswith(text), verdict.text


THROUGH = outside(5, history=made((5, CALL)))
"""A rank that is through the call of the others."""


@pytest.mark.parametrize(
    ("places", "silent", "leavers", "culprit", "text"),
    [
        # those that do not answer come first, whoever waits for whom
        ({0: waits(1), 1: waits(0)}, {2}, {}, 2, "rank 2 does not answer (stopped"),
        ({0: waits(1), 1: busy()}, {3, 2}, {}, 2, "ranks 2 and 3 do not answer"),
        # nobody answers: of two, the other; of more, one's own link
        ({0: waits(1)}, {1}, {}, 1, "rank 1 does not answer"),
        ({0: waits(1)}, {1, 2}, {}, 0, "rank 0 hears none of the others: its own link is down"),
        # one that left, at once or through others
        ({0: waits(1)}, set(), {1: left()}, 1, "rank 1 left"),
        (
            {0: waits(1), 1: waits(2)},
            set(),
            {2: left(raised="KeyError: 7")},
            2,
            "rank 2 left, after it raised (KeyError: 7)",
        ),
    ],
)
def test_who_is_silent_or_left(places, silent, leavers, culprit, text):
    check(judge(0, places, silent, leavers), culprit, text)


@pytest.mark.parametrize(
    ("places", "culprit", "text"),
    [
        # the end of the chain of waits, not the neighbour
        (
            {0: waits(1), 1: waits(2), 2: outside()},
            2,
            "rank 2 has not entered call 5 (sparse_all_reduce): it has been outside weft for 12.3",
        ),
        (
            {0: waits(1), 1: busy(4, "barrier")},
            1,
            "rank 1 has not entered call 5 (sparse_all_reduce): "
            "it is in call 4 (barrier) and waits for nobody",
        ),
        (
            {0: waits(1), 1: busy()},
            1,
            "rank 1 keeps the others waiting: it is in call 5 (sparse_all_reduce) and waits for "
            "nobody",
        ),
        (
            {0: waits(1), 1: outside(5, history=made((5, "send")))},
            1,
            "rank 1 keeps the others waiting: it has been outside weft for 12.3 s",
        ),
        # how many calls each has started says nothing: some may be calls of a few ranks
        (
            {0: waits(1), 1: outside(7)},
            1,
            "rank 1 has not entered call 5 (sparse_all_reduce): it has been outside weft for 12.3",
        ),
        (
            {0: waits(1), 1: outside(7, history=made((6, CALL)))},
            1,
            "rank 1 keeps the others waiting: it has been outside weft for 12.3 s",
        ),
        # it may have forgotten that it came to the call
        (
            {0: waits(1), 1: outside(9, history=made((5, CALL), by=SOME) * REMEMBERED)},
            1,
            "rank 1 keeps the others waiting: it has been outside weft for 12.3 s",
        ),
        # one that is in a call may be on the way to where the others are
        (
            {0: waits(1), 1: Place(5, CALL, None, 3.0)},
            1,
            "rank 1 keeps the others waiting: it is in call 5 (sparse_all_reduce) and waits for "
            "nobody",
        ),
        # of two ranks with a message between them, either may have lost it
        (
            {0: waits(1), 1: THROUGH},
            None,
            "not all came in time between rank 0 and rank 1, though all answer: the link is",
        ),
        # the call that is in the way is an earlier one than this rank's
        (
            {0: waits(1, 6), 1: waits(2, 5), 2: THROUGH},
            None,
            "not all came in time between rank 1 and ranks 0 and 2, though all answer",
        ),
        # several are past it: perhaps this rank's own end loses what comes
        (
            {
                0: waits(1, more=(2,)),
                1: THROUGH,
                2: THROUGH,
            },
            None,
            "not all came in time between rank 0 and ranks 1 and 2, though all answer",
        ),
        # without calls, the group is used by itself
        (
            {0: waits(1, 0, ""), 1: outside(0)},
            1,
            "rank 1 keeps the others waiting: it has been outside weft for 12.3 s",
        ),
        # one that raised something of which it told nobody
        (
            {0: waits(1), 1: outside(raised="KeyError: 7")},
            1,
            "rank 1 has not entered call 5 (sparse_all_reduce): it has been outside weft for 12.3 "
            "s, after it raised (KeyError: 7)",
        ),
        # calls before this one are no other calls, nor are calls of some of the ranks
        (
            {0: waits(1, before=made((4, "barrier"))), 1: waits(0, before=made((4, CALL)))},
            None,
            "not all came in time between rank 0 and rank 1 in call 5",
        ),
        (
            {0: waits(1, before=made((5, "barrier"), by=SOME)), 1: waits(0)},
            None,
            "not all came in time between rank 0 and rank 1 in call 5",
        ),
        # two calls of different ranks, which are made in two orders: nobody comes to either
        (
            {0: waits(1, doing="barrier", by=SOME), 1: waits(0)},
            None,
            "rank 0 is in call 5 (barrier) and has waited for rank 1 for 2.0 s (a call of ranks 0, "
            "1), but rank 1 is in call 5 (sparse_all_reduce) and has waited for rank 0 for 2.0 s "
            "(a call of all 3 ranks): all ranks must make",
        ),
        # all wait for each other, and one is past the call of others: what it sent is missing
        (
            {0: waits(1), 1: waits(0, 6, before=made((5, CALL))), 2: waits(1)},
            1,
            "not all came in time between rank 1 and ranks 0 and 2, though all answer",
        ),
        # nothing came to the one that waits: others may have sent it nothing
        (
            {
                0: waits(1, 4, more=(2,)),
                1: waits(0, before=made((4, CALL))),
                2: waits(0, before=made((4, CALL))),
            },
            None,
            "not all came in time between rank 0 and ranks 1 and 2, though all answer",
        ),
        # all wait for each other in the same call
        (
            {0: waits(1), 1: waits(0)},
            None,
            "not all came in time between rank 0 and rank 1 in call 5 (sparse_all_reduce), though "
            "all answer: the link is too slow, or the ranks disagree on what to send",
        ),
        (
            {0: waits(1, more=(2,)), 1: waits(0, more=(2,)), 2: waits(0, more=(1,))},
            None,
            "not all came in time between ranks 0, 1 and 2 in call 5 (sparse_all_reduce), though",
        ),
        # one of them is at an end of all that is missing, and all that is missing has been sent
        (
            {
                0: waits(1, opens=True),
                1: waits(0, more=(2, 3), opens=True),
                2: waits(1, opens=True),
                3: waits(1, opens=True),
            },
            1,
            "not all came in time between rank 1 and ranks 0, 2 and 3 in call 5",
        ),
        # else that one may have nothing to send before another's message has come
        (
            {0: waits(1), 1: waits(0, more=(2, 3)), 2: waits(1), 3: waits(1)},
            None,
            "not all came in time between rank 1 and ranks 0, 2 and 3 in call 5",
        ),
        # of many ranks some are named
        (
            {rank: waits((rank + 1) % 20, more=((rank + 2) % 20,)) for rank in range(20)},
            None,
            "not all came in time between ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more in call 5",
        ),
    ],
)
def test_where_all_answer(places, culprit, text):
    check(judge(0, places, set(), {}), culprit, text)
