"""Meetings over TCP: what happens to them in the middle, and false numbers.

Most of it has its ranks in this process, each wire used by a thread, as `make_wires` joins them:
then a test can write to any page, and cut any connection.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import pytest
import torch
from wire_clauses import ANY_WIRE, PROCESSES, clauses
from wire_ranks import make, make_wires, mixed, on_new_processes, on_threads, status_of, swap_often

from weft.base.pace import patient
from weft.kernels import jit
from weft.kernels.page import BEGUN, DEPTH, ENTRIES, ENTRY, LINE, READ
from weft.wire.interface import MEETS, Failure, WireFailed
from weft.wire.tcp import meeting, shm

SOON = 20.0  # seconds in which what must come comes, on an idle machine

pytestmark = pytest.mark.skipif(jit.loops() is None, reason="there is no machine code here")


# whose waits and closes go through the code that sleeps while ranks meet
WAITS = ["timeouts", "aborts", "closes", "dies", "forks", "signals"]


@clauses([each for each in (*ANY_WIRE, *PROCESSES) if each[1].__name__ in WAITS])
def test_messages_go_as_before_where_ranks_meet(size, body):
    dies = [1] if body.func.__name__ in ("dies", "forks") else []
    on_new_processes(size, body, make_with_one_under_way, dies)


def test_a_meeting_that_never_came_about_leaves_nothing(nothing_left):
    with nothing_left():
        on_threads(2, swap_often, functools.partial(make_wires, make_with_one_under_way))


def make_with_one_under_way(start):
    """Each sleep is one that peers look at, since there is a meeting that never comes about."""
    wire = make(start)
    for peer in range(wire.rank + 1, wire.size):
        wire.meet(b"", [wire.rank, peer])
    return wire


# how ranks of this process meet


@pytest.fixture
def wires():
    """`wires(size)` is so many wires whose ranks may meet."""
    made = []

    def some(size, factory=make):
        found = make_wires(factory, size)
        made.extend(found)
        return found

    yield some
    for wire in made:
        wire.close()


def together(wires, body, seconds=SOON):
    """`body(wire)` in a thread for each; their results. What hangs is aborted, and fails."""
    with ThreadPoolExecutor(len(wires)) as threads:
        running = [threads.submit(body, wire) for wire in wires]
        ended, _ = wait(running, patient(seconds), FIRST_EXCEPTION)
        for wire, each in zip(wires, running, strict=True):
            if each not in ended:
                wire.abort(Failure("aborted", None, "the test gave it up"))
        for each in ended:
            each.result()  # of what was raised first
        return [each.result() for each in running]


def failed(use):
    """The failure that something raises."""
    with pytest.raises(WireFailed) as caught:
        use()
    return caught.value.failure


def kind_of(failure):
    return failure.kind, failure.peer


def meet_all(wire, message=b"hello", times=1):
    ranks = [*range(wire.size)]
    for _ in range(times):
        messages = wire.meet(message, ranks).wait(patient(SOON))
    return messages


def lines(wire):
    """The addresses of a wire's own lines, by peer, and how numbers are stored there."""
    meetings = wire.meetings
    return {peer: meetings.line(wire.rank, peer) for peer in wire.near}, jit.loops()["put"]


# who may


@pytest.mark.parametrize("reason", ["a segment", "room"])
def test_ranks_meet_if_all_may(wires, monkeypatch, reason):
    if reason == "room":
        monkeypatch.setattr(meeting, "MEETS", 1 << 30)
    else:
        calls = itertools.count()
        make_segment = shm.Segment.make
        monkeypatch.setattr(
            shm.Segment, "make", lambda **given: make_segment(**given) if next(calls) else None
        )
    for wire in wires(3):
        assert wire.near == {wire.rank}
        assert wire.meetings is None


def test_ranks_of_one_host_meet_in_a_wire_over_several(wires):
    some = wires(5, mixed)
    assert [sorted(wire.near) for wire in some] == [[0, 1], [0, 1], [2, 3], [2, 3], [4]]

    def body(wire):
        ranks = sorted(wire.near)
        for _ in range(50):
            found = wire.meet(bytes([wire.rank]), ranks).wait(patient(SOON))
            assert found == [bytes([rank]) for rank in ranks]
        with pytest.raises(ValueError, match=r"rank \d cannot meet ranks \[0, 1, 2, 3, 4\]: pass"):
            wire.meet(b"", [0, 1, 2, 3, 4])

    together(some[:4], body)


# what happens in the middle


