"""The wire over TCP between hosts: who connects to whom, and when."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from wire_ranks import far, make_wires, on_new_processes

from weft.base.memory import Pool
from weft.base.pace import patient
from weft.wire.interface import WireFailed
from weft.wire.tcp import wire as tcp
from weft.wire.tcp.listener import Endpoint, Listener


def connections():
    """The ends of this process's connections by TCP to other ranks, and to the store."""
    return {
        (each.laddr, each.raddr)
        for each in psutil.Process().net_connections("tcp")
        if each.status == "ESTABLISHED" and each.laddr.ip == each.raddr.ip == "127.0.0.1"
    }


def swap(wire, peer, number):
    """Send a number to a peer, and check that it sent the same."""
    place = torch.zeros(1)
    wire.post([(peer, torch.full((1,), number))], [(peer, place)]).wait(patient(20.0))
    assert place.item() == number


BEFORE = set()  # of this process, before it has a wire


def make_counted(start):
    BEFORE.update(connections())  # a rank whose wire is ready may connect to this one at once
    return far(start)


def first_messages(wire):
    """Rank 0 talks to rank 2 alone; ranks 1 and 3 talk to nobody."""
    if wire.rank in (1, 3):
        return len(connections() - BEFORE)
    swap(wire, 2 - wire.rank, 1.0)
    made = connections() - BEFORE  # one to the store may end meanwhile
    swap(wire, 2 - wire.rank, 2.0)  # so that the peer has not closed before
    return len(made)


def test_ranks_of_two_hosts_connect_with_their_first_message():
    assert on_new_processes(4, first_messages, make_counted) == [1, 0, 1, 0]


def one_is_early(wire):
    """A lower rank's message finds its way, whenever the higher one begins to receive."""
    if wire.rank == 0:
        wire.post([(1, torch.ones(5))]).wait(patient(20.0))
        return True
    time.sleep(1.0)  # longer than the lower rank waits: both may connect
    place = torch.zeros(5)
    wire.post((), [(0, place)]).wait(patient(20.0))
    return bool(place.all())


def both_connect(wire, rounds=20):
    """Whichever is kept, one connection is left, and nothing is lost."""
    for number in range(rounds):
        swap(wire, 1 - wire.rank, float(number))
    made = len(connections())
    swap(wire, 1 - wire.rank, float(rounds))  # so that the peer has not closed before
    return made


def make_at_once(start):
    """Lower ranks connect at once."""
    tcp.LOWER_DELAY = 0.0
    return far(start)


def make_one_way(start):
    """What rank 1 sends to connect to rank 0 is dropped, as by a firewall: its queue is full."""
    if start.rank == 1:
        full = socket.create_server(("127.0.0.3", 0), backlog=0)  # which `connections` leaves out
        waiting = [full, socket.create_connection(full.getsockname())]
        attempt = Listener.attempt

        def to_nowhere(listener, rank, peer, endpoint, lane):
            assert len(waiting) == 2  # both open
            port = full.getsockname()[1]
            endpoint = dataclasses.replace(endpoint, address="127.0.0.3", port=port)
            return attempt(listener, rank, peer, endpoint, lane)

        Listener.attempt = to_nowhere
    return make_at_once(start)


def test_ranks_connect_where_the_lower_one_alone_reaches_the_other():
    first, second = on_new_processes(2, both_connect, make_one_way)
    assert first == second


def test_a_message_waits_for_its_connection():
    assert on_new_processes(2, one_is_early, far) == [True, True]


@pytest.mark.parametrize("attempt", range(3))
def test_of_two_ranks_that_connect_to_each_other_one_connection_is_kept(attempt):
    first, second = on_new_processes(2, both_connect, make_at_once)
    assert first == second


@pytest.mark.parametrize("sender", [0, 1])
def test_a_rank_is_reached_though_its_program_does_something_else(sender):
    wires = make_wires(far, 2)
    try:
        wires[sender].post([(1 - sender, torch.ones(5))]).wait(patient(20.0))
        place = torch.zeros(5)
        wires[1 - sender].post((), [(sender, place)]).wait(patient(20.0))
    finally:
        for wire in wires:
            wire.close()
    assert place.all()


