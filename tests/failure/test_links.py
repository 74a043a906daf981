"""Control links, over sockets and between threads: what is said on one comes, and when."""

from __future__ import annotations

import math
import selectors
import signal
import socket
import threading
import time

import pytest

from weft.failure.links import SocketLinks, links_of_threads


def over_sockets(size):
    """The links of ranks that have a pair of sockets for every two of them."""
    ends = [{} for _ in range(size)]
    for first in range(size):
        for second in range(first):
            ends[first][second], ends[second][first] = socket.socketpair()
    for each in ends:
        for sock in each.values():
            sock.setblocking(False)
    return [SocketLinks(each) for each in ends]


@pytest.fixture(params=[over_sockets, links_of_threads])
def make(request):
    made = []

    def make(size):
        made.extend(request.param(size))
        return made[-size:]

    yield make
    for links in made:
        links.close()


class Reader:
    """Keeps what comes."""

    def __init__(self, links, seconds=math.inf):
        self.until = time.monotonic() + seconds
        self.data = {}
        self.times = []
        self.ended = []
        self.failure = None
        self.changed = threading.Condition()
        links.start(self)

    def due(self):
        return min(self.until, time.monotonic() + 3600)

    def handle(self, news, late):
        with self.changed:
            self.times.append((time.monotonic(), late))
            for peer, data, _ in news:
                self.data[peer] = self.data.get(peer, b"") + data
                if not data:
                    self.ended.append(peer)
            self.changed.notify_all()

    def fail(self, error):
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    def has(self, condition):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), 10.0), vars(self)


def test_bytes_come_in_order_from_each_peer(make):
    ranks = make(3)
    readers = [Reader(links) for links in ranks]
    assert [links.peers() for links in ranks] == [[1, 2], [0, 2], [0, 1]]
    for turn in range(50):
        for rank, links in enumerate(ranks):
            for peer in links.peers():
                links.send(peer, b"%d of %d, " % (turn, rank))
    for rank, reader in enumerate(readers):
        every = {
            peer: b"".join(b"%d of %d, " % (turn, peer) for turn in range(50))
            for peer in range(3)
            if peer != rank
        }
        reader.has(lambda reader, every=every: reader.data == every)


def test_what_is_sent_before_the_reader_is_there_waits_for_it(make):
    first, second = make(2)
    first.send(1, b"early")
    Reader(second).has(lambda reader: reader.data == {0: b"early"})


def test_the_reader_is_called_when_it_wants_to_be(make):
    first, second = make(2)
    early = Reader(first, 0.2)
    late = Reader(second, 0.4)
    for reader in (early, late):
        reader.has(lambda reader: any(when >= reader.until for when, _ in reader.times))
        overdue = next(late for when, late in reader.times if when >= reader.until)
        assert overdue >= 0
        reader.until = math.inf


def test_a_time_is_kept_while_something_comes_for_another_rank(make):
    first, second = make(2)
    early, other = Reader(first, 0.5), Reader(second)
    for links, reader in ((second, early), (first, other)):  # so its thread knows of the time
        peer = links.peers()[0]
        links.send(peer, b"x")
        reader.has(lambda reader, rank=1 - peer: reader.data == {rank: b"x"})
    early.has(lambda reader: any(when >= reader.until for when, _ in reader.times))
    early.until = math.inf


def test_the_reader_is_called_when_somebody_wakes_its_thread(make):
    first, second = make(2)
    woken, other = Reader(first), Reader(second)
    second.send(0, b"x")
    woken.has(lambda reader: reader.data == {1: b"x"})  # so its thread sleeps now
    woken.until = time.monotonic() - 1.0  # earlier than what the thread knows of
    before = len(woken.times)
    first.wake()
    woken.has(lambda reader: len(reader.times) > before)
    woken.until = math.inf
    first.send(1, b"x")
    other.has(lambda reader: reader.data == {0: b"x"})


def test_one_that_has_closed_is_no_peer_and_is_called_no_more(make):
    first, second, third = make(3)
    readers = [Reader(links) for links in (first, second, third)]
    second.send(0, b"bye")
    second.close()
    second.close()
    readers[0].has(lambda reader: reader.data.get(1) == b"bye")
    first.send(1, b"late")
    second.send(0, b"later")
    second.wake()
    first.send(2, b"x")
    readers[2].has(lambda reader: reader.data.get(0) == b"x")
    assert readers[0].data == {1: b"bye"}
    assert readers[1].data == {}


