"""`weft.wire.pieces`: long messages in pieces, and when they are packed."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels import floats
from weft.kernels.compile import compiler
from weft.kernels.piece_table import LEAST, PIECE
from weft.wire import pieces
from weft.wire.pieces import FRAMES, KINDS, Pace, Packer, Unpacker

HEADER = struct.Struct("<II")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    compiler.make(floats.PIECES)
    assert compiler.made(floats.PIECES)


def payload(what, size, seed=0):
    """Bytes of a message: normal float32 or bfloat16, zeros, or what does not get smaller."""
    generator = np.random.default_rng(seed)
    if what == "dull":
        return generator.bytes(size)
    normal = generator.normal(size=size // 2 + 1).astype(np.float32)
    raw = normal.view(np.uint16)[1::2] if what == "bf16" else normal * (what != "zeros")
    return raw.tobytes()[:size]


@pytest.fixture(scope="module")
def ends():
    """Two ends of a connection."""
    here, there = socket.socketpair()
    with here, there:
        for sock in (here, there):
            sock.setblocking(False)
        yield here, there


def drained(sock):
    found = bytearray()
    with contextlib.suppress(BlockingIOError):
        while True:
            found += sock.recv(1 << 20)
    return bytes(found)


class Sender:
    """Sends messages in pieces to a socket of the test's."""

    def __init__(self, ends):
        sock, self._there = ends
        drained(self._there)
        self._packer = Packer(sock, Pace())

    def sent(self, kind, message, frames=b""):
        """What arrives."""
        packer, arrived, counted = self._packer, b"", 0
        assert not packer.under_way
        packer.begin(kind, frames, memoryview(message))
        while packer.under_way:
            with contextlib.suppress(BlockingIOError):
                counted += packer.send()
            arrived += drained(self._there)
        assert counted == len(arrived)
        return arrived

    def cut(self, kind, message):
        """The pieces of a message: (bytes of it, bytes that these take) of each."""
        arrived, found = self.sent(kind, message), []
        while arrived:
            length, takes = HEADER.unpack_from(arrived)
            found.append((length, takes))
            arrived = arrived[HEADER.size + takes :]
        assert sum(length for length, _ in found) == len(message)
        return found


@pytest.fixture
def sender(ends):
    return Sender(ends)


def taken(ends, kind, raw, size, *, ahead=0, sip=1 << 18):
    """What an unpacker makes of bytes, some of which were read ahead and others come in sips."""
    here, there = ends
    drained(there)
    unpacker, message = Unpacker(there), bytearray(b"\xa5" * size)
    assert unpacker.begin(KINDS[kind], memoryview(message)) and unpacker.under_way
    before = np.frombuffer(raw[:ahead] or b"-", np.uint8)
    used, moved = unpacker.take(before.ctypes.data, ahead, 0)
    assert (used, moved) == (ahead, 0)
    at = ahead
    while unpacker.under_way and at < len(raw):
        at += (given := here.send(raw[at : at + sip]))
        assert unpacker.take(0, 0, 1 << 22) == (0, given)
        assert not unpacker.under_way or 0 < unpacker.missing <= len(raw) - at
    assert not unpacker.under_way and at == len(raw)
    return bytes(message)


