"""The wire over a ProcessGroup of torch.distributed: the plain, slow way, and the one to trust.

All bytes, those of the control links too, go by `send` and `recv` of uint8 tensors on a group of
weft's own: no memory is shared, and only torch opens sockets. Use it to compare when a result looks
wrong (`WEFT_SAFE=1`), or if a process may not open sockets of its own.

A send of torch must meet a receive of the same size, and a wait of gloo can neither be polled nor
ended. So each peer has two lanes, by torch's tags: one for messages, one for its control link. Each
lane has a thread that only receives, and one that only sends. A frame has a first part of fixed
size, which says the length; the rest follows in pieces, so that what control links say can come in
between. Messages are received into memory of the wire's own. So one that comes before its receive
is posted can be kept, no rank waits in a send for what another rank does first, and after a failure
nothing is written to memory of others.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .base import memory_of
from .interface import Failure, Features, Recv, Send, WireFailed
from .memory import Pool, fresh
from .tcp.address import gloo_interfaces

_MESSAGES, _CONTROL = range(2)  # lanes
_HEAD = struct.Struct("<qq")  # of a frame: its channel and its bytes
_FIRST = 1024  # bytes of the first part of a frame, head and all
_INLINE = _FIRST - _HEAD.size
_PIECE = 1 << 20  # bytes of the rest that are sent at a time
_END = -1  # a channel: nothing more comes on this lane
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_FOREVER = timedelta(days=1000)  # the group has the deadlines
_PATIENCE = 5.0  # seconds in which peers that are alive answer a farewell


class _NoFrameError(Exception):
    """A peer sent what is no frame."""


class Waitable(Protocol):
    """A send or a receive under way."""

    def wait(self, timeout: timedelta) -> object:
        """Wait until it is through; RuntimeError: it will not be."""


class Carrier(Protocol):
    """What carries frames: `send` and `recv` of one uint8 tensor, as a ProcessGroup has them."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Waitable: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Waitable: ...


class _Incoming:
    """A message to be received.

    Attributes:
        tensor: where it is; None while a receive by size has got nothing.
        done: whether it is there.
    """

    __slots__ = ("_limit", "_place", "done", "tensor")

    def __init__(self, want: Tensor | int) -> None:
        self.tensor: Tensor | None = None
        self._place: memoryview | None = None
        if isinstance(want, int):
            self._limit = want
        else:
            self._limit = want.nbytes
            self.tensor = want
            self._place = memory_of(want)
        self.done = False

    def fault_of(self, length: int) -> str:
        """What is wrong with a message of that length, or ""."""
        if self._place is None:
            too_long = length > self._limit
            return f"{length} bytes for a receive of {self._limit}" if too_long else ""
        if length != self._limit:
            return f"{length} bytes for a receive of exactly {self._limit}"
        return ""

    def take(self, message: Tensor) -> None:
        """Take what came: a copy into the tensor or, by size, as it is."""
        if self._place is None:
            self.tensor = message
        else:
            self._place[:] = message.numpy().data
        self.done = True


class _Outgoing:
    """A message to be sent; `done` when its tensor may change again."""

    __slots__ = ("done", "memory")

    def __init__(self, tensor: Tensor) -> None:
        self.memory = memory_of(tensor)
        self.done = False


_Message = tuple[int, _Incoming | _Outgoing]
"""A message under way, and its peer."""


