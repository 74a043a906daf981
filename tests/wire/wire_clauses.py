"""What every wire of the CPU does: each function is the program of a rank, `clause(wire, soon)`.

`soon` is the seconds in which what must come soon comes. Bodies wait for a time where they must not
meet: a message that is late, a rank that does not come. These times are short, and no clause
depends on one being kept; limits on waits are long.

`clause` puts each in the list of those that run alike, with the numbers of its ranks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import select
import signal
import socket
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch

from cases import COMBINE
from weft.base.pace import patient
from weft.wire.interface import (
    CHANNELS,
    Failure,
    Features,
    Meeting,
    Reducing,
    Rounds,
    Wire,
    WireFailed,
)

_POSTS = 2000  # that are under way at once
_ROUNDS = 3000
_BIG = 4 << 20  # bytes of a message that is longer than any buffer of a connection
_MEDIUM = 90_000  # bytes of a message that is longer than what is sent unasked
_MOMENT = 0.2  # seconds in which a message that nobody may wait for would have come
_ABORT = 2.0  # seconds that a wait may take to end after an abort
_HANDLED = 0.1  # seconds that the handler of a signal may have to wait for its turn
_NOTICED = 0.5  # seconds until a wait looks for signals that did not end its sleep
_SIGNALS = 5  # the median of so many delays is looked at
_AT_ONCE = 0.1  # seconds that the quickest of a few calls may take which returns at once
_TRIES = 5  # of such a call
_DELAYS = 3  # the least of so many is looked at, of signals that end no sleep
_TOGETHER = 6  # messages of a post, so that more than ten thousand are under way
_LOOKS = 50  # signals that look where in a wait they come
_LOOK = 0.001  # seconds between them
_GO = 5  # the channel of what lets a peer go on
_CONNECT = 5.0  # seconds that a stranger waits for its connection
_AFTER_FORK = 60.0  # seconds in which those end that a forked child outlives


SOON = 5.0  # seconds in which what must come soon comes, on an idle machine

Body = Callable[..., None]

ANY_WIRE = []
"""Number of ranks, and what each does: over a wire in rounds, too."""

FREE = []
"""Over a wire that is in no rounds."""

PROCESSES = []
"""The same, where each rank is a process of its own, which may end."""

IN_ROUNDS = []
"""Over a wire in rounds alone."""

REDUCING = []
"""Over a wire that adds up."""

MEETINGS = []
"""Over a wire all of whose ranks meet."""

MEETINGS_OF_PROCESSES = []


def clause(kept, *sizes):
    """Put a rank's program into a list, for each of these numbers of ranks."""

    def put(body):
        kept.extend((size, body) for size in sizes)
        return body

    return put


def clauses(kept, most=8, few=None):
    """A test of each of these, `(size, body)`, on at most so many ranks.

    `few` says of bodies with thousands of messages how many it has.
    """
    found = []
    for size, body in kept:
        if size <= most:
            options = {"count": few[body]} if few and body in few else {}
            called = functools.partial(body, soon=patient(SOON), **options)
            found.append(pytest.param(size, called, id=f"{body.__name__}-{size}"))
    return pytest.mark.parametrize(("size", "body"), found)


# What clauses are made of -----------------------------------------------------------------------


def _others(wire):
    """All other ranks, beginning with the next one."""
    return [*range(wire.rank + 1, wire.size), *range(wire.rank)]


def _partner(wire):
    """The other rank of this one's pair: of eight ranks there are four pairs."""
    return wire.rank ^ 1


def _number(value=0):
    return torch.tensor([value])


def _bytes(count, value=1):
    return torch.full((count,), value, dtype=torch.uint8)


def _swap(wire, peer, soon):
    """Send a number to a peer, and receive the same from it."""
    got = wire.post([(peer, _number(1))], [(peer, _number())]).wait(soon)
    assert got[0].item() == 1


def _said(rank, number):
    """What a rank says in its meeting of this number, of a length of its own."""
    length = (0, 40, 1500, 70_000)[(rank + number) % 4]
    return bytes([rank, number % 251]) + bytes([(7 * number + 31 * rank) % 256]) * length


def _tell(wire, message, ranks):
    assert isinstance(wire, Meeting)
    return wire.meet(message, ranks)


def _meet(wire, number, ranks):
    return _tell(wire, _said(wire.rank, number), ranks)


def _heard(pending, number, ranks, soon):
    """Wait for a meeting that `_meet` began; all said what they say in it."""
    messages = pending.wait(soon)
    assert len(messages) == len(ranks)
    for rank, message in zip(ranks, messages, strict=True):
        wanted = _said(rank, number)
        assert message == wanted


def _say_go(wire, peer, soon):
    """Have a peer go on that is in `_await_go`, whatever lies on the way there."""
    wire.post([(peer, _number())], (), _GO).wait(soon)


def _await_go(wire, peer, soon):
    wire.post((), [(peer, _number())], _GO).wait(soon)


def _wait_until_it_leaves(wire, peer, soon):
    """Be there until a peer closes its wire; that this is noticed is for another clause."""
    with contextlib.suppress(WireFailed, TimeoutError):
        wire.post((), [(peer, 8)]).wait(2 * soon)


def _subsets(size, count):
    """Who meets, meeting by meeting, the same on every rank: any two or more, in any order."""
    chance = random.Random(size)
    return [chance.sample(range(size), chance.randint(2, size)) for _ in range(count)]


def _failure_of(use, kind, peer, soon):
    """The failure that a use raises soon, which has to be of this kind and about this peer."""
    began = time.monotonic()
    try:
        use()
    except WireFailed as error:
        failure = error.failure
    else:
        raise AssertionError(f"nothing was raised, where {kind!r} about rank {peer} should be")
    found = failure.kind, failure.peer
    assert found == (kind, peer)
    taken = time.monotonic() - began
    assert taken < soon
    return failure


def _is_not_over(pending, seconds):
    """A wait of so many seconds runs out."""
    with pytest.raises(TimeoutError):
        pending.wait(seconds)


