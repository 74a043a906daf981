"""Ranks that are threads of one process: what `threads` and `simulated` have in common.

A message is one copy from the sender's tensor into the receiver's; the rank that posts last makes
it. The ranks of a group share a lock and the state under it: unmatched posts, which rank waits for
what, which ranks left, and what broke the group. So all ranks know of a failure at once, a
deadlock is found at once, and the first rank that calls `sub` makes the part for all.
"""

from __future__ import annotations

import abc
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import WeftError, WireError
from .base import Group, Pending, Recv, Send, chosen, memory_of
from .failure import watch
from .failure.verdict import Verdict

Bytes = NDArray[np.uint8]


class End:
    """One end of a message.

    Attributes:
        exchange: the post that it is a part of.
        peer: the rank at the other end.
        data: the bytes to be sent, or where to receive them; or the most bytes, for a receive
            without memory of its own.
        slot: its number among the receives of its exchange; -1: it is a send.
        posted, number: for `simulated`.
        matched: whether the other end was posted, too.
        through: whether the message is complete.
    """

    __slots__ = ("data", "exchange", "matched", "number", "peer", "posted", "slot", "through")

    def __init__(self, exchange: Exchange, peer: int, data: Bytes | int, slot: int = -1) -> None:
        self.exchange, self.peer, self.data, self.slot = exchange, peer, data, slot
        self.posted, self.number = 0.0, 0
        self.matched = self.through = False

    @property
    def nbytes(self) -> int:
        """Its bytes, or the most that may come."""
        return self.data if isinstance(self.data, int) else len(self.data)


class Exchange(Pending):
    """The messages of one post.

    Attributes:
        ends: this rank's ends of the messages.
        results: what was received so far.
        left: how many messages are not complete.
    """

    def __init__(self, wire: InProcessWire) -> None:
        self.wire = wire
        self.ends: list[End] = []
        self.results: list[Any] = []
        self.left = 0

    def missing(self) -> list[int]:
        """The ranks that have not posted their end yet."""
        return [end.peer for end in self.ends if not end.matched]

    def what(self) -> str:
        """What is awaited first."""
        end = next((end for end in self.ends if not end.matched), None)
        if end is None:
            return "messages under way"
        if end.slot < 0:
            return f"rank {end.peer} to take {end.nbytes} bytes"
        return f"{end.nbytes} bytes from rank {end.peer}"

    def finish(self, end: End) -> None:
        """Note that one of the messages is complete; with the group's lock held."""
        group, rank = self.wire._group, self.wire.rank
        end.through = True
        self.left -= 1
        if not self.left:
            self.ends = []  # they lead back here, and have the memory of tensors
            if group.waiting.get(rank) is self:
                del group.waiting[rank]
                group.wake[rank].notify_all()

    def awaited(self) -> list[int]:
        return sorted({end.peer for end in self.ends if not end.through})

    def is_through(self) -> bool:
        return not self.left

    def wait(self) -> list[Tensor]:
        self.wire._await(self)
        return list(self.results)


