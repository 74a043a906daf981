"""`weft.failure.detector`: one detector, whose peers are the test."""

from __future__ import annotations

import functools
import json
import logging
import math
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from weft import WireError
from weft.base.pace import patient
from weft.failure import detector, links
from weft.failure.detector import Detector, line_of
from weft.failure.links import News, SocketLinks
from weft.failure.verdict import Entered, Place, Verdict


class Wait:
    """A wait for one peer."""

    opens = False

    def __init__(self, peer):
        self._peer = peer

    def peer(self):
        return self._peer

    def awaited(self):
        return [self._peer]


def called(number, name):
    """A call of all ranks that a rank has come to."""
    return Entered("all 3 ranks", number, name)


HISTORY = (called(6, "sparse_all_reduce"), called(7, "barrier"))


def until(condition):
    """Wait until something is so."""
    late = time.monotonic() + patient(10.0)
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.001)


def place(calls, doing="", awaits=None, seconds=9.0, raised="", last=""):
    """Where a rank is, as it says so, also as it leaves; `last`: the call that it was in before."""
    awaited = [] if awaits is None else [awaits]
    entered = called(calls, doing) if doing else None
    history = [called(calls, doing or last)] if calls else []
    return [calls, doing, awaits, seconds, raised, "", awaited, entered, False, history, ""]


RAISED = place(6, raised="KeyError: 7")
"""A rank that leaves after an error."""


class LateLinks:
    """Links whose thread comes late to their reader, as that of a process that was stopped."""

    def __init__(self, inside):
        self._inside = inside
        self.pauses = []
        self.paused = 0.0  # when the last pause began
        for name in ("peers", "send", "wake", "close", "abandon"):
            setattr(self, name, getattr(inside, name))

    def start(self, reader):
        self._reader = reader
        self.due = reader.due
        self.fail = reader.fail
        self._inside.start(self)

    def handle(self, news, late):
        pause = 0.0
        if self.pauses:
            self.paused = time.monotonic()
            pause = self.pauses.pop(0)
        time.sleep(pause)
        self._reader.handle(news, late + pause)


class Peers:
    """Ranks 1 and 2 of three, as rank 0 sees them."""

    def __init__(self, stack, timeout=20.0, slow=math.inf, global_ranks=None):
        self.ends = {}
        mesh = {}
        for peer in (1, 2):
            mesh[peer], self.ends[peer] = socket.socketpair()
            mesh[peer].setblocking(False)
            self.ends[peer].settimeout(10.0)
            stack.callback(self.ends[peer].close)
        self.cuts = []
        self.unread = {1: b"", 2: b""}
        self.fault = None  # what rank 0 is sure of
        self.links = LateLinks(SocketLinks(mesh))
        self.watch = Detector(0, timeout, self.links, slow, global_ranks=global_ranks)
        self.watch.start()
        self.watch.progress = lambda: lambda: Place(7, "barrier", None, 0.0, entered=HISTORY[-1])
        self.watch.history = HISTORY
        self.watch.guard(self.end_waits, lambda: self.fault)
        stack.callback(self.watch.close)

    def end_waits(self, verdict):
        """As the session whose waits the detector looks after."""
        assert verdict == self.watch.verdict
        self.cuts.append(time.monotonic())

    def say(self, peer, **message):
        self.ends[peer].sendall(line_of(message))

    def answer(self, peer, where):
        """Say where a peer is, once it is asked."""
        self.say(peer, here=where, to=self.hear(peer)["ask"])

    def leave(self, peer, where):
        """Say bye for a peer, and wait until that is heard."""
        self.say(peer, bye=where)
        until(lambda: peer in self.watch.leavers)

    def hear(self, peer):
        while b"\n" not in self.unread[peer]:
            data = self.ends[peer].recv(4096)
            if not data:
                return {}
            self.unread[peer] += data
        line, _, self.unread[peer] = self.unread[peer].partition(b"\n")
        return json.loads(line)

    def settled(self):
        until(lambda: self.cuts)  # the waits are ended just after the verdict is known
        assert self.watch.verdict is not None
        return self.watch.verdict


