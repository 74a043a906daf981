"""Groups of ranks on a network that is only computed (`weft.wire.in_process.simulated`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..base.memory import Pool
from ..bootstrap.outcome import results
from ..group.group import Group
from ..wire.in_process.simulated import Network, SimulatedWire
from ..wire.link import Link
from .threads import Crew, names_of_hosts, on_groups

T = TypeVar("T")

_BLOCK = 64  # bytes of the smallest lease: a million pairs of ranks may have some each


def group(
    size: int,
    link: Link,
    timeout: float = 3600.0,
    *,
    hosts: Sequence[str] | None = None,
    within: Link | None = None,
) -> list[Group]:
    """The group of each of `size` simulated ranks, to be used by one thread each; see also `run`.

    Args:
        size: how many ranks.
        link: the figures of the network.
        timeout: seconds, real ones, that any one wait may last.
        hosts: the name of each rank's host; by default each has one of its own.
        within: the figures between ranks of one host; by default those of `link`.

    Raises:
        WeftError: there are no ranks, or not one host for each.
    """
    names = names_of_hosts(hosts or [f"simulated {rank}" for rank in range(size)], size)
    network = Network(names, link, within)
    memory = functools.partial(Pool, _BLOCK)
    crew = Crew(network.wires(), names, timeout, network.wires, memory)
    return [Group(session) for session in crew.sessions()]


def clock(group: Group) -> float:
    """Simulated seconds that have passed for a rank."""
    assert isinstance(group.wire, SimulatedWire)
    return group.wire.clock


def run(
    size: int,
    link: Link,
    body: Callable[..., T],
    *args: Any,
    hosts: Sequence[str] | None = None,
    within: Link | None = None,
) -> list[T]:
    """Run `body(group, *args)` on `size` simulated ranks; their results, in rank order.

    Inside the body `group` is also the default group. See `group` for the other arguments.

    Raises:
        Exception: what a rank raised; of several, the one that caused the others.

    Example:
        >>> import torch
        >>> def program(group):
        ...     before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        ...     group.post([(after, torch.ones(250))], [(before, torch.empty(250))]).wait()
        ...     return clock(group)
        >>> run(3, Link(alpha=1e-3, beta=1e-6, work=0), program)
        [0.002, 0.002, 0.002]
    """
    groups = group(size, link, hosts=hosts, within=within)
    return results(on_groups(groups, body, args, limit=None), "simulated")
