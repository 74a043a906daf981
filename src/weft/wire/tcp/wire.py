"""The wire over TCP and, between ranks of one host, over the memory that they share.

The thread that waits for a message moves all messages meanwhile, so no message passes from thread
to thread. A wait sleeps in `poll` until a socket has something. While nobody waits and long
messages are under way, as in the arithmetic between two waits, a thread moves them every few
milliseconds; in between the kernel buffers what comes. Otherwise that thread sleeps. It is started
when it is needed first; messages in a segment do not need it.

All ranks are connected from the start, and nobody listens while the wire lives.

What threads wait for, and how long:

* `finish`, until its messages are complete, and `finish_meeting`, until a meeting is: as long as
  their callers say. A socket of a peer, or the alarm, which `abort` sets off, ends each sleep.
* `_turn`, which a thread holds in all of its `finish`, asleep or not: so a `release` in another
  thread lasts as long as that wait. A `close` in another thread ends it, once what was sent is
  on its way.
* `close`: up to `LINGER` until the systems of all peers have what was sent, and for the wire's
  thread. Where another thread is in a `finish`, that one sends the rest.
* The wire's thread: until there is something to move, or the wire is closed.
* `make`, for the segments of this host's ranks: until a deadline.

weft moves its bytes itself since a wait has to end at once where a rank dies: gloo never fails a
receive that has got a part of its message, whatever happens to the socket. gloo also announces and
answers each message, and passes it between threads, which costs about 50 system calls and a
millisecond of a core for a small exchange of four ranks on two cores. Here it takes three system
calls.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set

from torch import Tensor

from ...base.latch import NAP, deadline_of
from ...base.memory import Lease
from ...rendezvous.address import NO_SIGNAL
from ..interface import MEETS, Failure, Recv, Send, WireFailed
from . import connection, meeting, shm
from .connection import Block, Connection, Receive
from .listener import suit_distance

INLINE = 1 << 16
"""Bytes of a message up to which it goes through the socket, also to whoever maps the segment."""

_TICK = 0.004  # seconds between two looks of the thread
_LONG_TICK = 0.016  # the same at most, where another thread waits and moves everything
_TURN_WAIT = 0.1  # seconds after which a close asks whoever waits again whether the rest is sent
LINGER = 5.0  # seconds in which a close sends what is left
_FIRST_NAP = 0.05  # seconds, after which a rank looks whether others wait for it in a circle
_SPIN = 50e-6  # seconds that a wait looks by itself before it sleeps until it is woken
_BUFFER = 4 << 20  # bytes of a Unix socket's buffers; with the small default it is 4 times slower

_CLOSED = Failure("aborted", None, "this end was closed")

_Received = tuple[Connection, Receive]
_Message = tuple[Connection, Receive | connection.Outgoing]
"""A message and the connection that it is on."""


class TcpWire:
    """One rank's end of a group; a `weft.wire.interface.Wire`.

    Attributes:
        connections: to all other ranks, by rank.
        near: the ranks that this one can meet: those of its host, or itself alone.
        segment: the memory of this rank that peers of its host map, or None.
        meetings: of this rank; None: ranks do not meet, or this is closed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        sockets: Mapping[int, socket.socket],
        segment: shm.Segment | None = None,
        segments: Mapping[int, shm.Peer] | None = None,
        *,
        meets: bool = False,
    ) -> None:
        """
        Args:
            rank, size: this rank, and how many there are.
            sockets: connected, by peer; the wire closes them.
            segment: of this rank, where leases are from.
            segments: of the peers that share memory with this rank, mapped here.
            meets: whether this rank meets those others of its host: it has their `segments`.
        """
        self.rank = rank
        self.size = size
        self.near = frozenset({rank, *(segments or {})} if meets else {rank})
        self.segment = segment
        self._process = os.getpid()

        self.connections: dict[int, Connection] = {}
        self._poll = select.poll()
        self._by_fd: dict[int, Connection] = {}
        # a byte there ends the sleep of whoever waits
        self._alarm: tuple[socket.socket, ...] = socket.socketpair() if size > 1 else ()
        for end in self._alarm:
            end.setblocking(False)
        if self._alarm:
            self._poll.register(self._alarm[0], select.POLLIN)
        # Who moves messages holds it. Reentrant, since a collection of garbage may close a wire in
        # the middle of anything.
        self._turn = threading.RLock()
        self._is_moving = False  # a connection is half through with something
        self._has_lost = False  # a connection has ended
        self._thread: threading.Thread | None = None
        self._is_awake = False  # the thread moves messages, or is going to
        # what wakes it up: an `Event` is Python, where an interrupt may leave it locked
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failure: Failure | None = None
        self._failing = threading.RLock()  # held while `_failure` is set
        self.meetings: meeting.Meetings | None = None
        if meets:
            assert segment is not None and segments is not None
            self.meetings = meeting.Meetings(self, segment, segments, self.ring)
        self._awaited: meeting.TcpMeeting | None = None  # by a wait without a limit
        self._is_closing = False  # whoever waits ends that once all is sent
        self._is_closed = False
        _made.add(self)
        for peer, sock in sockets.items():
            sock.setblocking(False)
            suit_distance(sock)
            link = Connection(peer, sock, (segments or {}).get(peer))
            self.connections[peer] = link
            self._by_fd[link.fd] = link
            self._watch(link)

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> TcpPending:
        with self._turn:
            self._check()
            self._is_moving = True
            try:
                receives, messages = self._begin(sends, recvs, channel)
            except BaseException as error:  # some of it may be under way
                self._break(error, "in a post")
                raise
            finally:
                self._is_moving = False
        return TcpPending(self, receives, messages)

    def _begin(
        self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int
    ) -> tuple[list[_Received], list[_Message]]:
        """Post receives, then sends, and send what the sockets take.

        Returns:
            The receives, and all messages.
        """
        receives: list[_Received] = []
        places: dict[int, tuple[int, Block | None]] = {}  # in the segment, by id of the tensor
        needs_thread = False
        for peer, want in recvs:
            link = self.connections[peer]
            receive = Receive(want)
            link.expect(channel, receive)
            if link.garbled:  # it has come already, and is of another length
                self._fail(_end_of(link))
            needs_thread |= link.segment is None and receive.limit > INLINE
            receives.append((link, receive))
        messages: list[_Message] = [*receives]
        for peer, tensor in sends:
            link = self.connections[peer]
            if link.segment is not None and tensor.nbytes > INLINE:
                send = self._in_segment(tensor, places)
            else:
                send = connection.Outgoing(tensor)
                needs_thread |= send.nbytes > INLINE
            link.send(channel, send)
            messages.append((link, send))
        for _, block in places.values():
            if block is not None:
                block.read()  # from here on it is its readers' alone
        for link, _ in messages:
            if link.due:
                link.flush()
                self._watch(link)
        if needs_thread:
            self._wake_thread()
        return receives, messages

    def _in_segment(
        self, tensor: Tensor, places: dict[int, tuple[int, Block | None]]
    ) -> connection.Outgoing:
        """A message that the peer reads in the segment, if there is room for it."""
        if id(tensor) not in places:
            assert self.segment is not None
            offset = self.segment.offset_of(tensor)
            block = None
            if offset is None:
                offset = self.segment.stage(tensor)
                if offset is not None:
                    block = Block(self.segment, offset)
                    # this post: a peer that is gone must not free what is yet to go to another
                    block.readers = 1
            places[id(tensor)] = (-1 if offset is None else offset, block)
        offset, block = places[id(tensor)]
        if block is not None:
            block.readers += 1
        return connection.Outgoing(tensor, offset, block)

    def meet(self, message: bytes | bytearray, ranks: Sequence[int]) -> meeting.TcpMeeting:
        with self._turn:
            meetings = self.meetings  # which the handler of a signal may drop
            self._check()
            if len(message) > MEETS:
                raise ValueError(
                    f"rank {self.rank} meets with {len(message)} bytes, where {MEETS} are the "
                    "most: send them"
                )
            assert meetings is not None  # else nobody is near, or the wire is closed and has failed
            peers = meetings.peers_among(tuple(ranks))
            self._is_moving = True
            try:
                return meetings.begin(message, peers)
            except WireFailed as error:  # a peer wrote what cannot be
                raise WireFailed(self._fail(error.failure)) from None
            except BaseException as error:  # peers may see a half of it
                self._break(error, "in a meeting")
                raise
            finally:
                self._is_moving = False

    def meet_nobody(self) -> None:
        """Have no meetings, since some rank can have none."""
        self.near = frozenset({self.rank})
        self.meetings = None

    def lease(self, nbytes: int) -> Lease | None:
        """Memory in the segment, which peers of this host read where it lies."""
        if self.segment is None or nbytes <= INLINE:
            return None
        lease = self.segment.lease(nbytes)
        if lease is not None and self._failure is not None:
            lease.release()  # a peer may yet read it, if a failed post had lent it
            return None
        return lease

    def abort(self, failure: Failure) -> None:
        self._fail(failure)
        self._set_off_alarm()

    def failure(self) -> Failure | None:
        return self._failure

    def close(self) -> None:
        if os.getpid() != self._process:
            self.after_fork()  # this may come before what else is called in a child
            self._release_all()
            return
        until = time.monotonic() + LINGER
        if self._take_turn_to_close(until):
            try:
                # a handler of a signal, or a collection of garbage, may have brought this thread
                # here in the middle of a send: then to go on would send something twice
                if not self._is_moving:
                    self._send_rest(until)
            finally:
                self._turn.release()
        self.abort(_CLOSED)
        with self._turn:
            try:
                if not self._is_closed:
                    self._let_arrive(until)
            finally:
                self._release_all()
                # with `_turn` held: the thread clears it only with `_turn` held
                self._is_awake = True
                self._bell.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _take_turn_to_close(self, until: float) -> bool:
        """Take `_turn`; False: another thread has it still at that time.

        One that is in a `finish` goes on as before until the sockets have taken what was sent, and
        then ends its wait. It looks at that whenever the alarm is set off.
        """
        self._is_closing = True
        while time.monotonic() < until:
            self._set_off_alarm()
            if self._turn.acquire(timeout=_TURN_WAIT):
                return True
        return False

    def _send_rest(self, until: float) -> None:
        """Send what sockets have not taken yet: of that, something may have been waited for."""
        # a handler of a signal may have brought this thread here in the middle of a poll, and no
        # poll may be begun in another of the same object
        self._poll = select.poll()
        for link in self.connections.values():
            if link.polled:
                self._poll.register(link.fd, link.polled)
        while self._failure is None and self._has_unsent():
            seconds = until - time.monotonic()
            if seconds <= 0:
                break
            self._step(seconds)

    def _let_arrive(self, until: float) -> None:
        """Drop what peers still send, until all has arrived that was sent; with `_turn` held.

        A byte that comes to a closed socket has the system reset the connection, and drop what is
        on its way to a peer.
        """
        for link in self.connections.values():
            link.discard()
        while self._failure is _CLOSED and not self._is_closed and time.monotonic() < until:
            on_its_way = [link for link in self.connections.values() if link.is_on_its_way()]
            if not on_its_way:
                return
            time.sleep(_TICK)
            for link in on_its_way:
                link.discard()

    def _has_unsent(self) -> bool:
        """Whether something waits for a socket to take it; with `_turn` held."""
        return any(link.unsent for link in self.connections.values())

    def after_fork(self) -> None:
        """In a forked child, which has no thread, and must not write to what the parent shares.

        A thread of the parent may have held the locks.
        """
        self._turn = threading.RLock()
        self._failing = threading.RLock()
        self._fail(Failure("broken", self.rank, "this process was forked"))
        if self.segment is not None:
            self.segment.after_fork()

    def _release_all(self) -> None:
        self._is_closed = True
        self.meetings = None  # which holds the segments
        self._awaited = None
        if self.segment is not None:
            self.segment.close()
        for link in self.connections.values():
            link.close()
        for end in self._alarm:
            end.close()

    # failing

    def _fail(self, failure: Failure) -> Failure:
        """Fail with this, unless the wire has failed already; any thread. The failure that counts.

        Nothing is closed, so that peers do not take this rank for dead: the group tells them.
        """
        with self._failing:
            if self._failure is None:
                self._failure = failure
            return self._failure

    def _break(self, error: BaseException, where: str) -> None:
        """Fail, because of what was raised here in the middle of something."""
        self._fail(Failure("broken", self.rank, f"{type(error).__name__} was raised {where}"))

    def _check(self) -> None:
        """Raise WireFailed if the wire has failed; with `_turn` held, so that nothing moves."""
        if self._failure is not None:
            raise WireFailed(self._failure)

    # moving messages

    def finish(self, messages: Sequence[_Message], timeout: float | None) -> None:
        """Move messages until all of these are through.

        Raises:
            TimeoutError: they are not within so many seconds.
            WireFailed: the wire has failed, or the connection of one of them has ended.
        """
        until = deadline_of(timeout)
        with self._turn:
            for awaited, message in messages:
                spin = 0.0 if awaited.is_far and message.is_long else _SPIN
                while not message.done:
                    self._check()
                    if self._has_lost:
                        self._check_links(messages)
                    seconds = until - time.monotonic()
                    self._step(max(0.0, seconds), spin)
                    if seconds <= 0 and not message.done:
                        raise TimeoutError("the messages of a post are not complete")

    def _check_links(self, messages: Sequence[_Message]) -> None:
        """Fail if a connection has ended with one of these messages not through."""
        for link, message in messages:
            if link.lost and not message.done:
                raise WireFailed(self._fail(_end_of(link)))

    def finish_meeting(self, awaited: meeting.TcpMeeting, timeout: float | None) -> None:
        """Move messages until this meeting is through; what it raises is as of `finish`."""
        until = deadline_of(timeout)
        with self._turn:
            meetings = self.meetings  # which the handler of a signal may drop
            while awaited.missing:
                self._check()
                assert meetings is not None  # else it is closed, and has failed
                # of these all is read below that they have left; who is lost meanwhile may have
                # left something since that was read
                links = self.connections.values()
                lost = [link for link in links if link.lost] if self._has_lost else []
                awaited.turn.is_begun(meeting.LOOKS)
                self._move_meetings(meetings)
                if not awaited.missing:
                    return
                self._check()
                missing = awaited.waiting_for()
                for link in lost:
                    if link.peer in missing:
                        raise WireFailed(self._fail(_end_of(link)))
                seconds = until - time.monotonic()
                self._awaited = awaited if timeout is None else None
                try:
                    self._step(max(0.0, seconds), spin=0.0)
                finally:
                    self._awaited = None
                if seconds <= 0 and awaited.missing:
                    raise TimeoutError("a meeting is not complete")

    def _move_meetings(self, meetings: meeting.Meetings) -> bool:
        """Read what peers have left for this rank, and leave what has room; whether anything was.

        It raises nothing that a peer has caused: then the wire has failed.
        """
        if self._failure is not None:
            return False
        self._is_moving = True
        try:
            return meetings.move()
        except WireFailed as error:
            self._fail(error.failure)
            return False
        except BaseException as error:  # of a handler of a signal: a message may be half read
            self._break(error, "while ranks met")
            raise
        finally:
            self._is_moving = False

    def ring(self, peer: int) -> None:
        """Wake up a peer, whose sleep some number ends that this rank has stored."""
        link = self.connections[peer]
        link.ring()
        link.flush()
        self._watch(link)

    def release(self, receives: Sequence[_Received]) -> None:
        """Release the memory of messages that were received by size."""
        with self._turn:
            self._is_moving = True
            try:
                for link, receive in receives:
                    receive.release()
                    if link.due and self._failure is None:
                        link.flush()
                        self._watch(link)
            finally:
                self._is_moving = False

    def _step(self, seconds: float, spin: float = _SPIN) -> None:
        """Wait until something can be moved, at most so many seconds, and move it."""
        meetings = self.meetings
        if meetings is not None and meetings.under_way and self._move_meetings(meetings):
            seconds = 0.0  # one that is waited for may be through
        events = self._wait_for_events(seconds, spin)
        self._is_moving = True
        try:
            for fd, event in events:
                if self._is_closed:  # by a handler of a signal, or by a collection of garbage
                    return
                link = self._by_fd.get(fd)
                if link is None:
                    self._on_alarm()
                elif self._failure is None:  # else nothing may write to anybody's memory
                    if event & ~select.POLLOUT:  # bytes, an error, or the end
                        link.receive()
                    if link.due or event & select.POLLOUT:
                        link.flush()
                    self._watch(link)
        except BaseException as error:  # of a handler of a signal: a message may be half moved
            if self._is_closed and isinstance(error, KeyError | OSError | ValueError):
                return  # a handler has closed this wire, at any point above: what it took is missed
            self._break(error, "while messages moved")
            raise
        finally:
            self._is_moving = False

    def _wait_for_events(self, seconds: float, spin: float) -> list[tuple[int, int]]:
        """Wait until something can be moved: by polling at first, for `spin`, then asleep.

        The ranks of a collective call arrive at nearly the same time, and waking a process costs
        more than many polls. Between two polls other processes may have the core. The next piece
        of a long message from another host takes longer to come, and is not polled for.
        """
        now = time.monotonic()
        until = now + min(seconds, spin)
        while now < until:
            if ready := self._poll.poll(0):
                return ready
            os.sched_yield()
            now = time.monotonic()
        seconds = min(seconds, NAP)
        meetings = self.meetings
        if meetings is not None and meetings.under_way and seconds > 0:
            return self._sleep_while_meeting(meetings, seconds)
        return self._poll.poll(seconds * 1e3)

    def _sleep_while_meeting(
        self, meetings: meeting.Meetings, seconds: float
    ) -> list[tuple[int, int]]:
        """Sleep until something can be moved, or a peer rings.

        Peers look whether this rank sleeps, after all that may end that sleep. So it says so first,
        and then looks once more whether there is something. A sleep that lasts is looked at: it may
        be one that nothing will end.
        """
        if self._failure is not None:
            return []
        try:
            meetings.fall_asleep(self._awaited)
            if self._move_meetings(meetings):
                return []
            ready = self._poll.poll(min(seconds, _FIRST_NAP) * 1e3)
            if ready or seconds <= _FIRST_NAP or not self._may_sleep_on(meetings):
                return ready
            return self._poll.poll((seconds - _FIRST_NAP) * 1e3)
        finally:
            try:
                meetings.wake_up()
            except BaseException as error:  # of a handler of a signal: peers may see it asleep
                self._break(error, "as it woke up")
                raise

    def _may_sleep_on(self, meetings: meeting.Meetings) -> bool:
        """Whether something may end the sleep of this rank; if not, the wire fails."""
        try:
            meetings.check_sleep(self._awaited)
        except WireFailed as error:
            self._fail(error.failure)
        return self._failure is None

    def _set_off_alarm(self) -> None:
        """Wake up whoever waits; any thread."""
        for end in self._alarm[1:]:
            with contextlib.suppress(OSError):  # full: it is awake; closed: nobody waits
                end.send(b"\0", NO_SIGNAL)

    def _on_alarm(self) -> None:
        """Read the bytes that woke this thread: the wire has failed, or is being closed."""
        with contextlib.suppress(BlockingIOError):
            self._alarm[0].recv(256)
        if self._is_closing and not self._has_unsent():
            self._fail(_CLOSED)

    def _watch(self, link: Connection) -> None:
        """Poll for what the connection wants now; nothing, if it is lost."""
        self._has_lost |= bool(link.lost)
        wanted = 0
        if not link.lost:
            wanted = select.POLLIN | select.POLLOUT if link.parts else select.POLLIN
        if wanted == link.polled:
            return
        if link.garbled:
            self._fail(_end_of(link))
        if wanted:
            self._poll.register(link.fd, wanted)
        else:
            self._poll.unregister(link.fd)
        link.polled = wanted
        if wanted & select.POLLOUT:
            self._wake_thread()

    # the thread that moves messages while nobody waits

    def _wake_thread(self) -> None:
        """Wake the thread up, or start it; with `_turn` held."""
        if not self._is_awake:
            self._is_awake = True
            self._bell.put(None)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run_thread, name=f"weft tcp {self.rank}", daemon=True
                )
                thread.start()
                self._thread = thread  # only now: one that could not start cannot be joined

    def _run_thread(self) -> None:
        pause = _TICK
        try:
            while True:
                if not self._is_awake:
                    self._bell.get()
                if self._is_closed:
                    return
                time.sleep(pause)
                if not self._turn.acquire(blocking=False):
                    # Another thread waits, and moves everything. Each look costs it the core.
                    pause = min(2 * pause, _LONG_TICK)
                    continue
                pause = _TICK
                try:
                    if self._failure is None:
                        self._step(0.0)
                        # the garbage collector may have closed this wire, in this very thread
                        is_busy = any(link.busy for link in self.connections.values())
                    else:
                        is_busy = False
                    if not (self._is_closed or is_busy):
                        self._is_awake = False
                finally:
                    self._turn.release()
        except BaseException as error:  # the next wait raises it
            text = f"the thread that moves its bytes failed: {error!r}"
            self.abort(Failure("broken", self.rank, text))
            raise


