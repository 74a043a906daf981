"""What oneCCL's sparse_allreduce got wrong, as seen in 2021.3 and its source: each is right here.

What weft's own call has been tested for (the same bits on every rank, negative values, rows of
different widths) is not tested here again.
"""

from __future__ import annotations

import pytest
import torch

import weft
from weft.compat.oneccl import event
from weft.sparse import ALGORITHMS
from weft.testing import expected, run, spmd

UNUSED = [None] * 4
CHOICES = ["auto", *ALGORITHMS]


def reduced(indices, values, rtype="sum", mode="regular"):
    """The result of one call with a completion callback: indices, values."""
    result = []
    attr = event.create_sparse_allreduce_attr(
        completion_fn=lambda idx, *rest: result.extend((idx, rest[2])), coalesce_mode=mode
    )
    sent = indices, indices.numel(), values, values.numel()
    event.sparse_allreduce(*sent, *UNUSED, rtype, event.create_communicator(), attr=attr).wait()
    return result


@pytest.mark.parametrize("algorithm", CHOICES)
@pytest.mark.parametrize("empty", [{1}, {0, 1, 2}])
def test_a_rank_may_have_no_rows(monkeypatch, algorithm, empty):
    """It was refused: and so is every batch that touches no row of a table."""

    def program(wire):
        count = 0 if wire.rank in empty else 2
        indices, values = reduced(torch.arange(count) + wire.rank, torch.ones(count, 2))
        return indices.tolist(), values.tolist()

    there = [
        weft.Rows(torch.arange(2) + rank, torch.ones(2, 2))
        for rank in range(3)
        if rank not in empty
    ]
    want = expected(there) if there else None
    flat = ([], []) if want is None else (want.indices.tolist(), want.values.view(-1).tolist())
    monkeypatch.setenv("CCL_SPARSE_ALLREDUCE", algorithm)
    assert run(3, program) == [flat] * 3


@pytest.mark.parametrize("mode", ["regular", "disable", "keep_precision"])
@spmd(2, on=("threads",))
def test_negative_indices_are_refused(wire, mode):
    """They were taken, and came out last."""
    for dtype in (torch.int8, torch.int64):
        indices = torch.tensor([3, -2 if wire.rank else 2], dtype=dtype)
        with pytest.raises(weft.WeftError, match="rank 1: index -2 is negative"):
            reduced(indices, torch.ones(2), mode=mode)
    high = torch.tensor([2**64 - 2 if wire.rank else 2], dtype=torch.uint64)  # which is not
    assert reduced(high, torch.ones(1), mode=mode)[0].tolist() == [2, 2**64 - 2]


# "alloc_fn with one algorithm only" is test_the_result_is_written_straight_to_what_alloc_fn_gives,
# in test_oneccl_event.py.