def test_a_goodbye_comes_last(make):
    first, second, third = make(3)
    readers = [Reader(links) for links in (second, third)]
    second.send(2, b"x")
    first.send(2, b"before ")
    for peer in (1, 2):
        first.send(peer, b"goodbye")
    first.close()
    first.close()
    for reader, data in zip(readers, (b"goodbye", b"before goodbye"), strict=True):
        reader.has(lambda reader, data=data: reader.data.get(0) == data)
    readers[0].has(lambda _: second.peers() == [2])  # a socket's end comes after its bytes


def test_a_reader_that_raises_is_told_so_and_the_others_go_on(make):
    first, second, third = make(3)
    broken, other = Reader(first), Reader(second)
    broken.handle = lambda news, late: 1 / 0
    second.send(0, b"x")
    broken.has(lambda reader: isinstance(reader.failure, ZeroDivisionError))
    third.send(1, b"y")
    other.has(lambda reader: reader.data.get(2) == b"y")


def test_closing_leaves_nothing(make, nothing_left):
    with nothing_left():
        ranks = make(3)
        readers = [Reader(links) for links in ranks]
        ranks[0].send(1, b"x")
        readers[1].has(lambda reader: reader.data.get(0) == b"x")
        for links in ranks:
            links.close()


def test_a_reader_may_close_its_links(make, nothing_left):
    with nothing_left():
        first, second = make(2)
        reader = Reader(first)
        handle = reader.handle

        def close(news, late):
            first.close()
            handle(news, late)

        reader.handle = close
        second.send(0, b"x")
        reader.has(lambda reader: reader.data == {1: b"x"})
        second.close()


def test_the_end_of_a_socket_is_news():
    first, second = over_sockets(2)
    reader = Reader(first)
    second.send(0, b"x")
    second.close()
    reader.has(lambda reader: reader.ended == [1])
    assert reader.data == {1: b"x"}
    assert first.peers() == []
    first.close()


@pytest.fixture
def signals():
    """The SIGPIPEs that came: at its default, which programs may set, one ends the process."""
    came = []
    before = signal.signal(signal.SIGPIPE, lambda *_: came.append("SIGPIPE"))
    yield came
    signal.signal(signal.SIGPIPE, before)


def test_a_send_to_one_that_has_gone_is_no_signal(signals):
    first, second = over_sockets(2)
    second.close()
    for _ in range(2):
        first.send(1, b"a")
    first.close()
    first.wake()
    assert signals == []


def test_nothing_follows_a_message_of_which_a_part_was_sent():
    first, second = over_sockets(2)
    first.send(1, b"a" * (16 << 20))
    first.send(1, b"b")
    reader = Reader(second)
    reader.has(lambda reader: reader.ended == [0])
    assert set(reader.data[0]) == {ord("a")}
    for links in (first, second):
        links.close()


def test_a_thread_that_begins_later_wakes_nobody():
    ranks = links_of_threads(8)
    readers = [Reader(links) for links in ranks]
    ranks[1].send(0, b"x")
    readers[0].has(lambda reader: reader.data == {1: b"x"})
    assert [reader.times for reader in readers[1:]] == [[]] * 7
    for links in ranks:
        links.close()


def test_what_came_while_the_thread_stood_still_is_there_with_its_time(monkeypatch):
    """As where its process was stopped: the system then says that nothing has come."""
    handled, sent = [], []

    class Stopped(selectors.DefaultSelector):
        def select(self, timeout=None):
            ready = super().select(timeout)
            if not sent:
                sent.append(True)
                second.send(0, b"an answer")
            return ready

    class Each(Reader):
        def handle(self, news, late):
            handled.append([each.data for each in news])
            self.until = math.inf
            super().handle(news, late)

    monkeypatch.setattr(selectors, "DefaultSelector", Stopped)
    first, second = over_sockets(2)
    reader = Each(first, seconds=0.1)
    reader.has(lambda reader: reader.data)
    assert handled[0] == [b"an answer"]
    for links in (first, second):
        links.close()
