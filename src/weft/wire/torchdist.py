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
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WeftError, WireError
from . import dense
from .base import Pending, Recv, Send, Wire, as_bytes
from .failure.detector import Detector
from .failure.verdict import Verdict
from .hosts import host_name
from .interface import interface_of, own_address
from .memory import Lease

__all__ = ["Links", "TorchWire"]

_HEAD = struct.Struct("<qqq")  # of a frame: its channel, its bytes, those of the message after it
_FIRST = 1024  # bytes of the first part of a frame, head and all
_INLINE = _FIRST - _HEAD.size
_FRAME = 1 << 20  # bytes of a message that one frame carries
_DETECTOR, _END = -1, -2  # channels: what the detector says; nothing more comes
_GLOO = "GLOO_SOCKET_IFNAME"
_FOREVER = timedelta(days=1000)  # the detector has the deadlines
_PATIENCE = 5.0  # seconds in which peers that are alive answer a farewell
_BEYOND = 3.0  # seconds by which the limit of a wait lies beyond its deadline

_Key = tuple[int, int, int]  # a message: its peer, its channel, and its number there


class TorchWire(Wire):
    """One rank's end of a wire over `links`; None where it is the only rank."""

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        links: Links | None,
        part: Callable[[int, int, str], Wire],
    ) -> None:
        """`part` makes the wire of some of the ranks, given rank, size and name."""
        super().__init__(rank, size, timeout, host_name())
        self._links, self._part = links, part
        self._subs = 0
        self._closed = False
        self._broken: tuple[str, int | None] | None = None  # what every use raises: text, culprit
        self._detector: Detector | None = None
        if links is not None:
            self._detector = links.watched(timeout, functools.partial(_call_of, weakref.ref(self)))
            # bye when the wire is dropped, and at exit: of multiprocessing's processes, too
            Finalize(self, links.close, exitpriority=0)

    def _post(self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int) -> Pending:
        self._check()
        for peer, _ in (*sends, *recvs):
            if peer == self.rank or not 0 <= peer < self.size:
                raise WeftError(f"rank {self.rank}: rank {peer} is no peer among {self.size} ranks")
        return _Posted(self, self._links, sends, recvs, channel)

    def dense_all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self._check()
        return dense.all_reduce(self, tensor, op)

    def sub(self, ranks: Sequence[int]) -> Wire | None:
        self._check()
        chosen = self.chosen(ranks)
        self._subs += 1
        if self.rank not in chosen:
            return None
        name = f"sub{self._subs}:{','.join(map(str, chosen))}"
        return self._part(chosen.index(self.rank), len(chosen), name)

    def abort(self, reason: str) -> None:
        verdict = Verdict(self.rank, f"rank {self.rank} gave up: {reason}")
        if self._detector is not None:
            self._detector.settle(verdict)
        elif not self._closed:
            self._break(verdict, "")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._links is not None:
            self._links.close()
        if self._worker is not None:
            self._worker.stop()
        self.memory.drain()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _check(self) -> None:
        """Raise what broke the wire, if anything did."""
        if self._closed:
            raise WireError(f"rank {self.rank}: this wire is closed", rank=self.rank)
        verdict = self._detector.verdict if self._detector is not None else None
        if self._broken is None and verdict is not None:
            self._break(verdict, f" while rank {self.rank} was{self._call()}" if self.doing else "")
        self._raise()

    def _break(self, verdict: Verdict, when: str) -> None:
        text = f"rank {self.rank}: {verdict.text}{when}; start the group again"
        self._broken = (text, verdict.culprit)

    def _raise(self) -> None:
        if self._broken is not None:
            text, culprit = self._broken  # the same text each time
            raise WireError(text, rank=self.rank, culprit=culprit) from None

    def _call(self) -> str:
        """The call that runs, as errors spell it."""
        return f" in {self.doing} (call {self.calls})" if self.doing else ""