class TcpPending:
    """The messages of one post; a `weft.wire.interface.Pending`."""

    __slots__ = ("_messages", "_received", "_receives", "_wire")

    def __init__(self, wire: TcpWire, receives: list[_Received], messages: list[_Message]) -> None:
        """`messages` are the receives and the sends."""
        self._wire = wire
        self._receives = receives
        self._messages = messages
        self._received: list[Tensor] | None = None

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        if self._received is None:
            if not self._is_complete():
                self._wire.finish(self._messages, timeout)
            self._received = [
                receive.tensor for _, receive in self._receives if receive.tensor is not None
            ]
        return self._received

    def waiting_for(self) -> list[int]:
        return sorted({link.peer for link, message in self._messages if not message.done})

    def release(self) -> None:
        receives = self._receives
        self._receives = []
        self._messages = []
        if receives:
            self._wire.release(receives)

    def _is_complete(self) -> bool:
        # a third of the time that `all` takes, and asked in every wait
        for _, message in self._messages:  # noqa: SIM110
            if not message.done:
                return False
        return True


def _end_of(link: Connection) -> Failure:
    """Why nothing moves on a connection any more."""
    if link.garbled:
        return Failure("garbled", link.peer, f"rank {link.peer} sent {link.garbled}")
    return Failure("lost", link.peer, link.lost)


