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
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from weft.base.pace import patient
from weft.wire.interface import MEETS, Failure, Meeting, Wire, WireFailed

SOON = 5.0  # seconds in which what must come soon comes, on an idle machine

_POSTS = 2000  # that are under way at once
_ROUNDS = 3000
_BIG = 4 << 20  # bytes of a message that is longer than any buffer of a connection
_MEDIUM = 90_000  # bytes of a message that is longer than what is sent unasked
_MOMENT = 0.2  # seconds in which a message that nobody may wait for would have come
_ABORT = 2.0  # seconds that a wait may take to end after an abort
_HANDLED = 0.1  # seconds that the handler of a signal may have to wait for its turn
_NOTICED = 0.5  # seconds until a wait looks for signals that did not end its sleep
_SIGNALS = 5  # the median of so many delays is looked at
_TOGETHER = 6  # messages of a post, so that more than ten thousand are under way
_GO = 5  # the channel of what lets a peer go on
_AFTER_FORK = 60.0  # seconds in which those end that a forked child outlives

ANY_WIRE = []
"""Number of ranks, and what each does."""

PROCESSES = []
"""The same, where each rank is a process of its own, which may end."""

MEETINGS = []
"""Over a wire all of whose ranks meet."""

MEETINGS_OF_PROCESSES = []


def clause(kept, *sizes):
    """Put a rank's program into a list, for each of these numbers of ranks."""

    def put(body):
        kept.extend((size, body) for size in sizes)
        return body

    return put


def clauses(kept, most=8, without=()):
    """A test of each of these, `(size, body)`, on at most so many ranks."""
    found = []
    for size, body in kept:
        if size <= most and body not in without:
            called = functools.partial(body, soon=patient(SOON))
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


def _swap_with_all(wire, length, soon):
    """Send a message to all others at once, and receive one of each."""
    numbers = torch.arange(length)
    sends = [(peer, (numbers + wire.rank).to(torch.uint8)) for peer in _others(wire)]
    places = [(peer, _bytes(length, 0)) for peer in _others(wire)]
    for peer, each in zip(_others(wire), wire.post(sends, places).wait(soon), strict=True):
        assert torch.equal(each, (numbers + peer).to(torch.uint8))


def _say_go(wire, peer, soon):
    """Have a peer go on that is in `_await_go`, whatever lies on the way there."""
    wire.post([(peer, _number())], (), _GO).wait(soon)


def _await_go(wire, peer, soon):
    wire.post((), [(peer, _number())], _GO).wait(soon)


def _wait_until_it_leaves(wire, peer, soon):
    """Be there until a peer closes its wire; that this is noticed is for another clause."""
    with contextlib.suppress(WireFailed, TimeoutError):
        wire.post((), [(peer, 8)]).wait(2 * soon)


def _failure_of(use, kind, peer, soon):
    """The failure that a use raises soon, which has to be of this kind and about this peer."""
    began = time.monotonic()
    with pytest.raises(WireFailed) as caught:
        use()
    failure = caught.value.failure
    assert (failure.kind, failure.peer) == (kind, peer)
    assert time.monotonic() - began < soon
    return failure


class _Handled(Exception):
    """What the handler of a signal raises."""


