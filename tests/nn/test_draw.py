"""A plan is drawn as it is: who has what, whose values lie where, what is added up."""

from __future__ import annotations

import weft
from weft import nn
from weft.nn.draw import drawn
from weft.nn.grid import Box, whole
from weft.nn.plan import Piece, Side, between
from weft.testing import run

HALVES = {0: Box((0, 0), (3, 4)), 2: Box((3, 0), (5, 4))}


def plan_of(size, layer, shapes):
    """The plan of a layer, for the shapes of its ranks."""
    return run(size, lambda group: layer().plan(shapes))[0]


def cells(plan, rank):
    """The cells of a rank's tables, line by line."""
    lines = plan.draw(rank).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"rank {rank} gets"))
    return [line.split() for line in lines[start + 1 :]]


def test_the_whole_text():
    plan = between(HALVES, dict.fromkeys(HALVES, whole((5, 4))))
    table = ["     0:4", "0:3    0", "3:5    2"]
    assert plan.draw().splitlines() == [
        "20 values in 2 messages between 2 ranks",
        "rank 0 has (3, 4)",
        "rank 2 has (2, 4)",
        "rank 0 gets (5, 4)",
        *table,
        "rank 2 gets (5, 4)",
        *table,
    ]
    assert plan.draw(2) == plan.draw().replace("rank 0 gets (5, 4)\n" + "\n".join(table) + "\n", "")


def test_sums_name_all_that_are_added():
    plan = between(HALVES, dict.fromkeys(HALVES, whole((5, 4)))).T
    assert cells(plan, 0) == [["0:4"], ["0:3", "0+2"]]
    assert cells(plan, 2) == [["0:4"], ["0:2", "0+2"]]


def test_halos_lie_where_they_come_from():
    plan = plan_of(2, lambda: nn.HaloExchange(weft.Partition(2), 1), {0: (3,), 1: (2,)})
    # nobody fills what is beyond the edge
    assert cells(plan, 1) == [["0:1", "1:3", "3:4"], ["0:1", "0", "1", "."]]
    assert cells(plan.T, 0) == [["0:2", "2:3"], ["0:1", "0", "0+1"]]
    ring = plan_of(2, lambda: nn.HaloExchange(weft.Partition(2), 1, "periodic"), plan.have.shapes)
    assert cells(ring, 0) == [["0:1", "1:4", "4:5"], ["0:1", "1", "0", "1"]]


def test_the_dimensions_that_are_cut_are_shown():
    def layer():
        return nn.Repartition(weft.Partition((1, 2)), weft.Partition((1, 1, 1, 2)))

    plan = plan_of(2, layer, {0: (7, 2, 9, 6), 1: (7, 1, 9, 6)})
    assert cells(plan, 1) == [["0:3"], ["0:2", "0"], ["2:3", "1"]]


def test_where_more_than_two_are_cut_each_range_has_a_table():
    corners = {rank: Box((rank,) * 3, (rank + 1,) * 3) for rank in range(2)}
    table = [["0:1", "1:2"], ["0:1", "0", "."], ["1:2", ".", "."]]
    other = [["0:1", "1:2"], ["0:1", ".", "."], ["1:2", ".", "1"]]
    assert cells(between(corners, {1: whole((2, 2, 2))}), 1) == [
        ["0:1", "of", "dimension", "0"],
        *table,
        ["1:2", "of", "dimension", "0"],
        *other,
    ]


def test_pieces_of_a_rank_and_tensors_of_their_own():
    strided = Side(
        {0: (4,), 1: (4,)},
        tuple(
            Piece(rank, Box((at,), (at + 2,)), (2 * (at > 3),))
            for at, rank in ((0, 0), (2, 1), (4, 0), (6, 1))
        ),
    )
    assert cells(between(strided, {0: whole((8,))}), 0)[1] == ["0:1", "0", "1", "0", "1"]
    own = [Side.of({rank: whole((3,))}, {rank: rank}) for rank in (0, 1)]
    both = Side({0: (3,), 1: (3,)}, own[0].pieces + own[1].pieces)
    assert [cells(between(both, both), rank)[1] for rank in (0, 1)] == [["0:1", "0"], ["0:1", "1"]]


def test_numbers_and_tensors_without_elements():
    assert drawn((), [(whole(()), 3)]) == ["     0:1", "0:1    3"]
    assert drawn((0, 2), []) == ["     0:2"]
    assert drawn((2, 0), []) == ["", "0:2"]
    assert between({}, {}).draw() == "0 values in 0 messages between 0 ranks"
