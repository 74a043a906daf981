"""One TCP connection between two ranks, as messages: what is under way on it, and its framing.

Nothing here waits: `Line.flush` sends what the socket takes and `Line.receive` reads what is there.
`mover` decides when.

A message is preceded by its channel and its length. On a *granted* line a rank tells its peer how
many messages it has posted receives for, channel by channel, and the peer sends no others: so
whatever arrives has a place to go to, straight from the socket, and no channel holds up another.
On a line that is not granted, messages go out at once and stay in the socket until they are asked
for; that is quicker for small ones, and they must all be asked for in the order they were sent.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

__all__ = ["Line", "Order"]

_FRAME = struct.Struct("!QQ")  # channel, or _GRANT + channel; bytes, or how many messages
_GRANT = 1 << 63
_AHEAD = 1 << 16  # bytes read at a time while the length of what comes is not known
_LOT = 1 << 17  # bytes of a long message that are worth waking up for
_TURN = 1 << 22  # bytes that a line moves before others get their turn


class Order:
    """One message to be sent or received: `done` when its bytes are through."""

    __slots__ = ("buffer", "done", "number")

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.done = False
        self.number = 0


class Line:
    """One end of a connection.

    Attributes:
        peer: the rank at the other end.
        sock: connected, non-blocking.
        fd: its number, also after it is closed.
        lost: why nothing moves here any more, or "".
    """

    def __init__(self, peer: int, sock: socket.socket, *, granted: bool) -> None:
        self.peer, self.sock, self.lost = peer, sock, ""
        self.fd = sock.fileno()
        self._granted = granted
        self._incoming: dict[int, deque[Order]] = {}
        self._outgoing: dict[int, deque[Order]] = {}
        self._allowed: dict[int, int] = {}  # messages that the peer has a place for, by channel
        self._grants: dict[int, int] = {}  # what the peer is still to be told of such
        self._posted = 0
        self._parts: list[memoryview] = []  # of the message that is being sent
        self._sending: Order | None = None
        self._ahead = memoryview(bytearray(_AHEAD))
        self._start = self._end = 0  # what was read ahead and not looked at
        self._into: memoryview | None = None  # what is still missing of the message that comes
        self._coming: Order | None = None
        self._wakes_at = 1  # bytes that must be there before the socket counts as readable

    def expect(self, channel: int, order: Order) -> None:
        """Receive the next message of a channel, into a buffer large enough."""
        self._incoming.setdefault(channel, deque()).append(order)
        if self._granted:
            self._grants[channel] = self._grants.get(channel, 0) + 1

    def send(self, channel: int, order: Order) -> None:
        """Send a message behind those of its channel; `flush` does it."""
        self._posted += 1
        order.number = self._posted
        self._outgoing.setdefault(channel, deque()).append(order)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._parts or self._grants or self._awaits or any(self._outgoing.values()))

    @property
    def _awaits(self) -> bool:
        return self._coming is not None or any(self._incoming.values())

    @property
    def reads(self) -> bool:
        """Whether to wait until the socket has something to read."""
        return not self.lost and (self._granted or self._awaits)

    @property
    def writes(self) -> bool:
        """Whether to wait until the socket takes more."""
        return bool(self._parts) and not self.lost

    def flush(self) -> None:
        """Send what may be sent and the socket takes."""
        while not self.lost and (self._parts or self._load()):
            try:
                sent = self.sock.sendmsg(self._parts)
            except BlockingIOError:
                return
            except OSError as error:
                while self.receive():  # what the peer sent before it went shall not be lost
                    pass
                self.lost = self.lost or str(error)
                return
            while self._parts and sent >= len(self._parts[0]):
                sent -= len(self._parts.pop(0))
            if self._parts:
                self._parts[0] = self._parts[0][sent:]
            elif self._sending is not None:
                self._sending.done, self._sending = True, None

    def _load(self) -> bool:
        """Take up the next message that may be sent; whether there is anything to send."""
        frames = [_FRAME.pack(_GRANT | channel, count) for channel, count in self._grants.items()]
        self._grants.clear()
        ready = [
            (orders[0].number, channel)
            for channel, orders in self._outgoing.items()
            if orders and (not self._granted or self._allowed.get(channel, 0))
        ]
        if ready:
            _, channel = min(ready)
            if self._granted:
                self._allowed[channel] -= 1
            order = self._sending = self._outgoing[channel].popleft()
            frames.append(_FRAME.pack(channel, len(order.buffer)))
            self._parts = [memoryview(b"".join(frames)), order.buffer]
        elif frames:
            self._parts = [memoryview(b"".join(frames))]
        return bool(self._parts)

    def receive(self) -> bool:
        """Read what is there, as far as it may be read; whether it was anything."""
        moved = 0
        while not self.lost and moved < _TURN and (self._into is not None or self._parse()):
            into = self._into
            parts = [self._ahead[self._end :]] if into is None else [into, self._ahead]
            try:
                count = self.sock.recvmsg_into(parts)[0]
            except BlockingIOError:
                break
            except OSError as error:
                self.lost = str(error)
                break
            if not count:
                self.lost = "the connection was closed"
                break
            moved += count
            if into is None:
                self._end += count
            elif count < len(into):
                self._into = into[count:]
            else:
                self._end = count - len(into)
                self._finished()
            if self._into is None:
                self._parse()
            if count < sum(map(len, parts)):  # that was all
                break
        self._wake_at(min(len(self._into), _LOT) if self._into is not None else 1)
        return moved > 0

    def _wake_at(self, count: int) -> None:
        """Let the socket be readable once so many bytes are there, or none will come any more.

        On a slow link a long message comes by the packet, and waking up for each would cost more
        than all the rest.
        """
        if self._granted and count != self._wakes_at and not self.lost:
            self._wakes_at = count
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _finished(self) -> None:
        """The message that came is whole."""
        assert self._coming is not None
        self._coming.done = True
        self._coming = self._into = None

    def _parse(self) -> bool:
        """Look at what was read ahead; whether more may be read."""
        while self._end - self._start >= _FRAME.size:
            channel, size = _FRAME.unpack_from(self._ahead, self._start)
            if channel & _GRANT:
                channel ^= _GRANT
                self._allowed[channel] = self._allowed.get(channel, 0) + size
                self._start += _FRAME.size
                continue
            orders = self._incoming.get(channel)
            if not orders:
                if self._granted:
                    self.lost = f"a message of {size} bytes came that nobody awaits"
                return False
            if size > len(orders[0].buffer):
                most = len(orders[0].buffer)
                self.lost = f"{size} bytes came where at most {most} were expected"
                return False
            self._start += _FRAME.size
            self._coming = orders.popleft()
            here = min(self._end - self._start, size)
            self._coming.buffer[:here] = self._ahead[self._start : self._start + here]
            self._start += here
            self._into = self._coming.buffer[here:size]
            if here < size:
                self._start = self._end = 0
                return True
            self._finished()
        rest = self._end - self._start
        if self._start:
            self._ahead[:rest] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, rest
        return self._granted or any(self._incoming.values())
