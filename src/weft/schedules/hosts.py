"""Which ranks share a host: for schedules that keep messages off the network.

Ranks find out once for each group, by telling each other the names of their hosts, so all of them
see the same. `wire.machine` says what a host is called.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ..group.group import Group
from ..wire.machine import digest_of


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
        >>> hosts.in_order
        False
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

    @property
    def in_order(self) -> bool:
        """Whether the ranks of each host are neighbours."""
        return list(self.of) == sorted(self.of)


_known: weakref.WeakKeyDictionary[Group, Hosts] = weakref.WeakKeyDictionary()


def hosts_of(group: Group) -> Hosts:
    """The hosts of a group's ranks; the first call on a group is collective."""
    if group not in _known:
        set_hosts(group, Hosts.named(group.all_gather_bytes(digest_of(group.host), bytes)))
    return _known[group]


def set_hosts(group: Group, hosts: Hosts) -> None:
    """Set the hosts of a group's ranks, the same on every rank."""
    _known[group] = hosts
