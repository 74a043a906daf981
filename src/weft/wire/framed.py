"""Messages in frames: a wire, and control links, over what sends and receives whole tensors.

That is a ProcessGroup of torch's (`torch_gloo`), or MPI (`mpi`). There a send must meet a receive
of the same size, and a wait of gloo can neither be polled nor ended alone. So each peer has a
thread that only receives, and one that only sends. A frame has a first part of fixed size, which
says the length; the rest follows in pieces. Messages are received into memory of the wire's own. So
one that comes before its receive is posted can be kept, no rank waits in a send for what another
rank does first, and after a failure nothing is written to memory of others. What is sent is copied
piece by piece, and after a failure nothing is read of others' memory: so a peer never takes for a
message what is half of it and half of what came there later. (What was posted before a close is
sent, and is not to change until that returns.)
"""

from __future__ import annotations

import contextlib
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
from torch import Tensor

from ..base.latch import NAP, deadline_of
from ..base.memory import fault_of, fresh, memory_of
from ..base.pace import patient
from .interface import Failure, Features, Recv, Send, WireFailed

_HEAD = struct.Struct("<qq")  # of a frame: its channel and its bytes
_FIRST = 1024  # bytes of the first part of a frame, head and all
_INLINE = _FIRST - _HEAD.size
_PIECE = 1 << 20  # bytes of the rest that are sent at a time
_END = -1  # a channel: nothing more comes
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_FOREVER = timedelta(days=1000)  # the group has the deadlines
_CLOSED = Failure("aborted", None, "this end was closed")
_FAREWELL = 5.0  # seconds in which peers that are alive take what was sent, and say farewell, too
_HURRY = 0.5  # the same after a failure, when nothing need arrive, and for control links
_LAST = 1.0  # seconds in which a thread ends whose wait was ended


class NoFrameError(Exception):
    """A peer sent what is no frame."""


class Waitable(Protocol):
    """A send or a receive under way."""

    def wait(self, timeout: timedelta) -> object:
        """Wait until it is through; RuntimeError: it will not be."""


