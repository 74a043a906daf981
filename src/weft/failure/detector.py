"""The failure detector: it notices failures of a session's ranks and names the culprit.

The thread of the control links (`links`) sleeps on them and calls the detector. The end of a link
without a "bye" means that the peer died. There are no heartbeats: a rank that is paused, or in
foreign code, is not suspected until a wait is late. When a wait reaches its deadline, the detector
asks all ranks where they are. It blames a rank that does not answer, or that is not in the call in
which the others wait for it. The first verdict counts: it goes to all ranks and to the log (a
launcher may be about to end this process), and ends this rank's waits.

What detectors say to each other is a line of JSON, and one of these. Links are authenticated, and
all ranks have one version, so what cannot be read is a fault of weft's, and names its sender.

* `verdict`: [culprit, text], once: from whoever settled it, and from each that learns it;
* `bye`: the values of a `Place`, as the last, where there was no verdict: where this rank leaves;
* `agrees`: true or false, once, as all ranks `agree`;
* `ask`: the number of an inquiry, to all, at any time;
* `here`: the values of a `Place`, and `to` which inquiry: to the one that asks.

The detector knows no wire. Who uses it says how waits are ended, and what is known to be wrong
(`guard`), and asks it to explain what was lost (`explain`).

The thread costs nothing while all is well. All waits of a session have the same timeout, so it
wakes up once in that time, and checks whether a wait has lasted that long. After the seconds of
`weft.init(watch=)` it asks the ranks, too, but then only prints what it finds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

from ..base import watch
from ..base.errors import names
from ..base.latch import wait_for
from ..base.pace import patient
from . import last_error
from .links import LONGEST, ControlLinks, News
from .verdict import (
    Entered,
    Place,
    Verdict,
    in_crossed_calls,
    in_the_job,
    judge,
    leaver_to_blame,
    on_leaver,
)

ANSWER = 0.7
"""Seconds in which ranks must say where they are, on an idle machine."""

LATE = 0.5
"""A thread that wakes up so many seconds late concludes that its process was paused."""

_NEWS = 0.25  # seconds to wait for a verdict of another rank, before this rank asks
_BUSY = 5.0  # seconds by which asking and judging may take longer: other work may have the cores
_NAMED = 4  # reasons that are printed for one slow wait
_LISTED = 64  # ranks that are told to be awaited
_NOTHING_DUE = 3600.0  # seconds that the thread may sleep once there is a verdict

Message = dict[str, Any]
UNREADABLE = (ValueError, TypeError, RecursionError)  # what `read` raises

_log = logging.getLogger("weft")


class Wait(Protocol):
    """A wait that has not ended.

    Attributes:
        opens: as for a `Place`.
    """

    opens: bool

    def peer(self) -> int | None:
        """The rank whose message is waited for now, or None."""

    def awaited(self) -> Sequence[int]:
        """All ranks whose messages are not complete."""


class Detector:
    """The failure detector of one rank of a session; it is the reader of its links.

    Attributes:
        links: to the detectors of the peers.
        verdict: what broke the session, or None.
        leavers: the ranks that said bye, each with where it was then.
        progress: a weak reference to a function that says how far this rank is in its program: a
            `Place` without what the detector knows.
        history: as for a `Place`, which the worker adds to. The detector has it, since a bye tells
            of it, and may be said when nothing else is left of the session.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        links: ControlLinks,
        slow: float = math.inf,
        thread: Callable[[], int | None] | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        """Start reading the links.

        Args:
            rank: this rank.
            timeout: seconds that any one wait may last.
            links: to the peers; the detector closes them.
            slow: seconds of a wait after which a line about it is printed, once.
            thread: of a rank that is a thread: which one; None: that is not known yet. Without it
                the rank is this process. Then a verdict goes to the log, too.
            global_ranks: the ranks, by their numbers in the job; None: these are the same.
        """
        self.rank = rank
        self.timeout = timeout
        self._slow = slow
        self.verdict: Verdict | None = None
        self.leavers: dict[int, Place] = {}
        self._waits: dict[int, _Waiting] = {}  # that have not ended, by thread
        self._idle_since = time.monotonic()  # when a wait ended last
        self.links = links
        self.progress: Callable[[], Callable[[], Place] | None] = lambda: None
        self.history: Sequence[Entered] = ()
        # what ends this rank's waits, and what says what is known to be wrong; see `guard`
        self._end_waits: Callable[[Verdict], None] = lambda verdict: None
        self._find_fault: Callable[[], Verdict | None] = lambda: None
        self._thread = thread
        self._peers = tuple(links.peers())  # all of them, also those that are gone since
        self._global_ranks = global_ranks
        self._rests = dict.fromkeys(self._peers, b"")  # what came of a line that is not complete
        self._lock = threading.RLock()
        self._settling: int | None = None  # the thread that is in `settle`
        self._closed = False
        # What a thread waits to have explained. That thread sets it; that of the links asks,
        # judges, and clears it.
        self._suspect: _Suspect | None = None
        self._inquiry: _Inquiry | None = None
        self._numbers = itertools.count(1)  # of inquiries
        # those whose answers somebody waits for, by number
        self._inquiries: WeakValueDictionary[int, _Inquiry] = WeakValueDictionary()
        self._agrees: dict[int, bool] = {}  # what peers said, see `agree`
        # entered by itself: that of a condition is Python, where an interrupt may leave it held
        self._hearing = threading.RLock()
        # notified when something came that `_hear` awaits
        self._heard = threading.Condition(self._hearing)

    def start(self) -> None:
        """Begin to hear the peers."""
        self.links.start(self)

    def guard(
        self, end_waits: Callable[[Verdict], None], find_fault: Callable[[], Verdict | None]
    ) -> None:
        """Begin to look after waits.

        Args:
            end_waits: ends all waits of this rank, also those that begin later; any thread calls it
                as soon as there is a verdict, perhaps twice.
            find_fault: says what this rank is sure of, which it may have seen while nobody waited,
                or None. The thread of the links calls it.
        """
        self._find_fault = find_fault
        self._end_waits = end_waits  # before the next line: `settle` sets the verdict, then calls
        if self.verdict is not None:
            end_waits(self.verdict)

    def begin(self, wait: Wait) -> None:
        """Note that this thread begins to wait."""
        now = time.monotonic()
        self._waits[threading.get_ident()] = _Waiting(wait, began=now, since=now)

    def end(self) -> float:
        """Note that this thread's wait is over, well or not; the seconds that it has lasted."""
        self._idle_since = time.monotonic()  # first: who sees no wait then finds when it ended
        ended = self._waits.pop(threading.get_ident(), None)
        if ended is None:  # an interrupt came before it was noted
            return 0.0
        ended.has_ended = True
        return self._idle_since - ended.began

    @property
    def waiting(self) -> _Waiting | None:
        """The wait of this rank; of those of several threads that which began first, or None."""
        # a copy: other threads begin and end waits
        return min(list(self._waits.values()), key=lambda each: each.began, default=None)

    def seconds_waited(self) -> float:
        """How long this thread's wait has lasted; 0: there is none."""
        waiting = self._waits.get(threading.get_ident())
        return 0.0 if waiting is None else time.monotonic() - waiting.since

    def _since(self, waiting: _Waiting | None) -> float:
        """Since when this rank is where it is: in a wait, or in none."""
        return self._idle_since if waiting is None else waiting.since

    def settle(self, verdict: Verdict, *, is_told: bool = False) -> Verdict:
        """Break the session for every rank, unless it is broken; the verdict that counts.

        Args:
            verdict: to break it by.
            is_told: whether the log and the record have it already, from a session of these ranks.
        """
        with self._lock:
            # where an interrupt has ended this in its middle, the same thread does all of it again
            if self.verdict is not None and self._settling != threading.get_ident():
                return self.verdict
            self._settling = threading.get_ident()
            if self.verdict is None and not is_told:
                numbers = in_the_job(self._global_ranks, verdict.culprit)
                verdict = replace(verdict, remedy=f"{verdict.remedy}{numbers}")
            verdict = self.verdict or verdict
            self.verdict = verdict
            if self._closed:
                return verdict
            self._send(self.links.peers(), {"verdict": [verdict.culprit, verdict.text]})
        # what follows may block or raise: a handler of the log, a file; waits end before that
        self._end_waits(verdict)
        self._notify()
        self._settling = None
        if self._thread is None and not is_told:
            with contextlib.suppress(Exception):  # of a handler: who waits raises what matters more
                _log.error("%s", verdict.error(self.rank))
        return verdict

    def agree(self, own: bool, until: float) -> bool:
        """Whether all ranks say yes, which each says, or no, once. Collective.

        Args:
            own: what this rank says.
            until: when all must have said it, by `time.monotonic`.

        Raises:
            WireError: a rank died, or left, or did not come in time.
        """
        self._send(self.links.peers(), {"agrees": own})

        def missing() -> set[int]:
            return {*self._peers} - self._agrees.keys()

        def is_known() -> bool:
            late = missing()
            return not late or not self.leavers.keys().isdisjoint(late)

        if not self._hear(is_known, until - time.monotonic()):
            self.blame()  # in this second those may still come that are alive, and soon see the end
        late = sorted(missing())
        if late:
            leaver = next((peer for peer in late if peer in self.leavers), None)
            text = f"{names(late)} did not come to make the wire within {self.timeout:g} s"
            verdict = Verdict(late[0], text)
            if leaver is not None:
                verdict = on_leaver(leaver, self.leavers[leaver])
            raise self.settle(verdict).error(self.rank)
        return own and all(self._agrees.values())

    def explain(self, peer: int | None, text: str, wait: Wait | None) -> Verdict:
        """The verdict behind a lost peer: it died, or left, or raised because of another.

        To find it may take about a second, and some more where other work has the cores.

        Args:
            peer: whose messages do not come any more; None: that is unknown.
            text: what was seen, as a clause: "the connection was reset".
            wait: that for these messages, or None.
        """
        what = f"the link between rank {self.rank} and rank {peer}"
        if peer is None:
            what = f"a link of rank {self.rank}"
        failed = Verdict(peer, f"{what} failed ({text})")

        def reason() -> Verdict:
            leaver = peer if peer in self.leavers else None
            if peer is None and wait is not None:  # of a device's library: any that is awaited
                leaver = leaver_to_blame(wait.awaited(), self.leavers, self._progress().entered)
            return failed if leaver is None else on_leaver(leaver, self.leavers[leaver])

        # its control link may say more at once: that it died, or left, or another's verdict
        if self._news() is None and reason() is failed:
            waits = list(self._waits.values())
            waiting = next((each for each in waits if each.wait is wait), None)
            self._suspect = _Suspect(waiting, reason)
            self.links.wake()
            self._hear_judgement()
        return self.verdict or self.settle(reason())

    def blame(self) -> Verdict | None:
        """Find why a call of another library failed, in which all ranks may have been.

        That may take about a second, and some more where other work has the cores. None: no rank
        died, left, or is silent. Then the session still works.
        """
        suspect = self._suspect = _Suspect()
        self.links.wake()
        if self._news() is not None:
            return self.verdict
        leaver = self._leaver()
        if leaver is None:
            self._hear_judgement()
            if self._news() is None and suspect.answered is not None:
                # one that left meanwhile, and did not answer before
                leaver = self._leaver(well=suspect.answered)
        if leaver is not None:
            self.settle(on_leaver(leaver, self.leavers[leaver]))
        return self.verdict

    def _leaver(self, well: Collection[int] = ()) -> int | None:
        """The rank to blame of those that left, but for some that were well; None: there is none.

        One that left well, too: of another library's call nobody knows whether it was through.
        """
        found = dict(self.leavers)  # a copy: the thread of the links adds to it
        leavers = {rank: found[rank] for rank in found if rank not in well}
        raised = leaver_to_blame(leavers, leavers, None)
        return next(iter(leavers), None) if raised is None else raised

    def explain_circle(self, circle: Sequence[int], otherwise: Verdict) -> Verdict:
        """The verdict on ranks of which each waits for the next, as a wire has seen.

        To find it may take about a second, and some more where other work has the cores.

        Args:
            circle: the ranks, this one among them.
            otherwise: the verdict if one of them does not say in which call it is.
        """
        places = {self.rank: self._place(listed=None), **self.ask_all(circle, _BUSY)}
        return self.settle(in_crossed_calls(circle, places) or otherwise)

    def ask_all(
        self, awaited: Sequence[int] | None = None, longer: float = 0.0
    ) -> dict[int, Place]:
        """Where the peers are: those of them that answer in time, which this waits for.

        Args:
            awaited: whose answers it waits for; None: all.
            longer: seconds that they may take beyond `ANSWER`.
        """
        inquiry = self._ask()
        wanted = inquiry.asked if awaited is None else inquiry.asked.intersection(awaited)
        seconds = patient(ANSWER) + longer
        self._hear(lambda: wanted <= inquiry.places.keys() | self.leavers.keys(), seconds)
        return inquiry.places

    def _news(self) -> Verdict | None:
        """The verdict, for which this waits a moment: another rank may have seen more."""
        self._hear(lambda: False, _NEWS)  # ended by `settle`, or by the time
        return self.verdict

    def _hear_judgement(self) -> None:
        """Wait until the ranks were asked about the suspect, or another thread's, and judged.

        After a pause they are asked once more.
        """
        self._hear(lambda: self._suspect is None, 2 * patient(ANSWER) + _NEWS + _BUSY)

    def _hear(self, is_known: Callable[[], bool], seconds: float) -> bool:
        """Wait for what the thread of the links hears of the peers; whether the wait has ended.

        Args:
            is_known: whether what is awaited has come; a verdict and a close end the wait, too.
            seconds: that it may last.
        """
        with self._hearing:
            return wait_for(
                self._heard,
                lambda: self.verdict is not None or self._closed or is_known(),
                seconds,
            )

    def close(self) -> None:
        """Say bye to all and end the links. Twice is fine.

        A collection of garbage may bring a thread here in the middle of anything: even of what the
        thread of the links does, or waits for (such as a handler of the log).
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self.verdict is None:
                self._send(self.links.peers(), {"bye": astuple(self._last_place())})
        self.links.close()
        # these may hold a wait, with messages that lie in memory of peers
        self._inquiry = None
        self._suspect = None

    def abandon(self) -> None:
        """In a forked child: close this copy of the links, without a word to anybody.

        The peers see a death when the parent dies, not when its last child does.
        """
        self._closed = True
        self._lock = threading.RLock()  # the thread of the links may have had that one
        self.verdict = Verdict(
            None,
            "a forked process cannot use its parent's group",
            "the group is well: call weft in the parent alone, not in a DataLoader's workers",
        )
        self.links.abandon()
        self._waits.clear()
        self._inquiry = None
        self._suspect = None

    def _send(self, peers: Sequence[int], message: Message) -> None:
        """Send without waiting: a peer that cannot take a few bytes is not listening."""
        data = line_of(message)
        for peer in peers:
            self.links.send(peer, data)

    # what the thread of the links calls, see `links.Reader`

    def fail(self, error: Exception) -> None:
        self.settle(Verdict(self.rank, f"the detector of rank {self.rank} failed: {error!r}"))
        with contextlib.suppress(Exception):  # which may be what the detector failed with
            _log.error("rank %d: the detector failed", self.rank, exc_info=error)

    def handle(self, news: Sequence[News], late: float) -> None:
        if self._closed:
            return
        if late > LATE:
            self._begin_anew()
        for each in news:
            self._read_news(each)
        if self.verdict is None:
            # seen perhaps while nobody waited: else this rank, which others ask where it is,
            # would be taken for the one that keeps them waiting
            fault = self._find_fault()
            if fault is not None:
                self.settle(fault)
        if self.verdict is None:
            self._look_at_the_clock()

    def _begin_anew(self) -> None:
        """This rank was paused, and perhaps all were: forget for how long it has waited.

        Once in a wait. A thread that is late each time was not paused: the program holds the GIL.
        """
        inquiry = self._inquiry
        subject = None if inquiry is None else inquiry.about or self._suspect
        if subject is None or not subject.is_renewed:
            self._inquiry = None  # its answers may have been late because of the pause
        for waiting in list(self._waits.values()):
            if not waiting.is_renewed:
                waiting.is_renewed = True
                waiting.since = time.monotonic()
        if subject is not None:
            subject.is_renewed = True

    def due(self) -> float:
        if self.verdict is not None:
            return time.monotonic() + _NOTHING_DUE
        if self._inquiry is not None:
            return self._inquiry.until
        waiting = self.waiting
        if waiting is None:  # one that begins from now on may last as long
            return time.monotonic() + min(self._slow, self.timeout)
        return waiting.since + self._patience(waiting)

    def _patience(self, waiting: _Waiting) -> float:
        """Seconds of a wait after which all ranks are asked."""
        return self.timeout if waiting.is_told else min(self._slow, self.timeout)

    def _look_at_the_clock(self) -> None:
        """End an inquiry, or begin one: because of a suspect, or because a wait is late."""
        suspect = self._suspect  # read once: another thread sets it, and a close clears it
        waiting = self.waiting
        about = waiting if suspect is None else suspect.about
        now = time.monotonic()
        inquiry = self._inquiry
        if inquiry is not None and inquiry.about is about:
            if now >= inquiry.until:
                self._inquiry = None
                self._judge(inquiry)
            return
        self._inquiry = None  # of a wait that is over: all is well
        is_late = waiting is not None and now >= waiting.since + self._patience(waiting)
        if suspect is not None or is_late:
            self._inquiry = self._ask(about)

    def _ask(self, about: _Waiting | None = None) -> _Inquiry:
        """Ask all where they are."""
        asked = set(self.links.peers()) - set(self.leavers)
        inquiry = _Inquiry(about, time.monotonic() + patient(ANSWER), asked)
        number = next(self._numbers)
        self._inquiries[number] = inquiry  # before the answers come
        self._send(sorted(asked), {"ask": number})
        return inquiry

    def _judge(self, inquiry: _Inquiry) -> None:
        """Conclude from the answers: a verdict, a line about a slow wait, or nothing."""
        silent = inquiry.asked - inquiry.places.keys() - self.leavers.keys()
        waiting = inquiry.about
        places = {self.rank: self._place(waiting, listed=None), **inquiry.places}
        now = time.monotonic()
        suspect = self._suspect
        if suspect is not None:
            reason = suspect.reason
            # then no link failed: nobody came
            overdue = waiting is not None and now >= waiting.began + self.timeout
            if silent or (overdue and reason is not None):
                self.settle(judge(self.rank, places, silent, self.leavers))
            elif reason is not None:
                self.settle(reason())  # all are well, so it is what it looks like
            # else all are well, and a call of another library failed: nobody is to blame
            suspect.answered = frozenset(inquiry.places)
            if self._suspect is suspect:  # else a thread has another one by now
                self._suspect = None
        elif waiting is None or waiting.has_ended:
            return  # meanwhile
        elif now >= waiting.since + self.timeout:
            self.settle(judge(self.rank, places, silent, self.leavers))
        else:
            waiting.is_told = True
            self._tell(waiting, places, silent)

    def _tell(self, waiting: _Waiting, places: dict[int, Place], silent: set[int]) -> None:
        """Say on standard error who keeps this rank waiting."""
        wait = waiting.wait
        mine = places[self.rank]
        why: list[str] = []
        for peer in wait.awaited():
            places[self.rank] = replace(mine, awaits=peer)  # as if it waited for this one
            reason = judge(self.rank, places, silent, self.leavers).text
            if len(why) < _NAMED and reason not in why:
                why.append(reason)
        if why and mine.awaits is not None:  # else that wait is over
            watch.tell(self.rank, mine.seconds, (mine.calls, mine.doing), "; ".join(why))

    def _place(self, of: _Waiting | None = None, *, listed: int | None = _LISTED) -> Place:
        """Where this rank is.

        Args:
            of: the wait to be told of, also if it is over; None: that which began first.
            listed: how many of the ranks that it waits for; None: all.
        """
        # again if that wait has ended meanwhile: the rest may be of the call before it, or after it
        while True:
            first = self.waiting
            waiting = of or first
            since = self._since(waiting)
            progress = self._progress()
            history = tuple(self.history)
            if self.waiting is first:
                break
        awaits = None
        awaited: tuple[int, ...] = ()
        opens = False
        if waiting is not None:
            opens = waiting.wait.opens
            awaits = waiting.wait.peer()
            awaited = tuple(waiting.wait.awaited())[:listed]
        is_outside = waiting is None and not progress.doing
        return replace(
            progress,
            awaits=awaits,
            seconds=time.monotonic() - since,
            raised=last_error.since(since) if is_outside else "",
            at=self._program_line(),
            awaited=awaited,
            opens=opens,
            history=history,
            elsewhere=progress.elsewhere if is_outside and self._thread is None else "",
            prepares=progress.prepares if is_outside else "",
        )

    def _last_place(self) -> Place:
        """Where this rank is as it leaves, and what it raised."""
        since = self._since(self.waiting)
        return replace(
            self._progress(),
            seconds=time.monotonic() - since,
            raised=last_error.since(since, handled=True),
            history=tuple(self.history),
        )

    def _progress(self) -> Place:
        """How far this rank is in its program; where its session is gone, it is in no call."""
        find_progress = self.progress()
        return Place(0, "", None, 0.0) if find_progress is None else find_progress()

    def _program_line(self) -> str:
        """Where the rank's program is, as "file:line in function", or ""."""
        if self._thread is None:
            return watch.program_line()
        thread = self._thread()
        return "" if thread is None else watch.program_line(thread)

    def _read_news(self, news: News) -> None:
        peer = news.peer
        if not news.data:
            if peer not in self.leavers:
                text = f"rank {peer} died"
                if news.error:
                    link = f"the link between rank {self.rank} and rank {peer}"
                    text = f"{link} is lost ({news.error})"
                self.settle(Verdict(peer, text))
            return
        *lines, rest = (self._rests[peer] + news.data).split(b"\n")
        self._rests[peer] = rest[:LONGEST]  # of a longer one not all is kept: it is no message
        for line in lines:
            try:
                message = read(line)
            except UNREADABLE:
                self.settle(Verdict(peer, f"rank {peer} sent what no detector says: {line[:80]!r}"))
                return
            self._on_message(peer, message)

    def _on_message(self, peer: int, message: Message) -> None:
        if "verdict" in message:
            culprit, text = message["verdict"]
            self.settle(Verdict(culprit, text))
        elif "bye" in message:
            self.leavers[peer] = message["bye"]
            self._notify()
        elif "agrees" in message:
            self._agrees[peer] = message["agrees"]
            self._notify()
        elif "ask" in message:
            self._send([peer], {"here": astuple(self._place()), "to": message["ask"]})
        elif "here" in message:
            inquiry = self._inquiries.get(message["to"])
            if inquiry is not None:  # else nobody waits for that any more
                inquiry.places[peer] = message["here"]
                self._notify()

    def _notify(self) -> None:
        """Wake up who waits in `_hear`."""
        with self._hearing:
            self._heard.notify_all()


