"""The network that `simulated` computes: clocks, ways and messages under way.

Only one rank runs at a time, all others wait; when it waits too, `Network` lets messages move on,
in the order of simulated time, until some wait is over. Everything here is read and written with
the network's lock held.
"""

from __future__ import annotations

import heapq
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .base import Pending
from .link import Link

if TYPE_CHECKING:
    from .simulated import SimulatedWire

Bytes = NDArray[np.uint8]

_ARENA = 1 << 20  # bytes in which messages of unknown length are kept together
_ALIGN = 64  # bytes
_PATIENCE = 0.05  # seconds that a starting rank may run alone before the next one starts


class End:
    """One end of a message: what is sent to `peer`, or the room for what comes from it."""

    __slots__ = ("data", "matched", "number", "peer", "pending", "posted", "slot")

    def __init__(self, pending: Exchange, peer: int, posted: float, slot: int) -> None:
        self.pending, self.peer, self.posted, self.slot = pending, peer, posted, slot
        self.number = 0  # among its sender's messages
        self.data: Bytes | int = 0  # bytes; or how many there may be, or were
        self.matched = False


class Channel:
    """What is not matched yet of one pair of ranks and one channel: all sends or all receives."""

    __slots__ = ("ends", "sends")

    def __init__(self, sends: bool) -> None:
        self.ends: list[End] = []
        self.sends = sends


class Exchange(Pending):
    """Messages under way."""

    __slots__ = ("complete", "done", "missing", "posted", "received", "results", "waited", "wire")

    def __init__(self, wire: SimulatedWire, received: int) -> None:
        self.wire, self.received = wire, received
        self.results: list[Tensor | None] = []
        self.missing: list[End] = []  # of those that are not done; empty once all are
        self.posted = self.done = 0
        self.complete = 0.0  # when the last of them was done, so far
        self.waited = False

    @property
    def left(self) -> int:
        """Messages that are not done."""
        return self.posted - self.done

    def absent(self) -> list[int]:
        """The ranks that have not posted their end yet."""
        return [end.peer for end in self.missing if not end.matched]

    def what(self) -> str:
        """What is awaited first."""
        end = next((end for end in self.missing if not end.matched), None)
        if end is None:
            return "messages under way"
        size = end.data if isinstance(end.data, int) else len(end.data)
        if end.slot < 0:
            return f"rank {end.peer} to take {size} bytes"
        return f"{size} bytes from rank {end.peer}"

    def wait(self) -> list[Tensor]:
        self.wire.wait_for(self)
        return [result for result in self.results if result is not None]

    def release(self) -> None:
        return None  # what was received stays as long as anybody looks at it


class Network:
    """Clocks, ways and messages under way. Everything is read and written with the lock held."""

    def __init__(self, hosts: list[str], link: Link, within: Link, timeout: float) -> None:
        size = len(hosts)
        self.hosts, self.link, self.within, self.timeout = hosts, link, within, timeout
        self.lock = threading.RLock()
        self.wake = [threading.Condition(self.lock) for _ in hosts]
        self.clocks = [0.0] * size
        self.posted = [0] * size
        self.blocked: dict[int, Exchange] = {}
        self._running = size  # ranks that neither wait nor have left
        self._stopped: set[int] = set()
        self._calm = threading.Condition(self.lock)
        names = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
        self._host = [names[host] for host in hosts]
        ways = len(names) + size  # those of the hosts, then those of the ranks within theirs
        self._out, self._in = [0.0] * ways, [0.0] * ways
        # (when, sender, number of its message, has arrived, source, target, size)
        self._events: list[tuple[float, int, int, bool, End, End, int]] = []
        self._arenas: list[tuple[Bytes, int]] = [(np.empty(0, np.uint8), 0)] * size

    def keep(self, node: int, data: Bytes, room: int) -> Tensor:
        """A copy of a message, seen as `room` bytes, of which those beyond it are anything.

        They overlap with the messages that come next, so that a receive takes no more memory than
        its message, however large its maximum is.
        """
        arena, start = self._arenas[node]
        if start + room > len(arena):
            arena, start = np.empty(max(_ARENA, len(data)) + room, np.uint8), 0
        arena[start : start + len(data)] = data
        after = -(-(start + len(data)) // _ALIGN) * _ALIGN
        self._arenas[node] = arena, after
        return torch.from_numpy(arena[start : start + room])

    def dispatch(self, source: End, target: End, size: int) -> None:
        """A message whose two ends are there goes on its way."""
        node = source.pending.wire.node
        when = max(source.posted, target.posted)
        heapq.heappush(self._events, (when, node, source.number, False, source, target, size))

    def block(self, node: int, pending: Exchange) -> None:
        """A rank waits; if all do, time goes on."""
        self.blocked[node] = pending
        self._running -= 1
        self._calm.notify_all()
        if not self._running:
            self._advance()

    def unblock(self, node: int) -> None:
        """A rank goes on, if it has not been told to already."""
        if self.blocked.pop(node, None) is not None:
            self._running += 1

    def stop(self, node: int) -> None:
        """A rank will post no more."""
        if node not in self._stopped:
            self._stopped.add(node)
            self._running -= 1
            self._calm.notify_all()
            if not self._running:
                self._advance()

    def wait_for_calm(self, started: int) -> None:
        """Wait until all ranks that were started wait for something, or for a moment."""
        with self.lock:
            idle = len(self.clocks) - started
            self._calm.wait_for(lambda: self._running <= idle, _PATIENCE)

    def _advance(self) -> None:
        """Let messages move on until some rank need not wait any longer."""
        while self._events and not self._running:
            when, node, number, arrived, source, target, size = heapq.heappop(self._events)
            receiver = target.pending.wire.node
            if self._host[node] == self._host[receiver]:
                link, hosts = self.within, len(self._in) - len(self.clocks)
                out, into = hosts + node, hosts + receiver
            else:
                link, out, into = self.link, self._host[node], self._host[receiver]
            takes = size * link.beta
            if not arrived:
                begin = max(when, self._out[out])
                self._out[out] = begin + takes
                event = (begin + link.alpha, node, number, True, source, target, size)
                heapq.heappush(self._events, event)
                continue
            done = max(when, self._in[into]) + takes
            self._in[into] = done
            for end in (source, target):
                self._finish(end.pending, done)
        if not self._running and self.blocked:
            self._deadlock()

    def _finish(self, pending: Exchange, when: float) -> None:
        pending.done += 1
        pending.complete = max(pending.complete, when)
        node = pending.wire.node
        if not pending.left:
            pending.missing = []  # a thousand ranks have millions of messages under way
        if not pending.left and self.blocked.get(node) is pending:
            self.unblock(node)
            self.wake[node].notify_all()

    def _deadlock(self) -> None:
        """Nobody can post any more what the waiting ones need."""
        for pending in list(self.blocked.values()):
            gone = next((rank for rank in pending.absent() if pending.wire.has_left(rank)), None)
            if gone is not None:
                where = f"rank {gone} left while rank {pending.wire.rank} awaited {pending.what()}"
                pending.wire.break_for_all(gone, where)
        for pending in list(self.blocked.values()):
            wire = pending.wire
            wire.break_for_all(None, f"all ranks wait for each other: {wire.story()}")