LATE = detector.LATE


@pytest.fixture(autouse=True)
def is_never_paused(monkeypatch):
    """But where a test pauses it: on a busy machine any thread comes late."""
    monkeypatch.setattr(detector, "LATE", math.inf)


@pytest.fixture
def may_be_paused(is_never_paused, monkeypatch):
    monkeypatch.setattr(detector, "LATE", patient(LATE))


@pytest.fixture
def peers(later):  # which ends after them
    with ExitStack() as stack:
        yield functools.partial(Peers, stack)


@pytest.fixture
def later():
    """`later(do, *given)` calls something in a thread; the future of what it returns."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def test_the_end_of_a_socket_is_a_death_that_all_hear_of(peers):
    three = peers()
    three.ends[2].close()
    assert three.settled() == Verdict(2, "rank 2 died")
    assert three.hear(1) == {"verdict": [2, "rank 2 died"]}
    three.watch.settle(Verdict(1, "something else"))
    assert three.watch.verdict == Verdict(2, "rank 2 died"), "the first wins"
    three.watch.close()
    assert len(three.cuts) == 1


def test_a_verdict_says_which_rank_of_the_job_is_to_blame_here_and_in_the_log(peers, caplog):
    three = peers(global_ranks=[4, 6, 9])
    three.ends[2].close()
    remedy = "start the group again (rank 2 of this group is rank 9 of the job)"
    assert three.settled() == Verdict(2, "rank 2 died", remedy)
    assert three.hear(1) == {"verdict": [2, "rank 2 died"]}
    until(lambda: caplog.messages)
    assert caplog.messages == [f"rank 0: rank 2 died; {remedy}"]


def test_a_reset_is_a_death(peers):
    three = peers()
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as far:
        near, _ = listener.accept()
        near.setblocking(False)
        with ExitStack() as stack:
            watch = Detector(0, 20.0, SocketLinks({1: near}))
            watch.start()
            stack.callback(watch.close)
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
            far.close()
            until(lambda: watch.verdict)
            assert watch.verdict == Verdict(1, "rank 1 died")
    assert three.watch.verdict is None


def test_a_goodbye_is_no_death(peers):
    three = peers()
    three.say(2, bye=place(7))
    three.ends[2].close()
    three.say(1, ask=1)
    assert "here" in three.hear(1)  # so all before was read
    assert three.watch.verdict is None and list(three.watch.leavers) == [2]


def test_a_verdict_is_passed_on(peers):
    three = peers()
    three.say(1, verdict=[2, "rank 2 gave up: no memory left"])
    assert three.settled() == Verdict(2, "rank 2 gave up: no memory left")
    assert three.hear(2) == {"verdict": [2, "rank 2 gave up: no memory left"]}


@pytest.mark.parametrize("line", [b"7", b"nonsense", b"[" * 9999, b'{"bye": 1}'])
def test_nonsense_breaks_the_wire_and_names_who_says_it(peers, line):
    three = peers()
    three.ends[1].sendall(line + b"\n")
    assert three.settled().culprit == 1
    assert three.hear(2)["verdict"][0] == 1


def agree(three, own=True):
    """What rank 0 does, which says yes or no."""
    return three.watch.agree(own, time.monotonic() + three.watch.timeout)


@pytest.mark.parametrize("said", [(True, True, True), (True, False, True), (False, True, True)])
def test_ranks_agree_if_all_say_yes(peers, later, said):
    three = peers()
    found = later(agree, three, said[0])
    assert three.hear(1) == three.hear(2) == {"agrees": said[0]}
    for peer in (2, 1):
        assert not found.done()
        three.say(peer, agrees=said[peer])
    assert found.result(10.0) == all(said)


@pytest.mark.parametrize(
    ("fault", "culprit", "text"),
    [
        ("death", 2, "rank 2 died"),
        ("leave", 2, "rank 2 left, after it raised (KeyError: 7)"),
        ("absence", 2, "rank 2 did not come to make the wire within 1 s"),
        ("silence", 2, "rank 2 does not answer"),
        ("nonsense", 2, "rank 2 sent what no detector says"),
    ],
)
def test_ranks_that_agree_end_with_who_is_to_blame(peers, later, fault, culprit, text):
    three = peers(1.0 if fault in ("absence", "silence") else 20.0)
    found = later(agree, three)
    three.say(1, agrees=True)
    if fault == "death":
        three.ends[2].close()
    elif fault == "leave":
        three.say(2, bye=RAISED)
    elif fault == "nonsense":
        three.ends[2].sendall(b"no line of JSON\n")
    else:
        for peer in (1, 2) if fault == "absence" else (1,):
            assert "agrees" in three.hear(peer)
            three.answer(peer, place(0))
    error = found.exception(10.0)
    assert isinstance(error, WireError) and error.culprit == culprit
    assert text in str(error)


def test_what_comes_at_the_last_moment_is_heard(peers, later):
    """At the deadline ranks are asked where they are, and those have come that saw it end."""
    three = peers(0.1)
    found = later(agree, three)
    three.say(1, agrees=True)
    for peer in (1, 2):
        assert "agrees" in three.hear(peer)
        three.answer(peer, place(0, awaits=0))
    three.say(2, agrees=True)
    assert found.result(10.0)
    assert three.watch.verdict is None


def test_it_tells_where_it_is(peers):
    three = peers()
    three.say(1, ask=3)
    here = three.hear(1)["here"]
    calls, doing, awaits, seconds, raised, at, awaited, entered, *rest = here
    opens, history, elsewhere, prepares = rest
    assert (calls, doing, awaits, raised, awaited) == (7, "barrier", None, "", [])
    assert seconds >= 0 and ":" in at
    assert history == [list(each) for each in HISTORY]
    assert (entered, opens, elsewhere, prepares) == (history[-1], False, "", "")
    three.watch.begin(Wait(2))
    three.say(1, ask=4)
    heard = three.hear(1)
    assert heard["here"][2] == 2 and heard["here"][6] == [2] and heard["to"] == 4
    assert heard["here"][8] is False
    three.watch.end()
    opening = Wait(2)
    opening.opens = True
    three.watch.begin(opening)
    three.say(1, ask=5)
    assert three.hear(1)["here"][8] is True


def test_what_it_tells_of_a_wait_and_of_its_call_is_of_one_moment(peers):
    """Not the call of a wait that has ended by then beside the next one, which opens another."""
    three = peers()
    before, after = Wait(1), Wait(2)
    after.opens = True
    calls = [called(7, "barrier"), called(8, "all_reduce")]
    three.watch.history = (calls[0],)
    three.watch.begin(before)
    asked = threading.Event()
    has_gone_on = threading.Event()

    def how_far():
        """How far this rank is; as that is asked for the first time, it comes to the next call."""
        if three.watch.waiting.wait is before:
            asked.set()
            assert has_gone_on.wait(10.0)
            return Place(7, "barrier", None, 0.0, entered=calls[0])
        return Place(8, "all_reduce", None, 0.0, entered=calls[1])

    three.watch.progress = lambda: how_far
    three.say(1, ask=1)
    assert asked.wait(10.0)
    three.watch.end()
    three.watch.history = tuple(calls)
    three.watch.begin(after)
    has_gone_on.set()
    here = three.hear(1)["here"]
    assert (here[0], here[2], here[7], here[8]) == (8, 2, list(calls[1]), True)
    assert here[9] == [list(each) for each in calls]


def test_at_the_deadline_it_asks_and_the_silent_is_named(peers):
    three = peers(0.3)
    began = time.monotonic()
    three.watch.begin(Wait(1))
    three.answer(1, place(7, "barrier", 2))
    assert "ask" in three.hear(2)
    assert three.settled().text.startswith("rank 2 does not answer")
    assert three.cuts[0] - began > 0.3 + detector.ANSWER - 0.05, "it had less time to answer"


def test_at_the_deadline_the_one_that_is_behind_is_named(peers):
    three = peers(0.3)
    three.watch.begin(Wait(1))
    three.answer(1, place(7, "barrier", 2))
    three.answer(2, place(6))
    assert three.settled().culprit == 2
    assert three.watch.verdict.text.startswith("rank 2 has not entered call 7 (barrier)")


def test_a_wait_that_ends_while_ranks_are_asked_is_forgotten(peers):
    three = peers(0.2)
    three.watch.begin(Wait(1))
    assert "ask" in three.hear(1)
    three.watch.end()
    time.sleep(patient(detector.ANSWER) + 0.5)
    assert three.watch.verdict is None
    three.watch.begin(Wait(1))
    assert "ask" in three.hear(1)  # the next one is looked after, too


def test_a_wait_has_its_whole_time_however_late_it_begins(peers):
    three = peers(0.4)
    time.sleep(0.3)
    began = time.monotonic()
    three.watch.begin(Wait(1))
    assert "ask" in three.hear(1)
    assert time.monotonic() - began >= 0.4


def test_of_two_threads_that_wait_each_has_its_deadline(peers):
    """One wait that begins, or ends, hides no other."""
    three = peers(1.0)
    began = time.monotonic()
    three.watch.begin(Wait(1))
    for _ in range(2):
        other = threading.Thread(target=lambda: (three.watch.begin(Wait(2)), three.watch.end()))
        other.start()
        other.join()
    assert three.watch.waiting.wait.peer() == 1
    for peer in (1, 2):
        assert "ask" in three.hear(peer)
        three.say(peer, here=place(6), to=1)
    assert three.settled().culprit == 1
    assert time.monotonic() - began < 10.0
    three.watch.end()
    assert three.watch.waiting is None


def test_a_wait_that_ends_while_its_rank_is_judged_was_not_late(peers):
    three = peers(1.0)
    three.watch.begin(Wait(1))
    asks = [three.hear(peer)["ask"] for peer in (1, 2)]
    asked = threading.Event()
    has_ended = threading.Event()

    def how_far():
        asked.set()
        assert has_ended.wait(10.0)
        return Place(7, "barrier", None, 0.0, entered=HISTORY[-1])

    three.watch.progress = lambda: how_far
    for peer, ask in zip((1, 2), asks, strict=True):
        three.say(peer, here=place(6), to=ask)
    assert asked.wait(10.0)
    three.watch.end()
    has_ended.set()
    three.say(1, ask=7)
    assert three.hear(1)["to"] == 7  # what comes after the judgement
    assert three.watch.verdict is None


def test_waits_of_another_thread_put_off_no_deadline_though_the_reader_is_late(
    peers, may_be_paused
):
    three = peers(0.1)
    three.links.pauses = [detector.LATE + 0.1] * 100
    three.watch.begin(Wait(1))
    is_over = threading.Event()

    def waits():
        while not is_over.is_set():
            three.watch.begin(Wait(2))
            time.sleep(0.05)
            three.watch.end()

    other = threading.Thread(target=waits)
    other.start()
    try:
        assert three.settled().text.startswith("rank 0 hears none of the others")
    finally:
        is_over.set()
        other.join()
        three.links.pauses.clear()


def test_a_rank_that_was_paused_itself_forgets_what_it_missed(peers, may_be_paused):
    three = peers(0.3)
    three.links.pauses = [detector.LATE + 0.5]
    three.links.wake()
    three.watch.begin(Wait(1))
    until(lambda: not three.links.pauses)
    assert "ask" in three.hear(1)
    so_far = time.monotonic() - three.links.paused
    assert so_far > detector.LATE + 0.75, "the pause was counted"


def test_a_thread_that_is_late_each_time_was_not_paused(peers, may_be_paused):
    """As where another thread of the program hardly ever gives up the GIL."""
    three = peers(0.1)
    three.links.pauses = [detector.LATE + 0.1] * 100
    three.watch.begin(Wait(1))
    assert "ask" in three.hear(1)
    assert three.settled().text.startswith("rank 0 hears none of the others")
    three.links.pauses.clear()


@pytest.mark.parametrize("overdue", [False, True])
def test_a_failed_wait_is_explained_by_what_is_found_out(peers, later, may_be_paused, overdue):
    """One that lasted too long, as where this rank was paused in it, is no failure of the link."""
    three = peers(3.0 if overdue else 20.0)
    wait = Wait(1)
    three.watch.begin(wait)
    if overdue:
        three.links.pauses = [3.2]
        three.links.wake()
        until(lambda: time.monotonic() > three.links.paused + 3.2 > 3.2)
    found = later(three.watch.explain, 1, "reset", wait)
    for peer, where in ((1, place(7, "barrier", 2)), (2, place(6))):
        three.answer(peer, where)
    absent = "rank 2 has not entered call 7 (barrier): it has been outside weft for 9.0 s"
    failed = Verdict(1, "the link between rank 0 and rank 1 failed (reset)")
    assert found.result(10.0) == (Verdict(2, absent) if overdue else failed)


def test_a_failed_wait_is_asked_about_though_an_older_one_was_just_now(peers, later):
    three = peers(slow=1.0)
    three.watch.begin(Wait(1))
    for peer in (1, 2):
        assert "ask" in three.hear(peer)  # a second is over
    three.watch.end()
    wait = Wait(1)
    three.watch.begin(wait)
    found = later(three.watch.explain, 1, "reset", wait)
    three.answer(1, place(7, "barrier"))
    text = found.result(10.0).text
    assert "rank 2 does not answer" in text or "ranks 1 and 2 do not" in text


def test_a_failed_wait_for_one_that_left_says_so(peers):
    three = peers()
    three.leave(1, RAISED)
    wait = Wait(1)
    left = Verdict(1, "rank 1 left, after it raised (KeyError: 7)")
    assert three.watch.explain(1, "reset", wait) == left


@pytest.mark.parametrize(
    ("bye", "culprit", "text"),
    [
        (RAISED, 2, "rank 2 left, after it raised (KeyError: 7)"),
        (place(7, last="barrier"), None, "a link of rank 0 failed (closed)"),
    ],
)
def test_a_round_that_failed_is_explained_by_one_that_left_before_it_was_through(
    peers, later, bye, culprit, text
):
    """No library that carries a device's tensors says whose link it is."""
    three = peers()
    wait = Wait(1)
    wait.awaited = lambda: [1, 2]
    three.watch.begin(wait)
    three.leave(2, bye)
    found = later(three.watch.explain, None, "closed", wait)
    if culprit is None:
        three.answer(1, place(7, "barrier"))
    assert found.result(10.0) == Verdict(culprit, text)