def line_of(message: Message) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def read(line: bytes) -> Message:
    """A message of another rank's detector, without the line's end; `UNREADABLE` if it is none.

    Example:
        >>> read(b'{"verdict": [1, "rank 1 died"]}')
        {'verdict': [1, 'rank 1 died']}
    """
    message: Message = json.loads(line)
    for name in ("bye", "here"):
        if name in message:
            message[name] = Place.of(message[name])
    return message


@dataclass(slots=True, eq=False)
class _Suspect:
    """What may be the fault of a rank.

    Attributes:
        about: the wait that failed; None: a call of another library did, or none is known.
        reason: says what it looks like; None: all may be well.
        is_renewed: as for a wait.
        answered: the ranks that said where they are; None: it is not judged yet.
    """

    about: _Waiting | None = None
    reason: Callable[[], Verdict] | None = None
    is_renewed: bool = False
    answered: Collection[int] | None = None


@dataclass(slots=True, eq=False)
class _Waiting:
    """A wait of one thread.

    Attributes:
        wait: what it waits for.
        began: when it began, by `time.monotonic`.
        since: the same or, if this rank was paused meanwhile, when the pause ended.
        is_renewed: whether it was paused.
        is_told: whether a line about it was printed.
        has_ended: whether it is over, well or not.
    """

    wait: Wait
    began: float
    since: float
    is_renewed: bool = False
    is_told: bool = False
    has_ended: bool = False


@dataclass(eq=False)
class _Inquiry:
    """A question to all ranks: where are you?

    Attributes:
        about: the wait that is late or has failed; None: a call of another library failed.
        until: when those that have not answered count as silent, by `time.monotonic`.
        asked: the ranks that are asked.
        places: what they answered.
    """

    about: _Waiting | None
    until: float
    asked: set[int]
    places: dict[int, Place] = field(default_factory=dict)
