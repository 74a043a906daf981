"""split: the owner of an index range sums it, then shares the sums; in one stage, or in several.

A sparse reduce-scatter followed by a sparse all-gather, each row received once for each rank that
holds it, and once more for each that does not own it: within 1 + 1/P of the bound. The index
ranges are cut so that all owners have equal work, also on skewed data (`owners`).

Index sets go to the owners first. An owner merges them while the first values arrive, and tells
everybody the indices of its sums; so every rank knows the size of the result, and every row's
place in it, early. Owners merge chunk by chunk into their part of the result; each finished block
goes round the ring straight from there, and is received where it belongs. Workspace is bounded,
whatever P is.

In stages (`stages`) the owners are those of a block, such as a host. What they sum is then summed
among the ranks of one place, one of each block, by the algorithm that the rule takes for them: its
rows are the block's sums, which leave as they are made, and its result goes straight to
the ranks of the block. Nothing is agreed on again: the headers of the call say what to expect. Sums
of one block travel unrounded; complete sums are divided and rounded once, and shared in the dtype
of the rows.

Complete sums pass through four files on their way to the block. Each calls the next, with numbers
of rows that begin to count at different rows:

    gather, holders, split     what runs between the blocks, in the group of a place
      | call.ready(stop, rank)       rows before `stop` of the part that `rank` of that group sums;
      |                              rank None: of all sums of the place
    call.Call
      | onward.ready(stop, rank)     the same
    split._Onward
      | share.send(stop, number)     rows before `stop` of all sums of the place; `number`: of the
      |                              run that this part is, in the order in which runs are complete
    stream.Share
      | ring.send(values)            rows that were not sent yet; whole chunks, run after run
    stream.Ring                  to the others of the block

A flat split has the lower half alone: its own merge calls `share.send`. If it runs between blocks
its `Share` also calls `call.ready`, at the top, for its own part and for those that it receives.

Best for overlapping rows or many ranks: the general case.

"SSAR_Split_allgather" of Renggli et al., "SparCML" (SC'19), section 5.3; balanced owners as in Li
and Hoefler, "Near-optimal sparse allreduce" (PPoPP'22), section 3; stages as in Zhao and Canny,
"Kylix" (ICPP 2014), section 4, and with hosts first as in Goyal et al., "Accurate, Large Minibatch
SGD" (2017), section 4.
"""

from __future__ import annotations

from torch import Tensor

from ...base.memory import typed
from .. import stages
from ..call import Call
from ..header import Header
from ..local_rows import LocalRows, SummedRows
from ..owners import (
    SparseReduceScatter,
    balanced_bounds,
    bounds_of_equal_sums,
    header_of_blocks,
    owned_parts,
)
from ..registry import ALGORITHMS, algorithm
from ..rows import Rows
from ..stream import Share


@algorithm
def split(rows: LocalRows, call: Call) -> Rows:
    call = call.with_sizes(stages.in_stages(call.sizes))
    if call.sizes.blocks:
        return _summed_in_stages(rows, call)
    return _summed_by_all(rows, call)


def _summed_by_all(rows: LocalRows, call: Call) -> Rows:
    bounds = balanced_bounds(call.header, call.group.size)
    scatter = SparseReduceScatter(call, rows, bounds)
    share = Share(call)

    # to the owners: index lists, and the first values
    scatter.start()
    scatter.receive_lists()

    # what will be summed here is told to all, ahead of the bulk of the values
    share.send_list(scatter.indices)
    scatter.send_rest()

    # now the result's size is known, and the place of everybody's sums in it; these go to all
    sums = share.start(share.receive_lists())
    for _, stop in scatter.sums(call, sums):
        share.send(stop)

    result = share.finish()
    scatter.finish()
    share.release()
    return result


def _summed_in_stages(rows: LocalRows, call: Call) -> Rows:
    blocks = call.sizes.blocks
    number = next(each for each, ranks in enumerate(blocks) if call.group.rank in ranks)
    block = blocks[number]
    place = block.index(call.group.rank)
    of_block = _among(call, block)
    bounds = _bounds(call, block)
    scatter = SparseReduceScatter(of_block, rows, bounds)

    # to the ranks of the block that have a place: index lists, and all values
    scatter.start()
    scatter.receive_lists()
    scatter.send_rest()

    # what these sum is summed with the other blocks, and shared in the block as it is complete
    share = Share(call, of_block)
    between = _Between(call, bounds)
    onward = _Onward(share, between, place, number)
    if place < stages.places_in(blocks):
        _sum_between(call, scatter, between, onward)
    else:
        # this rank sums nothing: its list is empty, and it only receives
        onward.announce(scatter.indices)

    result = share.finish()
    scatter.finish()
    share.release()
    return result


