"""What an algorithm would take on a network that is only computed.

The real call, opening exchange and all, runs on simulated ranks (`simulated`) with real rows;
kernels report their arithmetic to the clocks. It backs `Cost`: a prediction that the simulation
does not bear out is wrong, or the schedule is.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import WeftError
from ..group.group import Group
from ..kernels import meter
from ..rows import Rows
from ..sparse import factors, run
from ..sparse.cost import Cost, Load
from ..sparse.link import set_link
from ..sparse.registry import ALGORITHMS
from ..sparse.request import Request
from ..wire.link import Link
from . import simulated


@dataclass(frozen=True, slots=True)
class Simulation:
    """What one call took; times in simulated seconds, from the first rank's start to the last's
    end.

    Attributes:
        algorithm: what ran.
        opening: of the opening exchange.
        seconds: of what came after it.
        messages, bytes: sent by the average rank, without those of the opening exchange.
        load: the sizes of the call, the union's the true one.
        cost: what the algorithm says it costs for that load.
        predicted: seconds that this cost takes on the link, whose queues never overflow here; to be
            held against `seconds`.
    """

    algorithm: str
    opening: float
    seconds: float
    messages: float
    bytes: float
    load: Load
    cost: Cost
    predicted: float


def simulate(
    algorithm: str,
    rows: Callable[[int], Rows],
    ranks: int,
    link: Link,
    *,
    op: str = "sum",
    wire_dtype: torch.dtype | None = None,
    hosts: Sequence[str] | None = None,
    within: Link | None = None,
) -> Simulation:
    """Run one sparse all-reduce on simulated ranks.

    Takes memory for the results of all ranks, and about a tenth of a millisecond for each message:
    64 ranks take seconds, 1,024 minutes.

    Args:
        algorithm: "auto" or a registered name.
        rows: what a rank brings.
        ranks: how many there are.
        link, hosts, within: see `weft.testing.simulated.group`.
        op: the reduction.
        wire_dtype: in which values travel, as in `weft.sparse_all_reduce`.

    Raises:
        WeftError: the algorithm is unknown or cannot serve these rows, or none ran, since there is
            one rank, or all rows fit in the opening exchange, which "auto" then uses.

    Example:
        >>> link = Link(alpha=50e-6, beta=8e-9, gamma=0.35e-9, work=10e-6)
        >>> rows = Rows(torch.arange(500), torch.ones(500, 64), height=1000)
        >>> done = simulate("doubling", lambda rank: rows, 8, link)
        >>> done.messages
        3.0
        >>> bool(abs(done.predicted / done.seconds - 1) < 0.15)
        True
    """

    def program(group: Group) -> tuple[float, float, int, int, str, Load]:
        set_link(group, link)
        with meter.metered(functools.partial(simulated.compute, group)):
            # two openings, of which the first is nothing but that: the difference is the schedule
            request = Request.of(rows(group.rank), op, algorithm, wire_dtype, None)
            with run.opened(group, request, "sparse_all_reduce") as opening:
                load = factors.factored(opening.call.load, factors.of_environment())
            opened = simulated.clock(group)
            before = group.traffic.messages, group.traffic.bytes
            done = run.reduced(group, request)
            count = group.traffic.messages - 2 * before[0], group.traffic.bytes - 2 * before[1]
            load = load.but(union=len(done.rows))
            return opened, simulated.clock(group), *count, done.algorithm, load

    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)  # a thousand ranks would each keep a pool of them
    gc.disable()  # millions of messages are under way: looking through them is a fourth of the time
    try:
        seen = simulated.run(ranks, link, program, hosts=hosts, within=within)
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
    opened, ended, messages, nbytes, (name, *_), (load, *_) = zip(*seen, strict=True)
    if name not in ALGORITHMS:
        raise WeftError(f"no algorithm ran ({name}): simulate more rows or ranks, or name one")
    opening, cost = max(opened), ALGORITHMS[name].cost(load)
    return Simulation(
        name,
        opening,
        max(ended) - 2 * opening,
        sum(messages) / ranks,
        sum(nbytes) / ranks,
        load,
        cost,
        _without_queues(cost).seconds(link),
    )


def _without_queues(cost: Cost) -> Cost:
    """The cost on links that keep whatever is sent to them, as simulated ones do."""
    slowest = None if cost.slowest is None else _without_queues(cost.slowest)
    return replace(cost, recovering=0.0, slowest=slowest)