class Carrier(Protocol):
    """What carries frames: `send` and `recv` of one uint8 tensor, as a ProcessGroup has them."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Waitable: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Waitable: ...

    def end_waits(self, peers: Sequence[int]) -> None:
        """Have all waits for messages of these peers raise; maybe those for others, too.

        The carrier is of no use after this. Peers that are alive notice it.
        """

    def abandon(self) -> None:
        """In a forked child: let go of connections, as far as possible without a word to peers."""


class _Frames:
    """The frames between this rank and one peer; one thread puts, another gets.

    Neither has a deadline: a wait ends with its message, with an error of the carrier, which the
    death of the peer makes, or with `Carrier.end_waits`.
    """

    def __init__(self, carrier: Carrier, peer: int) -> None:
        self._carrier = carrier
        self._peer = peer

    def put(
        self, channel: int, data: Tensor, copy: Callable[[Tensor], Tensor] = torch.clone
    ) -> None:
        """Send one frame.

        Args:
            channel, data: what is in it.
            copy: copies a part of `data`, or raises RuntimeError where it may not be read any more.

        Raises:
            RuntimeError: it will not go.
        """
        first = torch.zeros(_FIRST, dtype=torch.uint8, device="cpu")
        _HEAD.pack_into(first.numpy().data, 0, channel, len(data))
        first[_HEAD.size :][: len(data)] = copy(data[:_INLINE])
        self._carrier.send([first], self._peer, 0).wait(_FOREVER)
        for start in range(_INLINE, len(data), _PIECE):
            piece = copy(data[start : start + _PIECE])
            self._carrier.send([piece], self._peer, 0).wait(_FOREVER)

    def end(self) -> None:
        """Say that nothing more comes."""
        self.put(_END, _NOTHING)

    def get(self) -> tuple[int, Tensor] | None:
        """The next frame's channel and bytes; None: it was the last.

        Raises:
            RuntimeError: nothing more comes.
            NoFrameError: what came makes no sense.
        """
        first = torch.empty(_FIRST, dtype=torch.uint8, device="cpu")
        self._carrier.recv([first], self._peer, 0).wait(_FOREVER)
        channel, count = _HEAD.unpack_from(first.numpy().data)
        try:
            data = fresh((count,), torch.uint8) if channel >= _END else None
        except (RuntimeError, MemoryError, OverflowError):  # fewer than none, or too many
            data = None
        if data is None:
            raise NoFrameError(f"a frame of {count} bytes for channel {channel}")
        data[:_INLINE] = first[_HEAD.size :][:count]
        for start in range(_INLINE, count, _PIECE):
            self._carrier.recv([data[start : start + _PIECE]], self._peer, 0).wait(_FOREVER)
        return None if channel == _END else (channel, data)


class _Threads:
    """The threads of all peers; each runs a loop until a farewell, or an error of the carrier."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._threads: list[tuple[int, threading.Thread]] = []  # each with its peer

    def start(self, body: Callable[[int], None], peer: int) -> None:
        name = f"weft {body.__name__.strip('_')} {self._rank}-{peer}"
        thread = threading.Thread(target=body, args=[peer], name=name, daemon=True)
        thread.start()
        self._threads.append((peer, thread))

    def end(self, carrier: Carrier, seconds: float) -> None:
        """Wait until they have ended, as they soon do where the peers are alive.

        After so many seconds, end the waits of those that are left.
        """
        left = self._left_after(seconds)
        if left:  # a peer is stopped, cut off, or busy in foreign code
            carrier.end_waits(left)
            self._left_after(_LAST)

    def _left_after(self, seconds: float) -> list[int]:
        """Wait for the threads; the peers of those that go on after so many seconds."""
        until = time.monotonic() + seconds
        others = [each for each in self._threads if each[1] is not threading.current_thread()]
        for _, thread in others:
            thread.join(max(0.0, until - time.monotonic()))
        return sorted({peer for peer, thread in others if thread.is_alive()})


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
        return fault_of(length, self._limit, is_sized=self._place is None)

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


