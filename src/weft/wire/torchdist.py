"""The wire over a ProcessGroup of torch.distributed: the plain, slow way, and the one to trust.

All bytes, those of the detector too, travel as `send` and `recv` of uint8 tensors on a group of
weft's own: nothing is shared, and no socket is opened but by torch. Best to compare with when a
result looks wrong (`WEFT_SAFE=1`), and where a process may open no sockets of its own.

A send of torch's must meet a receive of the same size, and a wait of gloo's can neither be asked
how far it is nor ended. So for each peer one thread does nothing but receive, and one nothing but
send. They exchange frames: a first part of fixed size, which says how much belongs to it, and, if
that did not fit, the rest. A long message is several frames, so that what the detector says gets in
between. A message that comes before it is asked for is kept: no rank waits in a send for what
another does first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Recv, Send, as_bytes
from .failure.detector import Detector
from .interface import interface_of, own_address
from .memory import Lease, Pool
from .tcp.engine import Lost

_HEAD = struct.Struct("<qqq")  # of a frame: its channel, its bytes, those of the message after it
_FIRST = 1024  # bytes of the first part of a frame, head and all
_INLINE = _FIRST - _HEAD.size
_FRAME = 1 << 20  # bytes of a message that one frame carries
_DETECTOR, _END = -1, -2  # channels: what the detector says; nothing more comes
_GLOO = "GLOO_SOCKET_IFNAME"
_FOREVER = timedelta(days=1000)  # the detector has the deadlines
_PATIENCE = 5.0  # seconds in which peers that are alive answer a farewell

_Key = tuple[int, int, int]  # a message: its peer, its channel, and its number there


class _Receive:
    """A message that is asked for: where it goes, and from where that is leased if it is."""

    def __init__(self, key: _Key, want: Tensor | int, pool: Pool) -> None:
        self.key, self.want, self._pool = key, want, pool
        self.limit = want if isinstance(want, int) else want.nbytes
        self._lease: Lease | None = None

    def take(self, message: Tensor) -> Tensor:
        """Put what came where it is asked for."""
        want = self.want
        if isinstance(want, int):
            self._lease = self._pool.lease(want)
            want = self._lease.tensor
        as_bytes(want.detach()).numpy()[: len(message)] = message.numpy()
        return want

    def release(self) -> None:
        """Nobody looks any more at what came."""
        if self._lease is not None:
            self._lease.release()


_Message = tuple[int, "_Receive | threading.Event"]
"""A message under way, and its peer; of one that is sent, what is set once it is."""


class _Side(socket.socket):
    """The detector's end of what leads to a peer: what it sends goes out with the messages."""

    says: Callable[[bytes], None]

    def send(self, data: Any, flags: int = 0, /) -> int:
        self.says(bytes(data))
        return len(data)


