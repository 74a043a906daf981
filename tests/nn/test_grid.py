"""Boxes, balanced cuts, indices."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.nn import grid
from weft.nn.grid import Box

SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)


def points(box):
    return {
        tuple(a + at for a, at in zip(box.start, index, strict=True))
        for index in grid.cells(box.shape)
    }


BOXES = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), min_size=2, max_size=2).map(
    lambda ranges: Box(tuple(a for a, _ in ranges), tuple(a + n for a, n in ranges))
)


@given(BOXES, BOXES)
@settings(max_examples=60)
def test_what_two_boxes_have_in_common(a, b):
    both = a & b
    assert (set() if both is None else points(both)) == points(a) & points(b)
    assert a.volume == len(points(a))
    left = [points(each) for each in a - b]
    assert set().union(*left) == points(a) - points(b)
    assert sum(map(len, left)) == len(points(a) - points(b))  # each once


def test_a_number_leaves_nothing_of_another():
    assert Box((), ()) - Box((), ()) == []


@given(st.integers(0, 50), st.integers(1, 9))
def test_balanced(length, parts):
    lengths = grid.balanced(length, parts)
    assert sum(lengths) == length and len(lengths) == parts
    assert list(lengths) == sorted(lengths, reverse=True) and max(lengths) - min(lengths) <= 1


@given(SHAPES)
@settings(max_examples=30)
def test_cells(shape):
    found = list(grid.cells(shape))
    assert len(found) == math.prod(shape)
    assert found == sorted(set(found))


def test_boxes_of_uneven_parts():
    assert grid.boxes([(2, 0, 1), (3,)]) == [
        Box((0, 0), (2, 3)),
        Box((2, 0), (2, 3)),
        Box((2, 0), (3, 3)),
    ]
    assert grid.boxes([]) == [Box((), ())]
