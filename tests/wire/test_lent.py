"""`weft.wire.lent`: long messages between ranks of one host are read where they lie."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist

from weft import WireError
from weft.kernels.address import address_of
from weft.wire.lent import LEAST, Guard, Reach
from weft.wire.mover import Lost, Mover
from weft.wire.process_group import connect

HOST, OTHER = b"h" * 16, b"o" * 16
LONG = LEAST + 5


def movers(*hosts):
    """The movers of two ranks, which introduced themselves."""
    bulk, small = socket.socketpair(), socket.socketpair()
    for sock in (*bulk, *small):
        sock.setblocking(False)
    made = [Mover(rank, {1 - rank: bulk[rank]}, {1 - rank: small[rank]}, {}) for rank in (0, 1)]
    for mover, host in zip(made, hosts, strict=True):
        mover.introduce(host)
    for mover in made * 2:
        step(mover)  # cards, and what came of them
    return made


@pytest.fixture
def pair():
    made = movers(HOST, HOST)
    yield made
    for mover in made:
        mover.close()


@pytest.fixture
def reads(monkeypatch):
    """The lengths of what is read across, and the number of those that fail from now on."""
    lengths, fail = [], []
    real = Reach.read

    def read(self, address, into):
        lengths.append(len(into))
        return not fail and real(self, address, into)

    monkeypatch.setattr(Reach, "read", read)
    return lengths, fail


def step(mover):
    with mover._turn:
        mover._step(0.1)


def post(mover, peer, *, sends=(), recvs=(), channel=0):
    sends = [(peer, memoryview(each), "") for each in sends]
    recvs = [(peer, memoryview(each), "") for each in recvs]
    return mover.post(mover.lines, sends, recvs, channel)


def exchange(pair, messages):
    """Send messages to the right, each with its channel, and return what came."""
    left, right = pair
    places = [bytearray(len(message)) for _, message in messages]
    expected = [
        post(right, 0, recvs=[place], channel=channel)
        for (channel, _), place in zip(messages, places, strict=True)
    ]
    sent = [post(left, 1, sends=[message], channel=channel) for channel, message in messages]
    for _ in range(4):
        step(right)
        step(left)
    for orders in expected:
        right.finish(orders, 5.0, lambda number: None)
    for orders in sent:
        left.finish(orders, 5.0, lambda number: None)
    return places


def mixed():
    """Long and short messages on two channels."""
    return [
        (number % 2, bytes([number]) * (LONG if number % 3 else 7 + number))
        for number in range(1, 9)
    ]


def test_long_messages_are_read_where_they_lie(pair, reads):
    messages = mixed()
    assert exchange(pair, messages) == [message for _, message in messages]
    assert reads[0] == [len(message) for _, message in messages if len(message) >= LEAST]
    assert not any(mover.lines[1 - rank].busy for rank, mover in enumerate(pair))


def test_what_was_told_behind_a_long_message_is_not_forgotten(pair, reads):
    """The places of two messages come in one piece, behind which the socket says nothing more."""
    left, right = pair
    places = [bytearray(LONG), bytearray(LONG)]
    first, second = (post(right, 0, recvs=[each], channel=n) for n, each in enumerate(places))
    step(right)  # says that it has places
    with right._turn:  # so that its thread looks at nothing meanwhile
        for channel, byte in enumerate(b"ab"):
            post(left, 1, sends=[bytes([byte]) * LONG], channel=channel)
        step(left)  # says where both lie
        right.finish(second, 2.0, lambda number: None)
    assert first[0][1].done and places == [b"a" * LONG, b"b" * LONG]
    assert reads[0] == [LONG, LONG]


def test_what_cannot_be_read_is_sent(pair, reads):
    reads[1].append(True)
    messages = mixed()
    assert exchange(pair, messages) == [message for _, message in messages]
    assert reads[0]
    reads[0].clear()
    assert exchange(pair, messages) == [message for _, message in messages]
    assert not reads[0]  # it is not tried again


def test_ranks_on_different_hosts_send(reads):
    pair = movers(HOST, OTHER)
    assert exchange(pair, [(0, b"x" * LONG)]) == [b"x" * LONG]
    assert not reads[0]
    for mover in pair:
        mover.close()


def test_nothing_is_taken_from_a_rank_that_gave_up(pair):
    left, right = pair
    message, place = bytearray(b"x" * LONG), bytearray(LONG)
    orders = post(right, 0, recvs=[place])
    step(right)  # says that it has a place
    post(left, 1, sends=[message])
    step(left)  # says where the message lies
    left.cut()
    message[:] = b"y" * LONG
    with pytest.raises(Lost):
        right.finish(orders, 5.0, lambda number: None)


def test_a_guard_that_is_wiped_or_another_process_is_no_reach():
    guard = Guard()
    memory, into = bytearray(b"abc"), bytearray(3)
    reach = Reach.of(guard.card(HOST), HOST)
    assert reach is not None and Reach.of(guard.card(OTHER), HOST) is None
    assert reach.read(address_of(memoryview(memory)), memoryview(into)) and into == memory
    guard.wipe()
    assert not reach.read(address_of(memoryview(memory)), memoryview(into))
    assert Reach.of(guard.card(HOST), HOST) is None


RANKS, VICTIM, SIZE = 3, 1, 4 << 20


def endless_ring(path, rank, how, timeout):
    """One rank sends long messages round the ring until one of them is killed or stopped."""
    torch.set_num_threads(1)
    across, real = [], Reach.read

    def read(self, address, into):
        across.append(len(into))
        return real(self, address, into)

    Reach.read = read
    wire = connect(dist.FileStore(path, RANKS), rank, RANKS, timeout)
    before, after = (rank - 1) % RANKS, (rank + 1) % RANKS
    right, number = True, 0
    try:
        while True:
            own = torch.full((SIZE,), rank + RANKS * number % 240, dtype=torch.uint8)
            other = torch.empty(SIZE, dtype=torch.uint8)
            wire.post([(after, own)], [(before, other)]).wait()
            right &= bool((other == before + RANKS * number % 240).all())
            number += 1
            if number == 5 and rank == VICTIM:
                threading.Timer(0.01, os.kill, (os.getpid(), how)).start()
    except WireError as error:
        may = wire._connections.mover.lines[before].reach is not None
        return {"culprit": error.culprit, "right": right, "as it may": (SIZE in across) == may}


def test_everybody_names_a_rank_of_this_host_that_dies_or_freezes(survivors):
    said = survivors(endless_ring, RANKS, VICTIM)
    assert len(said) == 2 * (RANKS - 1)
    for case, words in said.items():
        assert words == {"culprit": VICTIM, "right": True, "as it may": True}, case
