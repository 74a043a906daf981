"""A plan is shown as it is: who has what, whose values lie where, what is added up."""

from __future__ import annotations

import weft
from weft import nn
from weft.nn.grid import Box, whole
from weft.nn.plan import between
from weft.testing import run

HALVES = {0: Box((0, 0), (3, 4)), 2: Box((3, 0), (5, 4))}


def test_the_whole_text():
    plan = between(HALVES, dict.fromkeys(HALVES, whole((5, 4))))
    parts = ["  [0:3, 0:4] of rank 0", "  [3:5, 0:4] of rank 2"]
    assert plan.draw().splitlines() == [
        "20 values in 2 messages between 2 ranks",
        "rank 0 has (3, 4)",
        "rank 2 has (2, 4)",
        "rank 0 gets (5, 4)",
        *parts,
        "rank 2 gets (5, 4)",
        *parts,
    ]
    assert plan.draw(2) == plan.draw().replace("rank 0 gets (5, 4)\n" + "\n".join(parts) + "\n", "")


def test_parts_of_a_sum_overlap_and_what_nobody_fills_is_in_none():
    def plan(group):
        return nn.HaloExchange(weft.Partition(2), 1).plan({0: (3,), 1: (2,)})

    forward = run(2, plan)[0]
    assert forward.draw(1).splitlines()[-2:] == ["  [0:1] of rank 0", "  [1:3] of rank 1"]
    assert forward.T.draw(0).splitlines()[-2:] == ["  [0:3] of rank 0", "  [2:3] of rank 1"]


def test_a_number_and_nothing():
    numbers = {3: whole(())}
    assert between(numbers, numbers).draw().splitlines()[-1] == "  [] of rank 3"
    assert between({}, {}).draw() == "0 values in 0 messages between 0 ranks"
