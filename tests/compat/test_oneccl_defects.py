"""What oneCCL's sparse_allreduce got wrong, as seen in 2021.3 and its source: each is right here.

What weft's own call has been tested for (the same bits on every rank, negative values, rows of
different widths) is not tested here again.
"""

from __future__ import annotations

import pytest
import torch

import weft
from weft.compat.oneccl import event
from weft.testing import spmd

UNUSED = [None] * 4


def reduced(indices, values):
    """The result of one call with a completion callback: indices, values."""
    result = []
    attr = event.create_sparse_allreduce_attr(
        completion_fn=lambda idx, *rest: result.extend((idx, rest[2]))
    )
    sent = indices, indices.numel(), values, values.numel(), *UNUSED, indices.dtype, values.dtype
    event.sparse_allreduce(*sent, "sum", event.create_communicator(), attr=attr).wait()
    return result


@spmd(2, on=("threads",))
def test_negative_indices_are_refused(group):
    """They were taken, and came out last."""
    for dtype in (torch.int8, torch.int64):
        indices = torch.tensor([3, -2 if group.rank else 2], dtype=dtype)
        with pytest.raises(weft.WeftError, match="rank 1: index -2 is negative"):
            reduced(indices, torch.ones(2))
    assert reduced(torch.tensor([2]), torch.ones(1))[0].tolist() == [2]


# "A rank without rows is refused" is test_buffers_of_a_rank_without_rows_may_be_none in
# test_oneccl_faces.py, for each face.