class _Posted(Pending):
    """Sends and receives under way; the receives come first."""

    def __init__(
        self,
        wire: TorchWire,
        links: Links | None,
        sends: Sequence[Send],
        recvs: Sequence[Recv],
        channel: int,
    ) -> None:
        self._wire, self._links = wire, links
        self._sends, self._recvs = sends, recvs
        self._received: list[Tensor] = []
        self._leases: list[Lease] = []
        self._at = 0  # the message that is waited for
        self._done = links is None
        if links is not None:
            self._keys = [links.expect(peer, channel) for peer, _ in recvs]
            self._sent = [links.send(peer, channel, tensor) for peer, tensor in sends]

    def wait(self) -> list[Tensor]:
        wire, links = self._wire, self._links
        if self._done or links is None:
            return self._received
        wire._check()
        links.detector.begin(self)
        try:
            for number in range(len(self._received), len(self._recvs)):
                self._at, (peer, want), key = number, self._recvs[number], self._keys[number]
                self._await(links, peer, functools.partial(links.inbox.__contains__, key))
                self._take(links.inbox.pop(key), want)
            for number, (peer, _) in enumerate(self._sends):
                self._at = len(self._recvs) + number
                self._await(links, peer, self._sent[number].is_set)
        except WireError:
            raise
        except BaseException as error:
            kind = "SIGINT" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            links.detector.settle(Verdict(wire.rank, f"rank {wire.rank} was interrupted ({kind})"))
            raise
        finally:
            links.detector.end()
        self._done = True
        return self._received

    def _await(self, links: Links, peer: int, there: Callable[[], bool]) -> None:
        """Wait until something is there that `peer` sees to."""
        until = time.monotonic() + self._wire.timeout + _BEYOND
        with links.changed:
            while not there() and peer not in links.ended and links.detector.verdict is None:
                left = until - time.monotonic()
                if left <= 0 or links.closing:
                    break
                links.changed.wait(left)
        if not there():
            self._fail(links, "it did not come")

    def _fail(self, links: Links, error: str) -> NoReturn:
        """Raise why a wait failed, after the detector found out."""
        wire, what = self._wire, self._what(links)
        if links.closing:
            raise WireError(f"rank {wire.rank}: this wire was closed {what}", rank=wire.rank)
        wire._break(links.detector.explain(self, error), f" {what}")
        wire._raise()
        raise AssertionError("a broken wire raises")

    def _take(self, message: Tensor, want: Tensor | int) -> None:
        """Put what came where it is asked for."""
        if isinstance(want, int):
            self._leases.append(self._wire.memory.lease(want))
            want = self._leases[-1].tensor
        place = as_bytes(want.detach()).numpy()
        if len(message) > len(place):
            assert self._links is not None
            peer, rank = self.peer(), self._wire.rank
            self._links.detector.settle(
                Verdict(
                    peer,
                    f"rank {peer} sent {len(message)} bytes to rank {rank}, which had posted a "
                    f"receive of at most {len(place)}",
                )
            )
            self._wire._check()
        place[: len(message)] = message.numpy()
        self._received.append(want)

    def release(self) -> None:
        while self._leases:
            self._leases.pop().release()

    def arrived(self) -> list[bool]:
        links = self._links
        if self._done or links is None:
            return [True] * len(self._recvs)
        taken = len(self._received)
        return [at < taken or key in links.inbox for at, key in enumerate(self._keys)]

    def is_through(self) -> bool:
        return self._done or all((*self.arrived(), *(sent.is_set() for sent in self._sent)))

    def peer(self) -> int:
        """The rank that is waited for."""
        return (*self._recvs, *self._sends)[self._at][0]

    def _what(self, links: Links) -> str:
        """What is waited for, for how long and in which call, as a clause of an error."""
        wire, peer = self._wire, self.peer()
        if self._at < len(self._recvs):
            want = self._recvs[self._at][1]
            most = f"up to {want}" if isinstance(want, int) else str(want.nbytes)
            waits = f"awaited {most} bytes from rank {peer}"
        else:
            message = self._sends[self._at - len(self._recvs)][1]
            waits = f"was sending {message.nbytes} bytes to rank {peer}"
        seconds = time.monotonic() - links.detector.since
        return f"while rank {wire.rank} {waits} for {seconds:.2f} s{wire._call()}"


class _Side(socket.socket):
    """The detector's end of what leads to a peer: what it sends goes out with the messages."""

    says: Callable[[bytes], None]

    def send(self, data: Any, flags: int = 0, /) -> int:
        self.says(bytes(data))
        return len(data)


