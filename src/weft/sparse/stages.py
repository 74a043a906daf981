"""The stages of `split`: the blocks of ranks in which it sums first, and what runs between these.

In a block each of some ranks sums a part of the indices. Then the ranks that have the same *place*
in their blocks have the same part: among them runs another algorithm. At the end a block's ranks
share what they got. Where blocks have unequal numbers of ranks there are as many places as the
smallest block has ranks: the others' further ranks have no place.

Where ranks share hosts, a block is a host: each row then crosses a host's link once, whatever ranks
of the host have it, and all ranks of the host take part in that. Of many ranks that share none,
neighbours are a block, about as many as there are blocks: that saves messages. Between those runs a
split again. What follows from the numbers of ranks and from their hosts is the same on any link.
"""

from __future__ import annotations

import math
from itertools import chain, pairwise
from typing import NamedTuple

from ..schedules.hosts import Hosts
from .choose import MANY, first_served, lines_apart
from .sizes import Blocks, Sizes

_SMALLEST = 1 << 16  # bytes of a chunk
_OVERLAP = 12  # chunks of a place's sums: one in so many overlaps with nothing on the host
_PART = 1 << 17  # bytes of complete sums, from which it pays that each rank hands its part on


def in_stages(sizes: Sizes) -> Sizes:
    """The sizes with the blocks in which a split sums first; none if it is flat."""
    return sizes.but(blocks=_blocks(sizes))


def _blocks(sizes: Sizes) -> Blocks:
    if sizes.staying:  # each stage would have the host wait
        return ()
    if sizes.hosts is not None and max(sizes.ranks_of_hosts) > 1:
        blocks = sizes.hosts.ranks
    elif sizes.ranks > MANY:
        blocks = _nearly_square(sizes.ranks)
    else:
        return ()
    # a function must get its operands in the order of ranks, in every stage
    are_neighbours = [*chain(*blocks)] == [*range(sizes.ranks)]
    return () if len(blocks) == 1 or (sizes.in_order and not are_neighbours) else blocks


def _nearly_square(ranks: int) -> Blocks:
    """About as many blocks of neighbours as each has ranks.

    A divisor that is not far below the root leaves no rank without a place.
    """
    root = math.isqrt(ranks)
    size = next(n for n in range(root, 0, -1) if ranks % n == 0)
    count = ranks // (size if 2 * size >= root else root)
    bounds = [ranks * block // count for block in range(count + 1)]
    return tuple(tuple(range(low, high)) for low, high in pairwise(bounds))


def sizes_in_block(sizes: Sizes) -> Sizes:
    """The sizes of the stages in a block: of the largest one, also for others: all send alike."""
    ranks = max(map(len, sizes.blocks))
    local = sizes.but(ranks=ranks, total=_share(sizes, ranks), hosts=None, blocks=())
    if not _are_near(sizes):
        return local
    return local.but(hosts=Hosts((0,) * ranks), gaps=False, chunk=_chunk_on_hosts(sizes))


class Between(NamedTuple):
    """What runs among the ranks of one place, one rank of each block.

    Attributes:
        name: of the algorithm that runs.
        sizes: that it has.
        in_parts: whether a block shares complete sums range by range, of one rank of a place each:
            the range of this rank is complete first, then that of its left neighbour, and so on. So
            it is within a host, where a message costs less than to hand a range on.
    """

    name: str
    sizes: Sizes
    in_parts: bool


def between(sizes: Sizes) -> Between:
    """What runs between the blocks; the same on every rank."""
    blocks = sizes.blocks
    count = len(blocks)
    places = places_in(blocks)
    inner = sizes.but(
        ranks=count,
        total=-(-sizes.total // places),
        height=None,
        hosts=None,
        summed=True,
        blocks=(),
    )
    if not _are_near(sizes):  # it is there to save messages
        return Between("split", inner, in_parts=False)
    inner = inner.but(chunk=_chunk_on_hosts(sizes))
    one_of_each = sizes.but(ranks=count, total=_share(sizes, count), hosts=None)
    fitting = (line for line in lines_apart(one_of_each) if line.algorithm != "doubling")
    name = first_served(inner, fitting).algorithm
    part = min(inner.total, inner.places) // count * inner.row
    in_parts = name == "split" and not _blocks(inner) and part > _PART
    return Between(name, inner, in_parts)


def places_in(blocks: Blocks) -> int:
    """How many places blocks have: ranks of the smallest."""
    return min(map(len, blocks))


def _share(sizes: Sizes, ranks: int) -> int:
    """Rows of so many ranks, of the average one."""
    return -(-sizes.total * ranks // sizes.ranks)


def _are_near(sizes: Sizes) -> bool:
    """Whether the ranks of each block share a host."""
    return sizes.hosts is not None and sizes.blocks == sizes.hosts.ranks


def _chunk_on_hosts(sizes: Sizes) -> int:
    """Bytes of values sent at a time where blocks are hosts, and their stages overlap."""
    sums = min(sizes.total, sizes.places) // places_in(sizes.blocks) * sizes.row
    nearest = 1 << (sums // _OVERLAP).bit_length()
    return min(sizes.chunk, max(_SMALLEST, nearest))