def _is_handled_soon(wire, pending, soon):
    """Signals are handled during a wait, and what their handlers raise leaves the wire as it is."""
    delays = sorted(_delay_of_a_handler(pending, soon, _alarm) for _ in range(_SIGNALS))
    assert delays[_SIGNALS // 2] < patient(_HANDLED)
    delays = [_delay_of_a_handler(pending, soon, _alarm_taken_by_a_thread) for _ in range(3)]
    assert min(delays) < patient(_NOTICED)
    assert wire.failure() is None


def _delay_of_a_handler(pending, soon, alarm):
    """Seconds after which a signal is handled that comes during a wait, and ends it."""
    delays = []

    def handle(*_):
        delays.append(time.monotonic() - sent)
        raise _Handled

    before = signal.signal(signal.SIGALRM, handle)
    try:
        sent = time.monotonic() + _MOMENT / 4
        with pytest.raises(_Handled):
            alarm(_MOMENT / 4)
            pending.wait(soon)
    finally:
        signal.signal(signal.SIGALRM, before)
    return delays[0]


def _alarm(after):
    signal.setitimer(signal.ITIMER_REAL, after)


def _alarm_taken_by_a_thread(after):
    """As any thread may take a signal: it ends no sleep of the main thread, which handles it."""

    def take():
        time.sleep(after)
        signal.pthread_kill(threading.get_ident(), signal.SIGALRM)

    threading.Thread(target=take, daemon=True).start()


def _close_in_a_child(wire, soon, outlives):
    """Fork, and close a wire in the child, which has to be through soon.

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
            wire.close()
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


def _said(rank, number):
    """What a rank says in its meeting of this number, of a length of its own."""
    length = (0, 40, 1500, 70_000)[(rank + number) % 4]
    return bytes([rank, number % 251]) + bytes([(7 * number + 31 * rank) % 256]) * length


def _meet(wire, number, ranks):
    return wire.meet(_said(wire.rank, number), ranks)


def _heard(pending, number, ranks, soon):
    """Wait for a meeting that `_meet` began; all said what they say in it."""
    assert pending.wait(soon) == [_said(rank, number) for rank in ranks]


# Messages ---------------------------------------------------------------------------------------


@clause(ANY_WIRE, 1, 4, 8)
def dtypes(wire, soon):
    """tensors of every dtype and shape arrive as they were sent, from each to each; empty ones."""
    assert isinstance(wire, Wire) and 0 <= wire.rank < wire.size
    assert wire.post().wait() == []
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
    ints = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    for dtype in (*floats, *ints, torch.bool):

        def made(source, target, dtype=dtype):
            return ((torch.arange(3 * (source + 1)).view(3, -1) + target) % 2).to(dtype)

        sends = []
        recvs = []
        for peer in _others(wire):
            sends += [(peer, torch.empty(0, 3)), (peer, made(wire.rank, peer)), (peer, _bytes(0))]
            recvs += [(peer, 0), (peer, torch.empty_like(made(peer, wire.rank))), (peer, _bytes(0))]
        pending = wire.post(sends, recvs)
        got = pending.wait(soon)
        again = pending.wait(soon)
        assert all(one is other for one, other in zip(got, again, strict=True))
        for (peer, into), one in zip(recvs, got, strict=True):
            assert one is into or into == 0
            assert not one.numel() or torch.equal(one, made(peer, wire.rank))
        pending.release()
    assert wire.failure() is None


@clause(ANY_WIRE, 3, 8)
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


@clause(ANY_WIRE, 2)
def channels(wire, soon):
    """a channel waits for no other, whatever lies there."""
    peer, last = 1 - wire.rank, (1 << 31) - 1
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
                assert int(asked.wait(soon)[0][-1]) == i
                asked.release()
        posts = [wire.post((), [(peer, _bytes(_BIG))], last)]
    for each in posts:
        each.wait(soon)


@clause(ANY_WIRE, 2, 8)
def sized(wire, soon):
    """a receive by size returns as many bytes as came: none, some, or all that it takes."""
    peer, most = _partner(wire), 200_000
    lengths = (0, 1, 4095, 65_536, most)
    data = torch.arange(most).to(torch.uint8)
    pending = wire.post([(peer, data[:length]) for length in lengths], [(peer, most)] * 5)
    views = pending.wait(soon)
    assert [view.numel() for view in views] == list(lengths)
    for view in views:
        assert (view.dtype, view.dim()) == (torch.uint8, 1)
        assert torch.equal(view, data[: len(view)])
        assert view.data_ptr() % 16 == 0
    pending.release()
    pending.release()


@clause(ANY_WIRE, 2)
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
def many(wire, soon):
    """thousands of posts may be under way."""
    peer = 1 - wire.rank
    sent, received = (_TOGETHER, 1) if wire.rank == 0 else (1, _TOGETHER)
    posts = []
    for i in range(_POSTS):
        sends = [(peer, _number(i + place)) for place in range(sent)]
        posts.append(wire.post(sends, [(peer, _number()) for _ in range(received)]))
    for i, each in enumerate(posts):
        got = [number.item() for number in each.wait(soon)]
        assert got == [*range(i, i + received)]


@clause(ANY_WIRE, 3)
def rounds(wire, soon):
    """of three thousand rounds no wake-up gets lost."""
    places = [(peer, _number()) for peer in _others(wire)]
    for i in range(_ROUNDS):
        pending = wire.post([(peer, _number(i)) for peer in _others(wire)], places)
        assert all(each.item() == i for each in pending.wait(soon))


@clause(ANY_WIRE, 3)
def large(wire, soon):
    """all ranks may send long messages to all others at once."""
    _swap_with_all(wire, _BIG, soon)


# Memory -----------------------------------------------------------------------------------------


@clause(ANY_WIRE, 2)
def late(wire, soon):
    """a receive may be posted long after its message was sent; only a wait may last till then."""
    lengths = (8, _MEDIUM, _BIG)
    if wire.rank == 0:
        posts = [wire.post([(1, _bytes(length))]) for length in lengths]
        for each in posts:
            assert each.waiting_for() in ([], [1])
        _say_go(wire, 1, soon)
        for each in posts:
            each.wait(soon)
        return
    _await_go(wire, 0, soon)
    time.sleep(_MOMENT)
    for length in lengths:
        assert wire.post((), [(0, _bytes(length, 0))]).wait(soon)[0].all()


@clause(ANY_WIRE, 2)
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


@clause(ANY_WIRE, 2)
def storages(wire, soon):
    """memory of a post is kept, though nobody keeps its pending, and its tensors get other."""
    if wire.rank == 0:
        data = _bytes(_BIG)
        wire.post([(1, data)])
        data.set_(torch.zeros(1, dtype=torch.uint8).untyped_storage())
        gc.collect()
        filled = [_bytes(_BIG, 0) for _ in range(4)]  # in the freed memory, if it was freed
        _say_go(wire, 1, soon)
        _await_go(wire, 1, soon)  # when the tensor there has other memory
        del filled
        wire.post([(1, _bytes(_BIG))]).wait(soon)
        _await_go(wire, 1, 2 * soon)
    else:
        _await_go(wire, 0, soon)
        assert wire.post((), [(0, _bytes(_BIG, 0))]).wait(soon)[0].all()
        place = _bytes(_BIG, 0)
        memory = place.detach()
        wire.post((), [(0, place)])
        place.data = torch.zeros(_BIG, dtype=torch.uint8)
        gc.collect()
        _say_go(wire, 0, soon)
        until = time.monotonic() + soon
        other = wire.post((), [(0, 8)], 1)
        while memory[-1] != 1:
            assert time.monotonic() < until
            with contextlib.suppress(TimeoutError):
                other.wait(0.01)  # in which the message moves
        assert bool((memory == 1).all())
        _say_go(wire, 0, soon)


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
        assert set(back.wait(soon)[0].tolist()) == {i}
        back.release()
        pending.release()


@clause(ANY_WIRE, 2)
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
            assert [set(each.tolist()) for each in pending.wait(soon)] == [{i}, {i}]
            pending.release()
        lease.release()


# Waits ------------------------------------------------------------------------------------------


@clause(ANY_WIRE, 2)
def timeouts(wire, soon):
    """a wait that ran out raises TimeoutError and changes nothing: it can be waited for again."""
    peer = 1 - wire.rank
    posts = [wire.post((), [(peer, _number()), (peer, _MEDIUM)]) for _ in range(2)]
    pending = posts[0]
    if wire.rank == 0:
        began = time.monotonic()
        for seconds in (_MOMENT, 0):
            with pytest.raises(TimeoutError):
                pending.wait(seconds)
        assert time.monotonic() - began >= 0.9 * _MOMENT
        assert wire.failure() is None and pending.waiting_for() == [1]
    else:
        pending.wait(soon)
    posts.append(wire.post((), [(peer, _number()), (peer, _MEDIUM)]))
    for i in range(3):
        wire.post([(peer, _number(i)), (peer, _bytes(_MEDIUM, i))]).wait(soon)
    for i, each in enumerate(posts):
        number, view = each.wait(soon)
        assert (number.item(), int(view[-1])) == (i, i)
        assert each.waiting_for() == []
        each.release()


@clause(ANY_WIRE, 3)
def names(wire, soon):
    """`waiting_for` names the peers of what is not complete, in another thread, too.

    And a pair of ranks waits for no other pair.
    """
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


# Ends -------------------------------------------------------------------------------------------


@clause(ANY_WIRE, 2, 8)
def complete(wire, soon):
    """a post that was complete before a failure returns what it received."""
    peer = _partner(wire)
    early = wire.post(
        [(peer, _number(7)), (peer, _bytes(100, 9))], [(peer, _number()), (peer, 100)]
    )
    _swap(wire, peer, soon)  # which comes behind that
    time.sleep(_MOMENT)
    assert early.waiting_for() == []
    wire.abort(Failure("aborted", peer, f"rank {peer} died"))
    number, view = early.wait(soon)
    assert number.item() == 7 and set(view.tolist()) == {9}
    early.release()


@clause(ANY_WIRE, 3)
def aborts(wire, soon):
    """an abort in another thread ends a wait, and every later use, with the first failure."""
    if wire.rank > 0:  # who does not come
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
    assert time.monotonic() - began < patient(_ABORT)
    wire.abort(Failure("aborted", 0, "later"))
    assert wire.failure() is given
    _failure_of(pending.wait, "aborted", 2, soon)
    _failure_of(lambda: wire.post([(1, _number(1))]), "aborted", 2, soon)


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


@clause(ANY_WIRE, 3)
def leaves(wire, soon):
    """what was sent before a close arrives, also if it is asked for later; the others go on.

    Only who awaits more of who closed is told, and fails.
    """
    if wire.rank == 2:
        for each in [wire.post([(0, _bytes(length))]) for length in (_MEDIUM, 8)]:
            each.wait(2 * soon)
        return  # and is closed
    time.sleep(_MOMENT)
    for _ in range(20):
        _swap(wire, 1 - wire.rank, soon)
    assert wire.failure() is None
    if wire.rank == 0:
        for length in (_MEDIUM, 8):
            assert wire.post((), [(2, _bytes(length, 0))]).wait(soon)[0].all()
    _failure_of(lambda: wire.post((), [(2, 8)]).wait(soon), "lost", 2, soon)


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
        _close_in_a_child(wire, soon, [int(pid) for pid in pids])
    for length in (8, _BIG):
        _swap_with_all(wire, length, soon)
    if wire.rank == 1:
        # until the others have what it sent: that may be lost with a process that is killed
        wire.post((), [(peer, 8) for peer in _others(wire)]).wait(soon)
        os.kill(os.getpid(), signal.SIGKILL)
    awaited = wire.post([(1, _bytes(8, 3))], [(1, 8)])
    _failure_of(lambda: awaited.wait(soon), "lost", 1, soon)


# Meetings ---------------------------------------------------------------------------------------


@clause(MEETINGS, 2, 4)
def meets(wire, soon):
    """ranks that meet hear each other's bytes, in the order that each asks for."""
    assert isinstance(wire, Meeting)
    ranks = [*range(wire.size)]
    orders = (ranks, ranks[::-1], [wire.rank, *_others(wire)])
    for number in range(60):
        _heard(_meet(wire, number, orders[number % 3]), number, orders[number % 3], soon)
    for length in (0, 1, MEETS):
        pending = wire.meet(bytes([wire.rank]) * length, ranks)
        wanted = [bytes([rank]) * length for rank in ranks]
        assert pending.wait(soon) == wanted
        assert pending.wait(0) == wanted and pending.waiting_for() == []
    assert wire.meet(b"to myself", [wire.rank]).wait(soon) == [b"to myself"]
    for message, others in ((bytes(MEETS + 1), ranks), (b"", [wire.rank] * 2), (b"", [wire.size])):
        with pytest.raises(ValueError):
            wire.meet(message, others)
    _heard(_meet(wire, 0, ranks), 0, ranks, soon)
    assert wire.failure() is None


@clause(MEETINGS, 4)
def meets_in_subsets(wire, soon):
    """any ranks meet, several meetings under way, in any order, and messages go between them."""
    chance = random.Random(wire.size)  # who meets is the same on every rank
    own = random.Random(wire.rank)
    under_way = []
    for number in range(1000):
        ranks = chance.sample(range(wire.size), chance.randint(2, wire.size))
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
def meets_others(wire, soon):
    """two ranks hear what both said in their meetings of one number, whoever else is in these."""
    for number in range(0, 40, 2):
        ranks = {0: [0, 1], 1: [0, 1, 2], 2: [1, 2]}[wire.rank]
        _heard(_meet(wire, number, ranks), number, ranks, soon)
        ranks = {0: [0, 1, 2], 1: [1, 0], 2: [0, 2]}[wire.rank]
        _heard(_meet(wire, number + 1, ranks), number + 1, ranks, soon)


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