def test_a_failed_wait_for_one_whose_bye_comes_late_says_so(peers, later):
    three = peers()
    wait = Wait(1)
    three.watch.begin(wait)
    found = later(three.watch.explain, 1, "reset", wait)
    assert "ask" in three.hear(1)
    three.say(1, bye=RAISED)
    three.answer(2, place(7, "barrier"))
    assert found.result() == Verdict(1, "rank 1 left, after it raised (KeyError: 7)")


def test_a_circle_is_explained_though_the_thread_of_the_links_is_slow(monkeypatch, peers, later):
    monkeypatch.setattr(detector, "ANSWER", 0.3)
    three = peers()
    three.links.pauses = [0.6] * 10
    found = later(three.watch.explain_circle, [0, 1], Verdict(None, "something else"))
    three.answer(1, place(7, "barrier"))  # and 2 is in none
    text = found.result().text
    assert "rank 0 is" in text and "rank 1 is in call 7 (barrier)" in text, text


def test_who_waits_for_a_judgement_ends_with_the_verdict_though_its_news_was_interrupted(
    peers, later
):
    three = peers()

    def end_waits(verdict):
        raise KeyboardInterrupt

    three.watch.guard(end_waits, lambda: None)
    began = time.monotonic()
    found = later(three.watch.explain, 1, "reset", None)
    assert "ask" in three.hear(1)
    with pytest.raises(KeyboardInterrupt):
        three.watch.settle(Verdict(0, "rank 0 was interrupted"))
    assert found.result() == Verdict(0, "rank 0 was interrupted")
    assert time.monotonic() - began < 2 * patient(detector.ANSWER) + 3.0


