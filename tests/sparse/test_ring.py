"""ring combines a rank's duplicates while it sends them, in the order that its neighbour expects.

That it gives the documented result is tested with all algorithms (`test_algorithms`).
"""

from __future__ import annotations

import pytest
import torch

import weft
from weft.sparse.link import set_link
from weft.sparse.local_rows import LocalRows
from weft.testing import expected, run
from weft.wire.link import Link

SLOW = Link(1e-4, 8e-9, 1e-9, 1e-5)  # 1 Gbit/s: small chunks


def repeated(rank, dtype=torch.float32):
    """Rows in no order, many of them several times: some twenty chunks in each range of three."""
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(6000, (8000 if rank else 20_000,), generator=draw)
    return weft.Rows(tokens, torch.randint(-2, 3, (len(tokens), 512), generator=draw).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_duplicates_are_combined_on_the_way_out(monkeypatch, ranks, dtype):
    """Never all of them, and whatever is ready first: the neighbour takes rows as they come."""
    monkeypatch.setattr(LocalRows, "values", property(lambda own: pytest.fail("combined all rows")))

    def body(wire):
        set_link(wire, SLOW)
        return weft.sparse_all_reduce(repeated(wire.rank, dtype), algorithm="ring")

    want = expected([repeated(rank, dtype) for rank in range(ranks)])
    for total in run(ranks, body):
        assert torch.equal(total.indices, want.indices) and torch.equal(total.values, want.values)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_rows_that_are_canonical_are_sent_from_where_they_lie(wire_dtype):
    indices = [torch.arange(rank, 9000, 2 + rank) for rank in range(3)]
    rows = [weft.Rows(one, torch.ones(len(one), 512)) for one in indices]

    def body(wire):
        set_link(wire, SLOW)
        return weft.sparse_all_reduce(rows[wire.rank], algorithm="ring", wire_dtype=wire_dtype)

    want = expected(rows)
    for total in run(3, body):
        assert torch.equal(total.indices, want.indices) and torch.equal(total.values, want.values)
