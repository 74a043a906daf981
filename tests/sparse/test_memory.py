"""A call takes no more memory than its algorithm's cost says, and `auto` keeps what is promised.

Counted in bytes leased from the group's pool: facts, the same in every run. What the process as a
whole takes is measured by benchmarks/memory.py.
"""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import weft
from weft.sparse import ALGORITHMS, EAGER, Load, predicted
from weft.testing import run, spmd
from weft.wire.link import Link

COUNT, WIDTH = 12_000, 80
SPARE = 64 << 20
OPENING = 416 << 10  # bytes of a statement and the first messages of two lists, from each peer


def rows_of(rank, kind, size):
    """As many rows as fill several chunks, in no order, so that a call makes its own copy."""
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randperm(COUNT, generator=draw)
    if kind == "disjoint":
        indices = indices * size + rank
    return weft.Rows(indices, torch.ones(COUNT, WIDTH), COUNT * size)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in sorted(ALGORITHMS)
        for kind in ("identical", "disjoint")
        # doubling leases receives for the most that could come; what does not come takes no memory
        if (name, kind) != ("doubling", "identical")
    ],
)
@spmd(4, on=("threads",))
def test_workspace_is_what_was_predicted(group, name, kind):
    rows = rows_of(group.rank, kind, group.size)
    load = weft.explain(rows, algorithm=name).load
    pool = group.memory
    pool.peak = pool.lent
    total = weft.sparse_all_reduce(rows, algorithm=name)
    assert pool.lent == 0, "a lease was not given back"

    cost = ALGORITHMS[name].cost(dataclasses.replace(load, union=len(total)))
    own = COUNT * load.row
    assert pool.peak <= cost.memory + own + OPENING * (group.size - 1)


def tensors_that_stay(calls, program):
    """Tensors that are left of so many calls on four ranks, where nobody collects garbage."""

    def body(group):
        rows = rows_of(group.rank, "disjoint", group.size)
        rows = weft.Rows(rows.indices[:300], rows.values[:300], rows.height)
        for _ in range(calls):
            program(rows, group)

    gc.collect()
    before = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    gc.disable()
    try:
        run(4, body)
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects()) - before
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
    ("name", "factors"), [*((name, "4") for name in PROGRAMS), ("split", "2x2")]
)
def test_memory_is_free_without_the_garbage_collector(name, factors, monkeypatch):
    """As in programs that switch it off, so that it does not stop a step of training."""
    monkeypatch.setenv("WEFT_FACTORS", factors)
    more = tensors_that_stay(5, PROGRAMS[name]) - tensors_that_stay(1, PROGRAMS[name])
    assert more < 4 * 4, "each of four more calls left a tensor on each of four ranks"


def promised(load):
    """Bytes beside the result."""
    return 3 * load.fewest * (load.row + load.index) + SPARE


@given(
    ranks=st.integers(2, 300),
    most=st.integers(1, 1 << 20),
    share=st.floats(0, 1),
    overlap=st.floats(0, 1),
    row=st.sampled_from([4, 256, 4096]),
    height=st.sampled_from([None, 1 << 21]),
    rate=st.sampled_from([4e-11, 8e-10, 8e-9]),
)
@example(
    ranks=300, most=1 << 20, share=0.05, overlap=1.0, row=4, height=None, rate=8e-9
)  # nothing does: the union's indices alone
def test_auto_keeps_the_promise_where_anything_does(ranks, most, share, overlap, row, height, rate):
    fewest = int(share * most)
    total = most + (ranks - 1) * fewest
    union = int(most + overlap * (total - most))
    if height is not None:
        union = min(union, height)
    load = Load(ranks, total, most, fewest, union, height, row, row, 4, places=1 << 21)
    found = predicted(load, Link(1e-4, rate, 3e-10, 5e-5))
    load, chosen = found.load, found.chosen
    if chosen == EAGER:
        return  # the rows lie in the opening exchange, whose memory is bounded

    takes = {
        name: algorithm.cost(load).memory + fewest * row
        for name, algorithm in ALGORITHMS.items()
        if algorithm.applies(load) is None
    }
    assert takes[chosen] <= promised(load) or takes[chosen] == min(takes.values())