def test_a_failed_wait_is_explained_though_the_thread_of_the_links_is_slow(peers, later):
    three = peers()
    three.links.pauses = [0.5] * 10
    wait = Wait(1)
    three.watch.begin(wait)
    found = later(three.watch.explain, 1, "reset", wait)
    three.answer(1, place(7, "barrier"))
    assert found.result().text.startswith("rank 2 does not answer")


@pytest.mark.parametrize(("late", "asks"), [(math.inf, 1), (0.3, 2)])
def test_a_failed_call_of_another_library_is_explained_though_the_thread_is_slow(
    monkeypatch, peers, later, late, asks
):
    """Ranks are asked once more by a thread that is so late that it may have been paused."""
    monkeypatch.setattr(detector, "LATE", late)
    three = peers()
    three.links.pauses = [0.5] * 10
    found = later(three.watch.blame)
    for _ in range(asks):
        three.answer(1, place(7, "barrier"))
    assert found.result().text.startswith("rank 2 does not answer")


class StillLinks:
    """Links to ranks 1 and 2 that have no thread: a test calls their reader."""

    def __init__(self):
        self.sent = []
        self.woken = threading.Event()

    def peers(self):
        return [1, 2]

    def send(self, peer, data):
        self.sent.append((peer, json.loads(data)))

    def wake(self):
        self.woken.set()


