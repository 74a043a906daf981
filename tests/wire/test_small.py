"""`weft.wire.small`: small messages on one connection, however its bytes are cut up."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.wire.pipe import PipeLine
from weft.wire.small import SocketLine

KINDS = [SocketLine, PipeLine]


@pytest.fixture(params=KINDS)
def pair(connection, request):
    """Both ends of a connection of each kind."""
    with connection(request.param) as made:
        yield made


@pytest.fixture
def sockets(connection):
    with connection(SocketLine) as made:
        yield made


def turn(*lines):
    """Let all move until nothing moves."""
    for _ in range(1000):
        for line in lines:
            line.receive()
            line.flush()
        if not any(line.reads or line.writes for line in lines):
            return


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 7, 8, 9, 4096, 65520, 65528, 65536, 65537, 300_000]),
            st.sampled_from([0, 1, 70_000]),  # by how much the receive is larger
        ),
        max_size=12,
    ),
    st.integers(0, 12),  # how many are awaited before they are sent
)
def test_what_is_sent_arrives_in_order(connection, kind, sent, awaited, messages, early):
    with connection(kind, 8192) as (left, right):
        payloads = [bytes([n + 1]) * size for n, (size, _) in enumerate(messages)]
        receives = [awaited(right, size + more) for size, more in messages[:early]]
        sends = [sent(left, payload) for payload in payloads]
        turn(left, right)
        for size, more in messages[early:]:  # one by one, so that much is read ahead
            receives.append(awaited(right, size + more))
            turn(left, right)
        assert not left.lost and not right.lost
        assert all(order.done for order in (*sends, *receives))
        for order, payload in zip(receives, payloads, strict=True):
            assert bytes(order.buffer[: len(payload)]) == payload


def test_bytes_that_come_one_by_one_are_put_together(sockets, awaited):
    left, right = sockets
    orders = [awaited(right, 3), awaited(right, 2)]
    for byte in struct.pack("!Q", 3) + b"abc" + struct.pack("!Q", 2) + b"de":
        assert not all(order.done for order in orders)
        left.sock.send(bytes([byte]))
        assert right.receive()
    assert [bytes(order.buffer) for order in orders] == [b"abc", b"de"]
    assert all(order.done for order in orders) and not right.reads


def test_small_messages_go_out_at_once_and_wait(pair, sent, awaited):
    left, right = pair
    assert all(sent(left, bytes([n])).done for n in range(3))
    assert not left.writes and not right.reads and not right.receive()
    got = [awaited(right, 8) for _ in range(2)]
    right.receive()
    assert [order.done for order in got] == [True, True]
    last = awaited(right, 8)
    right.receive()  # it was read with the others
    assert last.done and last.buffer[0] == 2


@pytest.mark.parametrize("before", [0, 1])  # whether it comes alone
def test_a_message_that_is_too_long_is_said(pair, before, sent, awaited):
    left, right = pair
    orders = [*(awaited(right, 1) for _ in range(before)), awaited(right, 3)]
    for size in (*[1] * before, 4):
        sent(left, bytes(size))
    right.receive()
    assert right.lost == "4 bytes came where at most 3 were expected"
    assert [order.done for order in orders] == [*[True] * before, False]
    assert not right.reads


def test_an_end_in_the_middle_of_a_message_is_seen(sockets, awaited):
    left, right = sockets
    order = awaited(right, 9)
    left.sock.send(struct.pack("!Q", 9) + b"half")
    left.sock.close()
    while right.receive():
        assert not right.lost
    assert right.lost == "the connection was closed" and not order.done


def test_what_came_before_the_end_is_not_lost(pair, sent, awaited):
    left, right = pair
    first = awaited(right, 50_000)
    sent(left, b"x" * 50_000)
    left.sock.close()
    last = awaited(right, 1)
    if isinstance(right, PipeLine):
        right.hear()
    while right.receive():
        assert not right.lost
    assert right.lost and not last.done
    assert first.done and bytes(first.buffer) == b"x" * 50_000


def test_what_came_before_a_send_that_fails_is_not_lost(sockets, sent, awaited):
    left, right = sockets
    first = awaited(right, 100_000)
    sent(left, b"x" * 100_000)
    left.sock.close()
    late = sent(right, b"y")
    assert right.lost and not late.done
    assert first.done and bytes(first.buffer) == b"x" * 100_000
