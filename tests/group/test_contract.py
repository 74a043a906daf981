"""What a group does, whatever carries it: ranks that are threads, processes, and some of either."""

from __future__ import annotations

import contextlib
import functools
import time

import pytest
import torch

from cases import COMBINE, exchange
from weft import WireError
from weft.base.pace import patient
from weft.schedules import dense_all_reduce
from weft.testing import run, spmd

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SLACK = 3.0  # seconds that a wait may exceed its deadline, because the machine is busy


def number(value):
    return torch.tensor([value])


# What any number of ranks do.


def gather_small(group):
    for length in (0, 1, 7, 40):
        messages = [bytes([rank] * length) for rank in range(group.size)]
        assert group.all_gather_bytes(messages[group.rank], bytes) == messages


def reduce_exactly(group):
    """Small integers, which every dtype reduces exactly in any order."""
    for count in (0, 1, 1000, 40_000):
        for dtype in (*FLOATS, *INTS, torch.bool):
            numbers = torch.arange(count) * 5
            most = 2 if dtype is torch.bool else 3
            parts = [((numbers + 3 * rank) % most).to(dtype) for rank in range(group.size)]
            for op, combine in COMBINE.items():
                if dtype in FLOATS and op.startswith("b"):
                    continue
                if dtype is torch.bool and op in ("sum", "prod"):
                    continue
                mine = parts[group.rank].clone()
                pending = dense_all_reduce(group, mine, op)
                assert pending.wait()[0] is mine
                right = functools.reduce(combine, parts)
                assert torch.equal(mine, right), f"{op} of {count} {dtype} is wrong"
                pending.release()


def reduce_floats(group):
    """Returns its results' bits, which are the same on all ranks."""
    results = []
    for dtype in FLOATS:
        parts = [
            torch.randn(10_007, generator=torch.Generator().manual_seed(rank)).to(dtype)
            for rank in range(group.size)
        ]
        right = torch.stack([part.double() for part in parts]).sum(0)
        places = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.1)
        for op, divisor in (("sum", 1), ("avg", group.size)):
            mine = parts[group.rank].clone()
            dense_all_reduce(group, mine, op).wait()
            assert torch.allclose(mine.double(), right / divisor, atol=places, rtol=places)
            results.append(bytes(mine.view(torch.uint8).tolist()))
    return results


def reduce_beside_messages(group):
    """Reductions and messages are on the wire at the same time."""
    following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    first = torch.full((5000,), float(group.rank))
    second = torch.full((3,), group.rank)
    message = None
    if group.size > 1:
        message = group.post([(following, number(group.rank))], [(before, 8)])
    for each in [dense_all_reduce(group, first, "sum"), dense_all_reduce(group, second, "max")]:
        each.wait()
    if message is not None:
        assert message.wait()[0].view(torch.int64).item() == before
    assert set(first.tolist()) == {sum(range(group.size))}
    assert second.tolist() == [group.size - 1] * 3


ANY = (exchange, gather_small, reduce_exactly, reduce_floats, reduce_beside_messages)
WORLDS = [*(("threads", size) for size in (1, 2, 3, 4, 7, 8)), ("processes", 7)]


@pytest.mark.parametrize("body", ANY)
@pytest.mark.parametrize(("on", "size"), WORLDS)
def test_any_number_of_ranks(body, on, size):
    first, *others = run(size, body, on=on)
    assert all(each == first for each in others)


# What two ranks do.


def empty(group):
    """A post without messages, and messages without bytes, which leave nothing behind."""
    (peer,) = group.peers
    nothing = torch.empty(0)
    pending = group.post([(peer, nothing)] * 3, [(peer, torch.empty(0)), (peer, 64), (peer, 0)])
    first, _, last = pending.wait()
    assert first.numel() == last.numel() == 0
    pending.release()
    assert group.post().wait() == []
    assert group.post([(peer, number(7))], [(peer, number(0))]).wait()[0].item() == 7