def _swap_with_all(wire, length, soon):
    """Send a message to all others at once, and receive one of each."""
    sends = [(peer, _bytes(length, wire.rank)) for peer in _others(wire)]
    places = [(peer, _bytes(length, 0xFF)) for peer in _others(wire)]
    for peer, each in zip(_others(wire), wire.post(sends, places).wait(soon), strict=True):
        assert bool((each == peer).all())


class _Handled(Exception):
    """What the handler of a signal raises."""


def _is_handled_soon(wire, pending, soon):
    """Signals are handled during a wait, and what their handlers raise leaves the wire as it is."""
    delays = sorted(_delay_of_a_handler(pending, soon) for _ in range(_SIGNALS))
    median = delays[_SIGNALS // 2]
    assert median < patient(_HANDLED)
    late = min(
        _delay_of_a_handler(pending, soon, alarm=_alarm_taken_by_a_thread) for _ in range(_DELAYS)
    )
    assert late < patient(_NOTICED)
    assert wire.failure() is None


def _alarm(after):
    signal.setitimer(signal.ITIMER_REAL, after)


def _alarm_taken_by_a_thread(after):
    """As any thread may take a signal: it ends no sleep of the main thread, which handles it."""

    def take():
        time.sleep(after)
        signal.pthread_kill(threading.get_ident(), signal.SIGALRM)

    threading.Thread(target=take, daemon=True).start()


def _delay_of_a_handler(pending, soon, alarm=_alarm):
    """Seconds after which a signal is handled that comes during a wait, and ends it."""
    delays = []

    def handle(delay):
        delays.append(delay)
        raise _Handled

    try:
        _wait_with_a_signal(pending, soon, _MOMENT / 4, handle, alarm)
    except _Handled:
        return delays[0]
    except TimeoutError:
        raise AssertionError("a signal was not handled during a wait") from None
    raise AssertionError("a wait for what had not come returned, or kept what a handler raised")


def _wait_with_a_signal(pending, soon, after, handle, alarm=_alarm):
    """Wait, and have a signal come after so many seconds of the wait.

    Its handler calls `handle` with the seconds since it was sent. One that comes before the wait,
    since this thread was held up, is sent again.
    """
    sent = 0.0

    def wait():
        pending.wait(soon)

    def send():
        nonlocal sent
        sent = time.monotonic() + after
        alarm(after)

    def on_signal(_, frame):
        if any(each.f_code is wait.__code__ for each, _ in traceback.walk_stack(frame)):
            handle(time.monotonic() - sent)
        else:
            send()

    before = signal.signal(signal.SIGALRM, on_signal)
    try:
        send()
        wait()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # so that it is not sent once more
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _closed_while_it_sleeps(wire, pending, soon):
    """Wait, and have the handler of a signal close the wire meanwhile."""
    _wait_with_a_signal(pending, soon, 1.1 * _MOMENT, lambda _: wire.close())


def _closed_in_its_code(wire, pending, soon):
    """Wait again and again without sleeping, and have a handler close the wire in the middle.

    The deeper in functions of the wire a signal comes, the likelier a lock is held. So the first
    ones look how deep they come, and the next one as deep as that closes the wire.
    """
    looks = iter(range(_LOOKS))
    deepest = 0.0

    def handle(_, frame):
        nonlocal deepest
        depth = sum(1 for _ in traceback.walk_stack(frame))
        if next(looks, None) is not None:
            deepest = max(deepest, depth)
        elif depth < deepest:
            deepest -= 1 / _LOOKS  # it may have been there for once
        else:
            wire.close()
            return
        # only now: a signal that came in here would look how deep this function is
        signal.setitimer(signal.ITIMER_REAL, _LOOK)

    before = signal.signal(signal.SIGALRM, handle)
    until = time.monotonic() + soon
    try:
        signal.setitimer(signal.ITIMER_REAL, _MOMENT)
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                pending.wait(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _in_a_child(use, soon, outlives=()):
    """Fork, and do something in the child, which has to end soon.

    The child lives on until this process and those with the pids `outlives` have ended.
    """
    reads, writes = os.pipe()
    ends, held = os.pipe()  # of which `held` is this process's alone: it closes as that dies
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads, as programs
        child = os.fork()
    if child == 0:
        try:
            os.setsid()  # whoever started the ranks ends what is left in their sessions
            os.close(held)
            use()
            os.write(writes, b"done")
            until = time.monotonic() + _AFTER_FORK
            select.select([ends], [], [], _AFTER_FORK)
            while any(map(_is_alive, outlives)) and time.monotonic() < until:
                time.sleep(0.01)
        except BaseException as error:
            os.write(writes, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.close(ends)
    has_ended, _, _ = select.select([reads], [], [], soon)
    result = os.read(reads, 1000).decode() if has_ended else "it hangs"
    os.close(reads)
    assert result == "done"


def _is_alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _strangers():
    """Connections to wherever this process listens; most of them have sent garbage."""
    connections = []
    noise = random.Random(0).randbytes(1000)
    for family, address in _listening():
        for data in (noise, noise[:1], b"GET / HTTP/1.1\r\n\r\n", b""):
            connections.append(socket.socket(family))
            connections[-1].settimeout(_CONNECT)
            connections[-1].connect(address)
            with contextlib.suppress(ConnectionError):  # it was refused already
                connections[-1].sendall(data)
    return connections


def _listening():
    """The family and the address of each socket of this process that listens."""
    found = []
    for name in os.listdir("/dev/fd"):
        try:
            sock = socket.socket(fileno=int(name))
        except OSError:  # it is none, or that of the folder, which is closed again
            continue
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.append((sock.family, sock.getsockname()))
        sock.detach()
    return found


def _bits(tensor):
    return tensor.contiguous().view(torch.uint8)


# The clauses -----------------------------------------------------------------------------------


@clause(ANY_WIRE, 1, 2, 8)
def sizes(wire, soon):
    """a wire knows its rank, size, device and features; alone it has nobody to send to."""
    assert 0 <= wire.rank < wire.size
    assert isinstance(wire.device, torch.device) and isinstance(wire.features, Features)
    assert isinstance(wire, Wire)
    assert wire.post().wait() == []
    for _ in range(3):
        numbers = [(peer, _number()) for peer in _others(wire)]
        got = wire.post([(peer, _number(wire.rank)) for peer in _others(wire)], numbers).wait()
        assert [each.item() for each in got] == _others(wire)
    assert wire.failure() is None


@clause(ANY_WIRE, 1, 4, 8)
def dtypes(wire, soon):
    """tensors of every dtype and shape arrive as they were sent, from each to each."""
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
    ints = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    for dtype in (*floats, *ints, torch.bool):

        def made(source, target, dtype=dtype):
            return ((torch.arange(3 * (source + 1)).view(3, -1) + target) % 2).to(dtype)

        places = [torch.empty_like(made(peer, wire.rank)) for peer in _others(wire)]
        sends = [(peer, made(wire.rank, peer)) for peer in _others(wire)]
        pending = wire.post(sends, list(zip(_others(wire), places, strict=True)))
        got = pending.wait()
        assert all(one is place for one, place in zip(got, places, strict=True))
        for peer, one in zip(_others(wire), got, strict=True):
            assert torch.equal(one, made(peer, wire.rank))
        again = pending.wait()
        assert all(one is other for one, other in zip(got, again, strict=True))


@clause(ANY_WIRE, 1, 3, 8)
def order(wire, soon):
    """the n-th send meets the n-th receive of a pair and channel, in whatever order one waits."""
    posts = []
    for i in range(10):
        sends = [(peer, _number(100 * wire.rank + i)) for peer in _others(wire)]
        posts.append(wire.post(sends, [(peer, 8) for peer in _others(wire)]))
    for i in reversed(range(10)):
        got = [view.view(torch.int64).item() for view in posts[i].wait()]
        assert got == [100 * peer + i for peer in _others(wire)]
        posts[i].release()


@clause(FREE, 2)
def channels(wire, soon):
    """a channel waits for no other, whatever lies there."""
    peer, last = 1 - wire.rank, CHANNELS - 1
    # some are alike in their lower bits, and all messages in their length
    others = (0, 1, 1 << 8, 1 << 16, 1 << 24, 1 << 30)
    if wire.rank == 0:
        posts = [wire.post([(peer, _bytes(_BIG, 3))], channel=last)]
        for length in (8, _MEDIUM):
            for i, channel in enumerate(others):
                posts.append(wire.post([(peer, _bytes(length, i))], channel=channel))
                if i == 0:  # the others come when the last one was asked for
                    wire.post((), [(peer, _number())], last).wait(soon)
    else:
        for length in (8, _MEDIUM):
            time.sleep(_MOMENT / 2)
            asked = wire.post((), [(peer, length)], others[-1])
            wire.post([(peer, _number())], (), last).wait(soon)
            for i, channel in reversed([*enumerate(others)]):
                if channel != others[-1]:
                    asked = wire.post((), [(peer, length)], channel)
                found = int(asked.wait(soon)[0][-1])
                assert found == i
                asked.release()
        posts = [wire.post((), [(peer, _bytes(_BIG))], last)]
    for each in posts:
        each.wait(soon)


@clause(FREE, 3)
def pairs(wire, soon):
    """a pair of ranks waits for no other pair."""
    if wire.rank == 2:  # comes when the others have done without it
        wire.post((), [(1, _number())]).wait(soon)
        wire.post([(0, _number(9))]).wait(soon)
        return
    early = wire.post((), [(2, _number())]) if wire.rank == 0 else None
    for _ in range(20):
        _swap(wire, 1 - wire.rank, soon)
    if early is None:
        wire.post([(2, _number())]).wait(soon)
    else:
        assert early.wait(soon)[0].item() == 9


@clause(ANY_WIRE, 2, 8)
def empty(wire, soon):
    """messages without bytes arrive, and keep their place."""
    peer = _partner(wire)
    recvs = [(peer, torch.empty(0, 3)), (peer, 8), (peer, 0)]
    sends = [(peer, torch.empty(0, 3)), (peer, _number(5)), (peer, torch.empty(0))]
    pending = wire.post(sends, recvs)
    assert [each.numel() for each in pending.wait()] == [0, 8, 0]
    pending.release()


@clause(FREE, 2, 8)
def sized(wire, soon):
    """a receive by size returns as many bytes as came: none, some, or all that it takes."""
    peer, most = _partner(wire), 200_000
    lengths = (0, 1, 4095, 65_536, most)
    data = torch.arange(most).to(torch.uint8)
    pending = wire.post([(peer, data[:length]) for length in lengths], [(peer, most)] * 5)
    views = pending.wait()
    assert [view.numel() for view in views] == list(lengths)
    for view in views:
        assert (view.dtype, view.dim()) == (torch.uint8, 1)
        assert torch.equal(view, data[: len(view)])
        assert view.data_ptr() % 16 == 0
    pending.release()
    pending.release()


@clause(FREE, 2)
def wrong_length(wire, soon):
    """a message of another length than its tensor fails the wire, and names the sender."""
    if wire.rank == 0:
        wire.post([(1, _bytes(10))])
        _wait_until_it_leaves(wire, 1, soon)
        return
    _failure_of(wire.post((), [(0, _bytes(12))]).wait, "garbled", 0, soon)
    failure = wire.failure()
    assert failure is not None and failure.peer == 0


@clause(FREE, 2)
def too_long(wire, soon):
    """so does a message that is longer than a receive by size."""
    if wire.rank == 0:
        wire.post([(1, _bytes(300))])
        _wait_until_it_leaves(wire, 1, soon)
        return
    _failure_of(wire.post((), [(0, 299)]).wait, "garbled", 0, soon)


@clause(FREE, 2)
def short(wire, soon):
    """a short message in a long receive leaves nothing behind: a long one after it may be early."""
    if wire.rank == 0:
        for each in [wire.post([(1, _bytes(10))]) for _ in range(2)]:
            each.wait(soon)  # the short ones have arrived before the long one
        posts = [wire.post([(1, _bytes(length))]) for length in (_BIG, 10)]
        _say_go(wire, 1, soon)
        for each in posts:
            each.wait(soon)
        return
    posts = [wire.post((), [(0, 200_000)]) for _ in range(2)]
    for each in posts:
        each.wait(soon)
    _await_go(wire, 0, soon)
    time.sleep(_MOMENT)
    posts += [wire.post((), [(0, _BIG)]) for _ in range(2)]
    assert [len(each.wait(soon)[0]) for each in posts] == [10, 10, _BIG, 10]


@clause(ANY_WIRE, 2)
def many(wire, soon, count=_POSTS):
    """thousands of posts may be under way."""
    peer = 1 - wire.rank
    sent, received = (_TOGETHER, 1) if wire.rank == 0 else (1, _TOGETHER)
    posts = []
    for i in range(count):
        sends = [(peer, _number(i + place)) for place in range(sent)]
        posts.append(wire.post(sends, [(peer, _number()) for _ in range(received)]))
    for i, each in enumerate(posts):
        got = [number.item() for number in each.wait(soon)]
        assert got == [*range(i, i + received)]


@clause(ANY_WIRE, 3)
def large(wire, soon):
    """all ranks may send long messages to all others at once."""
    mine = torch.arange(_BIG // 4, dtype=torch.float32) + wire.rank
    places = [(peer, torch.empty_like(mine)) for peer in _others(wire)]
    got = wire.post([(peer, mine) for peer in _others(wire)], places).wait(soon)
    for peer, each in zip(_others(wire), got, strict=True):
        assert torch.equal(each - peer, mine - wire.rank)


@clause(FREE, 2)
def late(wire, soon):
    """a receive may be posted long after its message was sent."""
    lengths = (8, _MEDIUM, _BIG)
    if wire.rank == 0:
        posts = [wire.post([(1, _bytes(length))]) for length in lengths]
        _say_go(wire, 1, soon)
        for each in posts:
            each.wait(soon)
        return
    _await_go(wire, 0, soon)
    time.sleep(_MOMENT)
    for length in lengths:
        assert wire.post((), [(0, _bytes(length, 0))]).wait(soon)[0].all()


@clause(FREE, 2)
def sent(wire, soon):
    """a tensor that was sent may change once it was waited for, also if it is received later."""
    for length in (100, _BIG):
        if wire.rank == 0:
            data = _bytes(length)
            wire.post([(1, data)]).wait(soon)
            data.zero_()
        else:
            time.sleep(_MOMENT)
            pending = wire.post((), [(0, length)])
            assert pending.wait(soon)[0].all()
            pending.release()


@clause(FREE, 2)
def storages(wire, soon):
    """memory of a post is kept, though the caller gives its tensors other memory."""
    if wire.rank == 0:
        data = _bytes(_BIG)
        pending = wire.post([(1, data)])
        data.set_(torch.zeros(1, dtype=torch.uint8).untyped_storage())
        filled = [_bytes(_BIG, 0) for _ in range(4)]  # in the freed memory, if it was freed
        _say_go(wire, 1, soon)
        pending.wait(soon)
        del filled
        wire.post((), [(1, _number())]).wait(soon)  # when the tensor below has other memory
        wire.post([(1, _bytes(_BIG))]).wait(soon)
    else:
        _await_go(wire, 0, soon)
        assert wire.post((), [(0, _bytes(_BIG, 0))]).wait(soon)[0].all()
        place = _bytes(_BIG, 0)
        memory = place.detach()
        pending = wire.post((), [(0, place)])
        place.data = torch.zeros(_BIG, dtype=torch.uint8)
        wire.post([(0, _number())]).wait(soon)
        pending.wait(soon)
        assert memory.all()


@clause(ANY_WIRE, 2, 8)
def views(wire, soon):
    """what was received by size stays as it is until it is released, and can be sent on."""
    peer, kept = _partner(wire), []
    for i in range(4):
        kept.append(wire.post([(peer, _bytes(_MEDIUM, i))], [(peer, _MEDIUM)]))
        kept[-1].wait(soon)
    for i, pending in enumerate(kept):
        (view,) = pending.wait()
        back = wire.post([(peer, view)], [(peer, _MEDIUM)])
        values = set(back.wait(soon)[0].tolist())
        assert values == {i}
        back.release()
        pending.release()


@clause(FREE, 2)
def timeouts(wire, soon):
    """a wait that ran out raises TimeoutError and changes nothing: it can be waited for again."""
    peer = 1 - wire.rank
    posts = [wire.post((), [(peer, _number()), (peer, _MEDIUM)]) for _ in range(2)]
    pending = posts[0]
    if wire.rank == 0:
        began = time.monotonic()
        _is_not_over(pending, _MOMENT)
        assert time.monotonic() - began >= 0.9 * _MOMENT
        _is_not_over(pending, 0)
        assert wire.failure() is None and not pending.done()
    else:
        pending.wait(soon)
    posts.append(wire.post((), [(peer, _number()), (peer, _MEDIUM)]))
    for i in range(3):
        wire.post([(peer, _number(i)), (peer, _bytes(_MEDIUM, i))]).wait(soon)
    for i, each in enumerate(posts):
        number, view = each.wait(soon)
        found = number.item(), int(view[-1])
        assert found == (i, i)
        assert each.done()
        each.release()


@clause(ANY_WIRE, 3)
def aborts(wire, soon):
    """an abort in another thread ends a wait, and every later use, with the first failure."""
    if wire.rank > 0:  # who does not come
        if wire.features.lockstep:
            time.sleep(soon / 2)
        else:
            _wait_until_it_leaves(wire, 0, soon)
        return
    given = Failure("aborted", 2, "rank 2 died")
    pending = wire.post((), [(2, _bytes(_BIG))])
    began = time.monotonic()

    def abort():
        nonlocal began
        began = time.monotonic()
        wire.abort(given)

    threading.Timer(_MOMENT, abort).start()
    assert _failure_of(pending.wait, "aborted", 2, soon) is given
    taken = time.monotonic() - began
    assert taken < patient(_ABORT)
    wire.abort(Failure("aborted", 0, "later"))
    assert wire.failure() is given and pending.done()
    _failure_of(pending.wait, "aborted", 2, soon)
    _failure_of(lambda: wire.post([(1, _number(1))]), "aborted", 2, soon)


@clause(FREE, 2)
def memory(wire, soon):
    """once a use has raised WireFailed, no memory of any post is written to."""
    place, other = _bytes(_BIG, 0), _bytes(1000, 0)
    if wire.rank == 1:
        wire.post((), [(0, _number())], 2).wait(soon)
        time.sleep(patient(_MOMENT))  # until the other rank has failed
        wire.post([(0, place)])
        wire.post([(0, other)], (), 1)
        time.sleep(2 * _MOMENT)
        return
    posts = [wire.post((), [(1, place)]), wire.post((), [(1, other)], 1)]
    wire.post([(1, _number(1))], (), 2).wait(soon)
    wire.abort(Failure("aborted", None, "enough"))
    try:
        posts[1].wait(soon)
    except WireFailed:
        place.fill_(7)
        other.fill_(7)
    else:
        return  # this rank was held up, and all came before the failure
    time.sleep(2 * patient(_MOMENT))
    for tensor in (place, other):
        assert bool((tensor == 7).all())


@clause(FREE, 3)
def leaves(wire, soon):
    """what was sent before a close arrives; waits for who closed end; the others go on."""
    if wire.rank == 2:
        wire.post([(0, _bytes(_BIG))]).wait(soon)
        wire.post([(0, _number(5))]).wait(soon)
        wire.close()
        return
    peer = 1 - wire.rank
    if wire.rank == 0:
        early = wire.post((), [(2, _bytes(_BIG, 0)), (2, _number())])
        time.sleep(_MOMENT)
        got = early.wait(soon)
        assert got[0].all() and got[1].item() == 5
    time.sleep(_MOMENT)
    for _ in range(20):
        _swap(wire, peer, soon)
    assert wire.failure() is None
    _failure_of(lambda: wire.post((), [(2, 8)]).wait(soon), "lost", 2, soon)
    _failure_of(lambda: wire.post((), [(peer, 8)]).wait(soon), "lost", 2, soon)


@clause(ANY_WIRE, 2)
def closes(wire, soon):
    """a close ends a wait in another thread, can be repeated, and every later use raises."""
    if wire.rank == 1:
        time.sleep(3 * _MOMENT)
        return
    pending = wire.post((), [(1, 8)])
    threading.Timer(_MOMENT, wire.close).start()
    with pytest.raises(WireFailed):
        pending.wait(soon)
    wire.close()
    wire.close()
    with pytest.raises(WireFailed):
        wire.post([(1, _number(1))]).wait(soon)


@clause(FREE, 2)
def moves(wire, soon):
    """messages move while nobody waits, and `done` tells."""
    peer = 1 - wire.rank
    pending = wire.post([(peer, _bytes(_BIG))], [(peer, _bytes(_BIG, 0))])
    until = time.monotonic() + soon
    while time.monotonic() < until and not pending.done():
        time.sleep(_MOMENT)  # no other call
    assert pending.done()
    assert pending.wait(0)[0].all()


@clause(FREE, 2)
def polls(wire, soon):
    """to ask `done` again and again is as good as to wait."""
    peer, until = 1 - wire.rank, time.monotonic() + soon
    for length in (8, _BIG):
        pending = wire.post([(peer, _bytes(length))], [(peer, length)])
        while not pending.done():
            assert time.monotonic() < until
        assert len(pending.wait(0)[0]) == length
        pending.release()


@clause(FREE, 3)
def names(wire, soon):
    """`waiting_for` names the peers of what is not complete, in another thread, too."""
    if wire.rank:
        if wire.rank == 2:
            _await_go(wire, 0, 2 * soon)
        wire.post([(0, _number(1))]).wait(soon)
        return
    pending, heard = wire.post((), [(1, 8), (2, 8)]), []
    until = time.monotonic() + soon

    def ask():
        while [2] not in heard and time.monotonic() < until:
            heard.append(pending.waiting_for())
            time.sleep(_MOMENT / 20)

    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask)
        while not asked.done():
            with contextlib.suppress(TimeoutError):
                pending.wait(_MOMENT)
        asked.result()
    _say_go(wire, 2, soon)
    pending.wait(soon)
    assert [2] in heard
    assert pending.waiting_for() == []
    pending.release()


@clause(ANY_WIRE, 2, 8)
def leases(wire, soon):
    """leased memory can be sent from, to several at once, and is whole when it is leased again."""
    peer = _partner(wire)
    for i in range(20):
        lease = wire.lease(100_000)
        if lease is None:
            return
        with lease:
            assert lease.tensor.nbytes == 100_000 and lease.tensor.data_ptr() % 64 == 0
            lease.tensor.fill_(i)
            sends = [(peer, lease.tensor), (peer, lease.tensor[:50])]
            pending = wire.post(sends, [(peer, 100_000), (peer, 50)])
            values = [set(each.tolist()) for each in pending.wait(soon)]
            assert values == [{i}, {i}]
            pending.release()
        lease.release()


@clause(ANY_WIRE, 3)
def rounds(wire, soon, count=_ROUNDS):
    """of three thousand rounds no wake-up gets lost."""
    places = [(peer, _number()) for peer in _others(wire)]
    for i in range(count):
        pending = wire.post([(peer, _number(i)) for peer in _others(wire)], places)
        assert all(each.item() == i for each in pending.wait(soon))


@clause(FREE, 2)
def dropped(wire, soon):
    """a post whose pending nobody keeps arrives all the same."""
    if wire.rank == 0:
        place = _number()
        wire.post([(1, _bytes(_BIG))])
        wire.post((), [(1, place)])
        gc.collect()
        _say_go(wire, 1, soon)
        got = wire.post((), [(1, _number())]).wait(soon)
        assert got[0].item() == 2
        until = time.monotonic() + soon
        while not place.item():
            assert time.monotonic() < until
            time.sleep(0.01)
        return
    _await_go(wire, 0, soon)
    assert wire.post((), [(0, _bytes(_BIG, 0))]).wait(soon)[0].all()
    for number in (1, 2):
        wire.post([(0, _number(number))]).wait(soon)


@clause(ANY_WIRE, 2)
def on_the_host(wire, soon):
    """`wait_stream` of a wire without streams is a wait."""
    peer = 1 - wire.rank
    for length in (8, _BIG):
        pending = wire.post([(peer, _bytes(length, 3))], [(peer, _bytes(length, 0))])
        (got,) = pending.wait_stream()
        assert pending.done()
        assert int(got[-1]) == 3


@clause(PROCESSES, 3)
def dies(wire, soon):
    """a wait for a rank whose process was killed ends as lost; the others go on until they wait."""
    if wire.rank == 1:
        wire.post([(peer, _bytes(4 * _BIG)) for peer in _others(wire)])
        time.sleep(_MOMENT)  # so that a part of it is under way
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2 * _MOMENT)
    for _ in range(20):
        _swap(wire, 2 - wire.rank, soon)
    assert wire.failure() is None
    if wire.rank == 0:
        _failure_of(lambda: wire.post((), [(1, 8)], 1).wait(soon), "lost", 1, soon)
    else:
        # the first may have come whole, for a wire may keep what came unasked
        recvs = [(1, _bytes(4 * _BIG)), (1, 8)]
        _failure_of(lambda: wire.post((), recvs).wait(soon), "lost", 1, soon)


@clause(PROCESSES, 3)
def forks(wire, soon):
    """a close in a forked child changes nothing, and the parent's death is seen though it lives."""
    pids = wire.post(
        [(peer, _number(os.getpid())) for peer in _others(wire)],
        [(peer, _number()) for peer in _others(wire)],
    ).wait(soon)
    if wire.rank == 1:
        # whose death the others have to see while its child lives
        _in_a_child(wire.close, soon, [int(pid) for pid in pids])
    for length in (8, _BIG):
        _swap_with_all(wire, length, soon)
    if wire.rank == 1:
        # until the others have what it sent: that may be lost with a process that is killed
        wire.post((), [(peer, 8) for peer in _others(wire)]).wait(soon)
        os.kill(os.getpid(), signal.SIGKILL)
    awaited = wire.post([(1, _bytes(8, 3))], [(1, 8)])
    _failure_of(lambda: awaited.wait(soon), "lost", 1, soon)


@clause(PROCESSES, 2)
def signals(wire, soon):
    """signals are handled during a wait; what a handler raises leaves it, and changes nothing."""
    if wire.rank == 1:
        wire.post((), [(0, _number())]).wait(2 * _SIGNALS * soon)  # until all were handled
        wire.post([(0, _number(7))]).wait(soon)
        return
    pending = wire.post((), [(1, _number())])
    _is_handled_soon(wire, pending, soon)
    wire.post([(1, _number())]).wait(soon)
    assert pending.wait(soon)[0].item() == 7


@clause(PROCESSES, 3)
def strangers(wire, soon):
    """who connects to a port where the wire listens, and is no rank, changes nothing."""
    strange = _strangers()
    _swap_with_all(wire, 8, soon)
    strange += _strangers()
    for connection in strange[::2]:
        connection.close()
    for length in (8, _BIG):
        _swap_with_all(wire, length, soon)
    assert wire.failure() is None
    for connection in strange:
        connection.close()


@clause(IN_ROUNDS, 4)
def among(wire, soon):
    """`among` some ranks they are numbered as given, need no others, and fail with the wire."""
    assert isinstance(wire, Rounds)
    ranks = [2, 0]
    if wire.rank in ranks:
        part = wire.among(ranks)
        assert (part.rank, part.size) == (ranks.index(wire.rank), 2)
        features = replace(wire.features, reduces=part.features.reduces)
        assert (part.device, part.features) == (wire.device, features)
        peer = 1 - part.rank
        for _ in range(3):
            got = part.post([(peer, _number(wire.rank))], [(peer, _number())]).wait(soon)
            assert got[0].item() == ranks[peer]
    _swap_with_all(wire, 8, soon)
    if wire.rank in ranks:
        wire.abort(Failure("aborted", 1, "rank 1 gave up"))
        assert part.failure() == wire.failure()
        _failure_of(lambda: part.post([(peer, _number())]), "aborted", 1, soon)


@clause(REDUCING, 1, 3, 8)
def reduces(wire, soon):
    """`all_reduce` leaves the same bits on every rank, in place."""
    assert isinstance(wire, Reducing)
    generator = torch.Generator().manual_seed(wire.rank)
    for op, dtype in sorted(wire.features.reduces, key=str):
        parts = [(torch.arange(100) * (rank + 1) % 3 + 1).to(dtype) for rank in range(wire.size)]
        total = parts[wire.rank].clone().to(wire.device)
        wire.all_reduce(total, op).wait(soon)
        if op in COMBINE:
            right = parts[0]
            for part in parts[1:]:
                right = COMBINE[op](right, part)
            assert torch.equal(total.cpu(), right.to(dtype))
        total = (torch.rand(1000, generator=generator) * 9).to(dtype).to(wire.device)
        wire.all_reduce(total, op).wait(soon)
        sends = [(peer, total) for peer in _others(wire)]
        places = [(peer, torch.empty_like(total)) for peer in _others(wire)]
        for other in wire.post(sends, places).wait(soon):
            assert torch.equal(_bits(total), _bits(other))


@clause(FREE, 2)
def wrong_and_early(wire, soon):
    """a message of another length than was asked for is told of as such also if it came early."""
    if wire.rank == 0:
        wire.post([(1, _bytes(10))])
        _say_go(wire, 1, soon)
        _wait_until_it_leaves(wire, 1, soon)
        return
    _await_go(wire, 0, soon)
    time.sleep(_MOMENT)
    _failure_of(lambda: wire.post((), [(0, _bytes(12))]).wait(soon), "garbled", 0, soon)


@clause(PROCESSES, 4)
def closed_by_a_handler(wire, soon):
    """the handler of a signal may close the wire, which ends the wait, and nothing comes twice."""
    peer = _partner(wire)
    data = torch.arange(_BIG)
    if wire.rank > peer:
        time.sleep(_MOMENT)
        place = torch.zeros_like(data)
        with contextlib.suppress(WireFailed):  # then not all has come
            wire.post((), [(peer, place)]).wait(2 * soon)  # a close may take a while
            assert torch.equal(place, data)
        _failure_of(lambda: wire.post((), [(peer, 8)]).wait(soon), "lost", peer, soon)
        return
    pending = wire.post([(peer, data)], [(peer, 8)])
    # of the first pair while it sleeps in its wait, of the other in the code of a wait
    wait = _closed_while_it_sleeps if wire.rank == 0 else _closed_in_its_code
    with pytest.raises(WireFailed):
        wait(wire, pending, soon)


@clause(ANY_WIRE, 2, 8)
def complete(wire, soon):
    """a post that was complete before a failure returns what it received."""
    peer = _partner(wire)
    early = wire.post(
        [(peer, _number(7)), (peer, _bytes(100, 9))], [(peer, _number()), (peer, 100)]
    )
    _swap(wire, peer, soon)  # which comes behind that
    time.sleep(_MOMENT)
    assert early.done()
    wire.abort(Failure("aborted", peer, f"rank {peer} died"))
    number, view = early.wait(soon)
    assert number.item() == 7 and set(view.tolist()) == {9}
    early.release()


@clause(FREE, 2)
def released(wire, soon):
    """any thread releases what came by size, while another one waits and after a failure, too."""
    peer = 1 - wire.rank
    posts = [wire.post([(peer, _bytes(_MEDIUM))], [(peer, _MEDIUM)]) for _ in range(2)]
    for each in posts:
        each.wait(soon)
    with ThreadPoolExecutor(1) as other:
        if wire.rank == 0:
            late = wire.post((), [(peer, _number())])
            release = other.submit(posts[0].release)
            late.wait(soon)
        else:
            time.sleep(_MOMENT)
            wire.post([(peer, _number())]).wait(soon)
            release = other.submit(posts[0].release)
        release.result(soon)
    _swap(wire, peer, soon)
    if wire.rank == 0:
        wire.post((), [(peer, _number())]).wait(soon)  # the peer has got its number, too
        wire.abort(Failure("aborted", peer, f"rank {peer} died"))
    else:
        wire.post([(peer, _number())]).wait(soon)
        _wait_until_it_leaves(wire, peer, soon)
    posts[1].release()
    posts[1].release()


@clause(ANY_WIRE, 2)
def at_once(wire, soon):
    """`post`, `done`, `waiting_for` and `failure` return at once, whatever is under way."""
    peer = 1 - wire.rank
    taken = defaultdict(list)

    def timed(name, call):
        began = time.monotonic()
        result = call()
        taken[name].append(time.monotonic() - began)
        return result

    for length in (8, _BIG):
        data, place = _bytes(length), _bytes(length, 0)
        for _ in range(_TRIES):
            post = functools.partial(wire.post, [(peer, data)], [(peer, place)])
            pending = timed(f"a post of {length} bytes", post)
            timed("`done`", pending.done)
            timed("`waiting_for`", pending.waiting_for)
            timed("`failure`", wire.failure)
            pending.wait(soon)
    for seconds in taken.values():
        least = min(seconds)  # the others may have waited for a core
        assert least < patient(_AT_ONCE)


@clause(MEETINGS, 1, 2, 4, 8)
def meets(wire, soon):
    """ranks that meet hear each other's bytes, in the order that each asks for."""
    assert isinstance(wire, Meeting)
    ranks = [*range(wire.size)]
    orders = (ranks, ranks[::-1], [wire.rank, *_others(wire)])
    for number in range(60):
        _heard(_meet(wire, number, orders[number % 3]), number, orders[number % 3], soon)
    most = wire.features.meets
    for length in (0, 1, most):
        pending = wire.meet(bytes([wire.rank]) * length, ranks)
        wanted = [bytes([rank]) * length for rank in ranks]
        assert pending.wait(soon) == wanted
        assert pending.wait(0) == wanted and pending.done() and pending.waiting_for() == []
    assert wire.meet(b"to myself", [wire.rank]).wait(soon) == [b"to myself"]
    for message, others in ((bytes(most + 1), ranks), (b"", [wire.rank] * 2), (b"", [wire.size])):
        with pytest.raises(ValueError):
            wire.meet(message, others)
    _heard(_meet(wire, 0, ranks), 0, ranks, soon)
    assert wire.failure() is None


@clause(MEETINGS, 4, 8)
def meets_in_subsets(wire, soon):
    """any ranks meet, several meetings under way, in any order, and messages go between them."""
    own = random.Random(wire.rank)
    under_way = []
    for number, ranks in enumerate(_subsets(wire.size, 1000)):
        if number % 100 == 0:
            _swap_with_all(wire, 8, soon)
        if wire.rank not in ranks:
            continue
        while len(under_way) >= own.choice((1, 2, 2, 12)):
            _heard(*under_way.pop(own.randrange(len(under_way))), soon)
        under_way.append((_meet(wire, number, ranks), number, ranks))
    for each in under_way:
        _heard(*each, soon)


@clause(MEETINGS, 3)
def meets_ahead(wire, soon):
    """any number of meetings may be begun ahead, also while a peer does not come."""
    ranks = [*range(wire.size)]
    if wire.rank == 2:
        time.sleep(_MOMENT)
    under_way = [_meet(wire, number, ranks) for number in range(50)]
    if wire.rank != 2:  # a wait for messages, too, reads what peers left, and leaves more
        _swap(wire, 1 - wire.rank, soon)
    for number in (*range(0, 50, 2), *reversed(range(1, 50, 2))):
        _heard(under_way[number], number, ranks, soon)
    # who leaves has told what it told
    _meet(wire, 50, ranks)
    if wire.rank == 2:
        _tell(wire, b"last", ranks).wait(soon)
        return
    assert _tell(wire, b"last", ranks).wait(soon) == [b"last"] * 3
    _swap(wire, 1 - wire.rank, soon)
    assert wire.failure() is None
    _failure_of(lambda: _tell(wire, b"", [wire.rank, 2]).wait(soon), "lost", 2, soon)


@clause(MEETINGS, 3)
def meets_late(wire, soon):
    """`meet` returns at once; a wait that ran out changes nothing; `waiting_for` names the late."""
    ranks = [*range(wire.size)]
    if wire.rank == 2:
        for peer in (0, 1):  # until their waits have run out
            wire.post((), [(peer, _number())]).wait(2 * soon)
        for number in range(20):
            _heard(_meet(wire, number, ranks), number, ranks, soon)
        return
    taken = []
    under_way = []
    for number in range(20):
        began = time.monotonic()
        under_way.append(_meet(wire, number, ranks))
        taken.append(time.monotonic() - began)
    least = min(taken)
    assert least < patient(_AT_ONCE)
    for each in (under_way[0], under_way[19]):
        with pytest.raises(TimeoutError):
            each.wait(_MOMENT)
        assert not each.done() and 2 in each.waiting_for()
    until = time.monotonic() + soon
    while under_way[0].waiting_for() != [2] and time.monotonic() < until:  # the other may be late
        with pytest.raises(TimeoutError):
            under_way[0].wait(_MOMENT)
    assert under_way[0].waiting_for() == [2]
    wire.post([(2, _number())]).wait(soon)
    for number in reversed(range(20)):
        _heard(under_way[number], number, ranks, soon)


@clause(MEETINGS, 3)
def meets_others(wire, soon):
    """two ranks hear what both said in their meetings of one number, whoever else is in these."""
    for number in range(0, 40, 2):
        ranks = {0: [0, 1], 1: [0, 1, 2], 2: [1, 2]}[wire.rank]
        _heard(_meet(wire, number, ranks), number, ranks, soon)
        ranks = {0: [0, 1, 2], 1: [1, 0], 2: [0, 2]}[wire.rank]
        _heard(_meet(wire, number + 1, ranks), number + 1, ranks, soon)


@clause(MEETINGS, 3)
def meets_in_a_circle(wire, soon):
    """ranks that wait for each other in a circle, without a limit, are told of that."""
    after = (wire.rank + 1) % 3
    for number in range(30):
        _heard(_meet(wire, number, [0, 1, 2]), number, [0, 1, 2], soon)
    began = time.monotonic()
    try:
        _tell(wire, b"", [wire.rank, after]).wait()
    except WireFailed as error:
        # one of them finds it; for the others it is gone then, as no group tells them
        assert error.failure.kind in ("stuck", "lost")
    else:
        raise AssertionError(f"rank {wire.rank} met rank {after}, who waits for another one")
    taken = time.monotonic() - began
    assert taken < soon


@clause(MEETINGS_OF_PROCESSES, 3)
def meets_the_dead(wire, soon):
    """what a rank told before it was killed comes; a meeting that lacks it fails as lost."""
    ranks = [*range(wire.size)]
    _heard(_meet(wire, 0, ranks), 0, ranks, soon)
    if wire.rank == 1:
        _meet(wire, 1, ranks)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_MOMENT)
    _heard(_meet(wire, 1, ranks), 1, ranks, soon)
    pair = [2, 0]
    for number in range(20):
        _heard(_meet(wire, number, pair), number, pair, soon)
    assert wire.failure() is None
    _failure_of(lambda: _meet(wire, 2, [1, wire.rank]).wait(soon), "lost", 1, soon)


@clause(MEETINGS_OF_PROCESSES, 2)
def meets_in_a_child(wire, soon):
    """a forked child cannot meet, and changes nothing of its parent's meetings."""
    ranks = [0, 1]
    _heard(_meet(wire, 0, ranks), 0, ranks, soon)
    late = _meet(wire, 1, ranks) if wire.rank == 0 else None
    if wire.rank == 0:

        def use():
            assert late is not None
            for call in (functools.partial(_tell, wire, b"", ranks), late.wait):
                _failure_of(call, "broken", 0, soon)

        _in_a_child(use, soon)
        _swap(wire, 1, soon)
    else:
        _swap(wire, 0, soon)
        late = _meet(wire, 1, ranks)
    assert late is not None
    _heard(late, 1, ranks, soon)
    for number in range(2, 30):
        _heard(_meet(wire, number, ranks), number, ranks, soon)


@clause(MEETINGS_OF_PROCESSES, 2)
def meets_with_signals(wire, soon):
    """signals are handled during a meeting's wait, and what a handler raises changes nothing."""
    ranks = [0, 1]
    if wire.rank == 1:
        wire.post((), [(0, _number())]).wait(2 * _SIGNALS * soon)  # until all were handled
        _heard(_meet(wire, 0, ranks), 0, ranks, soon)
        return
    pending = _meet(wire, 0, ranks)
    _is_handled_soon(wire, pending, soon)
    wire.post([(1, _number())]).wait(soon)
    _heard(pending, 0, ranks, soon)


@clause(MEETINGS, 4)
def meets_no_more(wire, soon):
    """an abort and a close, in another thread, end the wait for a meeting."""
    ranks = [*range(wire.size)]
    early = _meet(wire, 0, ranks)
    _heard(early, 0, ranks, soon)
    peer = _partner(wire)
    if wire.rank > peer:  # who does not come
        _wait_until_it_leaves(wire, peer, soon)
        return
    pending = _meet(wire, 1, [wire.rank, peer])
    if wire.rank == 0:
        given = Failure("aborted", peer, f"rank {peer} died")
        threading.Timer(_MOMENT, wire.abort, [given]).start()
        found = _failure_of(pending.wait, "aborted", peer, soon)
        assert found is given
    else:
        threading.Timer(_MOMENT, wire.close).start()
        _failure_of(pending.wait, "aborted", None, soon)
        wire.close()
    assert pending.done()
    _heard(early, 0, ranks, soon)
    for use in (pending.wait, functools.partial(_tell, wire, b"", ranks)):
        with pytest.raises(WireFailed):
            use()


in_rounds = clauses([*ANY_WIRE, *IN_ROUNDS], few={many: 300, rounds: 300})
"""Of a test of a wire in rounds."""
