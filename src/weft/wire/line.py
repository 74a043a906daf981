"""One TCP connection between two ranks, as messages: what is under way on it, and its framing.

Nothing here waits: `Line.flush` sends what the socket takes and `Line.receive` reads what is there.
`mover` decides when.

A message is preceded by its channel and its length. A rank tells its peer how many messages it has
posted receives for, channel by channel, and the peer sends no others: so whatever arrives has a
place to go to, straight from the socket, and no channel holds up another. Small messages have lines
of their own (`small`).

Ranks that `introduce` themselves and find that they are on one host do not send long messages: they
tell where these lie, and the peer reads them there (`lent`) and says so. Between hosts long
messages of numbers may go in fewer bytes, in `pieces`.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque

from ..kernels.address import address_of
from .lent import LEAST, Guard, Reach
from .pieces import FRAMES, KINDS, Pace, Packer, Unpacker

__all__ = ["Line", "Order"]

_FRAME = struct.Struct("!QQ")  # channel and what it is about; bytes, or how many messages
_GRANT = 1 << 63
_LENT = 1 << 62  # a message to be read; its address follows
_CARD = 1 << 61  # what is needed to read here follows
_READS, _TAKEN, _DECLINED, _LATE, _UNPACKS = (1 << 60 | kind for kind in range(5))
# = whether the peer can read here; it read what was lent first; it could not; that, sent after all;
# which kinds of numbers it unpacks
_ABOUT = {_CARD, _READS, _TAKEN, _DECLINED, _UNPACKS}  # not messages
_KIND = 58  # where the bits begin of the kind of numbers that come in pieces
_PIECES = sum(KINDS.values()) << _KIND  # a message that does
_ADDRESS = struct.Struct("!Q")
_AHEAD = 1 << 16  # bytes read at a time while the length of what comes is not known
_LOT = 1 << 18  # bytes of a long message that are worth waking up for
_TURN = 1 << 22  # bytes that a line moves before others get their turn


class Order:
    """One message to be sent or received: `done` when its bytes are through.

    `kind` is that of its numbers, if they may be packed on their way.
    """

    __slots__ = ("buffer", "done", "kind", "number")

    def __init__(self, buffer: memoryview, kind: str = "") -> None:
        self.buffer, self.kind = buffer, kind
        self.done = False
        self.number = 0


class Line:
    """One end of a connection.

    Attributes:
        peer: the rank at the other end.
        sock: connected, non-blocking.
        fd: its number, also after it is closed.
        lost: why nothing moves here any more, or "".
        more: whether something lies here that `receive` has not looked at yet.
        reach: what reads the peer's memory, if that can be read.
        lends: whether the peer can read here; None as long as it has not said so.
        unpacks: the kinds of numbers that the peer reads packed, as the sum of their bits.
        offered: those that it was told are read here.
    """

    def __init__(self, peer: int, sock: socket.socket, pace: Pace | None = None) -> None:
        """To a peer; lines that share a link have one `pace`."""
        self.peer, self.sock, self.lost = peer, sock, ""
        self.fd = sock.fileno()
        self._incoming: dict[int, deque[Order]] = {}
        self._outgoing: dict[int, deque[Order]] = {}
        self._allowed: dict[int, int] = {}  # messages that the peer has a place for, by channel
        self._grants: dict[int, int] = {}  # what the peer is still to be told of such
        self._posted = self._waiting = 0  # messages to send, in all and not begun
        self._parts: list[memoryview] = []  # of the message that is being sent
        self._sending: Order | None = None
        self._packer, self._unpacker = Packer(sock, pace or Pace()), Unpacker(sock)
        self._sent = 0  # bytes that the socket took
        self.unpacks = self.offered = 0
        self._ahead = memoryview(bytearray(_AHEAD))
        self._ahead_at = address_of(self._ahead)
        self._start = self._end = 0  # what was read ahead and not looked at
        self._into: memoryview | None = None  # what is still missing of the message that comes
        self._coming: Order | None = None
        self._wakes_at = 1  # bytes that must be there before the socket counts as readable
        self._paused = False  # one message was read across: see to that first
        self.more = False
        self._host = b""
        self.reach: Reach | None = None
        self.lends: bool | None = None
        self._notes: list[bytes] = []  # frames to be sent besides messages and grants
        self._lent: deque[Order] = deque()  # to be read by the peer
        self._declined: deque[Order] = deque()  # that could not be read and are sent
        self._late: deque[Order] = deque()  # to be sent since the peer could not read them

    def introduce(self, host: bytes, guard: Guard) -> None:
        """Let the peer read long messages where they lie, if it is on this host and may."""
        self._host = host
        self._notes.append(_FRAME.pack(_CARD, Reach.SIZE) + guard.card(host))

    def offer(self, kinds: int) -> None:
        """Tell the peer which kinds of numbers are read here if they are packed."""
        self.offered = kinds
        self._notes.append(_FRAME.pack(_UNPACKS, kinds))

    def expect(self, channel: int, order: Order) -> None:
        """Receive the next message of a channel, into a buffer large enough."""
        self._incoming.setdefault(channel, deque()).append(order)
        self._grants[channel] = self._grants.get(channel, 0) + 1

    def send(self, channel: int, order: Order) -> None:
        """Send a message behind those of its channel; `flush` does it."""
        self._posted += 1
        self._waiting += 1
        order.number = self._posted
        self._outgoing.setdefault(channel, deque()).append(order)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        awaits = self._coming or self._declined or any(self._incoming.values())
        posted = awaits or self._lent or self._late or self._waiting
        sending = self._parts or self._packer.under_way
        return bool(sending or self._grants or self._notes or posted)

    @property
    def reads(self) -> bool:
        """Whether to wait until the socket has something to read."""
        return not self.lost

    @property
    def writes(self) -> bool:
        """Whether to wait until the socket takes more."""
        return bool(self._parts or self._packer.under_way) and not self.lost

    @property
    def wanted(self) -> int:
        """The events of the socket to wait for, as `select.poll` has them."""
        return select.POLLIN * self.reads | select.POLLOUT * self.writes

    def flush(self) -> None:
        """Send what may be sent and the socket takes."""
        packer = self._packer
        while not self.lost and (packer.under_way or self._parts or self._load()):
            if self.unpacks:
                packer.look(self._sent)
            try:
                sent = packer.send() if packer.under_way else self.sock.sendmsg(self._parts)
            except BlockingIOError:
                return
            except OSError as error:
                while self.receive():  # what the peer sent before it went shall not be lost
                    pass
                self.lost = self.lost or str(error)
                return
            self._sent += sent
            if self._parts:
                self._parts = _rest(self._parts, sent)
            if self._sending is not None and not (self._parts or packer.under_way):
                self._sending.done, self._sending = True, None

    def _load(self) -> bool:
        """Take up the next message that may be sent; whether there is anything to send."""
        if not (self._waiting or self._grants or self._notes or self._late):
            return False
        frames = []
        for channel, count in self._grants.items():
            frames.append(_FRAME.pack(_GRANT | channel, count))
        frames += self._notes
        self._grants.clear()
        self._notes.clear()
        if self._late:
            order = self._sending = self._late.popleft()
            frames.append(_FRAME.pack(_LATE, len(order.buffer)))
            self._parts = [memoryview(b"".join(frames)), order.buffer]
            return True
        if not self._waiting:
            self._parts = [memoryview(b"".join(frames))]
            return True
        channel = self._next()
        if channel >= 0:
            self._allowed[channel] -= 1
            order = self._outgoing[channel].popleft()
            self._waiting -= 1
            if self.lends and len(order.buffer) >= LEAST:
                self._lent.append(order)
                frames.append(_FRAME.pack(_LENT | channel, len(order.buffer)))
                frames.append(_ADDRESS.pack(address_of(order.buffer)))
                self._parts = [memoryview(b"".join(frames))]
                return True
            self._sending = order
            # what is read at machine speed is written so, too
            kind = KINDS.get(order.kind, 0) & self.unpacks & self.offered
            if kind and self._packer.pays and sum(map(len, frames)) <= FRAMES - _FRAME.size:
                frames.append(_FRAME.pack(kind << _KIND | channel, len(order.buffer)))
                self._packer.begin(order.kind, b"".join(frames), order.buffer)
                return True
            frames.append(_FRAME.pack(channel, len(order.buffer)))
            self._parts = [memoryview(b"".join(frames)), order.buffer]
        elif frames:
            self._parts = [memoryview(b"".join(frames))]
        return bool(self._parts)

    def _next(self) -> int:
        """The channel of the first message that the peer has a place for; -1: there is none."""
        first, at = 0, -1
        for channel, orders in self._outgoing.items():
            if orders and self._allowed.get(channel):
                number = orders[0].number
                if at < 0 or number < first:
                    first, at = number, channel
        return at

    def receive(self) -> bool:
        """Read what is there, as far as it may be read; whether it was anything."""
        moved, self._paused, self.more = 0, False, False
        pieces = self._unpacker
        while not self.lost and moved < _TURN:
            if pieces.under_way:
                moved += self._take_pieces(_TURN)
                if pieces.under_way:
                    break
            if self._into is None and not self._parse():
                break
            if pieces.under_way:
                continue
            into = self._into
            parts = [self._ahead[self._end :]] if into is None else [into, self._ahead]
            room = _AHEAD - self._end if into is None else len(into) + _AHEAD
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
                self._done()
            if self._into is None and not self._parse():
                break
            if count < room and not pieces.under_way:  # that was all
                break
        missing = pieces.missing if pieces.under_way else len(self._into or "-")
        self._wake_at(min(missing, _LOT))
        return moved > 0 or self._paused

    def _take_pieces(self, most: int) -> int:
        """Have pieces take what was read ahead, and some bytes from the socket; how many those."""
        ahead, ready = self._ahead_at + self._start, self._end - self._start
        try:
            used, moved = self._unpacker.take(ahead, ready, most)
        except (OSError, ValueError) as error:
            self.lost = str(error)
            return 0
        self._start += used
        if not self._unpacker.under_way:
            self._done()
        return moved

    def _wake_at(self, count: int) -> None:
        """Let the socket be readable once so many bytes are there, or none will come any more.

        On a slow link a long message comes by the packet, and waking up for each would cost more
        than all the rest.
        """
        if count != self._wakes_at and not self.lost:
            self._wakes_at = count
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _done(self) -> None:
        """The message that came is whole."""
        assert self._coming is not None
        self._coming.done = True
        self._into = self._coming = None

    def _parse(self) -> bool:
        """Look at what was read ahead; whether more may be read."""
        if self._end == self._start and not self._paused:
            return True
        while not self._paused and not self.lost and (head := self._head()) is not None:
            into = self._looked_at(head)
            if self._unpacker.under_way:
                self._take_pieces(0)
                if self._unpacker.under_way:
                    self._start = self._end = 0
                    return not self.lost
                continue
            if into is None:
                continue
            here = min(self._end - self._start, len(into))
            into[:here] = self._ahead[self._start : self._start + here]
            self._start += here
            self._into = into[here:]
            if here < len(into):
                self._start = self._end = 0
                return True
            self._done()
        rest = self._end - self._start
        self.more = self._paused and rest > 0
        if self._start:
            self._ahead[:rest] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, rest
        return not self._paused and not self.lost

    def _head(self) -> memoryview | None:
        """What the next message begins with, if all of it is there."""
        rest = self._ahead[self._start : self._end]
        if len(rest) < _FRAME.size:
            return None
        kind, size = _FRAME.unpack_from(rest)
        card = kind == _CARD and size == Reach.SIZE
        length = _FRAME.size + (_ADDRESS.size if kind & _LENT else size if card else 0)
        return rest[:length] if len(rest) >= length else None

    def _looked_at(self, head: memoryview) -> memoryview | None:
        """Heed what was read ahead; where what follows it belongs, if anything does."""
        self._start += len(head)
        kind, size = _FRAME.unpack_from(head)
        if kind & _GRANT:
            channel = kind ^ _GRANT
            self._allowed[channel] = self._allowed.get(channel, 0) + size
            return None
        if kind in _ABOUT:
            self._heed(kind, size, bytes(head[_FRAME.size :]))
            return None
        order = self._place_for(kind, size)
        if order is None:
            return None
        if kind & _LENT:
            self._read_across(order, size, *_ADDRESS.unpack_from(head, _FRAME.size))
            return None
        self._coming = order
        if kind & _PIECES:
            if not self._unpacker.begin((kind & _PIECES) >> _KIND, order.buffer[:size]):
                self.lost = "a message came in pieces that cannot be read here"
            return None
        return order.buffer[:size]

    def _place_for(self, kind: int, size: int) -> Order | None:
        """Where the message that comes belongs, or None: nowhere, which loses the line."""
        orders = self._declined if kind == _LATE else self._incoming.get(kind & ~(_LENT | _PIECES))
        if not orders:
            self.lost = f"a message of {size} bytes came that nobody awaits"
            return None
        if size > len(orders[0].buffer):
            most = len(orders[0].buffer)
            self.lost = f"{size} bytes came where at most {most} were expected"
            return None
        return orders.popleft()

    def _read_across(self, order: Order, size: int, address: int) -> None:
        """Read a message where it lies; have it sent if that fails."""
        order.done = self.reach is not None and self.reach.read(address, order.buffer[:size])
        if not order.done:
            self._declined.append(order)
        self._notes.append(_FRAME.pack(_TAKEN if order.done else _DECLINED, 0))
        self._paused = True  # whoever awaits it may have something to do with it at once

    def _heed(self, kind: int, value: int, card: bytes) -> None:
        """What the peer says about what it reads, and how."""
        if kind == _CARD and len(card) == Reach.SIZE:
            self.reach = Reach.of(card, self._host) if self._host else None
            self._notes.append(_FRAME.pack(_READS, self.reach is not None))
        elif kind == _READS:
            self.lends = bool(value)
        elif kind == _UNPACKS:
            self.unpacks = value
        elif kind == _CARD or not self._lent:
            self.lost = "a frame came that makes no sense here"
        elif kind == _TAKEN:
            self._lent.popleft().done = True
        else:  # what lies behind it is answered in the same way
            self.lends = False
            self._late.append(self._lent.popleft())


def _rest(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of parts of which so many bytes were sent."""
    for number, part in enumerate(parts):
        if sent < len(part):
            return [part[sent:], *parts[number + 1 :]]
        sent -= len(part)
    return []
