"""`weft.wire.tcp.connection`: what a peer says is checked, and what it never may say ends it."""

from __future__ import annotations

import socket
import struct

import pytest
import torch

from weft.wire.memory import Pool
from weft.wire.tcp import shm
from weft.wire.tcp.connection import EAGER, Connection, Receive

FRAME = struct.Struct("<IIQQ")  # kind, channel, length, number or offset
DATA, CREDIT, LENT, COPIED, READ = range(5)
TOP = (1 << 64) - 1


@pytest.fixture
def ends():
    """A connection, and the socket of its peer."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    with mine, theirs:
        yield Connection(1, mine, None, mapped=False), theirs


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
        ((READ, 0, 0, 1), "a frame of kind 4 .* at 1"),  # nothing was sent
    ],
)
def test_a_frame_that_makes_no_sense_ends_the_connection(ends, frame, said):
    connection, theirs = ends
    place = torch.zeros(8, dtype=torch.uint8)
    connection.expect(7, Receive(place, Pool()))
    theirs.sendall(FRAME.pack(*frame) + bytes(9))
    connection.receive()
    with pytest.raises(AssertionError, match=said):
        assert not connection.garbled, connection.garbled
    assert not place.any()


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 4097), (4096, 1), (TOP, 1), (1, TOP), (4000, 97)]
)
def test_what_lies_outside_of_a_segment_is_not_read(offset, length):
    segment = shm.Segment.make(4096)
    if segment is None:
        pytest.skip("memfd_create is refused here")
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.setblocking(False)
        connection = Connection(1, mine, shm.Peer(segment.fd, 4096), mapped=False)
        theirs.sendall(FRAME.pack(LENT, 0, length, offset))
        connection.receive()
        assert "where none may be" in connection.garbled
    segment.close()


def test_frames_may_come_byte_by_byte(ends):
    connection, theirs = ends
    receives = [Receive(each, Pool()) for each in (5, torch.zeros(5, dtype=torch.uint8), 5)]
    connection.expect(3, receives[0])
    for byte in b"".join(FRAME.pack(DATA, 3, 5, 0) + bytes([n] * 5) for n in range(3)):
        theirs.sendall(bytes([byte]))
        connection.receive()
    for receive in receives[1:]:
        connection.expect(3, receive)
    assert all(receive.done for receive in receives) and not connection.lost
    assert [receive.place(5).tolist() for receive in receives] == [[n] * 5 for n in range(3)]
