"""A header whose figures no rank can have is refused, and the rank that sent it is named."""

from __future__ import annotations

import struct
import threading

import pytest
import torch

import weft
from cases import header_of
from weft.sparse.header import Header
from weft.testing import run

ROWS = 600  # more than a header has points
# bytes at which the figures begin, and the width; then points, as differences, which take a
# byte each
TOTAL, COUNT, WIDTH, POINTS = 0, 24, 32, 48


def packed(*, carries=False):
    indices = 3 * torch.arange(ROWS)
    header = header_of(indices)
    if carries:
        header = header._replace(rows=weft.Rows(indices, torch.ones(ROWS, 2)))
    return header.pack()


FIGURES = {  # where, and the number of 64 bits that then stands there
    "more rows than there is memory for": (TOTAL, 1 << 60),
    "more rows than any": (TOTAL, 1 << 44),
    "a negative number": (TOTAL, -7),
}
POINTLESS = {  # the same of 8 bits
    "points that do not ascend": (POINTS + 5, 0xFF),
    "points that reach too far": (POINTS, 200),
    "no such width": (WIDTH, 3),
    "wider points": (WIDTH, 2),
    "more points": (COUNT, 129),
    "many more points": (COUNT + 1, 5),
}


def is_refused(raw, code, at, number):
    Header.unpack(memoryview(raw), (2,))
    struct.pack_into(code, raw, at, number)
    with pytest.raises((ValueError, TypeError)):
        Header.unpack(memoryview(raw), (2,))


@pytest.mark.parametrize("what", FIGURES)
@pytest.mark.parametrize("carries", [False, True])
def test_figures_of_no_rows_are_refused(carries, what):
    is_refused(packed(carries=carries), "<q", *FIGURES[what])


def test_rows_of_another_number_are_refused():
    is_refused(packed(carries=True), "<q", TOTAL, ROWS - 1)


@pytest.mark.parametrize("what", POINTLESS)
def test_points_of_other_rows_are_refused(what):
    is_refused(packed(), "<B", *POINTLESS[what])


@pytest.mark.parametrize("count", [0, 1, 100, 257, 100_000])
def test_what_a_rank_says_of_its_rows_is_read(count):
    for indices in (torch.arange(count), torch.randperm(1 << 20)[:count].sort().values):
        raw = memoryview(header_of(indices).pack())
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
