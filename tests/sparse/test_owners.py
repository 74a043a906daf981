"""Owners have equal work, whatever the data look like; and a header says enough to cut them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import header_of
from weft.sparse.header import Header
from weft.sparse.owners import balanced_bounds

DRAWS = {
    "uniform": lambda g: torch.randint(1_000_000, (20_000,), generator=g),
    "zipf": lambda g: (1_000_000 ** torch.rand(50_000, generator=g)).long() - 1,
    "clustered": lambda g: torch.randint(3000, (9_000,), generator=g) + 500_000,
    "two ends": lambda g: torch.cat(
        [torch.randint(5000, (9_000,), generator=g), 900_000 + torch.randint(5000, (9,))]
    ),
}


def headers_of(name, ranks):
    parts = [DRAWS[name](torch.Generator().manual_seed(rank)).unique() for rank in range(ranks)]
    stated = [header_of(part, ranks, rank) for rank, part in enumerate(parts)]
    return parts, Header.of_all(stated).with_points_of(stated)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 17, 24])
@pytest.mark.parametrize("name", DRAWS)
def test_owners_have_equal_work(name, ranks):
    parts, header = headers_of(name, ranks)
    edges = torch.tensor([*balanced_bounds(header, ranks)[:-1], 2**40])
    union = torch.cat(parts).unique()
    rows = sum(torch.searchsorted(part, edges).diff() for part in parts)
    sums = torch.searchsorted(union, edges).diff()
    work = rows + (ranks - 1) * sums
    assert work.max() <= 1.25 * work.float().mean()


@given(
    st.lists(st.lists(st.integers(0, 50), max_size=20), min_size=2, max_size=6),
)
def test_cuts_ascend_and_a_header_survives_the_wire(parts):
    headers = [header_of(torch.tensor(sorted(set(part)), dtype=torch.int64)) for part in parts]
    for header in headers:
        assert Header.unpack(memoryview(header.pack())).pack() == header.pack()
    whole = Header.of_all(headers).with_points_of(headers)
    found = balanced_bounds(whole, len(parts))
    assert len(found) == len(parts) + 1
    assert found == sorted(found)
    distinct = {index for part in parts for index in part}
    assert whole.total == sum(len(set(part)) for part in parts)
    assert whole.weights.sum() == whole.total
    assert whole.highest == max(distinct, default=-1)


@pytest.mark.parametrize(("step", "gaps"), [(1, 1), (300, 2), (70_000, 4), (2**40, 8)])
def test_a_header_has_no_more_bytes_than_its_numbers_need(step, gaps):
    """Behind 48 others: 128 points, and no weights, which follow from the number of rows."""
    header = header_of(torch.arange(1000) * step)
    raw = memoryview(header.pack())
    assert len(raw) == 48 + 128 * gaps
    again = Header.unpack(raw)
    for name in ("points", "weights"):
        assert getattr(again, name).tolist() == getattr(header, name).tolist()
