"""Messages between hosts that are packed on their way, over lines and movers.

That links are slow is said, not measured, since what is packed depends on it.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels import floats
from weft.kernels.compile import compiler
from weft.kernels.piece_table import LEAST, PIECE
from weft.wire import pieces
from weft.wire.line import Line, Order
from weft.wire.mover import Lost, Mover
from weft.wire.pieces import KINDS, Pace

FRAME, HEADER = struct.Struct("!QQ"), struct.Struct("<II")
PIECES, UNPACKS = 1 << 58, 1 << 60 | 4  # the first: of float32
BOTH = sum(KINDS.values())


@pytest.fixture(scope="module", autouse=True)
def compiled():
    compiler.make(floats.PIECES)
    assert compiler.made(floats.PIECES)


class Slow(Pace):
    """Of links that are slow whatever is seen."""

    def __init__(self):
        super().__init__()
        self.slow = True

    def see(self, line, rate, now):
        pass


class Pump:
    """What two ends send each other, in sips, in place of a network."""

    def __init__(self, *ends):
        self._ways = [(*way, itertools.cycle(sips)) for way, sips in ends]

    def turn(self):
        for source, to, sips in self._ways:
            with contextlib.suppress(BlockingIOError):
                some = source.recv(next(sips), socket.MSG_PEEK)
                source.recv(to.send(some))


def payload(kind, what, size, seed=1):
    generator = np.random.default_rng(seed)
    if what == "dull":
        return generator.bytes(size)
    raw = (generator.normal(size=size // 2 + 1) * (what != "zeros")).astype(np.float32)
    return (raw.view(np.uint16)[1::2] if kind == "bf16" else raw).tobytes()[:size]


def sent(line, message, kind="", channel=0):
    order = Order(memoryview(message), kind)
    line.send(channel, order)
    return order


def awaited(line, size, channel=0):
    order = Order(memoryview(bytearray(b"\xa5" * size)))
    line.expect(channel, order)
    return order


def turn(*lines, until=lambda: False, seconds=5.0):
    """Let all move until nothing is under way, and what was told has been heard."""
    end = time.monotonic() + seconds
    while any(line.busy and not line.lost for line in lines) and not until():
        assert time.monotonic() < end, "it hangs"
        for line in lines:
            line.receive()
            line.flush()
            if (pump := getattr(line, "pump", None)) is not None:
                pump.turn()


@contextlib.contextmanager
def lines(connection, *, buffer=None, offers=(BOTH, BOTH), sips=None):
    """Two that say what they read, on a link that is slow, and may carry so much at a time."""

    def plain(peer, sock):
        return sock

    with contextlib.ExitStack() as stack:
        ends = stack.enter_context(connection(plain, buffer, tcp=True))
        if sips is not None:
            inner = stack.enter_context(connection(plain, buffer, tcp=True))
            ways = (ends[1], inner[0]), (inner[0], ends[1])
            pump, ends = Pump(*zip(ways, sips, strict=True)), (ends[0], inner[1])
        left, right = (Line(1 - rank, sock, Slow()) for rank, sock in enumerate(ends))
        if sips is not None:
            left.pump = pump
        for line, kinds in zip((left, right), offers, strict=True):
            if kinds:
                line.offer(kinds)
        hear(left, right)
        yield left, right


def hear(*lines):
    """Let each hear what the other reads."""
    left, right = lines
    until = time.monotonic() + 10.0
    while (left.unpacks, right.unpacks) != (right.offered, left.offered):
        assert time.monotonic() < until
        for line in lines:
            line.flush()
            line.receive()
            if (pump := getattr(line, "pump", None)) is not None:
                pump.turn()


def carried(line, messages):
    """Bytes beside those of the messages' frames, which a line sent since it was asked last."""
    since, line.since = getattr(line, "since", 0), line._sent
    return line._sent - since - FRAME.size * messages


SIZES = [0, 4, 4096, LEAST - 4, LEAST, LEAST + 4, PIECE - 4, PIECE, PIECE + 4, 2 * PIECE, 300_000]
MESSAGE = st.tuples(
    st.integers(0, 2),  # channel
    st.sampled_from(["", *KINDS]),
    st.sampled_from(["normal", "zeros", "dull"]),
    st.sampled_from(SIZES),
    st.sampled_from([0, 8, 70_000]),  # by how much the receive is larger
)
SIPS = st.lists(st.sampled_from([7, 12, 100, 4096, 65_537, 200_000]), min_size=1, max_size=4)


