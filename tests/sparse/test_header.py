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
TOTAL, _, FEWEST, _ = range(0, 32, 8)  # bytes at which the figures begin
WIDTH_OF_WEIGHTS = 49
POINTS = 64  # behind the fixed fields
WEIGHTS = POINTS + 128  # points, as differences, take 1 byte each; so do weights


def packed(*, carries=False):
    indices = 3 * torch.arange(ROWS)
    values = torch.ones(ROWS, 2) if carries else None
    header = Header.of(indices, values=values)
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


FIGURES = {
    "more rows than there is memory for": put(TOTAL, 1 << 60),
    "fewer rows than its own": put(TOTAL, ROWS - 1),
    "a rank with fewer rows than the one with fewest": put(FEWEST, 2 * ROWS),
    "a negative number": put(FEWEST, -7),
}
POINTLESS = {
    "points that do not ascend": put_small(POINTS + 5, 0xFF),
    "weights of other rows": put_small(WEIGHTS, 200),
}


@pytest.mark.parametrize("what", FIGURES)
@pytest.mark.parametrize("carries", [False, True])
def test_figures_of_no_rows_are_refused(carries, what):
    raw = packed(carries=carries)
    assert Header.unpack(memoryview(raw), (2,)).total == ROWS
    FIGURES[what](raw)
    with pytest.raises(ValueError, match="it says"):
        Header.unpack(memoryview(raw), (2,))


@pytest.mark.parametrize("what", POINTLESS)
def test_points_of_other_rows_are_refused(what):
    raw = packed()
    POINTLESS[what](raw)
    with pytest.raises(ValueError, match="its points do not"):
        Header.unpack(memoryview(raw), (2,))


def test_rows_come_without_a_width_of_weights():
    raw = packed(carries=True)
    raw[WIDTH_OF_WEIGHTS] = 1
    with pytest.raises(ValueError, match="its indices have 8 bytes"):
        Header.unpack(memoryview(raw), (2,))


@pytest.mark.parametrize("count", [0, 1, 100, 257, 100_000])
def test_what_a_rank_says_of_its_rows_is_read(count):
    for indices in (torch.arange(count), torch.randperm(1 << 20)[:count].sort().values):
        raw = memoryview(Header.of(indices).pack())
        assert Header.unpack(raw).pack() == raw


def test_who_says_more_rows_than_there_is_memory_for_is_named(monkeypatch):
    pack = Header.pack

    def spoilt(header):
        is_of_1 = threading.current_thread().name == "rank 1"
        return pack(header._replace(total=1 << 60) if is_of_1 else header)

    monkeypatch.setattr(Header, "pack", spoilt)

    def program(group):
        rows = weft.Rows(torch.arange(60_000), torch.ones(60_000))
        with pytest.raises(weft.WireError, match="rank 1 sent a statement") as caught:
            weft.sparse_all_gather(rows)
        assert caught.value.culprit == 1

    run(3, program)
