"""`weft.wire.tcp.connection`: what a peer says is checked, and what it never may say ends it."""

from __future__ import annotations

import signal
import socket
import struct

import pytest
import torch

from weft.wire.tcp import shm
from weft.wire.tcp.connection import EAGER, Block, Connection, Outgoing, Receive

FRAME = struct.Struct("<IIQQ")  # kind, channel, length, number or offset
DATA, CREDIT, LENT, COPIED, READ, WAITS = range(6)
TOP = (1 << 64) - 1
SEGMENT = 1 << 20  # bytes of the segment that the fixture gives


@pytest.fixture
def ends():
    """A connection, and the socket of its peer."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    with mine, theirs:
        yield Connection(1, mine), theirs


def bytes_at(theirs):
    """What has come at the socket of the peer."""
    try:
        return theirs.recv(1 << 20, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def test_a_short_message_follows_its_frame_at_once(ends):
    connection, theirs = ends
    connection.send(3, Outgoing(torch.arange(5, dtype=torch.uint8)))
    connection.flush()
    assert bytes_at(theirs) == FRAME.pack(DATA, 3, 5, 0) + bytes(range(5))


def test_a_send_to_one_that_has_gone_ends_the_connection_and_is_no_signal(ends):
    connection, theirs = ends
    came = []
    before = signal.signal(signal.SIGPIPE, lambda *_: came.append("SIGPIPE"))
    try:
        theirs.close()
        connection.send(3, Outgoing(torch.arange(5, dtype=torch.uint8)))
        connection.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert connection.lost and came == []


def test_a_long_message_follows_its_frame_when_there_is_a_credit(ends):
    connection, theirs = ends
    for length in (4, EAGER + 1):
        connection.send(3, Outgoing(torch.zeros(length, dtype=torch.uint8)))
        connection.flush()
    waits = FRAME.pack(WAITS, 3, EAGER + 1, 2)
    assert bytes_at(theirs) == FRAME.pack(DATA, 3, 4, 0) + bytes(4) + waits
    for credit in (FRAME.pack(CREDIT, 4, 0, 2), FRAME.pack(CREDIT, 3, 0, 1)):
        theirs.sendall(credit)
        connection.receive()
        connection.flush()
        assert bytes_at(theirs) == b"", "that is for another channel, or for the message before"
    theirs.sendall(FRAME.pack(CREDIT, 3, 0, 2))
    connection.receive()
    connection.flush()
    assert bytes_at(theirs).startswith(FRAME.pack(DATA, 3, EAGER + 1, 0))


def test_of_messages_that_wait_the_first_says_so_once(ends):
    connection, theirs = ends
    for _ in range(3):
        connection.send(3, Outgoing(torch.zeros(EAGER + 1, dtype=torch.uint8)))
        connection.flush()
    assert bytes_at(theirs) == FRAME.pack(WAITS, 3, EAGER + 1, 1)
    theirs.sendall(FRAME.pack(CREDIT, 3, 0, 1))
    connection.receive()
    connection.flush()
    assert bytes_at(theirs).startswith(
        FRAME.pack(WAITS, 3, EAGER + 1, 2) + FRAME.pack(DATA, 3, EAGER + 1, 0)
    )


def test_receives_of_long_messages_send_credits(ends):
    connection, theirs = ends
    for limit in (EAGER + 1, EAGER, EAGER + 1, EAGER):
        connection.expect(6, Receive(limit))
    connection.flush()
    assert bytes_at(theirs) == FRAME.pack(CREDIT, 6, 0, 1) + FRAME.pack(CREDIT, 6, 0, 3)
    theirs.sendall(FRAME.pack(DATA, 9, 2, 0) + bytes(2))
    connection.receive()
    connection.expect(9, Receive(EAGER + 1))
    connection.flush()
    assert bytes_at(theirs) == b"", "the message has come"


def test_messages_in_a_segment_are_told_of_and_acknowledged(segment):
    """Also where they come before they are asked for; a copy is read where it lies."""
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        sender = Connection(1, near, shm.Peer(segment.fd, SEGMENT))
        message = torch.arange(100, dtype=torch.uint8)
        at = segment.stage(message)
        block = Block(segment, segment.stage(message))
        block.readers = 1
        sends = [Outgoing(message, at), Outgoing(message, block.offset, block)]
        for send in sends:
            sender.send(5, send)
        sender.flush()
        frames = bytes_at(far)
        lent = FRAME.pack(LENT, 5, 100, at)
        assert frames == lent + FRAME.pack(COPIED, 5, 100, block.offset)
        assert [send.done for send in sends] == [False, True]

        far.sendall(FRAME.pack(READ, 0, 0, 2) + FRAME.pack(READ, 0, 0, 1))
        sender.receive()
        assert sends[0].done and not block.readers

        receiver = Connection(0, far, shm.Peer(segment.fd, SEGMENT))
        near.sendall(frames)
        receiver.receive()
        receives = [Receive(100), Receive(100)]
        for receive in receives:
            receiver.expect(5, receive)
        receiver.flush()
        assert bytes_at(near) == FRAME.pack(READ, 0, 0, 1), "the view of the copy is not released"
        assert all(torch.equal(receive.tensor, message) for receive in receives)
        receives[1].release()
        receiver.flush()
        assert bytes_at(near) == FRAME.pack(READ, 0, 0, 2)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        ((9, 0, 0, 0), "a frame of kind 9 .* where none may be"),
        ((DATA, 0, TOP, 0), f"a message of {TOP} bytes that nobody awaits"),
        ((DATA, 0, EAGER + 1, 0), "that nobody awaits"),
        ((DATA, 7, 9, 0), "9 bytes for a receive of exactly 8"),
        ((DATA, 7, 7, 0), "7 bytes for a receive of exactly 8"),
        ((LENT, 7, 8, 0), "a frame of kind 2 for 8 bytes at 0"),  # no segment
        ((COPIED, 7, 8, TOP), "where none may be"),
        ((WAITS, 7, EAGER + 1, 1), f"{EAGER + 1} bytes for a receive of exactly 8"),
        ((READ, 0, 0, 1), "a frame of kind 4 .* at 1"),  # nothing was sent
    ],
)
def test_a_frame_that_makes_no_sense_ends_the_connection(ends, frame, said):
    connection, theirs = ends
    place = torch.zeros(8, dtype=torch.uint8)
    connection.expect(7, Receive(place))
    theirs.sendall(FRAME.pack(*frame) + bytes(9))
    connection.receive()
    with pytest.raises(AssertionError, match=said):
        assert not connection.garbled, connection.garbled
    assert not place.any()


@pytest.mark.parametrize(
    ("offset", "length"), [(0, SEGMENT + 1), (SEGMENT, 1), (TOP, 1), (1, TOP), (SEGMENT - 96, 97)]
)
def test_what_lies_outside_of_a_segment_is_not_read(segment, offset, length):
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.setblocking(False)
        connection = Connection(1, mine, shm.Peer(segment.fd, SEGMENT))
        theirs.sendall(FRAME.pack(LENT, 0, length, offset))
        connection.receive()
        assert "where none may be" in connection.garbled


def test_frames_may_come_byte_by_byte(ends):
    connection, theirs = ends
    receives = [Receive(each) for each in (5, torch.zeros(5, dtype=torch.uint8), 5)]
    connection.expect(3, receives[0])
    for byte in b"".join(FRAME.pack(DATA, 3, 5, 0) + bytes([n] * 5) for n in range(3)):
        theirs.sendall(bytes([byte]))
        connection.receive()
    for receive in receives[1:]:
        connection.expect(3, receive)
    assert all(receive.done for receive in receives) and not connection.lost
    assert [receive.tensor.tolist() for receive in receives] == [[n] * 5 for n in range(3)]
