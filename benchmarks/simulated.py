"""Ranks on a network that is only computed: what would a schedule take on 1,024 ranks?

The ranks are threads of this process and run the real program on real, small data; each has a clock
of its own, in simulated seconds. What a rank does between two waits depends on what it received,
never on when, so it may run ahead until it waits; when all wait, the messages under way move on, in
the order of simulated time, until one of the waits is over. So only one rank runs at a time.

The model, by the three figures of a `Link`:

* A message takes `work` seconds of the sender's and the receiver's time, half each: while posting,
  and while waiting.
* It leaves when both its ends are posted, takes `alpha` seconds to the receiver, and occupies the
  sender's way out and the receiver's way in for `beta` seconds a byte each, both at once where
  both are free. A way carries one message after another, first come, first served. Nothing else
  is shared: switches have the bandwidth of all ranks together.
* Ranks of one host share the host's two ways to other hosts. Among each other they have ways of
  their own, with the figures of `within`.
* What a rank does between two messages takes no time.

Source: the model is LogGP (Alexandrov et al., "LogGP: Incorporating long messages into the LogP
model", SPAA 1995) with overhead `work`, latency `alpha` and gap a byte `beta`; running the real
code on simulated clocks follows SimGrid's SMPI (Clauss et al., IPDPS 2011).
"""

from __future__ import annotations

import gc
import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import weft
from weft.base.memory import Pool, memory_of
from weft.bootstrap.outcome import results
from weft.group.group import Group
from weft.sparse import ALGORITHMS, Sizes
from weft.sparse import run as calls
from weft.sparse.request import Request
from weft.testing.threads import Crew, on_groups
from weft.wire.interface import Failure, WireFailed


class SmallBlocks(Pool):
    """A million pairs of ranks may have some leases each."""

    smallest = 64


@dataclass(frozen=True, slots=True)
class Link:
    """The figures of a network.

    Attributes:
        alpha: seconds from posting small messages to all peers until as many have come.
        beta: seconds for each byte that enters a host's link while as much leaves it.
        work: seconds of a core that one message costs, sent and received.
    """

    alpha: float
    beta: float
    work: float


@dataclass(eq=False, slots=True)
class End:
    """One end of a message: posted when, by whom, and of a send as which of its rank."""

    pending: Pending
    peer: int
    is_send: bool
    memory: memoryview | None  # of a receive by size: none
    posted: float
    number: int = 0
    received: Tensor | None = None


class Network:
    """Clocks, ways and messages under way; ranks have numbers here among all, as nodes.

    Everything is read and written with the lock held.
    """

    def __init__(self, hosts: Sequence[str], link: Link, within: Link | None = None) -> None:
        size = len(hosts)
        self.lock = threading.RLock()
        self.link = link
        self.within = within or link
        self.hosts = hosts
        self.clocks = [0.0] * size
        self.changed = [threading.Condition(self.lock) for _ in range(size)]
        self.waiting: dict[int, Pending] = {}  # by node, those that are not over
        self.left: set[int] = set()
        self.sent = [0] * size  # messages
        self.unmet: dict[tuple[Any, ...], deque[End]] = {}  # all of sends, or all of receives
        # when, sender, number of its message, has it arrived, and its ends
        self.events: list[tuple[float, int, int, bool, End, End]] = []
        self.free: dict[tuple[bool, str | int], float] = {}  # when a way in, or out, is free

    def wires(self, nodes: Sequence[int] | None = None) -> list[Wire]:
        """The wires of a new group of some nodes; None: of all."""
        some = range(len(self.clocks)) if nodes is None else nodes
        return [Wire(self, some, rank) for rank in range(len(some))]

    def meet(self, end: End, key: tuple[Any, ...]) -> None:
        """Copy a message whose other end is posted, and let it leave; else await that."""
        ends = self.unmet.setdefault(key, deque())
        if not ends or ends[0].is_send == end.is_send:
            ends.append(end)
            return
        other = ends.popleft()
        if not ends:
            del self.unmet[key]
        source, target = (end, other) if end.is_send else (other, end)
        assert source.memory is not None
        if target.memory is None:
            target.received = torch.empty(source.memory.nbytes, dtype=torch.uint8)
            target.memory = memory_of(target.received)
        target.memory[:] = source.memory
        nbytes = source.memory.nbytes
        source.memory = target.memory = None  # nobody holds a tensor any more on that account
        when = max(source.posted, target.posted)
        for each in (source, target):
            each.pending.unmet.remove(each)
        self.push(when, False, nbytes, source, target)

    def push(self, when: float, has_arrived: bool, *message: Any) -> None:
        _, source, _ = message
        sender = source.pending.wire.node
        heapq.heappush(self.events, (when, sender, source.number, has_arrived, *message))

    def advance(self) -> None:
        """Where all wait, let messages move on until one need not wait any longer."""
        while self.waiting and len(self.waiting) + len(self.left) >= len(self.clocks):
            if self.events:
                self.step(*heapq.heappop(self.events))
                continue
            for pending in list(self.waiting.values()):
                pending.wire.fail(Failure("stuck", None, "all ranks wait for each other"))

    def step(
        self, when: float, sender: int, number: int, has_arrived: bool, nbytes: int, *ends: End
    ) -> None:
        """Let an event happen: a message leaves, or arrives."""
        source, target = ends
        receiver = target.pending.wire.node
        link, out, into = self.link, self.hosts[sender], self.hosts[receiver]
        if out == into:
            link, out, into = self.within, sender, receiver
        way = (False, into) if has_arrived else (True, out)
        begin = max(when, self.free.get(way, 0.0))
        self.free[way] = begin + nbytes * link.beta
        if has_arrived:
            for each in ends:
                each.pending.complete(self.free[way])
        else:
            self.push(begin + link.alpha, True, nbytes, source, target)


