"""What an algorithm would take on a network that is only computed.

The real call, opening exchange and all, runs on simulated ranks (`simulated`) with real rows. A
thousand ranks fit in a process: so it shows what no test of real ranks could, their messages, their
bytes, and that none waits for another for ever.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..base.errors import WeftError
from ..group.group import Group
from ..sparse import run
from ..sparse.registry import ALGORITHMS
from ..sparse.request import Request
from ..sparse.rows import Rows
from ..sparse.sizes import Sizes
from ..sparse.stages import in_stages
from ..sparse.traffic import Traffic
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
        sizes: of the call; of `split` with the blocks in which it summed first.
        union: rows of the result.
        traffic: what the algorithm says of messages and bytes; None: nothing.
    """

    algorithm: str
    opening: float
    seconds: float
    messages: float
    bytes: float
    sizes: Sizes
    union: int
    traffic: Traffic | None


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
        >>> link = Link(alpha=50e-6, beta=8e-9, work=10e-6)
        >>> rows = Rows(torch.arange(500), torch.ones(500, 64), height=1000)
        >>> done = simulate("doubling", lambda rank: rows, 8, link)
        >>> done.messages, done.traffic.messages
        (3.0, 3)
    """

    def program(group: Group) -> tuple[float, float, int, int, str, Sizes, int]:
        # two openings, of which the first is nothing but that: the difference is the schedule
        request = Request.of(rows(group.rank), op, algorithm, wire_dtype)
        with run.begin(group, request, "sparse_all_reduce"):
            pass
        opened = simulated.clock(group)
        before = group.traffic.messages, group.traffic.bytes
        done = run.reduced(group, request)
        count = group.traffic.messages - 2 * before[0], group.traffic.bytes - 2 * before[1]
        ended = simulated.clock(group)
        return opened, ended, *count, done.algorithm, done.sizes, len(done.rows)

    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)  # a thousand ranks would each keep a pool of them
    gc.disable()  # millions of messages are under way: looking through them is a fourth of the time
    try:
        seen = simulated.run(ranks, link, program, hosts=hosts, within=within)
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
    opened, ended, messages, nbytes, (name, *_), (sizes, *_), (union, *_) = zip(*seen, strict=True)
    if name not in ALGORITHMS:
        raise WeftError(f"no algorithm ran ({name}): simulate more rows or ranks, or name one")
    if name == "split":
        sizes = in_stages(sizes)
    opening, traffic = max(opened), ALGORITHMS[name].traffic
    return Simulation(
        name,
        opening,
        max(ended) - 2 * opening,
        sum(messages) / ranks,
        sum(nbytes) / ranks,
        sizes,
        union,
        None if traffic is None else traffic(sizes, union),
    )