class TorchWire:
    """One rank's end of a group; a `weft.wire.interface.Wire`.

    Attributes:
        links: a socket to each peer for the control links, whose bytes the group carries.
    """

    def __init__(self, carrier: Carrier, rank: int, size: int) -> None:
        """Nobody else uses the carrier."""
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self.features = Features()
        self.links: dict[int, socket.socket] = {}
        self._carrier: Carrier | None = carrier
        self._process = os.getpid()
        self._changed = threading.Condition()  # with its lock held these are read and written:
        self._asked: dict[tuple[int, int], deque[_Incoming]] = defaultdict(deque)  # peer, channel
        self._came: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._lost: dict[int, str] = {}  # why nothing more comes from a peer, or goes there
        self._left: set[int] = set()  # peers that said that nothing more comes
        self._failure: Failure | None = None
        self._outgoing: dict[int, queue.SimpleQueue[tuple[int, _Outgoing] | None]] = {}
        self._far_ends: dict[int, socket.socket] = {}  # the other ends of `links`
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads of each peer."""
        for peer in range(self.size):
            if peer == self.rank:
                continue
            self._outgoing[peer] = queue.SimpleQueue()
            self.links[peer], self._far_ends[peer] = socket.socketpair()
            self.links[peer].setblocking(False)
            for body in (self._receive, self._send, self._hear, self._say):
                name = f"weft {body.__name__.strip('_')} {self.rank}-{peer}"
                thread = threading.Thread(
                    target=self._run, args=(body, peer), name=name, daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> TorchPending:
        messages: list[_Message] = []
        with self._changed:
            if self._failure is not None:
                raise WireFailed(self._failure)
            for peer, want in recvs:
                receive = _Incoming(want)
                self._asked[peer, channel].append(receive)
                self._deliver(peer, channel)
                messages.append((peer, receive))
        for peer, tensor in sends:
            send = _Outgoing(tensor)
            self._outgoing[peer].put((channel, send))
            messages.append((peer, send))
        return TorchPending(self, messages, len(recvs))

    def lease(self, nbytes: int) -> None:
        """Any memory is as good: None."""
        return None

    def abort(self, failure: Failure) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = failure
            self._changed.notify_all()

    def failure(self) -> Failure | None:
        return self._failure

    def close(self) -> None:
        if os.getpid() != self._process:  # the parent's threads carry on there
            for sock in self._far_ends.values():
                sock.close()
            return
        self.abort(Failure("aborted", None, "this end was closed"))
        for outgoing in self._outgoing.values():
            outgoing.put(None)  # behind what was sent
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._carrier = None
        for sock in self._far_ends.values():
            sock.close()

    def is_lost(self, peer: int, message: _Incoming | _Outgoing) -> bool:
        """Whether a message can come no more, or not go; with the lock held."""
        if message.done:
            return False
        # a message to a peer that leaves still arrives
        return peer in self._lost or (isinstance(message, _Incoming) and peer in self._left)

    def finish(self, messages: Sequence[_Message], timeout: float | None) -> None:
        """Wait until all of these are through.

        Raises:
            TimeoutError: they are not within so many seconds.
            WireFailed: the wire has failed, or one of them will not come.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            for peer, message in messages:
                while not message.done:
                    if self._failure is None and self.is_lost(peer, message):
                        text = self._lost.get(peer, "nothing more comes")
                        self._failure = Failure("lost", peer, text)
                    if self._failure is not None:
                        raise WireFailed(self._failure)
                    seconds = until - time.monotonic()
                    if seconds <= 0:
                        raise TimeoutError("the messages of a post are not complete")
                    self._changed.wait(None if timeout is None else seconds)

    def is_over(self, messages: Sequence[_Message]) -> bool:
        """Whether to wait for these would return or raise at once."""
        with self._changed:
            if self._failure is not None or all(message.done for _, message in messages):
                return True
            return any(self.is_lost(peer, message) for peer, message in messages)

    def _deliver(self, peer: int, channel: int) -> None:
        """Give messages that came to the receives that wait for them; with the lock held."""
        came = self._came[peer, channel]
        asked = self._asked[peer, channel]
        while came and asked and self._failure is None:
            message = came.popleft()
            receive = asked.popleft()
            if fault := receive.fault_of(len(message)):
                self._refuse(peer, fault)
                return
            receive.take(message)

    def _lose(self, peer: int, why: str) -> None:
        """Note that nothing more comes from a peer, or goes there."""
        with self._changed:
            self._lost.setdefault(peer, why)
            self._changed.notify_all()

    def _refuse(self, peer: int, what: str, body: Callable[[int], None] | None = None) -> None:
        """Fail, because a peer sent an invalid message; `body` is of the thread that received it.

        What came for the control link is told to the detector, which finds that it is nonsense:
        else it would take the end of the link, which follows, for the peer's death.
        """
        self.abort(Failure("garbled", peer, f"rank {peer} sent {what}"))
        if body == self._hear:
            self._far_ends[peer].sendall(what.encode() + b"\n")

    # the threads of one peer

    def _run(self, body: Callable[[int], None], peer: int) -> None:
        """Run one thread's loop until a farewell, an error of the group, or a closed socket."""
        with contextlib.suppress(OSError):
            try:
                body(peer)
            except _NoFrameError as error:
                self._refuse(peer, str(error), body)
            except RuntimeError:
                self._lose(peer, "nothing more comes")
            finally:
                if body in (self._hear, self._say):
                    self._far_ends[peer].shutdown(socket.SHUT_RDWR)  # the end of the link

    def _receive(self, peer: int) -> None:
        while (frame := self._get(peer, _MESSAGES)) is not None:
            channel, message = frame
            with self._changed:
                self._came[peer, channel].append(message)
                self._deliver(peer, channel)
                self._changed.notify_all()
        with self._changed:
            self._left.add(peer)
            self._changed.notify_all()
        self._outgoing[peer].put(None)  # so that its thread ends, too

    def _send(self, peer: int) -> None:
        while (item := self._outgoing[peer].get()) is not None:
            channel, send = item
            nbytes = len(send.memory)
            data = torch.frombuffer(send.memory, dtype=torch.uint8) if nbytes else _NOTHING
            self._put(peer, _MESSAGES, channel, data)
            with self._changed:
                send.done = True
                self._changed.notify_all()
            del item, send  # the caller's: not this idle thread's
        self._put(peer, _MESSAGES, _END, _NOTHING)
        self._lose(peer, "nothing more goes there")

    def _hear(self, peer: int) -> None:
        while (frame := self._get(peer, _CONTROL)) is not None:  # all, else a peer's send hangs
            with contextlib.suppress(OSError):  # the detector has closed its end
                self._far_ends[peer].sendall(frame[1].numpy().data)

    def _say(self, peer: int) -> None:
        while words := self._words(peer):
            self._put(peer, _CONTROL, 0, torch.frombuffer(bytearray(words), dtype=torch.uint8))
        self._put(peer, _CONTROL, _END, _NOTHING)

    def _words(self, peer: int) -> bytes:
        """The next bytes of the control link; none once the detector has closed its end."""
        try:
            return self._far_ends[peer].recv(_INLINE)
        except ConnectionResetError:  # it closed without reading all; its last bytes follow
            return self._far_ends[peer].recv(_INLINE)

    def _put(self, peer: int, lane: int, channel: int, data: Tensor) -> None:
        """Send one frame."""
        carrier = self._open_carrier()
        first = torch.zeros(_FIRST, dtype=torch.uint8, device="cpu")
        _HEAD.pack_into(first.numpy().data, 0, channel, len(data))
        first[_HEAD.size :][: len(data)] = data[:_INLINE]
        carrier.send([first], peer, lane).wait(_FOREVER)
        for start in range(_INLINE, len(data), _PIECE):
            carrier.send([data[start : start + _PIECE]], peer, lane).wait(_FOREVER)

    def _get(self, peer: int, lane: int) -> tuple[int, Tensor] | None:
        """The next frame's channel and bytes; None: it was the last.

        Raises:
            RuntimeError: nothing more comes.
            _NoFrameError: what came makes no sense.
        """
        carrier = self._open_carrier()
        first = torch.empty(_FIRST, dtype=torch.uint8, device="cpu")
        carrier.recv([first], peer, lane).wait(_FOREVER)
        channel, count = _HEAD.unpack_from(first.numpy().data)
        try:
            data = fresh((count,), torch.uint8) if channel >= _END else None
        except (RuntimeError, MemoryError, OverflowError):  # fewer than none, or too many
            data = None
        if data is None:
            raise _NoFrameError(f"a frame of {count} bytes for channel {channel}")
        data[:_INLINE] = first[_HEAD.size :][:count]
        for start in range(_INLINE, count, _PIECE):
            carrier.recv([data[start : start + _PIECE]], peer, lane).wait(_FOREVER)
        return None if channel == _END else (channel, data)

    def _open_carrier(self) -> Carrier:
        carrier = self._carrier
        if carrier is None:
            raise RuntimeError("this end was closed")
        return carrier