class Links:
    """What leads from one rank to all others: two threads for each, and what came.

    Attributes:
        inbox: the messages that came and were not taken yet.
        ended: the peers of which nothing comes any more.
        changed: held while these change, and notified when they did.
        closing: whether `close` was called.
        detector: names the culprit when something fails.
    """

    detector: Detector

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """`group` has the `send` and `recv` of a ProcessGroup, and nobody else uses it."""
        self.inbox: dict[_Key, Tensor] = {}
        self.ended: set[int] = set()
        self.changed = threading.Condition()
        self.closing = False
        self._group, self._rank = group, rank
        self._process = os.getpid()
        self._expected: Counter[tuple[int, int]] = Counter()
        peers = [peer for peer in range(size) if peer != rank]
        self._outgoing = {peer: _Outgoing() for peer in peers}
        self._sides: dict[int, _Side] = {}
        self._ends: dict[int, socket.socket] = {}  # the other ends of those: what peers' say
        for peer in peers:
            self._ends[peer], theirs = socket.socketpair()
            self._sides[peer] = _Side(fileno=theirs.detach())
            self._sides[peer].setblocking(False)
            self._sides[peer].says = self._outgoing[peer].hurry
        self._threads = [
            threading.Thread(
                target=target, args=(peer,), name=f"weft {verb} {rank}-{peer}", daemon=True
            )
            for peer in peers
            for verb, target in (("recv", self._receive), ("send", self._send))
        ]

    @classmethod
    def over_gloo(cls, store: dist.Store, rank: int, size: int, timeout: float) -> Links:
        """Over a gloo group of its own; collective.

        Raises:
            RuntimeError: from gloo or the store.
        """
        limit = timedelta(seconds=timeout)
        with _listening_where_weft_does(store):
            return cls(dist.ProcessGroupGloo(store, rank, size, timeout=limit), rank, size)

    def watched(self, timeout: float, call: Callable[[], tuple[int, str]]) -> Detector:
        """Begin: the detector of waits that last up to `timeout`, told the call that runs."""
        self.detector = Detector(self._rank, timeout, self._sides, self.cut, call)
        for thread in self._threads:
            thread.start()
        return self.detector

    def expect(self, peer: int, channel: int) -> _Key:
        """The key of the message from a peer on a channel that is asked for next."""
        self._expected[peer, channel] += 1
        return (peer, channel, self._expected[peer, channel])

    def send(self, peer: int, channel: int, tensor: Tensor) -> threading.Event:
        """Begin to send a message; what is set once it is sent."""
        sent = threading.Event()
        self._outgoing[peer].queue.put((channel, as_bytes(tensor.detach()), sent))
        return sent

    def close(self) -> None:
        """Say bye to all and let go of everything. Twice is fine."""
        if self.closing or os.getpid() != self._process:
            return  # a forked child: these are its parent's
        self.detector.close()
        self.closing = True
        self._tell()
        for outgoing in self._outgoing.values():
            outgoing.queue.put(None)
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._group = None
        for end in self._ends.values():
            end.close()

    def cut(self) -> None:
        """End all waits; any thread may call it."""
        self._tell()

    def _tell(self) -> None:
        """Have those that wait look again."""
        with self.changed:
            self.changed.notify_all()

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
                        self._ends[peer].sendall(part.numpy().data)
                    continue
                parts.append(part)
                if not rest:
                    came[channel] += 1
                    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
                    self.inbox[peer, channel, came[channel]] = whole
                    self._tell()
                    parts = []

    @contextlib.contextmanager
    def _until_lost(self, peer: int) -> Iterator[None]:
        """Tell the detector, as the end of a file, when the group fails; and who waits, any end."""
        try:
            yield
        except (RuntimeError, OSError):  # torch's, of the group; a socket that `close` has closed
            if not self.closing:
                with contextlib.suppress(OSError):
                    self._ends[peer].shutdown(socket.SHUT_RDWR)
        finally:
            self.ended.add(peer)
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


def _call_of(wire: weakref.ref[TorchWire]) -> tuple[int, str]:
    """The number and the name of the call that a wire is in."""
    alive = wire()
    return (alive.calls, alive.doing) if alive is not None else (0, "")