def leases(group):
    """Leased memory can be sent; views that were received stay valid until they are released."""
    (peer,) = group.peers
    for turn in range(3):
        with group.lease(3000) as memory:
            assert memory.numel() == 3000
            memory.fill_(10 * turn + group.rank)
            pending = group.post([(peer, memory)], [(peer, 3000)])
            view = pending.wait()[0]
            assert pending.wait()[0].data_ptr() == view.data_ptr()
            assert set(view.tolist()) == {10 * turn + peer}
        pending.release()
        pending.release()


def mixed(group):
    """Messages of any length, received before or after they are sent, into tensors or as views."""
    (peer,) = group.peers
    lengths = (1, 300_000, 7, 140_000, 0, 60_000, 300_000, 2)
    for early in (True, False):
        posts = []

        def receive(posts=posts):
            for i, length in enumerate(lengths):
                place = torch.empty(length, dtype=torch.uint8)
                posts.append(group.post((), [(peer, place if i % 2 else length)], channel=1))

        def send(posts=posts, early=early):
            for i, length in enumerate(lengths):
                mine = torch.full((length,), 10 * i + group.rank, dtype=torch.uint8)
                with group.lease(length) as memory:
                    sent = memory.copy_(mine) if i % 3 else mine
                    if early:
                        group.post([(peer, sent)], channel=1).wait()
                    else:
                        posts.append(group.post([(peer, sent.clone())], channel=1))

        for step in (receive, send) if early else (send, receive):
            step()
        got = [view for pending in posts for view in pending.wait()]
        assert [len(view) for view in got] == list(lengths)
        for i, view in enumerate(got):
            assert set(view.tolist()) <= {10 * i + peer}
        for pending in posts:
            pending.release()


PAIRS = (empty, leases, mixed)


@pytest.mark.parametrize("does", PAIRS)
@spmd(2)
def test_two_ranks(group, does):
    does(group)


@spmd(3, 5)
def test_a_part_does_so_too(group):
    """Backwards, while a rank that has no part in it looks on."""
    ranks = list(range(group.size - 2, -1, -1))
    if group.rank in ranks:
        part = group.subset(ranks)
        assert (part.rank, part.size) == (ranks.index(group.rank), len(ranks))
        for body in (*ANY, *(PAIRS if part.size == 2 else ())):
            body(part)
        part.close()
    exchange(group)


@spmd(1, 2, 5)
def test_a_group_is_split_into_groups_that_know_nothing_of_each_other(group):
    ranks = list(range(group.size))
    evens, twins = ranks[::-2], [group.split(ranks), group.split(ranks)]
    part = group.split(evens)
    assert (part is None) == (group.rank not in evens)
    if part is not None:
        assert (part.rank, part.size) == (evens.index(group.rank), len(evens))
        total = number(group.rank)
        dense_all_reduce(part, total, "sum").wait()
        assert total.item() == sum(evens)
        exchange(part)
        part.close()
    groups = [group, *twins]
    if group.size > 1:
        following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        sends = [each.post([(following, number(i))]) for i, each in enumerate(groups)]
        for i, each in reversed([*enumerate(groups)]):
            assert each.post((), [(before, number(-1))]).wait()[0].item() == i
        for pending in sends:
            pending.wait()
    for twin in twins:
        twin.close()
    exchange(group)


@spmd(3)
def test_messages_and_bytes_are_counted_by_peer(group):
    group.traffic.reset()
    sends = [(peer, torch.zeros(10 + peer)) for peer in group.peers]
    group.post(sends, [(peer, 400) for peer in group.peers]).wait()
    assert group.traffic.messages == 2
    assert group.traffic.to == {peer: 4 * (10 + peer) for peer in group.peers}
    assert group.traffic.bytes == sum(group.traffic.to.values())


# What ends a wait.


