"""Ranks on a network that is only computed: what would a schedule take on 1,024 ranks?

The ranks are threads of this process and run the real program on real, small data; each has a clock
of its own, in simulated seconds. What a rank does between two waits depends on what it received,
never on when, so it may run ahead until it waits; when all wait, the messages under way move on, in
the order of simulated time, until one of the waits is over. So only one rank runs at a time.

The model, by the four figures of a `Link`:

* A message takes `work` seconds of the sender's and the receiver's time, half each: while posting,
  and while waiting.
* It leaves when both its ends are posted, takes `alpha` seconds to the receiver, and occupies the
  sender's way out and the receiver's way in for `beta` seconds a byte each, both at once where
  both are free. A way carries one message after another, first come, first served. Nothing else
  is shared: switches have the bandwidth of all ranks together.
* Ranks of one host (`hosts`) share the host's two ways to other hosts. Among each other they have
  ways of their own, with the figures of `within`.
* What a rank does between two messages takes no time.

Everything is deterministic: the same program takes the same simulated time again, unless it waits
with a limit. Such a limit is in real seconds.

Source: the model is LogGP (Alexandrov et al., "LogGP: Incorporating long messages into the LogP
model", SPAA 1995) with overhead `work`, latency `alpha` and gap a byte `beta`; running the real
code on simulated clocks follows SimGrid's SMPI (Clauss et al., IPDPS 2011).
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence

from ..link import Link
from .room import End, Room, RoomPending, RoomWire


class Network:
    """Clocks, ways and messages under way. Everything is read and written with the lock held.

    Args:
        hosts: the name of each rank's host; ranks here are called nodes.
        link: the figures of the network.
        within: the figures between nodes of one host; None: as `link`.

    Attributes:
        link: the figures of the network.
        clocks: simulated seconds that have passed for each node.
        lock: of everything.
        changed: of each node, notified when its wait may be over; all have that lock.
    """

    def __init__(self, hosts: Sequence[str], link: Link, within: Link | None = None) -> None:
        if not hosts:
            raise ValueError("a group has at least one rank, not 0")
        size = len(hosts)
        self.lock = threading.RLock()
        self.link = link
        self.clocks = [0.0] * size
        self.changed = [threading.Condition(self.lock) for _ in range(size)]
        self._within = within or link
        self._rooms: list[_Room] = []  # that of all nodes, then those of some
        self._sent = [0] * size  # messages
        # when, sender, number of its message, has it arrived, receiver, and its ends
        self._events: list[tuple[float, int, int, bool, int, End, End]] = []
        number = {name: count for count, name in enumerate(dict.fromkeys(hosts))}
        self._host = [number[name] for name in hosts]
        self._hosts = len(number)
        # when the last message has passed: ways of the hosts, then those of the nodes within
        self._out = [0.0] * (self._hosts + size)
        self._in = [0.0] * (self._hosts + size)

    def wires(self, nodes: Sequence[int] | None = None) -> list[SimulatedWire]:
        """The wires of a new group of some nodes; None: of all."""
        mine = range(len(self.clocks)) if nodes is None else nodes
        room = _Room(self, mine)
        with self.lock:
            self._rooms.append(room)
        return [SimulatedWire(rank, room) for rank in range(len(mine))]

    def host_of(self, node: int) -> int:
        """The number of a node's host."""
        return self._host[node]

    def begin(self, node: int, end: End) -> None:
        """A node posts one end of a message."""
        if end.is_send:
            self.clocks[node] += self.link.work / 2
            self._sent[node] += 1
            end.number = self._sent[node]
        end.posted = self.clocks[node]

    def carry(self, sender: int, receiver: int, source: End, target: End) -> None:
        """Both ends of a message are posted: it leaves."""
        when = max(source.posted, target.posted)
        event = (when, sender, source.number, False, receiver, source, target)
        heapq.heappush(self._events, event)

    def is_idle(self) -> bool:
        """Whether no node does anything: each waits, or has left."""
        waiting = sum(len(room.waiting) for room in self._rooms)
        return waiting + len(self._rooms[0].gone) >= len(self.clocks)

    def advance(self) -> None:
        """Where all wait, let messages move on until one need not wait any longer."""
        while self._events and self.is_idle():
            self._step()
        if self.is_idle() and not any(room.may_go_on() for room in self._rooms):
            for room in self._rooms:
                room.fail_as_stuck()

    def finish(self, pending: RoomPending) -> None:
        """Let messages move on until all of a post are complete, though nodes do not wait."""
        while self._events and not pending.is_over():
            self._step()

    def _step(self) -> None:
        """Let the first event happen: a message leaves, or arrives."""
        when, node, number, has_arrived, receiver, source, target = heapq.heappop(self._events)
        link = self.link
        out = self._host[node]
        into = self._host[receiver]
        if out == into:
            link = self._within
            out = self._hosts + node
            into = self._hosts + receiver
        duration = source.nbytes * link.beta
        if not has_arrived:
            begin = max(when, self._out[out])
            self._out[out] = begin + duration
            event = (begin + link.alpha, node, number, True, receiver, source, target)
            heapq.heappush(self._events, event)
            return
        done = max(when, self._in[into]) + duration
        self._in[into] = done
        for end in (source, target):
            pending = end.pending
            assert isinstance(pending, SimulatedPending)
            pending.complete_at = max(pending.complete_at, done)
            pending.complete()


