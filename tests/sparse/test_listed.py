"""Index lists that come in the opening: from all ranks or from some, used or not."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.agree import BODY
from weft.errors import WeftError
from weft.sparse import last_call
from weft.sparse.header import Header, ListInHeader
from weft.sparse.link import set_link
from weft.sparse.run import _LATELY, _kind
from weft.testing import expected, run
from weft.wire.hosts import hosts_of
from weft.wire.link import Link
from weft.wire.memory import Pool

SLOW = Link(1e-4, 8e-9, 2e-10, 1e-5)  # 1 Gbit/s: lists are packed there, and chunks are small


def rows_of(rank, ranks, *, count=3000, row=64, height=20_000, far=0):
    """Rows in no order, some of them several times, some of them of this rank alone."""
    draw = torch.Generator().manual_seed(rank + 1)
    indices = torch.randint(height // 2, (count,), generator=draw)
    indices[::2] += height // 2 - (indices[::2] + rank) % ranks
    values = torch.randint(-8, 9, (count, *([row] if row else [])), generator=draw).float()
    return weft.Rows(indices + far, values, height + far)


def remember(wire, rows, name="holders"):
    """Have this rank expect that algorithm for rows like these, whatever others expect."""
    if wire.hosts is None:
        hosts_of(wire)  # all ranks ask that once
    wire.kept.setdefault(_LATELY, {})[_kind(rows)] = name


def told(wire, call):
    """What a call gives, and how many small messages this rank sends for it."""
    small, post = [], wire._post_small

    def watched(sends, recvs):
        small.extend(sends)
        return post(sends, recvs)

    wire._post_small = watched
    try:
        return call(), len(small)
    finally:
        wire._post_small = post


def alike(found, want):
    return torch.equal(found.indices, want.indices) and torch.equal(found.values, want.values)


@pytest.mark.parametrize("algorithm", ["auto", "holders", "gather"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_lists_that_are_expected_take_no_round_of_their_own(ranks, algorithm):
    def body(wire):
        rows = rows_of(wire.rank, ranks)
        first = weft.sparse_all_reduce(rows, algorithm=algorithm)  # that measures the link
        set_link(wire, SLOW)
        wire.kept.pop(_LATELY, None)
        seen = [told(wire, lambda: weft.sparse_all_reduce(rows, algorithm=algorithm))]
        seen.append(told(wire, lambda: weft.sparse_all_reduce(rows, algorithm=algorithm)))
        return first, seen, last_call()

    want = expected([rows_of(rank, ranks) for rank in range(ranks)])
    for first, seen, record in run(ranks, body):
        assert record.algorithm in ("holders", "gather")
        assert alike(first, want) and all(alike(found, want) for found, _ in seen)
        before = 2 if algorithm == "auto" else 1  # who asks by name is expected at once
        assert [count for _, count in seen] == [before * (ranks - 1), ranks - 1]


@pytest.mark.parametrize("who", [[0], [1, 2], [0, 2, 3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("algorithm", ["holders", "gather", "mask", "split"])
def test_some_send_lists_and_others_headers(who, algorithm, monkeypatch):
    """One rank has no rows, one so few that they travel in the opening, one too few to pack."""
    ranks, counts = 5, [3000, 2500, 4000, 900, 0]
    monkeypatch.setattr("weft.sparse.run.choose", lambda *_: algorithm)

    def body(wire):
        set_link(wire, SLOW)
        hosts_of(wire)  # all ranks ask that once
        rows = rows_of(wire.rank, ranks, count=counts[wire.rank])
        if wire.rank in who:
            remember(wire, rows)
        return told(wire, lambda: weft.sparse_all_reduce(rows))

    want = expected([rows_of(rank, ranks, count=count) for rank, count in enumerate(counts)])
    done = run(ranks, body)
    assert all(alike(found, want) for found, _ in done)
    if algorithm in ("holders", "gather"):
        for rank, (_, count) in enumerate(done):
            came = (rank in who and rank < 3) or rank == 4  # rank 4's rows are in its statement
            assert count == (1 if came else 2) * (ranks - 1)


def test_an_error_on_one_rank_is_everybodys():
    def body(wire):
        set_link(wire, SLOW)
        rows = rows_of(wire.rank, 3)
        remember(wire, rows)
        wrong = weft.Rows(rows.indices - (wire.rank == 1) * 20_000, rows.values, rows.height)
        with pytest.raises(WeftError, match=r"rank 1: index -.* is negative"):
            weft.sparse_all_reduce(wrong)
        tight = torch.empty(7, dtype=torch.int64), torch.empty(7, 64)
        with pytest.raises(WeftError, match="rank 2: out holds 7 rows"):
            weft.sparse_all_reduce(rows, out=tight if wire.rank == 2 else None)
        return weft.sparse_all_reduce(rows)

    want = expected([rows_of(rank, 3) for rank in range(3)])
    assert all(alike(found, want) for found in run(3, body))


@pytest.mark.parametrize("far", [2**31 - 15_000, 2**31, 2**40])
def test_indices_of_one_rank_beyond_31_bits(far):
    height = far + 20_000

    def rows(rank):
        given = rows_of(rank, 3, far=far * (rank == 1))
        return weft.Rows(given.indices, given.values, height)

    def body(wire):
        set_link(wire, SLOW)
        remember(wire, rows(wire.rank))
        return told(wire, lambda: weft.sparse_all_reduce(rows(wire.rank), algorithm="holders"))

    want = expected([rows(rank) for rank in range(3)])
    for found, count in run(3, body):
        assert alike(found, want) and count == 2


def test_equal_sets_are_known_to_be_equal():
    """So `mask` sends nothing but sums."""
    indices = torch.arange(0, 9000, 3)

    def body(wire):
        set_link(wire, SLOW)
        rows = weft.Rows(indices, torch.full((3000, 64), float(wire.rank)), 9000)
        seen = []
        for name in ("holders", "split"):
            remember(wire, rows, name)
            total, count = told(wire, lambda: weft.sparse_all_reduce(rows))
            seen.append((count, last_call().algorithm))
            assert torch.equal(total.indices, indices) and (total.values == 6).all()
        return seen

    for lists, headers in run(4, body):
        assert lists == headers


@pytest.mark.parametrize("height", [5000, 10**6, 2**31 + 5])
def test_a_header_made_of_a_list_is_the_ranks_own(height):
    indices = torch.randint(height, (4000,), generator=torch.Generator().manual_seed(1)).unique()
    body = ListInHeader.pack(indices, Pool(), 77, True)
    assert ListInHeader.is_in(body) and not ListInHeader.is_in(Header.of(indices, 2).pack())
    said = ListInHeader.unpack(body)
    assert (said.count, said.highest) == (len(indices), int(indices[-1]))
    assert (said.capacity, said.fallible) == (77, True)
    dtype = torch.int32 if height < 2**31 else torch.int64
    found = said.indices(dtype, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    assert found.dtype == dtype and torch.equal(found.long(), indices)
    assert torch.equal(Header.of(found, 2).pack(), Header.of(indices, 2).pack())


def test_lists_that_do_not_fit_do_not_come():
    draw = torch.Generator().manual_seed(1)
    far_apart = torch.randint(2**40, (60_000,), generator=draw).unique()  # 3.3 bytes each
    assert ListInHeader.pack(far_apart, Pool(), None, False) is None
    assert ListInHeader.pack(torch.arange(9 * BODY), Pool(), None, False) is None
    assert ListInHeader.pack(torch.arange(500), Pool(), None, False) is None  # a few travel plainly
    whole = ListInHeader.pack(torch.arange(7 * BODY), Pool(), None, False)  # a bit each
    assert whole is not None and whole.numel() <= BODY
