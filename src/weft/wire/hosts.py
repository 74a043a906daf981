"""Which ranks share a host: for schedules that keep messages off the network.

Ranks find out once for each group, by telling each other the names of their hosts, so all of them
see the same. A host is a machine and the network that its processes see: what connects containers
of one machine may well be a network. `WEFT_HOST` in a rank's environment names its host instead.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Group

_DIGEST = 16  # bytes in which a name travels


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


@functools.cache
def here() -> tuple[str, int]:
    """The name of this machine, and the number of its network namespace; 0: unknown."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return name, Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # /proc is hidden, or this is no Linux
        return socket.gethostname(), 0


def host_name() -> str:
    """The name of this machine, the same in all its containers and network namespaces."""
    return here()[0]


def digest_of(machine: str) -> bytes:
    """16 bytes that name this process's host (WEFT_HOST, or machine and network)."""
    name = os.environ.get("WEFT_HOST") or f"{machine} {here()[1]}"
    return hashlib.blake2b(name.encode(), digest_size=_DIGEST).digest()
