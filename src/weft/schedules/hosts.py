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


def row_and_column(group: Group) -> tuple[tuple[int, ...], list[int]] | None:
    """The ranks of this rank's host, ascending, and those that have its place, one on each host.

    None, on all ranks: there is one host, or hosts have one rank, or not as many each.

    Example:
        >>> from weft.testing import threads
        >>> row_and_column(threads.group(4, hosts=["red", "blue", "red", "blue"])[1])
        ((1, 3), [0, 1])
    """
    rows = hosts_of(group).ranks
    if len(rows) == 1 or len(rows[0]) == 1 or len({*map(len, rows)}) > 1:
        return None
    row = next(row for row in rows if group.rank in row)
    place = row.index(group.rank)
    return row, [ranks[place] for ranks in rows]


@functools.lru_cache(maxsize=64)  # calls ask again and again
def _named(names: tuple[str, ...]) -> Hosts:
    return Hosts.named(names)