def test_a_cut_connection_is_a_loss_and_what_was_told_before_comes(wires):
    first, second = wires(2)
    together([first, second], meet_all)
    second.meet(b"last", [0, 1])
    for each in (first, second):
        each.connections[1 - each.rank].sock.shutdown(socket.SHUT_RDWR)
    assert first.meet(b"too late", [0, 1]).wait(patient(SOON)) == [b"too late", b"last"]
    assert kind_of(failed(first.meet(b"", [0, 1]).wait)) == ("lost", 1)
    second.meet(b"", [0, 1])  # it has come to hear the first two, and to miss the third
    assert kind_of(failed(lambda: meet_all(second, times=5))) == ("lost", 0)


def test_what_a_peer_left_before_a_ring_found_it_gone_comes(wires, monkeypatch):
    """It leaves something, and leaves, between two looks of this rank at what there is."""
    first, second, third = wires(3)
    pending = first.meet(b"", [0, 1, 2])
    move = first.meetings.move

    def moves():
        found = move()
        if second.failure() is None:
            for wire in (second, third):
                wire.meet(b"here", [0, 1, 2])
            second.close()
            while not first.connections[1].lost:
                first.ring(1)  # as if it had seen the peer asleep
        return found

    monkeypatch.setattr(first.meetings, "move", moves)
    assert pending.wait(patient(SOON)) == [b"", b"here", b"here"]


ENDS = {
    "cut": (lambda one, two: two.connections[0].sock.shutdown(socket.SHUT_RDWR), ("lost", 1)),
    "abort": (lambda one, two: one.abort(Failure("aborted", 1, "it died")), ("aborted", 1)),
    "close": (lambda one, two: one.close(), ("aborted", None)),
}


@pytest.mark.parametrize(("end", "kind"), ENDS.values(), ids=ENDS)
def test_what_ends_a_sleep(wires, end, kind):
    first, second = wires(2)
    early = first.meet(b"", [0, 1])
    second.meet(b"", [0, 1])
    early.wait(patient(SOON))
    pending = first.meet(b"", [0, 1])
    slept = first.meetings.sleep_count
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(failed, functools.partial(pending.wait, patient(SOON)))
        while first.meetings.sleep_count == slept:
            time.sleep(0.01)
        end(first, second)
        assert kind_of(waiting.result()) == kind
    assert early.wait(0) == [b"", b""]
    assert kind_of(failed(lambda: first.meet(b"", [0, 1]))) == kind


@pytest.mark.parametrize("where", ["announce", "find", "confirm"])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_what_is_raised_within_a_meeting_breaks_the_wire(wires, monkeypatch, where, raised):
    first, second = wires(2)
    together([first, second], meet_all)
    second.meet(b"here", [0, 1])

    def raises(*_):
        raise raised

    monkeypatch.setitem(first.meetings.loops, where, raises)
    for name in ("find", "confirm"):
        monkeypatch.setattr(first.meetings, name, first.meetings.loops[name])
    with pytest.raises(raised):
        first.meet(b"", [0, 1]).wait(patient(SOON))
    assert kind_of(first.failure()) == ("broken", 0)
    assert kind_of(failed(lambda: first.meet(b"", [0, 1]))) == ("broken", 0)


@pytest.mark.parametrize("where", ["announce", "find", "confirm", "reached", "put"])
def test_the_handler_of_a_signal_may_close_the_wire_anywhere(wires, monkeypatch, where):
    """Its memory stays mapped until what it has interrupted is through."""
    first, second = wires(2)
    together([first, second], meet_all)
    if where != "put":
        second.meet(b"here", [0, 1])
    meetings = first.meetings
    real = meetings.loops[where]

    def closes(*args):
        if first.failure() is None:
            first.close()
        return real(*args)

    monkeypatch.setitem(meetings.loops, where, closes)
    for name in ("find", "confirm", "reached"):
        monkeypatch.setattr(meetings, name, meetings.loops[name])
    try:
        first.meet(b"", [0, 1]).wait(patient(SOON))  # it may have been through
    except WireFailed as error:
        assert kind_of(error.failure) == ("aborted", None)
    assert kind_of(first.failure()) == ("aborted", None)


def test_a_close_in_another_thread_while_ranks_meet(wires):
    some = wires(3)

    def body(wire):
        if wire.rank == 2:
            threading.Timer(0.2, wire.close).start()
        return failed(lambda: meet_all(wire, times=10**9))

    kinds = {kind_of(each) for each in together(some, body)}
    # who is told that another has left may leave before the third has seen it
    assert ("aborted", None) in kinds
    assert kinds <= {("aborted", None), ("lost", 2), ("lost", 1), ("lost", 0)}


