"""Ranks as threads of one process: for tests, and for trying things without starting anything.

A message is one copy from the sender's tensor into the receiver's. This wire finds errors that real
transports do not: memory that a rank must not read holds garbage; it raises if a tensor changes
while it is being sent, and if a rank writes to received bytes that it may only read. A deadlock
raises at once, and the first rank that fails wakes all others.

Source of the idea: gloo's own tests run their ranks as threads over an in-memory store.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .exchanges import check_exchanges
from .in_process import Bytes, Crew, End, Exchange, InProcessWire, bytes_of, woken
from .interface import Lease

_GARBAGE = 0xA5  # what undefined bytes hold: not 0 or -1; in floating point small, and no NaN


def group(
    size: int,
    timeout: float = 5.0,
    *,
    hosts: Sequence[str] | None = None,
    device: bool = False,
) -> list[ThreadWire]:
    """The wires of one group of `size` ranks, to be used by one thread each.

    Args:
        size: how many ranks.
        timeout: seconds that any one wait may last.
        hosts: the name of each rank's machine, for code that treats those of one host alike.
        device: tensors of the CPU, `as_device`, go by exchanges that must meet (`exchanges`).

    Raises:
        WeftError: there are no ranks, or not one host for each.

    Example:
        >>> import torch
        >>> first, second = group(2)
        >>> sent = first.post([(1, torch.tensor([1.0, 2.0]))])
        >>> second.post((), [(0, torch.empty(2))]).wait()
        [tensor([1., 2.])]
        >>> sent.wait()
        []
    """
    wake = woken(hosts, size)
    wires = Crew(hosts or ["threads"] * size, timeout, wake, ThreadWire).wires
    for wire in wires if device else ():
        check_exchanges(wire)
    return wires


class _Exchange(Exchange):
    """The messages of one post, checked for memory that must not change.

    Attributes:
        sent: for each send the peer, the bytes, and a copy of them.
        leases: the memory of receives without a tensor.
    """

    wire: ThreadWire

    def __init__(self, wire: ThreadWire) -> None:
        super().__init__(wire)
        self.sent: list[tuple[int, Bytes, Bytes]] = []
        self.leases: list[Lease] = []
        self._came: list[Bytes] = []  # copies of what is leased

    def wait(self) -> list[Tensor]:
        results, rank = super().wait(), self.wire.rank
        while self.sent:
            peer, data, before = self.sent.pop()
            if not np.array_equal(before, data):
                raise self.wire._fail(
                    rank,
                    f"rank {rank} changed a tensor that it was sending to rank {peer}, before it "
                    "had waited for it",
                )
        if not self._came:
            self._came = [bytes_of(lease.tensor).copy() for lease in self.leases]
        return results

    def release(self) -> None:
        came, self._came, rank = self._came, [], self.wire.rank
        for lease, before in zip(self.leases, came, strict=False):
            if not np.array_equal(before, bytes_of(lease.tensor)):
                raise self.wire._fail(
                    rank,
                    f"rank {rank} wrote to bytes that it had received, which may be the sender's "
                    "own",
                )
        while self.leases:
            self.leases.pop().release()


class ThreadWire(InProcessWire):
    """One rank's end of a group made by `group`."""

    _exchange = _Exchange

    def _begin(self, end: End) -> None:
        if isinstance(end.data, int):
            return
        if end.slot >= 0:
            end.data.fill(_GARBAGE)
        else:
            assert isinstance(end.exchange, _Exchange)
            end.exchange.sent.append((end.peer, end.data, end.data.copy()))

    def _room(self, exchange: Exchange, size: int, room: int) -> Tensor:
        assert isinstance(exchange, _Exchange)
        exchange.leases.append(lease := self.lease(room))
        return lease.tensor

    def _deliver(self, source: End, target: End, size: int) -> None:
        assert not isinstance(target.data, int)
        target.data[size:] = _GARBAGE
        for end in (source, target):
            end.exchange.finish(end)