class Crew:
    """What the ranks of a group share. Everything is read and written with the lock held.

    Attributes:
        hosts: the name of each rank's machine.
        wake: the condition that each rank waits on; all have the same lock.
        wires: the wire of each rank.
        waiting: the ranks that wait, each with the exchange that it waits for.
        left: the ranks that closed their wires.
        verdict: what broke the group, or None.
        slow: seconds of a wait after which a line about it is printed.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        timeout: float,
        wake: list[threading.Condition],
        make: Callable[[int, Any], Any],
    ) -> None:
        """`make(rank, group)` makes a wire."""
        self.hosts, self.timeout, self.wake, self._make = hosts, timeout, wake, make
        self.slow = watch.chosen()
        self.waiting: dict[int, Exchange] = {}
        self.left: set[int] = set()
        self.verdict: Verdict | None = None
        self._parts: list[tuple[tuple[int, ...], Crew]] = []  # in the order they were made
        self._unmet: dict[tuple[int, int, int], deque[End]] = {}  # all sends, or all receives
        self.wires: list[Any] = [make(rank, self) for rank in range(len(hosts))]

    def part(self, number: int, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], Crew]:
        """The part with this number, and its ranks: if it is new, a part of the given ranks."""
        if number == len(self._parts):
            self._parts.append((ranks, self._part(ranks)))
        return self._parts[number]

    def _part(self, ranks: tuple[int, ...]) -> Crew:
        hosts, wake = [self.hosts[rank] for rank in ranks], [self.wake[rank] for rank in ranks]
        return Crew(hosts, self.timeout, wake, self._make)

    def meet(self, end: End, channel: int) -> None:
        """Add one end of a message; if the other end is there, copy the bytes."""
        exchange, is_send = end.exchange, end.slot < 0
        rank = exchange.wire.rank
        key = (rank, end.peer, channel) if is_send else (end.peer, rank, channel)
        exchange.ends.append(end)
        exchange.left += 1
        unmet = self._unmet.get(key)
        if unmet is None:
            self._unmet[key] = deque([end])
        elif (unmet[0].slot < 0) == is_send:
            unmet.append(end)
        else:
            other = unmet.popleft()
            if not unmet:
                del self._unmet[key]
            self._match(*((end, other) if is_send else (other, end)))

    def _match(self, source: End, target: End) -> None:
        exchange, size, room = target.exchange, source.nbytes, target.nbytes
        if size > room:
            raise source.exchange.wire._fail(
                target.peer,
                f"rank {target.peer} sent {size} bytes to rank {source.peer}, which had posted "
                f"a receive of at most {room}",
            )
        if isinstance(target.data, int):
            exchange.results[target.slot] = result = exchange.wire._room(exchange, size, room)
            target.data = bytes_of(result)
        target.data[:size] = source.data
        source.matched = target.matched = True
        exchange.wire._deliver(source, target, size)

    def look(self) -> None:
        """Break the group if a rank waits for a message that no rank can post any more."""
        self.judge(stuck=len(self.waiting) + len(self.left) >= len(self.wires))

    def judge(self, *, stuck: bool) -> None:
        """Break the group if a rank waits for one that left, or if ranks wait and all are stuck."""
        for rank, each in sorted(self.waiting.items()):
            gone = next((peer for peer in each.missing() if peer in self.left), None)
            if gone is not None:
                where = f"rank {gone} left while rank {rank} awaited {each.what()}"
                self.break_for_all(gone, where)
        if self.waiting and stuck:
            self.break_for_all(None, f"all ranks wait for each other: {self.story()}")

    def story(self) -> str:
        """What each rank awaits."""
        waiting = sorted(self.waiting.items())
        return ", ".join(f"rank {rank} awaits {each.what()}" for rank, each in waiting)

    def break_for_all(self, culprit: int | None, text: str) -> Verdict:
        """Set the verdict, unless there is one, and wake everyone, in wires made by `sub` too."""
        if self.verdict is None:
            self.verdict = Verdict(culprit, text)
            self._unmet.clear()
            self.waiting.clear()
            for condition in self.wake:
                condition.notify_all()
            for ranks, part in self._parts:
                inside = ranks.index(culprit) if culprit in ranks else None
                part.break_for_all(inside, f"the group that it is a part of broke: {text}")
        return self.verdict


class InProcessWire(Group):
    """One rank's end of a group of threads."""

    _exchange: type[Exchange]

    def __init__(self, rank: int, group: Crew) -> None:
        super().__init__(rank, len(group.hosts), group.timeout, group.hosts[rank])
        self._group = group
        self._splits = 0
        self._closed = False
        self._thread: int | None = None  # that used it last

    def _post(self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int) -> Pending:
        group, exchange = self._group, self._exchange(self)
        self._thread = threading.get_ident()
        with group.wake[self.rank]:
            self._check_usable()
            for slot, (peer, into) in enumerate(recvs):
                exchange.results.append(into)
                data = into if isinstance(into, int) else bytes_of(into)
                self._begin(end := End(exchange, peer, data, slot))
                group.meet(end, channel)
            for peer, tensor in sends:
                self._begin(end := End(exchange, peer, bytes_of(tensor)))
                group.meet(end, channel)
        return exchange

    @abc.abstractmethod
    def _begin(self, end: End) -> None:
        """Prepare one end of a message before it is matched."""

    @abc.abstractmethod
    def _room(self, exchange: Exchange, size: int, room: int) -> Tensor:
        """Memory of `room` bytes for a receive without memory of its own; `size` will come."""

    @abc.abstractmethod
    def _deliver(self, source: End, target: End, size: int) -> None:
        """Note that the bytes of a message were copied: complete it now, or later."""

    def split(self, ranks: Sequence[int]) -> InProcessWire | None:
        distinct = chosen(self, ranks)
        with self._group.wake[self.rank]:
            self._check_usable()
            others, part = self._group.part(self._splits, distinct)
            self._splits += 1
            if others != distinct:
                raise self._fail(
                    self.rank,
                    f"rank {self.rank} makes a part of ranks {list(distinct)} where others "
                    f"make one of {list(others)}",
                )
        return None if self.rank not in distinct else part.wires[distinct.index(self.rank)]

    def abort(self, reason: str) -> None:
        self._fail(self.rank, f"rank {self.rank} gave up: {reason}")

    def fail(self, peer: int, text: str) -> WireError:
        return self._fail(peer, text)

    def close(self) -> None:
        group = self._group
        with group.wake[self.rank]:
            if self._closed:
                return
            self._closed = True
            group.left.add(self.rank)
            if group.waiting.pop(self.rank, None) is not None:  # in another thread
                group.wake[self.rank].notify_all()
            group.look()
        super().close()

    def _await(self, exchange: Exchange) -> None:
        """Wait until all messages of an exchange are complete."""
        group, rank, wake = self._group, self.rank, self._group.wake[self.rank]
        began = time.monotonic()
        until, slow = began + self.timeout, began + group.slow
        with wake:
            if exchange.left:
                self._check_usable()
                group.waiting[rank] = exchange
                group.look()
            try:
                while exchange.left:
                    self._check_usable()
                    if (now := time.monotonic()) >= min(until, slow):
                        culprit, why = self._late(exchange)
                        if now >= until:
                            what = f"rank {rank} awaited {exchange.what()} for {self.timeout:.1f} s"
                            raise self._fail(culprit, f"{what}: {why}")
                        watch.tell(rank, now - began, self._call(), why)
                        slow = math.inf
                    wake.wait(min(until, slow) - now)
            finally:
                self.traffic.waited += time.monotonic() - began
                group.waiting.pop(rank, None)

    def _late(self, exchange: Exchange) -> tuple[int | None, str]:
        """The rank at the end of the chain of waits (None: a circle), and what it does."""
        waiting, chain = self._group.waiting, [self.rank]
        while chain[-1] in waiting:
            missing = waiting[chain[-1]].missing()
            if not missing or missing[0] in chain:
                break
            chain.append(missing[0])
        culprit = chain[-1]
        if culprit in waiting:
            return None, self._group.story()
        other = self._group.wires[culprit]
        busy = other._call()[1]
        where = f"in {busy} and posts nothing" if busy else "outside weft"
        through = f", awaited by rank {chain[-2]}," if len(chain) > 2 else ""
        at = f", at {watch.standing(other._thread)}" if other._thread else ""
        return culprit, f"rank {culprit}{through} is {where}{at}"

    def _check_usable(self) -> None:
        """Raise what broke the wire, if anything did; with the lock held."""
        if self._closed:
            why = "this group is closed; wait for asynchronous calls before weft.shutdown()"
            raise WireError(f"rank {self.rank}: {why}", rank=self.rank)
        if self._group.verdict is not None:
            raise self._error(self._group.verdict)

    def _fail(self, culprit: int | None, text: str) -> WireError:
        """Break the wire for all ranks; the error to raise on this one."""
        with self._group.wake[self.rank]:
            return self._error(self._group.break_for_all(culprit, text))


def woken(hosts: Sequence[str] | None, size: int) -> list[threading.Condition]:
    """A condition for each rank, with one lock.

    Raises:
        WeftError: there are no ranks, or not one host for each.
    """
    if size < 1:
        raise WeftError(f"a group has at least one rank, not {size}")
    if hosts is not None and len(hosts) != size:
        raise WeftError(f"{len(hosts)} hosts for {size} ranks: give one for each")
    lock = threading.RLock()
    return [threading.Condition(lock) for _ in range(size)]


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a tensor as an array."""
    return np.asarray(memory_of(tensor))