def freezes(wire):
    """Rank 1 is stopped, in the middle of its meetings; the others wait, and go on."""
    ranks = [*range(wire.size)]
    pids = [int(each) for each in wire.meet(str(os.getpid()).encode(), ranks).wait(patient(SOON))]
    if wire.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
    has_waited = False
    for _ in range(100):
        pending = wire.meet(b"", ranks)
        until = time.monotonic() + patient(SOON)
        while pending.waiting_for():
            assert time.monotonic() < until, f"it waits for {pending.waiting_for()}"
            with contextlib.suppress(TimeoutError):
                pending.wait(0.5)
                continue
            assert wire.failure() is None
            if wire.rank == 0 and not has_waited and 1 in pending.waiting_for():
                has_waited = True
                os.kill(pids[1], signal.SIGCONT)
        assert pending.wait(0) == [b""] * wire.size
    assert has_waited or wire.rank, "it met a rank that was stopped"


def test_a_rank_that_is_stopped_is_waited_for_and_named():
    on_new_processes(3, freezes)


def test_meetings_go_on_without_room_while_messages_are_waited_for(wires):
    """A wait for a message reads what peers leave, and so gives them room."""

    def body(wire):
        ranks = [0, 1]
        pending = [wire.meet(bytes([number]), ranks) for number in range(3 * DEPTH)]
        if wire.rank == 0:
            assert pending[-1].wait(patient(SOON)) == [bytes([3 * DEPTH - 1])] * 2
            wire.post([(1, torch.ones(1))]).wait(patient(SOON))
        else:
            wire.post((), [(0, torch.zeros(1))]).wait(patient(SOON))
        for number, each in enumerate(pending):
            assert each.wait(patient(SOON)) == [bytes([number])] * 2

    for _ in range(5):
        together(wires(2), body)


def test_many_sets_of_ranks_are_forgotten(wires, monkeypatch):
    monkeypatch.setattr(meeting, "SETS", 3)

    def body(wire):
        for ranks in itertools.chain(*[itertools.permutations(range(3))] * 5):
            found = wire.meet(bytes([wire.rank]), ranks).wait(patient(SOON))
            assert found == [bytes([rank]) for rank in ranks]
        return len(wire.meetings.peers_of)

    assert max(together(wires(3), body)) <= 3


# deadlocks: all are found, and nothing else is taken for one


def calls_of(generator, size):
    """Who meets, call by call, on each rank; on some of them two calls are exchanged."""
    most = generator.choice((2, 2, size))
    every = [sorted(generator.sample(range(size), generator.randint(2, most))) for _ in range(12)]
    calls = [[ranks for ranks in every if rank in ranks] for rank in range(size)]
    for rank in generator.sample(range(size), generator.randint(0, size)):
        if len(calls[rank]) > 1:
            place = generator.randrange(len(calls[rank]) - 1)
            calls[rank][place : place + 2] = calls[rank][place + 1], calls[rank][place]
    return calls


def comes_to_an_end(calls):
    """Whether a program does whose ranks wait for each call."""
    places = [0] * len(calls)

    def begun(rank, other):
        return sum(other in each for each in calls[rank][: places[rank] + 1])

    def goes_on(rank):
        if places[rank] == len(calls[rank]):
            return False
        peers = set(calls[rank][places[rank]]) - {rank}
        return all(begun(peer, rank) >= begun(rank, peer) for peer in peers)

    while ready := [*filter(goes_on, range(len(calls)))]:
        places[ready[0]] += 1
    return places == [*map(len, calls)]


def test_deadlocks_are_found_and_nothing_else(wires):
    ends = []
    for seed in range(60):
        generator = random.Random(seed)
        calls = calls_of(generator, 4)
        ends.append(comes_to_an_end(calls))
        some = wires(4)

        def body(wire, seed=seed, calls=calls):
            pauses = random.Random(7 * seed + wire.rank)
            try:
                for ranks in calls[wire.rank]:
                    if pauses.random() < 0.2:
                        time.sleep(pauses.random() * 0.003)
                    wire.meet(b"x" * 100, ranks).wait()
            except WireFailed as error:
                wire.close()  # as no group tells the others
                return error.failure.kind
            return ""

        kinds = together(some, body)
        for wire in some:
            wire.close()
        if ends[-1]:
            assert kinds == [""] * 4, (seed, kinds)
        else:
            assert "stuck" in kinds and {*kinds} <= {"", "stuck", "lost"}, (seed, kinds)
    assert 10 < sum(ends) < 50  # of both kinds