def listening():
    sockets = psutil.Process().net_connections("tcp")
    return {each.laddr for each in sockets if each.status == "LISTEN"}


def test_who_connects_and_is_no_rank_changes_nothing():
    before = listening()
    wires = make_wires(far, 2)
    hello = struct.pack("!II", 1, 0) + bytes(48)  # as rank 1, without its proof
    with contextlib.ExitStack() as stack:
        for wire in wires:
            stack.callback(wire.close)
        for address in listening() - before:
            stranger = stack.enter_context(socket.create_connection(address))
            stranger.sendall(hello)
        with ThreadPoolExecutor(2) as ranks:
            list(ranks.map(swap, wires, (1, 0), (3.0, 3.0)))
        assert [wire.failure() for wire in wires] == [None, None]


@contextlib.contextmanager
def beside_a_silent_rank(rank, timeout, listener=None):
    """A wire of one of two ranks; the other, on another host, takes connections and is silent."""
    listener = listener or Listener("127.0.0.1", 8)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1], "0" * 32)
        far = tcp.Far(listener, {1 - rank: endpoint}, timeout)
        with contextlib.closing(tcp.TcpWire(rank, 2, {}, Pool(), far=far)) as wire:
            yield wire


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_takes_a_connection_and_says_nothing_is_lost(rank):
    with beside_a_silent_rank(rank, 0.5) as wire, pytest.raises(WireFailed) as caught:
        wire.post((), [(1 - rank, 8)]).wait(patient(20.0))
    failure = caught.value.failure
    assert (failure.kind, failure.peer) == ("lost", 1 - rank)
    assert failure.text.endswith("(no answer within 0.5 s)")


def test_a_close_that_still_sends_may_give_up_a_rank_that_says_nothing(monkeypatch):
    """The attempt to reach that one ends while another one takes what was sent."""
    monkeypatch.setattr(tcp, "LINGER", 1.5)
    near, taker = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as silent, taker:
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1], "0" * 32)
        far = tcp.Far(Listener("127.0.0.1", 8), {0: endpoint}, 0.5)
        wire = tcp.TcpWire(1, 3, {2: near}, Pool(), far=far)
        wire.post((), [(0, 8)])
        for _ in range(40):  # more than the socket takes
            wire.post([(2, torch.ones(16_000))])
        wire.close()
        assert wire.failure().text == "this end was closed"
        assert near.fileno() == -1


def nothing_for(seconds):
    """No messages; a post that asks for them holds the wire for so long."""
    time.sleep(seconds)
    yield from ()


def test_who_was_paused_itself_gives_the_other_as_long_again(monkeypatch):
    monkeypatch.setattr(tcp, "PAUSE", 0.5)
    with beside_a_silent_rank(1, 2.0) as wire:
        pending = wire.post((), [(0, 8)])
        wire.post(nothing_for(2.5))  # as in foreign code that lets no other thread run
        with pytest.raises(TimeoutError):
            pending.wait(0)
        with pytest.raises(WireFailed, match="no answer within 2 s"):
            pending.wait(patient(20.0))


def test_no_file_left_to_connect_with_is_this_rank_s_own_failure(no_file_left):
    with beside_a_silent_rank(1, 20.0) as wire, pytest.raises(WireFailed) as caught, no_file_left():
        wire.post((), [(0, 8)]).wait(patient(20.0))
    failure = caught.value.failure
    assert (failure.kind, failure.peer) == ("broken", 1)
    assert failure.text.startswith("no file descriptor is left for a connection to rank 0 (")
    assert "(ulimit -n, or" in failure.text


def test_no_file_left_to_accept_with_is_this_rank_s_own_failure(no_file_left):
    listener = Listener("127.0.0.1", 8)
    at = listener.endpoint
    with (
        beside_a_silent_rank(0, 20.0, listener) as wire,
        socket.create_connection((at.address, at.port)),
        pytest.raises(WireFailed) as caught,
        no_file_left(),
    ):
        wire.post((), [(1, 8)]).wait(patient(20.0))
    failure = caught.value.failure
    assert (failure.kind, failure.peer) == ("broken", 0)
    assert failure.text.startswith("no file descriptor is left for a connection that has come (")