def test_a_pause_before_ranks_are_asked_lets_them_be_asked_again_after_the_next(
    monkeypatch, may_be_paused, later
):
    """In which all may have been paused."""
    monkeypatch.setattr(detector, "ANSWER", 0.0)
    still = StillLinks()
    watch = Detector(0, 20.0, still)
    found = later(watch.blame)
    assert still.woken.wait(10.0)
    for _ in range(2):
        watch.handle([], detector.LATE + 1.0)
    _, second = (said["ask"] for peer, said in still.sent if peer == 1)
    answer = line_of({"here": place(7, "barrier"), "to": second})
    watch.handle([News(peer, answer) for peer in (1, 2)], 0.0)
    assert found.result() is None


@pytest.fixture
def blaming(monkeypatch, later):
    """A detector without a thread, which found nobody that has left, and then asked.

    With the future of what `blame` returns, and the answer of a rank that is well.
    """
    monkeypatch.setattr(detector, "ANSWER", 0.0)
    looked, real = threading.Event(), detector.leaver_to_blame

    def look(*args):
        looked.set()
        return real(*args)

    monkeypatch.setattr(detector, "leaver_to_blame", look)
    still = StillLinks()
    watch = Detector(0, 20.0, still)
    found = later(watch.blame)
    assert looked.wait(10.0)
    watch.handle([], 0.0)
    (asked,) = (said["ask"] for peer, said in still.sent if peer == 1)
    return watch, found, line_of({"here": place(7, "barrier"), "to": asked})


