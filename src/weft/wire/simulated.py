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

import contextvars
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import WeftError, WireError
from . import default, dense
from .base import Pending, Recv, Send, Wire, as_bytes
from .link import Link

__all__ = ["SimulatedWire", "group", "run"]

T = TypeVar("T")

_Bytes = NDArray[np.uint8]

_ARENA = 1 << 20  # bytes in which messages of unknown length are kept together
_ALIGN = 64  # bytes
_PATIENCE = 0.05  # seconds that a starting rank may run alone before the next one starts


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
    if size < 1:
        raise WeftError(f"a group has at least one rank, not {size}")
    if hosts is not None and len(hosts) != size:
        raise WeftError(f"{len(hosts)} hosts for {size} ranks: give one for each")
    names = list(hosts) if hosts else [f"simulated {rank}" for rank in range(size)]
    network = _Network(names, link, within or link, timeout)
    return _Group(network, list(range(size)), is_part=False).wires


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

    threads = []
    for wire in wires:  # one after the other: a thousand at once would only stand in line
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(program, wire), name=f"rank {wire.rank}", daemon=True
        )
        thread.start()
        threads.append(thread)
        wires[0]._network.wait_for_calm(len(threads))
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, WireError)), errors[0])
    return results


class SimulatedWire(Wire):
    """One rank's end of a simulated network."""

    def __init__(self, rank: int, shared: _Group) -> None:
        network, node = shared.network, shared.nodes[rank]
        super().__init__(rank, len(shared.nodes), network.timeout, network.hosts[node])
        self.link = network.link
        self._network, self._group, self._node = network, shared, node
        self._splits = 0
        self._closed = False

    @property
    def clock(self) -> float:
        """Simulated seconds that have passed for this rank."""
        return self._network.clocks[self._node]

    def compute(self, nbytes: float) -> None:
        """Let the time pass that merging so many bytes takes."""
        self._network.clocks[self._node] += nbytes * self._network.link.gamma

    def _post(self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int) -> Pending:
        network, shared, node = self._network, self._group, self._node
        pending = _Exchange(self, len(recvs))
        with network.lock:
            self._check_usable()
            now = network.clocks[node]
            for slot, (peer, buffer) in enumerate(recvs):
                self._check_peer(peer, "receive from")
                pending.results.append(None if isinstance(buffer, int) else buffer)
                end = _End(pending, peer, now, slot)
                end.data = buffer if isinstance(buffer, int) else _memory(buffer)
                self._meet(shared.channel(peer, self.rank, channel), end, send=False)
            for peer, tensor in sends:
                self._check_peer(peer, "send to")
                now += network.link.work / 2
                end = _End(pending, peer, now, -1)
                end.data = _memory(tensor)
                network.posted[node] += 1
                end.number = network.posted[node]
                self._meet(shared.channel(self.rank, peer, channel), end, send=True)
            network.clocks[node] = now
        return pending

    def _meet(self, channel: _Channel, end: _End, *, send: bool) -> None:
        """Pair one end of a message with the other, or let it wait for that."""
        end.pending.missing.append(end)
        if channel.ends and channel.sends != send:
            other = channel.ends.popleft()
            source, target = (end, other) if send else (other, end)
            self._deliver(source, target)
        else:
            channel.sends = send
            channel.ends.append(end)

    def _deliver(self, source: _End, target: _End) -> None:
        """Copy a message's bytes and put it on its way."""
        network, data = self._network, source.data
        assert not isinstance(data, int)
        size = len(data)
        receiver = target.pending.wire
        room = target.data if isinstance(target.data, int) else len(target.data)
        if size > room:
            raise self._fail(
                target.peer,
                f"rank {target.peer} sent {size} bytes to rank {receiver.rank}, which had posted "
                f"a receive of at most {room}",
            )
        if isinstance(target.data, int):
            target.pending.results[target.slot] = network.keep(receiver._node, data, room)
        else:
            np.copyto(target.data[:size], data)
        source.data = target.data = size
        source.matched = target.matched = True
        network.dispatch(source, target, size)

    def dense_all_reduce(self, tensor: Tensor, op: str) -> Pending:
        nbytes = tensor.numel() * tensor.element_size()
        return _Reduction(self, dense.all_reduce(self, tensor, op), nbytes)

    def sub(self, ranks: Sequence[int]) -> SimulatedWire | None:
        shared, chosen = self._group, tuple(ranks)
        if len(set(chosen)) != len(chosen) or any(not 0 <= rank < self.size for rank in chosen):
            raise WeftError(
                f"rank {self.rank}: {list(chosen)} are not distinct ranks of {self.size}"
            )
        with self._network.lock:
            self._check_usable()
            if self._splits == len(shared.parts):
                nodes = [shared.nodes[rank] for rank in chosen]
                shared.parts.append((chosen, _Group(self._network, nodes, is_part=True)))
            others, part = shared.parts[self._splits]
            self._splits += 1
            if others != chosen:
                raise self._fail(
                    self.rank,
                    f"rank {self.rank} makes a part of ranks {list(chosen)} where others make one "
                    f"of {list(others)}",
                )
        return part.wires[chosen.index(self.rank)] if self.rank in chosen else None

    def abort(self, reason: str) -> None:
        with self._network.lock:
            self._group.break_for_all(self.rank, f"rank {self.rank} gave up: {reason}")

    def close(self) -> None:
        network = self._network
        with network.lock:
            if self._closed:
                return
            self._closed = True
            self._group.left.add(self.rank)
            if not self._group.is_part:
                network.stop(self._node)
        if self._worker is not None:
            self._worker.stop()
        self.memory.drain()

    def _check_peer(self, peer: int, verb: str) -> None:
        if peer == self.rank or not 0 <= peer < self.size:
            raise WeftError(f"rank {self.rank}: cannot {verb} rank {peer} in {self.size} ranks")

    def _check_usable(self) -> None:
        """Raise what broke the wire, if anything did; with the lock held."""
        if self._closed:
            raise WireError(f"rank {self.rank}: this wire is closed", rank=self.rank)
        if self._group.verdict is not None:
            raise self._error()

    def _fail(self, culprit: int | None, text: str) -> WireError:
        """Break the wire for all ranks; the error to raise on this one. With the lock held."""
        self._group.break_for_all(culprit, text)
        return self._error()

    def _error(self) -> WireError:
        assert self._group.verdict is not None
        culprit, text = self._group.verdict
        text = f"rank {self.rank}: {text}; start the group again"
        return WireError(text, rank=self.rank, culprit=culprit)

    def _await(self, pending: _Exchange) -> None:
        network, node = self._network, self._node
        with network.lock:
            self._check_usable()
            if pending.left:
                end = time.monotonic() + self.timeout
                network.block(node, pending)
                while pending.left and self._group.verdict is None:
                    remaining = end - time.monotonic()
                    if remaining <= 0:
                        late = self._late(pending)
                        network.unblock(node)
                        raise late
                    network.wake[node].wait(remaining)
                network.unblock(node)
                self._check_usable()
            if not pending.waited:
                pending.waited = True
                came = max(network.clocks[node], pending.complete)
                network.clocks[node] = came + pending.received * network.link.work / 2

    def _late(self, pending: _Exchange) -> WireError:
        """Blame the rank at the end of the chain of those that wait."""
        shared = self._group
        chain = [self.rank]
        while True:
            waits = self._network.blocked.get(shared.nodes[chain[-1]])
            absent = waits.absent() if waits is not None and waits.wire._group is shared else []
            if not absent or absent[0] in chain:
                break
            chain.append(absent[0])
        culprit = chain[-1]
        text = f"rank {self.rank} awaited {pending.what()} for {self.timeout:.1f} s"
        if self._network.blocked.get(shared.nodes[culprit]) is not None:
            return self._fail(None, f"{text}: {self._network.story(shared)}")
        busy = shared.wires[culprit].doing
        where = f"in {busy} and posts nothing" if busy else "outside weft"
        return self._fail(culprit, f"{text}: rank {culprit} is {where}")