class _Room(Room):
    """Where messages meet, to move on over a network."""

    def __init__(self, network: Network, nodes: Sequence[int]) -> None:
        super().__init__(len(nodes), [network.changed[node] for node in nodes], network.lock)
        self.network = network
        self.nodes = nodes

    def add(self, end: End, key: tuple[int, int, int]) -> None:
        self.network.begin(self.nodes[end.pending.wire.rank], end)
        super().add(end, key)

    def deliver(self, source: End, target: End) -> None:
        for end in (source, target):
            end.memory = None  # nobody holds a tensor any more on that account
        sender = self.nodes[source.pending.wire.rank]
        receiver = self.nodes[target.pending.wire.rank]
        self.network.carry(sender, receiver, source, target)

    def fail_if_all_wait(self) -> None:
        self.network.advance()


class SimulatedWire(RoomWire):
    """One rank's end of a group on a simulated network; a `weft.wire.interface.Wire`."""

    def __init__(self, rank: int, room: _Room) -> None:
        super().__init__(rank, room)
        self.network = room.network
        self.node = room.nodes[rank]
        host = self.network.host_of(self.node)
        self.near = frozenset(
            other for other, node in enumerate(room.nodes) if self.network.host_of(node) == host
        )

    @property
    def clock(self) -> float:
        """Simulated seconds that have passed for this rank."""
        return self.network.clocks[self.node]

    def pending(self) -> SimulatedPending:
        return SimulatedPending(self)


class SimulatedPending(RoomPending):
    """The messages of one post.

    Attributes:
        complete_at: when the last of them was complete, so far, in simulated seconds.
    """

    wire: SimulatedWire

    def __init__(self, wire: SimulatedWire) -> None:
        super().__init__(wire)
        self.complete_at = 0.0

    def done(self) -> bool:
        """Whether nobody has to do anything more for it. Messages may be under way still: `wait`
        with a limit takes no real time for these, and without a limit until all ranks wait."""
        with self.wire.lock:
            return self.is_over() or not self.has_unmet()

    def finish(self) -> None:
        network = self.wire.network
        node = self.wire.node
        work = len(self.receives) * network.link.work / 2
        network.clocks[node] = max(network.clocks[node], self.complete_at) + work

    def is_over_now(self) -> bool:
        if not self.has_unmet():
            self.wire.network.finish(self)
        return self.is_over()