class FramedWire:
    """One rank's end of a group; a `weft.wire.interface.Wire`.

    Attributes:
        changed: notified when a message is through or can be no more, and at a failure.
    """

    def __init__(self, carrier: Carrier, rank: int, size: int) -> None:
        """Nobody else uses the carrier."""
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self.features = Features()
        self._carrier: Carrier | None = carrier  # None: it is closed
        self._frames = {peer: _Frames(carrier, peer) for peer in range(size) if peer != rank}
        self._threads = _Threads(rank)
        self._process = os.getpid()
        # entered by itself: that of a condition is Python, where an interrupt may leave it held
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        # with the lock held these are read and written:
        # By peer and channel the receives that wait for a message, and the messages that came
        # before they were asked for. While the wire is sound, one of the two is empty.
        self._receives: dict[tuple[int, int], deque[_Incoming]] = defaultdict(deque)
        self._early: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._lost: dict[int, str] = {}  # why nothing more comes from a peer, or goes there
        self._left: set[int] = set()  # peers that said that nothing more comes
        self._failure: Failure | None = None
        self._outgoing: dict[int, queue.SimpleQueue[tuple[int, _Outgoing] | None]] = {}
        for peer in self._frames:
            self._outgoing[peer] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the threads of each peer."""
        for peer in self._frames:
            self._threads.start(self._receive, peer)
            self._threads.start(self._send, peer)

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> FramedPending:
        messages: list[_Message] = []
        with self.lock:
            if self._failure is not None:
                raise WireFailed(self._failure)
            for peer, want in recvs:
                receive = _Incoming(want)
                self._receives[peer, channel].append(receive)
                self._deliver(peer, channel)
                messages.append((peer, receive))
        for peer, tensor in sends:
            send = _Outgoing(tensor)
            self._outgoing[peer].put((channel, send))
            messages.append((peer, send))
        return FramedPending(self, messages, len(recvs))

    def lease(self, nbytes: int) -> None:
        """Any memory is as good: None."""
        return None

    def abort(self, failure: Failure) -> None:
        with self.lock:
            if self._failure is None:
                self._failure = failure
            self.changed.notify_all()

    def failure(self) -> Failure | None:
        return self._failure

    def close(self) -> None:
        if os.getpid() != self._process:
            self._close_in_child()
            return
        seconds = _FAREWELL if self._failure is None else patient(_HURRY)
        self.abort(_CLOSED)
        carrier = self._carrier
        self._carrier = None
        if carrier is None:
            return
        for outgoing in self._outgoing.values():
            outgoing.put(None)  # behind what was sent
        self._threads.end(carrier, seconds)
        self._frames.clear()
        for outgoing in self._outgoing.values():
            with contextlib.suppress(queue.Empty):
                while True:
                    outgoing.get_nowait()  # what has not gone is the caller's
            outgoing.put(None)  # for a thread that is held up still

    def _close_in_child(self) -> None:
        # the threads are the parent's, and one of them may have had the lock
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        carrier = self._carrier
        self._carrier = None
        if carrier is not None:
            carrier.abandon()

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
        until = deadline_of(timeout)
        with self.lock:
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
                    # a thread of a peer notifies at each message, and at its end; so does `abort`
                    self.changed.wait(min(seconds, NAP))

    def is_over(self, messages: Sequence[_Message]) -> bool:
        """Whether to wait for these would return or raise at once."""
        with self.lock:
            if self._failure is not None or all(message.done for _, message in messages):
                return True
            return any(self.is_lost(peer, message) for peer, message in messages)

    def _deliver(self, peer: int, channel: int) -> None:
        """Give messages that came to the receives that wait for them; with the lock held."""
        messages = self._early[peer, channel]
        receives = self._receives[peer, channel]
        while messages and receives and self._failure is None:
            message = messages.popleft()
            receive = receives.popleft()
            if fault := receive.fault_of(len(message)):
                self._refuse(peer, fault)
                return
            receive.take(message)

    def _lose(self, peer: int, why: str) -> None:
        """Note that nothing more comes from a peer, or goes there."""
        with self.lock:
            self._lost.setdefault(peer, why)
            self.changed.notify_all()

    def _refuse(self, peer: int, what: str) -> None:
        """Fail, because a peer sent an invalid message."""
        self.abort(Failure("garbled", peer, f"rank {peer} sent {what}"))

    def _break(self, what: str, peer: int, error: BaseException) -> None:
        """Fail, because a thread ends that others wait for."""
        text = f"the thread that {what} what is rank {peer}'s failed: {error!r}"
        self.abort(Failure("broken", self.rank, text))

    # the threads of one peer

    def _receive(self, peer: int) -> None:
        """Take every frame as it comes, also before it is asked for, until the peer's last."""
        frames = self._frames[peer]
        outgoing = self._outgoing[peer]
        try:
            while (frame := frames.get()) is not None:
                channel, message = frame
                with self.lock:
                    self._early[peer, channel].append(message)
                    self._deliver(peer, channel)
                    self.changed.notify_all()
                del frame, message  # the receiver's: not this idle thread's
        except NoFrameError as error:
            self._refuse(peer, str(error))
        except RuntimeError:
            self._lose(peer, "nothing more comes")
        except BaseException as error:  # else whoever waits would hear of nothing
            self._break("receives", peer, error)
        else:
            with self.lock:
                self._left.add(peer)
                self.changed.notify_all()
        outgoing.put(None)  # so that its thread ends, too

    def _send(self, peer: int) -> None:
        """Send what is posted, until this wire is closed or nothing more comes from the peer."""
        frames = self._frames[peer]
        outgoing = self._outgoing[peer]
        try:
            while (item := outgoing.get()) is not None:
                self._put(frames, *item)
                del item  # the caller's: not this idle thread's
            frames.end()
        except RuntimeError:
            pass  # what could not be sent is not done, so whoever waits for it finds it lost
        except BaseException as error:  # else whoever waits would hear of nothing
            self._break("sends", peer, error)
        self._lose(peer, "nothing more goes there")

    def _put(self, frames: _Frames, channel: int, send: _Outgoing) -> None:
        """Send one message; none, once the wire has failed."""
        if self._has_failed():
            return
        nbytes = len(send.memory)
        data = torch.frombuffer(send.memory, dtype=torch.uint8) if nbytes else _NOTHING
        frames.put(channel, data, self._copy)
        with self.lock:
            send.done = True
            self.changed.notify_all()

    def _copy(self, part: Tensor) -> Tensor:
        """A copy of a part of a message; RuntimeError: its memory may be the caller's again."""
        with self.lock:
            if self._has_failed():
                raise RuntimeError("the wire has failed")
            return part.clone()

    def _has_failed(self) -> bool:
        """Whether it has failed; what was posted before a close still goes."""
        return self._failure is not None and self._failure is not _CLOSED


