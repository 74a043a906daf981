"""Which ranks share a host: for schedules that keep messages off the network.

Ranks tell each other the names of their hosts when they join, so all of them see the same.
`rendezvous.machine` says what a host is called.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..group.group import Group


@dataclass(frozen=True)
class Hosts:
    """The ranks of a group by host.

    Attributes:
        of: for each rank the number of its host; hosts are numbered in the order of their lowest
            rank.

    Example:
        >>> hosts = Hosts.named(["red", "blue", "red", "blue", "red"])
        >>> hosts.ranks
        ((0, 2, 4), (1, 3))
    """

    of: tuple[int, ...]

    @classmethod
    def named(cls, names: Sequence[object]) -> Hosts:
        """From the name of each rank's host."""
        number = {name: count for count, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(number[name] for name in names))

    @functools.cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, ascending."""
        found: list[list[int]] = [[] for _ in range(max(self.of) + 1)]
        for rank, host in enumerate(self.of):
            found[host].append(rank)
        return tuple(map(tuple, found))


def hosts_of(group: Group) -> Hosts:
    """The hosts of a group's ranks; nothing is sent."""
    return _named(group.hosts)


@dataclass(frozen=True)
class Grid:
    """The ranks of a group on hosts that have as many each, and several.

    Attributes:
        rows: the ranks of each host, ascending.
        row: those of this rank's host.
    """

    rows: tuple[tuple[int, ...], ...]
    row: tuple[int, ...]

    def column(self, rank: int) -> list[int]:
        """The ranks that have the place of this one of `row`, one on each host."""
        place = self.row.index(rank)
        return [ranks[place] for ranks in self.rows]


def grid_of(group: Group) -> Grid | None:
    """The grid that hosts and ranks are; None, on all ranks: there is one host, or hosts have one
    rank, or not as many each.

    Example:
        >>> from weft.testing import threads
        >>> group = threads.group(4, hosts=["red", "blue", "red", "blue"])[3]
        >>> grid = grid_of(group)
        >>> grid.row, grid.column(1)
        ((1, 3), [0, 1])
    """
    rows = hosts_of(group).ranks
    if len(rows) == 1 or len(rows[0]) == 1 or len({*map(len, rows)}) > 1:
        return None
    return Grid(rows, next(row for row in rows if group.rank in row))


@functools.lru_cache(maxsize=64)  # calls ask again and again
def _named(names: tuple[str, ...]) -> Hosts:
    return Hosts.named(names)
