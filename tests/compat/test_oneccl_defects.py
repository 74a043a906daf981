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


def reduced(indices, values, rtype="sum", mode="regular"):
    """The result of one call with a completion callback: indices, values."""
    result = []
    attr = event.create_sparse_allreduce_attr(
        completion_fn=lambda idx, *rest: result.extend((idx, rest[2])), coalesce_mode=mode
    )
    sent = indices, indices.numel(), values, values.numel()
    event.sparse_allreduce(*sent, *UNUSED, rtype, event.create_communicator(), attr=attr).wait()
    return result


@pytest.mark.parametrize("mode", ["regular", "disable", "keep_precision"])
@spmd(2, on=("threads",))
def test_negative_indices_are_refused(group, mode):
    """They were taken, and came out last."""
    for dtype in (torch.int8, torch.int64):
        indices = torch.tensor([3, -2 if group.rank else 2], dtype=dtype)
        with pytest.raises(weft.WeftError, match="rank 1: index -2 is negative"):
            reduced(indices, torch.ones(2), mode=mode)
    high = torch.tensor([2**64 - 2 if group.rank else 2], dtype=torch.uint64)  # which is not
    assert reduced(high, torch.ones(1), mode=mode)[0].tolist() == [2, 2**64 - 2]


# "A rank without rows is refused" is the case "one rank has them, another is empty" in
# test_oneccl_unsigned.py, with every algorithm, and, for each face,
# test_buffers_of_a_rank_without_rows_may_be_none in test_oneccl_faces.py. "alloc_fn with one
# algorithm only" is test_the_result_is_written_straight_to_what_alloc_fn_gives in
# test_oneccl_event.py.
