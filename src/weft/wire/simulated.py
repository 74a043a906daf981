"""Ranks on a network that is only computed: what would a schedule take on 1,024 ranks?

The ranks are threads of this process and run the real program on real, small data; each has a clock
of its own, in simulated seconds. Only one rank runs at a time. What a rank does between two waits
depends on what it received, never on when, so it may run ahead until it waits; when all wait, the
messages under way move on, in the order of simulated time, until one of the waits is over.

The model, by the four figures of a `Link`:

* A message takes `work` seconds of the sender's and the receiver's time, half each: while posting,
  and while waiting.
* It leaves when both its ends are posted, takes `alpha` seconds to the receiver, and occupies the
  sender's way out and the receiver's way in for `beta` seconds a byte each, both at once where
  both are free. A way carries one message after another, first come, first served. Nothing else
  is shared: switches have the bandwidth of all ranks together.
* Ranks of one host (`hosts`) share the host's two ways to other hosts. Among each other they have
  ways of their own, with the figures of `within`.
* `compute` takes `gamma` seconds a byte. Dense reductions do so by themselves; for kernels,
  `weft.sparse.simulation` does.

Everything is deterministic: the same program takes the same simulated time again.

Source: the model is LogGP (Alexandrov et al., "LogGP: Incorporating long messages into the LogP
model", SPAA 1995) with overhead `work`, latency `alpha` and gap a byte `beta`; running the real
code on simulated clocks follows SimGrid's SMPI (Clauss et al., IPDPS 2011).
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import WireError
from . import default, dense
from .base import Pending
from .hosts import Hosts, set_hosts
from .in_process import Bytes, Crew, End, Exchange, InProcessWire, woken
from .link import Link
from .memory import Pool

T = TypeVar("T")

_BLOCK = 64  # bytes of the smallest lease: a million pairs of ranks may have some each
_ARENA = 1 << 20  # bytes in which messages of unknown length are kept together
_ALIGN = 64  # bytes


def group(
    size: int,
    link: Link,
    timeout: float = 3600.0,
    *,
    hosts: Sequence[str] | None = None,
    within: Link | None = None,
) -> list[SimulatedWire]:
    """The wires of `size` simulated ranks, to be used by one thread each; see also `run`.

    Args:
        size: how many ranks.
        link: the figures of the network; also what algorithms are chosen by.
        timeout: seconds, real ones, that any one wait may last.
        hosts: the name of each rank's host; by default each has one of its own.
        within: the figures between ranks of one host; by default those of `link`.

    Raises:
        WeftError: there are no ranks, or not one host for each.
    """
    wake = woken(hosts, size)
    names = hosts or [f"simulated {rank}" for rank in range(size)]
    return _Group(_Network(names, link, within or link, wake), range(size), timeout).wires


def run(
    size: int,
    link: Link,
    body: Callable[..., T],
    *args: Any,
    hosts: Sequence[str] | None = None,
    within: Link | None = None,
) -> list[T]:
    """Run `body(wire, *args)` on `size` simulated ranks; their results, in rank order.

    Inside the body `wire` is also the default wire. See `group` for the other arguments.

    Raises:
        Exception: what a rank raised; of several, the one that caused the others.

    Example:
        >>> import torch
        >>> def program(wire):
        ...     before, after = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
        ...     wire.post([(after, torch.ones(250))], [(before, torch.empty(250))]).wait()
        ...     return wire.clock
        >>> run(3, Link(alpha=1e-3, beta=1e-6, gamma=0, work=0), program)
        [0.002, 0.002, 0.002]
    """
    wires = group(size, link, hosts=hosts, within=within)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def program(wire: SimulatedWire) -> None:
        default.set(wire)
        try:
            results[wire.rank] = body(wire, *args)
        except BaseException as error:
            error.add_note(f"on rank {wire.rank} of {size} (simulated)")
            errors.append(error)
            wire.abort(f"{type(error).__name__}: {error}")
        finally:
            wire.close()

    for thread in default.begun(program, wires):
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, WireError)), errors[0])
    return results


class _Exchange(Exchange):
    """Messages under way.

    Attributes:
        complete: when the last of them was done, so far.
    """

    wire: SimulatedWire

    def __init__(self, wire: SimulatedWire) -> None:
        super().__init__(wire)
        self.complete, self._waited = 0.0, False

    def wait(self) -> list[Tensor]:
        results, network, node = super().wait(), self.wire._network, self.wire.node
        if not self._waited:
            self._waited = True
            taking = len(results) * network.link.work / 2
            network.clocks[node] = max(network.clocks[node], self.complete) + taking
        return results


class SimulatedWire(InProcessWire):
    """One rank's end of a simulated network."""

    _exchange = _Exchange

    def __init__(self, rank: int, group: _Group) -> None:
        super().__init__(rank, group)
        set_hosts(self, Hosts.named(group.hosts))
        self.memory = Pool(_BLOCK)
        self._network, self.node = group.network, group.nodes[rank]

    @property
    def clock(self) -> float:
        """Simulated seconds that have passed for this rank."""
        return self._network.clocks[self.node]

    def compute(self, nbytes: float) -> None:
        """Let the time pass that merging so many bytes takes."""
        self._network.clocks[self.node] += nbytes * self._network.link.gamma

    def dense_all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self.compute(dense.reduced_bytes(self.size, tensor.nbytes))
        return super().dense_all_reduce(tensor, op)

    def _begin(self, end: End) -> None:
        network, node = self._network, self.node
        if end.slot < 0:
            network.clocks[node] += network.link.work / 2
            network.sent[node] += 1
            end.number = network.sent[node]
        end.posted = network.clocks[node]

    def _room(self, exchange: Exchange, size: int, room: int) -> Tensor:
        return self._network.room(self.node, size, room)

    def _deliver(self, source: End, target: End, size: int) -> None:
        source.data = target.data = size  # nobody holds a tensor any more on that account
        sender = source.exchange.wire
        assert isinstance(sender, SimulatedWire)
        when = max(source.posted, target.posted)
        event = (when, sender.node, source.number, False, self.node, source, target)
        heapq.heappush(self._network.events, event)