class FramedPending:
    """The messages of one post; a `weft.wire.interface.Pending`."""

    def __init__(self, wire: FramedWire, messages: list[_Message], count: int) -> None:
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


class CarriedSockets:
    """A socket to each peer, for control links, whose bytes a carrier carries.

    Attributes:
        sockets: this rank's ends, non-blocking, by peer; who uses them closes them.
    """

    def __init__(self, carrier: Carrier, rank: int, size: int) -> None:
        """Nobody else uses the carrier."""
        self._carrier: Carrier | None = carrier  # None: it is closed
        self._frames = {peer: _Frames(carrier, peer) for peer in range(size) if peer != rank}
        self._threads = _Threads(rank)
        self._process = os.getpid()
        self._far_ends: dict[int, socket.socket] = {}
        self.sockets: dict[int, socket.socket] = {}
        for peer in self._frames:
            self.sockets[peer], self._far_ends[peer] = socket.socketpair()
            self.sockets[peer].setblocking(False)

    def start(self) -> None:
        """Start the threads of each peer."""
        for peer in self._frames:
            self._threads.start(self._hear, peer)
            self._threads.start(self._say, peer)

    def close(self) -> None:
        """End the threads, once `sockets` are closed.

        The last words are short, and a peer has asked for them long before, even one that is
        stopped since: so they need little time.
        """
        carrier = self._carrier
        self._carrier = None
        if carrier is not None and os.getpid() != self._process:
            carrier.abandon()
        elif carrier is not None:
            self._threads.end(carrier, patient(_HURRY))
            self._frames.clear()
        for sock in self._far_ends.values():
            sock.close()

    def _hear(self, peer: int) -> None:
        """The thread that brings a peer's bytes to its socket, until its last, or its death."""
        frames = self._frames[peer]
        sock = self._far_ends[peer]
        with contextlib.suppress(OSError):  # it is closed
            try:
                while (frame := frames.get()) is not None:  # all, else a peer's send hangs
                    with contextlib.suppress(OSError):  # this rank has closed its end
                        sock.sendall(frame[1].numpy().data)
            except NoFrameError as error:
                # nonsense, for which the reader blames the peer; else it would take the end of the
                # link, which follows, for the peer's death
                sock.sendall(f"{error}\n".encode())
            except RuntimeError:
                pass  # nothing more comes
            finally:
                sock.shutdown(socket.SHUT_RDWR)

    def _say(self, peer: int) -> None:
        """The thread that sends a peer what its socket is given, until that is closed."""
        frames = self._frames[peer]
        with contextlib.suppress(OSError):
            try:
                while words := self._words(peer):
                    frames.put(0, torch.frombuffer(bytearray(words), dtype=torch.uint8))
                frames.end()
            except RuntimeError:
                pass  # nothing more goes there
            finally:
                self._far_ends[peer].shutdown(socket.SHUT_RDWR)

    def _words(self, peer: int) -> bytes:
        """The next bytes of the control link; none once its end is closed here."""
        try:
            return self._far_ends[peer].recv(_INLINE)
        except ConnectionResetError:  # it closed without reading all; its last bytes follow
            return self._far_ends[peer].recv(_INLINE)
