"""Small messages by machine code: steps against torch, frames against sockets, reads and guards."""

import contextlib
import os
import socket

import pytest
import torch

from weft.kernels import cpu_talk
from weft.kernels.compile import compiler
from weft.kernels.cpu_talk import HERE, IN_X, IN_Y, IN_Z, Came, Steps, Talk
from weft.kernels.talk_table import BYTES
from weft.wire import pipe
from weft.wire.line import Order
from weft.wire.pipe import PipeLine

SECOND = 10**9
MORE = BYTES * 5 // 8  # bytes of which a pipe has room for once, not twice
DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64, torch.complex128]


@pytest.fixture(autouse=True)
def made():
    compiler.make(cpu_talk.KEY)


def alone(steps):
    """A talk with nobody that carries out these steps."""
    talk = Talk([], [], [])
    assert talk.bind([])
    talk.follow(steps.done())
    return talk


def at(*tensors):
    return tuple(each.data_ptr() for each in (*tensors, *[torch.empty(1)] * (3 - len(tensors))))


def meta(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


BOXES = [
    (slice(None), slice(None), slice(None)),
    (slice(1, 3), slice(2, 5), slice(1, 4)),
    (slice(0, 3), slice(4, 5), slice(None)),
    (slice(2, 3), slice(None), slice(3, 4)),
]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_boxes_are_copied_and_cleared(dtype, box):
    x = torch.randint(0, 2, (3, 5, 4)).to(dtype)
    y, want = torch.ones(3, 5, 4, dtype=dtype), torch.ones(3, 5, 4, dtype=dtype)
    kept = torch.ones(x[box].shape, dtype=dtype)
    steps = Steps()
    assert steps.copy((IN_Y, meta(y)[box]), (IN_X, meta(x)[box]))
    steps.then()
    assert steps.copy((HERE, kept), (IN_Y, meta(y)[box]))
    steps.then()
    assert steps.zero((IN_Y, meta(y)[box]))
    talk = alone(steps)
    want[box] = x[box]
    talk.carry(0, at(x, y))
    talk.carry(1, at(x, y))
    assert torch.equal(y, want) and torch.equal(kept, x[box])
    want[box] = 0
    assert talk.run(1, 0, at(x, y)) is Came.ALL
    assert torch.equal(y, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_boxes_are_added_to_the_bit(dtype, box):
    x, y = (10 * torch.randn(3, 5, 4, dtype=torch.complex128) for _ in range(2))
    x, y = (
        each.to(dtype) if dtype.is_complex else each.real.to(dtype).contiguous() for each in (x, y)
    )
    want = y.clone()
    want[box] += x[box]
    steps = Steps()
    assert steps.add((IN_Y, meta(y)[box]), (IN_X, meta(x)[box]))
    steps.then()
    steps.then()
    alone(steps).carry(0, at(x, y))
    assert torch.equal(y, want)


def test_what_has_no_step_is_told():
    steps, y = Steps(), torch.empty(4, dtype=torch.bfloat16, device="meta")
    assert not steps.add((IN_Y, y), (IN_X, y))
    y = torch.empty(3, 3, 3, 3, device="meta")[:2, :2, :2, :2]
    assert not steps.copy((IN_Y, y), (IN_X, y))
    assert not steps.read((IN_Y, y), torch.zeros(8), cpu_talk.lender(1, 1, bytes(16)))


def test_memory_is_read_where_its_ticket_says_while_its_guard_stands():
    x, z = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    guard, ticket = torch.randint(0, 256, (16,), dtype=torch.uint8), torch.zeros(8).byte()
    record = cpu_talk.lender(os.getpid(), guard.data_ptr(), bytes(guard.tolist()))
    steps = Steps()
    steps.tell(ticket, (IN_X, meta(x)[10:20]))
    steps.then()
    steps.then()
    assert steps.read((IN_Z, meta(z)[500:510]), ticket, record)
    assert steps.zero((IN_X, meta(x)[:5]))
    talk = alone(steps)
    assert talk.run(1, 0, at(x, x, z)) is Came.ALL
    assert z.nonzero().flatten().tolist() == list(range(500, 510))
    assert z[500:510].tolist() == list(range(10, 20)) and not x[:5].any()
    x[:5] = 7
    guard[3] ^= 1
    assert talk.run(1, 0, at(x, x, z)) is Came.UNREAD
    assert x[:5].tolist() == [7] * 5  # what comes behind it is not done
    guard[3] ^= 1
    record[0] = 2**22 + 1  # no such process
    assert talk.run(1, 0, at(x, x, z)) is Came.UNREAD


def pair(says, hears, model=None):
    """A talk with one peer, and the peer's socket."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    frame = bytearray((8 + len(says)).to_bytes(8, "big") + bytes(8) + says)
    place = memoryview(bytearray(16 + len(hears)))
    model = hears if model is None else model
    talk = Talk([frame], [place], [(8 + len(hears)).to_bytes(8, "big") + bytes(8) + model])
    assert talk.bind([(ours.fileno(), 0, 0)])
    return talk, ours, theirs


@pytest.fixture
def piped():
    """`piped(says, hears, model)`: a talk with one peer through pipes, its line and the peer's."""
    if not pipe.WORKS:
        pytest.skip("needs Linux on x86-64, where alone there are pipes")
    with contextlib.ExitStack() as stack:

        def make(says, hears, model=None):
            talk, *socks = pair(says, hears, model)
            fd = pipe.memory()
            lines = []
            for rank, sock in enumerate(socks):
                stack.callback(sock.close)
                sock.setblocking(False)
                lines.append(PipeLine(1 - rank, sock, pipe.mapped(fd), first=rank == 0))
            os.close(fd)
            assert talk.bind([lines[0].path])
            return talk, *lines

        yield make


def told(line, text, number):
    """A message to the other end: the body of a frame with that number."""
    line.send(Order(memoryview(number.to_bytes(8, "little") + text)))


def heard(line):
    """The next message that the other end said, or what of it is there."""
    order = Order(memoryview(bytearray(MORE + 16)))
    line.asked.append(order)
    line.receive()
    line.asked.clear()
    return (bytes(order.buffer[:8]), bytes(order.buffer[8:]).rstrip(b"\0")) if order.done else None


def framed(number, text):
    return (8 + len(text)).to_bytes(8, "big") + number.to_bytes(8, "little") + text


def test_frames_are_said_and_heard():
    talk, ours, theirs = pair(b"hello", b"you there", b"you")
    with ours, theirs:
        for number in (1, 2, 2**40):
            theirs.send(framed(number, b"you there"))
            assert talk.run(number, SECOND) is Came.ALL
            assert theirs.recv(100) == framed(number, b"hello")
        theirs.send(framed(5, b"you here!") + framed(6, b"you"))  # what is behind may differ
        assert talk.run(5, SECOND) is Came.ALL
        assert bytes(talk.places[0][16:]) == b"you here!"
        assert ours.recv(100) == framed(6, b"you")  # nothing is read behind a frame


@pytest.mark.parametrize(
    "comes",
    [
        framed(1, b"YOU there"),
        framed(2, b"you there"),
        framed(1, b"you there and more")[:25],
        framed(1, b"you")[:19] + bytes(6),
        framed(1, b"you there")[:20],
        b"",
    ],
)
def test_what_is_not_as_expected_is_left_to_others(comes):
    talk, ours, theirs = pair(b"hello", b"you there", b"you")
    with ours, theirs:
        theirs.send(comes)
        assert talk.run(1, 1000) is Came.OTHER
        assert talk.left() == [(21, len(comes))]
        assert bytes(talk.places[0][: len(comes)]) == comes
        assert theirs.recv(100) == framed(1, b"hello")
        theirs.send(framed(2, b"you there"))
        assert talk.run(2, SECOND) is Came.ALL  # and the next time is as the first


def test_a_full_socket_and_a_closed_one_are_told():
    talk, ours, theirs = pair(bytes(50_000), b"you")
    with ours, theirs:
        sent = 0
        while sent in (0, 50_016):
            assert talk.run(1, 0) is Came.OTHER
            ((sent, got),) = talk.left()
        assert 0 <= sent < 50_016 and got == 0
        theirs.close()
        assert talk.run(1, 0) is Came.OTHER
        assert talk.left() == [(0, 0)]


def test_what_came_before_is_counted_in():
    talk, ours, theirs = pair(b"hello", b"you there", b"you")
    with ours, theirs:
        frame = framed(9, b"you there")
        talk.places[0][:11] = frame[:11]
        talk.came(0, 11)
        theirs.send(frame[11:])
        assert talk.run(9, SECOND, meanwhile=lambda: None) is Came.ALL


def test_frames_go_through_pipes_round_and_round(piped):
    talk, ours, theirs = piped(b"hello" * 999, b"you there" * 999, b"you")
    for number in range(3 * BYTES // 5000):  # round a pipe about three times
        told(theirs, b"you there" * 999, number)
        assert talk.run(number, SECOND) is Came.ALL
        assert bytes(talk.places[0][16:]) == b"you there" * 999
        assert heard(theirs) == (number.to_bytes(8, "little"), b"hello" * 999)
    assert not ours.stirs and not theirs.stirs
    for line in (ours, theirs):  # nobody slept, so nobody was woken
        with pytest.raises(BlockingIOError):
            line.sock.recv(1)


def test_what_is_said_through_a_pipe_wakes_who_sleeps(piped):
    talk, _, theirs = piped(b"hello", b"you there")
    theirs.asked.append(Order(memoryview(bytearray(100))))
    theirs.sleep()
    told(theirs, b"you there", 1)
    assert talk.run(1, SECOND) is Came.ALL
    assert len(theirs.sock.recv(10)) == 1 and theirs.stirs


def test_room_in_a_pipe_wakes_who_waits_for_it(piped):
    talk, _, theirs = piped(b"hello", bytes(MORE))
    told(theirs, bytes(MORE), 1)
    told(theirs, bytes(MORE), 2)  # more than there is room for
    assert theirs.writes
    theirs.sleep()
    assert talk.run(1, SECOND) is Came.ALL
    assert len(theirs.sock.recv(10)) == 1 and theirs.stirs
    theirs.flush()
    assert not theirs.writes
    assert talk.run(2, SECOND) is Came.ALL


@pytest.mark.parametrize("text", [b"YOU there", b"you there and more", b"you", b"", None])
def test_what_is_not_as_expected_stays_in_the_pipe(piped, text):
    talk, ours, theirs = piped(b"hello", b"you there")
    if text is not None:
        told(theirs, text, 1)
    assert talk.run(1, 1000) is Came.OTHER
    ((sent, got),) = talk.left()
    assert sent == 21 and got == (25 if text == b"YOU there" else 0)
    order, mine = Order(memoryview(bytearray(100))), Order(memoryview(talk.frames[0]))
    ours.take_up(order, talk.places[0][:got])
    ours.go_on(mine, sent)
    assert mine.done and order.done == (text is not None)
    if text is not None:
        assert bytes(order.buffer).rstrip(b"\0") == (b"\1" + bytes(7) + text).rstrip(b"\0")
    assert heard(theirs) == (b"\1" + bytes(7), b"hello")
    ours.asked.clear()
    told(theirs, b"you there", 2)
    assert talk.run(2, SECOND) is Came.ALL  # and the next time is as the first


def test_a_pipe_that_is_full_is_left_to_the_line(piped):
    talk, ours, theirs = piped(bytes(MORE), b"you")
    for number in (1, 2):
        assert talk.run(number, 0) is Came.OTHER
        ((sent, _),) = talk.left()
        assert sent == (MORE + 16 if number == 1 else 0)
    mine = Order(memoryview(talk.frames[0]))
    ours.go_on(mine, sent)
    assert not mine.done and ours._out[0] - ours._out[8] == BYTES
    assert heard(theirs) is not None
    ours.flush()
    assert mine.done
    assert heard(theirs)[0] == b"\2" + bytes(7)
