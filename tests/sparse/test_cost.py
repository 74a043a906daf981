"""Costs are held against what is sent: a model that nobody checks becomes folklore."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import weft
from weft.schedules import dense_all_reduce
from weft.schedules.hosts import Hosts
from weft.sparse import ALGORITHMS, Cost, Load, codec, last_call
from weft.sparse.link import set_link
from weft.testing import spmd
from weft.wire.link import Link
from weft.wire.memory import Pool

WIDTH, CHUNK_ROWS = 32, 2048


def rows_of(rank, kind, size):
    """Evenly spread rows, so that every owner has exactly its share."""
    count = int(4096 * size)
    height = 4 * count
    step = height // count
    shift = rank % 2 if kind == "half" else 0
    return weft.Rows(torch.arange(count) * step + shift, torch.ones(count, WIDTH), height)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@spmd(4, on=("threads",))
def test_what_is_sent_is_what_was_predicted(group, name):
    # chunks of 1 MiB, which rows for a peer can fill
    set_link(group, Link(50e-6, 2e-9, 1e-9, 20e-6))
    check(group, name, "half")


@pytest.mark.parametrize(("hosts", "kind"), [("abababab", "half"), ("aaabbbbb", "identical")])
@spmd(8, on=("threads",))
def test_what_is_sent_within_and_between_hosts(group, hosts, kind):
    group.session.hosts = tuple(hosts)
    set_link(group, Link(50e-6, 8e-9, 0.35e-9, 50e-6))
    check(group, "split", kind, in_stages=True)


def check(group, name, kind, in_stages=False):
    # in stages the last chunk is half full, so a range that is a little larger has no more chunks
    rows = rows_of(group.rank, kind, 6.5 if in_stages else group.size)
    said = {line.algorithm: line for line in weft.explain(rows, algorithm=name).lines}[name]
    weft.sparse_all_reduce(rows, algorithm=name)
    record = last_call()

    header = 8192  # bytes; the opening exchange, which costs leave out
    average = torch.tensor([record.messages, record.sent_bytes], dtype=torch.float64) / group.size
    dense_all_reduce(group, average, "sum").wait()
    messages, sent = (average - torch.tensor([1, header]) * (group.size - 1)).tolist()
    load = weft.explain(rows, algorithm=name).load
    assert (len(load.factors) > 1) == in_stages
    exact = dataclasses.replace(load, union=record.union)
    cost = ALGORITHMS[name].cost(exact)
    # who shares rows with whom a load does not say: here with every other rank only
    # and a part of some ranks' rows may take a chunk more than an even one
    partners = name != "holders" or kind == "identical"
    assert messages == pytest.approx(cost.messages, rel=0.1 if partners else 0.2, abs=1)
    # what some ranks' rows add up to is modelled as if ranks were alike, which odd and even are not
    exactly = (name not in ("doubling", "ring") and not in_stages) or kind == "identical"
    loosely = 0.15 if in_stages else 0.25
    assert sent == pytest.approx(
        cost.bytes, rel=0.03 if exactly else loosely, abs=header * group.size
    )
    assert said.bytes == pytest.approx(cost.bytes, rel=0.2)  # the union was a guess


@pytest.mark.parametrize(
    ("name", "wire_dtype"),
    [(name, None) for name in sorted(ALGORITHMS)] + [("split", torch.bfloat16)],
)
@spmd(4, on=("threads",))
def test_on_a_slow_link_too_where_indices_are_packed(group, name, wire_dtype):
    set_link(group, Link(50e-6, 8e-9, 0.35e-9, 50e-6))
    draw = torch.Generator().manual_seed(group.rank)
    indices = torch.randint(200_000, (20_000,), generator=draw)
    rows = weft.Rows(indices, torch.ones(20_000), 200_000)
    before = group.traffic.bytes
    load = weft.explain(rows, algorithm=name, wire_dtype=wire_dtype).load
    opening = group.traffic.bytes - before
    assert load.gaps
    assert load.row == (4 if wire_dtype is None else 2)
    weft.sparse_all_reduce(rows, algorithm=name, wire_dtype=wire_dtype)
    record = last_call()
    cost = ALGORITHMS[name].cost(dataclasses.replace(load, union=record.union))
    sent = torch.tensor([record.sent_bytes - opening])
    dense_all_reduce(group, sent, "sum").wait()
    assert sent.item() / group.size == pytest.approx(cost.bytes, rel=0.02)


@pytest.mark.parametrize("name", ["dense_tail", "gather", "holders", "split"])
def test_sums_of_some_ranks_are_counted_as_they_travel(name):
    """To who sums them with all their bits: 512 bytes, where complete sums have 256."""
    load = Load(4, 40_000, 10_000, 10_000, 20_000, 40_000, 256, 512, 4, places=40_000)
    rounded = ALGORITHMS[name].cost(load)
    summed = ALGORITHMS[name].cost(load.but(summed=True))
    sent = {"gather": 3 * load.mean, "holders": load.mean - load.union / 4}
    rows = sent.get(name, 3 / 4 * load.mean)
    assert summed.bytes - rounded.bytes == pytest.approx(rows * 256)
    assert summed.memory >= rounded.memory
    assert summed.messages > rounded.messages


@pytest.mark.parametrize(("count", "share"), [(0, 0.1), (100, 0.001), (1000, 0.01), (5000, 0.02)])
def test_a_short_list_is_not_packed_however_dense_it_is(count, share):
    load = Load(32, 32_000, 1000, 1000, 30_000, None, 32, 32, 4, places=1_000_000, gaps=True)
    places = round(load.places * share)
    indices = torch.randperm(places)[:count].sort().values.to(torch.int32)
    lease = codec.pack(indices, Pool(), gaps=True)
    assert load.list_of(count, share) == pytest.approx(len(lease.tensor), rel=0.02)


def test_hops_of_a_ring_wait_for_what_bytes_do_not_hide():
    slow = Link(alpha=1e-3, beta=1e-6, gamma=1e-9, work=0.0)  # a row takes 1 ms, as a latency does
    load = Load(5, 50, 10, 10, 50, None, 1000, 1000, 4, chunk=1000, link=slow)
    # four hops of a latency, while four ranks' bytes pass: the last chunk takes four times 2 ms
    assert load.hops(1) == pytest.approx(4)
    # of two chunks the second leaves 1 ms later: 9 ms, where 8 ms of bytes pass
    assert load.hops(2) == pytest.approx(1)
    assert load.hops(10) == 1
    # other groups' bytes pass meanwhile
    assert load.but(sharing=2, link=dataclasses.replace(slow, beta=2e-6)).hops(1) == 1
    # three of five ranks have the next one on another host
    hosts = Hosts.named("aabbc")
    within = load.but(hosts=hosts, link=dataclasses.replace(slow, within=0.5e-6))
    assert within.hops(1) == pytest.approx(4 * (1 + 0.6 + 0.4 * 0.5) - 4)


def test_a_stream_of_chunks_takes_longer_than_a_message_where_cores_limit():
    load = Load(4, 40_000, 10_000, 10_000, 30_000, None, 256, 256, 4)
    crowded = Link(5e-5, 2e-9, 0.25e-9, 0.0, share=2)

    def delay(link):
        return load.but(link=link).crowded(1e7) / 1e7

    assert delay(crowded) == pytest.approx(0.3)
    assert delay(dataclasses.replace(crowded, share=1)) == 0
    slow = dataclasses.replace(crowded, beta=1e-8)
    assert delay(slow) == 0
    # a machine whose cores take that long for a byte, as was measured, leaves none idle there, too
    assert delay(dataclasses.replace(slow, carry=9.9e-9)) == pytest.approx(0.29)
    # less was seen than is usual
    assert delay(dataclasses.replace(crowded, carry=1e-9)) == pytest.approx(0.3)


def test_what_is_merged_while_bytes_come_takes_time_once_that_is_too_much():
    link = Link(5e-5, 1e-8, 1e-9, 0.0)
    alone = Cost(1, 9, 1e7).seconds(link)
    assert Cost(1, 9, 1e7, overlapped=9e7).seconds(link) == alone
    assert Cost(1, 9, 1e7, overlapped=12e7).seconds(link) == pytest.approx(alone + 0.02)
    assert Cost(1, 9, 1e7, merged=12e7).seconds(link) == pytest.approx(alone + 0.12)


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


@pytest.mark.parametrize("name", ["mask", "ring"])
@spmd(3, on=("threads",))
def test_the_same_rows_are_known_from_the_headers_and_nearly_the_same_are_not(group, name):
    count, height = 5000, 20_000
    values = torch.full((count, 8), float(group.rank + 1))
    sent = []
    for different in (False, True):
        indices = torch.arange(count) * 2
        if different and group.rank == 1:
            indices[2500] += 1  # same count, same ends, and most likely the same sketch
        before = group.traffic.bytes
        weft.explain(weft.Rows(indices, values, height))
        opening = group.traffic.bytes - before
        result = weft.sparse_all_reduce(weft.Rows(indices, values, height), algorithm=name)
        sent.append(last_call().sent_bytes - opening)
        dense = torch.zeros(height, 8).index_add_(0, indices, values)
        dense_all_reduce(group, dense, "sum").wait()
        assert len(result) == count + different
        assert torch.equal(dense[result.indices], result.values)
    assert sent[0] == pytest.approx(2 * 2 / 3 * count * 32, rel=0.02)
    assert sent[1] > sent[0] + height / 8  # a bitmap of all places, or lists