def test_a_bye_that_comes_while_ranks_are_asked_says_who_is_to_blame(blaming):
    """Its rank answers nothing, and so is not silent."""
    watch, found, answer = blaming
    watch.handle([News(2, line_of({"bye": RAISED})), News(1, answer)], 0.0)
    watch.handle([], 0.0)
    assert found.result() == Verdict(2, "rank 2 left, after it raised (KeyError: 7)")


def test_one_that_answered_and_then_left_is_not_to_blame_for_what_failed_before(blaming):
    """As where a call of another library fails on all, and one of them is the first to end."""
    watch, found, answer = blaming
    watch.handle([News(1, answer), News(2, answer)], 0.0)
    watch.handle([News(2, line_of({"bye": RAISED}))], 0.0)
    watch.handle([], 0.0)
    assert found.result() is None


def test_what_a_rank_is_sure_of_is_the_verdict_though_it_does_not_wait(peers):
    three = peers()
    three.fault = Verdict(2, "rank 2 sent no frame")
    three.say(1, ask=1)  # as others do who wait for this rank
    assert three.settled() == three.fault
    assert "here" in three.hear(1)
    assert three.hear(1) == {"verdict": [2, "rank 2 sent no frame"]}


def test_waits_that_begin_after_the_verdict_are_ended(peers):
    three = peers()
    three.watch.settle(Verdict(2, "rank 2 died"))
    ended = []
    three.watch.guard(ended.append, lambda: None)
    assert ended == [Verdict(2, "rank 2 died")]


