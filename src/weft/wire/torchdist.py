"""The engine over a ProcessGroup of torch.distributed: the plain, slow way, and the one to trust.

All bytes, the detector's too, go by `send` and `recv` of uint8 tensors on a group of weft's own: no
memory is shared, and only torch opens sockets. Use it to compare when a result looks wrong
(`WEFT_SAFE=1`), or if a process may not open sockets of its own.

A send of torch must meet a receive of the same size, and a wait of gloo can neither be polled nor
ended. So each peer has two lanes, by torch's tags: one for messages, one for the failure detector.
Each lane has a thread that only receives, and one that only sends. A frame has a first part of
fixed size, which says the length; the rest follows in pieces, so that the detector's messages can
come in between. A message that comes before its receive is posted is kept. So no rank waits in a
send for what another rank does first.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from . import base
from .base import Recv
from .memory import Pool, fresh
from .processes import Engine, Lost
from .tcp.address import gloo_interfaces
from .tcp.connection import Receive, Send

_MESSAGES, _SIDE = range(2)  # lanes
_HEAD = struct.Struct("<qq")  # of a frame: its channel and its bytes
_FIRST = 1024  # bytes of the first part of a frame, head and all
_INLINE = _FIRST - _HEAD.size
_PIECE = 1 << 20  # bytes of the rest that are sent at a time
_END = -1  # a channel: nothing more comes on this lane
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_FOREVER = timedelta(days=1000)  # the detector has the deadlines
_PATIENCE = 5.0  # seconds in which peers that are alive answer a farewell

_Message = tuple[int, Receive | Send]
"""A message under way, and its peer."""


class Links(Engine):
    """The connections of one rank to all others: an engine as `processes` describes it."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """`group` has the `send` and `recv` of a ProcessGroup, and nobody else uses it."""
        side: dict[int, socket.socket] = {}
        super().__init__(side)
        self._group = group
        self._changed = threading.Condition()  # with its lock held these are read and written:
        self._asked: dict[tuple[int, int], deque[Receive]] = defaultdict(deque)  # peer, channel
        self._came: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._lost: dict[int, str] = {}  # why nothing more comes from a peer, or goes there
        self._left: set[int] = set()  # peers that said that nothing more comes
        self._cut = False
        self._outgoing: dict[int, queue.SimpleQueue[tuple[int, Send] | None]] = {}
        self._ours: dict[int, socket.socket] = {}  # the other ends of those at the side
        self._threads: list[threading.Thread] = []
        for peer in (peer for peer in range(size) if peer != rank):
            self._outgoing[peer] = queue.SimpleQueue()
            side[peer], self._ours[peer] = socket.socketpair()
            side[peer].setblocking(False)
            for body in (self._receive, self._send, self._hear, self._say):
                name = f"weft {body.__name__.strip('_')} {rank}-{peer}"
                thread = threading.Thread(
                    target=self._run, args=(body, peer), name=name, daemon=True
                )
                self._threads.append(thread)
                thread.start()

    @classmethod
    def over_gloo(cls, store: dist.Store, rank: int, size: int, timeout: float) -> Links:
        """Over a gloo group of its own; collective.

        Raises:
            RuntimeError: from gloo or the store.
        """
        group = _torch.gloo_group(store, rank, size, timeout, gloo_interfaces(store))
        return cls(group, rank, size)

    def post(
        self, sends: Sequence[base.Send], recvs: Sequence[Recv], channel: int, pool: Pool
    ) -> list[_Message]:
        messages: list[_Message] = []
        with self._changed:
            for peer, want in recvs:
                receive = Receive(want, pool)
                self._asked[peer, channel].append(receive)
                self._deliver(peer, channel)
                messages.append((peer, receive))
        for peer, tensor in sends:
            send = Send(tensor)
            self._outgoing[peer].put((channel, send))
            messages.append((peer, send))
        return messages

    def finish(self, messages: Sequence[_Message], limit: float, at: Callable[[int], None]) -> None:
        until = time.monotonic() + limit
        with self._changed:
            for number, (peer, message) in enumerate(messages):
                at(number)
                while not message.done:
                    left = until - time.monotonic()
                    # a message to a peer that leaves still arrives
                    awaited = isinstance(message, Receive) and peer in self._left
                    if self._cut or awaited or peer in self._lost or left <= 0:
                        why = "nothing more comes" if awaited else "it did not come in time"
                        raise Lost(self._lost.get(peer, why))
                    self._changed.wait(left)

    def cut(self) -> None:
        with self._changed:
            self._cut = True
            self._changed.notify_all()

    def close(self) -> None:
        for peer, outgoing in self._outgoing.items():
            self._lose(peer, "the connection is closed")
            outgoing.put(None)
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._group = None
        for sock in self._ours.values():
            sock.close()

    def _deliver(self, peer: int, channel: int) -> None:
        """Copy messages that came to the receives that wait for them; with the lock held."""
        came, asked = self._came[peer, channel], self._asked[peer, channel]
        while came and asked and not self._cut:
            message, receive = came.popleft(), asked.popleft()
            if len(message) > receive.limit:
                self._refuse(peer, f"{len(message)} bytes for a receive of {receive.limit}")
                return
            receive.place()[: len(message)] = message.numpy().data
            receive.done = True

    def _lose(self, peer: int, why: str) -> None:
        """Note that nothing more comes from a peer, or goes there."""
        with self._changed:
            self._lost.setdefault(peer, why)
            self._changed.notify_all()

    def _refuse(self, peer: int, what: str) -> None:
        """Break the wire, because a peer sent an invalid message."""
        self.accuse(peer, what)  # first, so that waits for that peer find the verdict
        self._lose(peer, f"{what} came")

    # the threads of one peer

    def _run(self, body: Callable[[int], None], peer: int) -> None:
        """Run one thread's loop until a farewell, an error of the group, or a closed socket."""
        with contextlib.suppress(OSError):
            try:
                body(peer)
            except RuntimeError:
                self._lose(peer, "nothing more comes")
            finally:
                if body in (self._hear, self._say):
                    self._ours[peer].shutdown(socket.SHUT_RDWR)  # which tells the detector

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
            data = torch.frombuffer(send.memory, dtype=torch.uint8) if send.nbytes else _NOTHING
            self._put(peer, _MESSAGES, channel, data)
            with self._changed:
                send.done = True
                self._changed.notify_all()
            del item, send  # the caller's: not this idle thread's
        self._put(peer, _MESSAGES, _END, _NOTHING)
        self._lose(peer, "nothing more goes there")

    def _hear(self, peer: int) -> None:
        while (frame := self._get(peer, _SIDE)) is not None:  # read all, else a peer's send hangs
            with contextlib.suppress(OSError):  # the detector has closed its end
                self._ours[peer].sendall(frame[1].numpy().data)

    def _say(self, peer: int) -> None:
        while said := self._said(peer):
            self._put(peer, _SIDE, 0, torch.frombuffer(bytearray(said), dtype=torch.uint8))
        self._put(peer, _SIDE, _END, _NOTHING)

    def _said(self, peer: int) -> bytes:
        """The detector's next bytes for a peer; none once it has closed its end."""
        try:
            return self._ours[peer].recv(_INLINE)
        except ConnectionResetError:  # it closed without reading all; its last bytes follow
            return self._ours[peer].recv(_INLINE)

    def _put(self, peer: int, lane: int, channel: int, data: Tensor) -> None:
        """Send one frame."""
        first = torch.zeros(_FIRST, dtype=torch.uint8, device="cpu")
        _HEAD.pack_into(first.numpy().data, 0, channel, len(data))
        first[_HEAD.size :][: len(data)] = data[:_INLINE]
        self._group.send([first], peer, lane).wait(_FOREVER)
        for start in range(_INLINE, len(data), _PIECE):
            self._group.send([data[start : start + _PIECE]], peer, lane).wait(_FOREVER)

    def _get(self, peer: int, lane: int) -> tuple[int, Tensor] | None:
        """The next frame's channel and bytes; None: it was the last."""
        first = torch.empty(_FIRST, dtype=torch.uint8, device="cpu")
        self._group.recv([first], peer, lane).wait(_FOREVER)
        channel, count = _HEAD.unpack_from(first.numpy().data)
        try:
            data = fresh((count,), torch.uint8) if channel >= _END else None
        except (RuntimeError, MemoryError, OverflowError):  # fewer than none, or too many
            data = None
        if data is None:
            self._refuse(peer, f"a frame of {count} bytes for channel {channel}")
            raise RuntimeError("that is no frame")
        data[:_INLINE] = first[_HEAD.size :][:count]
        for start in range(_INLINE, count, _PIECE):
            self._group.recv([data[start : start + _PIECE]], peer, lane).wait(_FOREVER)
        return None if channel == _END else (channel, data)