class _Group(Crew):
    """Some of the network's ranks; the lock is the network's."""

    def __init__(self, network: _Network, nodes: Sequence[int], timeout: float) -> None:
        self.network, self.nodes = network, nodes
        network.groups.append(self)
        hosts, wake = [network.hosts[node] for node in nodes], [network.wake[n] for n in nodes]
        super().__init__(hosts, timeout, wake, SimulatedWire)
        self.slow = math.inf  # time is another here

    def _part(self, ranks: tuple[int, ...]) -> _Group:
        return _Group(self.network, [self.nodes[rank] for rank in ranks], self.timeout)

    def look(self) -> None:
        network = self.network
        network.advance()
        for group in network.groups if network.running() <= 0 else ():
            group.judge(stuck=True)


class _Network:
    """Clocks, ways and messages under way. Everything is read and written with the lock held."""

    def __init__(
        self, hosts: Sequence[str], link: Link, within: Link, wake: list[threading.Condition]
    ) -> None:
        size = len(hosts)
        self.hosts, self.link, self.within, self.wake = hosts, link, within, wake
        self.clocks, self.sent = [0.0] * size, [0] * size
        self.groups: list[_Group] = []  # that of all ranks, then its parts
        # when, sender, number of its message, has it arrived, receiver, and its ends
        self.events: list[tuple[float, int, int, bool, int, End, End]] = []
        self._host = Hosts.named(hosts).of
        ways = max(self._host) + 1 + size  # those of the hosts, then those of the ranks within
        self._out, self._in = [0.0] * ways, [0.0] * ways
        self._arenas: list[tuple[Bytes, int]] = [(np.empty(0, np.uint8), 0)] * size

    def room(self, node: int, size: int, room: int) -> Tensor:
        """Memory of `room` bytes for a message of `size`; those beyond it are anything.

        They overlap with the messages that come next, so that a receive takes no more memory than
        its message, however large its maximum is.
        """
        arena, start = self._arenas[node]
        if start + room > len(arena):
            arena, start = np.empty(max(_ARENA, size) + room, np.uint8), 0
        self._arenas[node] = arena, -(-(start + size) // _ALIGN) * _ALIGN
        return torch.from_numpy(arena[start : start + room])

    def running(self) -> int:
        """Ranks that neither wait nor have left."""
        waiting = sum(len(group.waiting) for group in self.groups)
        return len(self.hosts) - waiting - len(self.groups[0].left)

    def advance(self) -> None:
        """Let messages move on until some rank need not wait any longer."""
        idle = self.running() <= 0
        while idle and self.events:
            when, node, number, arrived, receiver, source, target = heapq.heappop(self.events)
            link, out, into = self.link, self._host[node], self._host[receiver]
            if out == into:
                hosts = len(self._in) - len(self.clocks)
                link, out, into = self.within, hosts + node, hosts + receiver
            takes = source.nbytes * link.beta
            if not arrived:
                begin = max(when, self._out[out])
                self._out[out] = begin + takes
                event = (begin + link.alpha, node, number, True, receiver, source, target)
                heapq.heappush(self.events, event)
                continue
            self._in[into] = done = max(when, self._in[into]) + takes
            for end in (source, target):
                assert isinstance(end.exchange, _Exchange)
                end.exchange.complete = max(end.exchange.complete, done)
                end.exchange.finish(end)
                idle = idle and (end.exchange.left > 0 or self.running() <= 0)
