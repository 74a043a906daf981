"""A call leases no more than its algorithm says, and `auto` keeps what is promised.

Counted in bytes leased from the group's pool: facts, the same in every run. What the process as a
whole takes is measured by benchmarks/memory.py.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weft
from cases import on_hosts, set_rate
from weft.schedules.hosts import Hosts
from weft.sparse import ALGORITHMS, Sizes, choose
from weft.testing import run

COUNT, WIDTH = 12_000, 80
OPENING = 416 << 10  # bytes of a statement and the first messages of two lists, from each peer


def rows_of(rank, kind, size):
    """As many rows as fill several chunks, in no order, so that a call makes its own copy."""
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randperm(COUNT, generator=draw)
    if kind == "disjoint":
        indices = indices * size + rank
    return weft.Rows(indices, torch.ones(COUNT, WIDTH), COUNT * size)


WORLDS = [
    *((name, kind, "abcd") for name in sorted(ALGORITHMS) for kind in ("identical", "disjoint")),
    ("split", "disjoint", "aaaabbbb"),
    ("split", "identical", "aabbccdd"),
    ("split", "disjoint", "aaab"),
    ("doubling", "disjoint", "aaa"),
]


class Meter:
    """Counts the bytes that are leased of a pool, from here on.

    Attributes:
        leased: of each block that is leased now.
        most: that were leased at once.
    """

    def __init__(self, pool):
        self.leased = {}
        self.most = 0
        self._lock = threading.Lock()
        self._lease = pool.lease
        pool.lease = self.lease

    def lease(self, nbytes):
        lease, number = self._lease(nbytes), object()
        give_back = lease._give_back

        def counted():
            with self._lock:
                del self.leased[number]
            give_back()

        lease._give_back = counted
        with self._lock:
            self.leased[number] = nbytes
            self.most = max(self.most, sum(self.leased.values()))
        return lease


def most_leased(name, sizes):
    """Bytes that a call needs at most beside a rank's own rows and its result."""
    if name in ("gather", "holders"):
        return choose.workspace(sizes, name)
    if name == "doubling":
        return 4 * sizes.union[1] * (sizes.partial_row + sizes.index)
    rows, row = sizes.most, sizes.row
    if sizes.begins_in_hosts:  # ranks that sum have the rows of all of the host
        rows = -(-rows * max(map(len, sizes.ranks_of_hosts)) // sizes.local_ranks)
        row = sizes.partial_row
    return 2 * rows * row + 3 * (rows + sizes.union[1]) * sizes.index


@pytest.mark.parametrize(
    ("name", "kind", "names"),
    # doubling leases receives for the most that could come; what does not come takes no memory
    [world for world in WORLDS if world[:2] != ("doubling", "identical")],
)
def test_workspace_is_bounded(name, kind, names):
    def program(group):
        set_rate(group, 15)
        rows = rows_of(group.rank, kind, group.size)
        with on_hosts(group, names):
            sizes = weft.explain(rows, algorithm=name).sizes
            meter = Meter(group.memory)
            weft.sparse_all_reduce(rows, algorithm=name)
        assert not meter.leased, "a lease was not given back"
        own = COUNT * sizes.row
        leased = meter.most - own - OPENING * (group.size - 1)
        assert leased <= most_leased(name, sizes)
        if (name, kind) == ("holders", "disjoint"):
            assert leased < 0.6 * choose.workspace(sizes, "gather")  # not the rows of all

    run(len(names), program)


def tensors_that_stay(calls, program, names):
    """Tensors that are left of so many calls on four ranks, where nobody collects garbage."""

    def body(group):
        rows = rows_of(group.rank, "disjoint", group.size)
        rows = weft.Rows(rows.indices[:300], rows.values[:300], rows.height)
        with on_hosts(group, names):
            for _ in range(calls):
                program(rows, group)

    gc.collect()
    before = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    gc.disable()
    try:
        run(4, body)
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()) - before
    finally:
        gc.enable()


PROGRAMS = {
    **{
        name: lambda rows, group, name=name: weft.sparse_all_reduce(
            rows, algorithm=name, group=group
        )
        for name in ("auto", *sorted(ALGORITHMS))
    },
    "list": lambda rows, group: weft.sparse_all_reduce([rows, rows], group=group),
    "avg in bfloat16": lambda rows, group: weft.sparse_all_reduce(
        rows, op="avg", wire_dtype=torch.bfloat16, group=group
    ),
    "function": lambda rows, group: weft.sparse_all_reduce(rows, op=torch.maximum, group=group),
    "async": lambda rows, group: weft.sparse_all_reduce(rows, async_op=True, group=group).wait(),
    "all_gather": lambda rows, group: weft.sparse_all_gather(rows, group=group),
    "reduce_scatter": lambda rows, group: weft.sparse_reduce_scatter(rows, group=group),
    "reduce": lambda rows, group: weft.sparse_reduce(rows, group_dst=1, group=group),
    "broadcast": lambda rows, group: weft.sparse_broadcast(rows, group_src=1, group=group),
}


@pytest.mark.parametrize(
    ("name", "names"), [*((name, "abcd") for name in PROGRAMS), ("split", "aabb")]
)
def test_memory_is_free_without_the_garbage_collector(name, names):
    """As in programs that switch it off, so that it does not stop a step of training."""
    few, many = (tensors_that_stay(calls, PROGRAMS[name], names) for calls in (1, 5))
    assert many - few < 4 * 4, "each of four more calls left a tensor on each of four ranks"


@given(
    hosts=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    most=st.integers(1, 1 << 20),
    share=st.floats(0, 1),
    row=st.sampled_from([4, 256, 4096]),
    height=st.sampled_from([None, 1 << 21]),
)
def test_auto_keeps_the_promise_or_splits(hosts, most, share, row, height):
    of = [host for host, count in enumerate(hosts) for _ in range(count)]
    fewest = int(share * most)
    total = most + (len(of) - 1) * fewest
    sizes = Sizes(
        len(of), total, most, fewest, height, row, row, end=1 << 21, hosts=Hosts(tuple(of))
    )
    promised = 3 * fewest * (row + 4) + (64 << 20)
    name = choose.first_served(sizes, choose.lines(sizes)).algorithm
    assert name not in ("gather", "holders") or choose.workspace(sizes, name) <= promised
