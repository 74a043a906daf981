"""`weft.wire.pipe`: who sleeps is woken, an end is seen, and both see one memory."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import torch

from weft.kernels import cpu_talk
from weft.kernels.compile import compiler
from weft.kernels.talk_table import BYTES, PIPE
from weft.wire import pipe
from weft.wire.mover import Lost, Mover
from weft.wire.pipe import PipeLine, TensorOrder, put_all, take_all


@pytest.fixture
def pair(connection):
    with connection(PipeLine) as made:
        yield made


def bells(line):
    """How many bytes came to wake a line up."""
    try:
        return len(line.sock.recv(100))
    except BlockingIOError:
        return 0


def test_who_sleeps_is_woken_once(pair, sent, awaited):
    left, right = pair
    sent(right, b"0")
    assert bells(left) == 0  # it is not known to sleep
    orders = [awaited(left, 1) for _ in range(4)]
    assert left.stirs and left.receive() and not left.stirs
    left.sleep()
    sent(right, b"1")
    sent(right, b"2")
    assert bells(left) == 1 and left.stirs
    left.wake()
    assert left.receive()
    left.sleep()
    left.wake()
    sent(right, b"3")
    assert bells(left) == 0 and left.receive()
    assert [bytes(order.buffer) for order in orders] == [b"0", b"1", b"2", b"3"]


def test_who_sleeps_until_there_is_room_is_woken(pair, sent, awaited):
    left, right = pair
    full, last = sent(left, bytes(BYTES - 8)), sent(left, b"behind it")
    assert full.done and not last.done and left.writes and not left.stirs
    left.sleep()
    assert bells(left) == 0
    order = awaited(right, BYTES)
    assert right.receive() and order.done
    assert bells(left) == 1 and left.stirs
    left.wake()
    left.flush()
    assert last.done and not left.writes
    order = awaited(right, 9)
    assert right.receive() and bytes(order.buffer) == b"behind it"
    assert bells(left) == 0


def test_what_is_put_in_before_an_end_is_heard(pair, sent, awaited):
    left, right = pair
    order, more = awaited(left, 1), awaited(left, 1)
    assert not left.receive()
    sent(right, b"x")
    right.sock.close()
    left.hear()
    assert left.receive() and order.done and not left.lost
    assert not left.receive() and not more.done
    assert left.lost == "the connection was closed"


def test_a_bell_is_no_news(pair, awaited):
    left, right = pair
    order = awaited(left, 1)
    right.sock.send(b"\0\0")
    left.hear()
    assert bells(left) == 0 and not left.receive() and not left.lost
    right._ring(right._out, 1)  # nobody said that it sleeps
    assert bells(left) == 0 and not order.done


def test_both_go_on_without_a_bell_that_the_socket_has_no_room_for(pair, sent, awaited):
    left, right = pair
    while True:
        try:
            right.sock.send(bytes(1 << 16))
        except BlockingIOError:
            break
    order = awaited(left, 5)
    left.sleep()
    assert sent(right, b"hello").done
    left.wake()
    assert left.receive() and bytes(order.buffer) == b"hello"


def test_memory_is_seen_by_both_and_holds_no_file(nothing_left):
    with nothing_left():
        fd = pipe.memory()
        first, second = pipe.mapped(fd), pipe.mapped(fd)
        os.close(fd)
        first[7] = 9
        assert second[7] == 9 and len(second) == 2 * (PIPE + BYTES) and second.sum() == 9


def test_a_file_of_another_size_is_no_memory(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(100)
        assert pipe.mapped(file.fileno()) is None


@pytest.fixture
def movers(connection):
    """The movers of two ranks, with pipes for small messages."""
    with connection(PipeLine) as (left, right), connection(lambda _, sock: sock) as bulk:
        made = [
            Mover(rank, {1 - rank: sock}, {1 - rank: line.sock}, {1 - rank: line._shared})
            for rank, (sock, line) in enumerate(zip(bulk, (left, right), strict=True))
        ]
        yield made
        for mover in made:
            mover.close()


def swap(mover, payload, size, limit=20.0):
    (peer,) = mover.small
    told = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0)
    place = torch.empty(size, dtype=torch.uint8)
    orders = mover.post_small([(peer, told.byte())], [(peer, place)])
    mover.finish(orders, limit, lambda number: None)
    return place.numpy().tobytes()


@pytest.mark.parametrize("by_machine_code", [False, True])
def test_nobody_sleeps_for_ever(movers, monkeypatch, by_machine_code):
    """Two threads swap messages; now one is late, now the other, by just about a look."""
    if by_machine_code:
        compiler.make(cpu_talk.KEY)
    else:
        monkeypatch.setattr(pipe, "_loops", lambda: None)
    rounds, failures = 1500, []

    def run(rank):
        late = random.Random(rank)
        sizes = random.Random(5)  # the same on both
        try:
            for number in range(rounds):
                size = sizes.choice((0, 8, 100, 5000, 3 * BYTES))
                time.sleep(late.choice((0.0, 0.0, 40e-6, 60e-6, 200e-6)))
                got = swap(movers[rank], bytes([number % 256]) * size, size)
                assert got == bytes([number % 256]) * size
        except BaseException as error:  # told below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_peer_that_goes_ends_a_wait_and_what_it_said_is_heard(movers):
    left, right = movers
    right.post_small([(0, torch.arange(8).byte())], ())
    right.close()
    place, more = torch.empty(2, 8, dtype=torch.uint8)
    left.finish(left.post_small((), [(1, place)]), 10.0, lambda number: None)
    assert place.tolist() == list(range(8))
    orders = left.post_small((), [(1, more)])
    with pytest.raises(Lost, match="closed"):
        left.finish(orders, 10.0, lambda number: None)


def test_a_peer_that_goes_ends_a_wait_for_room(movers):
    left, right = movers
    orders = left.post_small([(1, torch.zeros(2 * BYTES, dtype=torch.uint8))], ())
    timer = threading.Timer(0.2, right.close)
    timer.start()
    with pytest.raises(Lost, match="closed"):
        left.finish(orders, 10.0, lambda number: None)
    timer.join()


def tensor_order(size, fill=0):
    return TensorOrder(torch.full((size,), fill, dtype=torch.uint8))


def taken(line, size):
    """What machine code takes as the next message, of so many bytes at most; None: nothing."""
    order = tensor_order(size)
    line.asked.append(order)
    assert line.takes(order)
    take_all([(line, order)], 0)
    if order.done:
        assert not line.asked
        return order.tensor.numpy().tobytes()
    assert line.asked.pop() is order
    return None


def test_machine_code_and_lines_put_and_take_alike(pair, sent, awaited):
    """Each of them through places all around the pipe, of every length modulo 8."""
    compiler.make(cpu_talk.KEY)
    left, right = pair
    draw = random.Random(3)
    for number in range(400):
        size = draw.choice((0, 1, 7, 8, 9, 1000, 5003, BYTES // 3))
        payload = bytes([number % 251]) * size
        if draw.random() < 0.5:
            assert sent(left, payload).done
        else:
            order = tensor_order(size, number % 251)
            put_all([(left, order)])
            assert order.done
        if draw.random() < 0.5:
            assert taken(right, size + 3)[:size] == payload
        else:
            order = awaited(right, size)
            assert right.receive() and bytes(order.buffer) == payload
        assert taken(right, 10) is None


def test_machine_code_leaves_to_the_lines_what_does_not_fit(pair, sent, awaited):
    compiler.make(cpu_talk.KEY)
    left, right = pair
    first, second = tensor_order(BYTES - 40, 1), tensor_order(40, 2)
    put_all([(left, first), (left, second)])
    assert first.done and not second.done
    assert taken(right, 8) is None  # too long
    long = awaited(right, BYTES)
    assert right.receive() and long.done
    larger = sent(left, bytes(2 * BYTES))  # comes in parts
    assert not larger.done and taken(right, 2 * BYTES) is None


def test_two_messages_to_one_peer_keep_their_order(movers):
    """The first has no room yet, the second would."""
    compiler.make(cpu_talk.KEY)
    left, right = movers
    full, long, short = (torch.full((n,), n % 251).byte() for n in (BYTES - 64, 500, 1))
    told = left.post_small([(1, full), (1, long), (1, short)], [])
    places = [torch.empty(len(each), dtype=torch.uint8) for each in (full, long, short)]
    asked = right.post_small([], [(0, place) for place in places])
    thread = threading.Thread(target=left.finish, args=(told, 20.0, lambda number: None))
    thread.start()
    right.finish(asked, 20.0, lambda number: None)
    thread.join()
    for place, given in zip(places, (full, long, short), strict=True):
        assert torch.equal(place, given)


def test_machine_code_wakes_who_sleeps(pair):
    compiler.make(cpu_talk.KEY)
    left, right = pair
    order = tensor_order(3)
    right.asked.append(order)
    right.sleep()
    put_all([(left, tensor_order(3, 7))])
    assert bells(right) == 1 and right.stirs
    right.wake()
    assert right.receive() and order.tensor.tolist() == [7, 7, 7]