SIZES = [LEAST, LEAST + 4, 4096 * 9, PIECE - 4, PIECE, PIECE + 4, PIECE + LEAST, 3 * PIECE]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(KINDS)),
            st.sampled_from(["f32", "bf16", "zeros", "dull"]),
            st.sampled_from(SIZES) | st.integers(LEAST // 4, PIECE).map(lambda n: 4 * n),
            st.sampled_from([b"", b"frames", bytes(FRAMES)]),
            st.sampled_from([0, 1, 7, 8, 9, 5000, 70_000]),
            st.sampled_from([4097, 70_001, 1 << 18]),
        ),
        max_size=4,
    )
)
def test_pieces_make_the_message(ends, messages):
    sender = Sender(ends)
    for seed, (kind, what, size, frames, ahead, sip) in enumerate(messages):
        message = payload(what, size, seed)
        raw = sender.sent(kind, message, frames)
        assert raw[: len(frames)] == frames
        raw = raw[len(frames) :]
        assert len(raw) <= size + HEADER.size * -(-size // PIECE)
        assert taken(ends, kind, raw, size, ahead=min(ahead, len(raw)), sip=sip) == message


@pytest.mark.parametrize("sip", [1, 2, 3, 7, 8, 9])
def test_bytes_may_come_one_by_one(ends, sender, sip):
    for kind, what in (("f32", "f32"), ("bf16", "zeros"), ("f32", "dull")):
        message = payload(what, LEAST + 4)
        raw = sender.sent(kind, message)
        assert taken(ends, kind, raw, len(message), sip=sip) == message


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_travel_in_fewer_bytes(sender, kind):
    cuts = sender.cut(kind, payload(kind, 3 * PIECE))
    assert [length for length, _ in cuts] == [PIECE] * 3
    share = sum(takes for _, takes in cuts) / (3 * PIECE)
    assert share == pytest.approx({"f32": 0.86, "bf16": 0.715}[kind], abs=0.01)


def test_numbers_of_the_other_kind_are_still_right(ends, sender):
    """bfloat16 taken for float32: not much smaller, but what it was."""
    message = payload("bf16", 2 * PIECE)
    assert taken(ends, "f32", sender.sent("f32", message), len(message)) == message


def packed(cuts):
    return [takes < length for length, takes in cuts]


def test_where_packing_gains_nothing_it_is_seldom_tried(sender):
    assert packed(sender.cut("f32", payload("dull", 10 * PIECE))) == [False] * 10
    # the first and the tenth were tried: eight are still dull
    assert packed(sender.cut("f32", payload("f32", 10 * PIECE))) == [False] * 8 + [True] * 2


def test_a_short_rest_says_nothing_of_the_others(sender):
    for rest in (4, 4092, LEAST - 4):
        cuts = sender.cut("f32", payload("f32", PIECE + rest))
        assert cuts[1:] == [(rest, rest)] and packed(cuts) == [True, False], rest


def test_rooms_are_large_enough(ends):
    for kind in KINDS:
        most = floats.most_bytes(kind, PIECE // {"f32": 4, "bf16": 2}[kind])
        packer, unpacker = Packer(ends[0], Pace()), Unpacker(ends[1])
        packer.begin(kind, b"", memoryview(bytearray(PIECE)))
        unpacker.begin(KINDS[kind], memoryview(bytearray(PIECE)))
        assert len(unpacker._room) >= most
        assert len(packer._room) >= FRAMES + HEADER.size + most


def refusal(ends, raw, size):
    """Why what comes is not taken."""
    here, there = ends
    drained(there)
    unpacker = Unpacker(there)
    assert unpacker.begin(KINDS["f32"], memoryview(bytearray(size)))
    here.sendall(raw)
    with pytest.raises(ValueError) as raised:
        unpacker.take(0, 0, 1 << 22)
    assert unpacker.under_way
    return str(raised.value)


@pytest.mark.parametrize(
    "header",
    [
        (0, 0),  # nothing
        (4096, 0),
        (3 * PIECE + 4, 100),  # more than the message
        (3 * PIECE + 4, 3 * PIECE + 4),
        (4096, 4097),  # more than it would be plain
        (PIECE + 4, 100),  # more than there is room for
        (2**32 - 1, 2**32 - 1),
        (2**31, 2**31),
    ],
)
def test_what_is_no_header_is_refused(ends, header):
    raw = HEADER.pack(*header) + bytes(5000)
    assert refusal(ends, raw, 3 * PIECE) == "a piece of a message came that is none"


@pytest.mark.parametrize("wrong", [-1, 1, None])
def test_a_piece_must_be_as_long_as_it_says(ends, sender, wrong):
    body = sender.sent("f32", payload("f32", LEAST))[HEADER.size :]
    body = b"x" if wrong is None else (body + b"x")[: len(body) + wrong]
    raw = HEADER.pack(LEAST, len(body)) + body
    assert refusal(ends, raw, LEAST) == "a piece of a message came that cannot be read"


def test_the_end_of_the_connection_is_said():
    here, there = socket.socketpair()
    with there:
        unpacker = Unpacker(there)
        unpacker.begin(KINDS["f32"], memoryview(bytearray(LEAST)))
        here.sendall(HEADER.pack(LEAST, LEAST) + bytes(100))
        here.close()
        there.setblocking(False)
        with pytest.raises(ValueError, match="the connection was closed"):
            unpacker.take(0, 0, 1 << 22)
        packer = Packer(there, Pace())
        packer.begin("f32", b"", memoryview(payload("f32", LEAST)))
        with pytest.raises(BrokenPipeError):
            packer.send()


def test_a_closed_socket_s_number_is_not_used(ends):
    """It may be that of another file by then."""
    for sock in socket.socketpair():
        sock.close()
        packer, unpacker = Packer(sock, Pace()), Unpacker(sock)
        packer.begin("f32", b"", memoryview(payload("f32", LEAST)))
        unpacker.begin(KINDS["f32"], memoryview(bytearray(LEAST)))
        for moves in (packer.send, lambda each=unpacker: each.take(0, 0, 100)):
            with pytest.raises(OSError, match="Bad file descriptor"):
                moves()


@pytest.mark.parametrize("bits", [0, 3, 4])
def test_what_is_no_kind_is_not_begun(ends, bits):
    unpacker = Unpacker(ends[0])
    assert not unpacker.begin(bits, memoryview(bytearray(LEAST))) and not unpacker.under_way


def test_what_was_not_offered_is_not_begun(ends, monkeypatch):
    monkeypatch.setattr(pieces.compiler, "loops", lambda key: None)
    assert not Unpacker(ends[0]).begin(KINDS["f32"], memoryview(bytearray(LEAST)))


# which messages


def test_short_messages_and_other_dtypes_have_no_kind():
    for dtype, kind in {torch.float32: "f32", torch.bfloat16: "bf16"}.items():
        least = LEAST // dtype.itemsize
        assert pieces.kind_of(torch.empty(least, dtype=dtype)) == kind
        assert pieces.kind_of(torch.empty(2, least // 2, dtype=dtype)) == kind
        assert pieces.kind_of(torch.empty(least - 1, dtype=dtype)) == ""
        assert pieces.kind_of(torch.empty(0, dtype=dtype)) == ""
    for dtype in (torch.float16, torch.float64, torch.int32, torch.uint8, torch.complex64):
        assert pieces.kind_of(torch.empty(LEAST, dtype=dtype)) == ""


def test_the_environment_has_nothing_packed(monkeypatch):
    assert pieces.reads()
    monkeypatch.setenv("WEFT_PACK", "1")
    assert pieces.reads()
    monkeypatch.setenv("WEFT_PACK", "0")
    assert not pieces.reads()


def test_without_machine_code_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(pieces.compiler, "loops", lambda key: None)
    assert not pieces.reads()


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [("fcntl", "", None), (sys, "platform", "darwin"), (sys, "byteorder", "big")],
)
def test_other_machines_do_not_pack(monkeypatch, module, name, value):
    """Windows, which has no fcntl; macOS, whose sockets tell something else; big-endian ones."""
    spec = importlib.util.find_spec("weft.wire.pieces")
    elsewhere = importlib.util.module_from_spec(spec)
    if name:
        monkeypatch.setattr(module, name, value)
    else:
        monkeypatch.setitem(sys.modules, module, value)
    spec.loader.exec_module(elsewhere)
    monkeypatch.undo()
    assert pieces.reads() and not elsewhere.reads()


# how quick links are

SLOW, FAST = 100e6, 1e9


def seen(*rates, apart=1.0, pace=None):
    """A pace that saw one line carry so many bytes a second, one time after the other."""
    pace = pace or Pace()
    for number, rate in enumerate(rates):
        pace.see("line", rate, number * apart)
    return pace.slow


def test_several_looks_are_needed():
    assert not seen(SLOW, SLOW, SLOW)
    assert seen(SLOW, SLOW, SLOW, SLOW)


def test_the_limit_is_two_and_a_half_gigabits():
    assert seen(*[319e6] * 4) and not seen(*[321e6] * 4)


def test_the_third_quartile_decides():
    for number in range(16):  # of fast looks, wherever they are
        fast = [FAST] * number + [SLOW] * (15 - number)
        assert seen(*fast) == seen(*reversed(fast)) == (number < 4), number


def test_links_that_become_fast_are_held_to_be_so():
    pace = Pace()
    assert seen(*[SLOW] * 40, pace=pace)
    assert seen(*[FAST] * 3, pace=pace)
    assert not seen(FAST, pace=pace)
    assert seen(*[SLOW] * 12, pace=pace)


def test_rates_of_lines_at_one_time_add_up():
    together, apart = Pace(), Pace()
    for number in range(12):
        for line in range(4):
            together.see(line, SLOW, number * 1.0 + line * 0.01)
            apart.see(line, SLOW, number * 1.0 + line * 0.11)  # each when the others rest
    assert not together.slow and apart.slow


class Seen(Pace):
    """Notes the rates."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def see(self, line, rate, now):
        self.rates.append(rate)


@pytest.fixture
def looked(monkeypatch):
    """`looked(at, sent, held)`: a look at that time, in ms; the rates seen so far."""
    now, holds, pace = [0.0], [0], Seen()
    monkeypatch.setattr(pieces.time, "monotonic", lambda: now[0])

    def told(sock, request, answer):
        assert request == 0x894B and len(answer) == 4  # SIOCOUTQNSD
        answer[:] = holds[0].to_bytes(4, sys.byteorder)

    monkeypatch.setattr(pieces.fcntl, "ioctl", told)
    with socket.socket() as sock:
        packer = Packer(sock, pace)

        def look(at, sent, held):
            now[0], holds[0] = 10 + at * 1e-3, held
            packer.look(sent)
            assert packer.pays is False
            return pace.rates

        yield look


def test_what_goes_out_while_the_socket_holds_something_is_the_rate(looked):
    assert looked(0, 1000, 400) == []
    assert looked(1, 5000, 900) == []  # too soon
    assert looked(4, 9000, 2600) == pytest.approx([(6400 - 600) / 4e-3])
    assert looked(6, 9000, 400)[1:] == pytest.approx([(8600 - 6400) / 2e-3])


def test_an_empty_socket_begins_anew(looked):
    looked(0, 1000, 400)
    looked(1, 5000, 0)
    assert looked(4, 9000, 2600) == []
    assert looked(8, 9000, 600) == pytest.approx([2000 / 4e-3])


def test_what_the_socket_was_given_after_a_pause_is_no_slow_link(looked):
    """It held something at two looks, and nothing between them: nobody had anything to send."""
    looked(0, 1000, 400)
    looked(9000, 1000, 0)
    assert looked(9001, 9000, 2600) == []
    looked(9002, 9000, 1600)  # still busy
    assert looked(9005, 9000, 600) == pytest.approx([2000 / 4e-3])


@pytest.mark.parametrize("ends", ["unix", "closed"])
def test_a_socket_that_does_not_tell_is_asked_once(monkeypatch, ends):
    asked, real = [], pieces.fcntl.ioctl

    def told(sock, *arguments):
        asked.append(sock)
        return real(sock, *arguments)

    monkeypatch.setattr(pieces.fcntl, "ioctl", told)
    sock, other = socket.socketpair() if ends == "unix" else (socket.socket(), socket.socket())
    if ends == "closed":
        sock.close()  # as by another thread
    packer = Packer(sock, Pace())
    for sent in range(5):
        packer.look(sent)
        assert not packer.pays
    assert asked == [sock]
    sock.close()
    other.close()
