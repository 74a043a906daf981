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
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import WeftError, WireError
from . import default, dense
from .base import Pending, Recv, Send, as_bytes
from .hosts import Hosts, set_hosts
from .in_process import InProcessWire, Shared
from .link import Link
from .memory import Pool
from .simulated_network import Bytes, Channel, End, Exchange, Network

T = TypeVar("T")

_BLOCK = 64  # bytes of the smallest lease: a million pairs of ranks may have some each


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
    network = Network(names, link, within or link, timeout)
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


class SimulatedWire(InProcessWire):
    """One rank's end of a simulated network."""

    def __init__(self, rank: int, shared: _Group) -> None:
        network, node = shared.network, shared.nodes[rank]
        super().__init__(rank, len(shared.nodes), network.timeout, network.hosts[node])
        set_hosts(self, Hosts.named([network.hosts[other] for other in shared.nodes]))
        self.memory = Pool(_BLOCK)
        self._network, self.node = network, node
        self._group: _Group = shared

    @property
    def clock(self) -> float:
        """Simulated seconds that have passed for this rank."""
        return self._network.clocks[self.node]

    def compute(self, nbytes: float) -> None:
        """Let the time pass that merging so many bytes takes."""
        self._network.clocks[self.node] += nbytes * self._network.link.gamma

    def _post(self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int) -> Pending:
        network, node = self._network, self.node
        pending = Exchange(self, len(recvs))
        with network.lock:
            self._check_usable()
            now = network.clocks[node]
            for slot, (peer, buffer) in enumerate(recvs):
                self._check_peer(peer, "receive from")
                pending.results.append(None if isinstance(buffer, int) else buffer)
                end = End(pending, peer, now, slot)
                end.data = buffer if isinstance(buffer, int) else _memory(buffer)
                self._meet((peer, self.rank, channel), end, send=False)
            for peer, tensor in sends:
                self._check_peer(peer, "send to")
                now += network.link.work / 2
                end = End(pending, peer, now, -1)
                end.data = _memory(tensor)
                network.posted[node] += 1
                end.number = network.posted[node]
                self._meet((self.rank, peer, channel), end, send=True)
            network.clocks[node] = now
        return pending

    def _meet(self, key: tuple[int, int, int], end: End, *, send: bool) -> None:
        """Pair one end of a message with the other, or let it wait for that."""
        end.pending.missing.append(end)
        end.pending.posted += 1
        channels = self._group.channels
        channel = channels.get(key)
        if channel is None:
            channel = channels[key] = Channel(send)
        if channel.sends == send:
            channel.ends.append(end)
            return
        other = channel.ends.pop(0)
        if not channel.ends:
            del channels[key]
        source, target = (end, other) if send else (other, end)
        self._deliver(source, target)

    def _deliver(self, source: End, target: End) -> None:
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
            target.pending.results[target.slot] = network.keep(receiver.node, data, room)
        else:
            np.copyto(target.data[:size], data)
        source.data = target.data = size
        source.matched = target.matched = True
        network.dispatch(source, target, size)

    def dense_all_reduce(self, tensor: Tensor, op: str) -> Pending:
        nbytes = tensor.numel() * tensor.element_size()
        return _Reduction(self, dense.all_reduce(self, tensor, op), nbytes)

    def _leave(self) -> None:
        if not self._group.is_part:
            self._network.stop(self.node)

    def has_left(self, rank: int) -> bool:
        """Whether a rank of this group has closed its wire."""
        return rank in self._group.left

    def break_for_all(self, culprit: int | None, text: str) -> None:
        """Break the wire for all ranks; with the network's lock held."""
        self._group.break_for_all(culprit, text)

    def story(self) -> str:
        """What each rank of the group awaits."""
        waits = ((each.wire.rank, each) for each in self._network.blocked.values()
                 if each.wire._group is self._group)  # fmt: skip
        by_rank = sorted(waits, key=lambda item: item[0])
        return ", ".join(f"rank {rank} awaits {each.what()}" for rank, each in by_rank)

    def wait_for(self, pending: Exchange) -> None:
        """Wait until all of `pending` is done, and let the time pass that this takes."""
        network, node = self._network, self.node
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

    def _late(self, pending: Exchange) -> WireError:
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
            return self._fail(None, f"{text}: {self.story()}")
        busy = shared.wires[culprit]._call()[1]
        where = f"in {busy} and posts nothing" if busy else "outside weft"
        return self._fail(culprit, f"{text}: rank {culprit} is {where}")


class _Reduction(Pending):
    """A dense all-reduce, whose arithmetic takes time too."""

    def __init__(self, wire: SimulatedWire, inner: Pending, nbytes: int) -> None:
        self._wire, self._inner, self._nbytes = wire, inner, nbytes

    def wait(self) -> list[Tensor]:
        results = self._inner.wait()
        self._wire.compute(dense.reduced_bytes(self._wire.size, self._nbytes))
        self._nbytes = 0  # waiting again computes nothing
        return results

    def release(self) -> None:
        self._inner.release()


class _Group(Shared):
    """Some of the network's ranks, and what was posted among them; the lock is the network's."""

    wires: list[SimulatedWire]

    def __init__(self, network: Network, nodes: list[int], *, is_part: bool) -> None:
        super().__init__(network.lock, [network.wake[node] for node in nodes])
        self.network, self.nodes, self.is_part = network, nodes, is_part
        self.channels: dict[tuple[int, int, int], Channel] = {}
        self.wires = [SimulatedWire(rank, self) for rank in range(len(nodes))]

    def part(self, ranks: tuple[int, ...]) -> _Group:
        return _Group(self.network, [self.nodes[rank] for rank in ranks], is_part=True)

    def forget(self) -> None:
        self.channels.clear()


def _memory(tensor: Tensor) -> Bytes:
    """The bytes of a tensor as NumPy sees them."""
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
        tensor = as_bytes(tensor)
    view: Bytes = (tensor.detach() if tensor.requires_grad else tensor).numpy()
    return view