def test_closing_lets_go_of_a_wait_that_was_looked_into(peers):
    """Its messages lie in the memory of peers, which would stay mapped."""
    three, wait = peers(0.1), Wait(1)
    three.watch.begin(wait)
    assert "ask" in three.hear(1)
    three.say(2, verdict=[1, "rank 1 does not answer"])
    three.settled()
    three.watch.end()
    three.watch.close()
    left = weakref.ref(wait)
    del wait
    assert left() is None


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, "rank 2 does not answer (stopped, cut off, or stuck in foreign code)"),
        ({"bye": RAISED}, "rank 2 left, after it raised (KeyError: 7)"),
        ({"bye": place(7, "barrier")}, "rank 2 left"),
        ({"here": place(6)}, None),
    ],
)
def test_a_failed_call_of_another_library_is_explained_by_who_is_silent(peers, later, said, found):
    three = peers()
    if "bye" in said:
        three.leave(2, said["bye"])
    told = later(three.watch.blame)
    if "bye" not in said:
        three.answer(1, place(6))
        asked = three.hear(2)["ask"]
        if said:
            three.say(2, **said, to=asked)
    assert told.result(10.0) == (found and Verdict(2, found)) == three.watch.verdict


def test_closing_says_goodbye_and_leaves_nothing(peers, nothing_left):
    with nothing_left(), ExitStack() as stack:
        three = Peers(stack)
        three.watch.close()
        three.watch.close()
        calls, doing, awaits, _, raised, at, awaited, entered, *rest = three.hear(1)["bye"]
        assert (calls, doing, awaits, raised, at, awaited) == (7, "barrier", None, "", "", [])
        history = [list(each) for each in HISTORY]
        assert (entered, rest) == (history[-1], [False, history, "", ""])
        assert three.hear(1) == {}, "the socket is closed"


def test_closing_waits_for_no_thread_that_waits_for_whoever_closes(peers, monkeypatch):
    """As where a collection of garbage drops a group in the middle of a handler of the log."""
    monkeypatch.setattr(links, "PATIENCE", 0.1)
    three, handler = peers(), logging.NullHandler()
    handler.handle = lambda record: held.wait(30)
    held = threading.Event()
    log = logging.getLogger("weft")
    log.addHandler(handler)
    try:
        three.ends[2].close()  # which its thread says in the log
        three.settled()
        closing = threading.Thread(target=three.watch.close, daemon=True)
        closing.start()
        closing.join(10.0)
        assert not closing.is_alive()
    finally:
        held.set()
        log.removeHandler(handler)
    until(lambda: not three.links.peers())  # somebody has closed the sockets


@pytest.mark.parametrize("blocks", [True, False])
def test_waits_end_whatever_a_handler_of_the_log_does(peers, blocks):
    three, handler = peers(), logging.NullHandler()
    held = threading.Event()

    def handle(record):
        held.wait(30)
        raise ValueError("a handler of this test")

    if not blocks:
        held.set()
    handler.handle = handle
    log = logging.getLogger("weft")
    log.addHandler(handler)
    try:
        three.ends[2].close()
        assert three.settled() == Verdict(2, "rank 2 died")
    finally:
        held.set()
        log.removeHandler(handler)


def test_a_peer_that_reads_nothing_holds_nobody_up(peers):
    three = peers()
    for number in range(5_000):
        three.say(2, ask=number)  # of whose answers it reads none
    three.say(1, ask=1)
    assert "here" in three.hear(1)
