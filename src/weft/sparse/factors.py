"""Factors: the blocks of ranks in which `split` sums first, and what runs between these.

With factors (4, 2) eight ranks are two blocks of four. In a block each of four ranks sums a part
of the indices. Then the ranks that have the same *place* in their blocks have the same part: among
them runs another algorithm, with which the call is quickest (`stages`). At the end a block's four
ranks share what they got. One factor is a block of all ranks, with nothing to run between blocks.
More than two are a split between the blocks, by the rest of the factors.

A block is a host, where the factors are those of the hosts: then each row crosses a host's link
once, whatever ranks of the host have it, and all ranks of the host take part in that. Else
neighbouring ranks are a block. Where blocks have unequal numbers of ranks the first factor is that
of the smallest: the others' further ranks have no place. So 13 ranks may be 3x4, in blocks of four
and three ranks.

The blocks of a call, of all its stages, are in `Load.stages`. They are found here once, together:
whether factors mean hosts is asked in no other place. All ranks find them from the same load, or
are told factors by `WEFT_FACTORS`. On accelerators, and over wires in rounds or `exact`, they have
to be told: each stage takes rounds of its ranks alone, and what these take was never measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from ..errors import WeftError
from ..schedules.hosts import Hosts
from ..wire.link import WITHIN
from .cost import MANY, Blocks, Load, preferred
from .registry import ALGORITHMS, Algorithm, remembered

_SMALLEST = 1 << 16  # bytes of a chunk
_HANDING_ON = 4.0  # bytes merged in the time in which one is handed on within a host, if unknown


def factors_of(algorithm: str, load: Load) -> str:
    """Those with which an algorithm runs, as users write them: `4x2`; "" for all but `split`."""
    return "x".join(map(str, load.factors)) if algorithm == "split" else ""


def parse(text: str) -> tuple[int, ...]:
    """The factors that WEFT_FACTORS says. Raises WeftError."""
    try:
        factors = tuple(int(each) for each in text.split("x"))
    except ValueError:
        factors = ()
    if not factors or min(factors) < 1:
        raise WeftError(f"WEFT_FACTORS={text!r} is not a list of factors: e.g. 4x2")
    return factors


def of_environment() -> tuple[int, ...]:
    """The factors that WEFT_FACTORS says, the same on all ranks of a call; () if it is not set."""
    text = os.environ.get("WEFT_FACTORS")
    return parse(text) if text else ()


def factored(load: Load, factors: tuple[int, ...] = ()) -> Load:
    """The load with the factors that are preferred by their predictions (`cost.preferred`).

    Args:
        load: the sizes of the call, with the figures of its link.
        factors: to be taken if they fit the call's ranks.
    """
    flat = load.but(stages=())
    if factors == (load.ranks,):
        return flat
    if stages := _stages(load, factors):
        return load.but(stages=stages)
    if load.at_once:
        return flat
    return load.but(stages=_preferred_stages(flat.coarse))


@remembered
def _preferred_stages(flat: Load) -> tuple[Blocks, ...]:
    """The stages of the factors that are preferred, () if none are, for a load without stages."""
    trials = [flat, *_candidates(flat)]
    if len(trials) == 1:
        return ()
    costs = [ALGORITHMS["split"].cost(trial) for trial in trials]
    return trials[preferred(flat, costs, flat.ranks)].stages


def _candidates(load: Load) -> Iterator[Load]:
    """Loads with factors worth a look."""
    hosts = load.hosts
    if hosts is None or len(hosts.ranks) == load.ranks:
        if load.ranks < MANY:
            return
        factors = _nearly_square(load.ranks)
    else:
        factors = min(map(len, hosts.ranks)), len(hosts.ranks)
    stages = _stages(load, factors)
    if not stages:
        return
    in_two = load.but(stages=stages)
    yield in_two
    # Between the blocks runs a split, whose own cost asks for factors again. Of P ranks there are
    # about as many blocks as the root of P: 10,000 ranks ask for 100, these for 10, and 10 do not.
    further = factored(load_between_blocks(in_two)).stages
    if further:
        yield load.but(stages=(*stages, *further))


def _nearly_square(ranks: int) -> tuple[int, int]:
    """Ranks of a block, and blocks: about as many.

    A divisor that is not far below the root leaves no rank without a place.
    """
    root = math.isqrt(ranks)
    size = next(n for n in range(root, 0, -1) if ranks % n == 0)
    if 2 * size < root:
        size = root
    count = ranks // size
    return ranks // count, count


def _stages(load: Load, factors: Sequence[int]) -> tuple[Blocks, ...]:
    """The blocks of each stage that has these factors; () if some do not fit, or the op forbids it.

    An op that is a function must get its operands in the order of ranks, in every stage: the ranks
    of a block are neighbours there.
    """
    stages: list[Blocks] = []
    ranks = load.ranks
    hosts = load.hosts
    for stage, size in enumerate(factors[:-1], 1):
        blocks = _divided(ranks, hosts, size, math.prod(factors[stage:]))
        are_neighbours = [*chain(*blocks)] == [*range(ranks)]
        if not blocks or (load.in_order and not are_neighbours):
            return ()
        stages.append(blocks)
        ranks = len(blocks)
        hosts = _hosts_of(hosts, blocks)
    return tuple(stages)


def _divided(ranks: int, hosts: Hosts | None, size: int, count: int) -> Blocks:
    """Ranks in `count` blocks, the smallest of `size`; () if that cannot be.

    These are the hosts, if there are as many, the smallest of that size; else neighbours.
    """
    if hosts is not None and len(hosts.ranks) == count > 1:
        sizes = [len(block) for block in hosts.ranks]
        if min(sizes) == size and max(sizes) > 1:
            return hosts.ranks
    if min(size, count) < 2 or ranks // count != size:
        return ()
    bounds = [ranks * block // count for block in range(count + 1)]
    return tuple(tuple(range(low, high)) for low, high in pairwise(bounds))


def _hosts_of(hosts: Hosts | None, blocks: Blocks) -> Hosts | None:
    """The hosts of the first rank of each block; None if each has one of its own."""
    if hosts is None:
        return None
    of_blocks = Hosts.named([hosts.of[block[0]] for block in blocks])
    return None if len(of_blocks.ranks) == len(blocks) else of_blocks


def blocks_of(load: Load) -> Blocks:
    """The ranks of each block of the first stage, ascending; flat, all ranks are one block."""
    return load.stages[0] if load.stages else (tuple(range(load.ranks)),)


def are_near(load: Load, blocks: Blocks) -> bool:
    """Whether the ranks of each block share a host."""
    if load.hosts is None:
        return max(map(len, blocks)) == 1
    of = load.hosts.of
    return all(len({of[rank] for rank in block}) == 1 for block in blocks)


def load_in_block(load: Load) -> Load:
    """The load of the stages in a block: of the largest one, also for others: all choose alike."""
    blocks = blocks_of(load)
    ranks = max(map(len, blocks))
    total = round(ranks * load.mean)
    local = load.but(
        ranks=ranks,
        total=total,
        union=min(total, round(max(load.unions_of(blocks)))),
        hosts=None,
        rows_of_hosts=None,
        stages=(),
    )
    if not are_near(load, blocks):
        return local
    assert load.link is not None
    link = replace(load.link, beta=min(load.link.beta, WITHIN))
    hosts = Hosts((0,) * ranks)
    return local.but(hosts=hosts, link=link, gaps=False, chunk=_chunk_on_hosts(load, blocks))


def load_between_blocks(load: Load) -> Load:
    """The load of what runs among the ranks of one place: one rank of each block."""
    blocks = blocks_of(load)
    places = load.factors[0]
    rows = [own / places for own in load.unions_of(blocks)]
    union = round(load.union / places)
    assert load.link is not None
    sharing = 1
    chunk = load.chunk
    if are_near(load, blocks):
        sharing = places
        if not load.at_once:
            # the places of a host share its link, so a chunk of the same duration is shorter
            shorter = max(_SMALLEST, chunk >> (sharing.bit_length() - 1) // 2)
            chunk = min(shorter, _chunk_on_hosts(load, blocks))
    return load.but(
        ranks=len(blocks),
        total=max(round(sum(rows)), union),
        most=round(max(rows)),
        fewest=round(min(rows)),
        union=union,
        height=None,
        chunk=chunk,
        hosts=_hosts_of(load.hosts, blocks),
        link=replace(load.link, beta=load.link.beta * sharing),
        rows_of_hosts=None,
        summed=True,
        sharing=sharing,
        stages=load.stages[1:],
    )


def in_parts(load: Load, algorithm: Algorithm, inner: Load) -> bool:
    """Whether a block shares complete sums range by range, of one rank of a place each.

    The range of this rank is complete first, then that of its left neighbour, and so on. It is so
    within a host, where a message costs less than to hand a range on, which the others' bytes hide.

    Args:
        load: of the call.
        algorithm: between the blocks.
        inner: its load.
    """
    if load.at_once or algorithm.name != "split" or inner.stages:
        return False
    if not are_near(load, blocks_of(load)):
        return False
    link = load.link
    assert link is not None
    part = inner.union / inner.ranks * load.row
    return handing_on(load) * link.gamma * part > link.work


def _chunk_on_hosts(load: Load, blocks: Blocks) -> int:
    """Bytes of values sent at a time where blocks are hosts, and their stages overlap.

    With n chunks of what a place sums, an n-th of the time of the stages within the host does not
    overlap with the bytes of other hosts, and a rank sends n times as many messages: together least
    where n is the root of that time over the work of the messages.
    """
    if load.at_once:  # messages are not cut
        return load.chunk
    link = load.link
    assert link is not None
    places = load.factors[0]
    moved = (load.mean + load.union) * load.row * (places - 1) / places
    seconds = handing_on(load) * link.gamma * moved
    work = link.work * (places + len(blocks) - 2)
    count = math.sqrt(seconds / work) if work else math.inf
    part = load.union * load.row / places
    # to the nearest power: see `choice.fitted`
    nearest = 1 << max(0, round(math.sqrt(0.5) * part / max(1.0, count)) - 1).bit_length()
    return min(load.chunk, max(_SMALLEST, nearest))


def handing_on(load: Load) -> float:
    """Bytes merged in the time in which one is handed on within a host."""
    link = load.link
    assert link is not None
    return link.within / link.gamma if link.within else _HANDING_ON
