"""The root of a reduce or broadcast, and quantized values: what is wrong is told to all ranks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import weft
from weft.testing import spmd


class Mute:
    """Cannot even be named."""

    def __repr__(self):
        raise ValueError("no words")


def rows_of(rank):
    return torch.tensor([rank, 9]), torch.ones(2, 3)


CALLS = {
    "group_dst": lambda rows, root: weft.sparse_reduce(rows, group_dst=root),
    "group_src": lambda rows, root: weft.sparse_broadcast(rows, root),
}


@pytest.mark.parametrize("name", CALLS)
@spmd(1, 3, on=("threads", "stand-in", "processes"))
def test_what_is_no_rank_is_named_to_all(group, name):
    for wrong, said in ((Mute(), "a Mute"), (-1, "-1"), (99, "99"), (0.0, "0.0"), (None, "None")):
        odd = group.rank == group.size - 1
        with pytest.raises(weft.WeftError, match=f"^rank {group.size - 1}: {name} is {said}: pass"):
            CALLS[name](rows_of(group.rank), wrong if odd else 0)
        CALLS[name](rows_of(group.rank), 0)  # the next call works


@pytest.mark.parametrize("name", CALLS)
@spmd(3, on=("threads", "stand-in", "processes"))
def test_any_integer_is_a_rank(group, name):
    for root in (np.int32(2), torch.tensor(2), 2):
        result = CALLS[name](rows_of(group.rank), root if group.rank == 1 else 2)
        if result is not None:
            assert result[0].tolist() == ([0, 1, 2, 9] if name == "group_dst" else [2, 9])
        assert (result is None) == (name == "group_dst" and group.rank != 2)


def quantized(values):
    with warnings.catch_warnings():  # torch says that they will go
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor")
        return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)


def of_four_bits(values):
    return torch.zeros(values.shape, dtype=torch.uint8).view(torch.uint4)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (quantized, r"the tensor of values is quantized, which int_repr\(\) or dequantize\(\)"),
        (of_four_bits, "values are torch.uint4, which torch does not copy: view another dtype"),
    ],
)
@spmd(1, 3, on=("threads", "stand-in", "processes"))
def test_values_that_are_more_or_less_than_bytes_are_refused_by_all(group, kind, says):
    calls = (
        weft.sparse_all_reduce,
        weft.sparse_reduce_scatter,
        weft.sparse_reduce,
        weft.sparse_all_gather,
        weft.sparse_broadcast,
    )
    for call in calls:
        indices, values = rows_of(group.rank)
        with pytest.raises(weft.WeftError, match=f"rank 0: {says}"):
            call((indices, values if group.rank else kind(values)))
        call((indices, values))
