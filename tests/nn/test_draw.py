"""A plan is drawn as it is: who holds what, who gets what from whom, what is added up."""

from __future__ import annotations

import sys

import pytest
from matplotlib.colors import to_rgba

import weft
from weft.nn import draw
from weft.nn.draw import Cell, frames
from weft.nn.grid import Box, whole
from weft.nn.plan import Side, between
from weft.testing import run

HALVES = {0: Box((0, 0), (3, 4)), 2: Box((3, 0), (5, 4))}


def plan_of(size, layer, shapes):
    """The plan of a layer, for the shapes of its ranks."""
    return run(size, lambda group: layer().spec.plan(shapes))[0]


def points(cells):
    """Whose values are where, however that is cut into cells; {(start, stop): ranks} is a way."""
    if isinstance(cells, dict):
        cells = [Cell(Box(*ends), ranks) for ends, ranks in cells.items()]
    return {
        (row, column): cell.ranks
        for cell in cells
        for row in range(cell.box.start[0], cell.box.stop[0])
        for column in range(cell.box.start[1], cell.box.stop[1])
    }


def test_parts_of_one_tensor_are_one_frame():
    (have,), gets = frames(between(HALVES, dict.fromkeys(HALVES, whole((5, 4)))))
    assert have.title == "each rank has its part"
    assert points(have.cells) == points({((0, 0), (3, 4)): (0,), ((3, 0), (5, 4)): (2,)})
    assert have.outlines == tuple((box, f"rank {rank}") for rank, box in HALVES.items())
    assert [each.title for each in gets] == ["rank 0 gets (5, 4)", "rank 2 gets (5, 4)"]
    for each in gets:
        assert each.cells == have.cells and each.outlines == ((whole((5, 4)), ""),)


def test_sums_name_all_that_are_added():
    have, (gets,) = frames(between(HALVES, dict.fromkeys(HALVES, whole((5, 4)))).T)
    assert [each.title for each in have] == ["rank 0 has (5, 4)", "rank 2 has (5, 4)"]
    assert gets.title == "each rank gets its part"
    assert {cell.ranks for cell in gets.cells} == {(0, 2)}


def test_halos_lie_where_they_come_from():
    plan = plan_of(2, lambda: weft.nn.HaloExchange(weft.Partition(2), 1), {0: (3,), 1: (2,)})
    _, gets = frames(plan)
    assert points(gets[1].cells) == points({((0, 2), (1, 3)): (0,), ((0, 3), (1, 5)): (1,)})
    assert gets[1].outlines == ((Box((0, 2), (1, 6)), ""),)  # nobody fills what is beyond the edge
    (sums,) = frames(plan.T)[1]
    assert points(sums.cells) == points(
        {((0, 0), (1, 2)): (0,), ((0, 2), (1, 4)): (0, 1), ((0, 4), (1, 5)): (1,)}
    )
    ring = plan_of(
        2, lambda: weft.nn.HaloExchange(weft.Partition(2), 1, "periodic"), {0: (3,), 1: (2,)}
    )
    assert points(frames(ring)[1][0].cells) == points(
        {((0, -1), (1, 0)): (1,), ((0, 0), (1, 3)): (0,), ((0, 3), (1, 4)): (1,)}
    )


def test_the_dimensions_that_are_cut_are_shown():
    def grid():
        return weft.nn.Repartition(weft.Partition((1, 2)), weft.Partition((1, 1, 1, 2)))

    (have,), (gets,) = frames(plan_of(2, grid, {0: (7, 2, 9, 6), 1: (7, 1, 9, 6)}))
    assert points(have.cells) == points({((0, 0), (2, 6)): (0,), ((2, 0), (3, 6)): (1,)})
    assert points(gets.cells) == points(have.cells)  # as the outlines cut them
    assert [box.stop for box, _ in gets.outlines] == [(3, 3), (3, 6)]


def test_pieces_of_a_rank_and_tensors_of_their_own():
    strided = Side(
        {0: (4,), 1: (4,)},
        tuple(
            weft.nn.plan.Piece(rank, Box((at,), (at + 2,)), (2 * (at > 3),))
            for at, rank in ((0, 0), (2, 1), (4, 0), (6, 1))
        ),
    )
    (have,), _ = frames(between(strided, {0: whole((8,))}))
    assert [points(have.cells)[0, at] for at in (0, 2, 4, 6)] == [(0,), (1,)] * 2
    own = [Side.of({rank: whole((3,))}, {rank: rank}) for rank in (0, 1)]
    both = Side({0: (3,), 1: (3,)}, own[0].pieces + own[1].pieces)
    have, _ = frames(between(both, both))
    assert [each.title for each in have] == ["rank 0 has (3,)", "rank 1 has (3,)"]
    empty = between({0: whole((3,)), 1: Box((3,), (3,))}, {0: whole((3,))})
    assert frames(empty)[0][0].title == "each rank has its part, ranks 1 nothing"


def test_the_figure_shows_the_frames(tmp_path):
    plan = between(HALVES, dict.fromkeys(HALVES, whole((5, 4))))
    figure = plan.draw()
    assert figure.get_suptitle() == "all_gather: 20 values in 2 messages between 2 ranks"
    assert plan.draw("mine").get_suptitle() == "mine"
    assert [len(axes.texts) for axes in figure.axes] == [2, 2 + 1, 2 + 1]
    colours = [to_rgba(each.get_facecolor()) for each in figure.legends[0].get_patches()]
    for axes in figure.axes:
        filled = [each for each in axes.patches if each.get_fill()]
        assert [to_rgba(each.get_facecolor()) for each in filled] == colours
        assert [each.get_xy() for each in filled] == [(0, 0), (0, 3)]
        assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row is the top one
    figure.savefig(tmp_path / "plan.png", dpi=50)
    assert not any(each.get_hatch() for axes in figure.axes for each in axes.patches)
    back = plan.T.draw()
    assert {each.get_hatch() for each in back.axes[-1].patches} == {None, "///"}
    assert "added up" in back.legends[0].get_title().get_text()


def test_many_ranks_are_cut_short_and_none_are_refused(monkeypatch):
    monkeypatch.setattr(draw, "MOST", 2)
    everything = {rank: whole((2,)) for rank in range(2 + 3)}
    figure = between(everything, everything).draw()
    assert len(figure.axes) == 2 * 2
    assert "; 3 more ranks are not drawn" in figure.legends[0].get_title().get_text()
    with pytest.raises(weft.WeftError, match="nothing to draw"):
        between({}, {}).draw()
    number = between({0: whole(())}, {1: whole(())}).draw()  # a scalar
    assert [axes.get_title() for axes in number.axes] == ["rank 0 has ()", "rank 1 gets ()"]


def test_without_matplotlib_it_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(weft.WeftError, match=r"pip install matplotlib"):
        between({0: whole((2,))}, {0: whole((2,))}).draw()
