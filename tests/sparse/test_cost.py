"""Costs are held against what is sent: a model that nobody checks becomes folklore."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import weft
from weft.sparse import ALGORITHMS, Load, last_call
from weft.testing import spmd

WIDTH, CHUNK_ROWS = 32, 2048


def rows_of(rank, kind, size):
    """Evenly spread rows, so that every owner has exactly its share."""
    count, height = 4096 * size, 16384 * size
    step = height // count
    shift = {"identical": 0, "disjoint": rank % step, "half": rank % 2}[kind]
    return weft.Rows(torch.arange(count) * step + shift, torch.ones(count, WIDTH), height)


@pytest.mark.parametrize("kind", ["identical", "half", "disjoint"])
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"dense"}))
@spmd(2, 4, 8, on=("threads",))
def test_what_is_sent_is_what_was_predicted(wire, name, kind):
    if kind == "disjoint" and wire.size > 4:
        kind = "half"  # four places between two rows: no more than four ranks can be disjoint
    rows = rows_of(wire.rank, kind, wire.size)
    said = {line.algorithm: line for line in weft.explain(rows, algorithm=name).lines}[name]
    weft.sparse_all_reduce(rows, algorithm=name)
    record = last_call()

    header = 8192  # bytes; the opening exchange, which costs leave out
    sent = record.sent_bytes - header * (wire.size - 1)
    load = weft.explain(rows, algorithm=name).load
    exact = dataclasses.replace(load, union=record.union)
    cost = ALGORITHMS[name].cost(exact)
    # who shares rows with whom a load does not say: here with every other rank only
    partners = name != "holders" or kind == "identical"
    messages = pytest.approx(cost.messages, rel=0.1 if partners else 0.2, abs=1)
    assert record.messages - (wire.size - 1) == messages
    # what some ranks' rows add up to is modelled as if ranks were alike, which odd and even are not
    exactly = name != "doubling" or kind == "identical"
    assert sent == pytest.approx(cost.bytes, rel=0.03 if exactly else 0.25, abs=header * wire.size)
    assert said.bytes == pytest.approx(cost.bytes, rel=0.2)  # the union was a guess


def test_the_union_of_some_ranks():
    load = Load(8, 8000, 1000, 1000, 1000, None, 256, 256, 4)
    assert load.union_of(1) == pytest.approx(1000)
    assert load.union_of(8) == pytest.approx(1000)
    load = dataclasses.replace(load, union=8000)
    assert load.union_of(4) == pytest.approx(4000, rel=1e-3)
    load = dataclasses.replace(load, union=4000)
    assert 1000 < load.union_of(2) < load.union_of(4) < load.union_of(8)
    assert load.union_of(8) == pytest.approx(4000, rel=1e-6)


def test_the_bound():
    load = Load(4, 400, 100, 100, 400, None, 256, 256, 4)  # no overlap: all that others have
    assert load.bound == 300 * 260
    load = dataclasses.replace(load, union=100)  # identical: the dense bound
    assert load.bound == 2 * 3 / 4 * 100 * 260
