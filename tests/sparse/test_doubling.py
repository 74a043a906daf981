"""What only `doubling` does: large rows travel from where they are, apart from their indices."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.sparse import ALGORITHMS, last_call
from weft.testing import spmd

WIDTH = 1024


def rows_of(rank, size, count, dtype=torch.float32):
    """Rows that some ranks share, in no order; whole numbers, which are added exactly."""
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randperm(2 * count, generator=draw)[:count]
    return indices, (torch.arange(count * WIDTH).view(count, WIDTH) % 7 + rank).to(dtype)


@pytest.mark.parametrize(
    ("count", "dtype", "op"),
    [
        (256, torch.float32, "sum"),
        (257, torch.float32, "avg"),
        (257, torch.int32, "max"),
        (513, torch.bfloat16, "sum"),  # summed in float32: it is copied at once
        (255, torch.float32, "sum"),  # just too little
    ],
)
@spmd(2, 3, 6, 7, on=("threads",))
def test_large_rows_are_sent_from_where_they_are(wire, count, dtype, op):
    rows = rows_of(wire.rank, wire.size, count, dtype)
    before = rows[0].clone(), rows[1].clone()
    indices, values = weft.sparse_all_reduce(rows, op=op, algorithm="doubling")
    sent = torch.tensor([float(last_call().messages)])
    assert torch.equal(rows[0], before[0])
    assert torch.equal(rows[1], before[1])
    same = weft.sparse_all_reduce(rows, op=op, algorithm="gather")
    assert torch.equal(indices, same[0])
    assert torch.equal(values, same[1])

    load = weft.explain(rows, op=op, algorithm="doubling").load
    wire.dense_all_reduce(sent, "sum").wait()
    opening = wire.size - 1
    predicted = ALGORITHMS["doubling"].cost(load).messages
    assert round(sent.item() / wire.size) - opening == predicted
    core = 1 << (wire.size.bit_length() - 1)
    paired = 2 * (wire.size - core)
    apart = count >= 256 and dtype.itemsize == 4
    steps = core.bit_length() - 1
    each = [
        (1 + apart) if rank < paired and rank % 2 else steps + (1 if rank < paired else apart)
        for rank in range(wire.size)
    ]
    assert sent.item() == sum(each) + opening * wire.size


@spmd(4, on=("threads",))
def test_the_result_is_written_where_it_is_wanted(wire):
    rows = rows_of(wire.rank, wire.size, 300)
    room = torch.empty(600, dtype=torch.int64), torch.full((600, WIDTH), -1.0)
    indices, values = weft.sparse_all_reduce(rows, op="avg", algorithm="doubling", out=room)
    assert values.data_ptr() == room[1].data_ptr()
    expected = weft.sparse_all_reduce(rows, op="avg", algorithm="gather")
    assert torch.equal(indices, expected[0])
    assert torch.equal(values, expected[1])
    assert torch.all(room[1][len(values) :] == -1)
