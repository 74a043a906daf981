"""One connection between two ranks: its frames, and the messages that are under way on it.

Nothing here waits: `flush` sends what the socket takes, `receive` reads what is there; `engine`
decides when.

A frame is a kind, a channel, a length and a number. The n-th message that a rank sends on a channel
belongs to the n-th receive of its peer there. A message travels in one of three ways:

* *eager*: up to `EAGER` bytes follow their frame at once, and wait at the other end until they are
  asked for;
* *by credit*: a longer message is sent when the peer has said that its receive is posted: it tells
  the number of the last receive of a channel, and only for receives that are that long;
* *by the segment* (`wire.shm`), where the peer has mapped this rank's: a frame says where the
  message lies. A tensor that does not lie there is copied in, and is then its owner's again; one
  that does is lent until the peer has copied it and says so.

Whoever is asked for a message of at most so many bytes, and gets one that was copied into the
segment, looks at it there, and acknowledges it when it is released.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

from .. import shm
from ..base import memory_of
from ..memory import Lease, Pool, fresh

EAGER = 1 << 17
"""Bytes of a message up to which it is sent whether or not it is awaited."""

_FRAME = struct.Struct("<IIQQ")  # kind, channel, length, number or offset
_DATA, _CREDIT, _LENT, _COPIED, _READ = range(5)
_AHEAD = 1 << 16  # bytes read at a time while the length of what comes is not known
_LOT = 1 << 18  # bytes of a long message that are worth waking up for
_TURN = 1 << 22  # bytes that a connection moves before others get their turn
_OWED = 4 << 20  # bytes of copied messages that are acknowledged with the next frame, if fewer
_PARTS = 512  # buffers that one system call is given


class Block:
    """A part of the segment that holds a copy of a message, until all its readers are through."""

    __slots__ = ("_segment", "offset", "readers")

    def __init__(self, segment: shm.Segment, offset: int) -> None:
        self._segment, self.offset, self.readers = segment, offset, 0

    def read(self) -> None:
        """One of the readers is through."""
        self.readers -= 1
        if not self.readers:
            self._segment.free(self.offset)


class Send:
    """A message to be sent; `done` when its tensor may change again.

    Attributes:
        nbytes: of it.
        tensor: contiguous; None if it was copied.
        offset: where it lies in the segment; -1: elsewhere.
        block: the copy that lies there, if it is one.
    """

    __slots__ = ("block", "done", "nbytes", "number", "offset", "tensor")

    def __init__(self, tensor: Tensor, offset: int = -1, block: Block | None = None) -> None:
        self.nbytes, self.offset, self.block = tensor.nbytes, offset, block
        self.tensor = tensor if block is None else None
        self.done, self.number = block is not None, 0


class Receive:
    """A message to be received, into a tensor or into what is found for it; `done` when it came.

    Attributes:
        tensor: what came; None as long as that is not known.
        limit: the most bytes that it may have.
    """

    __slots__ = ("_pool", "_release", "done", "limit", "tensor")

    def __init__(self, want: Tensor | int, pool: Pool) -> None:
        self.tensor = None if isinstance(want, int) else want
        self.limit = want if isinstance(want, int) else want.nbytes
        self._pool = pool
        self._release: Callable[[], object] | None = None
        self.done = False

    def place(self) -> Tensor:
        """Where it goes."""
        if self.tensor is None:
            lease: Lease = self._pool.lease(self.limit)
            self.tensor, self._release = lease.tensor, lease.release
        return self.tensor

    def look(self, view: Tensor, release: Callable[[], object]) -> None:
        """It lies there, until it is released."""
        self.tensor, self._release, self.done = view, release, True

    def release(self) -> None:
        """Nobody looks at it any more. Twice is fine."""
        release, self._release = self._release, None
        if release is not None:
            release()


class _Arrived:
    """A message that came before it was asked for."""

    __slots__ = ("data", "length", "lent", "number", "offset", "receive", "whole")

    def __init__(
        self, length: int, offset: int = 0, number: int = 0, *, lent: bool = False
    ) -> None:
        """One that comes through the socket or, with a number, lies in the segment of the peer."""
        self.length, self.offset, self.number, self.lent = length, offset, number, lent
        self.data: bytearray | memoryview | None = None
        if not number:  # pages of `fresh` that nothing comes to cost nothing
            large = length > EAGER
            self.data = memory_of(fresh((length,), torch.uint8)) if large else bytearray(length)
        self.whole = number > 0
        self.receive: Receive | None = None  # that it goes to when it is whole


class Connection:
    """One end of a connection.

    Attributes:
        peer: the rank at the other end.
        sock: connected, non-blocking.
        fd: its number, also after it is closed.
        lost: why nothing moves here any more, or "".
        garbled: what the peer sent that is no message, or "".
        mapped: whether the peer has mapped this rank's segment.
        segment: of the peer, mapped here, or None.
        due: whether something is to be sent that the peer may wait for.
    """

    def __init__(
        self, peer: int, sock: socket.socket, segment: shm.Peer | None, *, mapped: bool
    ) -> None:
        self.peer, self.sock, self.segment, self.mapped = peer, sock, segment, mapped
        self.fd, self.lost, self.garbled = sock.fileno(), "", ""
        self._slow = sock.family != socket.AF_UNIX
        # what is to be received, by channel
        self._receives: dict[int, deque[Receive]] = defaultdict(deque)
        self._asked: dict[int, int] = defaultdict(int)  # receives so far
        self._credits: dict[int, int] = {}  # of which the peer is still to be told
        self._arrived: dict[int, deque[_Arrived]] = defaultdict(deque)
        self._ahead = memoryview(bytearray(_AHEAD))
        self._end = 0  # bytes read ahead and not looked at
        self._into: memoryview | None = None  # what is still missing of the message that comes
        self._coming: Receive | _Arrived | None = None
        self._wakes_at = 1  # bytes that must be there before the socket counts as readable
        self._seen = 0  # messages that came by the segment
        # what is to be sent, by channel
        self._sends: dict[int, deque[Send]] = defaultdict(deque)  # that wait for a credit
        self._posted: dict[int, int] = defaultdict(int)  # sends so far
        self._allowed: dict[int, int] = defaultdict(int)  # the last receive that the peer told of
        self._ready: deque[tuple[int, Send]] = deque()  # with their channels, in order
        self._parts: list[bytes | memoryview] = []  # what is being sent
        self._leaving: list[Send] = []  # the messages among that
        self._announced = 0  # messages sent by the segment
        self._unread: dict[int, Send] = {}  # those not acknowledged, by number
        self._read: list[int] = []  # numbers of messages to be acknowledged
        self._owed = 0  # bytes in them
        self.due = False

    @property
    def busy(self) -> bool:
        """Whether anything is under way that needs somebody to look in."""
        sending = self._parts or self._ready or any(self._sends.values())
        coming = self._into is not None or any(self._receives.values())
        return bool(sending or coming) and not self.lost

    @property
    def wanted(self) -> int:
        """The events of the socket to wait for, as `select.poll` has them."""
        if self.lost:
            return 0
        return select.POLLIN | select.POLLOUT if self._parts else select.POLLIN

    # sending

    def send(self, channel: int, send: Send) -> None:
        """Send a message behind those of its channel; `flush` does it."""
        send.number = self._posted[channel] = self._posted[channel] + 1
        self._sends[channel].append(send)
        self._admit(channel)

    def _admit(self, channel: int) -> None:
        """Take up messages of a channel that have a credit, or need none."""
        waiting, allowed = self._sends[channel], self._allowed[channel]
        while waiting and (
            self.mapped or waiting[0].nbytes <= EAGER or waiting[0].number <= allowed
        ):
            self._ready.append((channel, waiting.popleft()))
            self.due = True

    def flush(self) -> None:
        """Send what may be sent and the socket takes."""
        self.due = False
        parts = self._parts
        while not self.lost and (parts or self._ready or self._credits or self._read):
            if not parts:
                self._load()
            try:
                sent = self.sock.sendmsg(parts)
            except BlockingIOError:
                return
            except OSError as error:
                while self.receive():  # what the peer sent before it went shall not be lost
                    pass
                self.lose(str(error))
                return
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = memoryview(parts[0])[sent:]
            else:
                for send in self._leaving:
                    send.done = True
                self._leaving.clear()

    def _load(self) -> None:
        """Take up what is to be sent next."""
        parts, size = self._parts, 0
        if self._credits or self._read:
            notes = [_FRAME.pack(_CREDIT, at, 0, last) for at, last in self._credits.items()]
            notes += [_FRAME.pack(_READ, 0, 0, number) for number in self._read]
            parts.append(b"".join(notes))
            self._credits.clear()
            self._read.clear()
            self._owed = 0
        while self._ready and size < _AHEAD and len(parts) < _PARTS:
            channel, send = self._ready.popleft()
            if send.offset >= 0:
                self._announced += 1
                self._unread[self._announced] = send
                kind = _LENT if send.block is None else _COPIED
                parts.append(_FRAME.pack(kind, channel, send.nbytes, send.offset))
                continue
            parts.append(_FRAME.pack(_DATA, channel, send.nbytes, 0))
            if send.nbytes and send.tensor is not None:
                parts.append(memory_of(send.tensor))
                size += send.nbytes
            self._leaving.append(send)

    def was_read(self, number: int, nbytes: int, *, awaited: bool) -> None:
        """Tell the peer that one of its messages was read: with the next frame, or soon."""
        self._read.append(number)
        self._owed += nbytes
        self.due |= awaited or self._owed > _OWED

    # receiving

    def expect(self, channel: int, receive: Receive) -> None:
        """Receive the next message of a channel; `flush` tells the peer, if it must know."""
        number = self._asked[channel] = self._asked[channel] + 1
        if arrived := self._arrived[channel]:
            message = arrived.popleft()
            if self._fits(message.length, receive):
                if message.whole:
                    self._deliver(message, receive)
                else:
                    message.receive = receive
            return
        self._receives[channel].append(receive)
        if receive.limit > EAGER and self.segment is None:
            self._credits[channel] = number
            self.due = True

    def _fits(self, length: int, receive: Receive) -> bool:
        if length > receive.limit:
            self._refuse(f"{length} bytes for a receive of {receive.limit}")
        return length <= receive.limit

    def receive(self) -> bool:
        """Read what is there, as far as others need not wait; whether it was anything."""
        moved = 0
        while not self.lost and moved < _TURN:
            into = self._into
            room = _AHEAD + (-self._end if into is None else len(into))
            try:
                if into is None:
                    count = self.sock.recv_into(self._ahead[self._end :])
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
                self._end += count
            elif count < len(into):
                self._into = into[count:]
            else:
                self._end = count - len(into)
                self._finish()
            if self._into is None:
                self._parse()
            if count < room:  # that was all
                break
        if self._slow:
            self._wake_at(min(len(self._into or "-"), _LOT))
        return moved > 0

    def _wake_at(self, count: int) -> None:
        """Let the socket be readable once so many bytes are there, or none will come any more.

        On a slow link a long message comes by the packet, and waking up for each would cost more
        than all the rest.
        """
        if count != self._wakes_at and not self.lost:
            self._wakes_at = count
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _parse(self) -> None:
        """Look at what was read ahead."""
        ahead, start, end = self._ahead, 0, self._end
        while end - start >= _FRAME.size and not self.lost:
            kind, channel, length, number = _FRAME.unpack_from(ahead, start)
            start += _FRAME.size
            if kind != _DATA:
                self._heed(kind, channel, length, number)
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
            self._finish()
        self._end = end - start
        if start and self._end:
            ahead[: self._end] = bytes(ahead[start:end])

    def _place_for(self, channel: int, length: int) -> memoryview | None:
        """Where the message belongs that comes now; None: nowhere."""
        if waiting := self._receives[channel]:
            receive = waiting.popleft()
            if not self._fits(length, receive):
                return None
            self._coming = receive
            return memory_of(receive.place())[:length] if length else memoryview(b"")
        try:
            if length > EAGER and self.segment is None:
                raise MemoryError
            message = self._coming = _Arrived(length)
        except (MemoryError, OverflowError):
            self._refuse(f"a message of {length} bytes that nobody awaits")
            return None
        self._arrived[channel].append(message)
        return memoryview(message.data or bytearray())

    def _finish(self) -> None:
        """The message that comes is whole."""
        message, self._coming, self._into = self._coming, None, None
        if isinstance(message, Receive):
            message.place()
            message.done = True
        elif message is not None:
            message.whole = True
            if message.receive is not None:
                self._deliver(message, message.receive)

    def _heed(self, kind: int, channel: int, length: int, number: int) -> None:
        """A frame came that no bytes follow."""
        if kind == _CREDIT:
            self._allowed[channel] = max(number, self._allowed[channel])
            self._admit(channel)
        elif kind == _READ and number in self._unread:
            self._let_go(self._unread.pop(number))
        elif kind in (_LENT, _COPIED) and self._holds(number, length):
            self._seen += 1
            message = _Arrived(length, number, self._seen, lent=kind == _LENT)
            waiting = self._receives.get(channel)
            if not waiting:
                self._arrived[channel].append(message)
            elif self._fits(length, receive := waiting.popleft()):
                self._deliver(message, receive)
        else:
            self._refuse(
                f"a frame of kind {kind} for {length} bytes at {number}, where none may be"
            )

    def _holds(self, offset: int, length: int) -> bool:
        """Whether that is a part of the segment of the peer."""
        return self.segment is not None and offset + length <= self.segment.nbytes

    @staticmethod
    def _let_go(send: Send) -> None:
        """The peer has read what lies in the segment, or never will."""
        send.done = True
        if send.block is not None:
            send.block.read()

    def _deliver(self, message: _Arrived, receive: Receive) -> None:
        """Hand a message that is whole to who asked for it."""
        length, offset, number = message.length, message.offset, message.number
        if message.data is not None:
            memory_of(receive.place())[:length] = message.data
        else:
            assert self.segment is not None
            if receive.tensor is None and not message.lent and self._holds(offset, receive.limit):
                view = self.segment.memory[offset : offset + receive.limit]
                receive.look(view, lambda: self.was_read(number, length, awaited=False))
                return
            ctypes.memmove(receive.place().data_ptr(), self.segment.address + offset, length)
            self.was_read(number, length, awaited=message.lent)
        receive.done = True

    def _refuse(self, what: str) -> None:
        """The peer sent what is no message."""
        self.garbled = self.garbled or what
        self.lose(f"{what} came")

    def lose(self, why: str) -> None:
        """Nothing moves here any more."""
        if not self.lost:
            self.lost = why
            for send in self._unread.values():
                if send.block is not None:
                    send.block.read()
            self._unread.clear()
