"""The sizes of one call: what every rank knows once it is open, in whole numbers.

The headers of the opening exchange say them, and the group which ranks share a host. The rule
(`choose`) reads them, and so do the schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..schedules.hosts import Hosts
from .bound import rows_of_average

_SPARE = 64 << 20  # bytes of workspace allowed besides three times the rows of the rank with fewest
_FEW = 1 << 18  # bytes that come from all ranks together, below which no ring is worth its hops


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call, the same on every rank.

    Attributes:
        ranks: P.
        total: K, rows of all ranks, each rank's duplicates removed.
        most: rows of the rank with most.
        fewest: rows of the rank with fewest.
        height: rows of the dense tensor, or None if nothing is known of it.
        row: bytes of a row's values.
        partial_row: bytes of a row's values while only some ranks' are added.
        index: bytes of an index on the wire, 4 or 8.
        end: indices lie below this.
        compiled: all ranks have machine code, which `holders` and packed index lists are made of.
        chunk: bytes of values sent at a time.
        gaps: index lists are written as gaps, in few bits.
        hosts: which ranks share a host; None is one host for each.
        summed: the rows that ranks have are sums of some ranks each, of an earlier stage.
    """

    ranks: int
    total: int
    most: int
    fewest: int
    height: int | None
    row: int
    partial_row: int
    index: int = 4
    end: int = 0
    compiled: bool = True
    chunk: int = 1 << 18
    gaps: bool = False
    hosts: Hosts | None = None
    summed: bool = False

    def but(self, **changes: Any) -> Sizes:
        """These sizes, with some of them changed."""
        return Sizes(**{**vars(self), **changes})

    @property
    def incoming(self) -> int:
        """Bytes of the values of a row that a rank has, and sends to who sums it."""
        return self.partial_row if self.summed else self.row

    @property
    def mean(self) -> float:
        """k̄, rows of the average rank."""
        return self.total / self.ranks

    @property
    def union(self) -> tuple[int, int]:
        """U, rows of the result: the fewest and the most that they can be."""
        return self.most, min(self.total, self.end)

    def bound(self, union: int) -> float:
        """Bytes that the average rank must receive, an index counted as 4.

        Args:
            union: U, rows of the result.
        """
        return rows_of_average(self.total, union, self.ranks) * (self.row + 4)

    @property
    def bound_to_one(self) -> float:
        """The least bound of a call that delivers each row of the result to one rank only."""
        return (self.total - self.union[1]) / self.ranks * (self.row + 4)

    @property
    def most_workspace(self) -> int:
        """Bytes of workspace that a call may use beside its result, if the rule chooses."""
        return 3 * self.fewest * (self.row + self.index) + _SPARE

    def sends_directly(self, nbytes: float) -> bool:
        """Whether an all-gather sends directly to all ranks instead of round the ring.

        So it does where all ranks share a host, and if little comes altogether. Else one stream
        enters each host, and one leaves it.

        Args:
            nbytes: of each rank, on average; the same number on every rank.
        """
        return self.on_one_host or (self.ranks - 1) * nbytes < _FEW

    # hosts

    @property
    def ranks_of_hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, ascending."""
        if self.hosts is None:
            return tuple((rank,) for rank in range(self.ranks))
        return self.hosts.ranks

    @property
    def local_ranks(self) -> int:
        """How many ranks every host has, at least."""
        return min(map(len, self.ranks_of_hosts))

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to share one host."""
        return self.hosts is not None and len(self.hosts.ranks) == 1

    @property
    def begins_in_hosts(self) -> bool:
        """Whether `split` sums within hosts first."""
        return self.hosts is not None and 1 < len(self.hosts.ranks) < self.ranks
