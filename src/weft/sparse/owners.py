"""Owners: the index range that each rank sums, cut so that all ranks have equal work.

The work of an owner grows with the rows that it receives (one from each rank that has the index),
and with the sums that it sends (one to each other rank). The sums are the larger part, so ranges
with equal numbers of input rows are not equal work: at the head of a Zipf distribution every rank
has the same few rows. Both numbers are estimated from the points in the combined header, bin by
bin, in integers or in operations that every machine rounds alike.

`SparseReduceScatter` sends all rows to their owners, each of which sums its range, as in
"SSAR_Split_allgather" of Renggli et al., "SparCML" (SC'19), section 5.3. Index lists go first, then
enough values to keep the link busy. An owner merges a chunk while later ones are on the wire.
Workspace is bounded, whatever P is. A rank that owns nothing receives nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..group.channels import VALUES
from ..group.pending import Pending
from ..wire.interface import Send
from .call import Call
from .canonical import CanonicalRows
from .header import Header, Longs
from .rows import Rows
from .stream import (
    IndexLists,
    Inflow,
    Source,
    chunks,
    merge_blocks,
    source_of,
    wait_all,
)

_BINS = 64
_LAST = (2**31 - 1, 2**63 - 1)  # the largest of each index dtype: a cut must fit in it, too


def balanced_bounds(header: Header, ranks: int, owners: int | None = None) -> list[int]:
    """Indices, ascending: owner r sums from bound r up to, not including, bound r + 1.

    All owners have equal work.

    Args:
        header: of all ranks together.
        ranks: how many there are.
        owners: how many own a range; None: every rank.
    """
    parts = owners or ranks
    count = len(header.points)
    if not count:
        return [0] * parts + [header.highest + 1]
    # bins: neighbouring ranges of indices, which have about as many points
    bins = min(_BINS, count)
    starts = np.arange(bins, dtype=np.int64) * count // bins
    end = header.highest + (header.highest not in _LAST)
    edges = np.append(header.points[starts], end)
    rows = np.add.reduceat(header.weights, starts)
    union = np.maximum(_expected_union(rows, np.diff(edges), ranks), 1)
    cuts = _equal_cuts(edges, rows + (ranks - 1) * union, parts)
    return [0, *cuts, header.highest + 1]


def _equal_cuts(edges: Longs, work: Longs, parts: int) -> list[int]:
    """Indices that cut bins, each of so much work, into parts of equal work."""
    done = np.concatenate([[0], np.cumsum(work)])
    result = []
    for part in range(1, parts):
        goal = int(done[-1]) * part // parts
        at = int(np.searchsorted(done, goal, side="right")) - 1
        into = (goal - int(done[at])) * int(edges[at + 1] - edges[at]) // int(work[at])
        result.append(int(edges[at]) + into)
    return result


def _expected_union(rows: Longs, width: Longs, ranks: int) -> Longs:
    """Rows expected in the union of ranks that throw theirs independently.

    Args:
        rows: of all ranks, in each range of indices.
        width: how many indices the range has.
        ranks: how many there are.
    """
    width = np.maximum(width, 1)
    missing = np.maximum(1.0 - rows / (width * float(ranks)), 0.0)
    nobody = np.ones_like(missing)
    power = ranks
    while power:  # by multiplications alone: pow() is not the same everywhere
        if power & 1:
            nobody = nobody * missing
        missing = missing * missing
        power >>= 1
    union: Longs = np.minimum(np.rint(width * (1.0 - nobody)).astype(np.int64), rows)
    return union


def slices_between(indices: Tensor, bounds: Sequence[int], highest: int) -> list[slice]:
    """The part of sorted indices between each bound and the next.

    Args:
        indices: sorted, unique; none is above `highest`.
        bounds: ascending; may be too large for the dtype of the indices, and for int64.
        highest: fits in the dtype of the indices.
    """
    keys = indices.new_tensor([max(0, min(bound, highest)) for bound in bounds])
    before = torch.searchsorted(indices, keys).tolist()  # how many indices
    ends = [
        indices.numel() if bound > highest else count
        for bound, count in zip(bounds, before, strict=True)
    ]
    return [slice(low, high) for low, high in pairwise(ends)]


class SparseReduceScatter:
    """Sends this rank's rows to their owners, and receives and sums the rows that this rank owns.

    What crosses the network, in this order:

    * `start`: index lists to their owners, and the first values;
    * `receive_lists`: the lists for this rank; from then on it knows its sums;
    * `send_rest`: the other values. What the caller sends before them does not wait behind them;
    * `sums`: values for this rank, chunk by chunk as they are merged.

    Attributes:
        union: of the received index lists, from `receive_lists` on.
    """

    union: kernels.Union

    def __init__(self, call: Call, rows: CanonicalRows, bounds: Sequence[int]) -> None:
        """
        Args:
            call: the call this is for.
            rows: this rank's.
            bounds: size + 1 integers, ascending, the same on every rank: rank r owns the indices
                from `bounds[r]` up to, not including, `bounds[r + 1]`.
        """
        group = call.group
        highest = call.header.highest
        self._call = call
        self._incoming = call.incoming  # by which rows travel
        self._rows = rows
        self._indices = rows.indices.to(call.wire_index)
        self._part = slices_between(self._indices, bounds, highest)
        self._rank = group.rank
        owns = [low < high and low <= highest for low, high in pairwise(bounds)]
        self._owners = [peer for peer in group.peers if owns[peer]]
        self._sources = group.peers if owns[group.rank] else []
        self._sent: list[Pending] = []

    def start(self) -> None:
        """Send each owner the list of its indices, and the first of its values."""
        lists = {peer: self._indices[self._part[peer]] for peer in [*self._owners, self._rank]}
        self._lists = IndexLists(self._call, lists, self._sources).start()
        ends = {peer: self._end_of_first(self._part[peer]) for peer in self._owners}
        self._send({peer: (self._part[peer].start, end) for peer, end in ends.items()})
        self._rest = {peer: (end, self._part[peer].stop) for peer, end in ends.items()}

    def _end_of_first(self, part: slice) -> int:
        """The row before which the rows of a part leave at once: a quarter, in whole chunks."""
        start: int = part.start
        stop: int = part.stop
        step = self._incoming.chunk_rows
        quarter = step * -(-(stop - start) // (4 * step))
        return min(start + quarter, stop)

    def receive_lists(self) -> None:
        """Wait for the lists of what this rank owns, and begin to receive the values."""
        lists = self._lists.wait()
        self._runs = [*lists.values()]
        self._inflows = {
            peer: Inflow(self._incoming, peer, len(lists[peer])).start() for peer in self._sources
        }
        self.union = kernels.union(self._runs)

    def send_rest(self) -> None:
        """Send all values that were not sent yet."""
        self._send(self._rest)

    def _send(self, parts: Mapping[int, tuple[int, int]]) -> None:
        """Send the rows of some parts, each to a peer."""
        sends: list[Send] = []
        for peer, (start, stop) in parts.items():
            values = self._rows.values[start:stop]
            sends += [(peer, chunk) for chunk in chunks(self._incoming, values)]
        self._sent.append(self._call.group.post(sends, (), VALUES))

    def sums(self, call: Call, out: Tensor) -> Iterator[tuple[int, int]]:
        """Merge the rows that this rank owns, in rank order: see `merge_blocks`."""
        sources: dict[int, Source] = {peer: inflow.pieces for peer, inflow in self._inflows.items()}
        sources[self._rank] = source_of(self._rows.values[self._part[self._rank]])
        in_order = [sources[rank] for rank in sorted(sources)]
        return merge_blocks(call, self._runs, in_order, self.union, out)

    def finish(self) -> None:
        """Wait until all is sent, and give back the memory; all sums must have been read."""
        wait_all(self._sent)
        self._lists.release()
        for inflow in self._inflows.values():
            inflow.release()


def reduce_to_owners(
    rows: CanonicalRows, call: Call, bounds: Sequence[int], made: Call | None = None
) -> Rows:
    """Send all rows to their owners; the sums of the indices that this rank owns.

    Args:
        rows: this rank's, canonical.
        call: the call this is for.
        bounds: see `SparseReduceScatter`.
        made: the same call as far as sums are made, if these are not complete ones.
    """
    made = made or call
    scatter = SparseReduceScatter(call, rows, bounds)
    scatter.start()
    scatter.receive_lists()
    scatter.send_rest()
    result = made.result_at(scatter.union.indices)
    for _ in scatter.sums(made, result.values):
        pass
    scatter.finish()
    return result
