"""One connection between two ranks: its frames and its messages.

Nothing here waits: `flush` sends what the socket takes, `receive` reads what is there. The wire
calls them.

The n-th message that a rank sends on a channel belongs to the n-th receive of its peer there. A
message goes in one of three ways:

* *eager*: up to `EAGER` bytes go at once, and the peer keeps them until a receive is posted;
* *by credit*: a longer message goes once the peer has posted the receive, and said so;
* *by the segment* (`shm`), where the two share memory, and the wire says so for
  messages of more than `wire.INLINE` bytes: a frame says where the message is. A tensor outside the
  segment is copied into it, so its owner may change it at once. A tensor in the segment is lent:
  its owner may change it when the peer has copied it and said so. The peer does that in a wait: no
  thread of it does it before. A message for which the segment has no room goes through the socket
  at once, however long it is, and the peer keeps it.

A receive by size does not copy a message that was copied into the segment. It gives a view of the
segment, and acknowledges the message when the view is released.

What is on the socket of lane MESSAGES, from its first byte:

| bytes         | what                          | who sends it, and when                       |
|---------------|-------------------------------|----------------------------------------------|
| 16            | nonce                         | who listens, as it has accepted              |
| 24, 32        | hello, and proof of the token | who connects, when it has the nonce          |
| 32            | proof of the token            | who listens, when the other proof was right  |
| 8, descriptor | bytes of the segment          | Unix sockets: each end, in `wire.make`       |
| 1             | whether it was mapped         | Unix sockets: each end, when it has those    |
| 24            | a frame, see below            | each end, at any time                        |
| its length    | a message                     | each end, right behind the message's frame   |

The first three are told of in `listener` (on a control link they are the same, and lines of JSON
follow), the next two in `shm.exchange`. Numbers of the hello are in network byte order, all others
have their lowest byte first. Who closes its end says nothing before: that is for the control links.

A frame has a kind, a channel, a length and a number, which is the last of these:

| kind     | number | who sends it, and when                                                     |
|----------|--------|----------------------------------------------------------------------------|
| 0 DATA   | 0      | who has a message for the socket; its bytes follow                         |
| 1 CREDIT | n      | who has posted a receive of more than `EAGER` bytes, the n-th of the       |
|          |        | channel: messages up to the n-th may come. Not sent where the message is   |
|          |        | here already, or the two share memory                                      |
| 2 LENT   | offset | who has a message in its segment, in memory of its program                 |
| 3 COPIED | offset | who has a message in its segment, in a copy that the wire has made         |
| 4 READ   | n      | who has read the n-th of all LENT and COPIED messages that came on this    |
|          |        | connection: that memory is its owner's again                               |
| 5 WAITS  | n      | who has a message of more than `EAGER` bytes, the n-th of its channel and  |
|          |        | the next there, and no credit for it: its receive may be too short for one |
| 6 RING   | 0      | who saw its peer asleep, once it had left it a message of a `meeting`, or  |
|          |        | read one: the peer looks again. Who is awake ignores it                    |

Each n begins at 1. CREDIT has no length, READ and RING have no channel either: these are 0 there.
All of them go before the messages that wait. READ may wait for another frame: see `was_read`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import socket
import struct
import sys
import termios
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable

from torch import Tensor

from ...base.memory import fault_of, memory_of, shelf_of_process, tensor_of
from ...rendezvous.address import NO_SIGNAL
from . import shm

EAGER = 1 << 17
"""Bytes of a message up to which it is sent whether or not it is awaited."""

_FRAME = struct.Struct("<IIQQ")  # kind, channel, length, number

# the kinds of frames; the table above says who sends them, and when
_DATA = 0
_CREDIT = 1
_LENT = 2
_COPIED = 3
_READ = 4
_WAITS = 5
_RING = 6

_AHEAD = 1 << 16  # bytes read at a time while the next length is not known
_TOGETHER = 1 << 16  # bytes of messages up to which another one goes in the same system call
_LOT = 1 << 18  # bytes of a long message that must be there before the socket wakes us up
_SHARE = 1 << 22  # bytes that a connection moves before others have their turn
_RESET = 7  # the state of a connection that was reset, in Linux's `struct tcp_info`
_OWED = 4 << 20  # with more bytes to acknowledge, a frame is sent at once, not with the next one
_PARTS = 512  # buffers in one system call


class Block:
    """A copy of a message in the segment, which is freed when all readers have read it.

    Attributes:
        offset: where it is.
        readers: the peers that it was sent to and that have not read it, and the post that sends
            it, until it has gone to all of them.
    """

    __slots__ = ("_segment", "offset", "readers")

    def __init__(self, segment: shm.Segment, offset: int) -> None:
        self._segment = segment
        self.offset = offset
        self.readers = 0

    def read(self) -> None:
        """Note that one reader has read it."""
        self.readers -= 1
        if not self.readers:
            self._segment.free(self.offset)


class Outgoing:
    """A message to be sent; `done` when its tensor may change again.

    Attributes:
        nbytes: its length.
        memory: its bytes, which are held; None if they are in the segment.
        offset: its place in the segment; -1: it is not there.
        block: the copy in the segment, if it was copied.
        number: its place among the sends of its channel, from 1.
    """

    __slots__ = ("block", "done", "memory", "nbytes", "number", "offset")

    def __init__(self, tensor: Tensor, offset: int = -1, block: Block | None = None) -> None:
        self.nbytes = tensor.nbytes
        self.offset = offset
        self.block = block
        self.memory = memory_of(tensor) if offset < 0 else None
        self.done = block is not None
        self.number = 0  # not sent yet

    @property
    def is_long(self) -> bool:
        """Whether the socket takes it in several pieces."""
        return self.nbytes >= _LOT


class Receive:
    """A message to be received: into a given tensor or, by size, into memory for what comes.

    Attributes:
        tensor: where it is; None while that is not known.
        memory: where it goes: that of the given tensor, which is held; None: it is by size.
        limit: the bytes of the tensor or, by size, the most that may come.
        done: whether it is there.
    """

    __slots__ = ("_release", "done", "limit", "memory", "tensor")

    def __init__(self, want: Tensor | int) -> None:
        self.tensor: Tensor | None = None
        self.memory: Tensor | None = None
        if isinstance(want, int):
            self.limit = want
        else:
            self.limit = want.nbytes
            self.tensor = want
            self.memory = want.detach()  # the caller may give its tensor other memory meanwhile
        self._release: Callable[[], object] | None = None
        self.done = False

    @property
    def is_long(self) -> bool:
        """Whether it may come in several pieces; statements and heads of lists do not."""
        return self.limit >= _LOT

    def set_view(self, view: Tensor, release: Callable[[], object]) -> None:
        """Take a view of the message as it is; `release` is called when that is released."""
        self.tensor = view
        self._release = release

    def release(self) -> None:
        """Give back what lies in the segment of the peer, if anything does. Twice is fine."""
        release = self._release
        self._release = None
        if release is not None:
            release()


class _Arrived:
    """A message that comes to no memory of the program's: by size, or before it is asked for.

    Attributes:
        length: its bytes.
        offset: where it is, if it is in the segment of the peer.
        number: of its frame, if it is in the segment: what a READ frame says; 0: it is not there.
        lent: whether the peer's program may not change that memory before it was read.
        data: it, as far as it has come, if it comes through the socket; else None.
        whole: whether all of it is there.
        receive: which it goes to once it is whole; None: nobody has asked for it yet.
    """

    __slots__ = ("data", "length", "lent", "number", "offset", "receive", "whole")

    def __init__(
        self, length: int, offset: int = 0, number: int = 0, *, lent: bool = False
    ) -> None:
        """One that comes through the socket or, with a number, lies in the segment of the peer."""
        self.length = length
        self.offset = offset
        self.number = number
        self.lent = lent
        self.data: bytearray | memoryview | None = None
        if not number:
            self.data = _memory_for(length)
        self.whole = number > 0
        self.receive: Receive | None = None


def _memory_for(length: int) -> bytearray | memoryview:
    """Memory for a message that nobody has given any: large ones have pages that were used before.

    A false length costs nothing, since pages that are not touched are free.
    """
    return shelf_of_process().take(length) if length > EAGER else bytearray(length)


class Connection:
    """One end of a connection.

    Attributes:
        peer: the rank at the other end.
        sock: connected, non-blocking.
        fd: its number, also after it is closed.
        polled: the events that the wire polls it for now; 0: none.
        lost: why nothing moves here any more, or "".
        garbled: what the peer sent that is no message, or "".
        is_far: whether its socket is one of TCP, over which bytes come packet by packet: all are
            between hosts, and within one where no Unix socket can be had.
        segment: of the peer, mapped here, if the two share memory: it has mapped that of this rank,
            too. Else None.
        due: whether something is to be sent that the peer may wait for.
        parts: what the socket has not taken yet of what is being sent.
    """

    def __init__(self, peer: int, sock: socket.socket, segment: shm.Peer | None = None) -> None:
        self.peer = peer
        self.sock = sock
        self.fd = sock.fileno()
        self.is_far = sock.family != socket.AF_UNIX
        self.segment = segment
        self._readable = -1 if segment is None else segment.nbytes  # bytes that may be announced
        self.polled = 0
        self.lost = ""
        self.garbled = ""
        # what is to be received, by channel
        self._receives: dict[int, deque[Receive]] = defaultdict(deque)
        self._receive_count: dict[int, int] = defaultdict(int)  # so far
        self._arrived: dict[int, deque[_Arrived]] = defaultdict(deque)  # that nobody asked for yet
        # of the peer's last WAITS frame, by channel: the number of the message, and its length
        self._waiting: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._ahead = memoryview(bytearray(_AHEAD))
        # of it, the bytes that were not looked at; none, while a message is to be filled
        self._ahead_bytes = 0
        self._into: memoryview | None = None  # what is still missing of the message that comes
        self._incoming: Receive | _Arrived | None = None  # that message
        self._wakes_at = 1  # bytes that must be there before the socket counts as readable
        # LENT and COPIED frames that came. What they carry is an offset, and no n: both ends count,
        # and a connection keeps their order. So the same number is the same message as in the
        # peer's `_announcements_sent`.
        self._announcements_received = 0
        # what is to be sent, by channel
        self._sends: dict[int, deque[Outgoing]] = defaultdict(deque)  # that wait for a credit
        self._send_count: dict[int, int] = defaultdict(int)  # so far
        self._last_credit: dict[int, int] = defaultdict(int)  # up to which the peer wants them
        self._told: dict[int, int] = defaultdict(int)  # the last one of which the peer knows so
        # those that need to wait no more, in order, with their channels
        self._admitted: deque[tuple[int, Outgoing]] = deque()
        self.parts: list[bytes | bytearray | memoryview] = []
        self._outgoing: list[Outgoing] = []  # the messages among that
        self._announcements_sent = 0  # LENT and COPIED frames that were sent
        self._unacknowledged: dict[int, Outgoing] = {}  # those not acknowledged, by number
        self._notes = bytearray()  # the frames to be sent that belong to no message
        self._owed = 0  # the bytes of the messages that READ frames among these are of
        self.due = False

    @property
    def busy(self) -> bool:
        """Whether messages move only if somebody calls `flush` or `receive`."""
        sending = self.parts or self._admitted or any(self._sends.values())
        coming = self._into is not None or any(self._receives.values())
        return bool(sending or coming) and not self.lost

    @property
    def unsent(self) -> bool:
        """Whether something waits for the socket to take it."""
        return bool(self.parts or self._admitted) and not self.lost

    # sending

    def send(self, channel: int, send: Outgoing) -> None:
        """Send a message behind those of its channel; `flush` does it."""
        if self.lost:
            self._forget(send)
            return
        self._send_count[channel] += 1
        send.number = self._send_count[channel]
        self._sends[channel].append(send)
        self._admit(channel)

    def _admit(self, channel: int) -> None:
        """Admit the messages of a channel that have a credit, or need none."""
        waiting = self._sends[channel]
        credit = self._last_credit[channel]
        shares = self.segment is not None
        while waiting and (shares or waiting[0].nbytes <= EAGER or waiting[0].number <= credit):
            self._admitted.append((channel, waiting.popleft()))
            self.due = True
        if waiting and self._told[channel] < waiting[0].number:
            self._told[channel] = waiting[0].number
            self._note(_WAITS, channel, waiting[0].nbytes, waiting[0].number)
            self.due = True

    def flush(self) -> None:
        """Send what may be sent and the socket takes."""
        self.due = False
        parts = self.parts
        while not self.lost and (parts or self._admitted or self._notes):
            if not parts:
                self._load()
            try:
                sent = self.sock.sendmsg(parts, (), NO_SIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                while self.receive():  # read what the peer sent before it went
                    pass
                self.lose(str(error))
                return
            ends = [*itertools.accumulate(map(len, parts))]
            gone = bisect_right(ends, sent)  # so many parts have gone as a whole
            del parts[:gone]
            if parts:
                rest = memoryview(parts[0])[sent - ends[gone] :]
                parts[:1] = [rest]  # no error if a handler of a signal has closed this meanwhile
            else:
                for send in self._outgoing:
                    send.done = True
                self._outgoing = []

    def ring(self) -> None:
        """Wake the peer up, if it sleeps; `flush` does it."""
        self._note(_RING, 0, 0, 0)
        self.due = True

    def _note(self, kind: int, channel: int, length: int, number: int) -> None:
        """Have a frame sent that belongs to no message, before the messages that wait."""
        self._notes += _FRAME.pack(kind, channel, length, number)

    def _load(self) -> None:
        """Load the next frames and messages into `parts`."""
        parts = self.parts
        size = 0
        if self._notes:
            parts.append(self._notes)
            self._notes = bytearray()
            self._owed = 0
        while self._admitted and size < _TOGETHER and len(parts) < _PARTS:
            channel, send = self._admitted.popleft()
            if send.offset >= 0:
                self._announcements_sent += 1
                self._unacknowledged[self._announcements_sent] = send
                kind = _LENT if send.block is None else _COPIED
                parts.append(_FRAME.pack(kind, channel, send.nbytes, send.offset))
                continue
            parts.append(_FRAME.pack(_DATA, channel, send.nbytes, 0))
            if send.nbytes and send.memory is not None:
                parts.append(send.memory)
                size += send.nbytes
            self._outgoing.append(send)

    def was_read(self, number: int, nbytes: int, *, awaited: bool) -> None:
        """Tell the peer that one of its messages was read.

        With the next frame; at once, if the peer waits for it (`awaited`) or much is owed.
        """
        self._note(_READ, 0, 0, number)
        self._owed += nbytes
        self.due |= awaited or self._owed > _OWED

    # receiving

    def expect(self, channel: int, receive: Receive) -> None:
        """Post a receive for the next message of a channel; `flush` sends a credit, if needed."""
        self._receive_count[channel] += 1
        number = self._receive_count[channel]
        if arrived := self._arrived[channel]:
            message = arrived.popleft()
            if self._fits(message.length, receive):
                if message.whole:
                    self._deliver(message, receive)
                else:
                    message.receive = receive
            return
        self._receives[channel].append(receive)
        waiting, length = self._waiting[channel]  # the peer's, for a credit that this may be
        if waiting == number:
            self._fits(length, receive)
        if receive.limit > EAGER and self.segment is None:
            self._note(_CREDIT, channel, 0, number)
            self.due = True

    def _fits(self, length: int, receive: Receive) -> bool:
        """Whether a receive takes a message of that length; if not, the connection is refused."""
        is_sized = receive.memory is None
        fits = length == receive.limit or (is_sized and length < receive.limit)
        if not fits:
            self._refuse(fault_of(length, receive.limit, is_sized=is_sized))
        return fits

    def receive(self) -> bool:
        """Read what is there, up to `_SHARE` bytes; whether there was anything."""
        moved = 0
        while not self.lost and moved < _SHARE:
            into = self._into
            room = _AHEAD + (-self._ahead_bytes if into is None else len(into))
            try:
                if into is None:
                    count = self.sock.recv_into(self._ahead[self._ahead_bytes :])
                else:
                    count = self.sock.recvmsg_into([into, self._ahead])[0]
            except BlockingIOError:
                break
            except OSError as error:
                self.lose(str(error))
                break
            if not count:
                self.lose("the connection was closed")
                break
            moved += count
            if into is None:
                self._ahead_bytes += count
            elif count < len(into):
                self._into = into[count:]
            else:
                self._ahead_bytes = count - len(into)
                self._complete()
            if self._into is None:
                self._parse()
            if count < room:  # that was all
                break
        if self.is_far:
            missing = 1 if self._into is None else len(self._into)
            self._wake_at(min(missing, _LOT))
        return moved > 0

    def _wake_at(self, count: int) -> None:
        """Have the socket count as readable once so many bytes are there, or at its end.

        On a slow link a long message comes packet by packet, and waking up for each would cost more
        than everything else.
        """
        if count != self._wakes_at and not self.lost:
            self._wakes_at = count
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _parse(self) -> None:
        """Handle the frames that were read ahead."""
        ahead = self._ahead
        start = 0  # of what is not looked at yet
        end = self._ahead_bytes
        while end - start >= _FRAME.size and not self.lost:
            kind, channel, length, number = _FRAME.unpack_from(ahead, start)
            start += _FRAME.size
            if kind != _DATA:
                self._handle(kind, channel, length, number)
                continue
            into = self._place_for(channel, length)
            here = min(end - start, length)
            if into is None:
                break
            if here:
                into[:here] = ahead[start : start + here]
                start += here
            if here < length:
                self._into = into[here:]
                break
            self._complete()
        self._ahead_bytes = end - start
        if start and self._ahead_bytes:
            ahead[: self._ahead_bytes] = bytes(ahead[start:end])

    def _place_for(self, channel: int, length: int) -> memoryview | None:
        """The memory for the message that comes now; None: it is refused."""
        waiting = self._receives[channel]
        if waiting:
            receive = waiting.popleft()
            if not self._fits(length, receive):
                return None
            if receive.memory is not None:
                self._incoming = receive
                return memory_of(receive.memory)
            message = _Arrived(length)
            message.receive = receive
        else:
            try:
                if length > EAGER and self.segment is None:
                    raise MemoryError
                message = _Arrived(length)
            except (MemoryError, OverflowError):
                self._refuse(f"a message of {length} bytes that nobody awaits")
                return None
            self._arrived[channel].append(message)
        self._incoming = message
        return memoryview(message.data or bytearray())

    def _complete(self) -> None:
        """Complete the message whose last byte has come."""
        message = self._incoming
        self._incoming = None
        self._into = None
        if isinstance(message, Receive):
            message.done = True
        elif message is not None:
            message.whole = True
            if message.receive is not None:
                self._deliver(message, message.receive)

    def _handle(self, kind: int, channel: int, length: int, number: int) -> None:
        """Handle a frame that no bytes follow."""
        if kind == _CREDIT:
            self._last_credit[channel] = max(number, self._last_credit[channel])
            self._admit(channel)
        elif kind == _WAITS:
            self._waiting[channel] = (number, length)
            posted = self._receives[channel]
            first = self._receive_count[channel] - len(posted) + 1  # the number of posted[0]
            if first <= number < first + len(posted):
                self._fits(length, posted[number - first])
        elif kind == _READ and number in self._unacknowledged:
            self._let_go(self._unacknowledged.pop(number))
        elif kind == _RING:
            pass  # it has ended a sleep; the wire looks at meetings after each
        elif kind in (_LENT, _COPIED) and number + length <= self._readable:
            self._announcements_received += 1
            message = _Arrived(length, number, self._announcements_received, lent=kind == _LENT)
            waiting = self._receives[channel]
            if not waiting:
                self._arrived[channel].append(message)
            elif self._fits(length, receive := waiting.popleft()):
                self._deliver(message, receive)
        else:
            self._refuse(
                f"a frame of kind {kind} for {length} bytes at {number}, where none may be"
            )

    @staticmethod
    def _let_go(send: Outgoing) -> None:
        """Complete a message in the segment: the peer has read it."""
        send.done = True
        if send.block is not None:
            send.block.read()

    def _deliver(self, message: _Arrived, receive: Receive) -> None:
        """Give a complete message to its receive."""
        length = message.length
        offset = message.offset
        number = message.number
        memory = receive.memory
        if message.data is not None:
            if memory is None:
                receive.tensor = tensor_of(message.data)
            else:
                memory_of(memory)[:] = message.data
        else:
            segment = self.segment  # which the handler of a signal may drop: it stays mapped here
            assert segment is not None
            if memory is None and not message.lent:
                view = segment.memory[offset : offset + length]
                receive.set_view(view, lambda: self.was_read(number, length, awaited=False))
            else:
                if memory is None:
                    memory = receive.tensor = tensor_of(_memory_for(length))
                ctypes.memmove(memory.data_ptr(), segment.address + offset, length)
                self.was_read(number, length, awaited=message.lent)
        receive.done = True

    def _refuse(self, what: str) -> None:
        """Close the connection, because the peer sent an invalid message."""
        self.garbled = self.garbled or what
        self.lose(f"{what} came")

    def lose(self, why: str) -> None:
        """Note why nothing moves here any more."""
        if self.lost:
            return
        self.lost = why
        waiting = itertools.chain.from_iterable(self._sends.values())
        admitted = (send for _, send in self._admitted)
        for send in (*self._unacknowledged.values(), *admitted, *waiting):
            self._forget(send)
        for messages in (self._unacknowledged, self._admitted, self._sends):
            messages.clear()

    @staticmethod
    def _forget(send: Outgoing) -> None:
        """Free the copy of a message that nobody will read."""
        if send.block is not None:
            send.block.read()

    def discard(self) -> None:
        """Read what is there, and drop it: to close with unread bytes would reset the connection,
        and with it what the peer has not read yet."""
        dropped = 0
        with contextlib.suppress(OSError):
            while dropped < _SHARE and (count := self.sock.recv_into(self._ahead)):
                dropped += count

    def is_on_its_way(self) -> bool:
        """Whether the peer's system has not acknowledged all that this socket has taken.

        What a Unix socket takes is the peer's at once. Other systems than Linux do not say.
        """
        if self.lost or not self.is_far or not sys.platform.startswith("linux"):
            return False
        with contextlib.suppress(OSError, ValueError):  # a handler has closed the socket
            state = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            (count,) = struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))
            return state != _RESET and count > 0
        return False

    def close(self) -> None:
        """Close the socket, and let go of the memory of all messages under way.

        A closed wire may be referenced for long, and messages may lie in its segment.
        """
        self.sock.close()
        self.segment = None
        self._readable = -1
        self._into = None
        self._incoming = None
        for by_channel in (self._receives, self._arrived, self._sends, self._unacknowledged):
            by_channel.clear()
        for messages in (self._admitted, self.parts, self._outgoing):
            messages.clear()
