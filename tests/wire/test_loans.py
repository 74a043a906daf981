"""`weft.wire.loans`: tensors that peers on the same host read where they lie, in one call."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import weft
from weft import WireError, nn
from weft.kernels.cpu_talk import Talk
from weft.testing import spmd
from weft.wire.loans import TICKET, Loans
from weft.wire.part import Part
from weft.wire.process_group import connect

SIZE = 100_000
SAID = 9  # bytes that end a loan: a number, and what came of it


def told(wire, tickets):
    """The tickets that the peers made for this rank, by rank."""
    sends = [(p, torch.frombuffer(bytearray(t), dtype=torch.uint8)) for p, t in tickets.items()]
    pending = wire.post_small(sends, [(peer, TICKET) for peer in tickets])
    found = {p: bytes(raw.tolist()) for p, raw in zip(tickets, pending.wait(), strict=True)}
    pending.release()
    return found


def numbers(source, target, call=0):
    return torch.arange(SIZE) + 1000 * source + 100 * target + call


def swapped(wire, call=0, then=lambda: None):
    """What each peer lends this rank, read in one call."""
    loans = Loans(wire)
    tickets = {to: loans.ticket(to, numbers(wire.rank, to, call)) for to in wire.peers}
    places = {peer: torch.empty(SIZE, dtype=torch.int64) for peer in wire.peers}
    at = told(wire, tickets)
    taken = {peer: loans.take(peer, at[peer], places[peer]) for peer in wire.peers}
    loans.settle(then)
    return places, taken


def are_right(wire, places, call=0):
    return all(torch.equal(got, numbers(peer, wire.rank, call)) for peer, got in places.items())


def refuse(wire, refused, patch):
    """Let reads between some pairs (owner, reader) fail."""
    real = type(wire).read

    def read(self, peer, address, into):
        return (peer, self.rank) not in refused and real(self, peer, address, into)

    patch.setattr(type(wire), "read", read)


@spmd(1, 2, 3, 4, 7, 8)
def test_all_is_read_and_counted(wire):
    assert all(wire.lends(peer) for peer in wire.peers)
    for call in range(3):
        wire.traffic.reset()
        places, taken = swapped(wire, call)
        assert are_right(wire, places, call) and all(taken.values())
        assert wire.traffic.bytes == (wire.size - 1) * (8 * SIZE + TICKET + SAID)


@spmd(3, on=("processes",))
def test_what_cannot_be_read_is_sent_and_counted_once(wire):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        refuse(wire, {(0, 1), (1, 0), (2, 1)}, patch)
        for call in range(2):
            wire.traffic.reset()
            places, taken = swapped(wire, call, lambda: seen.append(True))
            assert are_right(wire, places, call)
            assert taken == {p: (p, wire.rank) not in {(0, 1), (1, 0), (2, 1)} for p in wire.peers}
            assert wire.traffic.bytes == 2 * (8 * SIZE + TICKET + SAID)
    assert seen == [True, True]
    places, taken = swapped(wire)
    assert are_right(wire, places) and all(taken.values())


@pytest.mark.parametrize("refused", [set(), {(0, 1)}, {(0, 1), (1, 0), (2, 0)}])
@spmd(3, on=("processes",))
def test_what_is_made_of_a_loan_is_lent_on(wire, refused):
    """Each makes a sum of what it reads, and the others read that; also where it is late."""
    with pytest.MonkeyPatch.context() as patch:
        refuse(wire, refused, patch)
        for call in range(3):
            first, second = Loans(wire), Loans(wire)
            mine, total = numbers(wire.rank, 0, call), torch.zeros(SIZE, dtype=torch.int64)
            ones = told(wire, {peer: first.ticket(peer, mine) for peer in wire.peers})
            twos = told(wire, {peer: second.ticket(peer, total) for peer in wire.peers})
            terms = {peer: torch.empty_like(mine) for peer in wire.peers}
            sums = {peer: torch.empty_like(mine) for peer in wire.peers}
            for peer in wire.peers:
                first.take(peer, ones[peer], terms[peer])
            first.settle(
                lambda total=total, mine=mine, terms=terms: total.add_(
                    mine + terms[wire.peers[0]] + terms[wire.peers[1]]
                ),
                opens=True,
            )
            for peer in wire.peers:
                second.take(peer, twos[peer], sums[peer])
            second.settle()
            right = sum(numbers(rank, 0, call) for rank in range(3))
            assert all(torch.equal(each, right) for each in (total, *sums.values()))


@spmd(4)
def test_part_of_a_wire_lends_and_counts_as_the_wire_does(wire):
    if wire.rank:
        part = Part(wire, [3, 1, 2])
        wire.traffic.reset()
        places, taken = swapped(part)
        assert are_right(part, places) and all(taken.values())
        each = 8 * SIZE + TICKET + SAID
        assert wire.traffic.to == {peer: each for peer in wire.peers if peer}


@spmd(3, on=("processes",))
def test_nothing_is_taken_from_a_rank_that_raises_in_the_middle(wire):
    """It lets go of what it lent, and does something else with it, while others read."""
    mine, into = torch.ones(SIZE), torch.empty(SIZE)

    def job():
        loans = Loans(wire)
        at = told(wire, {peer: loans.ticket(peer, mine) for peer in wire.peers})
        if wire.rank == 1:
            raise ZeroDivisionError
        while loans.take(1, at[1], into):  # until it has given up
            assert into.eq(1).all()
        loans.settle()

    with pytest.raises(ZeroDivisionError if wire.rank == 1 else WireError) as caught:
        wire.worker.call("lending", job)
    mine.fill_(2)
    assert wire.rank == 1 or caught.value.culprit == 1


RANKS, VICTIM = 3, 1


def scattering(wire):
    """Calls of `all_to_all` without end: whether what came is right, for each."""
    number = 0
    while True:
        number += 1
        given = [torch.full((SIZE,), 16 * number + 4 * wire.rank + to) for to in range(RANKS)]
        came = weft.all_to_all(given, wire)
        at = 16 * number + wire.rank
        yield all(bool(each.eq(at + 4 * rank).all()) for rank, each in enumerate(came))


def summing(wire):
    """The same of a layer that is called again and again."""
    layer = nn.AllSumReduce(weft.Partition(RANKS, group=wire), 0)
    number = 0
    while True:
        number += 1
        sums = layer(torch.full((2 * SIZE,), number + wire.rank))
        yield bool(sums.eq(3 * number + 3).all())


def endless(path, rank, program, how, timeout):
    """A rank's calls until one of them is killed or stopped."""
    torch.set_num_threads(1)
    wire = connect(dist.FileStore(path, RANKS), rank, RANKS, timeout)
    reads, real, run = [], type(wire).read, Talk.run

    def read(self, peer, address, into):
        reads.append(peer)
        return real(self, peer, address, into)

    def in_steps(self, *arguments):
        reads.append(None)
        return run(self, *arguments)

    type(wire).read, Talk.run = read, in_steps
    right = True
    try:
        for number, each in enumerate(program(wire)):
            right &= each
            if number == 5 and rank == VICTIM:
                threading.Timer(0.02, os.kill, (os.getpid(), how)).start()
    except WireError as error:
        return {"culprit": error.culprit, "right": right, "read": len(reads) > 5}


def test_everybody_names_a_rank_that_dies_or_freezes_while_others_read(tmp_path):
    # all at once, since most of it is waiting
    cases = [
        (program, *case)
        for program in (scattering, summing)
        for case in ((signal.SIGKILL, 20.0), (signal.SIGSTOP, 2.0))
    ]
    pipes, children = {}, {}
    for program, how, timeout in cases:
        for rank in range(RANKS):
            key = program.__name__, how.name, rank
            pipes[key], end = os.pipe()
            children[key] = os.fork()
            if children[key] == 0:
                try:
                    signal.alarm(60)
                    path = str(tmp_path / f"{key[0]} {key[1]}")
                    said = endless(path, rank, program, how, timeout)
                    os.write(end, json.dumps(said).encode())
                finally:
                    os._exit(0)
            os.close(end)
    try:
        for key, pipe in pipes.items():
            with os.fdopen(pipe) as file:
                said = file.read() if key[-1] != VICTIM else ""
            if key[-1] != VICTIM:
                expected = {"culprit": VICTIM, "right": True, "read": True}
                assert said and json.loads(said) == expected, (key, said)
    finally:
        for child in children.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