class _End:
    """One end of a message: what is sent to `peer`, or the room for what comes from it."""

    __slots__ = ("data", "matched", "number", "peer", "pending", "posted", "slot")

    def __init__(self, pending: _Exchange, peer: int, posted: float, slot: int) -> None:
        self.pending, self.peer, self.posted, self.slot = pending, peer, posted, slot
        self.number = 0  # among its sender's messages
        self.data: _Bytes | int = 0  # bytes; or how many there may be, or were
        self.matched = False


class _Channel:
    """What is not matched yet of one pair of ranks and one channel: all sends or all receives."""

    __slots__ = ("ends", "sends")

    def __init__(self) -> None:
        self.ends: deque[_End] = deque()
        self.sends = False


class _Exchange(Pending):
    """Messages under way."""

    def __init__(self, wire: SimulatedWire, received: int) -> None:
        self.wire, self.received = wire, received
        self.results: list[Tensor | None] = []
        self.missing: list[_End] = []
        self.done = 0
        self.complete = 0.0  # when the last of them was done, so far
        self.waited = False

    @property
    def left(self) -> int:
        """Messages that are not done."""
        return len(self.missing) - self.done

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
        self.wire._await(self)
        return [result for result in self.results if result is not None]

    def release(self) -> None:
        return None  # what was received stays as long as anybody looks at it


class _Reduction(Pending):
    """A dense all-reduce, whose arithmetic takes time too."""

    def __init__(self, wire: SimulatedWire, inner: Pending, nbytes: int) -> None:
        self._wire, self._inner, self._nbytes = wire, inner, nbytes

    def wait(self) -> list[Tensor]:
        results = self._inner.wait()
        self._wire.compute(dense.reduced_bytes(self._nbytes, self._wire.size))
        self._nbytes = 0  # waiting again computes nothing
        return results

    def release(self) -> None:
        self._inner.release()


