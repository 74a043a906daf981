"""The simulated wire's clocks say what its model says, and the same each time."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

import weft
from weft.testing import check_wire, ranks_as_threads, simulated
from weft.testing.simulated import clock, run
from weft.testing.wire_clauses import CLAUSES
from weft.wire.in_process.simulated import Network
from weft.wire.link import Link

LINK = Link(alpha=1e-3, beta=1e-6, work=2e-4)


def swap(group, nbytes=1000):
    peer = 1 - group.rank
    group.post([(peer, torch.zeros(nbytes, dtype=torch.uint8))], [(peer, nbytes)]).wait()
    return clock(group)


def test_a_message_takes_work_latency_and_bytes():
    assert run(2, LINK, swap) == pytest.approx([2e-4 + 1e-3 + 1e-3] * 2)
    assert run(2, LINK, swap, 0) == pytest.approx([2e-4 + 1e-3] * 2)


def test_a_late_rank_keeps_the_other_waiting():
    def program(group):
        if group.rank == 2:
            return group.post([(1, torch.zeros(3000, dtype=torch.uint8))]).wait()
        if group.rank == 1:
            group.post((), [(2, 3000)]).wait()  # for 4.2 ms
        return swap(group)

    assert run(3, LINK, program)[:2] == pytest.approx([4.2e-3 + 2.2e-3] * 2)


def test_one_way_into_a_rank_carries_one_message_after_another():
    def program(group):
        if group.rank == 0:
            group.post((), [(peer, 1000) for peer in (1, 2, 3)]).wait()
        else:
            group.post([(0, torch.zeros(1000, dtype=torch.uint8))]).wait()
        return clock(group)

    first, *others = run(4, LINK, program)
    assert first == pytest.approx(1e-4 + 1e-3 + 3e-3 + 3 * 1e-4)
    assert others == pytest.approx([2.1e-3, 3.1e-3, 4.1e-3])


def test_ranks_of_one_host_share_its_ways_out():
    def program(group):
        peer = (group.rank + 2) % 4
        group.post([(peer, torch.zeros(1000, dtype=torch.uint8))], [(peer, 1000)]).wait()
        far = clock(group)
        peer = group.rank ^ 1
        group.post([(peer, torch.zeros(1000, dtype=torch.uint8))], [(peer, 1000)]).wait()
        return far, clock(group) - far

    within = Link(alpha=1e-5, beta=1e-9, work=2e-4)
    seen = run(4, LINK, program, hosts=["a", "a", "b", "b"], within=within)
    assert sorted(far for far, _ in seen) == pytest.approx([2.2e-3, 2.2e-3, 3.2e-3, 3.2e-3])
    assert min(near for _, near in seen) == pytest.approx(2e-4 + 1e-5 + 1e-6)


def test_a_rank_may_receive_more_than_memory_could_hold_at_the_maximum():
    def program(group):
        sends = [(peer, torch.tensor([group.rank])) for peer in group.peers]
        pending = group.post(sends, [(peer, 1 << 30) for peer in group.peers])
        return [int(view[:8].view(torch.int64)) for view in pending.wait()]

    for rank, got in enumerate(run(8, LINK, program)):
        assert got == [(rank + step) % 8 for step in range(1, 8)]


def test_the_same_time_again():
    def program(group):
        generator = torch.Generator().manual_seed(group.rank)
        rows = torch.randint(500, (60,), generator=generator), torch.ones(60, 8)
        weft.sparse_all_reduce(rows, algorithm="split")
        return clock(group)

    first = run(20, LINK, program)
    assert run(20, LINK, program) == first
    assert len(set(first)) > 1


def test_a_deadlock_is_told_at_once():
    def program(group):
        group.post((), [(1 - group.rank, 8)]).wait()

    with pytest.raises(weft.WireError, match="all ranks wait for each other"):
        run(2, LINK, program)


def test_what_a_rank_raises_is_raised():
    def program(group):
        if group.rank == 1:
            raise KeyError("here")
        group.post((), [(1, 8)]).wait()

    with pytest.raises(KeyError, match="here"):
        run(3, LINK, program)


def test_hosts_are_one_for_each_rank():
    with pytest.raises(weft.WeftError, match="1 hosts for 2 ranks"):
        simulated.group(2, LINK, hosts=["a"])


def test_simulated_ranks_keep_the_contract(fewer):
    outcomes = check_wire(ranks_as_threads(lambda size: Network("abcdefgh"[:size], LINK).wires()))
    assert not any(outcome.error for outcome in outcomes)


def test_simulated_ranks_of_one_host_keep_the_clauses_of_meetings():
    run = ranks_as_threads(lambda size: Network("a" * size, LINK).wires())
    clauses = [number for number, each in enumerate(CLAUSES, 1) if each.needs == "meets"]
    outcomes = check_wire(run, clauses=clauses)
    needing = {outcome.skipped for outcome in outcomes}
    assert needing == {"", "it needs ranks that are processes"}


def test_simulated_ranks_meet_within_their_host():
    wires = Network("aabb", LINK).wires()
    assert [sorted(wire.near) for wire in wires] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    pending = [wire.meet(bytes(1000), sorted(wire.near)) for wire in wires[:2]]
    for wire, each in zip(wires, pending, strict=False):
        assert each.wait(0) == [bytes(1000)] * 2
        # half of `work` to send, the message's way, half of `work` to receive
        assert wire.clock == pytest.approx(LINK.work + LINK.alpha + 1000 * LINK.beta)


def test_a_deadlock_across_a_group_and_a_part_of_it_is_told_at_once():
    def program(group):
        part = group.split([0, 1])
        if part is None:
            group.post((), [(0, 8)]).wait()
        else:
            part.post((), [(1 - part.rank, 8)]).wait()

    with pytest.raises(weft.WireError, match="all ranks wait for each other"):
        run(3, LINK, program)


def test_a_wait_with_a_limit_needs_no_other_rank_to_wait():
    first, second = Network("ab", LINK).wires()
    sent = second.post([(0, torch.ones(1))])
    with pytest.raises(TimeoutError):
        first.post((), [(1, 4)], channel=1).wait(0.01)
    received = first.post((), [(1, 4)])
    assert received.done() and received.waiting_for() == []
    assert len(received.wait(0)[0]) == 4
    sent.wait(0)


def test_a_message_under_way_holds_no_tensor():
    first, second = Network("ab", LINK).wires()
    memory = np.zeros(3, np.float32)
    sent = first.post([(1, torch.from_numpy(memory))])
    received = second.post((), [(0, 12)])
    alive = weakref.ref(memory)
    del memory
    assert alive() is None
    for pending in (sent, received):
        pending.wait(0)