@settings(max_examples=40)
@given(
    st.lists(MESSAGE, max_size=8),
    st.lists(MESSAGE, max_size=3),
    st.tuples(SIPS, SIPS).filter(lambda both: all(max(each) > 1000 for each in both)),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([None, 1 << 15]),
)
def test_whatever_is_sent_arrives_bit_by_bit(connection, there, back, sips, offered, buffer):
    offers = (BOTH, offered)
    with lines(connection, buffer=buffer, offers=offers, sips=sips) as (left, right):
        posted = []
        for one, other, messages in ((left, right, there), (right, left, back)):
            for seed, (channel, kind, what, size, more) in enumerate(messages):
                message = payload(kind, what, size, seed)
                order = sent(one, message, kind if size >= LEAST else "", channel)
                posted.append((order, awaited(other, size + more, channel), message))
        turn(left, right)
        for order, place, message in posted:
            assert order.done and place.done
            assert place.buffer[: len(message)] == message
            assert bytes(place.buffer[len(message) :]) == b"\xa5" * (
                len(place.buffer) - len(message)
            ), "it wrote behind the message"
        assert not left.lost and not right.lost


@pytest.mark.parametrize("sips", [1, 2, 3, 11, 12, 13, 16, 17])
def test_bytes_may_come_one_by_one(connection, sips):
    with lines(connection, sips=((sips,), (1 << 30,))) as (left, right):
        messages = [
            (payload("f32", "normal", LEAST), "f32"),
            (b"", ""),
            (payload("bf16", "zeros", LEAST + 2), "bf16"),
            (b"plain", ""),
            (payload("f32", "dull", LEAST), "f32"),
        ]
        places = [awaited(right, len(message)) for message, _ in messages]
        for message, kind in messages:
            sent(left, message, kind)
        turn(left, right, seconds=60.0)
        assert [bytes(place.buffer) for place in places] == [message for message, _ in messages]


def exchanged(left, right, message, kind):
    """Bytes in which a message went."""
    place = awaited(right, len(message))
    carried(left, 0)
    order = sent(left, message, kind)
    turn(left, right)
    assert order.done and place.done and place.buffer == message
    return carried(left, 1)


def test_only_what_both_read_is_packed(connection):
    """At machine speed: who cannot read a kind so would not write it so either."""
    for offers in itertools.product(range(4), repeat=2):
        with lines(connection, offers=offers) as (left, right):
            for kind, bit in KINDS.items():
                message = payload(kind, "normal", 300_000)
                took = exchanged(left, right, message, kind)
                packed = bit & offers[0] & offers[1]
                assert (took < 0.9 * len(message)) if packed else took == len(message), offers


def test_messages_without_a_kind_are_not_packed(connection):
    with lines(connection) as (left, right):
        assert exchanged(left, right, bytes(300_000), "") == 300_000


def test_kinds_that_are_not_known_yet_do_no_harm(connection):
    with lines(connection, offers=(BOTH, BOTH | 1 << 40)) as (left, right):
        assert exchanged(left, right, payload("f32", "normal", PIECE), "f32") < 0.9 * PIECE


def test_an_offer_may_come_late(connection):
    message = payload("f32", "normal", 400_000)
    with lines(connection, buffer=1 << 15, offers=(BOTH, 0)) as (left, right):
        assert exchanged(left, right, message, "f32") == len(message)
        places = [awaited(right, len(message)) for _ in range(3)]
        orders = [sent(left, message, "f32") for _ in range(3)]
        turn(left, right, until=lambda: places[0].buffer[5000] != 0xA5)
        right.offer(BOTH)  # in the middle of a message
        turn(left, right)
        assert all(order.done for order in (*orders, *places))
        assert [place.buffer == message for place in places] == [True] * 3
        assert exchanged(left, right, message, "f32") < 0.9 * len(message)
        right.offer(0)
        hear(left, right)
        assert exchanged(left, right, message, "f32") == len(message)


def test_a_link_that_is_not_slow_carries_what_it_is_given(connection):
    with lines(connection) as (left, right):
        left._packer._pace.slow = False
        message = payload("f32", "normal", PIECE)
        assert exchanged(left, right, message, "f32") == PIECE
        left._packer._pace.slow = True
        assert exchanged(left, right, message, "f32") < 0.9 * PIECE


def test_over_a_unix_socket_nothing_is_packed(connection):
    with connection(lambda peer, sock: Line(peer, sock, Pace())) as (left, right):
        for line in (left, right):
            line.offer(BOTH)
        hear(left, right)
        for _ in range(10):
            assert exchanged(left, right, payload("f32", "normal", PIECE), "f32") == PIECE


# what is not as it should be


def told(line, *parts):
    """A line hears what somebody sent who is not its peer."""
    for part in parts:
        line._theirs.sendall(part)
    end = time.monotonic() + 10.0
    while not line.lost:
        assert time.monotonic() < end, "it hangs"
        line.receive()
        line.flush()
    assert not line.receive() and not line.reads and not line.writes
    return line.lost


