"""What each table of a list gets, where its caller wants it; errors call it by its number."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.testing import spmd

LARGEST = 2**62 - 2  # index in a list of two tables


@pytest.mark.parametrize("name", ["auto", "gather", "split", "doubling", "holders", "ring"])
@spmd(1, 2, on=("threads",))
def test_the_largest_index_that_a_list_takes(wire, name):
    def rows(highest):
        return [(torch.tensor([highest, 5]), torch.ones(2))] * 2

    text = f"rank 0: table 0: index {LARGEST + 1} is too large for a list: pass it alone"
    with pytest.raises(weft.WeftError, match=text):
        weft.sparse_all_reduce(rows(LARGEST + 1), algorithm=name)
    for indices, values in weft.sparse_all_reduce(rows(LARGEST), algorithm=name):
        assert indices.tolist() == [5, LARGEST]
        assert values.tolist() == [wire.size] * 2