def alone() -> TcpWire:
    """The wire of a group of one."""
    return TcpWire(0, 1, {})


def make(
    rank: int,
    sockets: Mapping[int, socket.socket],
    near: Set[int],
    agree: Callable[[bool], bool],
    deadline: float,
) -> TcpWire:
    """Map the memory of the ranks of this host; this rank's wire, once all have theirs. Collective.

    Args:
        rank: this one.
        sockets: connected, to all others. The wire closes them; if this raises, they may be open.
        near: the others of this host, where all ranks have the same machine code to meet by.
        agree: tells all ranks yes or no, once all of them come to it; whether all say yes.
        deadline: when the ranks of this host must have answered, by `time.monotonic`.

    Raises:
        OSError: from the sockets.
    """
    of_host = {peer: sock for peer, sock in sockets.items() if sock.family == socket.AF_UNIX}
    for sock in of_host.values():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    size = len(sockets) + 1
    reserved = meeting.room_for(size, len(near)) if near else 0
    segment = shm.Segment.make(reserved=reserved) if of_host else None
    with contextlib.ExitStack() as stack:  # which closes what was opened, if a step fails
        if segment is not None:
            stack.callback(segment.close)
        segments = shm.exchange(segment, of_host, deadline)
        has_room = segment is None or segment.reserved == reserved
        can_meet = has_room and near <= segments.keys()
        meets = can_meet and bool(near)
        wire = TcpWire(rank, size, sockets, segment, segments, meets=meets)
        stack.callback(wire.close)
        if not agree(can_meet):
            wire.meet_nobody()
        stack.pop_all()
    return wire


_made: weakref.WeakSet[TcpWire] = weakref.WeakSet()


def _after_fork() -> None:
    for wire in list(_made):
        wire.after_fork()


os.register_at_fork(after_in_child=_after_fork)
