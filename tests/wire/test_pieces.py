"""`weft.wire.pieces`: long messages in pieces, and when they are packed."""

from __future__ import annotations

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
from weft.wire import pieces
from weft.wire.pieces import HEAD, KINDS, LEAST, Pace, Packer, Unpacker

PIECE = 1 << 18
HEADER = struct.Struct("!III")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    for kind in KINDS:
        compiler.make(floats.floats_key(kind))


def payload(what, size, seed=0):
    """Bytes of a message: normal float32 or bfloat16, zeros, or what does not get smaller."""
    generator = np.random.default_rng(seed)
    if what == "dull":
        return generator.bytes(size)
    normal = generator.normal(size=size // 2 + 1).astype(np.float32)
    raw = normal.view(np.uint16)[1::2] if what == "bf16" else normal * (what != "zeros")
    return raw.tobytes()[:size]


@pytest.fixture
def packer():
    with socket.socket() as sock:
        yield Packer(sock, Pace())


def cut(packer, kind, message):
    """The pieces of a message: (bit, length, bytes) of each."""
    packer.begin(kind, memoryview(message))
    found = []
    while not packer.done:
        header, body = packer.next()
        bit, length, size = HEADER.unpack(header)
        assert size == len(body) and len(header) == HEAD
        found.append((bit, length, bytes(body)))
    return found


def join(cuts, size):
    """What an unpacker makes of pieces, in memory that held something else."""
    unpacker, message = Unpacker(), bytearray(b"\xa5" * size)
    unpacker.begin(memoryview(message))
    for bit, length, body in cuts:
        assert unpacker.under_way
        place = unpacker.place(HEADER.pack(bit, length, len(body)))
        assert len(place) == len(body)
        place[:] = body
        assert unpacker.filled()
    assert not unpacker.under_way
    return bytes(message)


SIZES = [LEAST, LEAST + 4, 4096 * 9, PIECE - 4, PIECE, PIECE + 4, PIECE + LEAST, 3 * PIECE]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(KINDS)),
            st.sampled_from(["f32", "bf16", "zeros", "dull"]),
            st.sampled_from(SIZES) | st.integers(LEAST // 4, PIECE).map(lambda n: 4 * n),
        ),
        max_size=4,
    )
)
def test_pieces_make_the_message(messages):
    with socket.socket() as sock:
        packer = Packer(sock, Pace())
        for seed, (kind, what, size) in enumerate(messages):
            message = payload(what, size, seed)
            cuts = cut(packer, kind, message)
            assert sum(length for _, length, _ in cuts) == size
            assert all(bit in (0, KINDS[kind]) for bit, _, _ in cuts)
            assert sum(len(body) for _, _, body in cuts) <= size
            assert join(cuts, size) == message


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_travel_in_fewer_bytes(packer, kind):
    message = payload(kind, 3 * PIECE)
    cuts = cut(packer, kind, message)
    assert [(bit, length) for bit, length, _ in cuts] == [(KINDS[kind], PIECE)] * 3
    share = sum(len(body) for _, _, body in cuts) / len(message)
    assert share == pytest.approx({"f32": 0.86, "bf16": 0.715}[kind], abs=0.01)


def test_numbers_of_the_other_kind_are_still_right(packer):
    """bfloat16 taken for float32: not much smaller, but what it was."""
    message = payload("bf16", 2 * PIECE)
    assert join(cut(packer, "f32", message), len(message)) == message


@pytest.fixture
def looks(monkeypatch):
    """The lengths of the pieces that were tried."""
    lengths, real = [], floats.pack_floats

    def pack(kind, numbers, out):
        lengths.append(len(numbers))
        return real(kind, numbers, out)

    monkeypatch.setattr(floats, "pack_floats", pack)
    return lengths


def test_where_packing_gains_nothing_it_is_seldom_tried(packer, looks):
    cuts = cut(packer, "f32", payload("dull", 10 * PIECE))
    assert [bit for bit, _, _ in cuts] == [0] * 10
    assert looks == [PIECE] * 2  # the first and the tenth
    cuts = cut(packer, "f32", payload("f32", 10 * PIECE))  # eight of which are still dull
    assert [bit for bit, _, _ in cuts] == [0] * 8 + [1] * 2


def test_a_short_rest_says_nothing_of_the_others(packer, looks):
    for rest in (4, 4092, LEAST - 4):
        cuts = cut(packer, "f32", payload("f32", PIECE + rest))
        assert [(bit, length) for bit, length, _ in cuts] == [(1, PIECE), (0, rest)], rest
    assert looks == [PIECE] * 3


def test_rooms_are_large_enough():
    for kind, bit in KINDS.items():
        size = {"f32": 4, "bf16": 2}[kind]
        most = floats.most_bytes(kind, PIECE // size)
        unpacker = Unpacker()
        unpacker.begin(memoryview(bytearray(PIECE)))
        unpacker.place(HEADER.pack(bit, PIECE, 8))
        assert len(unpacker._room) >= most


@pytest.mark.parametrize(
    "header",
    [
        (7, 4096, 100),  # no kind
        (3, 4096, 100),  # two of them
        (1, 0, 0),  # nothing
        (0, 0, 0),
        (1, 3 * PIECE + 4, 100),  # more than the message
        (0, 3 * PIECE + 4, 3 * PIECE + 4),
        (0, 4096, 4095),  # plain, and not as long as it is
        (0, 4096, 4097),
        (1, 4096, 4097),  # more than it would be plain
        (2, PIECE + 4, 100),  # more than there is room for
        (1, 2**32 - 1, 2**32 - 1),
    ],
)
def test_what_is_no_header_is_refused(header):
    unpacker = Unpacker()
    unpacker.begin(memoryview(bytearray(3 * PIECE)))
    assert unpacker.place(HEADER.pack(*header)) is None


@pytest.mark.parametrize("wrong", [-1, 1, None])
def test_a_piece_must_be_as_long_as_it_says(packer, wrong):
    ((bit, length, body),) = cut(packer, "f32", payload("f32", LEAST))
    body = b"" if wrong is None else (body + b"x")[: len(body) + wrong]
    unpacker = Unpacker()
    unpacker.begin(memoryview(bytearray(LEAST)))
    unpacker.place(HEADER.pack(bit, length, len(body)))[:] = body
    assert not unpacker.filled()


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
    assert pieces.reads("f32") and pieces.reads("bf16")
    monkeypatch.setenv("WEFT_PACK", "1")
    assert pieces.reads("f32")
    monkeypatch.setenv("WEFT_PACK", "0")
    assert not pieces.reads("f32") and not pieces.reads("bf16")


def test_without_machine_code_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(pieces.compiler, "loops", lambda key: None)
    assert not pieces.reads("f32")


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
    assert pieces.reads("f32") and not elsewhere.reads("f32")


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