@pytest.fixture
def listener(connection):
    """A line whose peer is a socket of the test's."""
    with connection(lambda peer, sock: Line(peer, sock, Slow()), tcp=True) as (left, right):
        left.sock.setblocking(True)
        right._theirs = left.sock
        yield right


def packed(message, kind="f32"):
    out = bytearray(floats.most_bytes(kind, len(message) // 4))
    return bytes(out[: floats.pack_floats(kind, memoryview(message), memoryview(out))])


NONE = "a piece of a message came that is none"
LIES = {
    "nothing": HEADER.pack(0, 0),
    "of no bytes": HEADER.pack(4096, 0),
    "longer than the message": HEADER.pack(2 * PIECE + 4, 100),
    "more than its length": HEADER.pack(4096, 4097),
    "longer than a piece": HEADER.pack(PIECE + 4, 100),
    "text": b"GET / HTTP/1.1\r\n",
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("behind", [b"", b"\0" * 100_000, HEADER.pack(4, 4) + b"good"])
def test_what_is_no_piece_loses_the_line(listener, lie, behind):
    order = awaited(listener, 2 * PIECE)
    assert told(listener, FRAME.pack(PIECES, 2 * PIECE) + LIES[lie] + behind) == NONE
    assert not order.done


@pytest.mark.parametrize("more", [b"", HEADER.pack(4, 4) + b"good", HEADER.pack(9, 10)])
@pytest.mark.parametrize("wrong", [-1, 1, None])
def test_a_piece_that_cannot_be_read_loses_the_line(listener, wrong, more):
    body = packed(payload("f32", "normal", 4096))
    body = b"x" if wrong is None else (body + b"x")[: len(body) + wrong]
    order = awaited(listener, PIECE)
    header = HEADER.pack(4096, len(body))
    said = told(listener, FRAME.pack(PIECES, PIECE) + header + body + more)
    assert said == "a piece of a message came that cannot be read"
    assert not order.done


@pytest.mark.parametrize("kind", ["card", "taken", "declined"])
@pytest.mark.parametrize("size", [0, 5, 1 << 30])
@pytest.mark.parametrize("behind", [b"", b"\0" * 100_000])
def test_what_is_said_about_nothing_loses_the_line(listener, kind, size, behind):
    """It was never lent anything, and a card has a length."""
    frame = FRAME.pack({"card": 1 << 61, "taken": 1 << 60 | 1, "declined": 1 << 60 | 2}[kind], size)
    assert told(listener, frame + behind) == "a frame came that makes no sense here"


@pytest.mark.parametrize(("kind", "size"), [(PIECES, 0), (PIECES * 3, LEAST)])
def test_pieces_of_nothing_or_of_no_kind_are_none(listener, kind, size):
    awaited(listener, LEAST)
    text = "a message came in pieces that cannot be read here"
    assert told(listener, FRAME.pack(kind, size), HEADER.pack(4, 4)) == text


def test_pieces_need_a_place_like_any_message(listener):
    assert told(listener, FRAME.pack(PIECES | 5, LEAST)) == (
        f"a message of {LEAST} bytes came that nobody awaits"
    )


def test_pieces_need_a_place_that_is_large_enough(listener):
    awaited(listener, LEAST - 1, 5)
    text = f"{LEAST} bytes came where at most {LEAST - 1} were expected"
    assert told(listener, FRAME.pack(PIECES | 5, LEAST)) == text


@pytest.mark.parametrize("cut", [5, FRAME.size + 5, FRAME.size + HEADER.size, 900])
def test_an_end_in_the_middle_of_a_piece_is_seen(listener, cut):
    message = payload("f32", "normal", 4096)
    body = packed(message)
    order = awaited(listener, 2 * len(message))
    whole = FRAME.pack(PIECES, 2 * len(message)) + HEADER.pack(4096, len(body)) + body
    listener._theirs.sendall(whole[:cut])
    listener._theirs.shutdown(2)
    assert told(listener) == "the connection was closed"
    assert not order.done


def test_an_end_behind_some_pieces_is_seen_by_who_sends(connection):
    with lines(connection, buffer=1 << 15) as (left, right):
        place = awaited(right, 4 * PIECE)
        turn(left, right, until=lambda: bool(left._allowed))
        order = sent(left, payload("f32", "normal", 4 * PIECE), "f32")
        turn(left, right, until=lambda: place.buffer[5000] != 0xA5)
        right.sock.close()
        end = time.monotonic() + 10.0
        while not left.lost and time.monotonic() < end:
            left.flush()
        assert left.lost and not order.done and not left.writes


def test_a_line_is_busy_until_the_last_piece_is_through(connection):
    with lines(connection, buffer=1 << 15) as (left, right):
        place = awaited(right, 3 * PIECE)
        order = sent(left, payload("f32", "normal", 3 * PIECE), "f32")
        while not place.done:
            assert right.busy and (left.busy or order.done)
            assert order.done or not place.done
            for line in (left, right):
                line.receive()
                line.flush()
        assert order.done and not right.busy and not left.busy


def test_a_line_that_packs_nothing_keeps_no_memory_for_it(connection):
    with lines(connection) as (left, right):
        exchanged(left, right, bytes(PIECE), "")
        exchanged(right, left, payload("f32", "normal", PIECE), "f32")
        assert left._packer._room is None and right._unpacker._room is None
        assert right._packer._room is not None and left._unpacker._room is not None


# movers

HOSTS = b"h" * 16, b"o" * 16


@pytest.fixture
def movers(connection, monkeypatch):
    """`movers(hosts)`: two that introduced themselves, on a link that is slow."""
    monkeypatch.setattr(pieces, "Pace", Slow)
    with contextlib.ExitStack() as stack:

        def made(hosts=HOSTS):
            bulk, small = (
                stack.enter_context(connection(lambda peer, sock: sock, tcp=True)) for _ in range(2)
            )
            pair = [Mover(n, {1 - n: bulk[n]}, {1 - n: small[n]}, {}) for n in (0, 1)]
            for mover, host in zip(pair, hosts, strict=True):
                stack.callback(mover.close)
                mover.introduce(host)
            until = time.monotonic() + 10.0
            while any(line.lends is None for each in pair for line in each.lines.values()):
                assert time.monotonic() < until
                for mover in pair:
                    mover.advance()
            return pair

        yield made


def ends(pair):
    return pair[0].lines[1], pair[1].lines[0]


def swap(pair, kind, message, times=1):
    """Both send a message at a time; whether what arrives is right."""
    for _ in range(times):
        places = [bytearray(len(message)) for _ in pair]
        posted = [
            mover.post(
                mover.lines,
                [(1 - rank, memoryview(message), kind)],
                [(1 - rank, memoryview(place), kind)],
                0,
            )
            for rank, (mover, place) in enumerate(zip(pair, places, strict=True))
        ]
        until = time.monotonic() + 20.0
        while not all(order.done for orders in posted for _, order in orders):
            assert time.monotonic() < until, "it hangs"
            for mover in pair:
                mover.advance()
        assert places == [message] * 2


def test_movers_offer_each_kind_once_and_pack(movers, monkeypatch):
    offers, real = [], Line.offer
    monkeypatch.setattr(
        Line, "offer", lambda line, kinds: (offers.append((line.peer, kinds)), real(line, kinds))
    )
    pair = movers()
    message = payload("bf16", "normal", 3 * PIECE)
    swap(pair, "", message, 2)
    assert not offers
    swap(pair, "bf16", message, 3)
    assert sorted(offers) == [(0, 2), (1, 2)]
    assert [line.unpacks for line in ends(pair)] == [2, 2]
    swap(pair, "f32", message, 3)
    assert sorted(offers) == [(0, 2), (0, 3), (1, 2), (1, 3)]
    before = [line._sent for line in ends(pair)]
    swap(pair, "bf16", message)
    took = [line._sent - since for line, since in zip(ends(pair), before, strict=True)]
    assert max(took) < 0.75 * len(message)


def test_ranks_of_one_host_offer_nothing(movers, monkeypatch):
    asked = []
    monkeypatch.setattr(pieces, "reads", lambda: asked.append(True) or True)
    pair = movers((HOSTS[0], HOSTS[0]))
    swap(pair, "f32", payload("f32", "normal", LEAST), 2)
    assert [line.offered for line in ends(pair)] == [0, 0]
    assert not asked, "loops are asked for that nobody uses"


@pytest.mark.parametrize("later", [False, True])
def test_offers_wait_for_machine_code(movers, monkeypatch, later):
    """As where WEFT_KERNELS=reference or WEFT_PACK=0 has there be none, on one rank or for now."""
    able = [False]
    monkeypatch.setattr(pieces, "reads", lambda: able[0])
    pair = movers()
    message = payload("f32", "normal", 2 * PIECE)
    swap(pair, "f32", message, 2)
    assert [line.unpacks for line in ends(pair)] == [0, 0]
    able[0] = later
    swap(pair, "f32", message, 2)
    assert [line.unpacks for line in ends(pair)] == [later, later]


def test_a_wait_says_what_was_wrong_with_a_piece(movers):
    pair = movers()
    place = bytearray(LEAST)
    orders = pair[0].post(pair[0].lines, (), [(1, memoryview(place), "f32")], 0)
    pair[1].lines[0].sock.sendall(FRAME.pack(PIECES, LEAST) + HEADER.pack(9, 10))
    with pytest.raises(Lost, match=NONE):
        pair[0].finish(orders, 10.0, lambda number: None)
