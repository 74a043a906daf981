"""`weft.failure.messages`: what one detector says, another reads, and nothing else."""

from __future__ import annotations

import json

import pytest

from weft.failure.messages import line_of, parse, place_of, values_of
from weft.failure.verdict import Entered, Place

RANKS = {0, 1, 2}
CALL = ["all 3 ranks", 6, "all_reduce"]
HERE = [7, "barrier", 2, 0.5, "", "train.py:6 in load_batch", [2], CALL, True, [CALL], False, ""]


@pytest.mark.parametrize(
    "message",
    [
        {"verdict": [2, "rank 2 died"]},
        {"verdict": [None, "all wait"]},
        {"bye": HERE},
        {"ask": 3},
        {"data": "b25l", "of": 1},
        {"here": HERE, "to": 3},
        {"here": [0, "", None, 3, "KeyError: 7", "", [], None, False, [], True, "in"], "to": 1},
    ],
)
def test_a_message_is_read_as_it_was_sent(message):
    line = line_of(message)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert parse(line[:-1], RANKS) == message


def test_a_place_is_read_as_it_was_sent():
    call = Entered("ranks 2, 0", 6, "all_reduce")
    place = Place(
        7,
        "barrier",
        2,
        0.5,
        "",
        "a.py:1",
        awaited=(2, 0),
        entered=call,
        opens=True,
        history=(call, call),
        in_round=True,
        elsewhere="joining group '2'",
    )
    message = parse(line_of({"here": values_of(place), "to": 1}), RANKS)
    assert place_of(message["here"]) == place


def changed(at, value):
    """A place with one value that none has."""
    return {"here": [*HERE[:at], value, *HERE[at + 1 :]], "to": 3}


@pytest.mark.parametrize(
    "message",
    [
        7,
        [],
        {},
        {"verdict": [3, "no such rank"]},
        {"verdict": [True, "no number"]},
        {"verdict": [1]},
        {"verdict": [1, 2]},
        {"verdict": [1, "two at once"], "bye": HERE},
        {"bye": 1},
        {"bye": "KeyError: 7"},
        {"bye": HERE[:-1]},
        {"ask": "3"},
        {"data": "b25l"},
        {"data": "no base64", "of": 1},
        {"data": "b25l", "of": 1.5},
        {"here": HERE},
        {"here": HERE[:-1], "to": 3},
        changed(0, "7"),
        changed(1, None),
        changed(2, "2"),
        changed(2, 3),
        changed(3, "soon"),
        changed(3, 10**400),
        changed(3, "1.5"),
        changed(3, True),
        changed(4, 0),
        changed(5, None),
        changed(6, 2),
        changed(6, ["2"]),
        changed(6, [3]),
        changed(7, ["all_reduce", 6]),
        changed(7, 6),
        changed(7, [6, 6, "all_reduce"]),
        changed(8, None),
        changed(9, [[6]]),
        changed(9, [[99, 6, "all_reduce"]]),
        changed(9, [["all 3 ranks", 6, 7]]),
        changed(9, {}),
        changed(10, 1),
        changed(11, None),
    ],
)
def test_what_no_detector_says_is_refused(message):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        parse(json.dumps(message).encode(), RANKS)
