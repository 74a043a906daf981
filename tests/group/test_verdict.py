"""`weft.group.failure.verdict.judge`: who is named, from what ranks say about themselves."""

from __future__ import annotations

import pytest

from weft.group.failure.verdict import Place, judge

CALL = "sparse_all_reduce"


def waits(awaits: int, calls: int = 5, doing: str = CALL) -> Place:
    return Place(calls, doing, awaits, 2.0)


def busy(calls: int = 5, doing: str = CALL) -> Place:
    return Place(calls, doing, None, 3.0)


def outside(calls: int = 4, raised: str = "") -> Place:
    return Place(calls, "", None, 12.3, raised)


@pytest.mark.parametrize(
    ("places", "silent", "left", "culprit", "text"),
    [
        # those that do not answer come first, whoever waits for whom
        ({0: waits(1), 1: waits(0)}, {2}, {}, 2, "rank 2 does not answer (stopped"),
        ({0: waits(1), 1: busy()}, {3, 2}, {}, 2, "ranks 2 and 3 do not answer"),
        # nobody answers: of two, the other; of more, one's own link
        ({0: waits(1)}, {1}, {}, 1, "rank 1 does not answer"),
        ({0: waits(1)}, {1, 2}, {}, 0, "rank 0 hears none of the others: its own link is down"),
        # the end of the chain of waits, not the neighbour
        (
            {0: waits(1), 1: waits(2), 2: outside()},
            set(),
            {},
            2,
            "rank 2 has not entered call 5 (sparse_all_reduce): it has been outside weft for 12.3",
        ),
        (
            {0: waits(1), 1: busy(4, "barrier")},
            set(),
            {},
            1,
            "rank 1 has not entered call 5 (sparse_all_reduce): "
            "it is in call 4 (barrier) and waits for nobody",
        ),
        (
            {0: waits(1), 1: busy()},
            set(),
            {},
            1,
            "rank 1 keeps the others waiting: it is in call 5 (sparse_all_reduce) and waits for "
            "nobody",
        ),
        (
            {0: waits(1), 1: outside(5)},
            set(),
            {},
            1,
            "rank 1 keeps the others waiting: it has been outside weft for 12.3 s",
        ),
        (
            {0: waits(1), 1: outside(7)},
            set(),
            {},
            1,
            "rank 1 is past call 5 (sparse_all_reduce) already: it has been outside weft",
        ),
        # without calls, the group is used by itself
        (
            {0: waits(1, 0, ""), 1: outside(0)},
            set(),
            {},
            1,
            "rank 1 keeps the others waiting: it has been outside weft for 12.3 s",
        ),
        # one that left, at once or through others
        ({0: waits(1)}, set(), {1: ""}, 1, "rank 1 left"),
        (
            {0: waits(1), 1: waits(2)},
            set(),
            {2: "KeyError: 7"},
            2,
            "rank 2 left, after it raised (KeyError: 7)",
        ),
        # one that raised something of which it told nobody
        (
            {0: waits(1), 1: outside(raised="KeyError: 7")},
            set(),
            {},
            1,
            "rank 1 has not entered call 5 (sparse_all_reduce): it has been outside weft for 12.3 "
            "s, after it raised (KeyError: 7)",
        ),
        # all wait for each other: who is in another call
        (
            {0: waits(1), 1: waits(0, 4, "barrier")},
            set(),
            {},
            1,
            "rank 1 is in call 4 (barrier) and has waited for rank 0 for 2.0 s, but rank 0 is in "
            "call 5 (sparse_all_reduce) and has waited for rank 1 for 2.0 s: all ranks must make",
        ),
        (
            {0: waits(1), 1: waits(2, doing="barrier"), 2: waits(0)},
            set(),
            {},
            1,
            "rank 1 is in call 5 (barrier)",
        ),
        (
            {0: waits(1, 4), 1: waits(2), 2: waits(0)},
            set(),
            {},
            0,
            "rank 0 is in call 4 (sparse_all_reduce)",
        ),
        # all wait for each other in the same call
        (
            {0: waits(1), 1: waits(0)},
            set(),
            {},
            1,
            "not all came in time between rank 1 and rank 0 in call 5 (sparse_all_reduce), though "
            "both answer: the link is too slow, or the ranks disagree on what to send",
        ),
    ],
)
def test_judge(places, silent, left, culprit, text):
    verdict = judge(0, places, silent, left)
    assert verdict.culprit == culprit
    assert verdict.text.startswith(text), verdict.text
