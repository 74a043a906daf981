"""Index lists come back as they were, whatever they are, and are short where that is possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from cases import on_hosts, same, set_rate
from weft.base.memory import Pool
from weft.sparse import codec, last_call
from weft.testing import spmd


def there_and_back(indices, gaps):
    pool, leases = Pool(), []

    def room(nbytes):
        leases.append(pool.lease(nbytes))
        return leases[-1].tensor

    lease = codec.pack(indices, pool, gaps=gaps)
    longer = torch.cat([lease.tensor, torch.full((9,), 0xA5, dtype=torch.uint8)])
    last = int(indices[-1]) if indices.numel() else -1
    assert torch.equal(codec.unpack(longer, indices.dtype, last, room), indices)
    return lease.tensor.numel() - codec.PREFIX


@settings(max_examples=40)
@given(
    st.sampled_from([0, 1, 2, 900, 1100, 3000]),
    st.integers(1, 40),
    st.integers(0, 2**32),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
)
def test_lists_come_back(count, bits, seed, dtype, gaps):
    draw = torch.Generator().manual_seed(seed)
    high = 2 ** min(bits, 31 if dtype is torch.int32 else 40)
    indices = torch.randint(high, (count,), generator=draw).unique().to(dtype)
    size = there_and_back(indices, gaps)
    assert size <= indices.numel() * dtype.itemsize


def test_short_lists_and_those_far_apart_are_plain():
    few = torch.arange(1000, dtype=torch.int32)
    assert there_and_back(few, True) == 4 * 1000  # sending them is quicker than packing them
    many = torch.arange(2000, dtype=torch.int32)
    assert there_and_back(many, True) == 8 + 8 + 256
    assert there_and_back(many, False) == 4 * 2000
    far = torch.arange(2000) << 45  # beyond what the code can tell
    assert there_and_back(far, True) == 8 * 2000


@spmd(2, on=("threads",))
def test_indices_that_fit_travel_as_int32(group):
    """Whatever the caller's are of, on a host, where they are not packed."""
    near = torch.arange(40_000) * 3
    near[-1] = 2**31 - 2
    sent = {}
    for kind, indices in {"int64": near, "int32": near.int(), "far": near + 1}.items():
        found = weft.sparse_all_reduce((indices, torch.ones(40_000)), algorithm="gather")
        assert found[0].dtype == indices.dtype and torch.equal(found[0], indices)
        sent[kind] = last_call().sent_bytes
    assert sent["int64"] == sent["int32"] == pytest.approx(8 * 40_000, rel=0.02)
    assert sent["far"] - sent["int64"] == 4 * 40_000


@pytest.mark.parametrize("name", ["gather", "split"])
@pytest.mark.parametrize("rate", [16, 19])
@spmd(3, on=("threads",))
def test_long_lists_come_in_two_messages(group, name, rate):
    """Beside short ones; packed on the slow link, where they are still longer than the first."""
    set_rate(group, rate)
    total = torch.zeros(3_000_000)
    for rank, count in enumerate((900_000, 40, 600_000)):
        draw = torch.Generator().manual_seed(rank)
        indices = torch.randint(len(total), (count,), generator=draw)
        total.index_add_(0, indices, torch.full((count,), rank + 1.0))
        if rank == group.rank:
            rows = weft.Rows(indices, torch.full((count,), rank + 1.0), len(total))
    with on_hosts(group, "abc"):
        assert weft.explain(rows, algorithm=name).sizes.gaps == (rate == 16)
        found = weft.sparse_all_reduce(rows, algorithm=name)
    (there,) = total.nonzero(as_tuple=True)
    same(found, weft.Rows(there, total[there]))