class Wire:
    """One rank's end of a group; a `weft.wire.interface.Wire`."""

    def __init__(self, network: Network, nodes: Sequence[int], rank: int) -> None:
        self.rank = rank
        self.size = len(nodes)
        self.node = nodes[rank]
        self.network = network
        self.nodes = nodes
        self.near = frozenset([rank])
        self.thread: int | None = None
        self._failure: Failure | None = None

    @property
    def clock(self) -> float:
        """Simulated seconds that have passed for this rank."""
        return self.network.clocks[self.node]

    def post(self, sends: Any = (), recvs: Any = (), channel: int = 0) -> Pending:
        network, node, group = self.network, self.node, id(self.nodes)
        self.thread = threading.get_ident()
        pending = Pending(self)
        with network.lock:
            pending.check()
            for peer, into in recvs:
                end = End(pending, peer, False, None, network.clocks[node])
                if not isinstance(into, int):
                    end.memory = memory_of(into)
                    end.received = into
                pending.receives.append(end)
                pending.add(end, (group, peer, self.rank, channel))
            for peer, tensor in sends:
                network.clocks[node] += network.link.work / 2
                network.sent[node] += 1
                number = network.sent[node]
                end = End(pending, peer, True, memory_of(tensor), network.clocks[node], number)
                pending.add(end, (group, self.rank, peer, channel))
        return pending

    def lease(self, nbytes: int) -> None:
        return None

    def add_part(self, part: Wire, ranks: Sequence[int]) -> None:
        """If this one fails, those that wait in the part are told as all that wait are."""

    def abort(self, failure: Failure) -> None:
        with self.network.lock:
            self.fail(failure)

    def fail(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        self.network.waiting.pop(self.node, None)
        self.network.changed[self.node].notify_all()

    def failure(self) -> Failure | None:
        return self._failure

    def close(self) -> None:
        with self.network.lock:
            self.fail(Failure("aborted", None, f"rank {self.rank} has closed its wire"))
            if self.size == len(self.network.clocks):
                self.network.left.add(self.node)
            self.network.advance()


class Pending:
    """The messages of one post; a `weft.wire.interface.Pending`, whose waits have no limits."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.receives: list[End] = []
        self.unmet: set[End] = set()  # whose other ends are not posted
        self.incomplete = 0
        self.complete_at = 0.0  # of the last message, so far
        self.found: list[Tensor] | None = None

    def check(self) -> None:
        failure = self.wire.failure()
        if failure is not None:
            raise WireFailed(failure)

    def add(self, end: End, key: tuple[Any, ...]) -> None:
        self.incomplete += 1
        self.unmet.add(end)
        self.wire.network.meet(end, key)

    def complete(self, when: float) -> None:
        """One of the messages is complete."""
        self.complete_at = max(self.complete_at, when)
        self.incomplete -= 1
        network, node = self.wire.network, self.wire.node
        if not self.incomplete and network.waiting.get(node) is self:
            del network.waiting[node]
            network.changed[node].notify_all()

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        if self.found is None:
            network, node = self.wire.network, self.wire.node
            with network.lock:
                while self.incomplete:
                    self.check()
                    network.waiting[node] = self
                    network.advance()
                    if network.waiting.get(node) is self:
                        network.changed[node].wait()
                work = len(self.receives) * network.link.work / 2
                network.clocks[node] = max(network.clocks[node], self.complete_at) + work
            self.found = [end.received for end in self.receives]
            self.receives = []  # they lead back here
        return [*self.found]

    def waiting_for(self) -> list[int]:
        with self.wire.network.lock:
            return sorted({end.peer for end in self.unmet})

    def release(self) -> None:
        """What came by size is freed with its tensors."""


def clock(group: Group) -> float:
    """Simulated seconds that have passed for a rank."""
    return group.wire.clock


def run(
    size: int,
    link: Link,
    body: Callable[..., Any],
    *args: Any,
    hosts: Sequence[str] | None = None,
    within: Link | None = None,
) -> list[Any]:
    """Run `body(group, *args)` on `size` simulated ranks; their results, in rank order.

    Args:
        link: the figures of the network.
        hosts: the name of each rank's host; by default each has one of its own.
        within: the figures between ranks of one host; by default those of `link`.
    """
    names = list(hosts or [f"simulated {rank}" for rank in range(size)])
    network = Network(names, link, within)
    sessions = Crew(network.wires(), names, 3600.0, network.wires).sessions()
    for session in sessions:
        session.memory = SmallBlocks()
    groups = [Group(session) for session in sessions]
    return results(on_groups(groups, body, args, limit=None), "simulated")


@dataclass(frozen=True, slots=True)
class Simulation:
    """What one call took; times in simulated seconds, from the first rank's start to the last's
    end.

    Attributes:
        algorithm: what ran.
        opening: of the opening exchange.
        seconds: of what came after it.
        messages, bytes: sent by the average rank, without those of the opening exchange.
        sizes: of the call.
        union: rows of the result.
    """

    algorithm: str
    opening: float
    seconds: float
    messages: float
    bytes: float
    sizes: Sizes
    union: int


def simulate(
    algorithm: str,
    rows: Callable[[int], weft.Rows],
    ranks: int,
    link: Link,
    *,
    op: str = "sum",
    wire_dtype: torch.dtype | None = None,
    **network: Any,
) -> Simulation:
    """Run one sparse all-reduce on simulated ranks, of which each brings `rows(rank)`.

    Takes memory for the results of all ranks, and about a tenth of a millisecond for each message:
    64 ranks take seconds, 1,024 minutes.

    Args:
        algorithm: "auto" or a name.
        op, wire_dtype: as of `weft.sparse_all_reduce`.
        network: `hosts` and `within`, as of `run`.
    """

    def program(group: Group) -> tuple[Any, ...]:
        # two openings, of which the first is nothing but that: the difference is the schedule
        request = Request.of(rows(group.rank), op, algorithm, wire_dtype)
        _, begun = calls.begun(group, request, "sparse_all_reduce")
        opened = clock(group)
        before = group.traffic.messages, group.traffic.bytes
        call = partial(calls.reduced, group, request)
        result, record = group.worker.call("sparse_all_reduce", call)
        count = group.traffic.messages - 2 * before[0], group.traffic.bytes - 2 * before[1]
        return opened, clock(group), *count, record.algorithm, begun.sizes, len(result)

    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)  # a thousand ranks would each keep a pool of them
    gc.disable()  # millions of messages are under way: looking through them is a fourth of the time
    try:
        seen = run(ranks, link, program, **network)
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
    opened, ended, messages, nbytes, (name, *_), (sizes, *_), (union, *_) = zip(*seen, strict=True)
    assert name in ALGORITHMS, f"no algorithm ran ({name}): simulate more rows or ranks"
    opening = max(opened)
    return Simulation(
        name,
        opening,
        max(ended) - 2 * opening,
        sum(messages) / ranks,
        sum(nbytes) / ranks,
        sizes,
        union,
    )
