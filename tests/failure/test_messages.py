"""What one detector says, another reads."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from weft.failure.detector import UNREADABLE, line_of, read
from weft.failure.verdict import Entered, Place


@pytest.mark.parametrize(
    "message",
    [
        {"verdict": [2, "rank 2 died"]},
        {"verdict": [None, "all wait"]},
        {"ask": 3},
        {"agrees": True},
    ],
)
def test_a_message_is_read_as_it_was_sent(message):
    line = line_of(message)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert read(line[:-1]) == message


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
        elsewhere="joining group '2'",
    )
    assert read(line_of({"here": astuple(place), "to": 1})) == {"here": place, "to": 1}
    assert read(line_of({"bye": astuple(place)})) == {"bye": place}


@pytest.mark.parametrize(
    "line",
    [
        b"7",
        b"rank 1",
        b"\xff",
        b"[" * 5000,
        b'{"bye": ["nobody"]}',
        b'{"here": [7, "barrier"], "to": 3}',
    ],
)
def test_what_no_detector_says_is_refused(line):
    with pytest.raises(UNREADABLE):
        read(line)
