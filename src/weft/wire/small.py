"""The lane for small messages: what is under way on one connection of it, over a socket.

As in `line`, nothing here waits. Small calls cost what this code costs, so it does the common thing
first: a message goes out at once and whole, and the one that is asked for lies there, alone and
whole. Messages stay where they came until they are asked for, in the order they were sent; a
message is preceded by its length. Between ranks of one host they may go through memory (`pipe`).
"""

from __future__ import annotations

import abc
import select
import socket
import struct
from collections import deque

from ..kernels.cpu_talk import Path
from .line import Order

__all__ = ["SIZE", "SmallLine", "SocketLine"]

SIZE = struct.Struct("!Q")
"""What a message is preceded by."""

_HEAD = SIZE.size
_AHEAD = 1 << 16  # bytes read at a time


class SmallLine(abc.ABC):
    """One end of a connection.

    Attributes:
        peer: the rank at the other end.
        sock: connected, non-blocking.
        fd: its number, also after it is closed.
        lost: why nothing moves here any more, or "".
        asked: the receives that are not through, in order.
        unsent: the messages that are not through, each with what is left of it.
        end: bytes that were read ahead.
    """

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer, self.sock, self.lost = peer, sock, ""
        self.fd = sock.fileno()
        self.asked: deque[Order] = deque()
        self.unsent: deque[tuple[Order, memoryview]] = deque()
        self.end = 0

    @property
    def reads(self) -> bool:
        """Whether to wait until there is something to read."""
        return bool(self.asked) and not self.lost

    @property
    def writes(self) -> bool:
        """Whether to wait until more can be sent."""
        return bool(self.unsent) and not self.lost

    @property
    def wanted(self) -> int:
        """The events of the socket to wait for, as `select.poll` has them."""
        return select.POLLIN * self.reads | select.POLLOUT * self.writes

    @property
    @abc.abstractmethod
    def path(self) -> Path:
        """How machine code reaches the peer."""

    @abc.abstractmethod
    def send(self, order: Order) -> None:
        """Send a message behind those sent before, as far as it can be sent now."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Send what is left, as far as it can be sent now."""

    @abc.abstractmethod
    def receive(self) -> bool:
        """Read what is asked for, as far as it is there; whether anything came."""

    @abc.abstractmethod
    def give(self, place: memoryview) -> int:
        """Move what was read ahead to where another goes on; how many bytes fit there."""

    @abc.abstractmethod
    def go_on(self, order: Order, sent: int) -> None:
        """Send the rest of a message, and of its length, of which another has sent so much."""

    @abc.abstractmethod
    def take_up(self, order: Order, came: memoryview) -> None:
        """Receive a message of which so much came to another, with its length."""


class SocketLine(SmallLine):
    """One end of a connection over its socket."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        super().__init__(peer, sock)
        self._ahead = memoryview(bytearray(_AHEAD))
        self._start = 0  # of what was read ahead and not looked at
        self._into: memoryview | None = None  # what is still missing of the message that comes

    @property
    def path(self) -> Path:
        return self.fd, 0, 0

    def give(self, place: memoryview) -> int:
        count = min(self.end, len(place))
        place[:count] = self._ahead[:count]
        rest = self.end - count
        self._ahead[:rest] = bytes(self._ahead[count : self.end])
        self.end = rest
        return count

    def go_on(self, order: Order, sent: int) -> None:
        if sent < len(order.buffer):
            self.unsent.append((order, order.buffer[sent:]))
        else:
            order.done = True

    def take_up(self, order: Order, came: memoryview) -> None:
        self.asked.append(order)
        ahead = bytes(came) + bytes(self._ahead[: self.end])
        self.end = len(ahead)
        self._ahead[: self.end] = ahead
        self._take()

    def send(self, order: Order) -> None:
        message = b"".join((SIZE.pack(len(order.buffer)), order.buffer))
        if not self.unsent and not self.lost:
            try:
                sent = self.sock.send(message)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._lose(error)
                return
            if sent == len(message):
                order.done = True
                return
            message = message[sent:]
        self.unsent.append((order, memoryview(message)))

    def flush(self) -> None:
        while self.unsent and not self.lost:
            order, rest = self.unsent[0]
            try:
                sent = self.sock.send(rest)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(error)
                return
            if sent < len(rest):
                self.unsent[0] = order, rest[sent:]
                continue
            self.unsent.popleft()
            order.done = True

    def _lose(self, error: OSError) -> None:
        """Nothing can be sent any more; what the peer sent before it went shall not be lost."""
        while self.receive():
            pass
        self.lost = self.lost or str(error)

    def receive(self) -> bool:
        if not self.asked or self.lost:
            return False
        if self.end and self._take():
            return True
        try:
            count = self.sock.recv_into(self._ahead[self.end :] if self.end else self._ahead)
        except BlockingIOError:
            return False
        except OSError as error:
            self.lost = str(error)
            return False
        if not count:
            self.lost = "the connection was closed"
            return False
        if not self.end and self._into is None and count >= _HEAD:
            (size,) = SIZE.unpack_from(self._ahead)
            order = self.asked[0]
            if count == _HEAD + size and size <= len(order.buffer):
                order.buffer[:size] = self._ahead[_HEAD:count]
                order.done = True
                self.asked.popleft()
                return True
        self.end += count
        self._take()
        return True

    def _take(self) -> bool:
        """Give what was read ahead to those that ask for it; whether there was anything."""
        while self.asked and not self.lost:
            order = self.asked[0]
            if self._into is None:
                if self.end - self._start < _HEAD:
                    break
                (size,) = SIZE.unpack_from(self._ahead, self._start)
                if size > len(order.buffer):
                    most = len(order.buffer)
                    self.lost = f"{size} bytes came where at most {most} were expected"
                    return False
                self._start += _HEAD
                self._into = order.buffer[:size]
            here = min(self.end - self._start, len(self._into))
            self._into[:here] = self._ahead[self._start : self._start + here]
            self._start += here
            if here < len(self._into):
                self._into = self._into[here:]
                break
            self._into = None
            order.done = True
            self.asked.popleft()
        if not self._start:
            return False
        rest = self.end - self._start
        self._ahead[:rest] = bytes(self._ahead[self._start : self.end])
        self._start, self.end = 0, rest
        return True
