"""The rule: which algorithm a sparse all-reduce runs.

It reads what every rank knows once a call is open: how many ranks there are and which of them share
a host, how many rows they bring and of how many bytes, how high the table is. All of that is whole
numbers, which every machine computes alike, and none of it is measured. So the same call takes the
same algorithm on every rank, link and day.

The first of these lines that fits a call decides. A line whose algorithm cannot serve the call, or
would need more workspace than a call may use, is passed over; the last one always serves: `holders`
is for ranks that all have machine code. Tensors that weft's wire does not carry, and functions as
op, come to no line: `plain` serves them.

1. All rows fit in the opening exchange: `eager`. They are there already.
2. All ranks share a host: `gather` up to `NEAR` bytes of rows of all ranks, else `split`.
3. Hosts have several ranks: `split`, first within the hosts. Between them runs what the lines below
   say of one rank of each host.
4. There are two ranks: `gather`. Each receives what the other has, and no more.
5. A row has up to `NARROW` bytes: `gather` where up to `MANY` ranks bring up to `SLIGHT` bytes of
   rows together, else `split`. Index lists to all would cost more than they save.
6. Up to `LITTLE` bytes of rows a rank, and up to `MANY` ranks: `doubling`, in log2 P messages.
7. Ranks bring at least twice as many rows as the table has: `split`, for the lists' sake again.
8. Up to `SEVERAL` ranks: `holders`, which receives no value beyond the bound.
9. Else `split`.

Measured in 30 cases on one host and on 2 to 8 hosts of 100 Mbit/s to 1 Gbit/s, before line 5 had
its `gather`, this takes 1.046 times as long as the best algorithm (geometric mean), at worst 1.38
times: few rows with much overlap, between hosts at 100 Mbit/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..base.errors import conclusion
from .registry import ALGORITHMS, ALONE, EAGER
from .relay import relay_memory
from .sizes import Sizes

NEAR = 8 << 20
"""Bytes of rows of all ranks, which `gather` merges on each of them: on one host of 4 ranks `split`
took 1.3 to 1.7 times as long below it, and `gather` 1.1 to 2.1 times above it."""

LITTLE = 512 << 10
"""Bytes of rows a rank: between 4 and 8 hosts at 1 Gbit/s `holders` took 1.4 to 1.6 times as long
below it, and `doubling` 1.1 to 1.5 times above it."""

NARROW = 8
"""Bytes of a row, of which the index is at least a third."""

SLIGHT = 2 << 20
"""Bytes of narrow rows of all ranks: of 4 and 8 hosts at 100 Mbit/s and 1 Gbit/s, below it
`doubling` took 0.9 to 1.9 times as long as `gather`, and `split` 0.9 to 1.3 times; above it `split`
took 0.8 to 0.95 times."""

SEVERAL = 32
"""Ranks: of 8, `holders` is the best; of more it was simulated."""

MANY = 16
"""Ranks: of more, `doubling` is forecast to take as long as other algorithms without overlap, and
up to twice as long with it."""


class Line(NamedTuple):
    """A line of the rule that fits a call.

    Attributes:
        algorithm: that it names.
        why: why it fits.
    """

    algorithm: str
    why: str = ""


def lines(sizes: Sizes) -> Iterator[Line]:
    """The lines from the second on that fit a call, in their order."""
    if sizes.on_one_host:
        if sizes.total * sizes.row <= NEAR:
            yield Line("gather", f"ranks of one host bring up to {NEAR >> 20} MiB of rows")
        yield Line("split", "all ranks share a host")
    elif len(sizes.ranks_of_hosts) < sizes.ranks:
        yield Line("split", "ranks share hosts")
    yield from lines_apart(sizes)


def lines_apart(sizes: Sizes) -> Iterator[Line]:
    """Those for ranks of which each has a host of its own."""
    if sizes.ranks == 2:
        yield Line("gather", "there are two ranks")
    if sizes.row <= NARROW:
        if sizes.ranks <= MANY and sizes.total * sizes.row <= SLIGHT:
            yield Line(
                "gather", f"up to {MANY} ranks bring up to {SLIGHT >> 20} MiB of narrow rows"
            )
        yield Line("split", f"a row has up to {NARROW} bytes")
    if sizes.ranks <= MANY and sizes.total * sizes.row <= LITTLE * sizes.ranks:
        yield Line("doubling", f"up to {MANY} ranks bring up to {LITTLE >> 10} KiB of rows each")
    if sizes.height is not None and sizes.total >= 2 * sizes.height:
        yield Line("split", "ranks bring at least twice as many rows as the table has")
    if sizes.ranks <= SEVERAL:
        yield Line("holders", f"there are up to {SEVERAL} ranks")
    yield Line("split", f"there are more than {SEVERAL} ranks")


def between_hosts(sizes: Sizes) -> tuple[Line, Sizes]:
    """What `split` runs among ranks of all hosts, one of each, and the sizes that it has.

    All ranks of a host take part, each with its part of the indices: the lines see one rank of each
    host that has them all.
    """
    hosts = len(sizes.ranks_of_hosts)
    of_each = -(-sizes.total // sizes.local_ranks)
    among = sizes.but(ranks=hosts, total=of_each, height=None, hosts=None, summed=True)
    of_hosts = sizes.but(ranks=hosts, total=-(-sizes.total * hosts // sizes.ranks), hosts=None)
    fitting = (line for line in lines_apart(of_hosts) if line.algorithm != "doubling")
    return first_served(among, fitting), among


def first_served(sizes: Sizes, fitting: Iterator[Line]) -> Line:
    """The first line whose algorithm can serve a call within its workspace; the last one always."""
    return next(line for line in fitting if serves(sizes, line.algorithm))


def serves(sizes: Sizes, algorithm: str) -> bool:
    """Whether an algorithm can serve a call, and needs no more workspace than the rule allows."""
    if algorithm == "holders" and not sizes.compiled:
        return False
    # that of the others is bounded whatever P is, or little by the lines that name them
    is_bounded = algorithm not in ("gather", "holders")
    return is_bounded or workspace(sizes, algorithm) <= sizes.most_workspace


def workspace(sizes: Sizes, algorithm: str) -> int:
    """Bytes that `gather` or `holders` needs at most beside a rank's own rows and the result."""
    lists = 3 * sizes.total * sizes.index  # all indices, and their places in the union
    if algorithm == "gather":
        return (sizes.total - sizes.fewest) * sizes.incoming + lists  # rows of all others
    # in chunks of any length: what the rule takes does not follow from the link
    relayed = relay_memory(sizes.but(chunk=1 << 62), sizes.most)
    return 2 * sizes.most * sizes.incoming + relayed + lists  # rows that are summed elsewhere


def chosen(sizes: Sizes, algorithm: str, *, is_eager: bool) -> Line:
    """What runs in a call, and why.

    Args:
        sizes: of the call.
        algorithm: that was asked for, or "auto".
        is_eager: whether all rows came in the opening exchange.

    Raises:
        WeftError: the algorithm that was asked for cannot serve this call; the same on every rank.
    """
    if sizes.ranks == 1:
        return Line(ALONE, "the group has one rank")
    if is_eager:
        return Line(EAGER, "all rows fit in the opening exchange")
    if algorithm == "auto":
        return first_served(sizes, lines(sizes))
    if algorithm == "holders" and not sizes.compiled:
        able = ", ".join(sorted(ALGORITHMS.keys() - {algorithm}))
        raise conclusion(
            f"algorithm {algorithm} is made of machine code, and some rank has none, as "
            f"`weft doctor` says: use auto, or one of {able}"
        )
    return Line(algorithm, "it was asked for")
