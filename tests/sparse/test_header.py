"""A header whose figures no rank can have is refused, and the rank that sent it is named."""

from __future__ import annotations

import struct
import threading

import pytest
import torch

import weft
from weft.sparse.header import Header
from weft.testing import run

ROWS = 600  # more than a header has points
HIGHEST = 3 * (ROWS - 1)
TOTAL, MOST, FEWEST, TOP = range(0, 32, 8)  # bytes at which the figures begin
RATE = 32
COUNT, WIDTH_OF_WEIGHTS = 40, 49
POINTS = 64  # behind the fixed fields
WEIGHTS = POINTS + 128  # points, as differences, take 1 byte each; so do weights


def packed(*, carries=False, moves=False):
    indices = 3 * torch.arange(ROWS)
    values = torch.ones(ROWS, 2) if carries else None
    header = Header.of(indices, values=values, highest=HIGHEST if moves else None)
    return header.pack()


def put(at, *numbers):
    """Change a header: from byte `at` on it has these integers of 64 bits."""

    def change(raw):
        struct.pack_into(f"<{len(numbers)}q", raw, at, *numbers)

    return change


def put_small(at, *numbers):
    """The same of integers of 8 bits."""

    def change(raw):
        raw[at : at + len(numbers)] = bytes(numbers)

    return change


def without_points(raw):
    del raw[POINTS:]
    struct.pack_into("<q2B", raw, COUNT, 0, 1, 1)


OF_ALL = {  # whether it says where rows lie, has them, or is of unsorted ones
    "more rows than it has": put(TOTAL, 1 << 40),
    "another rank with more rows": put(TOTAL, 2 * ROWS, 2 * ROWS),
    "another rank with fewer rows": put(FEWEST, 7),
    "no index": put(TOP, -1),
}
OF_SORTED = {
    "fewer indices than rows": put(TOP, ROWS - 2),
    "an index without rows": put(TOTAL, 0, 0, 0),
}
OF_DESCRIBED = {
    "no points": without_points,
    "other shares": put_small(WEIGHTS, 3, 6),
    "points nearer than rows": put_small(POINTS, 0, 1),
    "the last point too near the last index": put_small(POINTS + 127, 25),
}


FORMS = {
    "described": OF_ALL | OF_SORTED | OF_DESCRIBED,
    "carries": OF_ALL | OF_SORTED,
    "moves": OF_ALL,
}


@pytest.mark.parametrize(("form", "what"), [(form, what) for form in FORMS for what in FORMS[form]])
def test_what_no_rank_has_alone_is_refused(form, what):
    moves = form == "moves"
    raw = packed(carries=form == "carries", moves=moves)

    def read():
        return Header.unpack(memoryview(raw), (2,), moves=moves, of_one=True)

    assert read().total == ROWS
    FORMS[form][what](raw)
    why = "are not those of 600 rows" if what in OF_DESCRIBED else "which no rank has alone"
    with pytest.raises(ValueError, match=why):
        read()


def test_rows_come_without_a_width_of_weights():
    raw = packed(carries=True)
    raw[WIDTH_OF_WEIGHTS] = 1
    with pytest.raises(ValueError, match="its indices have 8 bytes"):
        Header.unpack(memoryview(raw), (2,), of_one=True)


@pytest.mark.parametrize("rate", [0, 41])
def test_a_rate_that_no_link_has_is_refused(rate):
    raw = packed()
    raw[RATE] = rate
    with pytest.raises(ValueError, match=f"it says a rate of {rate}"):
        Header.unpack(memoryview(raw), (2,), of_one=True)


@pytest.mark.parametrize("count", [0, 1, 100, 257, 100_000])
def test_what_a_rank_says_of_its_rows_is_read(count):
    for indices in (torch.arange(count), torch.randperm(1 << 20)[:count].sort().values):
        raw = memoryview(Header.of(indices).pack())
        assert Header.unpack(raw, of_one=True).pack() == raw


def test_who_says_more_rows_than_there_is_memory_for_is_named(monkeypatch):
    pack = Header.pack

    def spoilt(header):
        is_of_1 = threading.current_thread().name == "rank 1"
        return pack(header._replace(total=1 << 40) if is_of_1 else header)

    monkeypatch.setattr(Header, "pack", spoilt)

    def program(group):
        rows = weft.Rows(torch.arange(60_000), torch.ones(60_000))
        with pytest.raises(weft.WireError, match="rank 1 sent a statement") as caught:
            weft.sparse_all_gather(rows)
        assert caught.value.culprit == 1

    run(3, program)
