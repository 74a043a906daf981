"""Index lists come back as they were, whatever they are, and are short where they are dense."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.sparse import codec
from weft.wire.memory import Pool


def there_and_back(indices, gaps):
    lease = codec.pack(indices, Pool(), gaps=gaps)
    assert codec.bytes_of(lease.tensor[: codec.PREFIX]) == lease.tensor.numel()
    longer = torch.cat([lease.tensor, torch.full((9,), 0xA5, dtype=torch.uint8)])
    assert torch.equal(codec.unpack(longer, indices.dtype), indices)
    return lease.tensor.numel()


@given(
    st.sets(st.one_of(st.integers(0, 2**31 - 1), st.integers(0, 900)), max_size=40),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
)
def test_lists_come_back(indices, dtype, gaps):
    there_and_back(torch.tensor(sorted(indices), dtype=dtype), gaps)


@pytest.mark.parametrize(
    ("gap", "width"), [(1, 1), (255, 1), (256, 2), (65535, 2), (65536, 4), (2**32, 8)]
)
def test_as_wide_as_the_widest_gap_needs(gap, width):
    indices = torch.cat([torch.arange(100), torch.tensor([99 + gap])])
    count = 100 if width < 8 else 101  # gaps, or the indices themselves
    assert there_and_back(indices, True) == codec.PREFIX + count * width
    assert there_and_back(indices, False) == codec.PREFIX + 101 * 8


def test_what_an_index_will_probably_take():
    draw = torch.Generator().manual_seed(0)
    for count, places in ((50_000, 1_000_000), (50_000, 100_000_000), (1000, 2000)):
        indices = torch.randint(places, (count,), generator=draw).unique()
        size = there_and_back(indices.int(), True) - codec.PREFIX
        guess = codec.index_bytes(len(indices), places, 4)
        assert size / len(indices) == pytest.approx(guess, rel=0.01)
    assert codec.index_bytes(0, 10, 4) == 4
