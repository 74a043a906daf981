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


def room(count, *row_shape):
    return torch.empty(count, dtype=torch.int64), torch.empty(count, *row_shape)


def one_hot(wire, number, *row_shape):
    """A row that all ranks have and one of this rank's."""
    return torch.tensor([wire.rank, 70]), torch.full((2, *row_shape), float(number))


@spmd(1, 2, on=("threads",))
def test_errors_name_the_table_of_the_list(wire):
    many = [one_hot(wire, number) for number in range(300)]
    two = [one_hot(wire, 1, 3), one_hot(wire, 2, 4)]
    for rows, table, name in ((many, 299, "auto"), (two, 1, "doubling"), (two, 1, "split")):
        out = [None] * len(rows)
        out[table] = room(1, *rows[table][1].shape[1:])
        text = f"rank 0: table {table}: out holds 1 rows, the result has {wire.size + 1}: pass"
        with pytest.raises(weft.WeftError, match=text):
            weft.sparse_all_reduce(rows, algorithm=name, out=out)
    if wire.rank == 1:
        many[298] = one_hot(wire, 298, 5)
    if wire.size > 1:
        text = r"differ in table 298: rank 0 has rows of shape \(\), rank 1 .* \(5,\); pass"
        for call in (weft.sparse_all_reduce, weft.explain):
            with pytest.raises(weft.WeftError, match=text):
                call(many)