class TorchPending:
    """The messages of one post; a `weft.wire.interface.Pending`."""

    def __init__(self, wire: TorchWire, messages: list[_Message], count: int) -> None:
        """Of the messages, the first `count` are receives."""
        self._wire = wire
        self._messages = messages
        self._count = count
        self._received: list[Tensor] | None = None

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        if self._received is None:
            self._wire.finish(self._messages, timeout)
            received = []
            for _, message in self._messages[: self._count]:
                assert isinstance(message, _Incoming) and message.tensor is not None
                received.append(message.tensor)
            self._received = received
        return self._received

    def wait_stream(self) -> list[Tensor]:
        return self.wait()

    def done(self) -> bool:
        return self._wire.is_over(self._messages)

    def waiting_for(self) -> list[int]:
        return sorted({peer for peer, message in self._messages if not message.done})

    def release(self) -> None:
        """Memory of messages is theirs alone: it goes with the last view."""
        self._messages = []


def join(
    store: dist.Store, rank: int, size: int, timeout: float, memory: Pool
) -> tuple[TorchWire, dict[int, socket.socket]]:
    """Join the ranks that meet at a store by a gloo group of their own; collective.

    Returns:
        The wire, and the control link to each peer.

    Raises:
        RuntimeError: from gloo or the store.
    """
    group = _torch.gloo_group(store, rank, size, timeout, gloo_interfaces(store))
    wire = TorchWire(group, rank, size)
    wire.start()
    return wire, wire.links