class _Group:
    """Some of the network's ranks, and what was posted among them. With the network's lock held."""

    def __init__(self, network: _Network, nodes: list[int], *, is_part: bool) -> None:
        self.network, self.nodes, self.is_part = network, nodes, is_part
        self.channels: dict[tuple[int, int, int], _Channel] = {}
        self.parts: list[tuple[tuple[int, ...], _Group]] = []
        self.left: set[int] = set()
        self.verdict: tuple[int | None, str] | None = None
        self.wires = [SimulatedWire(rank, self) for rank in range(len(nodes))]

    def channel(self, source: int, target: int, number: int) -> _Channel:
        key = (source, target, number)
        found = self.channels.get(key)
        if found is None:
            found = self.channels[key] = _Channel()
        return found

    def break_for_all(self, culprit: int | None, text: str) -> None:
        """Set the verdict, unless there is one, and wake everyone, in wires made by `sub` too."""
        if self.verdict is not None:
            return
        self.verdict = culprit, text
        self.channels.clear()
        for node in self.nodes:
            self.network.wake[node].notify_all()
        for ranks, part in self.parts:
            inside = ranks.index(culprit) if culprit in ranks else None
            part.break_for_all(inside, f"the wire that it is a part of broke: {text}")


class _Network:
    """Clocks, ways and messages under way. Everything is read and written with the lock held."""

    def __init__(self, hosts: list[str], link: Link, within: Link, timeout: float) -> None:
        size = len(hosts)
        self.hosts, self.link, self.within, self.timeout = hosts, link, within, timeout
        self.lock = threading.RLock()
        self.wake = [threading.Condition(self.lock) for _ in hosts]
        self.clocks = [0.0] * size
        self.posted = [0] * size
        self.blocked: dict[int, _Exchange] = {}
        self._running = size  # ranks that neither wait nor have left
        self._stopped: set[int] = set()
        self._calm = threading.Condition(self.lock)
        names = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
        self._host = [names[host] for host in hosts]
        ways = len(names) + size  # those of the hosts, then those of the ranks within theirs
        self._out, self._in = [0.0] * ways, [0.0] * ways
        # (when, sender, number of its message, has arrived, source, target, size)
        self._events: list[tuple[float, int, int, bool, _End, _End, int]] = []
        self._arenas: list[tuple[_Bytes, int]] = [(np.empty(0, np.uint8), 0)] * size

    def keep(self, node: int, data: _Bytes, room: int) -> Tensor:
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

    def dispatch(self, source: _End, target: _End, size: int) -> None:
        """A message whose two ends are there goes on its way."""
        node = source.pending.wire._node
        when = max(source.posted, target.posted)
        heapq.heappush(self._events, (when, node, source.number, False, source, target, size))

    def block(self, node: int, pending: _Exchange) -> None:
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
            receiver = target.pending.wire._node
            if self._host[node] == self._host[receiver]:
                link, hosts = self.within, len(self._in) - len(self.clocks)
                out, into = hosts + node, hosts + receiver
            else:
                link, out, into = self.link, self._host[node], self._host[receiver]
            if not arrived:
                begin = max(when, self._out[out])
                self._out[out] = begin + size * link.beta
                event = (begin + link.alpha, node, number, True, source, target, size)
                heapq.heappush(self._events, event)
                continue
            done = max(when, self._in[into]) + size * link.beta
            self._in[into] = done
            for end in (source, target):
                self._finish(end.pending, done)
        if not self._running and self.blocked:
            self._deadlock()

    def _finish(self, pending: _Exchange, when: float) -> None:
        pending.done += 1
        pending.complete = max(pending.complete, when)
        node = pending.wire._node
        if not pending.left and self.blocked.get(node) is pending:
            self.unblock(node)
            self.wake[node].notify_all()

    def _deadlock(self) -> None:
        """Nobody can post any more what the waiting ones need."""
        for pending in list(self.blocked.values()):
            shared = pending.wire._group
            gone = next((rank for rank in pending.absent() if rank in shared.left), None)
            if gone is not None:
                where = f"rank {gone} left while rank {pending.wire.rank} awaited {pending.what()}"
                shared.break_for_all(gone, where)
        for pending in list(self.blocked.values()):
            shared = pending.wire._group
            shared.break_for_all(None, f"all ranks wait for each other: {self.story(shared)}")

    def story(self, shared: _Group) -> str:
        """What each rank of a group awaits."""
        waits = ((shared.nodes.index(node), each) for node, each in self.blocked.items()
                 if each.wire._group is shared)  # fmt: skip
        return ", ".join(f"rank {rank} awaits {each.what()}" for rank, each in sorted(waits))


def _memory(tensor: Tensor) -> _Bytes:
    """The bytes of a tensor as NumPy sees them."""
    view: _Bytes = as_bytes(tensor.detach()).numpy()
    return view
