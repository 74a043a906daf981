"""Small messages over sockets of their own, moved by the thread that waits for them.

A message through gloo is announced, answered and handed from thread to thread: at four ranks on
two cores an exchange of a few bytes costs each rank about 50 system calls and a millisecond of a
core. Here it costs one system call to send and two to receive, which is what makes the opening
exchange of a call cheap.

There is no thread behind this, so nothing moves but in `post` and `finish`: a rank must finish
what it posted before it waits for anything else that its peers only send afterwards. Messages
between two ranks arrive in order; each is preceded by its length.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

__all__ = ["Express", "Lost", "Order"]

_LENGTH = struct.Struct("!I")
_READ = 1 << 16  # bytes asked for at a time while a message's length is not known


class Lost(OSError):
    """The connection to `peer` ended, or nothing moved in time."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class Express:
    """The sockets of one rank to all others."""

    def __init__(self, mesh: Mapping[int, socket.socket]) -> None:
        """Take over connected, non-blocking sockets, by rank."""
        self._lines = {peer: _Line(peer, sock) for peer, sock in mesh.items()}
        self._poll = select.poll()
        self._by_fd = {line.sock.fileno(): line for line in self._lines.values()}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)

    def post(
        self, sends: Sequence[tuple[int, memoryview]], recvs: Sequence[tuple[int, memoryview]]
    ) -> list[tuple[int, Order]]:
        """Start sending messages and receiving others into buffers large enough.

        Returns:
            What `finish` wants: each message with its peer, receives first.
        """
        orders = []
        for peer, buffer in recvs:
            order = Order(buffer)
            self._lines[peer].incoming.append(order)
            orders.append((peer, order))
        for peer, message in sends:
            order = Order(message)
            self._lines[peer].send(order)
            orders.append((peer, order))
        return orders

    def finish(
        self, orders: Sequence[tuple[int, Order]], limit: float, at: Callable[[int], None]
    ) -> None:
        """Move messages until all of these are through.

        Args:
            orders: what `post` returned.
            limit: seconds after which to give up.
            at: told the number of the message that is waited for.

        Raises:
            Lost: a peer closed its end, or the limit passed.
        """
        until = time.monotonic() + limit
        for number, (peer, order) in enumerate(orders):
            at(number)
            line = self._lines[peer]
            if not order.done:
                line.receive()  # it may be there already
            while not order.done:
                if line.lost:
                    raise Lost(peer, line.lost)
                self._turn(peer, until)

    def _turn(self, peer: int, until: float) -> None:
        """Wait until some socket is ready, and do what can be done."""
        for fd, line in self._by_fd.items():
            wanted = select.POLLIN * (not line.lost) | select.POLLOUT * bool(line.outgoing)
            if wanted != line.polled:
                self._poll.modify(fd, wanted)
                line.polled = wanted
        ready = self._poll.poll(max(0.0, until - time.monotonic()) * 1e3)
        if not ready:
            raise Lost(peer, "nothing came in time")
        for fd, event in ready:
            line = self._by_fd[fd]
            if event & select.POLLOUT:
                line.flush()
            if event & ~select.POLLOUT:
                line.receive()

    def cut(self) -> None:
        """End all waits, here and at the peers'; any thread may call it."""
        for line in self._lines.values():
            try:
                line.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # its other end is gone already

    def close(self) -> None:
        """Close the sockets. Twice is fine."""
        for line in self._lines.values():
            line.sock.close()


class Order:
    """One message to be sent or received."""

    __slots__ = ("buffer", "done")

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.done = False


class _Line:
    """One socket, with what is under way on it."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer, self.sock = peer, sock
        self.incoming: deque[Order] = deque()
        self.outgoing: deque[tuple[Order, list[memoryview]]] = deque()
        self.lost = ""
        self.polled = select.POLLIN
        self._read = bytearray(_READ)
        self._have = 0  # bytes read that no message has taken yet
        self._into: memoryview | None = None  # what is still missing of a long message

    def send(self, order: Order) -> None:
        """Send a message behind those that are still to be sent."""
        self.outgoing.append((order, [memoryview(_LENGTH.pack(len(order.buffer))), order.buffer]))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        while self.outgoing and not self.lost:
            order, parts = self.outgoing[0]
            try:
                sent = self.sock.sendmsg(parts)
            except BlockingIOError:
                return
            except OSError as error:
                self.lost = str(error)
                return
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
                continue
            order.done = True
            self.outgoing.popleft()

    def receive(self) -> None:
        """Read what is there, as far as messages are expected."""
        while not self.lost and self.incoming:
            if self._into is None and self._take():
                continue
            into = memoryview(self._read)[self._have :] if self._into is None else self._into
            try:
                count = self.sock.recv_into(into)
            except BlockingIOError:
                return
            except OSError as error:
                self.lost = str(error)
                return
            if not count:
                self.lost = "the connection was closed"
            elif self._into is None:
                self._have += count
            else:
                self._into = self._into[count:]
                if not self._into:
                    self._into = None
                    self.incoming.popleft().done = True

    def _take(self) -> bool:
        """Give the oldest expected message what was read of it; whether that changed anything."""
        start = _LENGTH.size
        if self._have < start:
            return False
        length = _LENGTH.unpack_from(self._read)[0]
        order, here = self.incoming[0], min(self._have - start, length)
        if length > len(order.buffer):
            self.lost = f"{length} bytes came where at most {len(order.buffer)} were expected"
            return False
        order.buffer[:here] = memoryview(self._read)[start : start + here]
        rest = self._have - start - here
        self._read[:rest] = self._read[start + here : self._have]
        self._have = rest
        if here < length:
            self._into = order.buffer[here:length]
        else:
            self.incoming.popleft().done = True
        return True