def _among(call: Call, block: tuple[int, ...]) -> Call:
    """The call among the ranks of a block.

    Its sizes are those of the largest block, for all blocks: so all send alike. Who needs the
    number of this block's ranks asks the group.
    """
    return call.among(call.group.subset(block), stages.sizes_in_block(call.sizes))


def _bounds(call: Call, block: tuple[int, ...]) -> list[int]:
    """The ranges of a block's ranks; those that have no place own nothing."""
    bounds = bounds_of_equal_sums(call.header, call.group.size, stages.places_in(call.sizes.blocks))
    return bounds + bounds[-1:] * (len(block) + 1 - len(bounds))


class _Between:
    """What runs between the blocks.

    Attributes:
        call: the call.
        blocks: the ranks of each.
        bounds: the ranges of a block's ranks.
        inner: the algorithm among the ranks of a place, and the sizes that it has.
    """

    def __init__(self, call: Call, bounds: list[int]) -> None:
        self.call = call
        self.blocks = call.sizes.blocks
        self.bounds = bounds
        self.inner = stages.between(call.sizes)

    def header(self, place: int) -> Header:
        """Of the ranks of a place together."""
        span = self.bounds[place], self.bounds[place + 1]
        return header_of_blocks(self.call.header, self.call.group.size, len(self.blocks), span)

    def runs(self, place: int, indices: Tensor, block: int) -> list[slice]:
        """The sums of a place in the order in which they are complete at its rank of a block.

        Args:
            place: whose sums.
            indices: of these sums.
            block: the number of the block.
        """
        if not self.inner.in_parts:
            return [slice(0, len(indices))]
        count = len(self.blocks)
        parts = owned_parts(self.header(place), count, indices)
        return [parts[(block - step) % count] for step in range(count)]


def _sum_between(
    call: Call, scatter: SparseReduceScatter, between: _Between, onward: _Onward
) -> None:
    """Sum what the ranks of one place have of their blocks."""
    place = scatter.owner
    of_place = call.group.subset([ranks[place] for ranks in between.blocks])
    inner = call.among(of_place, between.inner.sizes, between.header(place), onward)
    indices = scatter.indices
    with call.group.lease(len(indices) * call.sizes.partial) as memory:
        sums = Rows(indices, typed(memory, (len(indices), *call.row_shape), call.partial))
        merged = scatter.sums(inner.incoming, sums.values)
        ALGORITHMS[between.inner.name](SummedRows(sums, merged), inner)
        onward.finish()


class _Onward:
    """The sums of a place on their way to the ranks of the block."""

    def __init__(self, share: Share, between: _Between, place: int, block: int) -> None:
        """
        Args:
            share: among the ranks of the block.
            between: what makes the sums.
            place: of this rank.
            block: the number of its block.
        """
        self._share = share
        self._between = between
        self._place = place
        self._block = block
        self._runs: list[slice] = []  # of this place's sums, in the order in which they are sent

    def announce(self, indices: Tensor) -> Tensor:
        """Tell the block which sums come from this rank, and begin to receive those of the others.

        Index lists cross the block's links, and are waited for.

        Returns:
            Where this rank's sums belong in the result.
        """
        self._share.send_list(indices)
        lists = self._share.receive_lists()
        runs = [self._between.runs(place, each, self._block) for place, each in enumerate(lists)]
        self._runs = runs[self._place]
        return self._share.start(lists, runs)

    def result_at(self, indices: Tensor) -> Rows:
        return Rows(indices, self.announce(indices), self._between.call.height)

    def ready(self, stop: int, rank: int | None) -> None:
        if rank is None:
            self._share.send(stop)
        elif self._between.inner.in_parts:
            number = (self._block - rank) % len(self._runs)
            self._share.send(self._runs[number].start + stop, number)
        # else `finish` sends all: parts are not complete in the order in which the block gets them

    def finish(self) -> None:
        """Send what is left: all is complete."""
        for number, run in enumerate(self._runs):
            self._share.send(run.stop, number)