def test_who_has_something_to_post_is_in_no_circle(wires):
    """Ranks 0 and 1 sleep for each other, until rank 2 gives room for what rank 1 awaits."""
    some = wires(3)

    def body(wire):
        if wire.rank == 2:
            while not all(each.meetings.sleep_count for each in some[:2]):
                time.sleep(0.01)
        pairs = [wire.meet(b"", [0, 2]) for _ in range(DEPTH) if wire.rank != 1]
        shared = wire.meet(b"", [0, 1, 2])
        if wire.rank == 1:
            shared.wait()
        if wire.rank != 2:
            wire.meet(b"", [0, 1]).wait()
        for each in (*pairs, shared):
            each.wait()

    together(some, body)


# false numbers


@pytest.mark.parametrize(
    ("word", "number"),
    [
        (BEGUN, 1 << 40),
        (BEGUN, -1),
        (READ, 1 << 40),
        (READ, -(1 << 63)),
        (ENTRIES + ENTRY * (2 % DEPTH), 1 << 40),
        (ENTRIES + ENTRY * (2 % DEPTH), -1),
        (ENTRIES + ENTRY * (2 % DEPTH) + 8, 1 << 40),
        (ENTRIES + ENTRY * (2 % DEPTH) + 8, -1),
    ],
)
def test_numbers_that_cannot_be_name_who_wrote_them(wires, word, number):
    first, second = wires(2)
    together([first, second], meet_all)
    own_lines, put = lines(second)
    is_of_entry = word >= ENTRIES
    if is_of_entry:
        second.meet(b"here", [0, 1])
    put(own_lines[0] + word, number)
    found = failed(lambda: meet_all(first, times=2))
    assert kind_of(found) == ("garbled", 1), found


def test_what_changes_between_check_and_use_is_not_used(wires, monkeypatch):
    first, second = wires(2)
    together([first, second], meet_all)
    own_lines, put = lines(second)
    find = first.meetings.find

    def changes(line, number, entry):
        found = find(line, number, entry)
        if found:
            for word in range(2):  # once the words are copied, and before any is checked or used
                put(own_lines[0] + ENTRIES + ENTRY * (number % DEPTH) + 8 * word, 1 << 50)
        return found

    monkeypatch.setattr(first.meetings, "find", changes)
    for number in range(20):
        late = second.meet(bytes([number]) * 1000, [0, 1])
        message = first.meet(b"", [0, 1]).wait(patient(SOON))[1]
        assert message == bytes([number]) * 1000
        late.wait(patient(SOON))


def test_garbage_on_a_page_harms_nobody_but_who_meets_its_writer(wires):
    """A thread writes over a rank's page and slots while all meet: no crash, right bytes between
    the others, and none of them is blamed."""
    for seed in range(6):
        some = wires(4)
        meetings = some[3].meetings  # so that the page stays mapped until the end
        base = meetings.page(3)
        put = jit.loops()["put"]
        ended = threading.Event()

        def spoil(seed=seed, base=base, put=put, ended=ended):
            generator = random.Random(seed)
            while not ended.wait(generator.choice((0, 1e-4))):
                words = generator.choice((LINE * 5, 2 * MEETS))
                address = base + generator.randrange(words) // 8 * 8
                put(address, generator.choice((-1, 1 << 62, 5, generator.getrandbits(62))))

        def body(wire):
            honest = [0, 1, 2]
            try:
                for number in range(100_000):
                    if wire.rank < 3:
                        message = bytes([number % 256, wire.rank]) * 700
                        found = wire.meet(message, honest).wait(2.0)
                        assert found == [bytes([number % 256, rank]) * 700 for rank in honest]
                    wire.meet(b"all", range(4)).wait(2.0)
            except (WireFailed, TimeoutError) as error:
                wire.close()
                return getattr(error, "failure", None)

        spoiler = threading.Thread(target=spoil)
        spoiler.start()
        try:
            failures = together(some, body, 60.0)
        finally:
            ended.set()
            spoiler.join()
        for rank, failure in enumerate(failures[:3]):
            assert failure is None or failure.kind != "garbled" or failure.peer == 3, (
                rank,
                failure,
            )


def test_a_forked_child_touches_nothing_though_a_thread_of_its_parent_waits(wires):
    first, second = wires(2)
    pending = first.meet(b"", [0, 1])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pending.wait)  # which holds the wire's lock
        while not first.meetings.sleep_count:
            time.sleep(0.01)
        child = os.fork()
        if child == 0:
            try:
                for use in (functools.partial(first.meet, b"", [0, 1]), pending.wait):
                    assert failed(use).text == "this process was forked"
                os._exit(0)
            finally:
                os._exit(1)
        status = status_of(child)
        assert second.meet(b"", [0, 1]).wait(patient(SOON)) == [b""] * 2
        assert waiting.result(patient(SOON)) == [b""] * 2
    assert status == 0