def breaks(group, use, *, culprit, match=None, at_once=False):
    """A wait raises, naming `culprit`; with `at_once`, long before the deadline."""
    began = time.monotonic()
    with pytest.raises(WireError, match=match) as caught:
        use().wait()
    assert (caught.value.rank, caught.value.culprit) == (group.rank, culprit), str(caught.value)
    assert not at_once or time.monotonic() - began < group.timeout / 2
    is_broken(group, culprit)


def is_broken(group, culprit):
    """Every further use of the group raises the same error at once."""
    group.set_timeout(20.0)  # no pause of this thread is as long
    texts = set()
    for use in (group.post, functools.partial(dense_all_reduce, group, torch.ones(2), "sum")):
        began = time.monotonic()
        with pytest.raises(WireError) as caught:
            use().wait()
        assert time.monotonic() - began < group.timeout
        assert caught.value.rank == group.rank and caught.value.culprit == culprit
        texts.add(str(caught.value))
    assert len(texts) == 1, texts


def sleep_until_broken(group):
    """Do nothing until the group is broken; the others may begin their wait late."""
    until = time.monotonic() + patient(30.0)
    with contextlib.suppress(WireError):
        while time.monotonic() < until:
            group.check()
            time.sleep(0.05)


@spmd(2, timeout=0.7)
def test_a_wait_for_a_rank_that_does_nothing_ends_at_the_deadline(group):
    if group.rank == 1:
        sleep_until_broken(group)
        is_broken(group, culprit=1)
        return
    timeout, began = group.timeout, time.monotonic()
    breaks(group, lambda: group.post((), [(1, 8)]), culprit=1, match=r"rank 0: .*rank 1")
    assert timeout * 0.9 < time.monotonic() - began < timeout + patient(SLACK)


@spmd(4, timeout=20.0)
def test_where_each_waits_for_the_next_all_name_the_last_one(group):
    last = group.size - 1
    if group.rank == last:
        group.post((), [(0, 8)]).wait()
        sleep_until_broken(group)
        is_broken(group, culprit=last)
        return
    tells = 0
    if group.rank == 0:  # gives up once the others wait, and the last one has begun to sleep
        group.post((), [(rank, 8) for rank in range(1, last)]).wait()
        group.set_timeout(patient(3.0))
        tells = last
    breaks(group, lambda: group.post([(tells, number(0))], [(group.rank + 1, 8)]), culprit=last)


@spmd(4)
def test_an_abort_ends_waits_for_other_ranks(group):
    others = [rank for rank in range(group.size) if rank != 1]
    if group.rank == 1:
        time.sleep(0.2)
        group.abort("out of memory")
        is_broken(group, culprit=1)
    else:
        before = others[others.index(group.rank) - 1]
        awaits = functools.partial(group.post, (), [(before, 8)])
        breaks(group, awaits, culprit=1, match="out of memory", at_once=True)


@spmd(3)
def test_an_abort_ends_a_reduction(group):
    if group.rank == 2:
        time.sleep(0.2)
        group.abort("interrupted")
        is_broken(group, culprit=2)
    else:
        reduces = functools.partial(dense_all_reduce, group, torch.ones(50_000), "sum")
        breaks(group, reduces, culprit=2, match="interrupted", at_once=True)


@spmd(3)
def test_a_wait_for_a_rank_that_left_ends_at_once(group):
    if group.rank == 1:
        time.sleep(0.2)
        group.close()
    else:
        breaks(group, lambda: group.post((), [(1, 8)]), culprit=1, at_once=True)


@spmd(3)
def test_where_one_has_left_the_others_go_on(group):
    if group.rank == 2:
        group.close()
        return
    time.sleep(0.3)
    peer = 1 - group.rank
    for _ in range(20):
        got = group.post([(peer, number(group.rank))], [(peer, 8)]).wait()[0]
        assert got.view(torch.int64).item() == peer


@spmd(2)
def test_a_closed_group_says_so_and_may_be_closed_twice(group):
    exchange(group)
    group.close()
    group.close()
    for _ in range(2):
        with pytest.raises(WireError, match=rf"rank {group.rank}: .*closed"):
            group.post([(1 - group.rank, number(1))]).wait()