class Links:
    """What leads from one rank to all others: two threads for each, and what came.

    To a wire these are its connections and what moves its messages, as `tcp.endpoint.Connections`
    and `tcp.engine.Engine` are.

    Attributes:
        side: for the failure detector, what leads to each peer.
        detector: that, once there is one.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """`group` has the `send` and `recv` of a ProcessGroup, and nobody else uses it."""
        self.engine = self
        self.detector: Detector | None = None
        self.side: dict[int, _Side] = {}
        self._group = group
        self._process = os.getpid()
        self._changed = threading.Condition()  # notified when one of these four has
        self._inbox: dict[_Key, Tensor] = {}  # what came and was not taken yet
        self._ended: set[int] = set()  # the peers of which nothing comes any more
        self._cut = self._closing = False
        self._expected: Counter[tuple[int, int]] = Counter()
        peers = [peer for peer in range(size) if peer != rank]
        self._outgoing = {peer: _Outgoing() for peer in peers}
        self._heard: dict[int, socket.socket] = {}  # where the detector hears what a peer's says
        for peer in peers:
            self._heard[peer], theirs = socket.socketpair()
            self.side[peer] = _Side(fileno=theirs.detach())
            self.side[peer].setblocking(False)
            self.side[peer].says = self._outgoing[peer].hurry
        self._threads = [
            threading.Thread(
                target=target, args=(peer,), name=f"weft {verb} {rank}-{peer}", daemon=True
            )
            for peer in peers
            for verb, target in (("recv", self._receive), ("send", self._send))
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def over_gloo(cls, store: dist.Store, rank: int, size: int, timeout: float) -> Links:
        """Over a gloo group of its own; collective.

        Raises:
            RuntimeError: from gloo or the store.
        """
        limit = timedelta(seconds=timeout)
        with _listening_where_weft_does(store):
            return cls(dist.ProcessGroupGloo(store, rank, size, timeout=limit), rank, size)

    def post(
        self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int, pool: Pool
    ) -> list[_Message]:
        """As `Engine.post`."""
        messages: list[_Message] = []
        for peer, want in recvs:
            self._expected[peer, channel] += 1
            key = (peer, channel, self._expected[peer, channel])
            messages.append((peer, _Receive(key, want, pool)))
        for peer, tensor in sends:
            sent = threading.Event()
            self._outgoing[peer].queue.put((channel, as_bytes(tensor.detach()), sent))
            messages.append((peer, sent))
        return messages

    def finish(self, messages: Sequence[_Message], limit: float, at: Callable[[int], None]) -> None:
        """As `Engine.finish`."""
        until = time.monotonic() + limit
        for number, (peer, message) in enumerate(messages):
            at(number)
            with self._changed:
                while not self._is_through(message):
                    left = until - time.monotonic()
                    if self._cut or self._closing or peer in self._ended or left <= 0:
                        raise Lost("nothing more comes" if left > 0 else "it did not come in time")
                    self._changed.wait(left)
            if isinstance(message, _Receive) and len(self._inbox[message.key]) > message.limit:
                came = len(self._inbox[message.key])
                raise Lost(f"rank {peer} sent {came} bytes for a receive of {message.limit}")

    def _is_through(self, message: _Receive | threading.Event) -> bool:
        if isinstance(message, _Receive):
            return message.key in self._inbox
        return message.is_set()

    def over(self, messages: Sequence[_Message]) -> bool:
        """As `Engine.over`; `finish` also looks at what came."""
        return not messages

    def arrived(self, messages: Sequence[_Message]) -> list[bool]:
        """As `Engine.arrived`."""
        return [self._is_through(message) for _, message in messages]

    def received(self, messages: Sequence[_Message]) -> list[Tensor]:
        """As `Engine.received`."""
        receives = [message for _, message in messages if isinstance(message, _Receive)]
        return [receive.take(self._inbox.pop(receive.key)) for receive in receives]

    def release(self, messages: Sequence[_Message]) -> None:
        """As `Engine.release`."""
        for _, message in messages:
            if isinstance(message, _Receive):
                message.release()

    def cut(self) -> None:
        """End all waits with an error; any thread may call it."""
        self._cut = True
        self._tell()

    def drop(self) -> None:
        """Nothing: what the detectors say has no other way."""

    def close(self) -> None:
        """Say bye to all and let go of everything. Twice is fine."""
        if self._closing or os.getpid() != self._process:
            return  # a forked child: these are its parent's
        if self.detector is not None:
            self.detector.close()
        self._closing = True
        self._tell()
        for outgoing in self._outgoing.values():
            outgoing.queue.put(None)
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._group = None
        self._inbox.clear()
        for end in self._heard.values():
            end.close()

    def _tell(self) -> None:
        """Have those that wait look again."""
        with self._changed:
            self._changed.notify_all()

    def _send(self, peer: int) -> None:
        """A thread: send what is put into the queue, until that ends."""
        outgoing, send = self._outgoing[peer], functools.partial(_send_frame, self._group, peer)
        with self._until_lost(peer):
            while True:
                item = outgoing.queue.get()
                outgoing.say(send)
                if item is None:
                    send(_END, _NOTHING, 0)
                    return
                channel, message, sent = item
                for start in range(0, max(1, len(message)), _FRAME):
                    frame = message[start : start + _FRAME]
                    send(channel, frame, len(message) - start - len(frame))
                    outgoing.say(send)
                del item, message, frame  # the caller's: not this idle thread's
                sent.set()
                self._tell()

    def _receive(self, peer: int) -> None:
        """A thread: put what comes into the inbox, until nothing more comes."""
        group, came = self._group, Counter[int]()
        with self._until_lost(peer):
            parts: list[Tensor] = []
            while True:
                channel, part, rest = _receive_frame(group, peer)
                if channel == _END:
                    self._outgoing[peer].queue.put(None)  # so that its thread ends, too
                    return
                if channel == _DETECTOR:
                    with contextlib.suppress(OSError):  # it has ended, and this is not for it
                        self._heard[peer].sendall(part.numpy().data)
                    continue
                parts.append(part)
                if not rest:
                    came[channel] += 1
                    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
                    self._inbox[peer, channel, came[channel]] = whole
                    self._tell()
                    parts = []

    @contextlib.contextmanager
    def _until_lost(self, peer: int) -> Iterator[None]:
        """Tell the detector, as the end of a file, when the group fails; and who waits, any end."""
        try:
            yield
        except (RuntimeError, OSError):  # torch's, of the group; a socket that `close` has closed
            if not self._closing:
                with contextlib.suppress(OSError):
                    self._heard[peer].shutdown(socket.SHUT_RDWR)
        finally:
            self._ended.add(peer)
            self._tell()


class _Outgoing:
    """What is to be sent to a peer.

    Attributes:
        queue: messages in their order; None is the end.
    """

    queue: queue.SimpleQueue[tuple[int, Tensor, threading.Event] | None]

    def __init__(self) -> None:
        self.queue = queue.SimpleQueue()
        self._urgent: deque[bytes] = deque()

    def hurry(self, said: bytes) -> None:
        """Send what the detector says before all messages."""
        self._urgent.append(said)
        self.queue.put((_DETECTOR, _NOTHING, threading.Event()))  # nothing, so that somebody looks

    def say(self, send: Callable[[int, Tensor, int], None]) -> None:
        """Send what is urgent."""
        while self._urgent:
            said = bytearray(self._urgent.popleft())
            send(_DETECTOR, torch.frombuffer(said, dtype=torch.uint8), 0)


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _send_frame(group: Any, peer: int, channel: int, frame: Tensor, rest: int) -> None:
    """Send one frame, of which the message has `rest` bytes more."""
    first = torch.zeros(_FIRST, dtype=torch.uint8, device="cpu")
    memory, data = first.numpy(), frame.numpy()
    _HEAD.pack_into(memory.data, 0, channel, len(data), rest)
    inline = data[:_INLINE]
    memory[_HEAD.size : _HEAD.size + len(inline)] = inline
    group.send([first], peer, 0).wait(_FOREVER)
    if len(frame) > _INLINE:
        group.send([frame[_INLINE:]], peer, 0).wait(_FOREVER)


def _receive_frame(group: Any, peer: int) -> tuple[int, Tensor, int]:
    """The channel of the next frame, its bytes, and how many of the message follow it."""
    first = torch.empty(_FIRST, dtype=torch.uint8, device="cpu")
    group.recv([first], peer, 0).wait(_FOREVER)
    channel, count, rest = _HEAD.unpack_from(first.numpy().data)
    frame = torch.empty(count, dtype=torch.uint8, device="cpu")
    inline = min(count, _INLINE)
    frame[:inline] = first[_HEAD.size : _HEAD.size + inline]
    if count > _INLINE:
        group.recv([frame[_INLINE:]], peer, 0).wait(_FOREVER)
    return channel, frame, rest


@contextlib.contextmanager
def _listening_where_weft_does(store: dist.Store) -> Iterator[None]:
    """For a gloo group that is made meanwhile: by itself it takes what the host's name means."""
    name = interface_of(own_address(store))
    if name is None or _GLOO in os.environ:
        yield
        return
    os.environ[_GLOO] = name
    try:
        yield
    finally:
        os.environ.pop(_GLOO, None)
