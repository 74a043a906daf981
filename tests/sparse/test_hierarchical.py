"""hierarchical on groups of several hosts; on one host it is under the tests of all algorithms."""

from __future__ import annotations

import dataclasses
import functools
import threading

import pytest
import torch

import weft
from weft.schedules.hosts import Hosts, hosts_of, set_hosts
from weft.sparse import ALGORITHMS, Load, last_call
from weft.sparse.link import set_link
from weft.testing import expected, run, spmd
from weft.wire.link import Link

HOSTS = {3: ("abb", "aba"), 4: ("aabb", "abba", "abcd"), 8: ("aaaabbbb", "abcabcab")}
LOCK = threading.Lock()


def rows_of(rank, dtype=torch.float32, height=200, count=150):
    draw = torch.Generator().manual_seed(rank)
    values = torch.randint(-4, 5, (count, 3), generator=draw).to(dtype)
    return weft.Rows(torch.randint(height, (count,), generator=draw), values, height)


@functools.cache
def world(size, op, dtype):
    parts = [rows_of(rank, dtype) for rank in range(size)]
    return parts, expected(parts, op)


def reduced(group, names, parts, op="sum", **options):
    """By hosts of these names; the group is given back as it was."""
    before = hosts_of(group)
    set_hosts(group, Hosts.named(names))
    try:
        return weft.sparse_all_reduce(parts[group.rank], op, algorithm="hierarchical", **options)
    finally:
        set_hosts(group, before)


@spmd(3, 4, 8)
def test_it_equals_the_definition(group):
    for names in HOSTS[group.size]:
        for op, dtype in (("sum", torch.float32), ("avg", torch.bfloat16), ("max", torch.int8)):
            with LOCK:  # ranks that are threads would each make them
                parts, want = world(group.size, op, dtype)
            total = reduced(group, names, parts, op)
            assert torch.equal(total.indices, want.indices), names
            torch.testing.assert_close(total.values, want.values)
            assert last_call().algorithm == "hierarchical"


@pytest.mark.parametrize("flat", sorted(set(ALGORITHMS) - {"hierarchical"}))
def test_leaders_may_use_any_algorithm(flat, monkeypatch):
    monkeypatch.setattr("weft.sparse.algorithms.hierarchical._flat", lambda load: ALGORITHMS[flat])
    for dtype, height, counts in ((torch.float32, 200, (150, 150)), (torch.float16, 30, (0, 1))):
        parts = [rows_of(rank, dtype, height, counts[rank % 2]) for rank in range(6)]
        want = expected(parts)
        for total in run(6, reduced, "aabbca", parts):
            assert torch.equal(total.indices, want.indices)
            assert torch.equal(total.values, want.values)


@spmd(4, on=("threads",))
def test_out_is_filled_where_the_caller_wants_it(group):
    for dtype in (torch.float32, torch.bfloat16):
        parts = [rows_of(rank, dtype) for rank in range(group.size)]
        want = expected(parts, "avg")
        out = torch.full((200,), -1), torch.full((200, 3), 7.0, dtype=dtype)
        total = reduced(group, "aabb", parts, "avg", out=out)
        assert total.values.data_ptr() == out[1].data_ptr()
        assert torch.equal(out[0][: len(want)], want.indices)
        assert torch.equal(out[1][: len(want)], want.values)


@spmd(4, on=("threads",))
def test_a_function_needs_the_ranks_of_a_host_to_be_neighbours(group):
    def last(left, right):
        return right

    parts = [rows_of(rank) for rank in range(group.size)]
    for names in ("aabb", "abbb"):
        total = reduced(group, names, parts, last)
        assert torch.equal(total.values, expected(parts, last).values)
    # where the leaders would take mask, if it kept the order of ranks
    set_link(group, Link(1e-6, 1e-3, 1e-12, 1e-9))
    alike = [weft.Rows(parts[0].indices, part.values, 200) for part in parts]
    total = reduced(group, "aabb", alike, last)
    assert torch.equal(total.values, expected(alike, last).values)
    with pytest.raises(weft.WeftError, match="the ranks of a host are not neighbours"):
        reduced(group, "abab", parts, last)
    with pytest.raises(weft.WeftError, match=r"rank 2: KeyError: 'no'"):
        reduced(group, "aabb", parts, last if group.rank != 2 else fails)
    reduced(group, "aabb", parts)


def fails(left, right):
    raise KeyError("no")


fails.__module__, fails.__qualname__ = (
    __name__,
    ("test_a_function_needs_the_ranks_of_a_host_to_be_neighbours.<locals>.last"),
)


@spmd(8, on=("threads",))
def test_only_sums_of_hosts_leave_them(group):
    """The same rows everywhere: what leaves a host is that of one rank, whatever ranks it has."""
    rows = weft.Rows(torch.arange(4000), torch.ones(4000, 8), 4000)
    names = "aaaabbbb"
    reduced(group, names, [rows] * group.size)  # the link is measured
    group.traffic.reset()
    reduced(group, names, [rows] * group.size)
    leaves = sum(
        group.traffic.to.get(peer, 0) for peer in range(8) if names[peer] != names[group.rank]
    )
    opening = 4 * 8192  # to all ranks of the other host
    one_rank = 4000 * (8 * 4 + 4)
    assert leaves <= opening + (1.1 * one_rank if group.rank in (0, 4) else 0)


def test_auto_takes_it_where_ranks_of_a_host_share_their_rows():
    link = Link(50e-6, 32e-9, 0.35e-9, 20e-6)
    load = Load(
        16, 16 * 50_000, 50_000, 50_000, 60_000, 1_000_000, 256, 256, 4, places=1_000_000, link=link
    )
    hosts = Hosts(tuple(rank // 8 for rank in range(16)))

    def quickest(load):
        able = [a for a in ALGORITHMS.values() if not (a.applies(load) or a.pays(load))]
        return min(able, key=lambda a: a.cost(load).seconds(load.link)).name

    assert quickest(dataclasses.replace(load, hosts=hosts)) == "hierarchical"
    quick = dataclasses.replace(load, hosts=hosts, link=dataclasses.replace(link, beta=8e-10))
    assert quickest(quick) == "ring"
    pays = ALGORITHMS["hierarchical"].pays
    assert pays(load) == "every rank has a host of its own"
    assert pays(dataclasses.replace(load, hosts=Hosts((0,) * 16))) == "all ranks are on one host"


@spmd(4, on=("threads",))
def test_a_rank_that_dies_is_everybodys_error(group):
    def allocate(count, row_shape, dtypes):
        if group.rank == 2:  # a leader, when the other leader awaits it
            group.abort("gone")
        return torch.empty(count, dtype=dtypes[0]), torch.empty(count, *row_shape)

    with pytest.raises(weft.WireError, match="rank 2 gave up: gone"):
        reduced(group, "aabb", [rows_of(rank) for rank in range(4)], out=allocate)
