"""`weft.wire.line`: messages on one connection, however its bytes are cut up."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.wire.line import Line, Order


@pytest.fixture
def pair(connection):
    with contextlib.ExitStack() as stack:
        yield lambda buffer=None: stack.enter_context(connection(Line, buffer))


def sent(line, payload, channel=0):
    order = Order(memoryview(payload))
    line.send(channel, order)
    return order


def awaited(line, size, channel=0):
    order = Order(memoryview(bytearray(size)))
    line.expect(channel, order)
    return order


def turn(*lines):
    """Let all move until nothing moves."""
    for _ in range(1000):
        for line in lines:
            line.receive()
            line.flush()
        if not any(line.busy for line in lines):
            return


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # channel
            st.sampled_from([0, 1, 15, 16, 17, 4096, 65519, 65536, 65537, 200_000]),
            st.sampled_from([0, 1, 70_000]),  # by how much the receive is larger
            st.booleans(),  # whether it is awaited before it is sent
        ),
        max_size=12,
    )
)
def test_what_is_sent_arrives_in_its_channel_s_order(connection, messages):
    with connection(Line, 8192) as (left, right):
        payloads = [
            bytes([n + 1]) * size if size else b"" for n, (_, size, _, _) in enumerate(messages)
        ]
        receives = {}
        for early in (True, False):
            for n, (channel, size, more, first) in enumerate(messages):
                # within a channel, receives are posted in the order of the sends
                first = first and all(m[3] for m in messages[:n] if m[0] == channel)
                if first == early:
                    receives[n] = awaited(right, size + more, channel)
            if early:
                sends = [sent(left, p, m[0]) for p, m in zip(payloads, messages, strict=True)]
                turn(left, right)
        turn(left, right)
        assert not left.lost and not right.lost
        assert all(order.done for order in (*sends, *receives.values()))
        for n, payload in enumerate(payloads):
            assert bytes(receives[n].buffer[: len(payload)]) == payload


def test_no_channel_holds_up_another(pair):
    left, right = pair()
    first, second = sent(left, b"a" * 300_000, 5), sent(left, b"b", 6)
    late = awaited(right, 1, 6)
    turn(left, right)
    assert late.done and second.done and bytes(late.buffer) == b"b"
    assert not first.done, "nobody awaits it"
    place = awaited(right, 300_000, 5)
    turn(left, right)
    assert place.done and first.done


def test_a_message_needs_no_memory_before_it_is_awaited(pair):
    left, right = pair()
    sent(left, bytes(100))
    left.flush()
    with pytest.raises(BlockingIOError):
        right.sock.recv(1, socket.MSG_PEEK)


def test_a_message_that_is_too_long_is_said(pair):
    left, right = pair()
    awaited(right, 3)
    right.flush()
    left.receive()
    sent(left, b"four")
    left.flush()
    right.receive()
    assert right.lost == "4 bytes came where at most 3 were expected"


def test_a_message_that_nobody_awaits_is_said(pair):
    left, right = pair()
    left.sock.send(struct.pack("!QQ", 7, 4) + b"four")
    right.receive()
    assert right.lost == "a message of 4 bytes came that nobody awaits"


def test_an_end_in_the_middle_of_a_message_is_seen(pair):
    left, right = pair(8192)
    order = awaited(right, 300_000)
    right.flush()
    left.receive()
    sent(left, bytes(300_000))
    left.flush()
    left.sock.close()
    while not right.lost:
        right.receive()
    assert right.lost == "the connection was closed" and not order.done
    assert not right.reads and not right.writes


def test_what_came_before_the_end_is_not_lost(pair):
    """The grant of the second receive meets a closed door; the first message lies there."""
    left, right = pair()
    first = awaited(right, 100_000)
    right.flush()
    left.receive()
    sent(left, b"x" * 100_000)
    left.flush()
    left.sock.close()
    awaited(right, 1)
    right.flush()
    assert right.lost and first.done and bytes(first.buffer) == b"x" * 100_000
